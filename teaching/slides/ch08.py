"""Drawings of deck 8: what is replicated, whose tokens are where, which transfers can overlap."""

from functools import partial

import torch
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from minitron import cost
from teaching.figures import Block, Matrix, cut, timeline
from teaching.figures_style import (
    BAND,
    CATEGORY_COLOR,
    GREY,
    RANK_COLOR,
    STYLE,
    WORK_COLOR,
    canvas,
    pale,
)
from teaching.slides.models import H100
from teaching.slides.shapes import (
    BAD,
    GOOD,
    PREDICTED,
    SMALL,
    WIDE,
    arrow,
    box,
    name_rows,
    page,
    row,
    write,
)

GPT3, S = cost.PUBLISHED["GPT-3 175B"], 2048
UNIT = S * GPT3.width
ACTIVATION = CATEGORY_COLOR["activation"]

saved = partial(
    cost.activation_bytes_per_layer,
    GPT3,
    1,
    S,
    attention="materialized",
    recompute="selective",
)
"""Bytes that a block of GPT-3 saves for one sequence."""

PARTS = {  # bytes x B S D: replicated over the tensor-parallel ranks, or not (chapter 8, section 2)
    "inputs of\nnorms": (4, True),
    "masks": (2, True),
    "inputs of\nQ, K, V, up": (4, True),
    "Q, K, V": (6, False),
    "input\nof out": (2, False),
    "outputs of up and GELU": (16, False),
}


def replicated_bytes(ranks: int = 8) -> float:
    """Return what every rank saves of a block: R, from R + C and R + C/t, as the chapter does."""
    alone, shared = (saved(layout=cost.Layout(t)) for t in (1, ranks))
    return (ranks * shared - alone) / (ranks - 1)


@rc_context(WIDE)
def activations_by_ranks() -> Figure:
    """Draw all blocks of GPT-3 on 1 to 32 ranks: the replicated bytes stay the same."""
    figure, axes = canvas(10, 4.4)
    same = GPT3.num_layers * replicated_bytes() / 1e9
    ranks = (1, 2, 4, 8, 16, 32)
    for y, t in enumerate(ranks):
        total = GPT3.num_layers * saved(layout=cost.Layout(t)) / 1e9
        axes.barh(y, same, 0.72, color=BAND, **PREDICTED)
        axes.barh(y, total - same, 0.72, same, color=pale(ACTIVATION), **PREDICTED)
        write(axes, (total + 0.6, y), f"{total:.1f} GB, {same / total:.0%} the same")
    for x, y, text in (
        (same / 2, 0, "replicated"),
        ((same + 82) / 2, 0, "sharded over the ranks"),
        (same / 2, 3, f"{same:.1f} GB"),
    ):
        write(axes, (x, y), text, ha="center")
    name_rows(axes, [f"{t} rank{'s' * (t > 1)}" for t in ranks])
    axes.set_xlim(0, 108)
    axes.set_xlabel("activations on each rank (GB)", size=14)
    return figure


@rc_context(WIDE)
def bytes_of_a_block() -> Figure:
    """Draw the 34 bytes that a block saves, by tensor, on one GPU and on each of eight."""
    figure, axes = page(10, 3.9)
    assert sum(size for size, _ in PARTS.values()) == round(saved(layout=cost.Layout(1)) / UNIT)
    write(axes, (0.15, 0.25), "bytes that a block saves, times B S D", GREY)
    for top, t, title in ((0.95, 1, "one GPU"), (2.55, 8, "each of 8 GPUs")):
        total = saved(layout=cost.Layout(t)) / UNIT
        write(axes, (0.15, top - 0.3), f"{title}: {total:.1f}", weight="bold")
        left, inch = 0.15, 9.7 / 34
        for name, (size, is_replicated) in PARTS.items():
            width = inch * (size if is_replicated else size / t)
            fits = width > 0.5 and (t == 1 or is_replicated)
            color = BAND if is_replicated else ACTIVATION
            text = f"{size}" if fits else ""
            box(axes, (left, top, width, 0.6), text, color)
            if t == 1:
                write(axes, (left + width / 2, top + 0.88), name, GREY, SMALL, ha="center")
            left += width
        if t > 1:
            write(axes, (left + 0.12, top + 0.3), f"24/{t} = {24 / t:g}")
    _explain(axes, 3.6)
    return figure


