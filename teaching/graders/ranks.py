"""What the graders of many ranks share: trials on 1 to 4 ranks, and what each put on the wire.

A trial is a function of the grader's own module. It runs on every rank, calls the learner's
function and returns evidence; the grader judges the evidence in its own process, rank by rank:

    def trial(group, reduce):
        x = torch.ones(5) * group.rank()
        with Wire(allowed={"send", "recv"}) as wire:
            reduce(x, group)
        return x, wire.calls

    for size, evidence in on_ranks(trial, reduce).items():
        expect(all(x.sum() == ... for x, calls in evidence), seen=per_rank(...), likely=...)

An exception, a forbidden call or a hang on a rank becomes a Mistake that shows the learner's own
lines, rank by rank.

Read in this order: on_ranks, _on_rank, Wire, the words for what ranks saw.
"""

import inspect
from collections.abc import Callable
from functools import cache
from pathlib import Path
from pickle import UnpicklingError

import cloudpickle
import torch
import torch.distributed as dist
from torch import Tensor

from minitron.launch import RankError, run, run_apart
from minitron.launch.rank_process import Failure
from minitron.measure.ledger import Call, Ledger
from minitron.pytorch.private import DispatchMode
from teaching.graders import TRACEBACK_LINES, Forbidden, Mistake, plain
from teaching.graders.bench import FORBIDDEN, Answer, bench_of
from teaching.graders.bench_process import Source, guard_of, prepare, travel_by_value

SIZES = (3, 2, 4, 1)  # as they are judged: of 3 ranks, 1/3 and 3/4 mean different mistakes
TIMEOUT_SECONDS = 12.0
START_SECONDS = 60.0
AXIS = "dp"
DIFFER = "every rank must make the same calls in the same order: does yours skip one on some " \
         "rank, by an `if` on the rank or on a gradient being None?"
DIED = "something ended the process: os._exit, too much memory, a crash in a native function"
CAUSES = {
    "is called; use only": "the point of the exercise is to do without it",
    "without group=group": "without it torch.distributed uses the group of all ranks",
    "Pair is not connected": "a rank sends to itself, or waits for itself: a single rank has no "
                             "neighbor, and a ring takes N-1 = 0 steps",
    "ReduceOp.AVG": "this version of gloo cannot average: sum, then divide",
    "Exercise ": "this part is still the stub",
}
"""What an exception's message contains, and what it means."""


def on_ranks(
    trial: Callable, *args, sizes: tuple[int, ...] = (), timeout: float = TIMEOUT_SECONDS,
    stuck: str = DIFFER,
) -> dict[int, list]:
    """Call `trial(group, *args)` on groups of each size; returns {size: [of rank 0, ...], ...}.

    Sizes are SIZES if none are given. One launch serves all of them: the smaller groups are parts
    of the largest, so that a function which asks for the default group, or for its size, is found
    out. `timeout` is in seconds, for all, of CPU time. Raises Mistake if a rank raises, dies or
    hangs; `stuck` is the likeliest cause of a hang or of ranks that call different operations.
    """
    start_server()
    sizes = sizes or SIZES
    source, files = _source_of(args)
    job = cloudpickle.dumps((trial, args))
    try:
        replies = run_apart(_on_rank, max(sizes), source, job, sizes, cpu_seconds=timeout)
        by_rank = [plain.decode(reply) for reply in replies]
    except RankError as error:
        raise _mistake(error, files, stuck) from None
    except (plain.NotPlain, UnpicklingError) as error:
        raise Mistake(f"what came back cannot be read: {error}", FORBIDDEN) from None
    return {size: [results[size] for results in by_rank[:size]] for size in sizes}


def _source_of(args: tuple) -> tuple[Source | None, list[str]]:
    """Where the ranks find the learner's functions, and the files whose lines are shown."""
    if any(isinstance(value, Answer) for value in args):
        source = bench_of(args).source
        return source, [str(source.path)]
    answers = list(filter(callable, args))
    for answer in answers:  # a test's
        travel_by_value(answer)
    return None, [source_file(answer) for answer in answers]


@cache
def start_server() -> None:
    """Wait until ranks can be forked. The first start imports torch; that time is not counted."""
    run(_nothing, 1, timeout=START_SECONDS)


def _nothing(group) -> None:
    pass


def source_file(answer: Callable) -> str:
    """The file that an answer was written in."""
    functions = [answer] if inspect.isfunction(answer) else [
        function for cls in answer.__mro__ for value in vars(cls).values()
        if inspect.isfunction(function := getattr(value, "__func__", value))  # static ones too
    ]
    return inspect.unwrap(functions[0]).__code__.co_filename


def _mistake(error: RankError, files: list[str], stuck: str) -> Mistake:
    headline = str(error).splitlines()[0]
    if " raised " not in headline:  # what others raised then is a consequence
        died = "exited with" in headline or "was killed" in headline
        return Mistake(str(error), DIED if died else stuck)
    raised = {rank: failure for rank, failure in error.failures.items() if failure.error}
    first = min(raised.values(), key=lambda failure: failure.seconds)
    num_ranks = first.traceback.splitlines()[-1]  # the note of _on_rank
    texts = {rank: _own_lines(failure, files) for rank, failure in sorted(raised.items())}
    return Mistake(f"{num_ranks}, {per_rank(texts)}", _why_raised(first, files))


def _own_lines(failure: Failure, files: list[str]) -> str:
    own = [frame for frame in failure.frames if frame.file in files][-TRACEBACK_LINES:]
    lines = [f"{Path(frame.file).name}, line {frame.line}, in {frame.function}\n  {frame.source}\n"
             for frame in own]
    name = "" if failure.error == Forbidden.__name__ else f"{failure.error}: "
    return "".join(lines) + name + "\n".join(failure.message.splitlines()[:3])


