"""Figures of bytes: over one step (skyline), per kind (memory_bars), per rank (holdings).

A kind of bytes has the color of the phase that makes it: activations that of the forward pass,
gradients that of the backward pass, optimizer state that of the optimizer.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from minitron.measure.meter import Moment, Snapshot
from teaching.figures_style import (
    BAND,
    BLACK,
    CATEGORY_COLOR,
    GREY,
    STYLE,
    WORK_COLOR,
    canvas,
    count_bytes,
    ink,
    pale,
    plain_bytes,
)

NARROW = 0.12
"""A phase shorter than this share of the axis has no room for its name."""


@dataclass(frozen=True)
class Held:
    """Bytes in one cell of `holdings`, and which share, 0 to 1, they are of the whole thing."""

    bytes: float
    share: float = 1.0


@rc_context(STYLE)
def skyline(
    timeline: Sequence[Moment],
    peak: Snapshot,
    predicted: float | None = None,
    predicted_label: str = "formula",
) -> Figure:
    """Draw the bytes alive over time, stacked by kind, the peak marked.

    `timeline` and `peak` are the meter's, whose own work is in the times; `predicted` is the peak's
    formula, in bytes, dashed. The names at the right carry the bytes of their kind at the peak.
    """
    figure, axes = canvas(height=3.7)
    x = [1e3 * moment.seconds for moment in timeline]
    layers = [[moment.bytes.get(kind, 0) for moment in timeline] for kind in CATEGORY_COLOR]
    axes.stackplot(x, layers, colors=list(CATEGORY_COLOR.values()), step="post", linewidth=0)
    top = 1.15 * max(peak.total, predicted or 0)
    axes.set_xlim(0, x[-1])
    axes.set_ylim(0, top)

    highest = max(range(len(timeline)), key=lambda i: timeline[i].total)
    axes.plot([x[highest]], [peak.total], "v", color=BLACK, markersize=7, zorder=3)
    if predicted is not None:
        axes.axhline(predicted, color=BLACK, linestyle="--", linewidth=1.3)
        axes.annotate(
            f"{predicted_label} {plain_bytes(predicted)}",
            (0.01, predicted),
            xycoords=("axes fraction", "data"),
            textcoords="offset points",
            xytext=(0, 4),
        )
    phases = _phases(timeline)
    phase_strip(axes, phases)
    for _, start, _ in phases[1:]:
        axes.axvline(start, color="white", linewidth=0.8)
    _list_kinds(axes, peak)
    count_bytes(axes.yaxis, top, "alive")
    axes.set_xlabel("time (ms), while the meter counts")
    return figure


def _phases(timeline: Sequence[Moment]) -> list[tuple[str, float, float]]:
    """Return each phase of the meter's timeline with its start and end, in ms."""
    first = [
        i for i, moment in enumerate(timeline) if i == 0 or moment.phase != timeline[i - 1].phase
    ]
    starts, last = [1e3 * timeline[i].seconds for i in first], 1e3 * timeline[-1].seconds
    return [
        (timeline[i].phase, start, end)
        for i, start, end in zip(first, starts, [*starts[1:], last], strict=True)
    ]


def phase_strip(
    axes: Axes,
    phases: Sequence[tuple[str, float, float]],
    names: dict[str, str] | None = None,
) -> None:
    """Draw a strip above the axes: which phase, from where to where; `names` renames phases."""
    above, last = axes.get_xaxis_transform(), phases[-1][2]
    for phase, start, end in phases:
        name = (names or {}).get(phase, phase)
        axes.add_patch(
            Rectangle(
                (start, 1.02),
                end - start,
                0.07,
                transform=above,
                clip_on=False,
                linewidth=0.8,
                facecolor=WORK_COLOR.get(phase, BAND),
                edgecolor="white",
            )
        )
        if end - start > NARROW * last:
            axes.text(
                (start + end) / 2, 1.05, name, transform=above, ha="center", va="center", size=9
            )
        else:
            axes.text(end, 1.1, name, transform=above, ha="right", size=9, color=GREY)


def _list_kinds(axes: Axes, peak: Snapshot) -> None:
    """Name the layers at the right, uppermost first, with their bytes at the peak."""
    axes.plot([1.03], [1.06], "v", color=BLACK, transform=axes.transAxes, clip_on=False)
    axes.text(1.055, 1.06, f"peak {plain_bytes(peak.total)}", transform=axes.transAxes, va="center")
    for row, (kind, color) in enumerate(reversed(CATEGORY_COLOR.items())):
        y = 0.92 - 0.19 * row
        axes.add_patch(
            Rectangle(
                (1.02, y - 0.09),
                0.02,
                0.17,
                transform=axes.transAxes,
                clip_on=False,
                facecolor=color,
            )
        )
        axes.text(
            1.055,
            y,
            f"{kind}\n{plain_bytes(peak.bytes.get(kind, 0))}",
            size=10,
            transform=axes.transAxes,
            va="center",
            linespacing=1.2,
        )


