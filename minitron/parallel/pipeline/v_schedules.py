"""Schedules whose stages lie on the ranks as a V: down the ranks and back up.

Rank r holds two stages, r and 2p - 1 - r. So the last rank passes a micro-batch on to itself, and
rank 0 has both ends of the model: it can begin a backward pass as soon as it has the loss, without
waiting for a gradient from the far end of the pipeline.

ZB-V cuts every backward pass into I and W, and has no idle time between its first and its last
pass where F, I and W take equally long. It holds p micro-batches per rank, as 1F1B's first rank.

DualPipeV is DualPipe of DeepSeek-V3, cut in half. DualPipe feeds micro-batches in from both ends
of the pipeline, so that every rank holds two stages' parameters, and pairs a forward pass of one
direction with a backward pass of the other: on a GPU the one computes while the other communicates.
Folded into a V the same pairs arise with one copy of the parameters. This package runs a pair's
passes one after the other; `Schedule.overlapped` names them.

Notation: p ranks; m micro-batches; v = 2 chunks.

Read in this order: zb_v, dualpipe_v, numbered.

Reference: Qi et al. 2023, "Zero Bubble" (section 6: ZB-V); Qi et al. 2024, "Pipeline Parallelism
with Controllable Memory" (section 3: V-shaped schedules, where it is V-ZB); DeepSeek-AI 2024,
"DeepSeek-V3" (section 3.2.1: DualPipe); github.com/deepseek-ai/DualPipe (DualPipeV).
"""

from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import pairwise

from minitron.config import require
from minitron.parallel.pipeline.schedules import Action, Kind, Schedule

Turn = tuple[Kind, int]
"""A pass through a stage, of whichever micro-batch comes next there."""


def zb_v(num_ranks: int, num_micro_batches: int) -> Schedule:
    """Schedule ZB-V: p micro-batches held, and with F, I and W equally long no idle time between.

    For any m. With fewer than 2p - 1, it is the schedule of 2p - 1 without the missing ones.
    """
    p, m = num_ranks, num_micro_batches
    extra = max(0, m - (2 * p - 1))
    lists = []
    for rank in range(p):
        down, up, after = rank, 2 * p - 1 - rank, p - 1 - rank
        forward_up = [("F", up), ("I", up), ("W", up)]
        backward_down = [("I", down), ("W", down)]
        turns = [
            *[("F", down)] * (2 * after + 1),
            *[("F", up), ("F", down)] * rank,
            *forward_up * (after + 1),
            *[("F", down), *backward_down, *forward_up] * (extra + rank),
            *[*backward_down, *forward_up] * after,
            *[("I", down), ("I", up)] * rank,
            *backward_down * (after + 1),
            *[("W", up)] * rank,
            *[("W", down)] * rank,
        ]
        lists.append(tuple(numbered(turns, m)))
    return Schedule("ZB-V", m, tuple(lists))


def dualpipe_v(num_ranks: int, num_micro_batches: int) -> Schedule:
    """Schedule DualPipeV: in the steady state each forward pass has a backward pass beside it.

    It holds p + 1/2 micro-batches. The last backward passes of a rank are cut into I and W, so
    that the ranks before it wait less. Raises ConfigError unless m is at least 2p.
    """
    p, m = num_ranks, num_micro_batches
    require(
        m >= 2 * p,
        f"{m} micro-batches do not fill DualPipeV on {p} ranks: it needs 2 for each rank",
        f"use {2 * p} or more",
    )
    lists, overlapped = [], set()
    for rank in range(p):
        down, up, after = rank, 2 * p - 1 - rank, p - 1 - rank
        backwards = [up, down] * (rank + 1)
        full, halved = backwards[: rank + 1], backwards[rank + 1 :]
        deferred = [("W", stage) for stage in halved + [down] * after]
        turns = [
            *[("F", down)] * (2 * after),
            *[("F", down), ("F", up)] * (rank + 1),
            *[("I", up), ("W", up), ("F", up)] * after,
            *[("F", down), ("B", up), ("F", up), ("B", down)] * (m - 2 * p + 1 + rank),
            *[("B", up), ("F", up), ("B", down)] * after,
            *[("B", stage) for stage in full],
            *[("I", stage) for stage in halved],
            *[turn for weights in deferred[:after] for turn in (weights, ("I", down))],
            *deferred[after:],
        ]
        actions = tuple(numbered(turns, m))
        pairs = [one for one, other in pairwise(actions) if (one.kind, other.kind) == ("F", "B")]
        # The last rank's first pair would hold up everything that waits for its backward pass.
        overlapped.update(pairs[1:] if rank == p - 1 else pairs)
        lists.append(actions)
    return Schedule("DualPipeV", m, tuple(lists), frozenset(overlapped))


def numbered(turns: Iterable[Turn], num_micro_batches: int) -> Iterator[Action]:
    """Yield each pass with the next micro-batch of its stage; none beyond the last micro-batch."""
    num_done: Counter[Turn] = Counter()
    inputs: dict[int, list[int]] = {}  # by stage, the micro-batches whose W is to come
    for kind, stage in turns:
        if kind == "W":
            i = inputs[stage].pop(0)
        else:
            phase = "F" if kind == "F" else "B", stage
            i = num_done[phase]
            num_done[phase] += 1
        if kind == "I":
            inputs.setdefault(stage, []).append(i)
        if i < num_micro_batches:
            yield Action(kind, i, stage)
