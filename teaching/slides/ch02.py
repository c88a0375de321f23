"""Drawings for chapter 2: the training state, its lifetimes, the leak, the allocator."""

from dataclasses import replace

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from minitron import cost
from minitron.config import ModelConfig
from teaching.figures import memory_bars, plain_bytes
from teaching.figures_memory import phase_strip
from teaching.figures_style import (
    BLACK,
    CATEGORY_COLOR,
    GREY,
    SERIES,
    STYLE,
    canvas,
    count_bytes,
    ink,
    pale,
)
from teaching.lab.allocator import MIB, CachingAllocator, OutOfDeviceMemory
from teaching.slides.models import LLAMA_8B
from teaching.slides.shapes import PREDICTED, arrow, box, frame, hatched, outline, page, write

MODEL = ModelConfig(
    family="gpt",
    vocab_size=256,
    num_layers=12,
    width=96,
    num_heads=4,
    num_kv_heads=4,
    ffn_width=384,
    max_sequence_length=512,
)
"""The chapter's model, in float32."""
BATCH_SIZE, LENGTH = 8, 128
PARAMETERS = 4 * cost.num_parameters(MODEL)
ACTIVATIONS = cost.activation_bytes(MODEL, BATCH_SIZE, LENGTH, 4)
LOGITS = 4 * BATCH_SIZE * LENGTH * MODEL.vocab_size


@rc_context(STYLE)
def bytes_per_parameter() -> Figure:
    """Draw each recipe's 16 to 20 bytes per parameter as a row of boxes, one byte wide each."""
    byte, left, lane = 0.2, 1.8, 0.55
    figure, axes = page(7, 0.45 + lane * len(cost.RECIPES))
    write(axes, (left, 0.25), "bytes per parameter", GREY)
    write(axes, (6.95, 0.25), "Llama 3 8B", GREY, ha="right")
    for row, (name, recipe) in enumerate(cost.RECIPES.items()):
        top, x = 0.45 + lane * row, left
        write(axes, (left - 0.1, top + 0.21), name, size=10.5, ha="right")
        for part, size, kind in (
            ("weight", recipe.parameter, "parameter"),
            ("gradient", recipe.gradient, "gradient"),
            ("master", recipe.master, "optimizer state"),
            ("moments", recipe.optimizer_state, "optimizer state"),
        ):
            text = f"{part} {size}" if size * byte > 0.07 * len(part) + 0.16 else str(size)
            if size:
                box(axes, (x, top, size * byte, 0.42), text, CATEGORY_COLOR[kind], 9.5)
            x += size * byte
        gigabytes = cost.model_state_bytes(LLAMA_8B, recipe) / 1e9
        write(axes, (x + 0.08, top + 0.21), str(recipe.total), weight="bold")
        write(axes, (6.95, top + 0.21), f"{gigabytes:.0f} GB", ha="right")
    return figure


def peak(with_optimizer: bool, with_gradients: bool) -> dict[str, float]:
    """Return the bytes alive where forward turns into backward, by kind."""
    return {
        "parameter": PARAMETERS,
        "gradient": PARAMETERS * with_gradients,
        "optimizer state": 2 * PARAMETERS * with_optimizer,
        "activation": ACTIVATIONS,
        "temporary": 2 * LOGITS,
    }


def second_step() -> Figure:
    """Draw the peaks of two steps beside a device of 90 MB: only the second does not fit."""
    steps = {"first step": peak(False, False), "second step": peak(True, False)}
    figure = memory_bars({}, steps, limit=90e6, limit_label="beyond 90 MB")
    total = next(text for text in figure.axes[0].texts if text.get_text().startswith("85."))
    total.set_position((24, 0))  # not across the edge of the band
    return figure


def micro_batches() -> Figure:
    """Draw the peak with 1, 2 and 4 micro-batches: only the second adds to it, the gradients."""
    counts = {"1 micro-batch": 1, "2 micro-batches": 2, "4 micro-batches": 4}
    return memory_bars({}, {name: peak(True, count > 1) for name, count in counts.items()})


# When each kind of bytes is alive; the end of each phase of two steps, in arbitrary units
FORWARD, BACKWARD, OPTIMIZER = 3.0, 3.0, 2.0
STEP = FORWARD + BACKWARD + OPTIMIZER
BACK, UPDATE = FORWARD, FORWARD + BACKWARD
LIVES = {  # corners of each kind's outline: time, and the share of the most that is ever held
    "parameter": [(0, 1), (2 * STEP, 1)],
    "gradient": [
        (start + time, share)
        for start in (0, STEP)
        for time, share in ((BACK, 0), (UPDATE, 1), (STEP, 1), (STEP, 0))
    ],
    "optimizer state": [(UPDATE, 0), (UPDATE, 1), (2 * STEP, 1)],
    "activation": [
        (start + time, share)
        for start in (0, STEP)
        for time, share in ((0, 0), (BACK, 1), (UPDATE, 0))
    ],
}


