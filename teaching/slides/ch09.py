"""Drawings of deck 9: what crosses nodes, the bubble, held micro-batches, a cycle of messages."""

from collections.abc import Mapping
from functools import partial

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from minitron import cost
from minitron.parallel.pipeline.schedule_check import peak_activations
from minitron.parallel.pipeline.schedules import (
    Schedule,
    gpipe,
    interleaved,
    one_forward_one_backward,
    zero_bubble,
)
from minitron.parallel.pipeline.simulator import Timeline, simulate
from teaching.figures_ranks import draw_idle
from teaching.figures_style import (
    AXIS_COLOR,
    BLACK,
    GREY,
    RANK_COLOR,
    SERIES,
    WORK_COLOR,
    canvas,
    pale,
)
from teaching.slides.models import GPT3, H100
from teaching.slides.shapes import BAD, GOOD, PREDICTED, WIDE, arrow, box, name_rows, page, write

S = GPT3.max_sequence_length
MS = {"F": 20, "B": 40}


@rc_context(WIDE)
def zero3_between_nodes() -> Figure:
    """Draw seconds of ZeRO-3's messages between nodes per micro-batch, and of its compute."""
    figure, axes = canvas(10, 3.6)
    each = cost.tensor_parallel_parameters(GPT3, 8)
    size = cost.zero_volume(each, cost.RECIPES["bf16"].parameter, 128, 0, stage=3).sent
    sent = size / H100.nic_bandwidth
    compute = S * cost.training_flops_per_token(GPT3, S) / 8 / (0.4 * H100.bf16_flops)
    rows = {f"weights: {size / 1e9:.0f} GB": (sent, WORK_COLOR["communication"], "to other nodes")}
    for b in (1, 2, 6):
        name = f"{b} sequence{'s' * (b > 1)}"
        rows[name] = (b * compute, WORK_COLOR["matmul"], "of compute")
    for y, (seconds, color, words) in enumerate(rows.values()):
        axes.barh(y, seconds, 0.62, color=pale(color), **PREDICTED)
        write(axes, (seconds + 0.06, y), f"{seconds:.1f} s {words}")
    axes.axvline(sent, color=GREY, linestyle="--", linewidth=1.3, zorder=0)
    name_rows(axes, list(rows))
    axes.set_xlim(0, 5.6)
    axes.set_xlabel("seconds per micro-batch, estimated")
    return figure


def draw_lanes(axes: Axes, line: Timeline, numbered: bool = True) -> None:
    """Draw a lane per rank: passes with the number of their micro-batch, idle time hatched."""
    kinds = {"F": "forward", "B": "backward"}
    for rank, passes in enumerate(line.passes):
        draw_idle(axes, rank, passes, line.seconds)
        for each in passes:
            length = each.end - each.start
            color = WORK_COLOR[kinds[each.action.kind]]
            width = 0.8 if numbered else 0.1
            style = {"color": color, "edgecolor": "white", "linewidth": width}
            axes.barh(rank, length, 0.8, each.start, **style)
            if numbered:
                place = ((each.start + each.end) / 2, rank)
                text = str(each.action.micro_batch)
                axes.text(*place, text, size=11, ha="center", va="center_baseline")
    axes.set_yticks(range(len(line.passes)), [f"rank {r}" for r in range(len(line.passes))])
    axes.tick_params(axis="y", length=0, labelcolor=BLACK, labelsize=12)
    axes.tick_params(axis="x", labelsize=11)
    axes.spines["left"].set_visible(False)
    axes.set_ylim(len(line.passes) - 0.5, -0.5)


@rc_context(WIDE)
def micro_batches() -> Figure:
    """Draw a batch on four stages, whole and in 4 and 32 micro-batches: how busy ranks are."""
    figure = Figure(figsize=(10, 4.9), layout="constrained")
    three = figure.subplots(3, 1, sharex=True)
    for axes, m in zip(three, (1, 4, 32), strict=True):
        line = simulate(gpipe(4, m), {"F": 20 / m, "B": 40 / m})
        draw_lanes(axes, line, numbered=m < 5)
        busy = 1 - cost.pipeline_bubble(4, m, forward=1, backward=2).of_total
        count = f"{m} micro-batches" if m > 1 else "one batch"
        write(axes, (line.seconds + 3, 1.5), f"{count}:\n{busy:.0%} busy")
    three[-1].set_xlim(0, 285)
    three[-1].set_xticks(range(0, 241, 60))
    three[-1].set_xlabel("time (ms), if the batch takes a stage 20 + 40")
    return figure


@rc_context(WIDE)
def held_by_rank() -> Figure:
    """Draw GPipe and 1F1B with eight micro-batches: the same bubble, fewer held at once."""
    figure = Figure(figsize=(10, 4.9), layout="constrained")
    both = figure.subplots(2, 1, sharex=True)
    for axes, make_schedule in zip(both, (gpipe, one_forward_one_backward), strict=True):
        schedule = make_schedule(4, 8)
        line = simulate(schedule, MS)
        draw_lanes(axes, line)
        title = f"{schedule.name}: {line.bubble_of_total:.0%} idle"
        axes.set_title(title, weight="bold")
        for rank, count in enumerate(peak_activations(schedule)):
            words = f"holds {count}" if rank == 0 else str(count)
            write(axes, (line.seconds + 8, rank), words)
    both[-1].set_xlim(0, 760)
    both[-1].set_xticks(range(0, 661, 100))
    both[-1].set_xlabel("time in one step (ms)")
    return figure


