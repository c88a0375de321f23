"""The figures of planning: where a step's time goes, all layouts at once, errors of predictions.

Work has its color, traffic that of the mesh axis it crosses; the bubble is hatched.

Read in this order: PART_STYLE, step_bars, landscape, errors, time_and_memory.
"""

from collections.abc import Sequence

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from matplotlib.ticker import FuncFormatter, MaxNLocator, NullFormatter

from teaching.figures_style import (
    AXIS_COLOR,
    BAND,
    BLACK,
    GREY,
    SERIES,
    STYLE,
    WORK_COLOR,
    canvas,
    ink,
    pale,
    plain_log_ticks,
)

PART_STYLE = {  # in the order in which they are stacked: color, hatch, and the name that is shown
    "matmul": (WORK_COLOR["matmul"], "", "matmuls"),
    "attention": (WORK_COLOR["attention"], "", "attention"),
    "elementwise": (WORK_COLOR["elementwise"], "", "elementwise"),
    "host": (GREY, "", "host"),
    "optimizer": (WORK_COLOR["optimizer"], "", "optimizer"),
    "bubble": ("white", "////", "bubble"),
    "tp": (AXIS_COLOR["tp"], "", "tp"),
    "pp": (AXIS_COLOR["pp"], "", "pp"),
    "dp": (AXIS_COLOR["dp"], "", "dp"),
}
SEEN = 0.004
"""A smaller share of the longest bar is no wider than its edge, and is not named."""
WIDE = 0.06
"""Of the axis: as wide as "12%"."""

Point = tuple[float, float]


@rc_context(STYLE)
def step_bars(steps: dict[str, dict[str, float]], unit: str = "s") -> Figure:
    """Draw a bar of seconds for each step, by what it is spent on, with its total at the end.

    `steps` maps a row's name to an estimate's parts; shares of a row are written into it.
    """
    figure, axes = canvas(height=1.25 + 0.5 * len(steps))
    draw_steps(axes, steps, unit)
    return figure


def draw_steps(axes: Axes, steps: dict[str, dict[str, float]], unit: str = "s") -> None:
    longest = max(sum(parts.values()) for parts in steps.values())
    span = 1.15 * longest
    for row, parts in enumerate(steps.values()):
        _draw_parts(axes, row, parts, span)
        total = sum(parts.values())
        axes.annotate(
            f"{total:.3g} {unit}",
            (total, row),
            textcoords="offset points",
            xytext=(5, 0),
            va="center",
        )

    axes.set_xlim(0, span)
    axes.set_ylim(len(steps) - 0.45, -0.62)
    axes.set_yticks(range(len(steps)), list(steps))
    axes.tick_params(axis="y", length=0, labelcolor=BLACK)
    axes.spines["left"].set_visible(False)
    axes.set_xlabel(f"time per step ({unit})")
    _name_parts(
        axes,
        [
            part
            for part in PART_STYLE
            if any(parts.get(part, 0) > SEEN * longest for parts in steps.values())
        ],
    )


def _draw_parts(axes: Axes, row: int, parts: dict[str, float], span: float) -> None:
    total, left = sum(parts.values()), 0.0
    for part, (color, hatch, _) in PART_STYLE.items():
        width = parts.get(part, 0.0)
        axes.barh(
            row,
            width,
            0.7,
            left,
            color=color,
            hatch=hatch,
            linewidth=0.7,
            edgecolor=GREY if hatch else "white",
        )
        if width > WIDE * span:
            axes.text(
                left + width / 2,
                row,
                f"{width / total:.0%}",
                ha="center",
                va="center",
                size=10,
                color=BLACK if hatch else ink(color),
                backgroundcolor="white" if hatch else "none",
            )
        left += width


def _name_parts(axes: Axes, parts: list[str]) -> None:
    """A line above the bars: each part's name behind a square of its color."""
    handles = [
        Rectangle(
            (0, 0),
            1,
            1,
            facecolor=PART_STYLE[part][0],
            hatch=PART_STYLE[part][1],
            edgecolor=GREY,
            linewidth=0.5,
        )
        for part in parts
    ]
    axes.figure.legend(
        handles,
        [PART_STYLE[part][2] for part in parts],
        loc="outside upper center",
        ncols=len(parts),
        frameon=False,
        handlelength=0.9,
        handleheight=0.9,
        columnspacing=1.0,
        borderpad=0,
        handletextpad=0.4,
        fontsize=10,
    )


