"""What a training process settles with its machine: which device, and how it may be stopped."""

import signal
import threading

import torch

from minitron.config import ConfigError


def pick_device(name: str) -> torch.device:
    """The device called `name`; "auto" is CUDA if there is one, else the CPU."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).split("\n")[0]
        raise ConfigError(f"train.device = {name}: cannot be used ({reason}); try cpu") from None
    return device


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
