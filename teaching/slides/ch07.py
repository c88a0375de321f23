"""Drawings of deck 7: what fits, logits that stay sharded, a bias too early, and two nodes."""

from dataclasses import replace

from matplotlib import rc_context
from matplotlib.figure import Figure

from minitron import cost
from teaching.figures import Matrix, cut
from teaching.figures_plan import step_bars
from teaching.figures_style import (
    BAND,
    CATEGORY_COLOR,
    GREY,
    RANK_COLOR,
    STYLE,
    WORK_COLOR,
    canvas,
    ink,
    pale,
)
from teaching.slides.models import GPT3, H100
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

S = GPT3.max_sequence_length


@rc_context(WIDE)
def what_fits() -> Figure:
    """Draw GPT-3's GB on each of 1,024 GPUs: with ZeRO-3 alone, and in groups of 8 ranks."""
    figure, axes = canvas(10, 3.4)
    layers = 2 * 2 * 2 * cost.num_block_parameters(GPT3)  # two, and their gradients, in bfloat16
    eight, each = cost.Layout(tensor_parallel=8), cost.tensor_parallel_parameters(GPT3, 8)
    rows = {
        "ZeRO-3 alone": (
            cost.zero_bytes(cost.num_parameters(GPT3), 1024, 3),
            layers,
            cost.activation_bytes(GPT3, 1, S),
        ),
        "in groups\nof 8 ranks": (
            cost.zero_bytes(each, 128, 3),
            layers / 8,
            cost.activation_bytes(GPT3, 1, S, layout=eight),
        ),
    }
    limit = H100.memory_bytes / 1e9
    axes.axvspan(limit, 120, color=BAND, zorder=0)
    write(axes, (limit + 1, -0.78), f"an H100 has {limit:.1f} GB", GREY, 13)
    kinds = {"state": "optimizer state", "two layers": "temporary", "activations": "activation"}
    for y, sizes in enumerate(rows.values()):
        left = 0.0
        for (name, kind), size in zip(kinds.items(), sizes, strict=True):
            width, color = size / 1e9, pale(CATEGORY_COLOR[kind])
            axes.barh(y, width, 0.6, left, color=color, **PREDICTED)
            words = f"{name}: {width:.1f}" if width > 20 else f"{width:.1f}" if width > 5 else ""
            write(axes, (left + width / 2, y), words, ink(color), ha="center")
            left += width
        write(axes, (left + 1, y), f"{left:.1f} GB")
    write(axes, (0, 0.5), "green: training state; yellow: two unsharded layers", GREY, 13)
    name_rows(axes, list(rows), top=-1.0)
    axes.set_xlim(0, 120)
    axes.set_xlabel("GB on each of 1,024 GPUs, by formula")
    return figure


@rc_context(WIDE)
def logits_on_a_rank() -> Figure:
    """Draw what one of four ranks holds for the loss: all logits four times, or thrice its part."""
    figure, axes = page(10, 4.3)
    vocabulary, tokens, ranks = 12_288, 256, 4
    full = 4 * vocabulary * tokens / 1e6
    part = full / ranks
    names = ("all logits", "log-probabilities", "their gradient", "gradient of logits")
    total = len(names) * full + part
    write(axes, (0.2, 0.3), f"gathered: {total:.1f} MB", weight="bold")
    box(axes, (0.2, 0.6, 0.36, 1.05), "0", RANK_COLOR[0], SMALL)
    for index, name in enumerate(names):
        box(axes, (0.75 + 2.3 * index, 0.6, 2.15, 1.05), f"{name}\n{full:.1f} MB", BAND, 13)
    write(axes, (0.2, 2.35), f"sharded: {3 * part:.1f} MB", weight="bold")
    for index in range(3):
        box(axes, (0.2 + 0.7 * index, 2.65, 0.54, 1.05), "0", RANK_COLOR[0])
    words = (
        f"each {part:.1f} MB: a quarter of the logits, and what is derived from it;\n"
        "of each token, three numbers are sent"
    )
    write(axes, (2.5, 3.17), words, GREY, linespacing=1.3)
    return figure


