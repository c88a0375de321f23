"""What happens on a bench: a process that has the learner's functions, and judges nothing.

It loads the learner's file as a guarded module, then does one trial after the other that the judge
sends, and answers each with plain values. Ranks of a trial on many ranks load the file the same
way.

Read in this order: bench_main, prepare, resolve, outcome_of.
"""

import faulthandler
import gc
import os
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

import cloudpickle
import torch

from minitron.launch.rank_process import Failure, answer_with_stack, failure_of
from teaching.exercises import Exercise, load
from teaching.graders import plain
from teaching.graders.guard import Guard
from teaching.graders.verdicts import Mistake, grader_of

ANSWERS: dict[str, Callable] = {}
"""The learner's functions by name, in a process that has loaded them."""


@dataclass(frozen=True)
class Source:
    """Where the learner's functions come from."""

    exercise: Exercise
    path: Path
    """The file whose lines are shown of an error."""
    functions: bytes | None = None
    """The functions themselves by cloudpickle, where a test grades one; else the file counts."""


@dataclass(frozen=True)
class Raised:
    """What a trial raised, for the judge to raise again."""

    failure: Failure
    kinds: tuple[str, ...]
    """Built-in exceptions that it is one of, the nearest first."""
    mistake: tuple[str, str] | None = None
    """What was seen and its likely cause, if the trial has found a mistake itself."""


def bench_main(source: Source, prints: Connection, stack_file: Path, pipe: Connection) -> None:
    """Load the learner's file, then do what the judge sends until it hangs up."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all processes of a terminal
    for stream in (1, 2):
        os.dup2(prints.fileno(), stream)
    sys.stdout = sys.stderr = open(1, "w", buffering=1, errors="replace", closefd=False)
    stack = open(stack_file, "w")
    faulthandler.enable(stack)
    answer_with_stack(stack)
    torch.set_num_threads(1)
    gc.freeze()  # or each collection would walk through all that importing torch has made

    guard = guard_of(source)
    pipe.send_bytes(outcome_of(prepare, source, guard))
    while True:
        try:
            job = pipe.recv_bytes()
        except (EOFError, OSError):
            os._exit(0)  # whatever threads the learner has left running
        pipe.send_bytes(outcome_of(_do, job, guard))


def guard_of(source: Source) -> Guard:
    """What watches over the learner's file, before it is loaded."""
    grader_of(source.exercise)  # what it imports is guarded too
    return Guard(source.exercise, source.path)


def prepare(source: Source, guard: Guard) -> None:
    """Load the learner's functions into ANSWERS. Raises what their file raises."""
    if source.functions is None:
        code = compile(source.path.read_bytes(), str(source.path), "exec", dont_inherit=True)
        guard.look_at_names(source.path.name, code)
        functions = load(source.exercise, source.path, guard.builtins())
    else:
        functions = cloudpickle.loads(source.functions)
    guard.look_at(functions)
    guard.expect_intact()
    ANSWERS.update(functions)


def travel_by_value(answer: Callable) -> None:
    """Let cloudpickle take the function itself: by its name, another file's might be found."""
    module = sys.modules.get(answer.__module__)
    if module is not None and not answer.__module__.startswith(("minitron.", "teaching.")):
        cloudpickle.register_pickle_by_value(module)


def resolve(name: str) -> Callable:
    """The learner's function: what an `Answer` becomes on a bench."""
    return ANSWERS[name]


def outcome_of(function: Callable, *args) -> bytes:
    """Call the function; what it returns or raises, encoded."""
    try:
        return plain.encode(function(*args))
    except BaseException as error:  # sys.exit() as well
        return plain.encode(raised(error))


def raised(error: BaseException) -> Raised:
    """Describe what was raised, in plain values."""
    kinds = tuple(kind.__name__ for kind in type(error).__mro__ if kind.__module__ == "builtins")
    mistake = (str(error.seen), str(error.likely)) if type(error) is Mistake else None
    try:
        failure = failure_of(error)
        plain.encode(failure)
    except Exception:  # its __str__ raises, say
        failure = Failure(f"raised {type(error).__name__}", type(error).__name__)
    return Raised(failure, kinds, mistake)


def _do(job: bytes, guard: Guard):
    trial, args, kwargs = cloudpickle.loads(job)
    value = trial(*args, **kwargs)
    if trial is call:
        guard.expect_untold()  # there is nothing to measure with
    else:
        guard.expect_intact()
    return value


def call(answer: Callable, *args, **kwargs):
    """The simplest trial: call the learner's function, and return what it returns."""
    return answer(*args, **kwargs)
