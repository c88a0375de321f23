"""Drawings for chapter 5: one rank's link, orders of addition, a deadlock, a fit and its points."""

from collections.abc import Sequence
from math import cos, pi, sin

import torch
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from minitron import cost
from minitron.plan.published import table
from teaching.figures_ring import ring_sums
from teaching.figures_style import (
    BLACK,
    GREY,
    RANK_COLOR,
    SERIES,
    STYLE,
    WORK_COLOR,
    canvas,
    plain_log_ticks,
)
from teaching.lab import ch05 as lab
from teaching.slides.shapes import PLATE, arrow, box, frame, hatched, page, write

COMMUNICATION = WORK_COLOR["communication"]
LLAMA, NUM_GPUS, LINK = cost.PUBLISHED["Llama 2 7B"], 64, 50e9
RANKS = 4
BUS_BANDWIDTH = {
    int(row["nodes"]): float(row["mean_gb_s"])
    for row in table("playbook_comm_bandwidth")
    if row["collective"] == "all_reduce" and row["nodes"] != "1"
}
"""GB/s of NCCL's all-reduce of 256 MB by nodes of 8 H100s, as the chapter cites them."""


@rc_context(STYLE)
def through_one() -> Figure:
    """Draw 64 GPUs that send their gradients to GPU 0, and the times of sum and computation."""
    figure, axes = page(7, 3.1)
    center, radius = (1.6, 1.5), 1.32
    for gpu in range(1, NUM_GPUS):
        angle = 2 * pi * gpu / (NUM_GPUS - 1)
        place = (center[0] + radius * cos(angle), center[1] + radius * sin(angle))
        axes.plot(*zip(place, center, strict=True), color=COMMUNICATION, linewidth=1)
        axes.plot(*place, "s", color=GREY, markersize=5)
    axes.plot(*center, "s", color=RANK_COLOR[0], markersize=22, zorder=3)
    write(axes, center, "0", "white", 13, ha="center", weight="bold", zorder=4)
    write(axes, (1.6, 2.98), f"{NUM_GPUS} GPUs, one link for all", GREY, ha="center")

    num_bytes = 2 * cost.num_parameters(LLAMA)
    flops = 4096 * cost.training_flops_per_token(LLAMA, 4096)
    times = {
        "computing the gradients": (flops / 400e12, WORK_COLOR["backward"], 2),
        "summing them through GPU 0": (
            cost.naive_all_reduce_seconds(num_bytes, NUM_GPUS, 0, LINK),
            COMMUNICATION,
            1,
        ),
    }
    longest = max(seconds for seconds, _, _ in times.values())
    for row, (name, (seconds, color, digits)) in enumerate(times.items()):
        top, width = 0.95 + 0.95 * row, 2.85 * seconds / longest
        write(axes, (3.4, top - 0.17), name)
        box(axes, (3.4, top, width, 0.42), color=color)
        write(axes, (3.48 + width, top + 0.22), f"{seconds:.{digits}f} s", weight="bold")
    return figure


@rc_context(STYLE)
def orders() -> Figure:
    """Draw in which order ranks add, without chunks and with them, and the sums in float32."""
    figure, axes = page(7, 2.9)
    values = torch.tensor([0.2, 0.3, 0.6, 0.5])  # of ranks 0 to 3
    write(axes, (0.1, 0.2), "without chunks: every rank adds", weight="bold")
    for rank in range(RANKS):
        path = [(rank - step) % RANKS for step in range(RANKS)]
        _draw_sum(axes, (0.85, 0.45 + 0.5 * rank), path, values)
        write(axes, (0.77, 0.64 + 0.5 * rank), f"rank {rank}", ha="right")

    write(axes, (3.7, 0.2), "with chunks: one rank adds", weight="bold")
    complete = ring_sums(RANKS, RANKS - 1)[0][0]
    _draw_sum(axes, (3.7, 1.2), [rank % RANKS for rank in complete], values)
    write(axes, (3.7, 1.78), "and the others get a copy", GREY)
    for rank in range(RANKS):
        arrow(axes, (6.18, 1.39), (6.5, 0.64 + 0.5 * rank), COMMUNICATION)
        box(axes, (6.55, 0.45 + 0.5 * rank, 0.36, 0.38), str(rank), RANK_COLOR[rank])
    numbers = ", ".join(f"{value:.1f}" for value in values.tolist())
    text = f"added from left to right in float32; ranks 0 to 3 have {numbers}"
    write(axes, (0.1, 2.65), text, GREY)
    return figure


def _draw_sum(
    axes: Axes, corner: tuple[float, float], path: Sequence[int], values: torch.Tensor
) -> None:
    """Draw numbered squares in the order in which they are added, and the sum in that order."""
    left, top = corner
    total = torch.zeros(())
    for index, rank in enumerate(path):
        total = total + values[rank]
        box(axes, (left + 0.37 * index, top, 0.35, 0.38), str(rank), RANK_COLOR[rank])
    text = f"{total.item():.7f}"
    write(axes, (left + 0.37 * len(path) + 0.07, top + 0.19), text)


@rc_context(STYLE)
def deadlock() -> Figure:
    """Draw four ranks whose sends wait for a receive that comes after the next rank's send."""
    figure, axes = page(7, 3.0)
    for rank in range(RANKS):
        top, following = 0.15 + 0.66 * rank, (rank + 1) % RANKS
        box(axes, (0.1, top, 0.75, 0.42), f"rank {rank}", RANK_COLOR[rank])
        box(axes, (0.95, top, 1.55, 0.42), f"send to rank {following}", COMMUNICATION)
        hatched(axes, (2.5, top, 2.3, 0.42))
        text = f"waits for rank {following}'s recv"
        write(axes, (3.65, top + 0.21), text, ha="center", bbox=PLATE)
        frame(axes, (4.85, top, 1.75, 0.42), f"recv from rank {(rank - 1) % RANKS}")
    write(axes, (5.72, 2.87), "never reached", GREY, ha="center")
    write(axes, (1.72, 2.87), "all ranks at once", GREY, ha="center")
    return figure


@rc_context(STYLE)
def one_point() -> Figure:
    """Draw the measured bandwidths and two fits: to all six, and without the first of them."""
    figure, axes = canvas(height=3.3)
    nodes, measured = list(BUS_BANDWIDTH), list(BUS_BANDWIDTH.values())
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    for skip, name, color in ((0, "fitted to all six", BLACK), (1, "without 2 nodes", SERIES[1])):
        link = lab.fit_cluster(nodes[skip:], measured[skip:])
        line = [lab.bus_bandwidth(count, link) for count in nodes]
        axes.plot(nodes, line, "--", color=color)
        text = f"{name}:\nbeta {link.bandwidth / 1e9:.0f} GB/s"
        axes.annotate(
            text,
            (nodes[0], line[0]),
            textcoords="offset points",
            xytext=(-10, 0),
            ha="right",
            va="center",
            color=color,
            annotation_clip=False,
        )
    axes.plot(nodes, measured, "o", color=SERIES[0], markersize=8)
    axes.annotate(
        "measured",
        (nodes[3], measured[3]),
        textcoords="offset points",
        xytext=(-8, -10),
        ha="right",
        color=SERIES[0],
    )
    axes.spines["left"].set_visible(False)
    axes.yaxis.tick_right()
    axes.yaxis.set_label_position("right")
    plain_log_ticks(axes)
    axes.set_xticks(nodes, [str(count) for count in nodes])
    axes.set_xlabel("nodes of 8 H100s")
    axes.set_ylabel("bus bandwidth (GB/s)")
    return figure