@rc_context(WIDE)
def bias_and_sum() -> Figure:
    """Draw a bias that is added to each partial sum, so once per rank, or once after the sum."""
    figure, axes = page(10, 3.2)
    for top, name, is_right, color in (
        (0.2, "correct", True, GOOD),
        (1.75, "reviewed", False, BAD),
    ):
        write(axes, (0.1, top + 0.62), name, color, weight="bold")
        for rank in range(2):
            y = top + 0.68 * rank
            bounds = (1.4, y, 1.5, 0.58)
            style = {"hatch": "////", "edge": RANK_COLOR[rank]}
            box(axes, bounds, "", "white", **style)
            write(axes, (2.15, y + 0.29), f"$X_{rank} W_{rank}$", ha="center", bbox=PLATE)
            if not is_right:
                box(axes, (3.1, y, 0.9, 0.58), "+ b", RANK_COLOR[rank])
        write(axes, (4.95, top + 0.32), "all-reduce", GREY, SMALL, ha="center")
        start = 3.05 if is_right else 4.15
        arrow(axes, (start, top + 0.63), (5.65, top + 0.63), WORK_COLOR["communication"])
        box(axes, (5.8, top + 0.3, 1.0, 0.66), "X W" if is_right else "sum")
        if is_right:
            write(axes, (6.95, top + 0.63), "+ b")
        write(axes, (7.9, top + 0.63), f"= X W + {'b' if is_right else '2 b'}", color)
    return figure


@rc_context(STYLE)
def gathers_or_reduce() -> Figure:
    """Draw the second matmul split by rows or by columns, and the bytes that a rank sends."""
    tokens, width, wide, ranks = 6, 8, 32, range(4)
    each = (8, len(ranks), 0)  # bytes of a value, ranks, and which rank

    def sent(name: str, columns: int) -> int:
        return cost.collective_volume(name, tokens * columns, *each).sent

    reduced = sent("all_reduce", width)
    gathered = sent("all_gather", wide) + sent("all_gather", width)
    hidden = Matrix("hidden", "S x W/4", 1.0, 1.5, columns=tuple(ranks))
    full = Matrix("hidden", "S x W", 1.0, 1.5)
    Y = Matrix("Y", "S x D", 1.0, 0.8)
    return cut(
        {
            f"by rows: one all-reduce, {reduced:,} bytes": [
                hidden,
                "x",
                Matrix("down", "W/4 x D", 1.3, 0.8, rows=tuple(ranks)),
                "=",
                Matrix("Y", "S x D", 1.0, 0.8, sum_of=tuple(ranks)),
                "all-reduce",
                Y,
            ],
            f"by columns: two all-gathers, {gathered:,} bytes": [
                hidden,
                "all-gather",
                full,
                "x",
                Matrix("down", "W x D/4", 1.3, 0.8, columns=tuple(ranks)),
                "=",
                Matrix("Y", "S x D/4", 1.0, 0.8, columns=tuple(ranks)),
                "all-gather",
                Y,
            ],
        }
    )


@rc_context(STYLE)
def one_node_or_two() -> Figure:
    """Draw a block of GPT-3 on 8 and 16 ranks: milliseconds of compute and of all-reduces."""
    one, two = (cost.training_flops_per_token(replace(GPT3, num_layers=n), S) for n in (1, 2))
    flops, message = S * (two - one), 2 * S * GPT3.width
    inside, across = cost.Link(0, H100.nvlink_bandwidth), cost.Link(0, H100.nic_bandwidth)
    ring = cost.ring_all_reduce_seconds
    ways = {
        "8, one node": (8, ring(message, 8, *inside)),
        "8, eight nodes": (8, ring(message, 8, *across)),
        "16, two tiers": (
            16,
            cost.hierarchical_all_reduce_seconds(message, 8, 2, inside, across),
        ),
        "16, one ring": (16, ring(message, 16, *across)),
        "16, eight rings": (16, ring(message / 8, 16, *across)),
    }
    parts = {
        name: {"matmul": 1e3 * flops / t / (0.4 * H100.bf16_flops), "tp": 4e3 * seconds}
        for name, (t, seconds) in ways.items()
    }
    figure = step_bars(parts, unit="ms")
    axes = figure.axes[0]
    axes.set_xlabel("time of one block, estimated (ms)")
    axes.set_xlim(0, 20)
    for y, (t, _) in enumerate(ways.values()):
        total = sum(list(parts.values())[y].values())
        axes.text(17.4, y, f"{t * total:.0f} GPU-ms", va="center", color=GREY)
    return figure
