"""Words of a verdict: what a grader asks for and expects, and what becomes of a mistake."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module

from teaching.exercises import Exercise


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


class Forbidden(Exception):
    """Something that the exercise rules out."""


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


def grader_of(exercise: Exercise) -> Callable:
    """The function that grades the exercise."""
    module = import_module(f"teaching.graders.{exercise.chapter}")
    return getattr(module, "grade_" + exercise.id.replace(".", "_"))
