"""Seconds to run a function on ranks: start, rendezvous, one all-reduce, tear-down.

    python benchmarks/launch.py
    python benchmarks/launch.py --ranks 8 --out benchmarks/results/launch.md

Cold is the first run of a process, which starts the server that ranks are forked from; warm is any
later one, the median and the fastest of several. Watched ranks announce every collective, as in a
notebook; the others do not, as in benchmarks.
"""

import argparse
import os
import statistics
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

from minitron.launch import run

TARGET = "4 ranks, warm: 0.2 s or less"


def add_one(group) -> float:
    total = torch.ones(1)
    dist.all_reduce(total, group=group)
    return total.item()


def seconds(num_ranks: int, watch: bool) -> float:
    start = time.perf_counter()
    results = run(add_one, num_ranks, watch=watch)
    assert results == [float(num_ranks)] * num_ranks
    return time.perf_counter() - start


def table(num_ranks: int, rounds: int) -> str:
    cold = seconds(num_ranks, watch=True)
    lines = [
        "| ranks | watched | cold, s | warm median, s | warm best, s |",
        "|---|---|---|---|---|",
    ]
    for watch in (True, False):
        warm = [seconds(num_ranks, watch) for _ in range(rounds)]
        first = f"{cold:.2f}" if watch else ""
        lines.append(
            f"| {num_ranks} | {'yes' if watch else 'no'} | {first} | "
            f"{statistics.median(warm):.3f} | {min(warm):.3f} |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--out", type=Path, help="write the table there as well")
    options = parser.parse_args()

    header = (
        f"CPU, {os.cpu_count()} cores, gloo, torch {torch.__version__}; "
        f"`python {' '.join(sys.argv)}`"
    )
    text = f"{header}\n\n{table(options.ranks, options.rounds)}\n\nTarget: {TARGET}."
    print(text)
    if options.out:
        options.out.write_text(f"{text}\n")


if __name__ == "__main__":
    main()
