"""Pipeline schedules: which stage works on which micro-batch, and in what order, as lists.

A schedule is data. The same lists are drawn, checked, simulated and run.

Notation: p ranks; v chunks, the stages that a rank holds; m micro-batches. Stages are numbered in
the order of the layers, 0 to p v - 1. F, B: forward and backward pass of a stage; a schedule may
cut B into I, the gradients of the stage's input, which the stage before waits for, and W, those of
its weights, which no stage waits for.

Read in this order: Action, Schedule, gpipe, one_forward_one_backward, zero_bubble, interleaved;
then schedule_check.check, which proves a schedule of your own, and simulator.simulate.

Reference: Huang et al. 2019, "GPipe" (section 2.3); Narayanan et al. 2021 (section 2.2: 1F1B and
interleaving); Lamy-Poirier 2022, "Breadth-First Pipeline Parallelism" (section 4: GPipe with
chunks); Qi et al. 2023, "Zero Bubble" (section 2: ZB-H1).
"""

from dataclasses import dataclass
from functools import cached_property
from typing import Literal, NamedTuple

from minitron.config import require

Kind = Literal["F", "B", "I", "W"]


class Action(NamedTuple):
    """One pass of one micro-batch through one stage."""

    kind: Kind
    micro_batch: int
    stage: int

    def __str__(self) -> str:
        return f"{self.kind}{self.micro_batch}"


@dataclass(frozen=True)
class Schedule:
    """What each rank does, one action after the other."""

    name: str
    num_micro_batches: int
    actions: tuple[tuple[Action, ...], ...]
    """By rank."""
    overlapped: frozenset[Action] = frozenset()
    """Forward passes that a GPU may run at the same time as the backward pass after them."""

    @property
    def num_ranks(self) -> int:
        return len(self.actions)

    @cached_property
    def all_actions(self) -> frozenset[Action]:
        return frozenset(action for actions in self.actions for action in actions)

    @cached_property
    def rank_of(self) -> dict[int, int]:
        """The rank that holds each stage."""
        return {
            action.stage: rank for rank, actions in enumerate(self.actions) for action in actions
        }

    @property
    def num_stages(self) -> int:
        return 1 + max(self.rank_of, default=-1)

    def stages_of(self, rank: int) -> list[int]:
        """Return the stages that a rank holds, in the order of the layers."""
        return sorted(stage for stage, holder in self.rank_of.items() if holder == rank)

    def needs(self, action: Action) -> list[Action]:
        """Return what must be done before: at this stage, and at the one that sends its input."""
        kind, i, stage = action
        if kind == "F":
            return [Action("F", i, stage - 1)] if stage > 0 else []
        if kind == "W":
            return [Action("I", i, stage)]
        if stage == self.num_stages - 1:
            return [Action("F", i, stage)]
        kind = "I" if Action("I", i, stage + 1) in self.all_actions else "B"
        return [Action("F", i, stage), Action(kind, i, stage + 1)]


# One stage a rank


def sequential(num_ranks: int, num_micro_batches: int) -> Schedule:
    """Schedule each micro-batch forward and back before the next: all ranks but one wait."""
    lists = [
        [Action(kind, i, rank) for i in range(num_micro_batches) for kind in ("F", "B")]
        for rank in range(num_ranks)
    ]
    return make("sequential", num_micro_batches, lists)


def gpipe(num_ranks: int, num_micro_batches: int) -> Schedule:
    """Schedule all micro-batches forward, then all backward: m of them are held."""
    return breadth_first(num_ranks, num_micro_batches, num_chunks=1)


def one_forward_one_backward(num_ranks: int, num_micro_batches: int) -> Schedule:
    """Schedule 1F1B: start a micro-batch whenever one has come back, so p - rank are held.

    Warm-up: as many forward passes as there are stages after this one. Steady: one forward, one
    backward. Cool-down: the backward passes that are left.
    """
    lists = []
    for rank in range(num_ranks):
        forwards = [Action("F", i, rank) for i in range(num_micro_batches)]
        backwards = [Action("B", i, rank) for i in range(num_micro_batches)]
        lists.append(alternate(forwards, backwards, num_ranks - 1 - rank))
    return make("1F1B", num_micro_batches, lists)


