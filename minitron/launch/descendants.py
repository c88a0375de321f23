"""Whatever processes a rank starts end with the run.

On Linux a rank adopts descendants whose own parent has ended, so that even a daemon is found below
it for as long as it lives. Once it has died by itself, what it started is found by a mark in its
environment, or by the rank's files that it has open. So what escapes has cleared its environment,
closed these files and outlived its rank, or, on other systems than Linux, its parent.
"""

import ctypes
import os
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path

import psutil

from minitron.launch.process_state import wants_cpu

MARK = "MINITRON_RUN"  # in the environment of ranks, and so of what they start: the run's folder
SET_PARENT_DEATH_SIGNAL, SET_CHILD_SUBREAPER = 1, 36  # of Linux's prctl
MOST_ROUNDS = 100  # of killing: those that are left may have started others
LOOKS = 10  # at processes that may sleep now and then
ROUND_SECONDS = 0.01


def adopt_descendants() -> None:
    """Let descendants of this process stay below it when their own parents end."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def end_with_server() -> None:
    """Let this rank be killed when the server ends that it was forked from, and that the parent's
    end ends: also while native code keeps Python's lock, so that no thread of the rank can act.
    """
    module = sys.modules.get("multiprocessing.forkserver")
    alive = None if module is None else module._forkserver._forkserver_alive_fd
    if sys.platform == "linux" and alive is not None:  # else it was spawned
        os.close(alive)  # or the server would wait for this rank
        module._forkserver._forkserver_alive_fd = None
        ctypes.CDLL(None).prctl(SET_PARENT_DEATH_SIGNAL, signal.SIGKILL, 0, 0, 0)


def outlive_server() -> None:
    """Stay although the server ends, to clean up."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(SET_PARENT_DEATH_SIGNAL, 0, 0, 0, 0)


def kill_descendants(pid: int) -> None:
    """Kill all processes below `pid`, which is stopped first: it would go on to start more."""
    with suppress(psutil.Error):
        process = psutil.Process(pid)
        if pid != os.getpid():
            process.suspend()
        for _ in range(MOST_ROUNDS):
            alive = [p for p in process.children(recursive=True) if _is_alive(p)]
            if not alive:
                return
            for descendant in alive:
                with suppress(psutil.Error):
                    descendant.kill()
            time.sleep(ROUND_SECONDS)


def work_below(pids: list[int]) -> bool:
    """Tell whether a process below one of `pids` computes, or would if it were given a CPU."""
    for _ in range(LOOKS):
        with suppress(psutil.NoSuchProcess):
            if any(
                wants_cpu(descendant.pid)
                for pid in pids
                for descendant in psutil.Process(pid).children(recursive=True)
            ):
                return True
        time.sleep(ROUND_SECONDS)
    return False


def has_children() -> bool:
    """Tell whether this process has any; cheaper than to look through all processes."""
    if not hasattr(os, "waitid"):
        return True
    with suppress(ChildProcessError):
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        return True
    return False


def kill_run_descendants(folder: Path) -> None:
    """Kill all processes that were started by ranks of the run in `folder`, dead ones too."""
    for process in psutil.process_iter():
        with suppress(psutil.Error, OSError):
            if process.pid != os.getpid() and _is_of(folder, process):
                process.kill()


def _is_of(folder: Path, process: psutil.Process) -> bool:
    # What has been forked has the files of the rank, what has been executed its environment.
    return process.environ().get(MARK) == str(folder) or any(
        Path(file.path).parent == folder.resolve() for file in process.open_files()
    )


def _is_alive(process: psutil.Process) -> bool:
    with suppress(psutil.NoSuchProcess):
        return process.status() != psutil.STATUS_ZOMBIE
    return False