@rc_context(STYLE)
def lifetimes() -> Figure:
    """Draw when each kind of bytes is alive in two steps, a lane per kind."""
    figure, axes = canvas(height=3.3)
    most = peak(True, True)
    for row, (kind, corners) in enumerate(reversed(LIVES.items())):
        times, shares = zip(*corners, strict=True)
        tops = [row + 0.78 * share for share in shares]
        axes.fill_between(times, row, tops, color=CATEGORY_COLOR[kind], linewidth=0)
        axes.axhline(row, color=GREY, linewidth=0.8)
        name = f"{kind}\n{plain_bytes(most[kind])}"
        axes.text(-0.25, row + 0.38, name, ha="right", va="center", linespacing=1.3)
    phases = [
        (phase, start + begin, start + end)
        for start in (0, STEP)
        for phase, begin, end in (
            ("forward", 0, BACK),
            ("backward", BACK, UPDATE),
            ("optimizer", UPDATE, STEP),
        )
    ]
    phase_strip(axes, phases)
    for _, start, _ in phases[1:]:
        axes.axvline(start, color=GREY, linewidth=0.6, linestyle=":", zorder=0)
    axes.set(xlim=(0, 2 * STEP), ylim=(0, len(LIVES)), yticks=[])
    axes.set_xticks([UPDATE, STEP, 2 * STEP])
    axes.set_xticklabels(
        ["Adam allocates\nits moments", "zero_grad", "zero_grad"], color=BLACK, size=10
    )
    for label, side in zip(axes.get_xticklabels(), ("center", "left", "right"), strict=True):
        label.set_ha(side)
    axes.spines[["left", "bottom"]].set_visible(False)
    return figure


@rc_context(STYLE)
def feed_forward() -> Figure:
    """Draw the tensors of a feed-forward layer: three are saved, each for one derivative."""
    figure, axes = page(7, 3.2)
    heights = {"B S D": 0.5, "B S F": 0.5 * MODEL.ffn_width / MODEL.width}
    tensors = (("x", "B S D"), ("y", "B S F"), ("z", "B S F"), ("out", "B S D"))
    operators = ("up", "GELU", "down")
    width, step, middle = 1.0, 1.92, 1.42
    for index, (name, shape) in enumerate(tensors):
        left, height = 0.12 + step * index, heights[shape]
        bounds = (left, middle - height / 2, width, height)
        if name == "out":
            frame(axes, bounds, name, 13)
            below = f"{shape}\nnot saved"
        else:
            box(axes, bounds, name, CATEGORY_COLOR["activation"], 13)
            values = BATCH_SIZE * LENGTH * (MODEL.width if shape == "B S D" else MODEL.ffn_width)
            below = f"{shape}\n{plain_bytes(4 * values)} saved"
        write(axes, (left + width / 2, 2.62), below, ha="center", va="top", linespacing=1.3)
    for index, operator in enumerate(operators):
        start = 0.12 + step * index + width
        end = start + step - width
        arrow(axes, (start + 0.06, middle), (end - 0.06, middle))
        write(axes, ((start + end) / 2, middle - 0.16), operator, ha="center", weight="bold")
        needs = f"needs {tensors[index][0]}"
        write(axes, ((start + end) / 2, middle + 0.24), needs, GREY, ha="center")
    return figure


@rc_context(STYLE)
def doubling() -> Figure:
    """Draw by what factor activations and training state grow when one size is doubled."""
    wide = {"width": 2 * MODEL.width, "ffn_width": 2 * MODEL.ffn_width}
    deep = {"num_layers": 2 * MODEL.num_layers}
    cases = {
        "batch": ({}, 2, 1),
        "sequence": ({}, 1, 2),
        "width": (wide, 1, 1),
        "depth": (deep, 1, 1),
    }
    figure, axes = canvas(height=3.3)
    axes.axvline(1, color=GREY, linewidth=1, linestyle=":")
    for row, (change, more, longer) in enumerate(cases.values()):
        model = replace(MODEL, **change)
        activations = cost.activation_bytes(model, more * BATCH_SIZE, longer * LENGTH, 4)
        state = 4 * cost.num_parameters(model)
        for offset, kind, name, factor in (
            (-0.19, "activation", "activations", activations / ACTIVATIONS),
            (0.19, "parameter", "training state", state / PARAMETERS),
        ):
            color = CATEGORY_COLOR[kind]
            axes.barh(row + offset, factor, 0.36, color=pale(color), **PREDICTED)
            axes.text(factor + 0.04, row + offset, f"x {factor:.2f}", va="center", size=10)
            if row == 0:
                axes.text(0.05, row + offset, name, va="center_baseline", size=10)
    axes.set(xlim=(0, 4.3), ylim=(len(cases) - 0.5, -0.5))
    axes.set_yticks(range(len(cases)), [f"twice the {name}" for name in cases])
    axes.tick_params(axis="y", length=0, labelcolor=BLACK)
    axes.spines["left"].set_visible(False)
    axes.set_xlabel("bytes, relative to the original model and batch")
    return figure


