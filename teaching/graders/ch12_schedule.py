"""Grader of 12.3: every candidate schedule, timed by the simulator, its memory counted."""

import math
from collections.abc import Callable
from fractions import Fraction
from functools import cache, partial
from typing import NamedTuple

from minitron.parallel.pipeline.schedule_check import peak_activations
from minitron.parallel.pipeline.schedules import Schedule, interleaved, one_forward_one_backward
from minitron.parallel.pipeline.simulator import simulate
from teaching.graders import Mistake, asked, expect

NEEDED = [  # ranks, chunks, 1 / the largest bubble
    (3, 1, 4), (4, 1, 6), (4, 3, 10), (4, 1, 4), (4, 2, 4), (8, 1, 10), (8, 4, 20), (3, 2, 7),
    (2, 1, 20), (3, 1, 2), (1, 1, 5), (1, 3, 5), (4, 1, 1), (4, 2, 1),
]


def make_schedule(num_ranks: int, num_micro_batches: int, num_chunks: int) -> Schedule:
    if num_chunks == 1:
        return one_forward_one_backward(num_ranks, num_micro_batches)
    return interleaved(num_ranks, num_micro_batches, num_chunks)


def grade_12_3(micro_batches_needed: Callable, fastest_schedule: Callable) -> None:
    """Ask for micro-batches first, then for the best schedule of many."""
    for p, v, part in NEEDED:
        with asked(f"micro_batches_needed(num_ranks={p}, num_chunks={v}, part={part})"):
            _expect_needed(micro_batches_needed(p, v, part), p, v, part)

    for case in cases():
        with asked(f"fastest_schedule({case})"):
            _expect_fastest(fastest_schedule(*case[:4], *case[5:]), case)


# Micro-batches


def is_small(p: int, m: int, v: int, part: int) -> bool:
    """Whether at most 1/part of a step is bubble, simulated in whole seconds."""
    timeline = simulate(make_schedule(p, m, v), {"F": 1, "B": 2})
    idle = timeline.seconds * p - sum(map(timeline.busy_seconds, range(p)))
    return idle * part <= timeline.seconds * p


@cache
def right_number(p: int, v: int, part: int) -> int:
    """By halving: the more micro-batches, the less bubble."""
    group = p if v > 1 else 1
    too_few, enough = 0, p * part  # in groups
    while enough - too_few > 1:
        middle = (too_few + enough) // 2
        if is_small(p, middle * group, v, part):
            enough = middle
        else:
            too_few = middle
    return enough * group


def _expect_needed(answer, p: int, v: int, part: int) -> None:
    expect(type(answer) is int, seen=f"it returned {answer!r}",
           likely="return a number of micro-batches, an int: divide with //, and round up")
    right = right_number(p, v, part)
    if answer == right:
        return
    why = next((why for why, value in _needed_faults(p, v, part).items() if value == answer),
               "a rank is idle for (p - 1) / v passes and computes for m; the step is their sum")
    raise Mistake(f"{answer}, not {right}", why)


def _needed_faults(p: int, v: int, part: int) -> dict[str, int]:
    group, work = p if v > 1 else 1, (p - 1) * (part - 1)

    def of_groups(passes: int, chunks: int, group: int) -> int:
        return math.ceil(Fraction(passes, chunks * group)) * group

    return {
        "a step has at least one micro-batch": 0,
        "that is the bubble relative to the compute time; here it is 1/part of the whole step":
            of_groups((p - 1) * part, v, group),
        "a rank waits for the p - 1 other ranks, not for p": of_groups(p * (part - 1), v, group),
        "with v chunks the bubble is v times shorter: p - 1 passes through one chunk":
            of_groups(work, 1, group),
        "interleaved 1F1B requires a multiple of p": of_groups(work, v, 1),
        "plain 1F1B takes any number; only interleaved 1F1B requires a multiple of p":
            of_groups(work, v, p),
        "round up: with fewer micro-batches the bubble exceeds 1/part": work // (v * group) * group,
        "a bubble of exactly 1/part is allowed": of_groups(work, v, group) + group,
    }


