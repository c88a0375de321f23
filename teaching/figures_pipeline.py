"""The figure of a pipeline schedule: a lane per rank, a block per pass, its micro-batch inside."""

import math
from collections.abc import Sequence

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure

from minitron.measure.ledger import Span
from minitron.parallel.pipeline.schedule_check import peak_activations
from minitron.parallel.pipeline.schedules import Action, Schedule
from minitron.parallel.pipeline.simulator import Pass, Timeline
from teaching.figures_ranks import draw_idle
from teaching.figures_style import (
    BLACK,
    GREY,
    STYLE,
    WORK_COLOR,
    canvas,
    ink,
    pale,
)

DARKEST = 0.6
"""What is left of a color's light in a rank's last chunk."""
WIDTH, LANE, MARGIN = 9.0, 0.36, 1.1
"""Of the figure, of a lane, and of what stands beside the lanes, in inches."""
DIGIT = 0.64
"""A digit's width, over the size of its font."""
NEGLIGIBLE = 0.25
"""Share of a pass's longest span below which a span before it is not yet the pass."""
LARGEST, SMALLEST = 10, 6
"""Size of the numbers, in points, one in a figure; where they do not fit, it has none."""


@rc_context(STYLE)
def pipeline(timeline: Timeline, measured: Timeline | None = None, unit: str = "ms") -> Figure:
    """Draw what each rank runs when, predicted lanes dashed above measured ones if there are any.

    F is blue, B and I are tan, W is pale, later chunks of a rank are darker, idle time hatched.
    The number is the micro-batch. To the right stands the most that a rank holds at once: how many
    micro-batches' activations of all its layers. Times are in `unit`.
    """
    steps = [timeline, measured] if measured else [timeline]
    span = max(step.seconds for step in steps)
    figure, axes = canvas(WIDTH, 0.9 + LANE * len(steps) * (1 + len(timeline.passes)))
    axes.set_xlim(0, span)
    inch = span / (WIDTH - MARGIN)
    passes = [each for step in steps for passes in step.passes for each in passes]
    size = _font_size(passes, inch, num_left_out=len(passes) // 10 if measured else 0)

    rows = []
    for step in steps:
        top = rows[-1] + 2 if rows else 1
        axes.text(span, top - 0.6, " holds", va="bottom", color=GREY)
        if measured:
            title = "measured" if step is measured else "predicted"
            axes.text(0, top - 0.6, title, va="bottom", color=GREY)
        for row, passes in enumerate(step.passes, top):
            rows.append(row)
            draw_idle(axes, row, passes, step.seconds)
            is_predicted = bool(measured) and step is timeline
            _draw_lane(axes, row, passes, inch, is_predicted)
            _number_lane(axes, row, passes, inch, size, is_predicted)
            axes.text(span, row, f" {_held(passes):g}", va="center")

    axes.set_ylim(rows[-1] + 0.5, 0)
    axes.set_yticks(rows, [f"rank {rank}" for step in steps for rank in range(len(step.passes))])
    axes.tick_params(axis="y", length=0, labelcolor=BLACK)
    axes.spines["left"].set_visible(False)
    axes.set_xlabel(f"time in one step ({unit})")
    return figure


def _chunks(passes: Sequence[Pass]) -> list[int]:
    """The stages of a rank, in the order of the layers."""
    return sorted({each.action.stage for each in passes})


def _held(passes: Sequence[Pass]) -> float:
    actions = tuple(each.action for each in passes)
    return peak_activations(Schedule("", 0, (actions,)))[0] / len(_chunks(passes))


def _draw_lane(
    axes: Axes, row: float, passes: Sequence[Pass], inch: float, is_predicted: bool
) -> None:
    colors = [_color(each.action, _chunks(passes), is_predicted) for each in passes]
    widths = sorted(72 * (each.end - each.start) / inch for each in passes)
    axes.broken_barh(
        [(each.start, each.end - each.start) for each in passes],
        (row - 0.4, 0.8),
        facecolors=colors,
        edgecolors=BLACK if is_predicted else "white",
        linestyles="--" if is_predicted else "-",
        linewidths=min(0.8, 0.08 * widths[len(widths) // 10]),  # or edges would hide narrow blocks
    )


def _number_lane(
    axes: Axes, row: float, passes: Sequence[Pass], inch: float, size: float, is_predicted: bool
) -> None:
    for each in passes:
        color = _color(each.action, _chunks(passes), is_predicted)
        if size <= _fitting_size(each, inch):
            axes.text(
                (each.start + each.end) / 2,
                row,
                str(each.action.micro_batch),
                size=size,
                color=ink(color),
                ha="center",
                va="center_baseline",
            )


def _fitting_size(each: Pass, inch: float) -> float:
    """In points."""
    points = 72 * (each.end - each.start) / inch
    return points / (DIGIT * len(str(each.action.micro_batch)))


def _font_size(passes: Sequence[Pass], inch: float, num_left_out: int) -> float:
    """With which the numbers fit, up to so many; infinite, so that none is drawn, if too small."""
    size = sorted(_fitting_size(each, inch) for each in passes)[num_left_out]
    return min(LARGEST, size) if size >= SMALLEST else math.inf


def _color(action: Action, chunks: list[int], is_predicted: bool) -> tuple[float, ...]:
    """Its kind's color, darker from chunk to chunk in equal steps."""
    first = to_rgb(WORK_COLOR["forward" if action.kind == "F" else "backward"])
    share = chunks.index(action.stage) / max(1, len(chunks) - 1)
    color = tuple((1 - share * (1 - DARKEST)) * channel for channel in first)
    color = pale(color) if action.kind == "W" else color
    return pale(color) if is_predicted else color


def measured_timeline(schedule: Schedule, spans_by_rank: Sequence[Sequence[Span]]) -> Timeline:
    """When each rank really ran its actions, in ms since the first, from its ledger's spans.

    The spans are those of one step. A pass ends with its last span; the few lines of Python before
    it waits for its input are not its start, so a span much shorter than its longest is left out.
    """
    named = {f"{action} stage {action.stage}" for action in schedule.all_actions}
    spans = [[span for span in spans if span.phase in named] for spans in spans_by_rank]
    first = min(span.start for each in spans for span in each)

    def run(action: Action, own: list[Span]) -> Pass:
        parts = [span for span in own if span.phase == f"{action} stage {action.stage}"]
        least = NEGLIGIBLE * max(span.end - span.start for span in parts)
        start = next(span.start for span in parts if span.end - span.start >= least)
        end = parts[-1].end
        return Pass(action, 1e3 * (start - first), 1e3 * (end - first))

    return Timeline(
        tuple(
            tuple(run(action, own) for action in actions)
            for actions, own in zip(schedule.actions, spans, strict=True)
        )
    )
