"""All-reduces of growing size on all ranks: `dist.all_reduce`, NCCL's on GPUs, and our ring.

Bus bandwidth is the bytes that a rank has to send at least, 2 (N-1)/N of the tensor, per second.
"""

import statistics
from pathlib import Path

import torch
from all_reduce import SIDES, time_of
from on_gpu.findings import Findings, Machine, spread

from minitron import cost
from minitron.measure.record import Row

NUM_BYTES = tuple(2**power for power in range(10, 29, 2))  # 1 KiB to 256 MiB
ROUNDS = 10
NAMES = ("dist.all_reduce", "ring")


def measure(machine: Machine, folder: Path) -> Findings:
    """Measure each size, the two in turn; rows have seconds and bus bandwidth."""
    findings = Findings()
    for num_bytes in (2**10, 2**16) if machine.tiny else NUM_BYTES:
        findings.rows += rows(num_bytes, machine)
    return findings


def rows(num_bytes: int, machine: Machine) -> list[Row]:
    """The rows of one size."""
    tensor = torch.zeros(num_bytes // 4, device=machine.device)
    repeats = max(1, min(20, 2**24 // num_bytes))
    seconds: dict[str, list[float]] = {name: [] for name in NAMES}
    for turn in range(-1, 2 if machine.tiny else ROUNDS):  # the first one warms up
        for name in NAMES if turn % 2 else reversed(NAMES):
            taken = time_of(SIDES[name], tensor, machine.group, repeats)
            if turn >= 0:
                seconds[name].append(taken)
    size = machine.group.size()
    least = cost.ring_all_reduce_volume(num_bytes, 1, size, rank=0).sent
    theirs = statistics.median(seconds["dist.all_reduce"])
    return [
        {
            "case": f"{name}, {num_bytes} B",
            "side": name,
            "bytes": num_bytes,
            "ranks": size,
            **spread(taken),
            "bus_bandwidth": least / statistics.median(taken),
            "time_of_theirs": statistics.median(taken) / theirs,
        }
        for name, taken in seconds.items()
    ]
