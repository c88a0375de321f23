"""Exercises of chapter 11: all axes together. A grid of ranks, and who talks to whom.

Write the body, save, and run `minitron check 11.1` in a terminal or check("11.1") in a notebook. If
you are stuck, `minitron hint 11.1` gives hints in three steps; `minitron reset 11.1` restores the
original. The exercises do not build on each other, so you can take them in any order.

Notation: axes = {"pp": 2, "dp": 3, "tp": 2} is a grid of 12 ranks. Ranks are numbered from 0, and
so are the places along each axis. The last axis varies fastest: ranks 0 and 1 differ only in tp.
Ranks that differ along tp compute each layer together, on the same samples. Ranks that differ along
pp hold different layers. Ranks that differ along dp hold the same layers, and their samples differ.
"""

from collections.abc import Callable
from itertools import product
from math import prod

import torch
import torch.distributed as dist
from torch import Tensor

from minitron.config import ModelConfig


# Exercise 11.1 | Rank and place | 15 min | difficulty 1
def place_of(rank: int, axes: dict[str, int]) -> dict[str, int]:
    """Return the place of a rank along each axis, such as {"pp": 0, "dp": 1, "tp": 0}.

    axes maps names to sizes, in order: at least one axis, with any name and any size from 1 on. If
    the rank is not in the grid, raise a ValueError whose message contains both numbers: the rank,
    and how many ranks there are. Do not modify the arguments.

    Example: of {"pp": 2, "dp": 3, "tp": 2}, rank 9 is (1 x 3 + 1) x 2 + 1: pp 1, dp 1, tp 1.
    """
    ### BEGIN SOLUTION
    if not 0 <= rank < prod(axes.values()):
        raise ValueError(f"rank {rank} is not one of {prod(axes.values())} ranks")
    place = {}
    for axis, size in reversed(axes.items()):
        rank, place[axis] = divmod(rank, size)
    return place
    ### END SOLUTION


def rank_at(place: dict[str, int], axes: dict[str, int]) -> int:
    """Return the rank at a place: the inverse of `place_of`.

    place names every axis, in any order. If the place along an axis is not in the grid, raise a
    ValueError whose message contains both numbers: the place along that axis, and the axis's size.
    Do not modify the arguments.

    Example: of {"pp": 2, "dp": 3, "tp": 2}, {"tp": 1, "dp": 1, "pp": 1} is rank 9.
    """
    ### BEGIN SOLUTION
    rank = 0
    for axis, size in axes.items():
        if not 0 <= place[axis] < size:
            raise ValueError(f"{axis} {place[axis]} is not one of {size} places")
        rank = rank * size + place[axis]
    return rank
    ### END SOLUTION


# Exercise 11.2 | Who talks to whom | 30 min | difficulty 3
def groups_along(axis: str, axes: dict[str, int]) -> list[list[int]]:
    """Return the groups of ranks that differ only in their place along `axis`.

    Each rank is in exactly one group. A group lists its ranks in ascending order, and the groups
    are in ascending order of their first ranks. Do not modify the arguments.

    Example: of {"pp": 2, "dp": 1, "tp": 2}, tp has [[0, 1], [2, 3]], pp has [[0, 2], [1, 3]], dp
    has [[0], [1], [2], [3]].
    """
    ### BEGIN SOLUTION
    names = list(axes)
    behind = prod(axes[name] for name in names[names.index(axis) + 1 :])  # ranks from one to next
    span = behind * axes[axis]
    return [
        list(range(first, first + span, behind))
        for first in range(prod(axes.values()))
        if first % span < behind
    ]
    ### END SOLUTION