# The fastest schedule


class Case(NamedTuple):
    """What `fastest_schedule` is asked."""

    num_ranks: int
    num_blocks: int
    num_sequences: int
    seconds: Callable[[int], int]
    formula: str
    """In words what `seconds` is."""
    block_bytes: int
    limit: int

    def __str__(self) -> str:
        return f"num_ranks={self.num_ranks}, num_blocks={self.num_blocks}, " \
            f"num_sequences={self.num_sequences}, seconds(b) = {self.formula}, " \
            f"block_bytes={self.block_bytes}, limit={self.limit}"


def affine(fixed: int, each: int, b: int) -> int:
    return fixed + each * b


def in_fours(fixed: int, each: int, b: int) -> int:
    """Like kernels whose tiles hold four sequences."""
    return fixed + each * math.ceil(b / 4)


def cases() -> list[Case]:
    rows = [  # ranks, blocks, sequences, fixed seconds, those of a sequence, bytes, limits
        (2, 4, 4, 1, 1, 10, (10**6, 39, 80, 79, 50)),
        (4, 16, 16, 0, 3, 1, (10**6, 16, 20, 15)),
        (4, 16, 16, 9, 1, 1, (10**6, 64, 43, 26, 15)),
        (4, 16, 16, 100, 1, 1, (10**6, 32)),
        (3, 12, 12, 2, 1, 5, (10**6, 150, 90)),
        (2, 6, 6, 4, 1, 7, (10**6, 126)),
        (1, 4, 8, 5, 1, 3, (10**6, 24, 11)),
        (8, 16, 8, 1, 2, 1, (10**6, 16)),
    ]
    return [
        Case(*sizes, partial(affine, fixed, each), f"{fixed} + {each} b", size, limit)
        for *sizes, fixed, each, size, limits in rows for limit in limits
    ] + [Case(8, 8, 8, partial(in_fours, 1, 4), "1 + 4 ceil(b / 4)", 1, limit)
         for limit in (9, 30)]


class Step(NamedTuple):
    """A schedule's step: its simulated seconds, and what the fullest rank holds."""

    seconds: int
    bytes: int


def problem(b: int, v: int, case: Case) -> str | None:
    """What is wrong with this choice, if it cannot be run."""
    per_rank = case.num_blocks // case.num_ranks
    if b < 1 or case.num_sequences % b:
        return f"a micro-batch size of {b} does not divide {case.num_sequences} sequences"
    if v < 1 or per_rank % v:
        return f"{v} chunks do not divide the {per_rank} blocks of a rank"
    m = case.num_sequences // b
    if v > 1 and m % case.num_ranks:
        return f"interleaved 1F1B needs a multiple of {case.num_ranks} micro-batches; this has {m}"
    return None


