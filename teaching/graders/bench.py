"""The bench as the judge sees it: a process to send trials to, and plain values that come back.

The judge never has the learner's functions. It has an `Answer` in place of each, which may be
called with what the exercise says, or be handed to a trial:

    rate = learning_rate(0, 1.0, 0.1, 4, 20)             # called on the bench, returns plain values
    seen = apart(trial, accumulate_gradients, rows)      # trial(function, rows) on the bench

What the learner's code raises is raised here again, as the same kind of exception. A process that
dies, hangs or takes too long becomes a Mistake.

Read in this order: Bench, Answer, apart, Patience.
"""

import builtins
import os
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

import cloudpickle

from minitron.launch import start_method
from minitron.launch.process_state import cpu_seconds, wants_cpu
from minitron.launch.rank_process import Failure, Frame
from minitron.launch.rank_report import killed, parse_stack, read_stacks
from minitron.launch.starting import context_of, ignore_interrupts, without_main
from teaching.graders import plain
from teaching.graders.bench_process import Raised, Source, bench_main, call, resolve
from teaching.graders.verdicts import Mistake

LIMIT_SECONDS = 20.0
WALL = 10.0
LOOK_SECONDS = 0.1
STALL_SECONDS = 5.0
BUSY_SECONDS = 0.01
SIGNALS = {9: "out of memory, most likely: the system then ends the process that has most"}
ENDLESS = "a loop that does not end, work that grows with every step, or a wait for nothing"
FORBIDDEN = "a check does not allow this: take it out, and write what is asked in your own code"


class Sandbox:
    """One process with the learner's functions, started when it is first needed."""

    def __init__(self, source: Source, limit: float = LIMIT_SECONDS):
        self.source, self.limit = source, limit
        self._folder = tempfile.TemporaryDirectory(prefix="minitron-")
        self._stack = Path(self._folder.name, "stack.txt")
        self._stack.touch()
        self._process = None

    def answers(self) -> dict[str, "Answer"]:
        """What stands for each of the learner's functions."""
        return {name: Answer(name, self) for name in self.source.exercise.names}

    def __enter__(self):
        return self

    def __exit__(self, *error) -> None:
        self._end()
        self._folder.cleanup()

    def do(self, trial: Callable, args: tuple, kwargs: dict | None = None):
        """Call `trial(*args)` on the bench; returns its plain result, raises what it raised."""
        self.load()
        return self._receive(cloudpickle.dumps((trial, args, kwargs or {})))

    def load(self) -> None:
        """Start the process, and load the learner's file in it."""
        if self._process is None:
            self._start()

    def _start(self) -> None:
        with ignore_interrupts(), without_main():
            context = context_of(start_method(), also=("teaching.graders",))
            self._pipe, theirs = context.Pipe()
            prints, their_prints = context.Pipe(duplex=False)
            self._process = context.Process(
                target=bench_main, args=(self.source, their_prints, self._stack, theirs),
                daemon=True)
            self._process.start()
        theirs.close(), their_prints.close()
        self._reader = threading.Thread(target=_relay, args=(prints,), daemon=True)
        self._reader.start()
        self._patience = TimeLimit(self._process.pid, self.limit)
        self._receive()

    def _receive(self, job: bytes | None = None):
        """Send the job, if there is one, and wait for what the bench makes of it."""
        self._patience.begin()
        try:
            if job is not None:
                self._pipe.send_bytes(job)
            while not self._pipe.poll(LOOK_SECONDS):
                why = self._patience.lost()
                if why:
                    raise Mistake(f"{why}{self._where(self._ask_stack())}", ENDLESS)
            reply = plain.decode(self._pipe.recv_bytes())
        except (EOFError, OSError):
            raise self._death() from None
        except plain.NotPlain as error:
            self._end()
            raise Mistake(f"what came back cannot be read: {error}", FORBIDDEN) from None
        except Mistake:
            self._end()
            raise
        if isinstance(reply, Raised):
            raise_again(reply)
        return reply

    def _ask_stack(self) -> list[Frame]:
        return read_stacks({self._process.pid: self._stack})[self._process.pid]

    def _where(self, frames: list[Frame]) -> str:
        lines = [frame.line for frame in frames if frame.file == str(self.source.path)]
        return f", at line {lines[-1]} of {self.source.path.name}" if lines else ""

    def _death(self) -> Mistake:
        self._process.join(5)
        code = self._process.exitcode
        where = self._where(parse_stack(self._stack.read_text(errors="replace")))
        self._end()
        if code is not None and code < 0:
            return Mistake(f"the process {killed(code).text}{where}", SIGNALS.get(
                -code, "a crash inside a native function, such as a wrong index"))
        return Mistake(f"the process ended (exit code {code}) before the grading did",
                       "something calls os._exit or ends Python another way")

    def _end(self) -> None:
        if self._process is not None and self._process.pid is not None:
            self._pipe.close()
            self._process.kill()
            self._process.join()
            self._reader.join(1)
        self._process = None