def _why_raised(failure: Failure, files: list[str]) -> str:
    for fragment, likely in CAUSES.items():
        if fragment in failure.message:
            return likely
    if failure.error == Forbidden.__name__:
        return FORBIDDEN
    if any(frame.file in files for frame in failure.frames):
        return f"your code raised {failure.error} at the last line shown"
    return "the call, or what it returned, does not fit: compare with the docstring"


# On each rank

UNDER_WAY: list["Wire"] = []
"""Kept until the rank ends: a send whose work nobody holds is cancelled, and the others would hang
instead of being told that it was not waited for."""


def _on_rank(group, source: Source | None, job: bytes, sizes: tuple[int, ...]) -> bytes:
    guard = None
    if source is not None:
        guard = guard_of(source)
        prepare(source, guard)
    trial, args = cloudpickle.loads(job)
    groups = {size: dist.new_group(range(size), group_desc=f"mesh_{AXIS}") for size in sizes}
    results = {}
    # The largest first: when it hangs, no rank is busy elsewhere.
    for size in sorted(sizes, reverse=True):
        if group.rank() < size:
            try:
                results[size] = trial(groups[size], *args)
            except BaseException as error:
                error.add_note(f"{size} rank{'s' * (size > 1)}")
                raise
    if guard is not None:
        guard.expect_intact()
    return plain.encode(results)


class Wire:
    """Note every call of this rank; refuse those that are not allowed, and those outside `group`.

    What an asynchronous call brings arrives when it is waited for, never before: an answer that
    does not wait, or touches the tensor in between, fails on every machine and every time.
    `calls` are the ledger's. `events` are pairs in order: ("all_reduce", call) when a call is
    issued, ("wait", number) when it is waited for, and what the grader notes itself.
    """

    def __init__(self, allowed: set[str]):
        UNDER_WAY.append(self)
        self.allowed = allowed
        self.events: list[tuple] = []
        self._ledger = Ledger(announce=self._announce)
        self._late = _LateArrival(self.note)

    @property
    def calls(self) -> list[Call]:
        return self._ledger.calls

    def note(self, event: str, what=None) -> None:
        self.events.append((event, what))

    def __enter__(self):
        self._ledger.__enter__()
        self._late.__enter__()
        return self

    def __exit__(self, *error) -> None:
        self._late.__exit__(*error)
        self._ledger.__exit__(*error)

    def _announce(self, call: Call | str | None) -> None:
        if not isinstance(call, Call):  # the name of a phase
            return
        allowed = " and ".join(sorted(self.allowed)) or "nothing"
        if call.op not in self.allowed:
            raise Forbidden(f"{call.op} is called; use only {allowed}")
        if call.axis != AXIS:
            raise Forbidden(f"{call.op} is called without group=group")
        self.note(call.op, call)


class _LateArrival(DispatchMode):
    """Let a call work on copies, and put what it brings into the tensors at wait()."""

    def __init__(self, note: Callable[[str, int], None]):
        super().__init__()
        self.note = note
        self.works: list[_LateWork] = []  # a boxed Work does not keep its Python part alive

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func not in ARRIVES_LATE:
            return func(*args, **(kwargs or {}))
        tensors = args[0]
        copies = [tensor.detach().clone() for tensor in tensors]
        result = func(copies, *args[1:], **(kwargs or {}))
        if func is SENT:
            tensors, copies = [], []  # nothing arrives; that it is waited for is noted
        work = _LateWork(result, tensors, copies, len(self.works), self.note)
        self.works.append(work)
        return (tensors, work.boxed()) if isinstance(result, tuple | list) else work.boxed()


SENT = torch.ops.c10d.send.default
ARRIVES_LATE = {torch.ops.c10d.allreduce_.default, torch.ops.c10d.recv_.default, SENT}


class _LateWork(dist.Work):
    def __init__(self, result, tensors: list[Tensor], copies: list[Tensor], number: int, note):
        super().__init__()
        boxed = result[-1] if isinstance(result, tuple | list) else result
        self.inner = dist.Work.unbox(boxed)
        self.tensors, self.copies = tensors, copies
        self.number, self.note = number, note

    def wait(self, timeout=None) -> bool:
        self.note("wait", self.number)
        self.inner.wait()
        for tensor, copy in zip(self.tensors, self.copies, strict=True):
            tensor.detach().copy_(copy)
        self.tensors = self.copies = ()  # a second wait() brings nothing
        return True

    def is_completed(self) -> bool:
        return self.inner.is_completed() and self.wait()

    def get_future(self):
        self.wait()
        return self.inner.get_future()


# Words for what the ranks saw


def per_rank(texts: list[str] | dict[int, str]) -> str:
    """Join what each rank saw, those that saw the same together: "ranks 0, 1: 3; rank 2: 4"."""
    together: dict[str, list[int]] = {}
    by_rank = texts if isinstance(texts, dict) else dict(enumerate(texts))
    for rank, text in by_rank.items():
        together.setdefault(text, []).append(rank)
    separator = "\n" if any("\n" in text for text in together) else "; "
    return separator.join(
        f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}:"
        f"{chr(10) if chr(10) in text else ' '}{text}" for text, ranks in together.items()
    )


def relative_error(seen: Tensor, right: Tensor) -> float:
    """The largest error, as a share of the largest entry of `right`."""
    scale = right.abs().max().clamp(min=1e-300)
    return float((seen - right).abs().max() / scale)


def factor(seen: Tensor, right: Tensor) -> float | None:
    """The f in seen = f * right, by least squares, if a factor is all that differs."""
    f = float((seen * right).sum() / (right * right).sum())
    return f if relative_error(seen, f * right) < 1e-9 else None
