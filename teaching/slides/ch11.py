"""Drawings of deck 11: all layouts, the grid, who sums and who reads what, and restarts."""

import torch
from matplotlib import rc_context
from matplotlib.figure import Figure

from minitron import cost
from minitron.config import ParallelConfig
from minitron.plan.decide import cuts, decide, remedy
from minitron.plan.estimate import estimate
from minitron.plan.job import Decision, Job
from minitron.plan.search import Candidate
from teaching.figures_plan import landscape
from teaching.figures_style import (
    AXIS_COLOR,
    BAND,
    BLACK,
    GREY,
    RANK_COLOR,
    SERIES,
    STYLE,
    canvas,
    pale,
)
from teaching.lab import ch11 as lab
from teaching.lab import trees
from teaching.slides.models import A100, GPT3, H100
from teaching.slides.shapes import (
    BAD,
    GOOD,
    PLATE,
    PREDICTED,
    SMALL,
    WIDE,
    arrow,
    box,
    name_rows,
    page,
    write,
)

JOB = Job(cost.PUBLISHED["Llama 3.1 70B"], 256, H100, 8192, 1024)
GRID = torch.arange(8).view(2, 2, 2)
"""The ranks of pp 2 x dp 2 x tp 2."""


@rc_context(STYLE)
def all_layouts() -> Figure:
    """Draw memory and seconds of every layout of Llama 3.1 70B on 256 H100s, two marked."""
    layouts = [Candidate(JOB, layout) for layout in lab.all_layouts(JOB)]
    fitting = [each for each in layouts if each.total_bytes <= JOB.limit]
    too_large = [each for each in layouts if each.total_bytes > JOB.limit]

    def place(each: Candidate) -> tuple[float, float]:
        return each.total_bytes / 1e9, each.seconds

    figure = landscape([*map(place, fitting)], [*map(place, too_large)], JOB.limit / 1e9, {})
    axes = figure.axes[0]
    for end, name, color, offset in ((min, "fastest", BLACK, -22), (max, "slowest", SERIES[1], 0)):
        each = end(fitting, key=lambda each: each.seconds)
        axes.plot(*place(each), "o", color=color, markersize=9, zorder=4)
        axes.annotate(
            f"{name}: {each.seconds:.1f} s, {each.total_bytes / 1e9:.0f} GB",
            place(each),
            textcoords="offset points",
            xytext=(10, offset),
            va="center",
            ha="center" if offset else "left",
            color=color,
            bbox=PLATE,
            zorder=4,
        )
    for line in axes.lines[:2]:
        line.set_markersize(7)
    return figure


@rc_context(WIDE)
def cube() -> Figure:
    """Draw eight ranks as a cube: an edge joins two ranks that share a group along its axis."""
    figure, axes = page(10, 4.6)
    steps = {"pp": (2.3, 0.0), "dp": (0.0, 2.2), "tp": (0.95, -0.75)}

    def place(rank: int) -> tuple[float, float]:
        index = torch.nonzero(GRID == rank)[0].tolist()
        moves = zip(index, steps.values(), strict=True)
        offsets = [(i * dx, i * dy) for i, (dx, dy) in moves]
        return 0.7 + sum(x for x, _ in offsets), 1.5 + sum(y for _, y in offsets)

    top = 0.65
    for dim, axis in reversed([*enumerate(steps)]):
        groups = GRID.movedim(dim, -1).reshape(-1, 2).tolist()
        for pair in groups:
            (x, y), (x2, y2) = map(place, pair)
            axes.plot([x, x2], [y, y2], color=AXIS_COLOR[axis], linewidth=5, zorder=1)
        own = next(pair for pair in groups if 5 in pair)
        axes.plot([5.6, 6.2], [top, top], color=AXIS_COLOR[axis], linewidth=5)
        write(axes, (6.35, top), f"{axis}: groups {' '.join(map(str, groups))}", size=13)
        other = own[1 - own.index(5)]
        write(axes, (6.35, top + 0.38), f"rank 5 shares one with rank {other}", GREY, 13)
        top += 1.25
    for rank in range(8):
        x, y = place(rank)
        box(axes, (x - 0.27, y - 0.27, 0.54, 0.54), str(rank), RANK_COLOR[rank], zorder=3)
        axes.texts[-1].set_zorder(4)
    write(axes, (5.6, 4.3), "numbers vary fastest along tp", GREY)
    return figure


