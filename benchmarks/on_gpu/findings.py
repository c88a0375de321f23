"""What every part of `benchmarks/gpu.py` is given, and what it returns."""

import gc
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from minitron.comm.agreement import Group
from minitron.measure.clock import synchronize
from minitron.measure.record import Row, Target


@dataclass(frozen=True)
class Machine:
    """The device of this process, and the ranks that measure together."""

    device: torch.device
    tiny: bool
    group: Group

    @property
    def on_gpu(self) -> bool:
        return self.device.type == "cuda"


@dataclass
class Findings:
    """What a part has measured."""

    rows: list[Row] = field(default_factory=list)
    targets: list[Target] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def at_least(self, name: str, value: float, limit: float) -> None:
        """Set a target: the value has to be `limit` or more."""
        self.targets.append(Target(name, value, limit, is_least=True))

    def at_most(self, name: str, value: float, limit: float) -> None:
        """Set a target: the value has to be `limit` or less."""
        self.targets.append(Target(name, value, limit, is_least=False))


def seconds_each(
    do: Callable[[], object], device: torch.device, rounds: int, calls: int = 1
) -> list[float]:
    """Seconds of a call, once a round, after two calls that choose kernels and fill caches.

    A round makes `calls` calls in a row and divides: a kernel of a few microseconds is over before
    the next one has been launched, unless many are waiting.
    """
    for _ in range(2):
        do()
    seconds = []
    for _ in range(rounds):
        synchronize(device)
        start = time.perf_counter()
        for _ in range(calls):
            do()
        synchronize(device)
        seconds.append((time.perf_counter() - start) / calls)
    return seconds


def release(device: torch.device) -> None:
    """Give back what is held no more: models and their hooks are in cycles."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def spread(seconds: list[float]) -> Row:
    """The part of a row that says how long something took: median, least and most."""
    return {
        "seconds": statistics.median(seconds),
        "seconds_least": min(seconds),
        "seconds_most": max(seconds),
        "rounds": len(seconds),
    }
