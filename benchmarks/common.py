"""What the benchmarks share: sides that take turns."""

import time
from collections.abc import Callable

import torch

from minitron.measure.clock import synchronize


def race(
    steps: list[Callable[[], object]], device: torch.device, rounds: int, warm_up: int = 2
) -> list[list[float]]:
    """Seconds per step of each, round by round; each goes first in its turn."""
    for step in steps:  # allocate, choose kernels, compile, fill .grad
        for _ in range(warm_up):
            step()
    seconds = [[] for _ in steps]
    for turn in range(rounds):
        for offset in range(len(steps)):
            index = (turn + offset) % len(steps)
            synchronize(device)
            start = time.perf_counter()
            steps[index]()
            synchronize(device)
            seconds[index].append(time.perf_counter() - start)
    return seconds
