"""Exercises of chapter 11: all axes together. A grid of ranks, and who talks to whom.

Write a body, save, and ask `minitron check 11.1`, or check("11.1") in a notebook. Stuck:
`minitron hint 11.1`, three levels. Start again: `minitron reset 11.1`. The exercises do not build
on one another; take them in any order.

Notation: axes = {"pp": 2, "dp": 3, "tp": 2} is a grid of 12 ranks, numbered from 0, in which every
rank has one place along each axis, from 0 as well. The last axis varies fastest: ranks 0 and 1
differ in tp alone. Along tp ranks compute each layer together, on the same samples; along pp they
hold other layers; along dp they hold the same parts, and read other samples.
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
    """The place of a rank along each axis: {"pp": 0, "dp": 1, "tp": 0}.

    axes: name to size, in order; one axis or more, of any names, of any size from 1 on. For a rank
    that is not in the grid raise a ValueError whose message has both numbers, the rank and how many
    there are. Do not modify the arguments.

    Example: of {"pp": 2, "dp": 3, "tp": 2}, rank 9 is (1 x 3 + 1) x 2 + 1: pp 1, dp 1, tp 1.
    """
    raise NotImplementedError("Exercise 11.1 - Rank and place.  Hint: minitron hint 11.1")


def rank_at(place: dict[str, int], axes: dict[str, int]) -> int:
    """The rank at a place, which names every axis, in any order: the inverse of `place_of`.

    If the place along an axis is not in the grid, raise a ValueError whose message has both
    numbers, the place along that axis and the axis's size. Do not modify the arguments.

    Example: of {"pp": 2, "dp": 3, "tp": 2}, {"tp": 1, "dp": 1, "pp": 1} is rank 9.
    """
    raise NotImplementedError("Exercise 11.1 - Rank and place.  Hint: minitron hint 11.1")


# Exercise 11.2 | Who talks to whom | 30 min | difficulty 3
def groups_along(axis: str, axes: dict[str, int]) -> list[list[int]]:
    """The groups of ranks that differ in their place along `axis` alone.

    Each group is a list of ranks in rising order, and so are the groups, by their first ranks. Each
    rank is in one of them. Do not modify the arguments.

    Example: of {"pp": 2, "dp": 1, "tp": 2}, tp has [[0, 1], [2, 3]], pp has [[0, 2], [1, 3]], dp
    has [[0], [1], [2], [3]].
    """
    raise NotImplementedError("Exercise 11.2 - Who talks to whom.  Hint: minitron hint 11.2")


def axes_of(event: str, zero: int, sequence: bool) -> set[str]:
    """Over which of the axes "pp", "dp" and "tp" must ranks talk for this to be right?

    Along all three axes there are 2 ranks or more. Matrices, the embedding among them, are cut over
    tp, and every rank of tp has key-value heads of its own. Of a norm's weight each has a whole
    copy, and the same gradient. Only with `sequence` (sequence parallelism) does a rank of tp see
    its part of the tokens there, not all. The first stage has the embedding, and the last one, as
    its head, a copy of it. With zero = 1 a rank keeps, of every gradient, after it has been
    averaged, and of AdamW's moments its own shard alone, one of dp.

    event           what must travel after the backward pass
    "matrix"        so that a rank has its gradient of a matrix of a block (with zero = 1, of its
                    shard): that of the mean loss over the batch
    "norm"          the same of a norm's weight in a block
    "embedding"     the same of the embedding, which both its uses add to
    "clip"          every rank has its averaged gradients, and needs the norm of the whole model's
    "loss"          the ranks of the last stage have the loss of their samples, all along tp the
                    same; rank 0, on the first stage, is to log the mean
    "weights"       after optimizer.step(): so that every rank has its whole updated part of a
                    matrix

    Example: axes_of("matrix", 0, False) is {"dp"}: other stages and other ranks of tp have other
    matrices.
    """
    raise NotImplementedError("Exercise 11.2 - Who talks to whom.  Hint: minitron hint 11.2")


def gradient_norm(
    gradients: dict[str, Tensor], cut: set[str], zero: int, groups: dict[str, dist.ProcessGroup]
) -> Tensor:
    """The norm of the whole model's gradient, shape (), on every rank the same.

    gradients: float32, by name, what this rank has; there may be none. The parameters in `cut` are
    cut over tp; of all others each rank of tp has the same gradient. Along pp ranks have gradients
    of other parameters (none is tied). Along dp they have the same gradients; with zero = 1 each
    has its own shard of every one instead. groups: "pp", "dp" and "tp", this rank's group along
    each; group.size() ranks, perhaps 1. Tensors need not be contiguous. Do not modify the
    arguments.

    Every element of the model's gradient counts once. The norm is the root of the sum of the
    squares. On the wire: one all-reduce of 8 bytes at most over each axis that needs it, none over
    the others: dist.all_reduce(tensor, group=groups["tp"]) sums.

    Example: along tp 2 ranks have of a cut matrix [3] and [4], of a norm's weight both [5]. The
    norm is the root of 9 + 16 + 25, 7.07.
    """
    raise NotImplementedError("Exercise 11.2 - Who talks to whom.  Hint: minitron hint 11.2")


# Exercise 11.3 | Layouts that fit | 25 min | difficulty 2
Layout = tuple[int, int, int, int]
"""dp, tp, pp, zero."""


def layouts(
    model: ModelConfig, num_gpus: int, gpus_per_node: int, batch_size: int, bytes_per_gpu: int,
    bytes_needed: Callable[[int, int, int, int], int],
) -> list[Layout]:
    """All layouts (dp, tp, pp, zero) that train the model on all GPUs, in the order of the tree.

    - dp x tp x pp is num_gpus. The last node may have fewer than gpus_per_node GPUs.
    - Here tp divides model.num_kv_heads, and so model.num_heads, and model.ffn_width.
    - The ranks of tp are neighbors, [0, tp), [tp, 2 tp) and so on; each such group lies within one
      node. Node 0 has the ranks [0, gpus_per_node), and so on.
    - pp divides model.num_layers, dp divides batch_size, the sequences of a step.
    - zero is 0 to 3; 0 alone if dp is 1, where there is nothing to divide; 0 or 1 if pp is more
      than 1. (The package trains stages 2 and 3 in a pipeline, too. Leave them out here, because
      by default they communicate for each of its many micro-batches.)
    - bytes_needed(dp, tp, pp, zero), what the fullest GPU holds, is bytes_per_gpu at most. Call it
      only for layouts that fulfil all other conditions.

    The order, a rule of thumb that cuts the model as little as it can: first the smallest tp, of
    these the smallest pp, of these the smallest zero.

    Example: 8 GPUs in nodes of 4, a batch of 8, and a model of 4 heads and 2 layers. If only
    layouts with tp x pp = 4 fit, the answer is [(2, 2, 2, 0), (2, 2, 2, 1), (2, 4, 1, 0),
    (2, 4, 1, 1), (2, 4, 1, 2), (2, 4, 1, 3)].
    """
    raise NotImplementedError("Exercise 11.3 - Layouts that fit.  Hint: minitron hint 11.3")


# Exercise 11.4 | Save here, resume there | 25 min | difficulty 2
Piece = tuple[int, range, range]
"""The old rank that has it, where it lies in the old shard, where it goes in the new one."""


def pieces(num_elements: int, num_old: int, num_new: int) -> list[list[Piece]]:
    """What each of num_new ranks copies from the shards that num_old ranks have saved.

    A flat tensor of num_elements is cut over N ranks so: rank r has the elements from r L on, L of
    them or what is left, where L is num_elements / N, rounded up. The last ranks may have none;
    num_elements may be 0.

    For each new rank, list its pieces in their order: (old rank, range there, range here). Both
    ranges count from the start of a shard, not of the tensor. Each element comes once, in as few
    pieces as can be; none is empty. There may be billions of elements: no loop over them.

    Example: 7 elements, from 2 ranks ([0, 4) and [4, 7)) to 3 ([0, 3), [3, 6) and [6, 7)):
    [[(0, range(0, 3), range(0, 3))],
     [(0, range(3, 4), range(0, 1)), (1, range(0, 2), range(1, 3))],
     [(1, range(2, 3), range(0, 1))]].
    """
    raise NotImplementedError("Exercise 11.4 - Save here, resume there.  Hint: minitron hint 11.4")


# Exercise 11.5 | 8 ranks, one limit | 30 min | difficulty 3
def layout() -> dict:
    """Choose how 8 ranks train the story model, so that none holds more than 1.15 MB.

    The model: a Llama of 4 layers, width 64, 2 heads, feed-forward width 192, 136 words, embedding
    and head tied: 222,272 parameters, all in float32, and AdamW. A step takes 8 sequences of 64
    tokens. Return a dict with all of these keys, which `minitron train` has too:

        dp, tp, pp            ranks along each axis; dp x tp x pp is 8
        zero                  0 to 3: what is divided over dp, with or without a pipeline
        sequence              True or False: with tp, the sequence divided too, between cut layers
        recompute             "none", "full", "selective" or "sqrt"
        micro_batch_size      sequences in one forward and backward pass of a rank

    The grader trains 10 steps on 8 real ranks, the first two under a meter. At its peak no rank may
    hold more than 1,150,000 bytes of parameters, gradients, optimizer state, activations and
    temporary tensors together. The mean loss of the last 2 steps must be 4.2 nats per token or
    less, which every layout that runs reaches; a model that knows how frequent each word is, and no
    more, has 4.37.

    More than one layout fits; the first that come to mind do not. Estimate before you try: a
    parameter has 16 bytes with gradient and moments; for the backward pass a layer keeps about 5.7
    kB per token, or, recomputed, its input of 256 bytes; in a pipeline of 1F1B rank r has p - r
    micro-batches on their way.
    """
    raise NotImplementedError("Exercise 11.5 - 8 ranks, one limit.  Hint: minitron hint 11.5")
