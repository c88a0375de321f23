"""Exercises of chapter 9: pipeline parallelism. Each rank holds some layers; micro-batches pass.

Write a body, save, and run `minitron check 9.1`, or check("9.1") in a notebook. If you are stuck,
`minitron hint 9.1` gives three hints of increasing strength; `minitron reset 9.1` starts over. The
exercises do not build on one another, so take them in any order.

Notation: p ranks, m micro-batches numbered from 0. Stages are numbered in the order of the layers;
with one stage per rank, rank r holds stage r. Action(kind, micro_batch, stage) is one pass of a
micro-batch through a stage: kind "F" is forward, "B" is backward. A schedule is a list of actions
for each rank, in the order in which the rank performs them. An action waits for its input: F i at
stage s needs F i at stage s - 1, and B i at stage s needs B i at stage s + 1.
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
    """GPipe: all micro-batches forward, then all backward.

    For each rank, list its actions: m forward passes and then m backward passes, at the stage with
    the rank's number. There may be fewer micro-batches than ranks.

    Example: on 2 ranks with 2 micro-batches, rank 0 does F0 F1 B0 B1 at stage 0, and rank 1 does
    the same at stage 1. At its peak each rank holds the activations of all m micro-batches.

    Graded: the validator accepts the schedule, what each rank holds, and the simulated time.
    """
    lists: list[list[Action]] = []  # by rank
    ### BEGIN SOLUTION
    for rank in range(num_ranks):
        forwards = [Action("F", i, rank) for i in range(num_micro_batches)]
        backwards = [Action("B", i, rank) for i in range(num_micro_batches)]
        lists.append(forwards + backwards)
    ### END SOLUTION
    return make("GPipe", num_micro_batches, lists)


def one_forward_one_backward(num_ranks: int, num_micro_batches: int) -> Schedule:
    """1F1B: takes as long as GPipe, but rank r holds at most p - r micro-batches.

    Each rank's list has three parts:

    warm-up       forward passes only: as many as there are stages after this one (p - 1 - r)
    steady state  one forward pass, then one backward pass, alternating until all m have gone
                  forward
    cool-down     the remaining backward passes

    With few micro-batches, all m may have gone forward before the warm-up is complete.

    Example: on 2 ranks with 3 micro-batches, rank 0 does F0 F1 B0 F2 B1 B2 and holds 2 at its peak;
    rank 1 does F0 B0 F1 B1 F2 B2 and holds 1. With 1 micro-batch both do F0 B0.

    Graded: the validator accepts the schedule, what each rank holds, and the simulated time.
    """
    lists: list[list[Action]] = []  # by rank
    ### BEGIN SOLUTION
    m = num_micro_batches
    for rank in range(num_ranks):
        num_warm_up = min(m, num_ranks - 1 - rank)
        actions = [Action("F", i, rank) for i in range(num_warm_up)]
        for i in range(num_warm_up, m):
            actions += [Action("F", i, rank), Action("B", i - num_warm_up, rank)]
        actions += [Action("B", i, rank) for i in range(m - num_warm_up, m)]
        lists.append(actions)
    ### END SOLUTION
    return make("1F1B", num_micro_batches, lists)


# Exercise 9.2 | Bubble and memory | 20 min | difficulty 2
def bubble(num_ranks: int, num_micro_batches: int, num_chunks: int) -> tuple[float, float]:
    """Return a rank's idle time, divided by the total time and divided by the ideal time.

    The ideal time is the time the work takes without any bubble. All stages take equally long, and
    messages take no time.

    num_chunks = 1: GPipe or 1F1B. A rank idles for p - 1 forward and backward passes through a
    stage.
    num_chunks = v > 1: interleaved 1F1B. Each rank holds v stages, each 1/v as long, and m is a
    multiple of p. A rank idles for p - 1 forward and backward passes through these shorter stages.

    Example: on 2 ranks with 2 micro-batches, 1 s forward and 2 s backward, a rank works for 6 s of
    the 9 s that the step takes, so bubble(2, 2, 1) is (1/3, 1/2). With 2 chunks it works for 6 s of
    7.5 s: (1/5, 1/4).
    """
    ### BEGIN SOLUTION
    idle = num_ranks - 1  # in passes forward and back through one stage
    work = num_micro_batches * num_chunks
    return idle / (work + idle), idle / work
    ### END SOLUTION


def activation_bytes(
    schedule: str,
    num_ranks: int,
    num_micro_batches: int,
    num_chunks: int,
    rank: int,
    model_bytes: int,
) -> int:
    """Return the bytes of activations that `rank` holds at its peak.

    One micro-batch's activations in the full model take model_bytes, divided equally over the
    p x v stages, where v = num_chunks. A rank holds a stage's part from the start of F until the
    end of B. So its peak is this number of parts:

    schedule              parts held at the peak
    "GPipe"               m
    "1F1B"                number of stages after this rank's, plus 1; at most m
    "interleaved 1F1B"    (v - 1) p + 2 (p - 1 - rank), plus 1; at most m v

    v is 1 for the first two. For the third, m is a multiple of p. The result is an int.

    Example: on 2 ranks with 4 micro-batches of 1200 bytes. GPipe: 4 x 600 on both. 1F1B: 2 x 600 on
    rank 0 and 600 on rank 1. Interleaved with 2 chunks: 5 x 300 on rank 0 and 3 x 300 on rank 1.
    """
    ### BEGIN SOLUTION
    p, m, v = num_ranks, num_micro_batches, num_chunks
    num_held = {
        "GPipe": m,
        "1F1B": min(m, p - rank),
        "interleaved 1F1B": min(m * v, (v - 1) * p + 2 * (p - 1 - rank) + 1),
    }
    return num_held[schedule] * model_bytes // (p * v)
    ### END SOLUTION


# Exercise 9.3 | Layers per stage | 25 min | difficulty 2 | replaces minitron.parallel.pipeline.plan
# Train with yours on 2 ranks: --parallel.pp 2
def split_blocks(
    costs: list[float], num_stages: int, first: float = 0.0, last: float = 0.0
) -> list[range]:
    """Assign blocks to stages so that the most expensive stage is as cheap as possible.

    Block i costs costs[i]. Every stage gets consecutive blocks, at least one. Return one range of
    block numbers per stage, in order. The first stage also holds the embedding, which adds `first`
    to its cost; the last stage also holds the final norm and the head, which add `last`. All ranks
    wait for the most expensive stage, so minimize the largest cost. If several assignments are
    equally good, return any of them.

    With fewer blocks than stages, raise a ValueError whose message contains both numbers. There are
    more than 10^18 ways to divide 126 blocks into 16 stages, so do not try them all.

    Example: 5 blocks that cost 2 each, 2 stages. With first = last = 0, [range(0, 3), range(3, 5)]
    is one of the best, with costs 6 and 4. With last = 6, the best is [range(0, 4), range(4, 5)]:
    both stages cost 8.
    """
    ### BEGIN SOLUTION
    n = len(costs)
    if n < num_stages:
        raise ValueError(f"{n} blocks do not fill {num_stages} stages")
    # The first block is always on the first stage, the last one on the last.
    costs = [costs[0] + first, *costs[1:]]
    costs[-1] += last
    before = list(accumulate(costs, initial=0.0))  # of all blocks before each

    @cache
    def cut(start: int, stages: int) -> tuple[float, list[range]]:
        """The blocks from `start` on in `stages` stages: the least largest cost, and the ranges."""
        if stages == 1:
            return before[n] - before[start], [range(start, n)]
        options = []
        for end in range(start + 1, n - stages + 2):
            largest, rest = cut(end, stages - 1)
            cost = max(before[end] - before[start], largest)
            options.append((cost, [range(start, end), *rest]))
        return min(options, key=lambda option: option[0])

    return cut(0, num_stages)[1]
    ### END SOLUTION


# Exercise 9.4 | Run a stage | 30 min | difficulty 3
def run_stage(
    stage: nn.Module,
    actions: list[Action],
    micro_batches: list[tuple[Tensor, Tensor]],
    sum_loss: Callable[[Tensor, Tensor], Tensor],
    group: dist.ProcessGroup,
) -> Tensor | None:
    """Run one rank's part of a step, in the order of `actions`; leave the gradients in .grad.

    The setting: rank r of `group` runs stage r. `actions` is its list: Action("F" or "B",
    micro_batch, stage), each micro-batch once forward and once backward. Micro-batch i is
    (x, targets) = micro_batches[i]; x, shape (T, D), is the input of stage 0. Micro-batches differ
    in their number of tokens T. Every stage maps (T, D) to (T, D), in the dtype of the
    micro-batches. Every rank gets all micro-batches, so it knows each T and dtype; do not modify
    them.

    Loss: sum_loss(out, targets) of the last stage's output is the sum over T tokens, shape (). The
    loss of the step is the mean over all tokens of all micro-batches. The last rank returns it,
    detached; the other ranks return None. Every stage's gradients are those of this loss.

    Messages: after F, send the output to the next rank. After B, send the gradient of the stage's
    input to the previous rank. Send nothing else. Any two ranks exchange messages in the order of
    their lists. Use

        dist.send(tensor, group=group, group_dst=rank)     returns when the receiver has taken it
        dist.recv(tensor, group=group, group_src=rank)     returns when the tensor is filled
        work = dist.isend(...); work = dist.irecv(...)     return at once; call work.wait() later

    Memory: once the backward pass of a micro-batch is done, keep nothing of its input, output or
    graph, neither as tensors nor as copies in NumPy arrays, bytes or lists.

    Example: on 2 ranks, stage 0 multiplies by 3, stage 1 by 2, and sum_loss is out.sum(). The
    micro-batches have inputs [1] and [2, 3], together 3 tokens. Rank 0 does F0 F1 B0 B1: it sends
    [3] and [6, 9], receives [2/3] and [2/3, 2/3], and its factor 3 gets the gradient
    2/3 (1 + 2 + 3) = 4. Rank 1 does F0 B0 F1 B1 and returns (6 + 12 + 18) / 3 = 12.
    """
    ### BEGIN SOLUTION
    rank, last = group.rank(), group.size() - 1
    num_tokens = sum(len(x) for x, _ in micro_batches)
    held, sends, losses = {}, [], []

    for kind, i, _ in actions:
        if kind == "F":
            x, targets = micro_batches[i]
            if rank > 0:
                x = torch.empty_like(x)
                dist.recv(x, group=group, group_src=rank - 1)
                x.requires_grad_()
            out = stage(x)
            if rank == last:
                out = sum_loss(out, targets) / num_tokens  # not this micro-batch's own
                losses.append(out.detach())
            else:
                # The next rank may be sending a gradient here: with dist.send both would wait.
                sends.append(dist.isend(out.detach(), group=group, group_dst=rank + 1))
            held[i] = x, out
        else:
            x, out = held.pop(i)
            grad = None
            if rank < last:
                grad = torch.empty_like(out)
                dist.recv(grad, group=group, group_src=rank + 1)
            out.backward(grad)
            if rank > 0:
                sends.append(dist.isend(x.grad, group=group, group_dst=rank - 1))

    for work in sends:
        work.wait()
    return sum(losses) if rank == last else None
    ### END SOLUTION
