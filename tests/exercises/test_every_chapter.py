"""Every chapter's exercises: stubs fail, right answers pass, each named mistake is recognized."""

import pytest

from teaching import graders
from teaching.exercises import ROOT, known
from tests.exercises.common import Chapter

CHAPTERS = {name: Chapter(name) for name in dict.fromkeys(e.chapter for e in known().values())}
RIGHT = [(chapter, *row) for chapter, c in CHAPTERS.items() for row in c.all_right()]
MISTAKES = [(chapter, *row) for chapter, c in CHAPTERS.items() for row in c.all_mistakes()]


@pytest.mark.parametrize("chapter", CHAPTERS.values(), ids=CHAPTERS)
def test_there_are_four_or_five_exercises_with_their_own_functions(chapter):
    numbers = [exercise_id.split(".")[1] for exercise_id in chapter.exercises]
    assert numbers in (["1", "2", "3", "4"], ["1", "2", "3", "4", "5"])
    names = [name for exercise in chapter.exercises.values() for name in exercise.names]
    assert set(names) == set(chapter.mistakes) == set(chapter.right_answers)
    assert all(chapter.right_answers.values())


@pytest.mark.parametrize("exercise", known().values(), ids=str)
def test_our_solution_passes(exercise):
    assert graders.grade_file(exercise, ROOT / exercise.solution_file) == graders.Verdict("passed")


@pytest.mark.parametrize(
    ("chapter", "name", "answer"), RIGHT, ids=lambda v: getattr(v, "__name__", v)
)
def test_a_differently_written_right_answer_passes(chapter, name, answer):
    assert CHAPTERS[chapter].grade(name, answer) == graders.Verdict("passed")


@pytest.mark.parametrize(
    ("chapter", "name", "answer", "says"), MISTAKES, ids=lambda v: getattr(v, "__name__", "")
)
def test_a_mistake_is_recognized(chapter, name, answer, says):
    verdict = CHAPTERS[chapter].grade(name, answer)
    assert verdict.state == "failed"
    assert says in f"{verdict.seen}\n{verdict.likely}"
    assert verdict.asked and answer.__doc__


@pytest.mark.parametrize("chapter", CHAPTERS.values(), ids=CHAPTERS)
def test_every_function_has_four_mistakes_or_more(chapter):
    # No upper bound: each wrong answer that once passed a grader stays here.
    assert all(len(mistakes) >= 4 for mistakes in chapter.mistakes.values())
