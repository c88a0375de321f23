"""Low precision: where gradients lie in the range of float16, and one weight that stands still.

`figures_numbers` draws what the formats can hold.
"""

import math
from collections.abc import Sequence
from itertools import pairwise

import torch
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator
from torch import Tensor

from teaching.figures_style import (
    BLACK,
    GREY,
    NUMBER_COLOR,
    SERIES,
    STYLE,
    canvas,
    ink,
    label_end,
)
from teaching.floats import (
    FORMATS,
    exponents,
    flushed,
    layout_of,
    overflown,
    representable,
    say,
)

CLASSES = ("zero", "subnormal", "normal", "inf")
"""What float16 makes of a magnitude, from the smallest on."""


@rc_context(STYLE)
def exponent_histogram(tensors: dict[str, Tensor], loss_scale: float = 1.0) -> Figure:
    """Draw how the magnitudes of each tensor times `loss_scale` spread over the powers of two.

    A row per tensor, colored by what float16 makes of the values; the ranges above say which
    color is what. A black outline is the tensor before it was scaled. Half of the smallest
    number, 2^-25, is where values round to zero.
    """
    figure = Figure(figsize=(7.0, 1.3 + 1.3 * len(tensors)), layout="constrained")
    heights = (0.6, *len(tensors) * [1.3])
    lanes, *rows = figure.subplots(len(heights), 1, sharex=True, height_ratios=heights)
    scaled = {name: exponents(tensor.double() * loss_scale) for name, tensor in tensors.items()}
    before = {name: exponents(tensor) for name, tensor in tensors.items()}

    found = [e for counts, _ in (*scaled.values(), *before.values()) for e in counts]
    left, right = min([*found, -30]) - 2, max([*found, 16]) + 3
    _draw_ranges(lanes, left, right)
    for axes, (name, tensor) in zip(rows, tensors.items(), strict=True):
        _draw_counts(axes, *scaled[name])
        if loss_scale != 1:
            _draw_outline(axes, before[name][0])
        axes.set_title(f"{name}: {_fate(tensor.double() * loss_scale)}", size=10.5, loc="left")
    rows[-1].set_xlim(left, right)
    times = f" x {say(loss_scale)}" if loss_scale != 1 else ""
    rows[-1].set_xlabel(f"magnitude{times}")
    rows[-1].xaxis.set_major_locator(MaxNLocator(8, integer=True))
    rows[-1].xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"$2^{{{value:.0f}}}$"))
    return figure


def _fate(values: Tensor) -> str:
    lost, infinite = (share(values, torch.float16) for share in (flushed, overflown))
    return f"fp16 makes {lost:.1%} zero" + (f" and {infinite:.1%} infinite" if infinite else "")


def _draw_ranges(axes: Axes, left: float, right: float) -> None:
    """What fp16 makes of each magnitude, in its colors, and how far bf16 reaches."""
    for start, end, name in _regions(left, right):
        axes.barh(0, end - start, left=start, height=0.7, color=NUMBER_COLOR[name])
        axes.text(
            (start + end) / 2,
            0,
            name,
            size=9,
            ha="center",
            va="center_baseline",
            color=ink(NUMBER_COLOR[name]),
        )
    axes.barh(1, right - left, left=left, height=0.7, color=GREY)
    layout = layout_of(torch.bfloat16)
    reach = [round(math.log2(x)) for x in (layout.smallest_subnormal, layout.largest)]
    axes.text(
        (left + right) / 2,
        1,
        f"from $2^{{{reach[0]}}}$ to $2^{{{reach[1]}}}$",
        size=9,
        color="white",
        ha="center",
        va="center_baseline",
    )
    axes.set_yticks([0, 1], ["fp16", "bf16"], color=BLACK)
    axes.set_ylim(1.5, -0.5)
    axes.tick_params(length=0, labelbottom=False)
    axes.spines[["left", "bottom"]].set_visible(False)


def _regions(left: float, right: float) -> list[tuple[float, float, str]]:
    """Exponents from where to where, and what fp16 makes of them."""
    layout = layout_of(torch.float16)
    zero = math.log2(layout.smallest_subnormal) - 1
    edges = [
        left,
        zero,
        math.log2(layout.smallest_normal),
        math.ceil(math.log2(layout.largest)),
        right,
    ]
    return [(start, end, name) for (start, end), name in zip(pairwise(edges), CLASSES, strict=True)]


def _draw_counts(axes: Axes, counts: dict[int, int], num_zeros: int) -> None:
    """Bars of the share of all values but zeros, an exponent's count above [e, e + 1]."""
    total = sum(counts.values())
    regions = _regions(-math.inf, math.inf)
    for exponent, count in counts.items():
        (name,) = [name for start, end, name in regions if start <= exponent < end]
        axes.bar(exponent, 100 * count / total, 0.94, align="edge", color=NUMBER_COLOR[name])
    if num_zeros:
        share = num_zeros / (num_zeros + total)
        axes.text(
            0,
            0.9,
            f" {share:.1%} are 0 already",
            va="top",
            size=9.5,
            color=GREY,
            transform=axes.transAxes,
        )
    axes.yaxis.set_major_locator(MaxNLocator(3))
    axes.set_ylabel("% of nonzero")


def _draw_outline(axes: Axes, counts: dict[int, int]) -> None:
    edges = range(min(counts, default=0), max(counts, default=0) + 2)
    total = max(1, sum(counts.values()))
    shares = [100 * counts.get(exponent, 0) / total for exponent in edges[:-1]]
    axes.stairs(shares, edges, color=BLACK, linewidth=1)


# One weight


@rc_context(STYLE)
def one_weight(histories: dict[str, Sequence[float]], grid: str | None = None) -> Figure:
    """Draw one weight's value after every step, a line per recipe, each named at its right end.

    Thin lines are the numbers that the format `grid`, a key of `FORMATS`, has there.
    """
    figure, axes = canvas()
    values = [value for history in histories.values() for value in history]
    margin = 0.08 * (max(values) - min(values)) or 0.01  # none of them may move
    low, high = min(values) - margin, max(values) + margin
    axes.set_ylim(low, high)

    last_label = -math.inf
    colors = dict(zip(histories, SERIES, strict=False))
    for name, history in sorted(histories.items(), key=lambda item: item[1][-1]):
        axes.plot(range(len(history)), history, color=colors[name], drawstyle="steps-post")
        last_label = max(history[-1], last_label + 1.1 * margin)
        label_end(axes, len(history) - 1, last_label, name, colors[name])

    longest = max(map(len, histories.values())) - 1
    axes.set_xlim(0, longest)
    if grid:
        for value in representable(FORMATS[grid], low, high).tolist():
            axes.axhline(value, color=GREY, linewidth=0.6, zorder=0)
        axes.text(
            0,
            1.02,
            f"gray lines: the numbers of {grid}",
            size=9.5,
            color=GREY,
            transform=axes.transAxes,
        )
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: say(value)))
    axes.set_xlabel("optimizer steps")
    axes.set_ylabel("value of the weight")
    return figure
