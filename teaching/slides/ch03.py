"""Drawings for chapter 3: what is kept, dropped and recomputed, and what goes wrong."""

import torch
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import nn

from minitron import cost
from minitron.model.recompute import apply_selective_recompute, recompute
from teaching.figures_style import (
    BAND,
    BLACK,
    CATEGORY_COLOR,
    GREY,
    SERIES,
    STYLE,
    WORK_COLOR,
    pale,
)
from teaching.lab import ch03 as lab
from teaching.slides.models import H100
from teaching.slides.shapes import PREDICTED, arrow, box, frame, outline, page, write

GPT3, LENGTH = cost.PUBLISHED["GPT-3 175B"], 2048
ACTIVATION = CATEGORY_COLOR["activation"]
POLICIES = ("none", "selective", "full")


def block_bytes(policy: str) -> int:
    """Return what a block of GPT-3 keeps of one sequence, with materialized attention."""
    return cost.activation_bytes_per_layer(GPT3, 1, LENGTH, 2, "materialized", policy)


@rc_context(STYLE)
def question() -> Figure:
    """Draw an H100's memory above one sequence's activations, a cell per block of GPT-3."""
    figure, axes = page(7, 2.3)
    total = cost.activation_bytes(GPT3, 1, LENGTH, attention="materialized")
    left, inch = 1.2, 5.0 / total
    write(axes, (left - 0.1, 0.55), "an H100", ha="right")
    box(axes, (left, 0.2, H100.memory_bytes * inch, 0.7), color=BAND)
    end = left + H100.memory_bytes * inch
    write(axes, (end + 0.08, 0.55), f"{H100.memory_bytes / 1e9:.1f} GB")
    axes.plot([end, end], [0.9, 1.95], color=BLACK, linestyle="--", linewidth=1.2, zorder=3)

    write(axes, (left - 0.1, 1.4), "one\nsequence", ha="right")
    block = block_bytes("none")
    for index in range(GPT3.num_layers):
        box(axes, (left + index * block * inch, 1.05, block * inch, 0.7), color=ACTIVATION)
    outline(axes, (left, 1.05, total * inch, 0.7), GREY)
    write(axes, (left + total * inch + 0.08, 1.4), f"{total / 1e9:.0f} GB")
    text = f"a cell: the activations of one of {GPT3.num_layers} blocks"
    write(axes, (left + total * inch, 2.05), text, GREY, ha="right")
    return figure


@rc_context(STYLE)
def policies() -> Figure:
    """Draw which of a block's activations each policy keeps, to scale; dotted is recomputed."""
    figure, axes = page(7, 3.1)
    left, inch = 1.0, 3.9 / block_bytes("none")
    ends = [block_bytes(policy) * inch for policy in reversed(POLICIES)]
    parts = list(zip([0.0, *ends], ends, strict=False))
    names = ("", "the rest", "attention's S x S matrices")
    write(axes, (left, 0.25), "activations of one block", GREY)
    write(axes, (5.95, 0.25), "all of GPT-3", GREY, ha="right")
    write(axes, (6.95, 0.25), "FLOPs", GREY, ha="right")
    training = cost.training_flops_per_token(GPT3, LENGTH)
    for row, policy in enumerate(POLICIES):
        top = 0.5 + 0.8 * row
        write(axes, (left - 0.1, top + 0.3), policy, ha="right", weight="bold")
        for index, (start, end) in enumerate(parts):
            bounds = (left + start, top, end - start, 0.6)
            if index <= len(POLICIES) - 1 - row:
                box(axes, bounds, names[index] if row == 0 else "", ACTIVATION, 9.5)
            else:
                frame(axes, bounds, "recomputed", 10)
        total = cost.activation_bytes(GPT3, 1, LENGTH, 2, "materialized", policy)
        added = cost.recompute_flops_per_token(GPT3, LENGTH, policy) / training
        write(axes, (5.95, top + 0.3), f"{total / 1e9:.1f} GB", ha="right")
        write(axes, (6.95, top + 0.3), f"+{added:.1%}", ha="right")
    arrow(axes, (left + ends[0] / 2, 3.02), (left + ends[0] / 2, 2.73))
    write(axes, (left + 0.16, 2.93), "the block's input", GREY)
    return figure


@rc_context(STYLE)
def masks() -> Figure:
    """Draw a dropout mask, the new one that recomputation draws, and the one it draws again."""
    rows, columns, cell, probability = 6, 10, 0.17, GPT3.dropout
    generator = torch.Generator().manual_seed(0)
    state = generator.get_state()

    def draw() -> torch.Tensor:
        return torch.rand(rows, columns, generator=generator) >= probability

    first, second = draw(), draw()
    generator.set_state(state)
    figure, axes = page(7, 2.2)
    for index, (title, mask, below) in enumerate(
        (
            ("forward pass", first, "the loss uses this mask"),
            ("recomputed by hand", second, "the gradient, a new one"),
            ("generator restored", draw(), "the gradient, the same"),
        )
    ):
        left = 0.3 + 2.35 * index
        write(axes, (left + 0.85, 0.2), title, ha="center", weight="bold")
        cells = {
            (row, column): (left + column * cell, 0.45 + row * cell, cell, cell)
            for row in range(rows)
            for column in range(columns)
        }
        for place, bounds in cells.items():
            box(axes, bounds, color=ACTIVATION if mask[place] else "white")
        for place, bounds in cells.items():
            if mask[place] != first[place]:
                outline(axes, bounds, SERIES[1])
        outline(axes, (left, 0.45, columns * cell, rows * cell), GREY)
        write(axes, (left + 0.85, 1.7), below, ha="center")
    text = "white: dropped, red frame: not as in the forward pass"
    write(axes, (3.5, 2.03), text, GREY, ha="center")
    return figure