@rc_context(STYLE)
def memory_bars(
    measured: dict[str, dict[str, float]],
    predicted: dict[str, dict[str, float]] | None = None,
    limit: float | None = None,
    limit_label: str = "limit",
) -> Figure:
    """Draw a bar of bytes per row, stacked by kind, its total at the end.

    `measured` and `predicted` (dashed, above) map a row's name to the bytes of each kind of
    `CATEGORY_COLOR`. What lies beyond `limit`, a device's memory, is a grey band.
    """
    groups = [(rows, rows is predicted) for rows in (predicted, measured) if rows]
    bars = [(name, kinds, dashed) for rows, dashed in groups for name, kinds in rows.items()]
    span = 1.2 * max([limit or 0, *(sum(kinds.values()) for _, kinds, _ in bars)])
    figure, axes = canvas(height=1.3 + 0.5 * len(bars))
    if limit is not None:
        axes.axvspan(limit, span, color=BAND, zorder=0)
        axes.annotate(
            limit_label,
            (limit, 1),
            xycoords=("data", "axes fraction"),
            color=GREY,
            textcoords="offset points",
            xytext=(4, -3),
            va="top",
        )
    for row, (_, kinds, dashed) in enumerate(bars):
        _draw_stack(axes, row, kinds, dashed, span)

    axes.set_xlim(0, span)
    axes.set_ylim(len(bars) - 0.45, -0.95 if limit is not None else -0.62)
    axes.set_yticks(range(len(bars)), [name for name, _, _ in bars])
    axes.tick_params(axis="y", length=0, labelcolor=BLACK)
    axes.spines["left"].set_visible(False)
    _name_kinds(axes, [kind for kind in CATEGORY_COLOR if any(bar[1].get(kind) for bar in bars)])
    count_bytes(axes.xaxis, span, "held")
    return figure


def _draw_stack(
    axes: Axes, row: int, kinds: dict[str, float], is_predicted: bool, span: float
) -> None:
    left = 0.0
    for kind, color in CATEGORY_COLOR.items():
        width = kinds.get(kind, 0)
        if width == 0:
            continue
        axes.barh(
            row,
            width,
            0.7,
            left,
            color=pale(color) if is_predicted else color,
            edgecolor=BLACK if is_predicted else "white",
            linewidth=1,
            linestyle="--" if is_predicted else "-",
        )
        if width > 0.11 * span:  # as wide as "12.3 GB"
            axes.text(
                left + width / 2,
                row,
                plain_bytes(width),
                ha="center",
                va="center",
                size=10,
                color=BLACK if is_predicted else ink(color),
            )
        left += width
    axes.annotate(
        plain_bytes(left), (left, row), textcoords="offset points", xytext=(5, 0), va="center"
    )


def _name_kinds(axes: Axes, kinds: list[str]) -> None:
    """A line above the bars: each kind's name behind a square of its color."""
    handles = [Rectangle((0, 0), 1, 1, facecolor=CATEGORY_COLOR[kind]) for kind in kinds]
    axes.legend(
        handles,
        kinds,
        loc="lower left",
        bbox_to_anchor=(0, 1.0),
        ncols=len(kinds),
        frameon=False,
        handlelength=0.9,
        handleheight=0.9,
        columnspacing=1.3,
        borderpad=0,
        handletextpad=0.4,
        fontsize=10,
    )


@rc_context(STYLE)
def holdings(rows: dict[str, dict[str, Held]]) -> Figure:
    """Draw who holds what: a row per rank (or moment), a column per kind, the bytes written in.

    A cell is filled from the left up to its share of the whole thing; an empty box holds nothing.
    Kinds without a color of their own are drawn in grey.
    """
    names = list(rows)
    kinds = list(dict.fromkeys(kind for held in rows.values() for kind in held))
    figure, axes = canvas(height=0.6 + 0.5 * len(names))
    for y, held in enumerate(rows.values()):
        for x, kind in enumerate(kinds):
            cell = held.get(kind, Held(0, 0))
            color = CATEGORY_COLOR.get(kind, BAND)
            axes.add_patch(
                Rectangle(
                    (x + 0.04, y + 0.1), 0.92, 0.8, facecolor="white", edgecolor=GREY, linewidth=0.8
                )
            )
            axes.add_patch(Rectangle((x + 0.04, y + 0.1), 0.92 * cell.share, 0.8, facecolor=color))
            axes.text(
                x + 0.5,
                y + 0.5,
                plain_bytes(cell.bytes) if cell.bytes else "-",
                ha="center",
                va="center",
                color=ink(color) if cell.share > 0.6 else BLACK,
            )

    axes.set_xlim(0, len(kinds))
    axes.set_ylim(len(names), 0)
    axes.set_yticks([y + 0.5 for y in range(len(names))], names)
    axes.set_xticks([x + 0.5 for x in range(len(kinds))], kinds)
    axes.xaxis.tick_top()
    axes.tick_params(length=0, labelcolor=BLACK)
    axes.spines[:].set_visible(False)
    return figure
