"""Exercises of chapter 9: pipeline parallelism. Each rank holds some layers; micro-batches pass.

Write a body, save, and ask `minitron check 9.1`, or check("9.1") in a notebook. Stuck:
`minitron hint 9.1`, three levels. Start again: `minitron reset 9.1`. The exercises do not build on
one another; take them in any order.

Notation: p ranks, m micro-batches numbered from 0. Stages are numbered in the order of the layers;
with one stage on each rank, rank r holds stage r. Action(kind, micro_batch, stage) is one pass of a
micro-batch through a stage: kind "F" forward, "B" backward. A schedule is a list of actions for
each rank: what it does, in this order. An action waits until what it needs is there: F i at stage s
for F i at stage s - 1; B i at stage s for B i at stage s + 1.
"""

from collections.abc import Callable
from functools import cache
from itertools import accumulate

import torch
import torch.distributed as dist
from torch import Tensor, nn

from minitron.parallel.pipeline.schedules import Action, Schedule, make


# Exercise 9.1 | Schedules | 20 min | difficulty 2 | replaces minitron.parallel.pipeline.schedules
# Train with your one_forward_one_backward on 2 ranks: --parallel.pp 2
def gpipe(num_ranks: int, num_micro_batches: int) -> Schedule:
    """All micro-batches forward, then all backward.

    For each rank, list its actions: m passes forward, m backward, at the stage of the rank's
    number. There may be fewer micro-batches than ranks.

    Example: on 2 ranks with 2 micro-batches rank 0 does F0 F1 B0 B1 at stage 0, rank 1 the same at
    stage 1. Both hold the activations of 2 micro-batches; with m of them, of m.
    """
    lists: list[list[Action]] = []  # by rank
    raise NotImplementedError("Exercise 9.1 - Schedules.  Hint: minitron hint 9.1")
    return make("GPipe", num_micro_batches, lists)


def one_forward_one_backward(num_ranks: int, num_micro_batches: int) -> Schedule:
    """1F1B: as long as GPipe, and rank r holds p - r micro-batches at most, however many there are.

    Each rank has three parts. Warm-up: forward passes alone, just as many as there are stages
    behind this one. Steady: a forward and a backward pass in turn, until all m have gone forward.
    Cool-down: the backward passes that are left. There may be fewer micro-batches than the warm-up
    would take.

    Example: on 2 ranks with 3 micro-batches rank 0 does F0 F1 B0 F2 B1 B2 and holds 2, rank 1 does
    F0 B0 F1 B1 F2 B2 and holds 1. With 1 micro-batch both do F0 B0.
    """
    lists: list[list[Action]] = []  # by rank
    raise NotImplementedError("Exercise 9.1 - Schedules.  Hint: minitron hint 9.1")
    return make("1F1B", num_micro_batches, lists)


# Exercise 9.2 | Bubble and memory | 20 min | difficulty 2
def bubble(num_ranks: int, num_micro_batches: int, num_chunks: int) -> tuple[float, float]:
    """How much time is idle: as a share of the total time, and over the time of the work alone.

    Papers mean one or the other. All stages take the same time, messages take none. With one chunk
    the schedule is GPipe or 1F1B: the last rank waits until a micro-batch has come through p - 1
    stages, and in the end for its way back. With v = num_chunks chunks each rank holds v stages,
    each a v-th as long, and m is a multiple of p: interleaved 1F1B. There too it waits for p - 1
    stages: of these shorter ones.

    Example: on 2 ranks with 2 micro-batches, passes of 1 s forward and 2 s backward: a rank works
    for 6 s of the 9 s. bubble(2, 2, 1) is (1/3, 1/2). With 2 chunks 6 s of 7.5 s: (1/5, 1/4).
    """
    raise NotImplementedError("Exercise 9.2 - Bubble and memory.  Hint: minitron hint 9.2")


