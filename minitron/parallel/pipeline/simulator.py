"""Play a schedule without running it: who works on what, and when.

The timeline of the picture and of the plan; the executor runs the same lists.
Read in this order: simulate, Timeline.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from minitron.parallel.pipeline.schedule_check import topological_order
from minitron.parallel.pipeline.schedules import Action, Kind, Schedule


class Pass(NamedTuple):
    """An action with the seconds at which it starts and ends."""

    action: Action
    start: float
    end: float


@dataclass(frozen=True)
class Timeline:
    """When each rank works on what."""

    passes: tuple[tuple[Pass, ...], ...]
    """By rank."""

    @cached_property
    def seconds(self) -> float:
        """From the start until the last rank is done."""
        return max((each.end for rank in self.passes for each in rank), default=0)

    def busy_seconds(self, rank: int) -> float:
        return sum(each.end - each.start for each in self.passes[rank])

    @property
    def bubble_of_total(self) -> float:
        """The idle share of all ranks' time."""
        busy = sum(map(self.busy_seconds, range(len(self.passes))))
        return 1 - busy / (self.seconds * len(self.passes))

    @property
    def bubble_of_ideal(self) -> float:
        """Idle time over the time that the work alone takes: the papers' (p - 1) / m."""
        return self.bubble_of_total / (1 - self.bubble_of_total)


def simulate(
    schedule: Schedule, seconds: Mapping[Kind, float], transfer_seconds: float = 0
) -> Timeline:
    """Play a schedule: each action starts when its rank is free and what it needs has arrived.

    `seconds` of one pass through a stage, by kind; `transfer_seconds` for each message between
    ranks, which travel beside the computation. Whole numbers and fractions stay exact. Raises
    ConfigError where ranks wait for each other.
    """
    ends: dict[Action, float] = {}
    passes: list[list[Pass]] = [[] for _ in schedule.actions]
    for action in topological_order(schedule):
        rank = schedule.rank_of[action.stage]
        arrivals = [
            ends[need] + (transfer_seconds if schedule.rank_of[need.stage] != rank else 0)
            for need in schedule.needs(action)
        ]
        free = passes[rank][-1].end if passes[rank] else 0
        start = max([free, *arrivals])
        ends[action] = start + seconds[action.kind]
        passes[rank].append(Pass(action, start, ends[action]))
    return Timeline(tuple(map(tuple, passes)))
