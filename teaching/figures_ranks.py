"""Figures of ranks: what each does when (timeline), and what it sends (wire)."""

from collections.abc import Sequence
from dataclasses import dataclass

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from minitron.measure.ledger import Call, Span
from teaching.figures_style import (
    AXIS_COLOR,
    BAND,
    BLACK,
    GREY,
    RANK_COLOR,
    STYLE,
    WORK_COLOR,
    canvas,
    count_bytes,
    ink,
    plain_bytes,
)

LETTER = 0.017
"""A letter's share of the width of an axis."""
SHORTEST = 0.003
"""Compute below this share of a step is not drawn: between two waits, a few lines of Python."""


@dataclass(frozen=True)
class Block:
    """A stretch of time in one lane; `kind`, a key of `WORK_COLOR` or `AXIS_COLOR`, its color."""

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
    figure, axes = canvas(height=0.9 + (0.55 if len(names) <= 4 else 0.42) * len(names))

    rows = []
    for lanes in steps:
        named = {
            (block.kind, block.label)
            for blocks in lanes.values()
            for block in blocks
            if _fits(block, span)
        }
        for blocks in lanes.values():
            row = len(rows) + (0.3 if lanes is measured and predicted else 0)  # a gap between both
            rows.append(row)
            draw_idle(axes, row, blocks, _end(lanes))
            for block in blocks:
                _draw_block(axes, row, block, span, lanes is predicted)
                _name_block(axes, row, block, span, named)

    axes.set_xlim(0, span)
    axes.set_ylim(rows[-1] + 0.55, -0.62)
    axes.set_yticks(rows, names)
    axes.tick_params(axis="y", length=0, labelcolor=BLACK)
    axes.spines["left"].set_visible(False)
    axes.set_xlabel(f"time in one step ({unit})")
    return figure


def _end(lanes: dict[str, list[Block]]) -> float:
    return max(block.end for blocks in lanes.values() for block in blocks)


def draw_idle(axes: Axes, row: float, blocks: Sequence[Block], end: float) -> None:
    """Hatch what no block covers; all that a block needs is a start and an end."""
    edges = [0.0]
    for block in sorted(blocks, key=lambda block: block.start):
        edges += [block.start, block.end]
    edges.append(end)
    for left, right in zip(edges[::2], edges[1::2], strict=True):
        if right - left > 0.005 * end:
            axes.barh(row, right - left, 0.7, left, color="white", edgecolor=BAND, hatch="///")


def _draw_block(axes: Axes, row: float, block: Block, span: float, is_predicted: bool) -> None:
    width = block.end - block.start
    axes.barh(
        row,
        width,
        0.7,
        block.start,
        color=(WORK_COLOR | AXIS_COLOR).get(block.kind, BAND),
        alpha=0.45 if is_predicted else 1.0,
        edgecolor=BLACK if is_predicted else "white",
        linestyle="--" if is_predicted else "-",
        linewidth=1 if width > 0.02 * span else 0.4,  # or the edges would hide narrow blocks
    )


def _name_block(
    axes: Axes, row: float, block: Block, span: float, named: set[tuple[str, str]]
) -> None:
    """Write a block's name into it, or above it if the name is not there yet; no transfer's."""
    label = block.label or block.kind
    if _fits(block, span):
        axes.text((block.start + block.end) / 2, row, label, ha="center", va="center")
    elif block.kind != "communication" and (block.kind, block.label) not in named:
        is_late = block.start + 0.8 * LETTER * len(label) * span > span
        axes.text(
            block.end if is_late else block.start,
            row - 0.37,
            label,
            va="bottom",
            size=9,
            ha="right" if is_late else "left",
            color=GREY,
        )
    named.add((block.kind, block.label))


def _fits(block: Block, span: float) -> bool:
    return block.end - block.start > LETTER * len(block.label or block.kind) * span


