"""What a float can hold: the number line of each format, its range and its bits.

What is drawn comes from `floats`. Read in this order: number_line, ranges, draw_number_line.
"""

import math
from collections.abc import Sequence

import torch
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from matplotlib.ticker import FuncFormatter, MaxNLocator

from teaching.drawings import Drawing
from teaching.figures_style import (
    BAND,
    BLACK,
    GREY,
    NUMBER_COLOR,
    SERIES,
    STYLE,
    ink,
    pale,
)
from teaching.floats import (
    FORMATS,
    Layout,
    layout_of,
    overflows,
    representable,
    rounded,
    say,
)

# Lengths are inches
WIDTH, LEFT, RIGHT, LANE, TOP, BOTTOM = 7.0, 1.25, 1.2, 0.46, 0.64, 0.4
FINEST = 0.03
"""Distance of ticks that are still told apart."""


@rc_context(STYLE)
def number_line(
    formats: Sequence[str],
    low: float,
    high: float,
    at: float | None = None,
    plus: float | None = None,
    focus: str | None = None,
) -> Figure:
    """Draw the numbers in [low, high], a lane per format; beside it the spacing above `at`.

    `formats` are keys of `FORMATS`; beside a name stand its bits: sign, exponent, mantissa. A dot
    is what a format holds for `at`, a ring for `at + plus`. Lanes other than `focus` are grey.
    """
    height = TOP + LANE * len(formats) + BOTTOM
    figure = Figure(figsize=(WIDTH, height))
    inner = WIDTH - LEFT - RIGHT
    axes = figure.add_axes(
        (LEFT / WIDTH, BOTTOM / height, inner / WIDTH, 1 - (TOP + BOTTOM) / height)
    )
    axes.set(xlim=(low, high), ylim=(len(formats), 0), yticks=[])
    axes.spines["left"].set_visible(False)
    beside = {"transform": axes.get_yaxis_transform(), "va": "center"}
    at = (low if low > 0 else high) if at is None else at

    for row, name in enumerate(formats):
        layout, middle = layout_of(FORMATS[name]), row + 0.5
        color = NUMBER_COLOR["normal"] if focus in (None, name) else GREY
        _draw_values(axes, FORMATS[name], middle, FINEST * (high - low) / inner, color, at)
        bits = f"1 + {layout.exponent} + {layout.mantissa} bits"
        axes.text(-LEFT / inner + 0.03, middle - 0.2, name, weight="bold", color=color, **beside)
        axes.text(-LEFT / inner + 0.03, middle + 0.22, bits, size=8.5, color=GREY, **beside)
        gap = "too large" if overflows(FORMATS[name], at) else _power(layout.spacing(at))
        axes.text(1.03, middle, gap, color=color, **beside)

    _mark(axes, formats, at, plus)
    axes.text(1.03, -0.44 / LANE, f"spacing at\n{say(at)}", size=9.5, color=GREY, **beside)
    axes.xaxis.set_major_locator(MaxNLocator(4, steps=(1, 2, 5, 10)))
    axes.tick_params(labelsize=10)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: say(value)))
    return figure


def _draw_values(
    axes: Axes, dtype: torch.dtype, middle: float, finest: float, color: str, at: float
) -> None:
    """Ticks, a filled band where they would be denser than `finest`, grey beyond the largest."""
    layout, (low, high) = layout_of(dtype), axes.get_xlim()
    bar = {"edgecolor": "none", "height": 0.56}
    axes.plot([low, high], [middle, middle], color=BAND, linewidth=1, zorder=0)
    for start, end in ((low, -layout.largest), (layout.largest, high)):
        if end > start:
            axes.barh(middle, end - start, left=start, color=BAND, **bar)

    dense = min(layout.finest(finest), layout.largest)
    start, end = max(low, -dense), min(high, dense)
    if end > start:
        axes.barh(middle, end - start, left=start, color=pale(color), **bar)
        if end - start >= 0.5 * (high - low):
            place, side = (end, "right") if at < (start + end) / 2 else (start, "left")
            axes.text(
                place,
                middle,
                " too dense to draw ",
                size=9,
                ha=side,
                va="center_baseline",
                color=BLACK,
            )
    for piece in ((low, min(high, -dense)), (max(low, dense), high)):
        if piece[1] >= piece[0]:
            ticks = representable(dtype, *piece).tolist()
            axes.vlines(ticks, middle - 0.28, middle + 0.28, color=color, linewidth=1.2)


def _mark(axes: Axes, formats: Sequence[str], at: float, plus: float | None) -> None:
    """Lines at `at` and `at + plus`, and what each format holds in their place."""
    low, high = axes.get_xlim()
    dot = {"color": BLACK, "markersize": 6, "zorder": 4}
    ring = {
        "color": SERIES[1],
        "markersize": 11,
        "zorder": 4,
        "fillstyle": "none",
        "markeredgewidth": 1.6,
    }

    def put(value: float, row: int, look: dict) -> None:
        dtype = FORMATS[formats[row]]
        if not overflows(dtype, value) and low <= rounded(dtype, value) <= high:
            axes.plot(rounded(dtype, value), row + 0.5, "o", **look)

    if low <= at <= high:
        axes.axvline(at, color=BLACK, linewidth=1, zorder=1)
        axes.text(at, -0.15, f"{say(at)} ", ha="right")
    if plus is not None and low <= at + plus <= high:
        axes.axvline(at + plus, color=SERIES[1], linestyle="--", linewidth=1, zorder=1)
        axes.text(at + plus, -0.15, f" + {say(plus)}", color=SERIES[1])
    for row, name in enumerate(formats):
        put(at, row, dot)
        if plus is not None and not overflows(FORMATS[name], at):
            put(rounded(FORMATS[name], at) + plus, row, ring)


