"""Drawings for chapter 1: the matmuls of a step, the weight of a token, GPUs for a month."""

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from minitron import cost
from minitron.measure.clock import DENSE_BF16_PEAKS
from teaching.figures_style import (
    BLACK,
    CATEGORY_COLOR,
    GREY,
    SERIES,
    STYLE,
    WORK_COLOR,
    canvas,
)
from teaching.slides.models import LLAMA_8B, LLAMA_8B_HOURS
from teaching.slides.shapes import box, page, write

# Lengths of a drawn matrix, in inches: tokens, and the widths of a layer's input and output
TOKENS, IN, OUT = 0.5, 0.95, 0.7
ACTIVATION, WEIGHT, GRADIENT, PASSING = (
    CATEGORY_COLOR[kind] for kind in ("activation", "parameter", "gradient", "temporary")
)


@rc_context(STYLE)
def three_matmuls() -> Figure:
    """Draw a layer's matmuls: one in the forward pass, two in the backward pass, 2P FLOPs each."""
    figure, axes = page(7, 3.0)
    rows = {
        "Y": (
            ("Y", OUT, TOKENS, ACTIVATION),
            ("X", IN, TOKENS, ACTIVATION),
            ("$W^T$", OUT, IN, WEIGHT),
        ),
        "dX": (("dX", IN, TOKENS, PASSING), ("dY", OUT, TOKENS, PASSING), ("W", IN, OUT, WEIGHT)),
        "dW": (
            ("dW", IN, OUT, GRADIENT),
            ("$dY^T$", TOKENS, OUT, PASSING),
            ("X", IN, TOKENS, ACTIVATION),
        ),
    }
    purposes = ("for the next layer", "for the layer below", "for the optimizer")
    for row, (matrices, purpose) in enumerate(zip(rows.values(), purposes, strict=True)):
        middle = (0.55, 1.5, 2.3)[row]
        phase = "backward" if row else "forward"
        box(axes, (0.1, middle - 0.2, 1.05, 0.4), phase, WORK_COLOR[phase])
        for center, matrix in zip((1.85, 3.15, 4.4), matrices, strict=True):
            _draw_matrix(axes, (center, middle), *matrix)
        write(axes, (2.52, middle), "=", size=14, ha="center")
        write(axes, (3.8, middle), "×", size=14, ha="center")
        write(axes, (5.15, middle), purpose, GREY, 10.5)
        write(axes, (6.95, middle), "2P", ha="right", weight="bold")
    write(axes, (6.95, 2.83), f"FLOPs per token: {2 * len(rows)}P", ha="right", weight="bold")
    return figure


def _draw_matrix(
    axes: Axes, center: tuple[float, float], name: str, width: float, height: float, color: str
) -> None:
    """Draw a matrix to scale around `center`."""
    left, top = center[0] - width / 2, center[1] - height / 2
    box(axes, (left, top, width, height), name, color, 12)


@rc_context(STYLE)
def token_weights() -> Figure:
    """Draw micro-batches as boxes of equal area: few tokens wide is much weight tall."""
    figure, axes = canvas(height=2.5)
    counts = [256, 256, 256, 32]
    total, left = sum(counts), 0
    for index, count in enumerate(counts):
        weight = total / len(counts) / count  # of a token in a mean of means, over its share
        color = SERIES[1] if count < max(counts) else WORK_COLOR["forward"]
        axes.bar(left, weight, count, align="edge", color=color, edgecolor="white")
        if count == max(counts):
            text = f"micro-batch {index}\n{count} tokens\n{weight:.2f}"
            axes.text(left + count / 2, 1.25, text, ha="center", va="bottom", size=10)
        else:
            name = f"micro-batch {index}, short texts\n{count} tokens, {weight:.2f}"
            axes.text(left - 12, weight, name, ha="right", va="top", color=SERIES[1], size=10)
        left += count
    axes.axhline(1, color=BLACK, linestyle="--", linewidth=1.2)
    axes.annotate(
        "one batch",
        (total, 1),
        textcoords="offset points",
        xytext=(6, 0),
        va="center",
        annotation_clip=False,
    )
    axes.set(xlim=(0, total), ylim=(0, 6.6), xlabel="tokens", ylabel="weight of a token")
    return figure


@rc_context(STYLE)
def gpus_for_a_month() -> Figure:
    """Draw the H100s that train Llama 3 8B in 30 days at three MFUs, a square each."""
    figure, axes = page(7, 3.3)
    flops, rows, cell = cost.training_flops_per_token(LLAMA_8B, 8192), 34, 0.062
    left, spent = 0.1, 3600 * LLAMA_8B_HOURS
    for mfu in (15e12 * flops / (spent * DENSE_BF16_PEAKS["H100"]), 0.4, 0.6):
        rate = mfu * DENSE_BF16_PEAKS["H100"] / flops
        seconds = 15e12 / rate
        count = round(seconds / (30 * 24 * 3600))
        x = [left + cell * (index // rows + 0.5) for index in range(count)]
        y = [0.95 + cell * (index % rows + 0.5) for index in range(count)]
        axes.plot(x, y, "s", color=SERIES[0], markersize=2.9, markeredgewidth=0)
        write(axes, (left, 0.2), f"MFU {mfu:.0%}", GREY)
        write(axes, (left, 0.48), f"{count:,} H100s", size=13, weight="bold")
        write(axes, (left, 0.74), f"{seconds / (365 * 24 * 3600):.0f} years on one", size=10.5)
        left += max(cell * (count // rows + 1), 1.5) + 0.2
    return figure
