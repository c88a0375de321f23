"""Every benchmark of many ranks runs, one round of a tiny model, and names all its sides."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.tiers import tiered

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
SIDES = {
    "launch.py": ["yes", "no"],
    "all_reduce.py": ["dist.all_reduce", "ring", "halving", "doubling", "naive"],
    "data_parallel.py": ["naive", "hooked", "bucketed", "torch DDP", "no communication"],
    "zero.py": ["data parallel", "stage 1", "stage 2", "stage 3", "DistributedDataParallel",
                "ZeroRedundancyOptimizer", "fully_shard", "stage 3, gathered late"],
    "tensor_parallel.py": ["tensor", "sequence", "sequence, kept", "DTensor", "DTensor, sequence",
                           "tensor, one after the other"],
    "pipeline.py": ["GPipe", "1F1B", "interleaved 1F1B", "torch GPipe", "torch 1F1B",
                    "torch interleaved 1F1B", "ZB-H1"],
    "precision.py": ["fp32", "bf16-autocast", "bf16", "bf16-fp32-grads", "fp16", "fp8",
                     "torch, fp32", "torch.amp, bf16", "torch.amp, fp16"],
    "dryrun.py": ["fp32", "ZeRO-3", "sequence", "1F1B"],
}
SMALL = {"launch.py": [], "all_reduce.py": ["--megabytes", "1"]}  # the others: --small


@pytest.mark.parametrize("name", tiered(SIDES))
def test_a_round_on_two_ranks(name):
    command = [sys.executable, BENCHMARKS / name, "--ranks", "2", "--rounds", "1",
               *SMALL.get(name, ["--small"])]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    rows = [line.split(" | ") for line in done.stdout.splitlines() if line.startswith("|")]
    for side in SIDES[name]:
        assert any(side in (cell.strip("| ") for cell in row) for row in rows), side