@rc_context(STYLE)
def landscape(
    fitting: Sequence[Point], too_large: Sequence[Point], limit: float, marked: dict[str, Point]
) -> Figure:
    """Draw every layout as a dot: GB on each GPU against seconds of a step, both logarithmic.

    What lies beyond `limit` GB is a grey band; `marked` layouts have a larger dot and a name.
    """
    figure, axes = canvas(height=4.0)
    axes.set_xscale("log")
    axes.set_yscale("log")
    for points, color in ((too_large, GREY), (fitting, pale(SERIES[0]))):
        if points:
            axes.plot(
                *zip(*points, strict=True),
                ".",
                color=color,
                markersize=2.5,
                markeredgewidth=0,
                rasterized=True,
            )
    points = [*fitting, *too_large]
    left, right = min(x for x, _ in points) / 1.15, max(x for x, _ in points) * 1.15
    axes.axvspan(limit, right, color=BAND, zorder=0)
    axes.annotate(
        "does not fit",
        (limit, 1),
        xycoords=("data", "axes fraction"),
        color=GREY,
        textcoords="offset points",
        xytext=(4, -3),
        va="top",
    )

    colors = (BLACK, *SERIES[1:4])
    lowest = min(y for _, y in [*points, *marked.values()])
    axes.set_xlim(left, right)
    for row, ((name, (x, y)), color) in enumerate(zip(marked.items(), colors, strict=False)):
        axes.plot([x], [y], "o", color=color, markersize=8, zorder=4)
        axes.annotate(
            name,
            (x, y),
            xytext=(0.02, 0.05 + 0.075 * row),
            ha="left",
            va="center",
            textcoords="axes fraction",
            color=color,
            zorder=4,
            arrowprops={"arrowstyle": "-", "color": color, "linewidth": 0.8},
        )
    axes.set_ylim(bottom=lowest / (max(y for _, y in points) / lowest) ** 0.4)
    plain_log_ticks(axes)
    axes.set_xticks([x for x in (5, 10, 20, 40, 80, 160, 320, 640, 1280) if left < x < right])
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.set_xlabel("memory per GPU (GB)")
    axes.set_ylabel("time per step (s)")
    return figure


@rc_context(STYLE)
def errors(groups: dict[str, dict[str, Sequence[float]]], band: float = 0.1) -> Figure:
    """Draw by which share predictions are off: a row for each source, and a color for each group.

    `groups` maps a group's name to its sources: name and predicted / published - 1 of every row.
    The one that is furthest off has its number. Within `band` the background is grey.
    """
    rows = [
        (group, name, list(values))
        for group, named in groups.items()
        for name, values in named.items()
    ]
    furthest = [max(values, key=abs) for _, _, values in rows]
    figure, axes = canvas(height=0.9 + 0.4 * len(rows))
    span = max(1.5 * band, *(1.3 * abs(error) for error in furthest))  # with its number
    axes.axvspan(-band, band, color=BAND, zorder=0)
    axes.axvline(0, color=BLACK, linewidth=1, zorder=1)
    colors = dict(zip(groups, SERIES, strict=False))
    for y, ((group, _, values), error) in enumerate(zip(rows, furthest, strict=True)):
        axes.plot(values, [y] * len(values), "o", color=colors[group], markersize=8, alpha=0.7)
        axes.annotate(
            _percent(error),
            (error, y),
            va="center",
            textcoords="offset points",
            xytext=(9 if error > 0 else -9, 0),
            ha="left" if error > 0 else "right",
        )
    for group, color in colors.items():
        first = next(y for y, row in enumerate(rows) if row[0] == group)
        axes.text(span, first, group, color=color, ha="right", va="center")

    axes.set_xlim(-span, span)
    axes.set_ylim(len(rows) - 0.5, -0.6)
    axes.set_yticks(range(len(rows)), [name for _, name, _ in rows])
    axes.tick_params(axis="y", length=0, labelcolor=BLACK)
    axes.spines["left"].set_visible(False)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: _percent(value)))
    axes.set_xlabel("predicted, over published")
    return figure


def _percent(error: float) -> str:
    """With its sign; "0%" has none."""
    percent = f"{error:+.0%}"
    return percent.lstrip("+-") if percent[1:] == "0%" else percent


@rc_context(STYLE)
def time_and_memory(
    parts: dict[str, float], kinds: dict[str, float], limit: float, colors: dict[str, str]
) -> Figure:
    """Draw a step's seconds above a GPU's gigabytes, with what lies beyond `limit` as a band.

    `kinds` are GB by kind, in `colors`; both dictionaries may be empty.
    """
    figure = Figure(figsize=(7.0, 3.4), layout="constrained")
    above, below = figure.subplots(2)
    if parts:
        draw_steps(above, {"time": parts})
    else:
        above.set_axis_off()
        above.text(0.5, 0.5, "cannot run", ha="center", color=GREY)

    total, left = sum(kinds.values()), 0.0
    span = 1.25 * max(limit, total)
    below.axvspan(limit, span, color=BAND, zorder=0)
    below.annotate(
        "reserved",
        (limit, 1),
        xycoords=("data", "axes fraction"),
        color=GREY,
        textcoords="offset points",
        xytext=(4, -3),
        va="top",
    )
    for kind, gigabytes in kinds.items():
        below.barh(0, gigabytes, 0.7, left, color=colors[kind], edgecolor="white", label=kind)
        left += gigabytes
    if kinds:
        below.annotate(
            f"{total:.3g} GB", (total, 0), textcoords="offset points", xytext=(5, 0), va="center"
        )
        below.legend(
            loc="lower left",
            bbox_to_anchor=(0, 1.0),
            ncols=5,
            frameon=False,
            handlelength=0.9,
            handleheight=0.9,
            columnspacing=1.0,
            borderpad=0,
            handletextpad=0.4,
            fontsize=10,
        )
    below.set_xlim(0, span)
    below.set_ylim(0.55, -0.62)
    below.set_yticks([0], ["memory"])
    below.tick_params(axis="y", length=0, labelcolor=BLACK)
    below.spines["left"].set_visible(False)
    below.xaxis.set_major_locator(MaxNLocator(6, steps=(1, 2, 5, 10)))
    below.set_xlabel("on the GPU that holds most (GB)")
    return figure