def rank_lanes(
    calls_by_rank: Sequence[Sequence[Call]], spans_by_rank: Sequence[Sequence[Span]]
) -> dict[str, list[Block]]:
    """Lanes for `timeline` from what the ledgers of all ranks saw: compute, then network.

    Times become milliseconds since the first event of any rank. Transfers of a rank that wait
    for each other are drawn one after the other: each begins when the one before is done. What was
    never waited for has no end and is left out, and so is compute too short to be seen.
    """
    all_spans = [span for spans in spans_by_rank for span in spans]
    first = min(
        [call.started for calls in calls_by_rank for call in calls]
        + [span.start for span in all_spans]
    )
    shortest = SHORTEST * (max([span.end for span in all_spans], default=first) - first)

    lanes = {}
    for rank, (calls, spans) in enumerate(zip(calls_by_rank, spans_by_rank, strict=True)):
        lanes[f"rank {rank} compute"] = [
            Block(span.phase, 1e3 * (span.start - first), 1e3 * (span.end - first))
            for span in spans
            if span.end - span.start > shortest
        ]
        lanes[f"rank {rank} network"] = _one_after_another(calls, first)
    return lanes


def _one_after_another(calls: Sequence[Call], first: float) -> list[Block]:
    blocks, free = [], 0.0
    finished = [call for call in calls if call.finished is not None]
    for call in sorted(finished, key=lambda call: call.finished):
        start = max(free, 1e3 * (call.started - first))
        free = max(start, 1e3 * (call.finished - first))
        blocks.append(Block("communication", start, free, plain_bytes(call.payload)))
    return blocks


@rc_context(STYLE)
def wire(
    measured: dict[str, Sequence[float]],
    formula: dict[str, Sequence[float]],
    direction: str = "sent",
) -> Figure:
    """Draw bytes per collective: a bar for what the ledger counted, a tick for the formula.

    Both map a row's name to the bytes of rank 0, 1, ...; ranks that agree share one bar.
    `direction` is the word for the axis.
    """
    rows = []
    for name, values in measured.items():
        ticks = formula[name]
        alike = len({*zip(values, ticks, strict=True)}) == 1
        ranks = [None] if alike and len(values) > 1 else range(len(values))
        rows.append([(name, rank, values[rank or 0], ticks[rank or 0]) for rank in ranks])
    span = 1.2 * max(max(value, tick) for row in rows for _, _, value, tick in row)
    figure, axes = canvas(height=1.0 + 0.34 * sum(map(len, rows)) + 0.1 * len(rows))

    y, places = 0.0, {}
    for row in rows:
        for _, rank, value, tick in row:
            _draw_bar(axes, y, rank, value, tick, span)
            y += 1
        places[row[0][0]] = y - 1 - (len(row) - 1) / 2
        y += 0.4

    axes.set_xlim(0, span)
    axes.set_ylim(y - 0.8, -0.6)
    axes.set_yticks(list(places.values()), list(places))
    axes.tick_params(axis="y", length=0, labelcolor=BLACK)
    axes.spines["left"].set_visible(False)
    count_bytes(axes.xaxis, span, f"{direction} by a rank (bar: ledger, tick: formula)")
    return figure


def _draw_bar(
    axes: Axes, y: float, rank: int | None, value: float, tick: float, span: float
) -> None:
    color = WORK_COLOR["communication"] if rank is None else RANK_COLOR[rank % len(RANK_COLOR)]
    axes.barh(y, value, 0.8, color=color)
    axes.plot([tick, tick], [y - 0.48, y + 0.48], color=BLACK, linewidth=2.5)

    name, number = "each rank" if rank is None else f"rank {rank}", plain_bytes(value)
    fits = min(value, tick) > 1.2 * LETTER * len(name) * span
    if fits:
        axes.annotate(
            name,
            (0, y),
            textcoords="offset points",
            xytext=(5, 0),
            va="center",
            size=10,
            color=ink(color),
        )
    axes.annotate(
        number if fits else f"{number}, {name}",
        (max(value, tick), y),
        va="center",
        size=10,
        textcoords="offset points",
        xytext=(6, 0),
    )
