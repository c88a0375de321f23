"""Goodput: what failures, checkpoints and slow ranks leave of a run's time."""

import math
import random
import time
from statistics import fmean

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup


def best_interval(saving: float, between_failures: float) -> float:
    """Return the seconds of work between checkpoints that lose least: sqrt(2 C M).

    C is the time of a save, M the mean time between failures. Reference: Young 1974, "A first order
    approximation to the optimum checkpoint interval".
    """
    return math.sqrt(2 * saving * between_failures)


def goodput(interval: float, saving: float, restarting: float, between_failures: float) -> float:
    """Return the useful share of the time, to first order: a failure loses half an interval."""
    lost = saving / interval + (interval / 2 + restarting) / between_failures
    return 1 / (1 + lost)


def simulated_goodput(
    work: float,
    interval: float,
    saving: float,
    restarting: float,
    between_failures: float,
    seed: int = 0,
) -> float:
    """Return the useful share of the time of a run of `work` seconds with random failures.

    Failures come at an average of one in `between_failures` seconds, at any time; the run then
    restarts from the last complete checkpoint. All times are in seconds.
    """
    source = random.Random(seed)
    now, done, failure = 0.0, 0.0, source.expovariate(1 / between_failures)
    while done < work:
        step = min(interval, work - done)
        if now + step + saving <= failure:
            now, done = now + step + saving, done + step
        else:
            now = failure + restarting
            failure = now + source.expovariate(1 / between_failures)
    return work / now


def slowest_of(num_ranks: int, spread: float, num_steps: int = 200, seed: int = 0) -> float:
    """Return the mean over steps of the slowest rank's time.

    A rank's step takes 1 on average, normally distributed with a standard deviation of `spread`.
    """
    generator = torch.Generator().manual_seed(seed)
    times = [
        1 + spread * torch.randn(num_ranks, generator=generator).max().item()
        for _ in range(num_steps)
    ]
    return fmean(times)


def step_with_straggler(
    group: ProcessGroup, compute: float, slow_rank: int, delay: float, num_steps: int = 5
) -> tuple[float, float]:
    """Return this rank's mean seconds of a step, and those of them in the all-reduce.

    A step sleeps for `compute`, then all-reduces. The slow rank sleeps for `delay` more.
    """
    gradient, waited = torch.zeros(1000), 0.0
    dist.barrier(group=group)
    begin = time.perf_counter()
    for _ in range(num_steps):
        time.sleep(compute + delay * (group.rank() == slow_rank))
        computed = time.perf_counter()
        dist.all_reduce(gradient, group=group)
        waited += time.perf_counter() - computed
    return (time.perf_counter() - begin) / num_steps, waited / num_steps
