"""Grader of 9.1: the validator, then what a rank holds, then how long the simulator takes."""

from collections.abc import Callable

from minitron.config import ConfigError
from minitron.parallel.pipeline.schedule_check import check, peak_activations
from minitron.parallel.pipeline.schedules import Action, Schedule
from minitron.parallel.pipeline.simulator import simulate
from teaching.graders import Mistake, asked, expect
from teaching.graders.ranks import per_rank

CASES = [(2, 4), (4, 8), (3, 7), (1, 3), (4, 2), (8, 5), (3, 1)]
"""Ranks and micro-batches: from the fourth on fewer of these than ranks."""
SECONDS = {"F": 1, "B": 2}
FAULTS = {
    "never runs F": "every rank runs all micro-batches forward, numbered 0 to m - 1",
    "never runs B": "every forward pass needs its backward pass: after the last forward pass, run "
                    "the backward passes that remain",
    "but there are only": "micro-batches are numbered 0 to m - 1; with fewer micro-batches than "
                          "stages after this one, the warm-up ends when all have run forward",
    "times: once": "each micro-batch runs through a stage once forward and once backward",
    "which it needs": "a rank cannot run backward for a micro-batch before running it forward: "
                      "which comes first in each pair of passes?",
    "waits for": "a rank runs its list in order, whatever comes later in it: the first rank is the "
                 "first to run forward, the last rank the first to run backward",
}
"""What the validator says, and what it comes from."""


def grade_9_1(gpipe: Callable, one_forward_one_backward: Callable) -> None:
    """Prove each schedule, then compare what it holds and how long it takes."""
    for make, name in ((gpipe, "gpipe"), (one_forward_one_backward, "one_forward_one_backward")):
        for p, m in CASES:
            with asked(f"{name}(num_ranks={p}, num_micro_batches={m})"):
                schedule = make(p, m)
                _expect_valid(schedule, p, m)
                if name == "gpipe":
                    _expect_held(schedule, "GPipe", [m] * p)
                else:
                    _expect_held(schedule, "1F1B", [min(m, p - rank) for rank in range(p)])
                _expect_seconds(schedule, (m + p - 1) * sum(SECONDS.values()))


def _expect_valid(schedule, p: int, m: int) -> None:
    expect(isinstance(schedule, Schedule), seen=f"it returned {schedule!r:.80}",
           likely="lists[rank] are the actions of a rank; leave the last line as it is")
    expect(schedule.num_ranks == p, seen=f"{schedule.num_ranks} lists; there are {p} ranks",
           likely="one list for each rank, 0 to p - 1")
    for rank, actions in enumerate(schedule.actions):
        for action in actions:
            expect(isinstance(action, Action) and action.kind in SECONDS,
                   seen=f"rank {rank} has {action!r:.60} in its list",
                   likely='an entry is Action("F", i, rank) or Action("B", i, rank)')
    stages = [{action.stage for action in actions} for actions in schedule.actions]
    expect(stages == [{rank} for rank in range(p)],
           seen=per_rank([f"passes through stage {' and '.join(map(str, sorted(mine))) or 'none'}"
                          for mine in stages]),
           likely="rank r holds only stage r, for both kinds of passes")
    try:
        check(schedule)
    except ConfigError as error:
        likely = next((why for words, why in FAULTS.items() if words in str(error)),
                      "draw a lane for each rank, and see which rank waits for what")
        raise Mistake(f"{error}\n{_lists(schedule)}", likely) from None


def _lists(schedule: Schedule) -> str:
    lines = [f"rank {rank}: {' '.join(map(str, actions))}"
             for rank, actions in enumerate(schedule.actions)]
    return "\n".join(lines)


def _expect_held(schedule: Schedule, name: str, right: list[int]) -> None:
    held = peak_activations(schedule)
    for rank, (mine, most) in enumerate(zip(held, right, strict=True)):
        expect(mine == most, seen=f"rank {rank} holds {mine} micro-batch{'es' * (mine > 1)}, "
               f"{name} holds {most}\n{_lists(schedule)}",
               likely=_why_other_held(schedule, held, right))


def _why_other_held(schedule: Schedule, held: list[int], right: list[int]) -> str:
    p, m = schedule.num_ranks, schedule.num_micro_batches
    if right == [m] * p:
        return "in GPipe the first backward pass comes after the last forward pass, on every rank"
    if held == [m] * p:
        return "no backward pass runs before the last forward pass: that is GPipe. After the " \
               "warm-up, a backward pass follows each forward pass"
    if any(mine < most for mine, most in zip(held, right, strict=True)):
        return "the warm-up is too short: while a micro-batch is in the later stages, this rank " \
               "could run others forward"
    if len(set(held)) == 1:
        return "ranks differ: the more stages come after a rank, the longer its warm-up, and the " \
               "last rank has none"
    return "the warm-up is too long: it has one pass for each stage after this one; the last " \
           "rank has none, and runs each micro-batch backward at once"


def _expect_seconds(schedule: Schedule, right: int) -> None:
    timeline = simulate(schedule, SECONDS)
    idle = [timeline.seconds - timeline.busy_seconds(rank) for rank in range(schedule.num_ranks)]
    expect(timeline.seconds == right,
           seen=f"the step takes {timeline.seconds:g} s, with F 1 s and B 2 s; {right} would do. "
           + per_rank([f"{seconds:g} s idle" for seconds in idle]) + f"\n{_lists(schedule)}",
           likely="all ranks must run the micro-batches in the same order, or one waits for what "
                  "another does last")
