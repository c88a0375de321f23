"""The exercises of chapter 1: their examples."""

from minitron.config import ModelConfig
from teaching.exercises import ROOT, load
from tests.exercises.common import Chapter
from tests.exercises.grading import Grading

CHAPTER = Chapter("ch01_single_gpu")
EXERCISES = CHAPTER.exercises


class TestGrading(Grading):
    chapter = CHAPTER


def test_the_examples_in_the_docstrings_are_true():
    exercise = EXERCISES["1.2"]
    rate = load(exercise, ROOT / exercise.solution_file)["learning_rate"]
    assert [round(rate(step, 1.0, 0.0, 2, 7), 3) for step in range(7)] == [
        0.5,
        1.0,
        1.0,
        0.854,
        0.5,
        0.146,
        0.0,
    ]

    cost = load(EXERCISES["1.3"], ROOT / exercise.solution_file)
    model = ModelConfig(
        family="llama",
        vocab_size=10,
        width=4,
        num_heads=2,
        num_kv_heads=2,
        ffn_width=6,
        num_layers=1,
    )
    assert cost["num_parameters"](model) == 188
    assert cost["training_flops_per_token"](model, 3) == 1200

    plan = load(EXERCISES["1.4"], ROOT / exercise.solution_file)["plan_batch"]
    assert plan(2**16, 1024, 4, 6) == (4, 4)
