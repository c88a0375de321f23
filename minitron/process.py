"""What a training process settles with its machine: device, memory, and how it may be stopped."""

import os
import signal
import threading
from pathlib import Path

import torch

from minitron.config import ConfigError


def pick_device(name: str) -> torch.device:
    """The device called `name`; "auto" is CUDA if there is one, else the CPU."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        (torch.ones(1, device=device) + 1).item()  # a meta tensor, for one, has no value
    except (RuntimeError, AssertionError, ImportError) as error:
        reason = str(error).split("\n")[0]
        raise ConfigError(f"train.device = {name}: cannot be used ({reason}); try cpu") from None
    return device


CGROUP_LIMIT = Path("/sys/fs/cgroup/memory.max")  # a container's; "max" if there is none


def memory_bytes(device: torch.device) -> int:
    """Bytes of memory that there are for what lies on the device; on a CPU, the machine's."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    try:
        return min(machine, int(CGROUP_LIMIT.read_text()))
    except (OSError, ValueError):
        return machine


class Interruption:
    """Within it, the first SIGINT or SIGTERM is kept in `signal` for the loop to end cleanly.

    A second one acts as usual, for a loop that hangs.
    """

    def __init__(self):
        self.signal: signal.Signals | None = None
        self._previous: dict = {}

    def __enter__(self) -> "Interruption":
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._previous[number] = signal.signal(number, self._keep)
        return self

    def _keep(self, number, frame) -> None:
        self.signal = signal.Signals(number)
        self._restore()

    def __exit__(self, *exception) -> None:
        self._restore()

    def _restore(self) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)