def alternate(forwards: list[Action], backwards: list[Action], num_warm_up: int) -> list[Action]:
    """Order `num_warm_up` forwards; then a forward and a backward in turn; then the backwards."""
    steady = zip(forwards[num_warm_up:], backwards, strict=False)
    num_steady = max(0, len(forwards) - num_warm_up)
    return [
        *forwards[:num_warm_up],
        *(action for pair in steady for action in pair),
        *backwards[num_steady:],
    ]


def zero_bubble(num_ranks: int, num_micro_batches: int, num_chunks: int = 1) -> Schedule:
    """Schedule ZB-H1: 1F1B with W deferred on rank r by r micro-batches, into what was idle time.

    Every rank then holds p micro-batches, as the first one does in 1F1B. With v stages a rank,
    number rank + p c, a rank takes micro-batches in groups of p through each of its stages, and
    defers W by r passes: 1/v the bubble. Raises ConfigError unless m then divides by p.
    """
    p, v = num_ranks, num_chunks
    lists = []
    for rank in range(p):
        order = in_groups(p, num_micro_batches, v)
        forwards = [Action("F", i, rank + p * chunk) for i, chunk in order]
        inputs = [Action("I", i, rank + p * (v - 1 - chunk)) for i, chunk in order]
        weights = [Action("W", i, stage) for _, i, stage in inputs]
        actions, num_inputs = [], 0
        for action in alternate(forwards, inputs, (v - 1) * p + p - 1 - rank):
            actions.append(action)
            num_inputs += action.kind == "I"
            if action.kind == "I" and num_inputs > rank:
                actions.append(weights.pop(0))
        lists.append(actions + weights)
    return make("ZB-H1", num_micro_batches, lists)


# Several stages a rank


def in_groups(num_ranks: int, num_micro_batches: int, num_chunks: int) -> list[tuple[int, int]]:
    """Order (micro-batch, chunk): p micro-batches through every chunk, then the next p."""
    p, m, v = num_ranks, num_micro_batches, num_chunks
    if v == 1:
        return [(i, 0) for i in range(m)]
    require(
        m % p == 0,
        f"{m} micro-batches are not divisible by {p} ranks: {v} chunks need groups of {p}",
        f"use {-(-m // p) * p}",
    )
    return [
        (group * p + i, chunk) for group in range(m // p) for chunk in range(v) for i in range(p)
    ]


def breadth_first(num_ranks: int, num_micro_batches: int, num_chunks: int) -> Schedule:
    """Schedule GPipe with v stages a rank, number rank + p c: 1/v the bubble.

    All micro-batches go through one stage of a rank before any goes through its next.
    """
    lists = []
    for rank in range(num_ranks):
        stages = range(rank, num_ranks * num_chunks, num_ranks)
        forwards = [Action("F", i, stage) for stage in stages for i in range(num_micro_batches)]
        lists.append(
            forwards
            + [
                Action("B", i, stage)
                for stage in reversed(stages)
                for i in range(num_micro_batches)
            ]
        )
    return make("GPipe", num_micro_batches, lists)


def interleaved(num_ranks: int, num_micro_batches: int, num_chunks: int) -> Schedule:
    """Schedule 1F1B with v stages a rank, number rank + p c: 1/v the bubble, v times the messages.

    Micro-batches go in groups of p: a rank takes such a group through its first chunk, then
    through the next. Raises ConfigError unless m divides by p.
    """
    p, m, v = num_ranks, num_micro_batches, num_chunks
    lists = []
    for rank in range(p):
        order = in_groups(p, m, v)
        forwards = [Action("F", i, rank + p * chunk) for i, chunk in order]
        backwards = [Action("B", i, rank + p * (v - 1 - chunk)) for i, chunk in order]
        # The last chunk's group must have begun, and gone p - 1 - rank stages and back.
        num_warm_up = min(m * v, (v - 1) * p + 2 * (p - 1 - rank))
        lists.append(alternate(forwards, backwards, num_warm_up))
    return make("interleaved 1F1B", m, lists)


def make(name: str, num_micro_batches: int, lists: list[list[Action]]) -> Schedule:
    return Schedule(name, num_micro_batches, tuple(tuple(actions) for actions in lists))
