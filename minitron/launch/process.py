"""What a process settles with its machine: device, memory, cores, and how it may be stopped."""

import os
import signal
import threading
from contextlib import suppress
from pathlib import Path

import psutil
import torch

from minitron.config import ConfigError


def pick_device(name: str) -> torch.device:
    """Return the device called `name`; "auto" is CUDA if there is one, else the CPU."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        (torch.ones(1, device=device) + 1).item()  # a meta tensor, for one, has no value
    except (RuntimeError, AssertionError, ImportError) as error:
        reason = str(error).split("\n")[0]
        raise ConfigError(f"train.device = {name}: cannot be used ({reason})", "try cpu") from None
    return device


CGROUP_LIMIT = Path("/sys/fs/cgroup/memory.max")  # a container's; "max" if there is none
STOP_SIGNALS = [
    getattr(signal, name) for name in ("SIGHUP", "SIGINT", "SIGTERM") if hasattr(signal, name)
]  # Windows has no SIGHUP


def memory_bytes(device: torch.device) -> int:
    """Return the bytes of memory on the device; on a CPU, the machine's."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    machine = psutil.virtual_memory().total
    try:
        return min(machine, int(CGROUP_LIMIT.read_text()))
    except (OSError, ValueError):
        return machine


def share_cores() -> None:
    """Let no thread that wakes up interrupt another one, as Linux does for batch jobs.

    There are more ranks than cores, and each has a thread for its messages. Every message wakes
    several, so most of the time would go into switching.
    """
    if hasattr(os, "SCHED_BATCH"):
        with suppress(OSError):  # a container may forbid it
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))


class StopSignals:
    """Within it, the first of `STOP_SIGNALS` is kept in `signal`, for the loop to save and end.

    Those that follow change nothing. Where a scheduler stops torchrun and its ranks together, each
    rank gets the signal twice, since torchrun passes it on; other services send SIGTERM and SIGHUP.
    Only a SIGINT after the first signal acts as usual, for a person whose loop hangs, but not with
    a `launcher`, which passes on signals and ends what hangs.

    With `until_exit` they are ignored once a stopped run has ended: a copy that comes late must not
    kill a process that is about to exit.
    """

    def __init__(self, launcher: bool = False, until_exit: bool = False):
        self.signal: signal.Signals | None = None
        self.launcher, self.until_exit = launcher, until_exit
        self._previous: dict = {}

    def __enter__(self) -> "StopSignals":
        if threading.current_thread() is threading.main_thread():
            for number in STOP_SIGNALS:
                by_nohup = number.name == "SIGHUP" and signal.getsignal(number) is signal.SIG_IGN
                if not by_nohup:
                    self._previous[number] = signal.signal(number, self._keep)
        return self

    def _keep(self, number, frame) -> None:
        if number == signal.SIGINT and self.signal is not None and not self.launcher:
            signal.signal(number, self._previous[number])
            signal.raise_signal(number)
        self.signal = self.signal or signal.Signals(number)

    def __exit__(self, kind, error, traceback) -> None:
        was_stopped = self.signal is not None and kind is not KeyboardInterrupt
        for number, handler in self._previous.items():
            signal.signal(number, signal.SIG_IGN if was_stopped and self.until_exit else handler)