def _explain(axes: Axes, middle: float) -> None:
    """Draw what gray and the color of activations mean."""
    for left, color, text in (
        (0.15, BAND, "replicated: the same on every rank"),
        (4.4, ACTIVATION, "sharded over the ranks"),
    ):
        box(axes, (left, middle - 0.13, 0.3, 0.26), color=color)
        write(axes, (left + 0.42, middle), text, GREY)


@rc_context(WIDE)
def order_of_tokens() -> Figure:
    """Draw two sequences of four tokens on two ranks, concatenated along dimensions 0 and 1."""
    figure, axes = page(10, 4.5)
    names = 10 * torch.arange(2)[:, None] + torch.arange(4)
    owners = torch.tensor([0, 0, 1, 1]).expand(2, 4)
    parts = [list(each.chunk(2, dim=1)) for each in (names, owners)]
    for rank, left in ((0, 0.3), (1, 0.3)):
        top = 0.75 + 2.0 * rank
        write(axes, (left, top - 0.3), f"rank {rank} has (B, S/t)", weight="bold")
        _draw_tokens(axes, (left, top), *(part[rank] for part in parts))
    for y, dim, verdict, color in (
        (0.75, 0, "two texts in one sequence", BAD),
        (2.75, 1, "every sequence with its own tokens", GOOD),
    ):
        arrow(axes, (2.35, 2.15), (4.25, y + 0.5))
        write(axes, (4.6, y - 0.3), f"concatenated along dim {dim}, as (B, S)", weight="bold")
        joined = [torch.cat(part, dim).reshape(2, 4) for part in parts]
        _draw_tokens(axes, (4.6, y), *joined)
        write(axes, (4.6, y + 1.25), verdict, color)
        for sequence in (0, 1):
            write(axes, (6.8, y + 0.25 + 0.5 * sequence), f"sequence {sequence}", GREY)
    write(axes, (2.45, 1.35), "all-gather", GREY)
    write(axes, (0.3, 4.25), "13 is token 3 of sequence 1; color: the rank that sent it", GREY)
    return figure


def _draw_tokens(
    axes: Axes, corner: tuple[float, float], names: torch.Tensor, owners: torch.Tensor
) -> None:
    """Draw a row of squares per sequence: each token's name, in the color of its rank."""
    for index, (texts, ranks) in enumerate(zip(names.tolist(), owners.tolist(), strict=True)):
        colors = [RANK_COLOR[rank] for rank in ranks]
        row(axes, (corner[0], corner[1] + 0.5 * index), texts, colors)


