"""Data, sharded, tensor and pipeline parallelism on all ranks, against PyTorch's own.

The sides and their steps are those of benchmarks/zero.py, tensor_parallel.py and pipeline.py: DDP,
ZeroRedundancyOptimizer and fully_shard; DTensor; torch.distributed.pipelining. Each rival is met in
the same run, turn by turn. A side whose loss differs from the first one's is an error.
"""

import math
from pathlib import Path

import pipeline
import tensor_parallel
import zero
from common import contest, shrink
from on_gpu.findings import Findings, Machine

AXES = {"data": zero, "tensor": tensor_parallel, "pipeline": pipeline}
ROUNDS = 8
MOST_TIME = 1.0
"""Of the rival's, where the target is to be no slower."""


def measure(machine: Machine, folder: Path) -> Findings:
    """Measure every side; rows have seconds, bytes held and sent, and ratios to the rival."""
    findings, size = Findings(), machine.group.size()
    for axis, benchmark in AXES.items():
        if machine.tiny:
            shrink(benchmark.SIZES)
        rounds = 1 if machine.tiny else ROUNDS
        results = contest(benchmark.make_step, benchmark.RIVALS, size, rounds)
        for side, result in results.items():
            findings.rows.append(
                {
                    "case": f"{axis}, {side}",
                    "axis": axis,
                    "side": side,
                    "ranks": size,
                    "seconds": result.seconds,
                    "peak_bytes": result.peak,
                    "sent_bytes": result.sent,
                    "rival": result.rival,
                    "time_of_rival": result.time_ratio,
                    "peak_of_rival": result.peak_ratio,
                }
            )
            if not math.isnan(result.time_ratio):
                findings.at_most(
                    f"{axis}, {side}: time over {result.rival}'s",
                    round(result.time_ratio, 2),
                    MOST_TIME,
                )
    return findings
