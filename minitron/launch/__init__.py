"""Run a function on N ranks, from a cell, a test or a script.

    def hello(group):
        print(f"rank {group.rank()} of {group.size()}")

    run(hello, 4)

Each rank is a process with one thread that talks to the others through gloo on this machine. It
is forked from a server that has imported torch already, so that a start takes a tenth of a second.
Functions of a cell or a script travel by value (the script is not run again and needs no
`if __name__ == "__main__"`); those of modules are imported anew, so an edited file counts. (The
server has imported the launcher and what it imports: of these, the state at its start counts.)

On Windows, which cannot fork, and where the server does not start, each rank imports torch itself
("spawn", some seconds); MINITRON_START=spawn asks for that. Under torchrun the processes are there
already: `run` calls the function in each, with NCCL where every process has a GPU.

Read in this order: run here, `ranks.Ranks`, `rank_process.rank_main`; `rank_report` words failures.
"""

import atexit
import gc
import linecache
import math
import multiprocessing
import os
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from pathlib import Path
from types import FunctionType, ModuleType

import cloudpickle
import torch
import torch.distributed as dist

from minitron.comm.agreement import SINGLE_RANK, Group, all_gather_objects
from minitron.config import ConfigError, require
from minitron.launch.descendants import MARK
from minitron.launch.messages import read_bytes
from minitron.launch.process import share_cores
from minitron.launch.rank_process import Failure, JobSpec
from minitron.launch.rank_report import RankError
from minitron.launch.ranks import PROCESS_NAME, Ranks

START_METHOD = "spawn" if sys.platform == "win32" else "forkserver"

__all__ = ["RANK_CONTEXTS", "Failure", "RankError", "run", "run_apart", "torchrun_group"]

RANK_CONTEXTS: list[Callable[[], AbstractContextManager]] = []
"""What each rank that `run` starts enters before it calls its function, as the caller has."""


def run(fn: Callable, num_ranks: int, *args, timeout: float = 30.0, watch: bool = True) -> list:
    """Call `fn(group, *args)` on `num_ranks` processes; returns what each rank returned.

    `group` is the process group of all ranks. Prints are shown in rank order. With `watch` every
    collective is announced by each rank, and a mismatch named at once. Raises `RankError` if a
    rank raises, dies, or has not finished after `timeout` seconds; ConfigError if the ranks
    cannot be started so. Processes that ranks have started end with the run (`descendants`).
    """
    __tracebackhide__ = True  # pytest then shows the caller's line
    require(num_ranks >= 1, f"num_ranks = {num_ranks}: must be at least 1")
    require(
        not multiprocessing.current_process().name.startswith(PROCESS_NAME),
        "run() was called within a rank",
        "call it outside, and pass what it returns",
    )
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        return _run_under_torchrun(fn, num_ranks, args)
    if RANK_CONTEXTS:
        fn = partial(_in_contexts, list(RANK_CONTEXTS), fn)
    error, values = _launched(fn, num_ranks, args, timeout, watch)
    if error is not None:
        raise error from None
    return [cloudpickle.loads(value) for value in values]


def _in_contexts(contexts: list, fn: Callable, group, *args):
    with ExitStack() as stack:
        for context in contexts:
            stack.enter_context(context())
        return fn(group, *args)


def run_apart(fn: Callable, num_ranks: int, *args, cpu_seconds: float) -> list[bytes]:
    """Call `fn(group, *args)`, which must return bytes, where it may run untrusted code.

    As `run`, but nothing that comes back is unpickled: the ranks can send bytes, and no objects.
    They may use `cpu_seconds` of CPU time each, and ten times as many by the wall clock, so that a
    busy machine fails nothing.
    """
    error, values = _launched(fn, num_ranks, args, 10 * cpu_seconds, True, cpu_seconds)
    if error is not None:
        raise error from None
    return [read_bytes(value) for value in values]


def _launched(
    fn: Callable,
    num_ranks: int,
    args: tuple,
    timeout: float,
    watch: bool,
    cpu_seconds: float = math.inf,
) -> tuple[BaseException | None, list[bytes]]:
    """Return what went wrong, or what each rank returned, pickled."""
    with tempfile.TemporaryDirectory(prefix="minitron-") as folder:
        ranks = Ranks(_orders(fn, args, num_ranks, Path(folder), watch))
        try:
            ranks.start(start_method())
            error = ranks.wait(timeout, cpu_seconds)
        except KeyboardInterrupt:
            error = KeyboardInterrupt()  # without the frames in which the parent was listening
        finally:
            ranks.end()
    return error, [] if error else ranks.values()


def start_method() -> str:
    """Say how `multiprocessing` starts processes here: "forkserver" or "spawn"."""
    return os.environ.get("MINITRON_START", START_METHOD)


