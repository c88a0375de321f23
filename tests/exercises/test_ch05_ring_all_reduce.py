"""The exercises of chapter 5: their examples, and the package's own functions under the graders."""

import math
import sys

import cloudpickle
import pytest
import torch

from minitron import cost
from minitron.comm import collectives
from minitron.launch import run
from teaching.exercises import ROOT, load
from teaching.graders.ch05_ring import lengths
from teaching.graders.ch05_ring_all_reduce import walk
from tests.exercises.common import Chapter
from tests.exercises.grading import Grading
from tests.tiers import tiered

CHAPTER = Chapter("ch05_ring_all_reduce")


class TestGrading(Grading):
    chapter = CHAPTER


def solution(exercise_id):
    exercise = CHAPTER.exercises[exercise_id]
    functions = load(exercise, ROOT / exercise.solution_file)
    cloudpickle.register_pickle_by_value(sys.modules["exercises.ch05_ring_all_reduce"])
    return functions


def test_the_rings_examples_are_true():
    scatter, gather = solution("5.1")["reduce_scatter_ring"], solution("5.2")["all_gather_ring"]

    def examples(group):
        summands = torch.tensor([[1.0, 2.0, 3.0], [10.0, 20.0, 30.0]])[group.rank()]
        chunk = scatter(summands, group)
        flat = torch.tensor([[1.0, 2.0, math.nan], [math.nan, math.nan, 3.0]])[group.rank()]
        gather(flat, group)
        return chunk.tolist(), flat.tolist()

    assert run(examples, 2) == [([11.0, 22.0], [1.0, 2.0, 3.0]), ([33.0], [1.0, 2.0, 3.0])]


def test_the_formulas_examples_are_true():
    chunk_sizes, volume = solution("5.3").values()
    assert chunk_sizes(3, 2) == [2, 1]
    assert chunk_sizes(10, 4) == [3, 3, 2, 2]
    assert chunk_sizes(2, 4) == [1, 1, 0, 0]
    assert volume(3, 4, 2, 0) == (12, 12)
    assert volume(10, 1, 4, 1) == (15, 14)

    fit_link, ring_wins_from = solution("5.4").values()
    assert fit_link([0, 1_000_000], [0.001, 0.011]) == pytest.approx((0.001, 1e8))
    assert ring_wins_from(2, 0.001, 1e6) == math.inf
    assert ring_wins_from(4, 0.001, 1e6) == pytest.approx(8000)
    for seconds in (cost.ring_all_reduce_seconds, cost.doubling_all_reduce_seconds):
        assert seconds(8000, 4, 0.001, 1e6) == pytest.approx(0.018)


@pytest.mark.parametrize(
    ("module", "name"),
    tiered(
        [
            (cost, "chunk_sizes"),
            (cost, "ring_all_reduce_volume"),
            (cost, "fit_link"),
            (collectives, "reduce_scatter_ring"),
            (collectives, "all_gather_ring"),
        ],
        keep=3,
    ),
)
def test_the_packages_functions_pass_the_graders(module, name):
    verdict = CHAPTER.grade(name, getattr(module, name))
    assert verdict.state == "passed", verdict


def test_the_graders_walk_is_the_packages_formula():
    for size in (1, 2, 3, 4, 7):
        for num_elements in lengths(size):
            assert walk(num_elements, 2, size) == [
                cost.ring_all_reduce_volume(num_elements, 2, size, rank) for rank in range(size)
            ]


def test_every_kind_of_length_is_graded():
    for size in (2, 3, 4):
        lengths_of = lengths(size)
        assert lengths_of[0] % size == 0  # first the easy one: its message is the clearest
        assert {0, 1, size - 1, size + 1} <= set(lengths_of)
        assert any(n > size and n % size for n in lengths_of)
