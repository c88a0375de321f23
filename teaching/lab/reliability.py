"""Goodput: what failures, checkpoints and slow ranks leave of a run's time."""

import math
import random
from statistics import fmean

import torch


def young_interval(saving: float, between_failures: float) -> float:
    """Return the seconds of work between saves that lose least, to first order: sqrt(2 C M).

    C is the time of a save, M the mean time between failures. Reference: Young 1974, "A first order
    approximation to the optimum checkpoint interval".
    """
    return math.sqrt(2 * saving * between_failures)


def daly_interval(saving: float, between_failures: float) -> float:
    """Return the seconds of work between saves that lose least, to higher order.

    It counts failures that strike during a save or while lost work is repeated, and is M where a
    save takes 2 M or longer. Reference: Daly 2006, "A higher order estimate of the optimum
    checkpoint interval for restart dumps".
    """
    C, M = saving, between_failures
    if C >= 2 * M:
        return M
    return math.sqrt(2 * C * M) * (1 + math.sqrt(C / (2 * M)) / 3 + C / (18 * M)) - C


def goodput(interval: float, saving: float, restarting: float, between_failures: float) -> float:
    """Return the useful share of the time, to first order.

    A second of work costs its share of a save, and its share of a failure: half an interval, which
    is repeated, and a restart.
    """
    T, C, R, M = interval, saving, restarting, between_failures
    return 1 / (1 + C / T + (T / 2 + R) / M)


def expected_goodput(
    interval: float, saving: float, restarting: float, between_failures: float
) -> float:
    """Return the useful share if failures come at random, during saves and repetitions as well.

    Only a restart cannot fail. With probability exp(-(T + C) / M) an interval and its save succeed.
    """
    T, C, R, M = interval, saving, restarting, between_failures
    return T / ((M + R) * math.expm1((T + C) / M))


def restart_for(share: float, saving: float, between_failures: float) -> float:
    """Return the seconds that a restart may take for this goodput, at Young's interval.

    Negative if even the fastest restart is too slow.
    """
    lost = math.sqrt(2 * saving / between_failures)  # half for saves, half for repeated work
    return between_failures * (1 / share - 1 - lost)


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