def _orders(fn: Callable, args: tuple, num_ranks: int, folder: Path, watch: bool) -> JobSpec:
    try:
        job = cloudpickle.dumps((fn, args))
    except Exception as error:
        name = getattr(fn, "__name__", fn)
        raise ConfigError(f"{name} or an argument cannot be sent to the ranks: {error}") from None
    loopback = {"linux": "lo", "darwin": "lo0"}.get(sys.platform)
    gloo = {"GLOO_SOCKET_IFNAME": loopback} if loopback else {}
    cells = {
        name: entry
        for name, entry in linecache.cache.items()
        if len(entry) == 4 and entry[1] is None
    }
    environment = {**gloo, **os.environ, MARK: str(folder)}
    return JobSpec(num_ranks, folder, watch, job, environment, list(sys.path), cells)


def _run_under_torchrun(fn: Callable, num_ranks: int, args: tuple) -> list:
    _require_torchrun()
    started = int(os.environ["WORLD_SIZE"])
    require(
        started == num_ranks,
        f"run() was asked for {num_ranks} ranks, torchrun has started {started}",
        f"start it with --nproc-per-node {num_ranks}; if torchrun did not set WORLD_SIZE = "
        f"{started}, `unset RANK WORLD_SIZE`",
    )
    with _joined_group() as group:
        return all_gather_objects(fn(group, *args), group)


@contextmanager
def torchrun_group() -> Iterator[Group]:
    """Join the processes that torchrun has started; yields their group, for one `SINGLE_RANK`."""
    if os.environ.get("WORLD_SIZE", "1") == "1":
        yield SINGLE_RANK
        return
    _require_torchrun()
    with _joined_group() as group:
        yield group


def _require_torchrun() -> None:
    """Raise ConfigError unless the environment says where torchrun's processes meet.

    An earlier command, or a cluster, may have set RANK or WORLD_SIZE in this shell.
    """
    for name in ("RANK", "WORLD_SIZE", "MASTER_PORT", "MASTER_ADDR"):
        value = os.environ.get(name, "")
        require(
            value.isdigit() or (value and name == "MASTER_ADDR"),
            f"WORLD_SIZE = {os.environ['WORLD_SIZE']:.20} is set, but {name} is "
            + (f"{value!r:.40}" if value else "not"),
            "start the ranks with torchrun, which sets both; or, without torchrun, `unset "
            "RANK WORLD_SIZE`",
        )


def is_torchrun_rank() -> bool:
    """Return whether torchrun has started this process, alone or with others."""
    return "TORCHELASTIC_RUN_ID" in os.environ


def restarts() -> tuple[int, int]:
    """Return how often torchrun has restarted this job's ranks, and how often it may."""
    return tuple(
        int(os.environ.get(f"TORCHELASTIC_{name}", "0"))
        for name in ("RESTART_COUNT", "MAX_RESTARTS")
    )


def _meeting_place() -> dict:
    """Where ranks meet: in torchrun's store, but not where those that have died left addresses."""
    count, most = restarts()
    if most == 0 or os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return {}
    rank, size, local_size = (
        int(os.environ[name]) for name in ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
    )
    # On several nodes the counts may differ: one that has replaced another counts from 0.
    require(
        size == local_size,
        f"torchrun --max-restarts {most} on several nodes needs "
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 in its environment, and --rdzv-backend c10d: a "
        "store for each start",
    )
    store = dist.TCPStore(
        os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), size, is_master=False
    )
    return {"store": dist.PrefixStore(f"start {count}", store), "rank": rank, "world_size": size}


@contextmanager
def _joined_group() -> Iterator[dist.ProcessGroup]:
    # One group for all runs: a second would find the addresses of the first in torchrun's store.
    atexit.unregister(_end_threads)
    if not dist.is_initialized():
        num_devices = torch.cuda.device_count() if dist.is_nccl_available() else 0
        if num_devices >= int(os.environ.get("LOCAL_WORLD_SIZE", os.environ["WORLD_SIZE"])):
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
            dist.init_process_group("cpu:gloo,cuda:nccl", **_meeting_place())
        else:
            share_cores()
            dist.init_process_group("gloo", **_meeting_place())
    try:
        yield dist.group.WORLD
    except (ConfigError, SystemExit) as error:  # all ranks have agreed to leave
        # Its frames may hold the group in a cycle. gloo's threads would then outlive the
        # interpreter, and one that still has a tensor to let go of would abort the process.
        traceback.clear_frames(error.__traceback__)
        _leave_group()
        atexit.register(_end_threads)
        raise
    # Not after another error: the others may be stuck, and torchrun ends them.
    dist.barrier(dist.group.WORLD)
    atexit.register(_end_threads)


def _leave_group() -> None:
    if dist.is_initialized():  # or the caller has done it
        dist.destroy_process_group()


def _end_threads() -> None:
    """At exit: gloo's threads end with the last reference to the group; let the script's go.

    A thread that still has a tensor to let go of when the interpreter ends aborts the process.
    """
    _leave_group()
    script = vars(sys.modules["__main__"])
    for name, value in list(script.items()):
        if not name.startswith("__") and not isinstance(value, ModuleType | FunctionType | type):
            del script[name]
    gc.collect()
