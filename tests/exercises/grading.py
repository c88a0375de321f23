"""What is tested of every chapter's exercises, in a file of tests for each chapter."""

from collections import Counter
from inspect import signature

import pytest

from minitron.launch import ranks
from teaching import graders
from teaching.exercises import ROOT
from teaching.graders import bench, ch04_toy
from teaching.graders import ranks as grading_ranks
from tests.exercises.common import Chapter
from tests.tiers import as_exhaustive, runs_all

KEPT = {("exercise",): 1, ("name", "answer"): 1, ("name", "answer", "says"): 2}
"""How many rows of each exercise `make test` grades."""


def tiers_of(rows: list[tuple], exercises: list[str], keep: int) -> list:
    """Return all rows, given the exercise of each; beyond `keep` of an exercise, exhaustive.

    A row starts with a function's name. An exercise of several functions keeps the first row of
    each of them before the second row of any.
    """
    before: Counter = Counter()
    turns = []
    for row in rows:
        turns.append(before[row[0]])
        before[row[0]] += 1

    kept: dict[str, list[int]] = {}
    for index in sorted(range(len(rows)), key=turns.__getitem__):
        kept.setdefault(exercises[index], []).append(index)
    chosen = {index for indices in kept.values() for index in indices[:keep]}
    return [row if index in chosen else as_exhaustive(row) for index, row in enumerate(rows)]


class Grading:
    """Stubs fail, right answers pass, each named mistake is recognized; of one chapter.

    A file of tests has a subclass with its `chapter`, so that two workers can share the chapters.
    """

    chapter: Chapter
    few = 3, 1
    """How many ranks a trial has in `make test`; in `make test-all`, 1 to 4, as a learner's."""

    @pytest.fixture(autouse=True)
    def impatient(self, monkeypatch):
        """A hang is found sooner than a learner's, by the same looks at the processes."""
        for module in (bench, ranks):
            monkeypatch.setattr(module, "STALL_SECONDS", 2.0)

    @pytest.fixture(autouse=True)
    def few_ranks(self, request, monkeypatch):
        if not runs_all(request):
            for module in (grading_ranks, ch04_toy):
                monkeypatch.setattr(module, "SIZES", self.few)

    def pytest_generate_tests(self, metafunc):
        rows = {
            ("exercise",): [(exercise,) for exercise in self.chapter.exercises.values()],
            ("name", "answer"): self.chapter.all_right(),
            ("name", "answer", "says"): self.chapter.all_mistakes(),
        }
        wanted = tuple(signature(metafunc.function).parameters)[1:]  # without self
        if wanted in rows:
            ids = [
                str(row[0]) if len(row) == 1 else f"{row[0]}-{row[1].__name__}"
                for row in rows[wanted]
            ]
            exercises = [
                str(row[0]) if len(row) == 1 else str(self.chapter.exercise_of(row[0]))
                for row in rows[wanted]
            ]
            tiers = tiers_of(rows[wanted], exercises, KEPT[wanted])
            metafunc.parametrize(wanted, tiers, ids=ids)

    def test_there_are_four_or_five_exercises_with_their_own_functions(self):
        exercises = self.chapter.exercises
        numbers = [exercise_id.split(".")[1] for exercise_id in exercises]
        assert numbers in (["1", "2", "3", "4"], ["1", "2", "3", "4", "5"])
        names = [name for exercise in exercises.values() for name in exercise.names]
        assert set(names) == set(self.chapter.mistakes) == set(self.chapter.right_answers)
        assert all(self.chapter.right_answers.values())

    def test_every_function_has_four_mistakes_or_more(self):
        # No upper bound: each wrong answer that once passed a grader stays here.
        assert all(len(mistakes) >= 4 for mistakes in self.chapter.mistakes.values())

    def test_our_solution_passes(self, exercise):
        verdict = graders.grade_file(exercise, ROOT / exercise.solution_file)
        assert verdict == graders.Verdict("passed")

    def test_a_differently_written_right_answer_passes(self, name, answer):
        assert self.chapter.grade(name, answer) == graders.Verdict("passed")

    def test_a_mistake_is_recognized(self, name, answer, says):
        verdict = self.chapter.grade(name, answer)
        assert verdict.state == "failed"
        assert says in f"{verdict.seen}\n{verdict.likely}"
        assert verdict.asked and answer.__doc__