@rc_context(STYLE)
def backward_of_feed_forward() -> Figure:
    """Draw feed-forward's backward pass in GPT-3: which transfer runs during which matmul."""
    matmul = 1e6 * 2 * S * GPT3.width * (GPT3.ffn_width // 8) / H100.bf16_flops
    transfer = 1e6 * cost.ring_all_gather_seconds(2 * UNIT, 8, 0, H100.nvlink_bandwidth)
    starts = [transfer + index * matmul for index in range(4)]
    names = (
        "gradient of\ndown's input",
        "gradient of\ndown",
        "gradient of\nup's input",
        "gradient of\nup",
    )
    compute = [Block("matmul", start, start + matmul, " ") for start in starts]
    sent = (0.0, starts[2], starts[3])
    network = [Block("communication", start, start + transfer, "  ") for start in sent]
    figure = timeline({}, {"compute": compute, "NVLink": network}, unit="µs")
    figure.set_size_inches(10, 4.0)
    axes = figure.axes[0]
    axes.set_ylim(2.35, -0.5)
    texts = (
        "all-gather of the\noutput's gradient: exposed",
        "all-gather of the\ninput, again",
        "reduce-scatter of the\ninput's gradient",
    )
    for start, text in zip(sent, texts, strict=True):
        axes.text(start, 1.45, text, va="top", size=13, linespacing=1.2)
    for start, name in zip(starts, names, strict=True):
        axes.text(start + matmul / 2, 0, name, ha="center", va="center", size=13)
    axes.set_xlabel("time, estimated at full speed (µs)", size=13)
    axes.tick_params(labelsize=13)
    return figure


@rc_context(WIDE)
def dropout_masks() -> Figure:
    """Draw which values two ranks keep, in heads and in the residual stream, in three setups."""
    figure, axes = page(10, 4.6)
    write(axes, (0.2, 0.25), "values kept by\nranks 0 and 1", GREY)
    for left, title in ((2.7, "heads"), (6.4, "residual stream")):
        write(axes, (left, 0.25), title, weight="bold")
    setups = (
        ("tensor\nparallel", True, "same: replicated", GOOD),
        ("sequence\nparallel", False, "different: own tokens", GOOD),
        ("sequence,\nplain Dropout", True, "same: wrong", BAD),
    )
    for index, (name, is_same, verdict, color) in enumerate(setups):
        top = 0.65 + 1.35 * index
        write(axes, (0.2, top + 0.3), name)
        _draw_masks(axes, (2.7, top), seeds=(2, 3))
        _draw_masks(axes, (6.4, top), seeds=(4, 4 if is_same else 5))
        write(axes, (2.7, top + 0.82), "different: own heads", GOOD)
        write(axes, (6.4, top + 0.82), verdict, color)
    return figure


def _draw_masks(axes: Axes, corner: tuple[float, float], seeds: tuple[int, int]) -> None:
    """Draw ten squares per rank: in its color if the value is kept, else empty."""
    for rank, seed in enumerate(seeds):
        kept = torch.rand(10, generator=torch.Generator().manual_seed(seed)) < 0.5
        for index, is_kept in enumerate(kept.tolist()):
            bounds = (corner[0] + 0.3 * index, corner[1] + 0.32 * rank, 0.27, 0.27)
            color = RANK_COLOR[rank] if is_kept else "white"
            box(axes, bounds, str(rank) if is_kept else "", color, 11, edge=GREY, linewidth=0.8)


@rc_context(STYLE)
def between_the_halves() -> Figure:
    """Draw norm and feed-forward on two ranks: the all-reduce, and its halves around the norm."""
    feed_forward = Matrix("feed-\nforward", "S x F/2", columns=(0, 1))
    before, after = (Matrix(name, "S x D") for name in ("norm", "add, norm"))
    own_before, own_after = (Matrix(name, "S/2 x D", rows=(0, 1)) for name in ("norm", "add, norm"))
    full = Matrix("full input", "S x D")
    return cut(
        {
            "tensor parallelism": [before, "", feed_forward, "all-reduce", after],
            "with sequence parallelism": [
                own_before,
                "all-gather",
                full,
                "",
                feed_forward,
                "reduce-scatter",
                own_after,
            ],
        }
    )


WAYS = {
    "tensor": cost.Layout(8),
    "sequence, inputs kept": cost.Layout(8, sequence_parallel=True, regather=False),
    "sequence": cost.Layout(8, sequence_parallel=True),
}
SENT = {"all_reduce": 2, "reduce_scatter": 1, "all_gather": 1}
"""Elements that a collective sends, in units of B S D (t-1)/t."""


@rc_context(WIDE)
def bytes_against_traffic() -> Figure:
    """Draw what each of 8 GPUs saves of GPT-3, and what a block sends, exposed or not."""
    figure = Figure(figsize=(10, 3.6), layout="constrained")
    left, right = figure.subplots(1, 2, sharey=True)
    color = WORK_COLOR["communication"]
    for y, layout in enumerate(WAYS.values()):
        gigabytes = GPT3.num_layers * saved(layout=layout) / 1e9
        left.barh(y, gigabytes, 0.6, color=pale(ACTIVATION), **PREDICTED)
        write(left, (gigabytes + 0.5, y), f"{gigabytes:.1f} GB")
        forward, backward = (
            sum(SENT[name] * count for name, count in calls.items())
            for calls in cost.tensor_parallel_calls(layout).values()
        )
        exposed = forward + 2 * layout.sequence_parallel
        right.barh(y, exposed, 0.6, color=color)
        right.barh(y, forward + backward - exposed, 0.6, exposed, color=pale(color), **PREDICTED)
        write(right, (exposed / 2, y), f"{exposed} exposed", size=13, ha="center")
        write(right, (forward + backward + 0.15, y), f"{forward + backward}")
    left.set_xlim(0, 40)
    right.set_xlim(0, 11)
    left.set_title("activations saved on each GPU")
    right.set_title("elements that a block sends")
    left.set_xlabel("GB")
    right.set_xlabel("units of B S D (t-1)/t")
    for axes in (left, right):
        name_rows(axes, ["tensor", "sequence,\ninputs kept", "sequence"])
    return figure
