"""What a rank of a pipeline does and holds: functions of a schedule and of the blocks' sizes.

Read in this order: rank_program, split_blocks.
"""

from functools import cache
from itertools import accumulate
from typing import NamedTuple

from minitron.config import require
from minitron.parallel.pipeline.schedule_check import topological_order
from minitron.parallel.pipeline.schedules import Action, Schedule


class Message(NamedTuple):
    """A send or a receive of what `action` has made, to or from `peer`."""

    is_send: bool
    action: Action
    peer: int


def as_full_backward(action: Action) -> Action:
    """Name I as B: a stage need not know whether the next one splits its backward passes."""
    return action._replace(kind="B") if action.kind == "I" else action


def rank_program(schedule: Schedule, rank: int) -> list[Action | Message]:
    """List what `rank` does, its messages included.

    Messages follow one global order of all ranks' actions: a tensor is sent right after the action
    that made it, and the other rank posts its receive at the same point of that order.
    """
    steps: list[Action | Message] = []
    for action in topological_order(schedule):
        source, target = schedule.rank_of[action.stage], target_rank(schedule, action)
        if rank == source:
            steps.append(action)
        if target not in (None, source) and rank in (source, target):
            steps.append(Message(rank == source, action, target if rank == source else source))
    return steps


def target_rank(schedule: Schedule, action: Action) -> int | None:
    """Return the rank of the stage that needs what `action` makes."""
    towards = {"F": 1, "B": -1, "I": -1, "W": None}[action.kind]
    return None if towards is None else schedule.rank_of.get(action.stage + towards)


def forwards(schedule: Schedule, num_micro_batches: int) -> Schedule:
    """Keep only the forward passes through the stages of `schedule`, for an evaluation."""
    lists = (
        (
            Action("F", i, stage)
            for stage in schedule.stages_of(rank)
            for i in range(num_micro_batches)
        )
        for rank in range(schedule.num_ranks)
    )
    return Schedule("forward", num_micro_batches, tuple(map(tuple, lists)))


def split_blocks(
    costs: list[float], num_stages: int, first: float = 0.0, last: float = 0.0
) -> list[range]:
    """Give each stage neighboring blocks, so that the most expensive stage costs least.

    `first` and `last` are what the first and the last stage have beside their blocks. Raises
    ConfigError if there are fewer blocks than stages.
    """
    n = len(costs)
    require(
        n >= num_stages,
        f"{n} blocks do not fill {num_stages} stages of a pipeline",
        f"use {n} stages or fewer, or more layers",
    )
    before = [0.0, *accumulate(costs)]  # of all blocks before each

    @cache
    def best(start: int, stages: int) -> tuple[float, tuple[int, ...]]:
        """Return the least largest cost of blocks from `start` on, and where the stages end."""
        extra = first if start == 0 else 0.0
        if stages == 1:
            return before[n] - before[start] + extra + last, (n,)
        options = []
        for end in range(start + 1, n - stages + 2):
            largest, ends = best(end, stages - 1)
            options.append((max(before[end] - before[start] + extra, largest), (end, *ends)))
        return min(options)

    ends = best(0, num_stages)[1]
    return [range(start, end) for start, end in zip((0, *ends), ends, strict=False)]