@rc_context(STYLE)
def leak() -> Figure:
    """Draw what is held after each batch: only the validation loop keeps every batch's graph."""
    figure = Figure(figsize=(7.0, 3.2), layout="constrained")
    panels = figure.subplots(1, 2, sharey=True)
    state = 4 * PARAMETERS
    for axes, title, keeps in zip(
        panels, ("training loop", "validation loop"), (False, True), strict=True
    ):
        axes.set_title(title, size=12)
        for batch in range(1, 5):
            _stack(axes, batch, state, 0, "state", GREY)
            for graph in range(batch if keeps else 0):
                base = state + graph * ACTIVATIONS
                _stack(axes, batch, ACTIVATIONS, base, f"graph {graph + 1}")
            total = state + keeps * batch * ACTIVATIONS
            axes.text(batch, total + 5e6, f"{total / 1e6:.1f}", ha="center", size=10)
        axes.set_xlabel("batches so far")
        axes.set_xticks(range(1, 5))
    count_bytes(panels[0].yaxis, 360e6, "held")
    panels[0].set_ylim(0, 360e6)
    return figure


def _stack(
    axes: Axes,
    batch: int,
    height: float,
    base: float,
    text: str,
    color: str = CATEGORY_COLOR["activation"],
) -> None:
    """Draw an estimated part of a column of bytes, from `base` on up."""
    face = pale(color)
    axes.bar(batch, height, 0.86, base, color=face, **PREDICTED)
    center = (batch, base + height / 2)
    axes.text(*center, text, ha="center", va="center_baseline", size=10, color=ink(face))


@rc_context(STYLE)
def pinned() -> Figure:
    """Draw two devices with 150 MiB free: whole segments can be returned, pinned halves cannot."""
    figure, axes = page(7, 3.3)
    write(axes, (0.1, 0.2), "nothing ran before: a request for 40 MiB succeeds", weight="bold")
    allocator = half_freed(0)
    _draw_segments(axes, 0.4, allocator, "before")
    _draw_segments(axes, 1.0, allocator, "after", allocator.allocate(40 * MIB))

    title = "after a batch of longer sequences: the same request fails"
    write(axes, (0.1, 1.96), title, weight="bold")
    allocator = half_freed(5)
    try:
        allocator.allocate(40 * MIB)
    except OutOfDeviceMemory:
        _draw_segments(axes, 2.16, allocator, "before")
        free, left = allocator.largest_free // MIB, (320 * MIB - allocator.reserved) // MIB
        text = f"largest free block {free} MiB, left on the device {left} MiB"
        write(axes, (0.85, 2.86), text)
    text = "numbers: MiB of live tensors; hatched: free; black frame: a segment"
    write(axes, (0.1, 3.15), text, GREY, 10)
    return figure


def half_freed(earlier: int) -> CachingAllocator:
    """Return a device of 320 MiB after `earlier` blocks of 60 MiB, with half of ten of 30 MiB."""
    allocator = CachingAllocator(320 * MIB)
    for block in [allocator.allocate(60 * MIB) for _ in range(earlier)]:
        allocator.free(block)
    for block in [allocator.allocate(30 * MIB) for _ in range(10)][::2]:
        allocator.free(block)
    return allocator


def _draw_segments(
    axes: Axes,
    top: float,
    allocator: CachingAllocator,
    name: str,
    request: object = None,
) -> None:
    """Draw a row of segments, framed; live blocks are filled, free ones hatched."""
    inch, left, height = 0.163 / (10 * MIB), 0.85, 0.48
    write(axes, (0.1, top + height / 2), name, GREY)
    for segment in allocator.segments:
        start = left
        for block in segment:
            bounds = (left, top, block.size * inch, height)
            color = SERIES[1] if block is request else SERIES[0]
            if block.live:
                box(axes, bounds, str(block.size // MIB), color, 10.5)
            else:
                hatched(axes, bounds)
            left += block.size * inch
        outline(axes, (start, top, left - start, height))
        left += 0.05
