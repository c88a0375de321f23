"""Our all-reduces from messages against `dist.all_reduce`, side by side in one run.

    python benchmarks/all_reduce.py                           # CPU: gloo, 4 processes
    torchrun --nproc-per-node 8 benchmarks/all_reduce.py      # GPUs: NCCL

All sum the same tensors on the same ranks. They take turns, round by round, so that a noisy
machine disturbs all alike; a ratio is the median over the rounds. A round's time is that of the
slowest rank, for several sums in a row where one is short.
"""

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist

from minitron import cost
from minitron.comm import collectives
from minitron.launch import run
from minitron.measure.clock import synchronize

SIDES = {
    "dist.all_reduce": collectives.all_reduce,
    "ring": collectives.all_reduce_ring,
    "halving": collectives.all_reduce_halving,
    "doubling": collectives.all_reduce_doubling,
    "naive": collectives.all_reduce_naive,
}
MEGABYTES = (1, 4, 16, 64)


def race(
    group: dist.ProcessGroup, rounds: int, sizes: list[int]
) -> tuple[str, dict[int, dict[str, list[float]]]]:
    """Where, and seconds per all-reduce, by MB and side, round by round."""
    device, where = torch.device("cpu"), f"CPU, {os.cpu_count()} cores, gloo"
    if "nccl" in dist.get_backend_config(group):
        device = torch.device("cuda", torch.cuda.current_device())
        where = f"{torch.cuda.get_device_name(device)}, NCCL"
    return where, {
        megabytes: race_at(torch.zeros(megabytes * 10**6 // 4, device=device), group, rounds)
        for megabytes in sizes
    }


def race_at(tensor: torch.Tensor, group: dist.ProcessGroup, rounds: int) -> dict[str, list[float]]:
    """Seconds per all-reduce of `tensor`, by side; each goes first in its turn."""
    repeats = max(1, 16 * 10**6 // tensor.nbytes)
    names = list(SIDES)
    seconds = {name: [] for name in names}
    for turn in range(-1, rounds):  # the first warms up
        for offset in range(len(names)):
            name = names[(turn + offset) % len(names)]
            elapsed = time_of(SIDES[name], tensor, group, repeats)
            if turn >= 0:
                seconds[name].append(elapsed)
    return seconds


def time_of(
    all_reduce: Callable, tensor: torch.Tensor, group: dist.ProcessGroup, repeats: int
) -> float:
    """Seconds per all-reduce on the slowest rank."""
    dist.barrier(group=group)
    synchronize(tensor.device)
    start = time.perf_counter()
    for _ in range(repeats):
        all_reduce(tensor, group)
    synchronize(tensor.device)
    elapsed = torch.tensor((time.perf_counter() - start) / repeats, device=tensor.device)
    dist.all_reduce(elapsed, dist.ReduceOp.MAX, group=group)
    return elapsed.item()


def rows(megabytes: int, seconds: dict[str, list[float]], size: int) -> list[str]:
    """One line per side. Bus bandwidth: the bytes that a rank must send at least, per second."""
    theirs = seconds["dist.all_reduce"]
    least = cost.ring_all_reduce_volume(megabytes * 10**6, 1, size, rank=0).sent
    lines = []
    for name, ours in seconds.items():
        median = statistics.median(ours)
        ratio = statistics.median(a / b for a, b in zip(ours, theirs, strict=True))
        lines.append(
            f"| {megabytes} | {name} | {1e3 * median:.2f} | {least / median / 1e9:.2f} "
            f"| {ratio:.2f} |"
        )
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--ranks", type=int, default=int(os.environ.get("WORLD_SIZE", 4)))
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--megabytes", type=int, nargs="+", default=MEGABYTES)
    parser.add_argument("--out", type=Path, help="write the table here as Markdown too")
    options = parser.parse_args()

    arguments = options.rounds, options.megabytes
    where, results = run(race, options.ranks, *arguments, timeout=3600.0, watch=False)[0]
    if int(os.environ.get("RANK", 0)) != 0:
        return
    lines = [
        f"{where}, {options.ranks} ranks, torch {torch.__version__}, float32; "
        f"`{' '.join(['python', *sys.argv])}`",
        "",
        "| MB | all-reduce | ms | bus GB/s | time, this / dist.all_reduce |",
        "|---|---|---|---|---|",
    ]
    for megabytes, seconds in results.items():
        lines += rows(megabytes, seconds, options.ranks)
    print("\n".join(lines))
    if options.out:
        options.out.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