def step_of(b: int, v: int, case: Case) -> Step:
    schedule = make_schedule(case.num_ranks, case.num_sequences // b, v)
    blocks = case.num_blocks // case.num_ranks // v
    forward = blocks * case.seconds(b)
    timeline = simulate(schedule, {"F": forward, "B": 2 * forward})
    return Step(timeline.seconds, max(peak_activations(schedule)) * blocks * b * case.block_bytes)


def all_steps(case: Case) -> dict[tuple[int, int], Step]:
    """Every schedule that can be run, whether it fits or not."""
    per_rank = case.num_blocks // case.num_ranks
    pairs = ((b, v) for b in range(1, case.num_sequences + 1) for v in range(1, per_rank + 1))
    return {(b, v): step_of(b, v, case) for b, v in pairs if problem(b, v, case) is None}


def _expect_fastest(answer, case: Case) -> None:
    fits = answer is None or isinstance(answer, tuple) and len(answer) == 2 and all(
        type(n) is int for n in answer)
    expect(fits, seen=f"it returned {answer!r:.80}",
           likely="return two ints, micro_batch_size and num_chunks, or None")
    found = all_steps(case)
    fitting = {pair: step for pair, step in found.items() if step.bytes <= case.limit}
    best = min(fitting, key=lambda pair: fitting[pair].seconds, default=None)
    if answer is None:
        expect(best is None, seen=f"None, though {best} {_in_words(found.get(best))}",
               likely="a schedule that needs exactly the limit fits; smaller micro-batches or "
                      "fewer chunks need less")
        return
    if best and answer == best[::-1] != best:
        raise Mistake(f"{answer}, not {best}",
                      "the micro-batch size comes first, then the number of chunks")
    wrong = problem(*answer, case)
    expect(wrong is None, seen=f"it returned {answer}", likely=wrong or "")
    step = found[answer]
    expect(step.bytes <= case.limit, seen=f"{answer} {_in_words(step)}; the limit is "
           f"{case.limit}; " + ("nothing fits" if best is None else
                                f"{best} {_in_words(found[best])}"),
           likely=_why_too_large(answer, case))
    if step.seconds > fitting[best].seconds:
        likely = _why_slower(answer, best, fitting, case)
        if fitting[best].bytes == case.limit:
            likely = "a schedule that needs exactly the limit fits"
        raise Mistake(f"{answer} {_in_words(step)}; {best} {_in_words(fitting[best])}; the "
                      f"limit is {case.limit}", likely)


def _fastest_on_a_line(
    fitting: dict[tuple[int, int], Step], case: Case
) -> tuple[int, int]:
    """The fastest that fits if seconds(b) were the line through b = 1 and b = 2."""
    one, two = case.seconds(1), case.seconds(2)

    def seconds(pair: tuple[int, int]) -> float:
        return fitting[pair].seconds / case.seconds(pair[0]) * (one + (two - one) * (pair[0] - 1))

    return min(fitting, key=seconds)


def _in_words(step: Step | None) -> str:
    return f"takes {step.seconds} s and holds {step.bytes} bytes" if step else ""


def _why_too_large(answer: tuple[int, int], case: Case) -> str:
    (b, v), p = answer, case.num_ranks
    held, per_rank = step_of(b, v, case).bytes, case.num_blocks // p
    passes = b * per_rank // v * case.block_bytes  # of one micro-batch in one chunk
    like_1f1b = min(case.num_sequences // b, p) * v * passes
    faults = {
        "block_bytes is per sequence: a micro-batch has b of them": held // b,
        "block_bytes is per block: a rank has several": held * v // per_rank,
        "interleaved 1F1B holds more than 1F1B: (v - 1) p + 2 (p - 1) + 1 micro-batches of a chunk":
            like_1f1b if v > 1 else math.inf,
        "one micro-batch is missing: the + 1 in the formula": held - passes,
        "a rank holds up to p micro-batches, not one": v * passes,
    }
    return next((why for why, num_bytes in faults.items() if num_bytes <= case.limit),
                "skip schedules that hold more than the limit")


def _why_slower(
    answer: tuple[int, int], best: tuple[int, int], fitting: dict[tuple[int, int], Step],
    case: Case,
) -> str:
    if answer == _fastest_on_a_line(fitting, case) != best:
        return "seconds(b) need not lie on a straight line: call it for each b"
    (b, v), p = best, case.num_ranks
    m = case.num_sequences // b
    if v == 1 and m < p and fitting[best].bytes * p > case.limit * m:
        return f"{best} fits: 1F1B holds p micro-batches but never more than m, which is {m} here"
    if answer[0] == best[0] and answer[1] < best[1]:
        return "more chunks shorten the bubble, and they fit"
    if answer == min(fitting, key=lambda pair: pair[0] / pair[1]):  # of (p - 1) b / (n v)
        return "the smallest bubble does not make the shortest step: a sequence takes less time " \
               "in a larger micro-batch"
    if fitting[answer].bytes == min(step.bytes for step in fitting.values()):
        return "that needs the least memory, but unused memory makes no step faster"
    if answer[0] == max(b for b, _ in fitting):
        return "the largest micro-batch that fits is not the fastest: fewer of them mean more " \
               "bubble"
    return "a step is m passes through all the blocks of a rank plus p - 1 through one " \
           "chunk: compare all the schedules that fit"