@rc_context(WIDE)
def bubble_and_memory() -> Figure:
    """Draw the idle time of four schedules over the micro-batches that rank 0 holds."""
    figure, axes = canvas(10, 4.3)
    half, split = {"F": 10, "B": 20}, {"F": 20, "I": 20, "W": 20}
    makers: Mapping = {
        "GPipe": (gpipe, MS),
        "1F1B": (one_forward_one_backward, MS),
        "interleaved, v = 2": (partial(interleaved, num_chunks=2), half),
        "ZB-H1": (zero_bubble, split),
    }
    for (name, (make_schedule, durations)), color in zip(
        makers.items(), (GREY, *SERIES), strict=False
    ):
        schedule: Schedule = make_schedule(4, 8)
        line, chunks = simulate(schedule, durations), schedule.num_stages // 4
        held = [count / chunks for count in peak_activations(schedule)]
        idle = 100 * line.bubble_of_total
        axes.plot([held[-1], held[0]], [idle, idle], color=color, linewidth=5, alpha=0.4)
        axes.plot([held[0]], [idle], "o", color=color, markersize=13)
        words = f"{name}: {line.seconds:.0f} ms"
        axes.text(held[0], idle + 1.6, words, color=color, ha="center")
    axes.set_xlim(0, 9.2)
    axes.set_ylim(0, 34)
    axes.tick_params(labelsize=12)
    axes.set_xlabel("micro-batches held: rank 0 (dot), down to the last rank (line)")
    axes.set_ylabel("idle share of a step (%)")
    return figure


@rc_context(WIDE)
def cycle_of_messages() -> Figure:
    """Draw three ranks whose sends wait for the receiver: a chain in GPipe, a cycle in 1F1B."""
    figure, axes = page(10, 4.0)
    for left, title, verdict, color in (
        (0.3, "GPipe", "the last rank receives: it runs", GOOD),
        (5.3, "1F1B", "ranks 1 and 2 wait for each other: deadlock", BAD),
    ):
        write(axes, (left, 0.3), title, weight="bold")
        for rank in range(3):
            box(axes, (left + 1.65 * rank, 1.35, 0.8, 0.8), str(rank), RANK_COLOR[rank])
        write(axes, (left, 3.6), verdict, color)
        for rank in range(2):
            start = left + 1.65 * rank + 0.85
            arrow(axes, (start, 1.6), (start + 0.75, 1.6))
            write(axes, (start + 0.38, 1.15), "output", GREY, 13, ha="center")
    right = 5.3 + 2 * 1.65 - 0.05
    arrow(axes, (right, 1.95), (right - 0.75, 1.95), BAD)
    write(axes, (right - 0.38, 2.4), "gradient", BAD, 13, ha="center")
    write(axes, (0.3, 2.95), "all outputs first, gradients later", GREY)
    text = "steady state: rank 1 sends an output,\nrank 2 a gradient"
    write(axes, (5.3, 2.95), text, GREY, linespacing=1.15)
    return figure


@rc_context(WIDE)
def across_nodes() -> Figure:
    """Draw seconds of each axis's messages over InfiniBand for GPT-3, against its compute."""
    figure, axes = canvas(10, 3.9)
    t, p, n = 8, 8, 16
    m, layers, sizes = 1536 // n, GPT3.num_layers // p, (1, S, GPT3.width, 2)
    parameters = cost.num_parameters(GPT3)
    sent = {
        "tp": m * layers * cost.tensor_parallel_volume(*sizes, 0, cost.Layout(t)).sent,
        "pp": cost.pipeline_volume(*sizes, p, m, rank=1).sent,
        "dp": cost.ring_all_reduce_volume(parameters // (t * p), 2, n, 0).sent,
    }
    work = m * S * cost.training_flops_per_token(GPT3, S) / (t * p) / (0.4 * H100.bf16_flops)
    names = {"tp": "tensor parallelism", "pp": "pipeline", "dp": "data parallelism"}
    axes.barh(0, work, 0.62, color=pale(WORK_COLOR["matmul"]), **PREDICTED)
    write(axes, (work + 0.12, 0), f"{work:.1f} s")
    for y, (axis, size) in enumerate(sent.items(), start=1):
        seconds = size / H100.nic_bandwidth
        axes.barh(y, seconds, 0.62, color=pale(AXIS_COLOR[axis]), **PREDICTED)
        words = f"{seconds:.2f} s for {size / 1e9:.1f} GB"
        if axis == "tp":
            words += f",\n{size / H100.nvlink_bandwidth:.2f} s over NVLink"
        write(axes, (seconds + 0.12, y), words, linespacing=1.15)
    name_rows(axes, ["compute", *names.values()])
    axes.set_xlim(0, 11.5)
    axes.set_xlabel("seconds per step over InfiniBand, estimated")
    return figure