def axes_of(event: str, zero: int, sequence: bool) -> set[str]:
    """Return the axes, out of "pp", "dp" and "tp", over which ranks must communicate.

    The question is what has to be communicated at one point of a training step, after the backward
    pass. The setting:

    - Every axis has at least 2 ranks.
    - Weight matrices, including the embedding, are sharded over tp, and each tp rank has its own
      key-value heads. Norm weights are replicated over tp.
    - Without `sequence`, the tp ranks see the same tokens, so their norm gradients are equal. With
      `sequence` (sequence parallelism), each sees a different part of the tokens in the norms.
    - The first stage has the embedding, and the last stage has a copy of it as its output head.
    - With zero = 1, gradients are averaged over dp, and each dp rank then keeps only its shard of
      every gradient and of AdamW's moments.

    event         what must be correct afterwards
    "matrix"      a rank's gradient of a block's matrix (with zero = 1, its shard of it): that of
                  the mean loss over the whole batch
    "norm"        the same for a norm's weight in a block
    "embedding"   the same for the embedding, to which both of its uses contribute
    "clip"        every rank knows the norm of the full model's gradient; before, it has its own
                  averaged gradients
    "loss"        rank 0, on the first stage, knows the mean loss to log it; before, the ranks of
                  the last stage know the loss of their samples (the same along tp)
    "weights"     after optimizer.step(), every rank has its updated part of a matrix, complete

    Example: axes_of("matrix", 0, False) is {"dp"}, because other stages and other tp ranks have
    different matrices.
    """
    ### BEGIN SOLUTION
    return {
        "matrix": {"dp"},
        "norm": {"dp", "tp"} if sequence else {"dp"},
        "embedding": {"dp", "pp"},
        "clip": {"pp", "tp", "dp"} if zero else {"pp", "tp"},
        "loss": {"dp", "pp"},
        "weights": {"dp"} if zero else set(),
    }[event]
    ### END SOLUTION


def gradient_norm(
    gradients: dict[str, Tensor], cut: set[str], zero: int, groups: dict[str, dist.ProcessGroup]
) -> Tensor:
    """Return the norm of the full model's gradient, shape (), the same on every rank.

    gradients: what this rank has, float32 by name; there may be none, and tensors need not be
    contiguous. groups: this rank's group along "pp", "dp" and "tp", each of size 1 or more. Do not
    modify the arguments.

    - Along tp: parameters in `cut` are sharded, all others are replicated and have equal gradients.
    - Along pp: ranks have gradients of different parameters (none is tied).
    - Along dp: ranks have equal gradients; with zero = 1, each has its own shard of every gradient.

    Every element of the model's gradient must count exactly once; the norm is the root of the sum
    of squares. Communication: one all-reduce of at most 8 bytes over each axis that needs it, and
    none over the others. dist.all_reduce(tensor, group=groups["tp"]) computes a sum.

    Example: with 2 tp ranks, the gradients of a sharded matrix are [3] and [4], and both ranks have
    [5] for a norm's weight. The norm is the root of 9 + 16 + 25, 7.07.
    """
    ### BEGIN SOLUTION
    square = torch.zeros(())
    for name, gradient in gradients.items():
        copies = 1 if name in cut else groups["tp"].size()
        square += gradient.square().sum() / copies
    for axis in ("pp", "tp", "dp") if zero else ("pp", "tp"):
        dist.all_reduce(square, group=groups[axis])
    return square.sqrt()
    ### END SOLUTION


# Exercise 11.3 | Layouts that fit | 25 min | difficulty 2
Layout = tuple[int, int, int, int]
"""dp, tp, pp, zero."""


