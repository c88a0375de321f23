"""Grader of 12.3: every schedule there is, played by the simulator and weighed by the validator."""

import math
from collections.abc import Callable
from fractions import Fraction
from functools import cache, partial
from typing import NamedTuple

from minitron.parallel.pipeline.schedule_check import peak_activations
from minitron.parallel.pipeline.schedules import Schedule, interleaved, one_forward_one_backward
from minitron.parallel.pipeline.simulator import simulate
from teaching.graders import Mistake, asked, expect

NEEDED = [  # ranks, chunks, the bubble's part of a step
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
    """Whether at most 1/part of a step is bubble, played with whole numbers of seconds."""
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
           likely="a number of micro-batches, an int: divide by //, and round up")
    right = right_number(p, v, part)
    if answer == right:
        return
    why = next((why for why, value in _needed_faults(p, v, part).items() if value == answer),
               "idle for (p - 1) / v passes, at work for m: their sum is the step")
    raise Mistake(f"{answer}, not {right}", why)


def _needed_faults(p: int, v: int, part: int) -> dict[str, int]:
    group, work = p if v > 1 else 1, (p - 1) * (part - 1)

    def of_groups(passes: int, chunks: int, group: int) -> int:
        return math.ceil(Fraction(passes, chunks * group)) * group

    return {
        "a step has at least one micro-batch": 0,
        "that is bubble over work: a step is both, and 1/part of it is bubble":
            of_groups((p - 1) * part, v, group),
        "a rank waits for the p - 1 others": of_groups(p * (part - 1), v, group),
        "with chunks a rank is idle for p - 1 passes through one chunk, a v-th of what it holds":
            of_groups(work, 1, group),
        "interleaved 1F1B takes micro-batches in groups of p": of_groups(work, v, 1),
        "1F1B takes any number: only with chunks it is a multiple of p": of_groups(work, v, p),
        "rounded up: with fewer the bubble is larger": work // (v * group) * group,
        "with exactly 1/part it is small enough": of_groups(work, v, group) + group,
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
    """As kernels do whose tiles have four sequences."""
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


class Played(NamedTuple):
    """A schedule's step: as the simulator plays it, and what the fullest rank holds."""

    seconds: int
    bytes: int


def problem(b: int, v: int, case: Case) -> str | None:
    """Why the case cannot be run so."""
    per_rank = case.num_blocks // case.num_ranks
    if b < 1 or case.num_sequences % b:
        return f"micro-batches of {b} do not divide {case.num_sequences} sequences"
    if v < 1 or per_rank % v:
        return f"{v} chunks do not divide the {per_rank} blocks of a rank"
    m = case.num_sequences // b
    if v > 1 and m % case.num_ranks:
        return f"interleaved, {m} micro-batches are no multiple of {case.num_ranks} ranks"
    return None


def played(b: int, v: int, case: Case) -> Played:
    schedule = make_schedule(case.num_ranks, case.num_sequences // b, v)
    blocks = case.num_blocks // case.num_ranks // v
    forward = blocks * case.seconds(b)
    timeline = simulate(schedule, {"F": forward, "B": 2 * forward})
    return Played(timeline.seconds, max(peak_activations(schedule)) * blocks * b * case.block_bytes)


def all_played(case: Case) -> dict[tuple[int, int], Played]:
    """Every schedule that can be run, whether it fits or not."""
    per_rank = case.num_blocks // case.num_ranks
    pairs = ((b, v) for b in range(1, case.num_sequences + 1) for v in range(1, per_rank + 1))
    return {(b, v): played(b, v, case) for b, v in pairs if problem(b, v, case) is None}


def _expect_fastest(answer, case: Case) -> None:
    fits = answer is None or isinstance(answer, tuple) and len(answer) == 2 and all(
        type(n) is int for n in answer)
    expect(fits, seen=f"it returned {answer!r:.80}",
           likely="two int, micro_batch_size and num_chunks, or None")
    found = all_played(case)
    fitting = {pair: step for pair, step in found.items() if step.bytes <= case.limit}
    best = min(fitting, key=lambda pair: fitting[pair].seconds, default=None)
    if answer is None:
        expect(best is None, seen=f"None, though {best} {_in_words(found.get(best))}",
               likely="exactly the limit fits; and smaller micro-batches may, or one chunk")
        return
    if best and answer == best[::-1] != best:
        raise Mistake(f"{answer}, not {best}", "first the micro-batch size, then the chunks")
    wrong = problem(*answer, case)
    expect(wrong is None, seen=f"it returned {answer}", likely=wrong or "")
    step = found[answer]
    expect(step.bytes <= case.limit, seen=f"{answer} {_in_words(step)}, of {case.limit}"
           + ("; nothing fits" if best is None else f"; {best} {_in_words(found[best])}"),
           likely=_why_too_large(answer, case))
    if step.seconds > fitting[best].seconds:
        exactly = "exactly the limit fits" if fitting[best].bytes == case.limit else None
        raise Mistake(f"{answer} {_in_words(step)}; {best} {_in_words(fitting[best])}, of "
                      f"{case.limit}", exactly or _why_slower(answer, best, fitting, case))


def _fastest_on_a_line(
    fitting: dict[tuple[int, int], Played], case: Case
) -> tuple[int, int]:
    """The best of those that fit if the seconds went on as they do from 1 to 2 sequences."""
    one, two = case.seconds(1), case.seconds(2)

    def seconds(pair: tuple[int, int]) -> float:
        return fitting[pair].seconds / case.seconds(pair[0]) * (one + (two - one) * (pair[0] - 1))

    return min(fitting, key=seconds)


def _in_words(step: Played | None) -> str:
    return f"takes {step.seconds} s and holds {step.bytes} bytes" if step else ""


def _why_too_large(answer: tuple[int, int], case: Case) -> str:
    (b, v), p = answer, case.num_ranks
    held, per_rank = played(b, v, case).bytes, case.num_blocks // p
    passes = b * per_rank // v * case.block_bytes  # of one micro-batch in one chunk
    like_1f1b = min(case.num_sequences // b, p) * v * passes
    faults = {
        "block_bytes are of one sequence: a micro-batch has b of them": held // b,
        "block_bytes are of one block: a rank has several": held * v // per_rank,
        "interleaved holds more than 1F1B: (v - 1) p + 2 (p - 1) + 1 times a chunk's micro-batch":
            like_1f1b if v > 1 else math.inf,
        "one micro-batch more: the one that turns around": held - passes,
        "a rank holds up to p micro-batches, not one": v * passes,
    }
    return next((why for why, num_bytes in faults.items() if num_bytes <= case.limit),
                "leave out what holds more than the limit")


def _why_slower(
    answer: tuple[int, int], best: tuple[int, int], fitting: dict[tuple[int, int], Played],
    case: Case,
) -> str:
    if answer == _fastest_on_a_line(fitting, case) != best:
        return "seconds(b) need not lie on a straight line: ask for each b"
    (b, v), p = best, case.num_ranks
    m = case.num_sequences // b
    if v == 1 and m < p and fitting[best].bytes * p > case.limit * m:
        return f"{best} fits: 1F1B holds p micro-batches, but never more than m, and here m is {m}"
    if answer[0] == best[0] and answer[1] < best[1]:
        return "more chunks make the bubble shorter, and they fit"
    if answer == min(fitting, key=lambda pair: pair[0] / pair[1]):  # of (p - 1) b / (n v)
        return "the smallest bubble is not the shortest step: a sequence takes less time in a " \
               "larger micro-batch"
    if fitting[answer].bytes == min(step.bytes for step in fitting.values()):
        return "that holds least: nothing is won with memory that is left"
    if answer[0] == max(b for b, _ in fitting):
        return "the largest micro-batch that fits is not the best: fewer of them have more bubble"
    return "a step is m passes through all that a rank holds, and p - 1 through a chunk: compare " \
           "all that fit"
