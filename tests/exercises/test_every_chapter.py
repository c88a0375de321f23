"""No chapter is left out: each has a file of tests in which all its answers are graded."""

from importlib import import_module

import pytest

from teaching.exercises import known
from tests.exercises.grading import Grading

CHAPTERS = list(dict.fromkeys(exercise.chapter for exercise in known().values()))


@pytest.mark.parametrize("name", CHAPTERS)
def test_a_file_of_tests_grades_the_chapters_answers(name):
    tests = import_module(f"tests.exercises.test_{name}").TestGrading
    assert issubclass(tests, Grading)
    assert {exercise.chapter for exercise in tests.chapter.exercises.values()} == {name}
