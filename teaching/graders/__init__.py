"""Graders: one module per chapter, one function `grade_1_2(learning_rate)` per exercise.

A grader says what it asks for, then expects something of what it sees:

    with asked("learning_rate(step=0, ..., warmup_steps=4)"):
        rate = learning_rate(0, 1.0, 0.1, 4, 20)
        expect(rate == 0.25, seen=f"{rate}, not 0.25", likely="step counts from 0")

The first expectation that fails ends the grading: one fault, one screen. Whatever the learner's
code raises becomes a verdict too, with the traceback of the learner's own lines.

The process that judges never has the learner's code. What a grader gets is an `Answer` for each
name, and there are three ways to use it:

1. Call it. `learning_rate(0, 1.0, ...)` runs on the bench, a process of its own, and returns what
   the learner's function returned, if that is plain: None, bool, int, float, str, bytes, list,
   tuple, dict, set, range, tensors, dtypes, exactly of that type. Arguments may be anything that
   can be pickled; they are copies, so that a change to them is not seen here. It raises what the
   learner's code raised, so `except ValueError` works.
2. `apart(trial, answer, *args)`, where the answer works on objects (a model, an optimizer), where
   it is a class, or where arguments must be looked at afterwards. `trial`, a function of the
   grader's own module, runs on the bench with the learner's real function in place of the Answer.
   It makes the objects, calls the function, and returns evidence: plain values, dataclasses and
   named tuples that the graders or the instruments define. It judges nothing: what is right is
   computed here, and compared here.
3. `on_ranks(trial, answer, *args)` (see `ranks`): the same with a group, on 1 to 4 ranks.

A trial may raise Mistake or Forbidden for what can be seen only there. What the package itself
has as an answer to an exercise is listed in `answers`: calls of it are refused on the bench.
"""

from collections.abc import Callable
from pathlib import Path

import cloudpickle

from teaching.exercises import Exercise
from teaching.graders.bench import LIMIT_SECONDS, Sandbox, apart
from teaching.graders.bench_process import Source, travel_by_value
from teaching.graders.verdicts import (
    Forbidden,
    Mistake,
    Verdict,
    asked,
    expect,
    grader_of,
)

__all__ = ["LIMIT_SECONDS", "Forbidden", "Mistake", "Verdict", "apart", "asked", "expect", "grade",
           "grade_file", "grader_of"]

TRACEBACK_LINES = 3


def grade_file(exercise: Exercise, path: Path, limit: float = LIMIT_SECONDS) -> Verdict:
    """Grade the exercise as the file at `path` defines it, within `limit` seconds of computing."""
    try:
        compile(path.read_bytes(), str(path), "exec", dont_inherit=True)  # which runs nothing
    except SyntaxError as error:
        where = f"{exercise.file}, line {error.lineno}" if error.lineno else exercise.file
        line = f"\n  {error.text.strip()}" if error.text else ""
        return Verdict("failed", seen=f"SyntaxError: {error.msg} ({where}){line}",
                       likely="Python cannot read the file; look at that line and the one above")
    except (ValueError, RecursionError, MemoryError) as error:
        return verdict_on(error, exercise, path)
    return _grade(Source(exercise, path), limit)


def grade(exercise: Exercise, functions: dict[str, Callable], path: Path) -> Verdict:
    """Grade these functions, which the file at `path` defines."""
    for function in functions.values():
        travel_by_value(function)
    return _grade(Source(exercise, path, cloudpickle.dumps(functions)), LIMIT_SECONDS)


def _grade(source: Source, limit: float) -> Verdict:
    exercise, path = source.exercise, source.path
    grader = grader_of(exercise)
    with Sandbox(source, limit) as bench:
        try:
            bench.load()
            grader(**bench.answers())
        except Mistake as mistake:
            return Verdict("failed", _request(mistake), mistake.seen, mistake.likely)
        except Exception as error:
            return verdict_on(error, exercise, path)
    return Verdict("passed")


def verdict_on(error: Exception, exercise: Exercise, path: Path) -> Verdict:
    """What the learner is told of an exception that came out of their code."""
    frames = [frame for frame in getattr(error, "frames", []) if frame.file == str(path)]
    name, message = type(error).__name__, "\n".join(str(error).splitlines()[:4])
    if name == "NotImplementedError" and message.startswith("Exercise ") and frames:
        return Verdict("unsolved", _request(error), seen=f"{frames[-1].function} is still the stub")
    if name == "LookupError" and not frames and "defines no" in message:
        return Verdict("failed", seen=message,
                       likely=f"renamed or deleted; minitron reset {exercise.id} restores it")
    if name == "SystemExit":
        likely = "exit() ends Python before there is an answer: take it out"
    elif frames:
        likely = f"your code raised {name} at the last line shown"
    else:
        likely = "the call, or what it returned, does not fit: compare with the docstring"
    lines = [f"{path.name}, line {frame.line}, in {frame.function}\n  {frame.source}"
             for frame in frames[-TRACEBACK_LINES:]]
    lines.append(f"{name}: {message}".removesuffix(": "))
    return Verdict("failed", _request(error), "\n".join(lines), likely)


def _request(error: BaseException) -> str:
    return "\n".join(getattr(error, "__notes__", [])[:1])
