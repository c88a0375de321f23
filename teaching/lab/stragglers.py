"""Slow ranks: how much longer a step takes where the others wait for them, along tp, pp or dp.

A slow pass through a layer sleeps, for much longer than the small model computes. So a prediction
needs the naps alone, and it does not matter how many ranks share a core.

Read in this order: is_in_turn, predicted_extra, steps_of_rank, measured_steps, compared.
"""

import time
from collections.abc import Callable
from functools import partial
from itertools import count, pairwise
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from minitron.config import Config, DataConfig, ParallelConfig, TrainConfig
from minitron.launch import run
from minitron.measure.ledger import Ledger
from minitron.parallel.pipeline.schedule_check import topological_order
from minitron.parallel.pipeline.schedules import Action, Schedule, one_forward_one_backward
from minitron.parallelize import build, lay_out
from minitron.step import train_step
from teaching.lab import MEASURING
from teaching.lab.ch11 import CPU, SHAPE, S, micro_batches

RANKS, SEQUENCES, LAYERS = 4, 4, SHAPE.num_layers
LAYOUTS = {
    "tp": ParallelConfig(tp=RANKS),
    "pp": ParallelConfig(pp=RANKS),
    "dp": ParallelConfig(dp=RANKS),
}
"""Three ways in which 4 ranks share the 4 layers and 4 sequences of a step.

Along tp a rank has a quarter of each layer for all sequences at once; along pp a layer, for one
sequence at a time; along dp all layers, for one sequence.
"""
PASSES = 2 * LAYERS * SEQUENCES // RANKS
"""Of a rank through layers or their quarters, forward and backward; each computes as much."""
NAP = 0.08
"""Seconds that a slow pass takes longer."""

Slowness = Callable[[int, int], bool]
"""Whether a rank is slow in one of its passes through a layer, numbered from 0 in each step."""


def is_never(rank: int, number: int) -> bool:
    return False


def is_always_rank_1(rank: int, number: int) -> bool:
    return rank == 1


def is_in_turn(rank: int, number: int) -> bool:
    return number % RANKS == rank


def predicted_extra(axis: str, is_slow: Slowness) -> float:
    """Return by how many seconds a step is longer, if nothing but naps takes time."""
    ranks, passes = range(RANKS), range(PASSES)
    if axis == "tp":  # all meet in every layer
        return sum(max(NAP * is_slow(rank, number) for rank in ranks) for number in passes)
    if axis == "dp":  # all meet once, at the end
        return max(sum(NAP * is_slow(rank, number) for number in passes) for rank in ranks)

    schedule = one_forward_one_backward(RANKS, SEQUENCES)  # each waits for every sequence
    naps = {
        action: NAP * is_slow(rank, number)
        for rank, actions in enumerate(schedule.actions)
        for number, action in enumerate(actions)
    }
    return seconds_of_schedule(schedule, naps.__getitem__)


def seconds_of_schedule(schedule: Schedule, seconds_of: Callable[[Action], float]) -> float:
    """Play a schedule as the package's `simulate` does, but stages may differ in speed."""
    ends: dict[Action, float] = {}
    free = dict.fromkeys(range(schedule.num_ranks), 0.0)
    for action in topological_order(schedule):
        rank = schedule.rank_of[action.stage]
        start = max([free[rank], *(ends[need] for need in schedule.needs(action))])
        ends[action] = free[rank] = start + seconds_of(action)
    return max(free.values())


# On real ranks


class Naps:
    """A rank's passes through layers, some of which nap."""

    def __init__(self, rank: int):
        self.rank = rank
        self.start(is_never)

    def start(self, is_slow: Slowness) -> None:
        """Begin a step."""
        self.is_slow, self.numbers = is_slow, count()

    def next(self) -> None:
        """Nap if the next pass is slow."""
        if self.is_slow(self.rank, next(self.numbers)):
            time.sleep(NAP)


class Napping(torch.autograd.Function):
    """Identity that is one of the `naps` in the forward pass and one in the backward pass."""

    @staticmethod
    def forward(ctx, x, naps):
        ctx.naps = naps
        naps.next()
        return x.view_as(x)

    @staticmethod
    def backward(ctx, out_grad):
        ctx.naps.next()
        return out_grad, None


class Step(NamedTuple):
    """A step of one rank, in seconds."""

    seconds: float
    waited: float
    """For other ranks."""


def steps_of_rank(
    group: ProcessGroup, axis: str, kinds: list[Slowness], num_rounds: int
) -> list[list[Step]]:
    """Train the story model along one axis: rounds of one step for each kind of slowness."""
    layout = LAYOUTS[axis]
    config = Config(SHAPE, DataConfig(sequence_length=S), TrainConfig(), layout)
    model, parallel = build(config, lay_out(layout, group.size(), CPU), CPU)
    optimizer = parallel.shard(torch.optim.AdamW(model.parameters()))
    naps = Naps(group.rank())
    for block in model.blocks:
        block.register_forward_hook(lambda block, inputs, out: Napping.apply(out, naps))

    rows = torch.zeros(SEQUENCES, S + 1, dtype=torch.int64)
    together = [(rows[:, :-1], rows[:, 1:])]
    pairs = together if axis == "tp" else micro_batches(rows, *parallel.data_part)
    rounds = []
    for _ in range(num_rounds):
        steps = []
        for is_slow in kinds:
            naps.start(is_slow)
            dist.barrier(group)
            steps.append(timed(partial(train_step, model, optimizer, pairs, 1e-3, 1.0, parallel)))
        rounds.append(steps)
    return rounds


def timed(take_step: Callable[[], object]) -> Step:
    """Take a step; its waits lie between the ledger's stretches of compute."""
    begin = time.perf_counter()
    with Ledger() as ledger:
        take_step()
    seconds = time.perf_counter() - begin
    return Step(seconds, sum(b.start - a.end for a, b in pairwise(ledger.spans)))


def measured_steps(axis: str, kinds: list[Slowness], num_rounds: int = 3) -> list[tuple[Step, ...]]:
    """Run steps on 4 real ranks; returns, by kind of slowness, all ranks' shortest step.

    The first round, which warms up, is left out.
    """
    by_rank = run(steps_of_rank, RANKS, axis, kinds, num_rounds + 1, timeout=MEASURING, watch=False)
    by_round = [zip(*rounds, strict=True) for rounds in zip(*by_rank, strict=True)]
    return [min(steps, key=max) for steps in zip(*by_round[1:], strict=True)]


class Compared(NamedTuple):
    """One axis: how much longer a step is, and who waits, in ms."""

    extra: dict[str, tuple[float, float]]
    """Predicted and measured, by kind of slowness."""
    waits: list[float]
    """Of each rank for others in a step in which rank 1 is always slow."""


def compared(axis: str) -> Compared:
    """Predict and measure steps with slow ranks."""
    kinds = {"rank 1 always": is_always_rank_1, "in turn": is_in_turn}
    usual, *slow = measured_steps(axis, [is_never, *kinds.values()])
    extra = {
        name: (
            1e3 * predicted_extra(axis, is_slow),
            1e3 * (max(steps).seconds - max(usual).seconds),
        )
        for (name, is_slow), steps in zip(kinds.items(), slow, strict=True)
    }
    return Compared(extra, [1e3 * step.waited for step in slow[0]])
