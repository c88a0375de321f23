"""The package has the answer to many exercises; whoever calls it, or hands it in, is told so."""

import inspect
from importlib import import_module

import pytest

from minitron.course import graders
from minitron.course.exercises import known
from minitron.course.graders.answers import OTHERS, package_answers

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
        names = package_answers(exercise)
        assert len(set(names)) == len(names)
        for name in names:
            assert inspect.isfunction(target_of(name)) or inspect.isclass(target_of(name)), name


def grade(tmp_path, exercise, lines):
    (tmp_path / "exercises").mkdir()
    path = tmp_path / exercise.file
    path.write_text("\n".join([f"import {exercise.replaces} as package", *lines]) + "\n")
    return graders.grade_file(exercise, path)


@pytest.mark.parametrize("exercise", REPLACING, ids=str)
def test_the_package_s_own_function_handed_in_is_told(tmp_path, exercise):
    verdict = grade(tmp_path, exercise, [f"{name} = package.{name}" for name in exercise.names])
    assert verdict.state == "failed" and "is the package's own" in verdict.seen


@pytest.mark.parametrize("exercise", REPLACING, ids=str)
def test_an_answer_that_calls_the_package_s_is_told(tmp_path, exercise):
    lines = []
    for name in exercise.names:
        if inspect.isclass(target_of(f"{exercise.replaces}:{name}")):
            lines += [f"class {name}(package.{name}):", "    pass"]
        else:
            lines += [f"def {name}(*args, **kwargs):",
                      f"    return package.{name}(*args, **kwargs)"]
    verdict = grade(tmp_path, exercise, lines)
    assert verdict.state == "failed"
    assert "of minitron is called" in verdict.seen or "is the package's own" in verdict.seen
