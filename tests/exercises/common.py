"""What the tests of every chapter's exercises need."""

import importlib.util
from collections.abc import Callable
from pathlib import Path

from teaching import graders
from teaching.exercises import ROOT, Exercise, known, load
from teaching.graders.ranks import source_file
from teaching.graders.verdicts import grader_of


class Chapter:
    """A chapter's exercises, with the right and wrong answers in mutants/.

    Wrong answers are its MISTAKES, each function's most telling ones first: `make test` grades two
    of each exercise, `make test-all` all of them.
    """

    def __init__(self, name: str):
        self.exercises = {e.id: e for e in known().values() if e.chapter == name}
        for exercise in self.exercises.values():
            grader_of(exercise)  # imported now, it is among what the server of ranks imports
        self.mutants_file = Path(__file__).with_name("mutants") / f"{name}.py"
        spec = importlib.util.spec_from_file_location(f"{name}_mutants", self.mutants_file)
        mutants = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(mutants)
        self.mistakes, self.right_answers = mutants.MISTAKES, mutants.RIGHT_ANSWERS

    def all_mistakes(self) -> list[tuple[str, Callable, str]]:
        """Each function's name, a wrong answer, and what the grader must say of it."""
        return [
            (name, answer, says)
            for name, answers in self.mistakes.items()
            for answer, says in answers.items()
        ]

    def all_right(self) -> list[tuple[str, Callable]]:
        return [
            (name, answer) for name, answers in self.right_answers.items() for answer in answers
        ]

    def exercise_of(self, name: str) -> Exercise:
        """Return the exercise that asks for the function `name`."""
        return next(e for e in self.exercises.values() if name in e.names)

    def grade(self, name: str, answer: Callable) -> graders.Verdict:
        """Grade our solution with the function `name` replaced by `answer`, maybe the package's."""
        exercise = self.exercise_of(name)
        functions = load(exercise, ROOT / exercise.solution_file) | {name: answer}
        is_package = answer.__module__.startswith("minitron.")
        path = Path(source_file(answer)) if is_package else self.mutants_file
        return graders.grade(exercise, functions, path)