def activation_bytes(
    schedule: str, num_ranks: int, num_micro_batches: int, num_chunks: int, rank: int,
    model_bytes: int,
) -> int:
    """Count the bytes of activations that `rank` holds when it holds most.

    The activations of one micro-batch in the whole model have model_bytes, each of the p v stages
    an equal part of them, in whole bytes. A rank holds its stage's part from F on, until B is done.

    schedule              forward passes before the first backward pass is done
    "GPipe"               all m
    "1F1B"                one for each stage behind this one, and one more; never more than m
    "interleaved 1F1B"    (v-1) p + 2 (p-1-rank), and one more; never more than m v

    v = num_chunks is 1 for the first two; for the third m is a multiple of p.

    Example: on 2 ranks, 4 micro-batches of 1200 bytes. GPipe: 4 x 600 on both. 1F1B: 2 x 600 on
    rank 0, 600 on rank 1. Interleaved with 2 chunks: 5 x 300 on rank 0, 3 x 300 on rank 1.
    """
    raise NotImplementedError("Exercise 9.2 - Bubble and memory.  Hint: minitron hint 9.2")


# Exercise 9.3 | The cut | 25 min | difficulty 2 | replaces minitron.parallel.pipeline.plan
# Train with yours on 2 ranks: --parallel.pp 2
def split_blocks(
    costs: list[float], num_stages: int, first: float = 0.0, last: float = 0.0
) -> list[range]:
    """Which blocks does each stage get, so that the most expensive stage costs least?

    Block i costs costs[i]. Each stage gets neighboring blocks, one at least: return their numbers
    as a range, stage by stage. The first stage also has the embedding, which costs `first`, the
    last one norm and head, which cost `last`. All ranks wait for the most expensive stage, so its
    cost must be as small as it can be; where several cuts are equally good, any will do.

    With fewer blocks than stages, raise a ValueError whose message has both numbers. 126 blocks can
    be cut into 16 stages in more than 10^18 ways: do not try them all.

    Example: 5 blocks that cost 2 each, 2 stages. Without ends [range(0, 3), range(3, 5)] is one of
    the best: 6 and 4. With last = 6 it is [range(0, 4), range(4, 5)]: both cost 8.
    """
    raise NotImplementedError("Exercise 9.3 - The cut.  Hint: minitron hint 9.3")


# Exercise 9.4 | Run a stage | 30 min | difficulty 3
def run_stage(
    stage: nn.Module, actions: list[Action], micro_batches: list[tuple[Tensor, Tensor]],
    sum_loss: Callable[[Tensor, Tensor], Tensor], group: dist.ProcessGroup,
) -> Tensor | None:
    """Run one rank's stage of a step, in the order of `actions`, and leave its gradients in .grad.

    Rank r of `group` has stage r: its actions are Action("F" or "B", micro_batch, stage), each
    micro-batch once each way. Micro-batch i is (x, targets) = micro_batches[i]. x is (T, D), the
    input of stage 0; T, its number of tokens, differs between micro-batches. Every stage makes of
    (T, D) another (T, D) of the same dtype, which is that of the micro-batches. All ranks have all
    micro-batches, so they know each T; leave their values as they are.

    The last stage's output goes into sum_loss(out, targets), the sum over T tokens, shape (). The
    loss of the step is the mean over all tokens of all micro-batches: return it, without a graph,
    on the last rank, and None on the others. The gradients are of this loss, on every stage.

    Once a micro-batch has gone back, keep nothing of its input, output or graph: no tensors, and
    no copies of them as NumPy arrays, bytes or lists.

    Sent are the output of every F to the next rank, and of every B the gradient of the stage's
    input to the rank before; nothing else. Two ranks send and receive in the same order. Allowed:

        dist.send(tensor, group=group, group_dst=rank)     returns when the tensor has been taken
        dist.recv(tensor, group=group, group_src=rank)     returns when it is filled
        work = dist.isend(...); work = dist.irecv(...)     start, return at once; then work.wait()

    Example: on 2 ranks the stages multiply by 3 and by 2, and sum_loss is out.sum(). Micro-batches
    of the inputs [1] and [2, 3] have 3 tokens. Rank 0 does F0 F1 B0 B1: it sends [3] and [6, 9],
    receives [2/3] and [2/3, 2/3]; its factor 3 gets the gradient 2/3 (1 + 2 + 3) = 4. Rank 1 does
    F0 B0 F1 B1 and returns (6 + 12 + 18) / 3 = 12.
    """
    raise NotImplementedError("Exercise 9.4 - Run a stage.  Hint: minitron hint 9.4")
