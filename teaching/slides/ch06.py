"""Drawings for chapter 6: copies, unsharding in turn, traffic by stage, and two silent errors."""

from math import cos, hypot, pi, sin

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from minitron import cost
from minitron.cost.sharding import zero_holdings, zero_volume
from teaching.figures import plain_bytes
from teaching.figures_style import (
    BAND,
    BLACK,
    CATEGORY_COLOR,
    GREY,
    RANK_COLOR,
    SERIES,
    STYLE,
    WORK_COLOR,
    pale,
)
from teaching.lab.ch06 import shape_of
from teaching.slides.models import H100, LLAMA_8B
from teaching.slides.shapes import arrow, box, hatched, outline, page, write

PARAMETERS, MEMORY = cost.num_parameters(LLAMA_8B), H100.memory_bytes
RANKS = 4
COMMUNICATION = WORK_COLOR["communication"]


@rc_context(STYLE)
def copies() -> Figure:
    """Draw 64 GPUs, each with a copy of Llama 3 8B's training state that exceeds its memory."""
    figure, axes = page(7, 3.1)
    kinds, num_gpus = zero_holdings(PARAMETERS, 64, 0), 64
    total = sum(kinds.values())
    inch, bottom, left = 2.4 / total, 2.75, 1.75
    _draw_state(axes, (left, bottom), 0.8, inch, is_copy=False)
    write(axes, (left + 0.4, 2.93), "one GPU", GREY, ha="center")
    place = (left + 0.4, bottom - total * inch - 0.15)
    write(axes, place, f"{total / 1e9:.0f} GB", ha="center", weight="bold")
    top = bottom
    for kind, size in kinds.items():
        text, place = f"{kind} {plain_bytes(size)}", (left - 0.08, top - size * inch / 2)
        write(axes, place, text, size=10, ha="right")
        top -= size * inch
    text = f"an H100:\n{MEMORY / 1e9:.1f} GB"
    write(axes, (left + 0.88, bottom - MEMORY * inch), text, size=10)

    for index in range(num_gpus):
        corner = (3.55 + 0.212 * (index % 16), 0.92 + 0.61 * (index // 16))
        _draw_state(axes, corner, 0.16, 0.22 * inch, is_copy=index > 0)
    text = f"{num_gpus} GPUs: {num_gpus * total / 1e12:.1f} TB,"
    write(axes, (6.95, 2.93), f"{text} of which {total / 1e12:.2f} TB are distinct", ha="right")
    return figure


def _draw_state(
    axes: Axes, corner: tuple[float, float], width: float, inch: float, is_copy: bool
) -> None:
    """Draw a column of the training state on its lower left corner, and a frame: the memory."""
    left, top = corner
    for kind, size in zero_holdings(PARAMETERS, 1, 0).items():
        top -= size * inch
        color = CATEGORY_COLOR[kind]
        box(axes, (left, top, width, size * inch), color=pale(color) if is_copy else color)
    outline(axes, (left, corner[1] - MEMORY * inch, width, MEMORY * inch))


@rc_context(STYLE)
def unshard_in_turn() -> Figure:
    """Draw one rank's parameters with ZeRO-3: a shard of each layer, and the one that computes."""
    figure, axes = page(7, 3.35)
    layers, left, step, lane, height, pause = 4, 1.05, 0.68, 0.62, 0.48, 0.4
    turn = left + layers * step + pause  # between the passes: the head and the loss
    starts = {layer: [left + layer * step] for layer in range(layers)}
    for layer in range(layers):
        starts[layer].append(turn + (layers - 1 - layer) * step)
    for start, phase in ((left, "forward"), (turn, "backward")):
        box(axes, (start, 0.1, layers * step, 0.3), phase, WORK_COLOR[phase])
    for layer in range(layers):
        bottom = 0.5 + lane * (layer + 1)
        write(axes, (left - 0.3, bottom - 0.2), f"layer {layer}", ha="right")
        shard = height / RANKS
        bounds = (left, bottom - shard, 2 * layers * step + pause, shard)
        box(axes, bounds, color=CATEGORY_COLOR["parameter"])
        for start in starts[layer]:
            bounds, middle = (start, bottom - height, step, height), bottom - 0.3
            box(axes, bounds, "full", CATEGORY_COLOR["parameter"])
            arrow(axes, (start - 0.24, middle), (start, middle), COMMUNICATION, linewidth=2.2)
    text = f"thin: the rank's shard, 1/{RANKS} of a layer; purple arrow: all-gather"
    write(axes, (left, 3.2), text, GREY)
    return figure


@rc_context(STYLE)
def clipping() -> Figure:
    """Draw a gradient of two shards: clipped by its norm, and each shard clipped by its own."""
    figure, axes = page(7, 2.05)
    origin, unit, gradient, limit = (1.1, 1.65), 1.3, (3.7, 1.05), 1.0
    x, y = origin
    scale = limit / hypot(*gradient)
    right = tuple(scale * each for each in gradient)
    wrong = tuple(min(limit, each) for each in gradient)
    quarter = [(cos(pi * n / 100), sin(pi * n / 100)) for n in range(51)]
    circle = [(x + limit * unit * across, y - limit * unit * up) for across, up in quarter]
    axes.plot(*zip(*circle, strict=True), color=GREY, linestyle="--", linewidth=1.2)
    arrow(axes, (x, y), (x + 5.5, y), BLACK, linewidth=1)
    arrow(axes, (x, y), (x, 0.08), BLACK, linewidth=1)
    write(axes, (6.6, 1.83), "rank 0's shard", RANK_COLOR[0], ha="right")
    write(axes, (0.98, 0.9), "rank 1's\nshard", RANK_COLOR[1], ha="right")
    for (dx, dy), color, width in (
        (gradient, GREY, 2),
        (right, SERIES[0], 4),
        (wrong, SERIES[1], 4),
    ):
        arrow(axes, origin, (x + unit * dx, y - unit * dy), color, linewidth=width)
    write(axes, (5.75, 0.7), "the gradient", GREY, ha="center")
    write(axes, (2.5, 0.25), "each shard clipped by its own norm", SERIES[1])
    write(axes, (2.75, 1.47), "clipped by the global norm", SERIES[0])
    write(axes, (2.4, 1.83), "max_norm", GREY, ha="center")
    return figure


# Seconds of the chapter's experiment: other work before the step; how late a rank is
OTHER_WORK, LATE = 0.1, 0.2
GRADIENTS, SUM, UPDATE = 0.12, 0.03, 0.1  # not to scale: they take milliseconds


@rc_context(STYLE)
def hasty() -> Figure:
    """Draw an update that does not wait for the sum: too early as soon as a rank is late."""
    figure, axes = page(7, 2.2)
    for top, late in ((0.1, 0.0), (1.2, LATE)):
        title = "rank 2 is late" if late else "no rank is late"
        write(axes, (0.1, top + 0.14), title, weight="bold")
        lanes = {
            "rank 0": [("backward", 0, GRADIENTS, "backward"), _update(GRADIENTS)],
            "rank 2": [("backward", late, late + GRADIENTS, "backward"), _update(late + GRADIENTS)],
        }
        start = late + GRADIENTS
        lanes["all-reduce"] = [("communication", start, start + SUM, "")]
        for row, (name, blocks) in enumerate(lanes.items()):
            _draw_lane(axes, top + 0.29 * row, name, blocks)
        early = GRADIENTS + OTHER_WORK < start + SUM
        text = "before the sum:\nwrong" if early else "after the sum:\nright, by luck"
        color = SERIES[1] if early else SERIES[0]
        write(axes, (0.1, top + 0.57), f"update {text}", color, linespacing=1.3)
    return figure


def _update(ready: float) -> tuple[str, float, float, str]:
    """Return the block of a rank's update: it waits for other work, not for the sum."""
    start = ready + OTHER_WORK
    return "optimizer", start, start + UPDATE, "update"


def _draw_lane(
    axes: Axes, top: float, name: str, blocks: list[tuple[str, float, float, str]]
) -> None:
    """Draw a lane of blocks; the time by which a rank is late is hatched."""
    left, inch, height = 2.75, 7.4, 0.25
    write(axes, (left - 0.1, top + height / 2), name, size=10.5, ha="right")
    if blocks[0][1] > 0 and name != "all-reduce":
        hatched(axes, (left, top, blocks[0][1] * inch, height))
    for kind, start, end, text in blocks:
        bounds = (left + start * inch, top, (end - start) * inch, height)
        box(axes, bounds, text, WORK_COLOR[kind], 10)


TRAFFIC = {  # each stage's collectives by the phase in which they run; each sends (N-1)/N P
    0: {"backward": ("reduce-scatter gradients", "all-gather gradients")},
    1: {"backward": ("reduce-scatter gradients",), "optimizer": ("all-gather parameters",)},
    2: {"backward": ("reduce-scatter gradients",), "optimizer": ("all-gather parameters",)},
    3: {
        "forward": ("all-gather parameters",),
        "backward": ("all-gather parameters", "reduce-scatter gradients"),
    },
}


@rc_context(STYLE)
def traffic() -> Figure:
    """Draw which collectives each stage runs in which phase, and the bytes that a rank sends."""
    figure, axes = page(7, 3.2)
    columns = {"forward": (0.95, 1.25), "backward": (2.25, 2.5), "optimizer": (4.8, 1.25)}
    num_bytes = [
        zero_volume(cost.num_parameters(shape_of(6)), 4, RANKS, 0, max(stage, 1)).sent
        for stage in TRAFFIC
    ]
    for phase, (left, width) in columns.items():
        box(axes, (left, 0.1, width, 0.3), phase, WORK_COLOR[phase])
    write(axes, (6.95, 0.26), "sent", GREY, ha="right")
    for stage, phases in TRAFFIC.items():
        top = 0.52 + 0.66 * stage
        write(axes, (0.85, top + 0.28), f"ZeRO-{stage}", ha="right", weight="bold")
        for phase, (left, width) in columns.items():
            axes.plot([left, left + width], [top + 0.57, top + 0.57], color=BAND, linewidth=1)
            for index, text in enumerate(phases.get(phase, ())):
                kind = "gradient" if text.endswith("gradients") else "parameter"
                bounds = (left + 1.25 * index, top, 1.25, 0.54)
                box(axes, bounds, text.replace(" ", "\n"), CATEGORY_COLOR[kind], 10)
        blocks = sum(map(len, phases.values()))
        text = f"{blocks} blocks\n{plain_bytes(num_bytes[stage])}"
        write(axes, (6.95, top + 0.28), text, ha="right")
    return figure