@rc_context(WIDE)
def what_is_summed() -> Figure:
    """Draw which numbers of a step are summed over which axis: parts are, copies are not."""
    figure, axes = page(10, 4.5)
    rows = {
        "output of a stage,\ngradient of its input": ("tp",),
        "gradients of weights": ("dp",),
        "squared gradient norm": ("tp", "pp"),
    }
    why = {
        (0, "tp"): "partial sums",
        (0, "pp"): "other stage",
        (0, "dp"): "other samples",
        (1, "tp"): "other weights",
        (1, "pp"): "other weights",
        (1, "dp"): "parts of the\nbatch",
        (2, "tp"): "parts",
        (2, "pp"): "parts",
        (2, "dp"): "copies",
    }
    how_often = ("per micro-batch", "once per step", "once per step")
    for column, axis in enumerate(("tp", "pp", "dp")):
        left = 3.1 + 1.75 * column
        write(axes, (left + 0.8, 0.3), f"over {axis}", weight="bold", ha="center")
        for index, summed in enumerate(rows.values()):
            bounds = (left, 0.65 + 1.2 * index, 1.6, 1.0)
            text = why[index, axis]
            if axis in summed:
                box(axes, bounds, f"sum:\n{text}", AXIS_COLOR[axis], 13)
            else:
                box(axes, bounds, text, "white", 13, BAND)
    for index, name in enumerate(rows):
        write(axes, (0.15, 1.15 + 1.2 * index), name, linespacing=1.2)
        write(axes, (8.4, 1.15 + 1.2 * index), how_often[index], GREY, SMALL)
    return figure


@rc_context(WIDE)
def who_reads_what() -> Figure:
    """Draw which part of the batch each of 8 ranks reads: by its index along dp, or its number."""
    figure, axes = page(10, 2.7)
    for left, title, is_right in (
        (0.2, "by the index along dp", True),
        (5.2, "by the world rank", False),
    ):
        write(axes, (left, 0.22), title, GOOD if is_right else BAD, weight="bold")
        for rank in range(8):
            pp, dp, tp = torch.nonzero(GRID == rank)[0].tolist()
            part, count = (dp, 2) if is_right else (rank, 8)
            corner = (left + 2.35 * pp + 1.05 * tp, 0.85 + 0.85 * dp, 0.98, 0.72)
            color = RANK_COLOR[part]
            box(axes, corner, f"rank {rank}:\n{part + 1} of {count}", color, SMALL)
        for pp in range(2):
            write(axes, (left + 2.35 * pp, 0.62), f"stage {pp}", GREY, SMALL)
    for dp in range(2):
        write(axes, (4.68, 1.21 + 0.85 * dp), f"dp {dp}", GREY, SMALL)
    return figure


@rc_context(WIDE)
def path_of_the_tree() -> Figure:
    """Draw memory and seconds of the layouts that the decision tree looks at."""
    looked = [remedy(JOB, tp, pp) for tp, pp in cuts(JOB)][: len(decide(JOB).steps) - 1]
    figure = Figure(figsize=(10, 4.0), layout="constrained")
    left, right = figure.subplots(1, 2, sharey=True)
    names, limit = [], JOB.limit / 1e9
    found = [Candidate(JOB, layout) for layout in looked]
    fastest = min(each.seconds for each in found)
    for y, each in enumerate(found):
        grid = each.decision.parallel
        again = ",\nrecomputed" if each.decision.recompute == "full" else ""
        names.append(f"tp {grid.tp}, ZeRO-{grid.zero}{again}")
        held, seconds = each.total_bytes / 1e9, each.seconds
        color = SERIES[1] if seconds == fastest else GREY
        for axes, value, unit in ((left, held, "GB"), (right, seconds, "s")):
            axes.barh(y, value, 0.62, color=pale(color), **PREDICTED)
            write(axes, (value / 2, y), f"{value:.1f} {unit}", ha="center")
    left.axvspan(limit, 85, color=BAND, zorder=0)
    write(left, (limit + 0.8, -0.72), f"over {limit:.0f} GB", GREY, 13)
    row = [each.seconds for each in found].index(fastest)
    write(right, (fastest + 0.6, row), "chosen", SERIES[1])
    left.set_xlim(0, 85)
    right.set_xlim(0, 52)
    left.set_title("does it fit?")
    right.set_title("is it faster?")
    left.set_xlabel("GB on each GPU, estimated")
    right.set_xlabel("seconds per step, estimated")
    for axes in (left, right):
        name_rows(axes, names, top=-1.0)
    return figure