def _relay(prints: Connection) -> None:
    """Show what the learner prints, where this process prints."""
    try:
        while text := os.read(prints.fileno(), 1 << 16):
            print(text.decode(errors="replace"), end="", flush=True)
    except OSError:
        pass


@dataclass(frozen=True)
class Answer:
    """Stands for a function or class of the learner's, which exists on the bench alone."""

    name: str
    bench: Sandbox

    def __call__(self, *args, **kwargs):
        return self.bench.do(call, (self, *args), kwargs)

    def __reduce__(self):
        return resolve, (self.name,)


def apart(trial: Callable, *args):
    """Call `trial(*args)` on the bench, with the learner's function where `args` have an Answer.

    `trial` is a function of the grader's module; it returns evidence in plain values (see
    `plain`), and the judge compares.
    """
    return bench_of(args).do(trial, args)


def bench_of(args: tuple) -> Sandbox:
    """The bench of the answers among these arguments."""
    return next(value for value in args if isinstance(value, Answer)).bench


def raise_again(reply: Raised) -> None:
    """Raise what was raised on the bench, of the same kind; Mistake where a trial found one."""
    failure = reply.failure
    if reply.mistake:
        raise Mistake(*reply.mistake)
    if failure.error == "NotPlain":
        raise Mistake(f"it returned {failure.message}",
                      "return what the docstring says, of exactly that type: float(x), x.item(), "
                      "tuple(x) make plain values")
    if failure.error == "Forbidden":
        raise Mistake(failure.message, FORBIDDEN)
    kinds = [vars(builtins).get(name) for name in reply.kinds]
    kind = next((k for k in kinds if isinstance(k, type) and issubclass(k, Exception)
                 and not issubclass(k, BaseExceptionGroup)), Exception)
    raise type(failure.error, (LearnersError, kind), {})(failure)


class LearnersError(Exception):
    """What the learner's code raised on the bench."""

    def __init__(self, failure: Failure):
        self.message, self.frames = str(failure.message), list(failure.frames)

    def __str__(self) -> str:
        return self.message


class TimeLimit:
    """Tells when a process has had its time.

    The limit counts seconds of CPU time, which a busy machine does not use up, and ten times as
    many by the wall clock. A process that sleeps for some seconds is told at once: nothing that an
    exercise asks for waits.
    """

    def __init__(self, pid: int, limit: float):
        self.pid, self.limit = pid, limit
        self.first_cpu = self.last_cpu = cpu_seconds(pid)
        self.begin()

    def begin(self) -> None:
        """Start to wait for it: the wall clock counts no time between two trials."""
        self.start, self.quiet_looks = time.monotonic(), 0

    def lost(self) -> str | None:
        """Look at the process; why it should be ended now, or None."""
        cpu = cpu_seconds(self.pid)
        # Looks, not the clock: where the machine is overloaded, this process looks less often too.
        self.quiet_looks += 1
        if cpu > self.last_cpu + BUSY_SECONDS or wants_cpu(self.pid):
            self.last_cpu, self.quiet_looks = cpu, 0
        if cpu - self.first_cpu > self.limit:
            return f"still running after {self.limit:g} s of computing"
        if time.monotonic() - self.start > WALL * self.limit:
            return f"still running after {WALL * self.limit:g} s"
        if self.quiet_looks * LOOK_SECONDS > STALL_SECONDS:
            return f"still running, and it has computed nothing for {STALL_SECONDS:g} s"
        return None
