"""What happens inside a rank: the process at the other end of `minitron.launch.run`.

It takes over the parent's surroundings, sends its prints to a file, calls the function, reports
what came of it, and stays until the parent says that all have finished: a rank that left earlier
would break the connections of the others, and they would see that instead of their own mistake.

Read in this order: rank_main, outcome_of, Failure.
"""

import faulthandler
import gc
import io
import linecache
import os
import pickle
import signal
import sys
import threading
import time
import traceback
from contextlib import nullcontext
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import NamedTuple, TextIO

import cloudpickle
import torch
import torch.distributed as dist

from minitron.launch.descendants import (
    adopt_descendants,
    end_with_server,
    has_children,
    kill_descendants,
    outlive_server,
)
from minitron.launch.process import share_cores
from minitron.measure.calls import Call
from minitron.measure.watch import Watch

WHERE = b"where"  # the parent asks for the stack: through the pipe, or by a signal
ASK = getattr(signal, "SIGUSR1", None)  # Windows has none
LENGTH_BYTES = 4  # before each announced call: its length
NO_LIMIT = timedelta(days=1)  # the parent watches over time; gloo must not give up before it


@dataclass(frozen=True)
class JobSpec:
    """What every rank of a run receives."""

    num_ranks: int
    folder: Path
    """Where the ranks meet, and where each writes its prints and its stack."""
    watch: bool
    job: bytes
    """The function and its arguments, by cloudpickle."""
    environment: dict[str, str]
    sys_path: list[str]
    cells: dict[str, tuple]
    """Source of the notebook's cells, as in `linecache.cache`."""


class Frame(NamedTuple):
    """One line of a stack: where a rank is, or was."""

    file: str
    line: int
    function: str
    source: str


@dataclass(frozen=True)
class Started:
    """The rank can be asked for its stack from now on."""


@dataclass(frozen=True)
class Returned:
    """The function's result, by cloudpickle."""

    value: bytes


@dataclass(frozen=True)
class Failure:
    """What a rank did instead of returning."""

    text: str
    """In one line, such as "raised ValueError: ..." or "was killed by SIGKILL"."""
    error: str | None = None
    """Name of the exception's class, None if there was no exception."""
    message: str = ""
    traceback: str = ""
    frames: list[Frame] = field(default_factory=list)
    """Where it happened, outermost first, from the rank's function on."""
    seconds: float = field(default_factory=time.monotonic)


def rank_main(rank: int, orders: JobSpec, pipe: Connection) -> None:
    """Call the function of `orders` as rank `rank`, send its outcome, leave when asked to."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all processes of a terminal
    share_cores()
    end_with_server()
    adopt_descendants()
    if ASK is not None:  # in the main thread it would end a native sleep or read too early
        signal.pthread_sigmask(signal.SIG_BLOCK, {ASK})  # also in threads that start later
    redirect_prints(output_file(orders.folder, rank))
    stack = open(stack_file(orders.folder, rank), "w")
    answer_with_stack(stack)
    may_leave = threading.Event()
    threading.Thread(target=_obey_parent, args=(pipe, stack, may_leave), daemon=True).start()
    mailbox = ParentChannel(pipe, calls_file(orders.folder, rank))
    mailbox.send(Started())

    mailbox.send(outcome_of(rank, orders, mailbox))
    may_leave.wait()
    if has_children():
        kill_descendants(os.getpid())
    if dist.is_initialized():
        dist.destroy_process_group()


def answer_with_stack(stack: TextIO) -> None:
    """Write this process's stack to a file when a signal asks for it, whichever thread runs."""
    if ASK is not None:
        faulthandler.register(ASK, stack)


