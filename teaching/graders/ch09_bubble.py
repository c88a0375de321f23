"""Grader of 9.2: the formulas against the simulator and the validator, over a grid."""

from collections.abc import Callable
from itertools import product
from math import isclose
from typing import NamedTuple

from minitron.parallel.pipeline.schedule_check import peak_activations
from minitron.parallel.pipeline.schedules import (
    Schedule,
    gpipe,
    interleaved,
    one_forward_one_backward,
)
from minitron.parallel.pipeline.simulator import simulate
from teaching.graders import Mistake, asked, expect
from teaching.graders.numbers import ROUNDED, apart, is_rounded

SECONDS = {"F": 1, "B": 2}
STAGE_BYTES = 100
MANY = 10**17 + 1
"""Bytes that a float does not hold exactly."""
RANKS = (4, 2, 3, 1, 8)
MICRO_BATCHES = (8, 24, 5, 4, 3, 1)
CHUNKS = (2, 3)
MAKERS = {"GPipe": gpipe, "1F1B": one_forward_one_backward}


def grade_9_2(bubble: Callable, activation_bytes: Callable) -> None:
    """Play every schedule of the grid; compare its idle time, then what each rank holds."""
    for _, p, m, v, schedule in grid():
        with asked(f"bubble(num_ranks={p}, num_micro_batches={m}, num_chunks={v})"):
            _expect_bubble(bubble(p, m, v), schedule, v)

    for name, p, m, v, schedule in grid():
        for rank, num_held in enumerate(peak_activations(schedule)):
            model_bytes = STAGE_BYTES * p * v
            with asked(f"activation_bytes(schedule={name!r}, num_ranks={p}, num_micro_batches={m}, "
                       f"num_chunks={v}, rank={rank}, model_bytes={model_bytes})"):
                seen = activation_bytes(name, p, m, v, rank, model_bytes)
                _expect_bytes(seen, num_held * STAGE_BYTES, Place(name, p, m, v, rank))
    _expect_exact(activation_bytes)


def _expect_exact(activation_bytes: Callable) -> None:
    name, p, m, v = "interleaved 1F1B", 3, 6, 2
    model_bytes = p * v * MANY
    with asked(f"activation_bytes(schedule={name!r}, num_ranks={p}, num_micro_batches={m}, "
               f"num_chunks={v}, rank=0, model_bytes={model_bytes})"):
        seen = activation_bytes(name, p, m, v, 0, model_bytes)
        right = peak_activations(interleaved(p, m, v))[0] * MANY
        expect(seen == right, seen=f"{seen}, not {right}", likely="only the rounding is wrong: / "
                                                                  "makes a float, which has 16 "
                                                                  "digits. Divide integers with //")


def grid() -> list[tuple[str, int, int, int, Schedule]]:
    """Schedule's name, ranks, micro-batches, chunks, and the schedule."""
    cases = [(name, p, m, 1, make(p, m))
             for name, make in MAKERS.items() for p, m in product(RANKS, MICRO_BATCHES)]
    return cases + [("interleaved 1F1B", p, m, v, interleaved(p, m, v))
                    for p, m, v in product(RANKS, MICRO_BATCHES, CHUNKS) if m % p == 0]


def _expect_bubble(answer, schedule: Schedule, v: int) -> None:
    p, m = schedule.num_ranks, schedule.num_micro_batches
    expect(isinstance(answer, tuple) and len(answer) == 2, seen=f"it returned {answer!r:.80}",
           likely="return two numbers: idle / total time, and idle / compute time")
    timeline = simulate(schedule, SECONDS)
    right = timeline.bubble_of_total, timeline.bubble_of_ideal
    same = [isclose(*pair, rel_tol=1e-9, abs_tol=1e-12) for pair in zip(answer, right, strict=True)]
    if not all(same):
        first, idle = apart(answer[0], right[0])
        second, of_work = apart(answer[1], right[1])
        raise Mistake(f"({first}, {second}); in the simulator {idle} of the total time is idle, "
                      f"{of_work} of the time that the work takes",
                      _why_other_bubble(answer, right, p, m, v))


def _why_other_bubble(
    answer: tuple[float, float], right: tuple[float, float], p: int, m: int, v: int
) -> str:
    total, ideal = answer
    if isclose(total, right[1]) and isclose(ideal, right[0]):
        return "the two are swapped: the share of the total time, the smaller one, comes first"
    if isclose(total, right[1]):
        return "the first is also idle / compute time: for the share of the total, divide by " \
               "compute plus idle time"
    if isclose(ideal, right[0]):
        return "the second is also a share of the total: divide by the compute time alone"
    if v > 1 and isclose(ideal, (p - 1) / m):
        return "with v chunks the compute time stays the same, and the bubble is p - 1 passes " \
               "through a stage that is v times shorter"
    if isclose(ideal, p / (m * v)):
        return "a rank waits for the other p - 1 stages"
    if isclose(total, 1 - 1 / p):
        return "that is one micro-batch at a time through all stages; in a pipeline m of them " \
               "overlap"
    if any(map(is_rounded, answer, right)):
        return ROUNDED
    return "a rank computes for m passes, forward and backward, and is idle for p - 1; with v " \
           "chunks those p - 1 are passes through one stage, 1/v of the rank's layers"


class Place(NamedTuple):
    """Which rank of which schedule."""

    name: str
    p: int
    m: int
    v: int
    rank: int


def _expect_bytes(seen, right: int, place: Place) -> None:
    expect(type(seen) is int, seen=f"{seen!r}, of type {type(seen).__name__}",
           likely="return exact integers: divide with //, not /")
    num_held, num_right = seen / STAGE_BYTES, right // STAGE_BYTES
    expect(seen == right, seen=f"{seen} bytes, {num_held:g} times a stage's part of a micro-batch; "
           f"in the schedule rank {place.rank} holds {num_right} of them",
           likely=_why_other_bytes(num_held, num_right, place))


def _why_other_bytes(num_held: float, num_right: int, at: Place) -> str:
    whole = at.p * at.v
    if num_held > at.m * at.v and num_held not in (num_right * whole, num_right * at.v):
        return "there are only m micro-batches, so no rank can hold more"
    if at.name == "GPipe" and num_held < num_right:
        return "GPipe holds all micro-batches when the first backward pass begins"
    faults = {
        num_right * whole: "a rank does not hold a micro-batch's activations of the whole model: a "
                           "stage has 1/(p v) of the layers",
        num_right * at.v: "with chunks a stage is shorter: of p v stages, each has 1/(p v)",
        num_right - 1: "one more: the micro-batch whose backward pass is next is held as well",
        min(at.m, at.rank + 1): "count the stages after the rank, not those before it: rank 0 "
                                "holds the most",
        at.m: "that is GPipe: with 1F1B, rank r holds at most p - r micro-batches",
        at.p: "ranks differ: the fewer stages come after a rank, the sooner its backward pass "
              "follows",
    }
    return faults.get(num_held, "the number of passes in the table, times a stage's part of "
                                "model_bytes")
