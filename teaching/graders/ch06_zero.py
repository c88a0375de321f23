"""Graders of chapter 6; those that train on many ranks have a file of their own each."""

from collections.abc import Callable
from itertools import accumulate, product

from teaching.graders import Mistake, asked, expect
from teaching.graders.ch06_gradients import grade_6_3
from teaching.graders.ch06_step import grade_6_2
from teaching.graders.ch06_toy import shard_length
from teaching.graders.ch06_unit import grade_6_4

__all__ = ["grade_6_1", "grade_6_2", "grade_6_3", "grade_6_4"]


def grade_6_1(owned_ranges: Callable) -> None:
    """Ask every rank, and look whom each element belongs to."""
    lists = [[2, 5], [3, 4], [7], [2, 2, 2], [10, 1, 1],
             [1, 1, 10], [5, 0, 2], [1], [0], [], [4, 9, 6, 13]]
    for sizes, num_ranks in product(lists, (2, 3, 4, 1, 8)):
        answers = []
        for rank in range(num_ranks):
            with asked(f"owned_ranges(sizes={sizes}, num_ranks={num_ranks}, rank={rank})"):
                answer = owned_ranges(list(sizes), num_ranks, rank)
                _expect_ranges(answer, sizes, num_ranks, rank)
                answers.append(answer)
        with asked(f"owned_ranges(sizes={sizes}, num_ranks={num_ranks}, rank) for every rank"):
            _expect_partition(answers, sizes)
        for rank, answer in enumerate(answers):
            right = right_ranges(sizes, num_ranks, rank)
            if answer != right:
                with asked(f"owned_ranges(sizes={sizes}, num_ranks={num_ranks}, rank={rank})"):
                    raise Mistake(f"{answer}; correct is {right}",
                                  _why_other_ranges(answers, sizes, num_ranks))


def right_ranges(sizes: list[int], num_ranks: int, rank: int) -> list[range]:
    """By asking every element whose it is."""
    length = max(1, shard_length(sum(sizes), num_ranks))
    starts = accumulate(sizes, initial=0)
    owned = [[i for i in range(size) if (start + i) // length == rank]
             for start, size in zip(starts, sizes, strict=False)]
    return [range(mine[0], mine[-1] + 1) if mine else range(0) for mine in owned]


def _expect_ranges(answer, sizes: list[int], num_ranks: int, rank: int) -> None:
    expect(isinstance(answer, list) and all(isinstance(own, range) for own in answer),
           seen=f"it returned {answer!r:.120}",
           likely="return a list of ranges, one for each parameter")
    expect(len(answer) == len(sizes), seen=f"{len(answer)} ranges for {len(sizes)} parameters",
           likely="one range for each parameter, an empty one if the rank owns none of it")
    inside = [not own or (own[0] >= 0 and own[-1] < size)
              for own, size in zip(answer, sizes, strict=True)]
    starts = accumulate(sizes, initial=0)
    shifted = [range(own.start + start, own.stop + start) for own, start in
               zip(right_ranges(sizes, num_ranks, rank), starts, strict=False)]
    likely = "cut both ends to 0 ... size: a shard may begin before a parameter, or end after it"
    if answer == shifted:
        likely = "those count from the start of all parameters: count from the parameter's own"
    expect(all(inside), seen=f"{answer}, where the parameters have {sizes} elements", likely=likely)


def _expect_partition(answers: list[list[range]], sizes: list[int]) -> None:
    owners = [[[rank for rank, own in enumerate(answers) if i in own[number]] for i in range(size)]
              for number, size in enumerate(sizes)]
    for number, of_parameter in enumerate(owners):
        for i, ranks in enumerate(of_parameter):
            expect(len(ranks) > 0, seen=f"no rank owns element {i} of parameter {number}",
                   likely="L is rounded up, and a range's stop is one past its last element")
            expect(len(ranks) == 1, seen=f"element {i} of parameter {number} is owned by ranks "
                   f"{', '.join(map(str, ranks))}", likely="a shard ends where the next one starts")


def _why_other_ranges(answers: list[list[range]], sizes: list[int], num_ranks: int) -> str:
    length = shard_length(sum(sizes), num_ranks)
    if not any(0 < len(own) < size for answer in answers
               for own, size in zip(answer, sizes, strict=True)):
        return f"whole parameters do not divide evenly, and L is {length}: a cut may go through " \
               "a parameter"
    starts = list(accumulate(sizes, initial=0))
    for answer in answers:
        elements = [start + i for start, own in zip(starts, answer, strict=False) for i in own]
        if elements and elements[-1] - elements[0] >= len(elements):
            return "a rank's elements are consecutive: split the concatenated parameters, " \
                   "not each parameter by itself"
    return f"every shard has L = ceil(n / N) = {length} elements, except the last, which may " \
           "have fewer or none"
