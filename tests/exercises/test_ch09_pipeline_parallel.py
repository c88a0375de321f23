"""The exercises of chapter 9: their examples, the package under the graders, and the judges."""

import sys
from itertools import combinations, pairwise

import cloudpickle
import pytest
import torch
from torch import nn

from minitron.launch import run
from minitron.parallel.pipeline import plan as pipeline_plan
from minitron.parallel.pipeline import schedules
from minitron.parallel.pipeline.schedule_check import check
from minitron.parallel.pipeline.schedules import Action
from teaching.exercises import ROOT, load
from teaching.graders import ch09_stage
from teaching.graders.ch09_cut import (
    EXAMPLES,
    Case,
    case_of_llama,
    least_largest,
    random_cases,
    stage_costs,
)
from tests.exercises.common import Chapter
from tests.exercises.grading import Grading

CHAPTER = Chapter("ch09_pipeline_parallel")


class TestGrading(Grading):
    chapter = CHAPTER


def solution(exercise_id):
    exercise = CHAPTER.exercises[exercise_id]
    answers = load(exercise, ROOT / exercise.solution_file).values()
    cloudpickle.register_pickle_by_value(sys.modules["exercises.ch09_pipeline_parallel"])
    return list(answers)


def words(schedule):
    return [" ".join(map(str, actions)) for actions in schedule.actions]


def test_the_schedules_examples_are_true():
    gpipe, one_forward_one_backward = solution("9.1")
    assert words(gpipe(2, 2)) == ["F0 F1 B0 B1"] * 2
    assert words(one_forward_one_backward(2, 3)) == ["F0 F1 B0 F2 B1 B2", "F0 B0 F1 B1 F2 B2"]
    assert words(one_forward_one_backward(2, 1)) == ["F0 B0"] * 2


def test_the_formulas_examples_are_true():
    bubble, activation_bytes = solution("9.2")
    assert bubble(2, 2, 1) == pytest.approx((1 / 3, 1 / 2))
    assert bubble(2, 2, 2) == pytest.approx((1 / 5, 1 / 4))
    held = {
        (name, rank): activation_bytes(name, 2, 4, chunks, rank, 1200)
        for name, chunks in (("GPipe", 1), ("1F1B", 1), ("interleaved 1F1B", 2))
        for rank in (0, 1)
    }
    assert list(held.values()) == [2400, 2400, 1200, 600, 1500, 900]


def test_the_cuts_examples_are_true():
    (split_blocks,) = solution("9.3")
    for cut, last in (([range(3), range(3, 5)], 0.0), ([range(4), range(4, 5)], 6.0)):
        case = Case([2.0] * 5, 2, last=last)
        assert max(stage_costs(cut, case)) == least_largest(case)
        assert max(stage_costs(split_blocks(*case), case)) == least_largest(case)


class Times(nn.Module):
    def __init__(self, value):
        super().__init__()
        self.factor = nn.Parameter(torch.tensor(value))

    def forward(self, x):
        return self.factor * x


def test_the_stages_example_is_true():
    (run_stage,) = solution("9.4")

    def example(group):
        rank = group.rank()
        stage = Times([3.0, 2.0][rank])
        actions = [
            Action(kind, int(i), rank)
            for kind, i in [("F0", "F1", "B0", "B1"), ("F0", "B0", "F1", "B1")][rank]
        ]
        micro_batches = [(torch.tensor([[1.0]]), None), (torch.tensor([[2.0], [3.0]]), None)]
        loss = run_stage(stage, actions, micro_batches, lambda out, targets: out.sum(), group)
        return None if loss is None else loss.item(), stage.factor.grad.item()

    first, last = run(example, 2)
    assert first == (None, pytest.approx(4.0))
    assert last == (pytest.approx(12.0), pytest.approx(6.0))


# The package under the graders


@pytest.mark.parametrize(
    ("module", "name"),
    [
        (schedules, "gpipe"),
        (schedules, "one_forward_one_backward"),
        (pipeline_plan, "split_blocks"),
    ],
)
def test_the_package_passes(module, name):
    verdict = CHAPTER.grade(name, getattr(module, name))
    assert verdict.state == "passed", verdict


# What the graders rest on


def brute_force(case):
    """The least cost of the most expensive stage, by every cut there is."""
    n = len(case.costs)
    cuts = ([0, *inner, n] for inner in combinations(range(1, n), case.num_stages - 1))
    return min(max(stage_costs([range(*pair) for pair in pairwise(cut)], case)) for cut in cuts)


def test_the_judge_of_cuts_agrees_with_every_cut_there_is():
    for case in [*EXAMPLES, *random_cases()]:
        assert least_largest(case) == brute_force(case), case


def test_llama_is_cut_as_its_authors_did():
    # Grattafiori et al. 2024 (section 3.3.2): one layer less on the first and on the last stage
    (split_blocks,) = solution("9.3")
    sizes = [len(stage) for stage in split_blocks(*case_of_llama())]
    assert sizes[0] == sizes[-1] == 7 and set(sizes[1:-1]) == {8}


def test_the_graders_schedules_can_run_and_differ():
    for case in ch09_stage.CASES:
        for num_ranks in (1, 2, 3, 4):
            check(case.make_schedule(num_ranks, case.num_micro_batches))
    makers = {case.make_schedule for case in ch09_stage.CASES}
    lists = [make_schedule(3, 4).actions for make_schedule in makers]
    assert len(set(lists)) == len(lists)
