"""Grader of 9.3: neighboring blocks for every stage, then the largest cost against the least."""

import random
from collections.abc import Callable
from functools import cache
from itertools import accumulate
from typing import NamedTuple

from minitron.cost import PUBLISHED, num_block_parameters
from teaching.graders import Mistake, asked, expect
from teaching.graders.arguments import call_unchanged
from teaching.graders.numbers import apart

SEED, NUM_RANDOM = 9, 60


class Case(NamedTuple):
    costs: list[float]
    num_stages: int
    first: float = 0.0
    last: float = 0.0

    def __str__(self) -> str:
        numbers = "[" + ", ".join(f"{cost:g}" for cost in self.costs) + "]"
        if len(self.costs) > 12:
            numbers = f"[{self.costs[0]:g}] * {len(self.costs)}"
        return f"split_blocks(costs={numbers}, num_stages={self.num_stages}, " \
               f"first={self.first:g}, last={self.last:g})"


EXAMPLES = [
    Case([2.0] * 8, 4),
    Case([2.0] * 5, 2),
    Case([1.0, 1.0, 1.0, 9.0, 1.0, 1.0], 3),
    Case([2.0] * 5, 2, last=6.0),
    Case([2.0] * 5, 2, first=6.0),
    Case([3.0] * 6, 3, 2.0, 2.0),
    Case([1.0] * 6, 3, last=20.0),  # whoever may, gives the last stage no block
    Case([5.0, 1.0, 1.0, 1.0, 1.0], 3),
    Case([4.0, 1.0, 7.0], 3, 2.0, 5.0),
    Case([1.0, 2.0, 3.0], 1, 4.0, 5.0),
    Case([6.0], 1, 1.0, 2.0),
    Case([0.25, 0.5, 0.25, 0.75], 2),
    Case([1.5, 0.25, 0.25, 1.25, 0.5], 3, 0.0, 0.25),
]


def grade_9_3(split_blocks: Callable) -> None:
    """Cut by hand-made examples, at random, too few blocks, and a model of 126 blocks."""
    for case in [*EXAMPLES, *random_cases(), case_of_llama()]:
        with asked(str(case)):
            answer = call_unchanged(split_blocks, *case, names="the list costs",
                                    likely="it belongs to the caller: modify a copy")
            _expect_ranges(answer, case)
            _expect_least(answer, case)

    for case in (Case([1.0, 2.0, 3.0], 5), Case([1.0], 2)):
        with asked(f"{case}: fewer blocks than stages"):
            _expect_refused(split_blocks, case)


def case_of_llama() -> Case:
    """Llama 3.1 405B on 16 stages, in parameters; its ends are two tables of one size."""
    model = PUBLISHED["Llama 3.1 405B"]
    table = float(model.vocab_size * model.width)
    return Case([float(num_block_parameters(model))] * model.num_layers, 16, table, table)


def random_cases() -> list[Case]:
    generator = random.Random(SEED)
    cases = []
    for _ in range(NUM_RANDOM):
        num_blocks = generator.randint(1, 9)
        costs = [float(generator.randint(1, 9)) for _ in range(num_blocks)]
        ends = [float(generator.choice((0, 3, 10))) for _ in range(2)]
        cases.append(Case(costs, generator.randint(1, min(5, num_blocks)), *ends))
    return cases


def _expect_ranges(answer, case: Case) -> None:
    ranges = isinstance(answer, list) and all(isinstance(stage, range) for stage in answer)
    expect(ranges, seen=f"it returned {answer!r:.120}", likely="a list of ranges, one for each "
           "stage")
    expect(len(answer) == case.num_stages,
           seen=f"{len(answer)} ranges for {case.num_stages} stages",
           likely="return one range for each stage, including the last")
    empty = [stage for stage, blocks in enumerate(answer) if not blocks]
    expect(not empty, seen=f"stage {', '.join(map(str, empty))} has no block: {answer}",
           likely="each stage needs at least one block: leave enough for the stages after it")
    blocks = [block for stage in answer for block in stage]
    right = list(range(len(case.costs)))
    twice = sorted({block for block in blocks if blocks.count(block) > 1})
    missing = sorted(set(right) - set(blocks))
    problem = f"blocks {twice} are on two stages" if twice else \
        f"blocks {missing} are on none" if missing else "blocks are out of order"
    likely = "a range excludes its stop: the next range starts there" if twice or missing else \
             "blocks keep their order: a stage continues where the one before it ends"
    expect(blocks == right, seen=f"{answer}: {problem}", likely=likely)


def stage_costs(answer: list[range], case: Case) -> list[float]:
    costs = [sum(case.costs[block] for block in blocks) for blocks in answer]
    costs[0] += case.first
    costs[-1] += case.last
    return costs


@cache
def _least(costs: tuple[float, ...], num_stages: int) -> float:
    """What the most expensive stage must cost: try each possible sum of neighbors as a limit."""
    before = list(accumulate(costs, initial=0.0))
    limits = sorted({before[end] - before[start]
                     for end in range(1, len(before)) for start in range(end)})
    low, high = 0, len(limits) - 1
    while low < high:
        middle = (low + high) // 2
        if _stages_needed(costs, limits[middle]) <= num_stages:
            high = middle
        else:
            low = middle + 1
    return limits[low]


def _stages_needed(costs: tuple[float, ...], limit: float) -> float:
    stages, filled = 1, 0.0
    for cost in costs:
        if cost > limit:
            return float("inf")
        if filled + cost > limit:
            stages, filled = stages + 1, 0.0
        filled += cost
    return stages


def least_largest(case: Case) -> float:
    """The cost of the most expensive stage in a best cut; ends belong to the outer blocks."""
    costs = list(case.costs)
    costs[0] += case.first
    costs[-1] += case.last
    return _least(tuple(costs), case.num_stages)


def _expect_least(answer: list[range], case: Case) -> None:
    costs, least = stage_costs(answer, case), least_largest(case)
    if max(costs) > least:
        shown = ", ".join(f"{cost:g}" for cost in costs)
        most, possible = apart(max(costs), least)
        raise Mistake(f"{answer}: the stages cost {shown}; the largest cost is {most} and could be "
                      f"{possible}", _why_not_least(answer, case))


def _why_not_least(answer: list[range], case: Case) -> str:
    without_ends = Case(case.costs, case.num_stages)
    lengths = [len(blocks) for blocks in answer]
    if max(lengths) - min(lengths) <= 1 and max(case.costs) > min(case.costs):
        return "equal numbers of blocks are not equal costs: compare the stages' costs"
    if case.first + case.last and \
            max(stage_costs(answer, without_ends)) == least_largest(without_ends):
        return "the blocks alone are split well, but the first stage also has the embedding, and " \
               "the last one the norm and head"
    return "filling stages up to the mean, one after the other, leaves too much or too little " \
           "for the last: for each place where a stage may end, find the best split of the rest"


def _expect_refused(split_blocks: Callable, case: Case) -> None:
    numbers = str(len(case.costs)), str(case.num_stages)
    try:
        answer = split_blocks(list(case.costs), *case[1:])
    except ValueError as error:
        expect(all(number in str(error) for number in numbers), seen=f"ValueError: {error}",
               likely=f"the message must contain both numbers, {numbers[0]} blocks and "
                      f"{numbers[1]} stages")
    else:
        raise Mistake(f"it returned {answer!r:.120}", "raise a ValueError: a stage without a block "
                                                      "has nothing to compute")
