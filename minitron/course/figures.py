"""The figures of the course: one visual language for chapters, slides and README.

Every function returns a matplotlib `Figure`. Solid is measured, dashed is predicted, a grey band
is a limit, hatching is idle. Labels stand beside what they name, every axis has its unit. `show`
puts a figure into a notebook, `save` into a file.

Here are time, scaling and loss; `figures_memory` draws bytes, `figures_style` is what all share.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullLocator

from minitron.course.figures_memory import Held, holdings, memory_bars, skyline
from minitron.course.figures_style import (
    BAND,
    BLACK,
    BLUE,
    GREEN,
    GREY,
    KIND_COLOUR,
    PURPLE,
    STYLE,
    VERMILLION,
    canvas,
    label_end,
    plain,
    plain_bytes,
    plain_log_ticks,
    png,
    save,
    show,
)

__all__ = [
    "Block", "Held", "curves", "holdings", "loss_curve", "memory_bars", "plain_bytes", "png",
    "save", "scaling", "show", "skyline", "timeline",
]


@dataclass(frozen=True)
class Block:
    """A stretch of time in one lane; `kind` is a key of `KIND_COLOUR`."""

    kind: str
    start: float
    end: float
    label: str = ""


@rc_context(STYLE)
def timeline(
    measured: dict[str, list[Block]],
    predicted: dict[str, list[Block]] | None = None,
    unit: str = "ms",
) -> Figure:
    """Draw one lane per rank, predicted lanes above measured ones, gaps hatched as idle.

    Times are in `unit`, from the start of the step; a lane's name is its label.
    """
    steps = [lanes for lanes in (predicted, measured) if lanes]
    names = [name for lanes in steps for name in lanes]
    span = max(_end(lanes) for lanes in steps)
    figure, axes = canvas(height=0.9 + 0.55 * len(names))

    row = 0
    for lanes in steps:
        for blocks in lanes.values():
            _draw_idle(axes, row, blocks, _end(lanes))
            for block in blocks:
                _draw_block(axes, row, block, lanes is predicted, span)
            row += 1

    axes.set_xlim(0, span)
    axes.set_ylim(len(names) - 0.45, -0.62)
    axes.set_yticks(range(len(names)), names)
    axes.tick_params(axis="y", length=0, labelcolor=BLACK)
    axes.spines["left"].set_visible(False)
    axes.set_xlabel(f"time in one step ({unit})")
    return figure


def _end(lanes: dict[str, list[Block]]) -> float:
    return max(block.end for blocks in lanes.values() for block in blocks)


def _draw_idle(axes: Axes, row: int, blocks: list[Block], end: float) -> None:
    edges = [0.0]
    for block in sorted(blocks, key=lambda block: block.start):
        edges += [block.start, block.end]
    edges.append(end)
    for left, right in zip(edges[::2], edges[1::2], strict=True):
        if right - left > 0.005 * end:
            axes.barh(row, right - left, 0.7, left, color="white", edgecolor=BAND, hatch="///")


def _draw_block(axes: Axes, row: int, block: Block, is_predicted: bool, span: float) -> None:
    width = block.end - block.start
    axes.barh(
        row, width, 0.7, block.start, color=KIND_COLOUR[block.kind],
        alpha=0.45 if is_predicted else 1.0, edgecolor=BLACK if is_predicted else "white",
        linestyle="--" if is_predicted else "-", linewidth=1,
    )
    label = block.label or block.kind
    fits = width > 0.012 * len(label) * span  # a letter is about 1.2 % of the axis wide
    if fits:
        axes.text(block.start + width / 2, row, label, ha="center", va="center")
    else:
        axes.text(block.end, row - 0.37, label, ha="right", va="bottom", size=9, color=GREY)


@rc_context(STYLE)
def scaling(
    x: Sequence[float],
    measured: Sequence[float],
    x_label: str,
    y_label: str,
    predicted: Sequence[float] | None = None,
    predicted_label: str = "predicted",
    limit: float | None = None,
    limit_label: str = "limit",
    limit_is_above: bool = True,
) -> Figure:
    """Draw measured points on log-log axes, the predicted line dashed, the limit as a grey band.

    The band lies above `limit` (a roof, such as peak FLOP/s) or below it (a floor).
    """
    figure, axes = canvas()
    values = [*measured, *(predicted or []), *([limit] if limit else [])]
    bottom, top = min(values) / 2, max(values) * 2
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_ylim(bottom, top)

    if limit is not None:
        edge, place, anchor = (top, 0.97, "top") if limit_is_above else (bottom, 0.03, "bottom")
        axes.axhspan(limit, edge, color=BAND, zorder=0)
        axes.text(0.01, place, limit_label, color=GREY, va=anchor, transform=axes.transAxes)
    if predicted is not None:
        axes.plot(x, predicted, "--", color=BLACK, linewidth=1.5)
        label_end(axes, x[-1], predicted[-1], predicted_label, BLACK)
    axes.plot(x, measured, "o", color=BLUE, markersize=7)
    axes.annotate(
        "measured", (x[0], measured[0]), textcoords="offset points", xytext=(8, 6), color=BLUE
    )
    plain_log_ticks(axes)
    axes.set_xticks(x, [f"{value:,}" for value in x])
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xlabel(x_label)
    axes.set_ylabel(y_label)
    return figure


@rc_context(STYLE)
def curves(
    x: Sequence[float],
    measured: dict[str, Sequence[float]],
    x_label: str,
    y_label: str,
    predicted: dict[str, Sequence[float]] | None = None,
) -> Figure:
    """Draw up to four solid lines over a common x, and dashed ones, each named at its right end."""
    figure, axes = canvas()
    colours = (BLUE, VERMILLION, GREEN, PURPLE)
    lines = [(name, y, colour, "-")
             for (name, y), colour in zip(measured.items(), colours, strict=False)]
    lines += [(name, y, BLACK, "--") for name, y in (predicted or {}).items()]

    gap = 0.07 * max(max(y) for _, y, _, _ in lines)
    last_label = -gap
    for name, y, colour, style in sorted(lines, key=lambda line: line[1][-1]):
        width, order = (2, 2) if style == "-" else (1.2, 3)  # dashes stay visible where lines meet
        axes.plot(x, y, style, color=colour, linewidth=width, zorder=order)
        last_label = max(y[-1], last_label + gap)  # labels of lines that meet are pushed apart
        label_end(axes, x[-1], last_label, name, colour)

    axes.set_xlim(x[0], x[-1])
    axes.set_ylim(bottom=0)
    axes.set_xlabel(x_label)
    axes.set_ylabel(y_label)
    return figure


@rc_context(STYLE)
def loss_curve(rows: list[dict], floor: float | None = None) -> Figure:
    """Draw training loss over tokens from the rows of metrics.jsonl, in nats on a log axis.

    Rows with "val_loss" become points. `floor` is the entropy no model can beat, drawn dashed.
    """
    train = [(row["tokens"], row["loss"]) for row in rows if "loss" in row]
    tokens_at = {row["step"]: row["tokens"] for row in rows if "loss" in row}
    val = [(tokens_at[row["step"]], row["val_loss"]) for row in rows if "val_loss" in row]
    figure, axes = canvas()
    axes.set_yscale("log")

    axes.plot(*zip(*train, strict=True), color=BLUE, linewidth=1.2)
    label_end(axes, *train[-1], "training", BLUE)
    if val:
        axes.plot(*zip(*val, strict=True), "o", color=VERMILLION, markersize=6)
        axes.annotate(
            "validation", val[0], textcoords="offset points", xytext=(5, 7), color=VERMILLION
        )
    if floor is not None:
        axes.axhspan(floor / 2, floor, color=BAND, zorder=0)
        axes.axhline(floor, color=BLACK, linestyle="--", linewidth=1.2)
        axes.annotate(
            f"entropy of the text: {floor:.3f}", (0.01, floor), color=GREY, va="top",
            xycoords=("axes fraction", "data"), textcoords="offset points", xytext=(0, -4),
        )
        axes.set_ylim(bottom=0.7 * floor)

    plain_log_ticks(axes)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: plain(value)))
    axes.set_xlim(left=0)
    axes.set_xlabel("tokens seen")
    axes.set_ylabel("loss (nats per token)")
    return figure
