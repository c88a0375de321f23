"""The exercises of chapter 3: stubs fail, right answers pass, each named mistake is recognised."""

import importlib.util
from pathlib import Path

import pytest
import torch

from minitron import cost
from minitron.config import ModelConfig
from minitron.course import graders
from minitron.course.exercises import ROOT, known, load

CHAPTER = "ch03_recompute"
EXERCISES = {e.id: e for e in known().values() if e.chapter == CHAPTER}
MUTANTS_FILE = Path(__file__).with_name("mutants") / f"{CHAPTER}.py"


def read_mutants():
    spec = importlib.util.spec_from_file_location("ch03_mutants", MUTANTS_FILE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


mutants = read_mutants()
MISTAKES = [(name, answer, says) for name, answers in mutants.MISTAKES.items()
            for answer, says in answers.items()]
RIGHT = [(name, answer) for name, answers in mutants.RIGHT_ANSWERS.items() for answer in answers]


def grade(name, answer):
    """Grade our solution with the function `name` replaced by `answer`."""
    exercise = next(e for e in EXERCISES.values() if name in e.names)
    functions = load(exercise, ROOT / exercise.solution_file) | {name: answer}
    return graders.grade(exercise, functions, MUTANTS_FILE)


def test_there_are_four_exercises_with_their_own_functions():
    assert list(EXERCISES) == ["3.1", "3.2", "3.3", "3.4"]
    names = [name for exercise in EXERCISES.values() for name in exercise.names]
    assert set(names) == set(mutants.MISTAKES) == set(mutants.RIGHT_ANSWERS)


@pytest.mark.parametrize("exercise", EXERCISES.values(), ids=str)
def test_our_solution_passes(exercise):
    assert graders.grade_file(exercise, ROOT / exercise.solution_file).state == "passed"


@pytest.mark.parametrize(("name", "answer"), RIGHT, ids=lambda v: getattr(v, "__name__", v))
def test_a_differently_written_right_answer_passes(name, answer):
    assert grade(name, answer) == graders.Verdict("passed")


@pytest.mark.parametrize(
    ("name", "answer", "says"), MISTAKES, ids=lambda v: getattr(v, "__name__", "")
)
def test_a_mistake_is_recognised(name, answer, says):
    verdict = grade(name, answer)
    assert verdict.state == "failed"
    assert says in f"{verdict.seen}\n{verdict.likely}"
    assert verdict.asked and answer.__doc__


@pytest.mark.parametrize("name", mutants.MISTAKES)
def test_every_function_has_four_to_eleven_mistakes(name):
    assert 4 <= len(mutants.MISTAKES[name]) <= 11


def test_the_examples_in_the_docstrings_are_true():
    path = ROOT / EXERCISES["3.1"].solution_file
    recompute = load(EXERCISES["3.1"], path)["recompute"]
    w, x = torch.tensor(3.0, requires_grad=True), torch.tensor(2.0, requires_grad=True)
    result = recompute(lambda x: w * x * x, x)
    result.backward()
    assert (result.item(), x.grad.item(), w.grad.item()) == (12, 12, 4)

    choose = load(EXERCISES["3.2"], path)["segments_for_budget"]
    assert choose([10] * 4, 1, 40) == []
    assert choose([10] * 4, 1, 21) == [2]

    flops = load(EXERCISES["3.3"], path)["recompute_flops_per_token"]
    model = ModelConfig(family="llama", vocab_size=10, width=4, num_heads=2, num_kv_heads=2,
                        ffn_width=6, num_layers=1)
    assert cost.training_flops_per_token(model, 3) == 1200
    assert [flops(model, 3, kind) for kind in ("none", "selective", "full")] == [0, 48, 320]

    assert load(EXERCISES["3.4"], path)["best_segment_length"](7, 4, 2) == (2, 12)