@rc_context(WIDE)
def picks() -> Figure:
    """Draw how much slower than the fastest measured layout the picks of three rules were."""
    figure, axes = canvas(10, 4.2)
    given = trees.measured_layouts()
    for y, each in enumerate(given):
        middle = sorted(each.rows, key=lambda row: row.seconds)[len(each.rows) // 2]
        chosen = {
            "median layout": (middle, GREY, "|"),
            "estimator, no memory limit": (each.estimated(fitting=False), SERIES[1], "s"),
            "estimator": (each.estimated(), SERIES[2], "D"),
            "fewest cuts": (each.fewest_cuts(), SERIES[0], "o"),
        }
        for name, (row, color, marker) in chosen.items():
            label = name if y == 0 else None
            style = {"markersize": 13, "markeredgewidth": 3 if marker == "|" else 0}
            axes.plot([each.ratio(row)], [y], marker, color=color, label=label, alpha=0.85, **style)
    axes.axvline(1, color=BLACK, linewidth=1)
    axes.set_xlim(0.9, 4.1)
    name_rows(axes, [f"{each.num_gpus} GPUs" for each in given])
    axes.set_xlabel("measured time of the pick, over the fastest measured")
    figure.legend(
        loc="outside upper center", ncols=4, frameon=False, fontsize=13, handletextpad=0.2
    )
    return figure


TABLE_2 = {384: (144, 153), 768: (88, 149), 1536: (44, 141)}
"""TFLOP/s per GPU by Narayanan et al. 2021, table 2: ZeRO-3, and tp 8 x pp 12."""


@rc_context(WIDE)
def against_a_measurement() -> Figure:
    """Draw estimated and measured rates of GPT-3 on A100s: ZeRO-3 alone, and with tp and pp."""
    per_token = cost.training_flops_per_token(GPT3, 2048)
    work = 1536 * 2048 * (per_token + cost.recompute_flops_per_token(GPT3, 2048, "full"))
    figure = Figure(figsize=(10, 4.2), layout="constrained")
    both = figure.subplots(1, 2, sharey=True, sharex=True)
    for y, (num_gpus, measured) in enumerate(TABLE_2.items()):
        job = Job(GPT3, num_gpus, A100, 2048, 1536)
        layouts = (
            Decision(ParallelConfig(dp=num_gpus, zero=3), "full", 1536 // num_gpus),
            Decision(ParallelConfig(dp=num_gpus // 96, tp=8, pp=12), "full"),
        )
        for axes, layout, rate in zip(both, layouts, measured, strict=True):
            estimated = work / num_gpus / estimate(job, layout).seconds / 1e12
            axes.barh(y - 0.2, estimated, 0.36, color=pale(SERIES[0]), **PREDICTED)
            axes.barh(y + 0.2, rate, 0.36, color=SERIES[0])
            names = (" estimated", " measured") if y == 0 else ("", "")
            write(axes, (estimated + 3, y - 0.2), f"{estimated:.0f}{names[0]}", size=13)
            write(axes, (rate + 3, y + 0.2), f"{rate}{names[1]}", size=13)
    for axes, title in zip(both, ("ZeRO-3 alone", "tp 8 x pp 12"), strict=True):
        axes.set_title(title, weight="bold")
        axes.set_xlabel("TFLOP/s per GPU")
        name_rows(axes, [f"{num_gpus:,} GPUs" for num_gpus in TABLE_2])
    both[0].set_xlim(0, 300)
    return figure


@rc_context(WIDE)
def four_jobs() -> Figure:
    """Draw one training run as four jobs of three steps, each on other ranks."""
    figure, axes = page(10, 2.5)
    jobs = (("dp 2 x tp 2,\nZeRO-1", 4), ("pp 4", 4), ("one process", 1), ("dp 3,\nZeRO-3", 3))
    for index, (name, ranks) in enumerate(jobs):
        left = 0.15 + 2.55 * index
        write(axes, (left, 0.2), f"steps {3 * index + 1} to {3 * index + 3}", weight="bold")
        write(axes, (left, 0.72), name, GREY, 13, linespacing=1.1)
        for rank in range(ranks):
            x, y = left + 0.5 * (rank % 4), 1.15
            box(axes, (x, y, 0.46, 0.5), str(rank), RANK_COLOR[rank])
        if index < 3:
            arrow(axes, (left + 0.5 * ranks + 0.07, 1.4), (left + 2.47, 1.4))
            write(axes, (left + 2.27, 2.1), "names\nand boxes", GREY, SMALL, ha="center")
    return figure


@rc_context(WIDE)
def killed_and_resumed() -> Figure:
    """Draw a job that loses a rank, a checkpoint with a flipped bit, and the next job."""
    figure, axes = page(10, 4.3)
    inch, first = 1.0, 1.9
    write(axes, (0.15, 0.95), "pp 2 x dp 2\nx tp 2", linespacing=1.2)
    write(axes, (0.15, 3.15), "tp 4 x dp 2", linespacing=1.2)
    for step in range(1, 9):
        left = first + inch * (step - 1)
        bounds = (left, 0.65, 0.92, 0.6)
        if step < 6:
            box(axes, bounds, str(step), SERIES[0])
        elif step == 6:
            box(axes, bounds, "6", "white", edge=BAD, hatch="///")
        if step > 2:
            box(axes, (left, 2.85, 0.92, 0.6), str(step), SERIES[0])
    write(axes, (first, 0.4), "steps", GREY)
    write(axes, (first + 5 * inch, 0.4), "rank 5 is killed", BAD)
    for step, text, color in ((2, "saved", GOOD), (4, "saved, then\na bit flips", BAD)):
        x = first + inch * step - 0.04
        axes.plot([x, x], [0.6, 1.55], color=color, linewidth=2.5)
        write(axes, (x, 1.85), text, color, ha="center", linespacing=1.1)
    start = (first + 2 * inch - 0.04, 2.1)
    arrow(axes, start, (start[0], 2.8), GOOD)
    write(
        axes, (0.15, 3.95), "Steps 3 to 5 are repeated; the losses are those of one process.", GREY
    )
    return figure
