"""Bytes held: the meter and the dry run against what CUDA's allocator counted.

The peak of a step without recomputation, with attention recomputed and with every block recomputed,
once the optimizer has its state. Then what only the allocator shows (`on_gpu/allocator.py`): the
blocks of two steps, an out-of-memory error in the second step alone, and fragmentation.

A CPU has no such allocator: there the meter stands for it, and the rest is left out.
"""

from pathlib import Path

import torch
from on_gpu import allocator
from on_gpu.findings import Findings, Machine

from minitron.comm.mesh import OneRankMesh
from minitron.config import Config, DataConfig, ModelConfig, TrainConfig
from minitron.measure.meter import Meter
from minitron.measure.record import Row
from minitron.plan.dryrun import dry_run, micro_batches
from minitron.running.training import Training
from teaching.lab.gpu_models import MEMORY, MeasuredStep

TINY = MeasuredStep(ModelConfig("llama", 256, 64, 2, 64, 4, 4, 128, tied_embedding=False), 4, 4)
MOST_OFF = 0.02


def measure(machine: Machine, folder: Path) -> Findings:
    """Measure the three policies; on a GPU, the allocator's blocks as well."""
    findings = Findings()
    for recompute in ("none", "selective", "full"):
        config = config_of(machine, recompute)
        row = peaks(config, machine, recompute)
        findings.rows.append(row)
        for instrument in ("meter", "dry run"):
            off = abs(row[f"{instrument}_bytes".replace(" ", "_")] / row["allocated_bytes"] - 1)
            findings.at_most(f"{row['case']}: {instrument} off by", off, MOST_OFF)
    if machine.on_gpu:
        allocator.measure(findings, config_of(machine, "none"), machine.device)
    else:
        findings.notes.append(
            "a CPU has no caching allocator: the meter stands for it, and two "
            "steps, their out-of-memory error and fragmentation are left out"
        )
    return findings


def step(machine: Machine) -> MeasuredStep:
    return TINY if machine.tiny else MEMORY


def config_of(machine: Machine, recompute: str) -> Config:
    measured = step(machine)
    train = TrainConfig(
        precision="bf16",
        recompute=recompute,
        global_batch_size=measured.sequences,
        micro_batch_size=measured.micro_batch_size,
    )
    return Config(measured.model, DataConfig(sequence_length=measured.sequence_length), train)


def peaks(config: Config, machine: Machine, recompute: str) -> Row:
    """One row: the peak of a step by the dry run, the meter and the allocator."""
    dry = dry_run(config, 1, kernels="gpu" if machine.on_gpu else "cpu")
    before = allocator.bytes_before(machine.device)
    training = Training(config, OneRankMesh(), machine.device)
    pairs = micro_batches(training, config.train.global_batch_size)
    for _ in range(2):
        training.update(pairs, 1e-4)
    with Meter(training.model, training.optimizer) as meter:
        training.update(pairs, 1e-4)
    metered = meter.peak
    held = metered.total
    if machine.on_gpu:
        torch.cuda.reset_peak_memory_stats(machine.device)
        training.update(pairs, 1e-4)
        held = torch.cuda.max_memory_allocated(machine.device) - before
    return {
        "case": f"recompute {recompute}",
        "recompute": recompute,
        "sequences": config.train.global_batch_size,
        "sequence_length": config.data.sequence_length,
        "num_layers": config.model.num_layers,
        "allocated_bytes": held,
        "meter_bytes": metered.total,
        "dry_run_bytes": dry.peak.total,
        **{f"meter_{kind.replace(' ', '_')}": size for kind, size in metered.bytes.items()},
        **{f"dry_{kind.replace(' ', '_')}": size for kind, size in dry.peak.bytes.items()},
    }