def outcome_of(rank: int, orders: JobSpec, mailbox: "ParentChannel") -> Returned | Failure:
    """Call the function; what happens is reported, not raised."""
    try:
        _take_over(orders)
        fn, args = cloudpickle.loads(orders.job)
        torch.set_num_threads(1)
        gc.freeze()  # or each collection would walk through all that importing torch has made
        store = dist.FileStore(str(orders.folder / "rendezvous"), orders.num_ranks)
        dist.init_process_group(
            "gloo", store=store, rank=rank, world_size=orders.num_ranks, timeout=NO_LIMIT
        )
        dist.barrier()  # or a rank that dies at once is missed by those that still connect
        with Watch(mailbox.announce) if orders.watch else nullcontext():
            value = fn(dist.group.WORLD, *args)
    except BaseException as error:  # sys.exit() as well
        return failure_of(error)

    try:
        return Returned(cloudpickle.dumps(value))
    except Exception as error:
        kind, reason = type(value).__name__, _first_line(error)
        return Failure(f"returned a {kind}, which cannot be sent to the parent: {reason}")


def failure_of(error: BaseException) -> Failure:
    """Describe an exception, without the launcher's own frames."""
    report = traceback.TracebackException.from_exception(error)
    inner = strip_launcher(report.stack)
    # None where the function was not even entered: a wrong number of arguments.
    report.stack = traceback.StackSummary.from_list(inner) if inner else None
    name = type(error).__name__
    return Failure(
        text=f"raised {name}: {_first_line(report)}".removesuffix(": "),
        error=name,
        message=str(report),  # which has a text even where str(error) raises
        traceback="".join(report.format()).rstrip(),
        frames=[Frame(f.filename, f.lineno or 0, f.name, f.line or "") for f in inner],
    )


def strip_launcher(frames: list) -> list:
    """Return the frames, outermost first, from the rank's function on; [0] is the file."""
    inside = [frame[0] == __file__ for frame in frames]
    if True not in inside:
        return frames
    start = inside.index(True)
    while start < len(frames) and inside[start]:
        start += 1
    return frames[start:]


class ParentChannel:
    """The way to the parent, for any thread: hooks may announce calls from autograd's own.

    An outcome goes through the pipe and wakes the parent. Calls go to a file, which it reads ten
    times a second: to wake it would take as long as the call itself.
    """

    def __init__(self, pipe: Connection, calls: Path):
        self._pipe, self._calls = pipe, open(calls, "ab", buffering=0)
        self._lock = threading.Lock()

    def send(self, message: Started | Returned | Failure) -> None:
        self._pipe.send_bytes(pickle.dumps(message))

    def announce(self, call: Call | str | None) -> None:
        data = pickle.dumps(call)
        with self._lock:
            self._calls.write(len(data).to_bytes(LENGTH_BYTES) + data)


def _obey_parent(pipe: Connection, stack: TextIO, may_leave: threading.Event) -> None:
    if ASK is not None:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {ASK})
    try:
        while pipe.recv_bytes() == WHERE:
            faulthandler.dump_traceback(stack)  # with Python's lock, so that no frame changes
        may_leave.set()
    except (EOFError, OSError):  # the parent is gone, even by kill -9
        outlive_server()
        kill_descendants(os.getpid())
        os._exit(1)


def _take_over(orders: JobSpec) -> None:
    # The server that ranks are forked from still has the surroundings of its own start.
    os.environ.clear()
    os.environ.update(orders.environment)
    sys.path[:] = orders.sys_path
    linecache.cache.update(orders.cells)


def redirect_prints(path: Path) -> None:
    """Send what Python and C++ print to a file: it never blocks, and it outlives a killed rank."""
    with open(path, "ab", buffering=0) as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    unbuffered = open(1, "wb", buffering=0, closefd=False)
    sys.stdout = sys.stderr = io.TextIOWrapper(
        unbuffered, encoding="utf-8", errors="backslashreplace", write_through=True
    )


def output_file(folder: Path, rank: int) -> Path:
    return folder / f"rank{rank}.out"


def stack_file(folder: Path, rank: int) -> Path:
    return folder / f"rank{rank}.stack"


def calls_file(folder: Path, rank: int) -> Path:
    return folder / f"rank{rank}.calls"


def _first_line(error: BaseException | traceback.TracebackException) -> str:
    return str(error).strip().split("\n")[0]