def _power(value: float) -> str:
    """A power of two, small ones as such."""
    return say(value) if 0.01 < value < 1e5 else f"$2^{{{round(math.log2(value))}}}$"


# The range of each format


@rc_context(STYLE)
def ranges(formats: Sequence[str] = tuple(FORMATS)) -> Figure:
    """Draw each format's bits, and its positive numbers on a log axis, the subnormal ones yellow.

    `formats` are keys of `FORMATS`. At the left end stand the smallest number and the smallest
    normal one, at the right end the largest.
    """
    figure, (bits, axes) = _pair_of_axes(len(formats))
    for row, name in enumerate(formats):
        layout = layout_of(FORMATS[name])
        _draw_bits(bits, layout, row)
        values = layout.smallest_subnormal, layout.smallest_normal, layout.largest
        lowest, normal, highest = map(math.log2, values)
        axes.barh(row, normal - lowest, left=lowest, height=0.5, color=NUMBER_COLOR["subnormal"])
        axes.barh(row, highest - normal, left=normal, height=0.5, color=NUMBER_COLOR["normal"])
        left = f"$2^{{{lowest:.0f}}}$, normal from $2^{{{normal:.0f}}}$ "
        axes.text(lowest, row, left, ha="right", va="center", size=9.5)
        axes.text(highest, row, f" {_largest(values[2])}", va="center", size=9.5)

    bits.set_yticks(range(len(formats)), formats, weight="bold", color=BLACK)
    for x, text in ((0, "sign"), (4, "exponent"), (16, "mantissa")):
        bits.text(x, -0.4, text, color=NUMBER_COLOR.get(text, GREY), size=10)
    axes.set_xticks(range(-128, 129, 64), [f"$2^{{{e}}}$" for e in range(-128, 129, 64)])
    axes.set_xlabel("positive numbers, subnormal ones yellow")
    return figure


def _pair_of_axes(num_rows: int) -> tuple[Figure, list[Axes]]:
    """One for bits, one for ranges, with the same rows."""
    figure = Figure(figsize=(9.0, 0.8 + 0.45 * num_rows), layout="constrained")
    bits, axes = figure.subplots(1, 2, sharey=True, width_ratios=(1, 1.9))
    bits.set(xlim=(0, 32), ylim=(num_rows - 0.4, -0.6), xticks=[])
    bits.spines[["left", "bottom"]].set_visible(False)
    bits.set_xlabel("bits")
    axes.set_xlim(-285, 190)
    axes.spines["left"].set_visible(False)
    axes.spines["bottom"].set_bounds(-149, 128)
    for each in (bits, axes):
        each.tick_params(axis="y", length=0, labelleft=each is bits)
    return figure, [bits, axes]


def _draw_bits(axes: Axes, layout: Layout, row: int) -> None:
    """A square per bit; in those of exponent and mantissa, how many they are."""
    start = 0
    parts = (
        (1, GREY),
        (layout.exponent, NUMBER_COLOR["exponent"]),
        (layout.mantissa, NUMBER_COLOR["mantissa"]),
    )
    for count, color in parts:
        for index in range(start, start + count):
            axes.add_patch(
                Rectangle(
                    (index, row - 0.25), 1, 0.5, facecolor=color, edgecolor="white", linewidth=0.8
                )
            )
        if count > 1:
            axes.text(
                start + count / 2,
                row,
                str(count),
                size=10,
                ha="center",
                va="center_baseline",
                color=ink(color),
                bbox={"facecolor": color, "linewidth": 0, "pad": 0.5},
            )
        start += count


def _largest(value: float) -> str:
    return say(value) if value < 1e9 else f"{value:.2g}"


def draw_number_line(format: str, position: float, plus: float, zoom: int) -> Drawing:
    """Draw 64 / zoom numbers of `format` on each side of `position`, and what the others have.

    The sentence says what `format`, a key of `FORMATS`, makes of `position` and of adding `plus`.
    """
    dtype = FORMATS[format]
    layout, held = layout_of(dtype), rounded(dtype, position)
    reach = 64 / zoom * layout.spacing(position)
    figure = number_line(
        tuple(FORMATS), position - reach, position + reach, position, plus, focus=format
    )
    if overflows(dtype, position):
        return figure, f"{format} ends at {say(layout.largest)}: {say(position)} is beyond it."

    spacing = layout.spacing(held)
    then = (
        f"then {say(held + spacing)}, a spacing of {say(spacing)}"
        if held < layout.largest
        else "its largest number"
    )
    instead = f" for {say(position)}" if held != position else ""
    total = held + plus
    outcome = "too large" if overflows(dtype, total) else say(rounded(dtype, total))
    return figure, (
        f"{format} holds {say(held)}{instead}, {then}. {say(held)} + {say(plus)} becomes {outcome}"
        + (": nothing changed." if outcome == say(held) else ".")
    )