@rc_context(STYLE)
def side_effects() -> Figure:
    """Draw a step of batch normalization, plain and recomputed, with its state after each pass."""
    figure, axes = page(7, 2.9)
    places = {"forward": 1.45, "recompute": 3.1, "backward": 4.75}
    for row, (name, run) in enumerate(
        (("plain", lambda norm, x: norm(x)), ("recomputed", recompute))
    ):
        top = 0.2 + 1.35 * row
        norm, x = nn.BatchNorm1d(1), torch.tensor([[0.0], [1.0], [2.0]], requires_grad=True)
        loss = run(norm, x).square().sum()
        after_forward = _state(norm)
        loss.backward()
        write(axes, (1.3, top + 0.3), name, ha="right", weight="bold")
        _pass(axes, (places["forward"], top), "forward", "forward", after_forward)
        if _state(norm) != after_forward:
            _pass(axes, (places["recompute"], top), "forward", "forward again", _state(norm))
            arrow(axes, (places["forward"] + 1.35, top + 0.3), (places["recompute"], top + 0.3))
            arrow(axes, (places["recompute"] + 1.35, top + 0.3), (places["backward"], top + 0.3))
        else:
            arrow(axes, (places["forward"] + 1.35, top + 0.3), (places["backward"], top + 0.3))
        _pass(axes, (places["backward"], top), "backward", "backward", "")
        gradient = f"gradient\n{norm.weight.grad.item():.2f}"
        write(axes, (6.2, top + 0.3), gradient, linespacing=1.3)
    return figure


def _state(norm: nn.BatchNorm1d) -> str:
    """Return the statistics of batch normalization in words."""
    batches = int(norm.num_batches_tracked)
    return f"running mean {norm.running_mean.item():.2f}\nbatches seen {batches}"


def _pass(axes: Axes, corner: tuple[float, float], kind: str, name: str, state: str) -> None:
    """Draw a pass and, below it, the state that it leaves."""
    box(axes, (*corner, 1.35, 0.6), name, WORK_COLOR[kind])
    place = (corner[0] + 0.675, corner[1] + 0.86)
    write(axes, place, state, size=10.5, ha="center", linespacing=1.3)


@rc_context(STYLE)
def early_stopping() -> Figure:
    """Draw attention's core in the recomputation: it ends before PV, whose inputs then exist."""
    figure, axes = page(7, 1.75)
    top, height = 0.5, 0.6
    write(axes, (0.35, top + 0.3), "Q, K", size=12, ha="center")
    arrow(axes, (0.65, top + 0.3), (0.95, top + 0.3))
    box(axes, (0.95, top, 1.2, height), "$QK^T$", WORK_COLOR["matmul"], 12)
    arrow(axes, (2.15, top + 0.3), (2.45, top + 0.3))
    box(axes, (2.45, top, 1.5, height), "softmax, dropout", WORK_COLOR["elementwise"])
    arrow(axes, (3.95, top + 0.3), (4.3, top + 0.3))
    box(axes, (4.3, top + 0.1, 0.6, 0.4), "P", ACTIVATION, 12)
    write(axes, (4.6, 0.25), "the last tensor to be saved: stop", ha="center", weight="bold")
    arrow(axes, (4.9, top + 0.3), (5.25, top + 0.3))
    frame(axes, (5.25, top, 1.2, height), "$PV$", 12)
    for x, text in (
        (1.55, "half of the FLOPs"),
        (3.2, "few FLOPs"),
        (5.85, "the other half: skipped"),
    ):
        write(axes, (x, top + height + 0.28), text, GREY, ha="center")
    return figure


@rc_context(STYLE)
def claim() -> Figure:
    """Draw the paper's two numbers for selective recomputation beside the counted ones."""
    square = 5 * GPT3.num_heads * LENGTH / GPT3.width
    head = 1 + 51_200 / (12 * GPT3.width * GPT3.num_layers)
    equation_7, equation_8 = (head + LENGTH / (n * GPT3.width) for n in (6, 3))
    formula = cost.recompute_flops_per_token(GPT3, LENGTH, "selective")
    formula /= cost.training_flops_per_token(GPT3, LENGTH)
    plain, stopped = (
        lab.layer_without_values(GPT3, LENGTH, policy)[1]
        for policy in (lambda model: None, apply_selective_recompute)
    )
    figure = Figure(figsize=(7.0, 3.1), layout="constrained")
    left, right = figure.subplots(2, 1, height_ratios=(2, 3))
    saved = {
        "claimed": square / (34 + square),
        "counted": 1 - block_bytes("selective") / block_bytes("none"),
    }
    added = {
        "claimed": equation_8 / equation_7 - 1,
        "forward matmuls, once more": formula,
        "with early stopping": stopped / plain - 1,
    }
    for axes, title, rows, digits in (
        (left, "activation bytes saved", saved, 3),
        (right, "FLOPs added", added, 2),
    ):
        axes.set_title(title, size=12, loc="left")
        for row, (name, share) in enumerate(rows.items()):
            color = GREY if name == "claimed" else SERIES[0]
            axes.barh(row, share, 0.7, color=pale(color), **PREDICTED)
            axes.text(share, row, f"  {100 * share:.{digits}g} %", va="center")
        axes.set(xlim=(0, 1.15 * max(rows.values())), ylim=(len(rows) - 0.5, -0.5), xticks=[])
        axes.set_yticks(range(len(rows)), list(rows))
        axes.tick_params(axis="y", length=0, labelcolor=BLACK)
        axes.spines[["left", "bottom"]].set_visible(False)
    return figure