def layouts(
    model: ModelConfig,
    num_gpus: int,
    gpus_per_node: int,
    batch_size: int,
    bytes_per_gpu: int,
    bytes_needed: Callable[[int, int, int, int], int],
) -> list[Layout]:
    """Return all layouts (dp, tp, pp, zero) that can train the model on all GPUs.

    - dp x tp x pp = num_gpus. The last node may have fewer than gpus_per_node GPUs.
    - tp divides model.num_kv_heads (and with it model.num_heads) and model.ffn_width.
    - tp groups consist of neighboring ranks, [0, tp), [tp, 2 tp) and so on, and each group lies
      within one node. Node 0 has the ranks [0, gpus_per_node), and so on.
    - pp divides model.num_layers, and dp divides batch_size, the sequences per step.
    - zero is 0 to 3; only 0 if dp is 1, because there is nothing to shard; 0 or 1 if pp is more
      than 1. (The package can train ZeRO-2 and ZeRO-3 in a pipeline. Leave them out here, because
      by default they communicate for every micro-batch.)
    - bytes_needed(dp, tp, pp, zero), the bytes on the fullest GPU, is at most bytes_per_gpu. Call
      it only for layouts that meet all other conditions.

    Order: by tp, then by pp, then by zero, each ascending. So the layouts that cut the model least
    come first.

    Example: 8 GPUs in nodes of 4, a batch of 8, and a model of 4 heads and 2 layers. If only
    layouts with tp x pp = 4 fit, the answer is [(2, 2, 2, 0), (2, 2, 2, 1), (2, 4, 1, 0),
    (2, 4, 1, 1), (2, 4, 1, 2), (2, 4, 1, 3)].
    """

    ### BEGIN SOLUTION
    def is_possible(dp: int, tp: int, pp: int, zero: int) -> bool:
        return (
            dp * tp * pp == num_gpus
            and model.num_kv_heads % tp == 0
            and model.ffn_width % tp == 0
            and (num_gpus <= gpus_per_node or gpus_per_node % tp == 0)
            and model.num_layers % pp == 0
            and batch_size % dp == 0
            and (zero == 0 or dp > 1)
            and (zero <= 1 or pp == 1)
        )

    divisors = [size for size in range(1, num_gpus + 1) if num_gpus % size == 0]
    possible = [
        layout
        for tp, pp, zero in product(divisors, divisors, range(4))  # in the tree's order
        if is_possible(*(layout := (num_gpus // (tp * pp), tp, pp, zero)))
    ]
    return [layout for layout in possible if bytes_needed(*layout) <= bytes_per_gpu]
    ### END SOLUTION


# Exercise 11.4 | Save here, resume there | 25 min | difficulty 2
Piece = tuple[int, range, range]
"""The old rank that has it, its range in the old shard, and its range in the new shard."""


def pieces(num_elements: int, num_old: int, num_new: int) -> list[list[Piece]]:
    """Return what each of num_new ranks copies from the shards that num_old ranks have saved.

    A flat tensor of num_elements values is sharded over N ranks as follows: rank r has L elements,
    starting with element r L, or as many as are left, where L is num_elements / N, rounded up. The
    last ranks may have none, and num_elements may be 0.

    For each new rank, list its pieces in order: (old rank, range in the old shard, range in the new
    shard). Both ranges count from the start of the shard, not of the tensor. Every element is
    copied once, in as few pieces as possible, and no piece is empty. There may be billions of
    elements, so do not loop over them.

    Example: 7 elements, from 2 ranks ([0, 4) and [4, 7)) to 3 ([0, 3), [3, 6) and [6, 7)):
    [[(0, range(0, 3), range(0, 3))],
     [(0, range(3, 4), range(0, 1)), (1, range(0, 2), range(1, 3))],
     [(1, range(2, 3), range(0, 1))]].
    """

    ### BEGIN SOLUTION
    def shards(size: int) -> list[range]:
        length = -(-num_elements // size)
        ends = [min(rank * length, num_elements) for rank in range(size + 1)]
        return [range(*pair) for pair in zip(ends, ends[1:], strict=False)]

    answer: list[list[Piece]] = [[] for _ in range(num_new)]
    for new_rank, here in enumerate(shards(num_new)):
        for old_rank, there in enumerate(shards(num_old)):
            start, stop = max(here.start, there.start), min(here.stop, there.stop)
            if start < stop:
                answer[new_rank].append(
                    (
                        old_rank,
                        range(start - there.start, stop - there.start),
                        range(start - here.start, stop - here.start),
                    )
                )
    return answer
    ### END SOLUTION


# Exercise 11.5 | 8 ranks, one limit | 30 min | difficulty 3
def layout() -> dict:
    """Choose a layout in which 8 ranks train the story model and none holds more than 1.15 MB.

    The model: a Llama with 4 layers, width 64, 2 heads, feed-forward width 192 and a vocabulary of
    136, embedding and output head tied: 222,272 parameters, all in float32, trained with AdamW. A
    step has 8 sequences of 64 tokens. Return a dict with all of these keys, which are also options
    of `minitron train`:

        dp, tp, pp            ranks along each axis; dp x tp x pp is 8
        zero                  0 to 3: the ZeRO stage, with or without a pipeline
        sequence              True or False: sequence parallelism, which needs tp
        recompute             "none", "full", "selective" or "sqrt"
        micro_batch_size      sequences in one forward and backward pass of a rank

    The grader trains 4 steps on 8 real ranks, the first two under a memory meter. At its peak, no
    rank may hold more than 1,150,000 bytes of parameters, gradients, optimizer state, activations
    and temporary tensors together. The losses must be those of one process, as they are in every
    layout that runs.

    More than one layout fits, but probably not the first that you think of. Estimate before you
    try: a parameter takes 16 bytes with its gradient and moments; for the backward pass, a layer
    saves about 5.7 kB per token, or 256 bytes (its input) with recomputation; with 1F1B, pipeline
    rank r has up to p - r micro-batches in flight.
    """
    ### BEGIN SOLUTION
    return {
        "dp": 2,
        "tp": 2,
        "pp": 2,
        "zero": 1,
        "sequence": True,
        "recompute": "full",
        "micro_batch_size": 1,
    }
    ### END SOLUTION
