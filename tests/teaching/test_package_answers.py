"""The package has the answer to many exercises; whoever calls it, or hands it in, is told so."""

import inspect
import multiprocessing
from importlib import import_module

import pytest

from teaching import graders
from teaching.exercises import ROOT, known, replaced
from teaching.graders import Forbidden
from teaching.graders.answers import OTHERS, package_answers
from teaching.graders.guard import Guard, _functions_of
from tests.tiers import tiered

REACHES = "teaching/graders", "solutions"  # by name: for tools/affected.py

EXERCISES = known()
REPLACING = [exercise for exercise in EXERCISES.values() if exercise.replaces]


def target_of(name):
    module, _, path = name.partition(":")
    target = import_module(module)
    for part in path.split("."):
        target = getattr(target, part)
    return target


def test_the_table_names_what_there_is():
    assert set(OTHERS) <= set(EXERCISES)
    for exercise in EXERCISES.values():
        for name in package_answers(exercise):
            assert inspect.isfunction(target_of(name)) or inspect.isclass(target_of(name)), name


@pytest.mark.parametrize("exercise_id", tiered(OTHERS, 6))
def test_whatever_is_listed_refuses_the_learners_calls(exercise_id):
    """In a process like a bench, without a grader: the learner's code calls each of them."""
    exercise = EXERCISES[exercise_id]
    context = multiprocessing.get_context("forkserver")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=call_as_learner, args=(exercise, theirs))
    process.start()
    theirs.close()
    said = ours.recv()
    process.join()
    assert len(said) == len(package_answers(exercise))
    assert all("of minitron is called" in text for text in said), said


def call_as_learner(exercise, pipe):
    Guard(exercise, ROOT / exercise.file)
    said = []
    for target in map(target_of, package_answers(exercise)):
        function = _functions_of(target)[0] if inspect.isclass(target) else target
        learners = {"function": function, "__name__": f"exercises.{exercise.chapter}"}
        try:
            exec("def call():\n    function()\ncall()", learners)
        except (Forbidden, TypeError) as error:
            said.append(str(error))
    pipe.send(said)


def answers_of(exercise):
    """For each name of the exercise one of the package: the same, where it has it."""
    own = list(replaced(exercise))
    return [(name, name if name in own else own[0]) for name in exercise.names]


def grade(tmp_path, exercise, lines):
    (tmp_path / "exercises").mkdir()
    path = tmp_path / exercise.file
    path.write_text("\n".join([f"import {exercise.replaces} as package", *lines]) + "\n")
    return graders.grade_file(exercise, path)


@pytest.mark.parametrize("exercise", tiered(REPLACING, 4), ids=str)
def test_the_package_s_own_function_handed_in_is_told(tmp_path, exercise):
    lines = [f"{name} = package.{theirs}" for name, theirs in answers_of(exercise)]
    verdict = grade(tmp_path, exercise, lines)
    assert verdict.state == "failed" and "is the package's own" in verdict.seen


@pytest.mark.parametrize("exercise", tiered(REPLACING, 4), ids=str)
def test_an_answer_that_calls_the_package_s_is_told(tmp_path, exercise):
    lines = []
    for name, theirs in answers_of(exercise):
        if inspect.isclass(target_of(f"{exercise.replaces}:{theirs}")):
            lines += [f"class {name}(package.{theirs}):", "    pass"]
        else:
            lines += [
                f"def {name}(*args, **kwargs):",
                f"    return package.{theirs}(*args, **kwargs)",
            ]
    verdict = grade(tmp_path, exercise, lines)
    assert verdict.state == "failed"
    assert "of minitron is called" in verdict.seen or "is the package's own" in verdict.seen
