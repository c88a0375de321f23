"""Graders: one module per chapter, one function `grade_1_2(learning_rate)` per exercise.

A grader says what it asks for, then expects something of what it sees:

    with asked("learning_rate(step=0, ..., warmup_steps=4)"):
        rate = learning_rate(0, 1.0, 0.1, 4, 20)
        expect(rate == 0.25, seen=f"{rate}, not 0.25", likely="step counts from 0")

The first expectation that fails ends the grading: one fault, one screen. Whatever the learner's
code raises becomes a verdict too, with the traceback of the learner's own lines.
"""

import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

from minitron.course.exercises import Exercise, load

TRACEBACK_LINES = 3


@dataclass(frozen=True)
class Verdict:
    state: str
    """passed, failed, or unsolved for a stub."""
    asked: str = ""
    seen: str = ""
    likely: str = ""


class Mistake(Exception):
    """An answer is wrong: what was seen, and the likeliest cause."""

    def __init__(self, seen: str, likely: str):
        super().__init__(seen)
        self.seen, self.likely = seen, likely


def expect(condition: bool, seen: str, likely: str) -> None:
    """Raise Mistake unless `condition` holds."""
    if not condition:
        raise Mistake(seen, likely)


@contextmanager
def asked(request: str) -> Iterator[None]:
    """Name what is asked for, so that a Mistake or an error in the block can say it."""
    try:
        yield
    except Exception as error:
        error.add_note(request)
        raise


def grade_file(exercise: Exercise, path: Path) -> Verdict:
    """Grade the exercise as the file at `path` defines it."""
    try:
        functions = load(exercise, path)
    except SyntaxError as error:
        where = f"{exercise.file}, line {error.lineno}" if error.lineno else exercise.file
        line = f"\n  {error.text.strip()}" if error.text else ""
        return Verdict("failed", seen=f"SyntaxError: {error.msg} ({where}){line}",
                       likely="Python cannot read the file; look at that line and the one above")
    except LookupError as error:
        if not _learner_lines(error, path):
            return Verdict("failed", seen=str(error),
                           likely=f"renamed or deleted; minitron reset {exercise.id} restores it")
        return verdict_on(error, exercise, path)
    except (Exception, SystemExit) as error:
        return verdict_on(error, exercise, path)
    return grade(exercise, functions, path)


def grader_of(exercise: Exercise) -> Callable:
    """The function that grades the exercise."""
    module = import_module(f"minitron.course.graders.{exercise.chapter}")
    return getattr(module, "grade_" + exercise.id.replace(".", "_"))


def grade(exercise: Exercise, functions: dict[str, Callable], path: Path) -> Verdict:
    """Run the exercise's grader on `functions`, which the file at `path` defines."""
    grader = grader_of(exercise)
    try:
        grader(**functions)
    except Mistake as mistake:
        return Verdict("failed", _request(mistake), mistake.seen, mistake.likely)
    except (Exception, SystemExit) as error:
        return verdict_on(error, exercise, path)
    return Verdict("passed")


def verdict_on(error: BaseException, exercise: Exercise, path: Path) -> Verdict:
    """What the learner is told of an exception that came out of their code."""
    if isinstance(error, NotImplementedError) and str(error).startswith("Exercise "):
        stub = traceback.extract_tb(error.__traceback__)[-1].name
        return Verdict("unsolved", _request(error), seen=f"{stub} is still the stub")
    lines = _learner_lines(error, path)
    name = type(error).__name__
    if isinstance(error, SystemExit):
        likely = "exit() ends Python, and the grader with it: take it out"
    elif lines:
        likely = f"your code raised {name} at the last line shown"
    else:
        likely = "the call, or what it returned, does not fit: compare with the docstring"
    message = "\n".join(str(error).splitlines()[:4])
    return Verdict("failed", _request(error), "\n".join([*lines, f"{name}: {message}"]), likely)


def _request(error: BaseException) -> str:
    return "\n".join(getattr(error, "__notes__", [])[:1])


def _learner_lines(error: BaseException, path: Path) -> list[str]:
    """The traceback's lines from the learner's file alone, the last few if it recurses."""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if f.filename == str(path)]
    return [f"{path.name}, line {frame.lineno}, in {frame.name}\n  {frame.line}"
            for frame in frames[-TRACEBACK_LINES:]]
