"""What a dry run says a rank holds and sends, against the same step on real ranks.

    python benchmarks/dryrun.py                                   # CPU: gloo, 1, 2 and 4 ranks
    torchrun --nproc-per-node 1 benchmarks/dryrun.py --ranks 1    # a GPU
    torchrun --nproc-per-node 8 --local-ranks-filter 0 benchmarks/dryrun.py --ranks 8    # GPUs

The dry run has fake tensors and no other rank. The real step is that of the same config, the third
one; --rounds is how often it is measured, and the most counts.

    held    bytes at the peak of the rank that holds most. On CUDA, what the allocator counted: with
            cuBLAS's workspace and blocks rounded up, without NCCL. On the CPU, by the meter.
    sent    bytes that this rank sends in a step, by the ledger.

Target: the bytes sent exactly, the bytes held within 2 % on the CPU and 5 % on CUDA.

Without torchrun also what a dry run itself takes: the first, a middle and the last stage of a model
of 1 T parameters on 3,072 GPUs (Narayanan et al. 2021, table 1), each in a process of its own, by
that process's clock and its largest resident memory. Target: less than 60 s and 4 GiB.
"""

import gc
import os
import resource
import sys
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

import torch
import torch.distributed as dist
from common import conditions, device_of, have_gpus, publish, read_options

from minitron.config import Config, DataConfig, ModelConfig, ParallelConfig, TrainConfig
from minitron.launch import run
from minitron.measure.ledger import Ledger
from minitron.measure.meter import Meter
from minitron.parallelize import lay_out
from minitron.plan.dryrun import DryRun, dry_run, micro_batches
from minitron.running.training import Training

SIZES = {  # model, S
    "cpu": (ModelConfig("gpt", 2048, 128, 4, 256, 4, 4, 1024), 128),
    "cuda": (ModelConfig("gpt", 50304, 2048, 8, 2048, 16, 16, 8192), 2048),
}
LAYOUTS = {  # precision, recomputation, axes
    "fp32": ("fp32", "none", {}),
    "autocast": ("bf16-autocast", "none", {}),
    "masters, recomputed": ("bf16-fp32-grads", "full", {}),
    "ZeRO-1": ("bf16", "none", {"zero": 1}),
    "ZeRO-2": ("bf16", "none", {"zero": 2}),
    "ZeRO-3": ("bf16", "full", {"zero": 3}),
    "tensor": ("bf16", "none", {"tp": 2}),
    "sequence": ("bf16", "none", {"tp": 2, "sequence": True}),
    "1F1B": ("bf16-fp32-grads", "none", {"pp": 2}),
    "interleaved": ("bf16", "full", {"pp": 2, "schedule": "interleaved", "chunks": 2}),
    "all axes": ("bf16-fp32-grads", "full", {"tp": 2, "sequence": True, "pp": 2, "zero": 1}),
}
FEW = ("fp32", "ZeRO-3", "sequence", "1F1B")  # with --small
SEQUENCES = 8  # a step, of all ranks

TRILLION = Config(
    ModelConfig("gpt", 51200, 2048, 128, 25600, 160, 160, 4 * 25600),
    DataConfig(sequence_length=2048),
    TrainConfig(
        global_batch_size=3072, micro_batch_size=1, precision="bf16-fp32-grads", recompute="full"
    ),
    ParallelConfig(tp=8, pp=64),
)
NUM_GPUS = 3072


def config_of(name: str, kind: str, num_ranks: int) -> Config | None:
    """The config of a layout; None if it needs other numbers of ranks."""
    precision, recompute, axes = LAYOUTS[name]
    parallel, (model, S) = ParallelConfig(**axes), SIZES[kind]
    if num_ranks % (parallel.tp * parallel.pp) or (axes and num_ranks == 1):
        return None
    train = TrainConfig(
        global_batch_size=SEQUENCES, micro_batch_size=1, precision=precision, recompute=recompute
    )
    return Config(model, DataConfig(sequence_length=S), train, parallel)


def peak_and_sent(group: dist.ProcessGroup, config: Config, rounds: int) -> tuple[int, int]:
    """What this rank holds and sends in a step."""
    device = device_of(group)
    gc.collect()
    before = torch.cuda.memory_allocated(device) if device.type == "cuda" else 0
    mesh = lay_out(config.parallel, group.size(), device)
    training = Training(config, mesh, device)
    pairs = micro_batches(training, SEQUENCES)
    for _ in range(2):
        training.update(pairs, 1e-4)
    peak = max(peak_of(training, pairs, device) - before for _ in range(rounds))
    with Ledger() as ledger:
        training.update(pairs, 1e-4)
    return peak, ledger.bytes_sent()


def peak_of(training: Training, pairs: list, device: torch.device) -> int:
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        training.update(pairs, 1e-4)
        return torch.cuda.max_memory_allocated(device)
    with Meter(training.model, training.optimizer) as meter:
        training.update(pairs, 1e-4)
    return meter.peak.total


def predicted(config: Config, num_ranks: int, kind: str) -> DryRun:
    """The dry run of the stage that holds most, with kernels of that kind."""
    kernels, ranks_each = "gpu" if kind == "cuda" else "cpu", num_ranks // config.parallel.pp
    runs = (dry_run(config, num_ranks, rank, kernels) for rank in range(0, num_ranks, ranks_each))
    return max(runs, key=lambda each: each.peak.total)


def row(name: str, num_ranks: int, dry: DryRun, by_rank: list[tuple[int, int]]) -> str:
    held, sent = by_rank[dry.rank]
    gap, dry_sent = 100 * (dry.peak.total / held - 1), sum(dry.bytes_sent.values())
    return (
        f"| {num_ranks} | {name} | {dry.rank} | {dry.peak.total / 1e6:,.2f} "
        f"| {held / 1e6:,.2f} | {gap:+.2f} % | {dry_sent:,} | {sent:,} "
        f"| {'yes' if dry_sent == sent else 'no'} |"
    )


def of_a_trillion(stages: tuple[int, ...]) -> list[str]:
    """A row for the first rank of each of these stages of TRILLION."""
    lines = [
        "",
        f"1 T parameters on {NUM_GPUS:,} GPUs: tp 8, pp 64, dp 6, {os.cpu_count()} cores",
        "",
        "| rank | stage | micro-batches | run | s | resident, GiB | held, GB |",
        "|--:|--:|--:|--:|--:|--:|--:|",
    ]
    context = get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=context, max_tasks_per_child=1) as alone:
        return lines + [alone.submit(weighed, stage).result() for stage in stages]


def weighed(stage: int) -> str:
    """Run the first rank of a stage dry; needs a process that has done nothing else."""
    dry = dry_run(TRILLION, NUM_GPUS, stage * NUM_GPUS // 64)
    resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    resident *= 1 if sys.platform == "darwin" else 1024  # bytes there, KiB on Linux
    return (
        f"| {dry.rank:,} | {stage + 1} of 64 | {dry.num_micro_batches} | {dry.num_run} "
        f"| {dry.seconds:.0f} | {resident / 2**30:.2f} | {dry.peak.total / 1e9:.2f} |"
    )


def main() -> None:
    options = read_options(__doc__, rounds=3, ranks=(1, 2, 4), sizes=SIZES)
    kind = "cuda" if have_gpus() else "cpu"
    chosen = [
        (name, num_ranks, config)
        for num_ranks in options.ranks
        for name in (FEW if options.small else LAYOUTS)
        if (config := config_of(name, kind, num_ranks)) is not None
    ]
    trillion = [] if have_gpus() else of_a_trillion((63,) if options.small else (0, 32, 63))
    # First, for a dry run needs a process without a group of ranks.
    dry_runs = [predicted(config, num_ranks, kind) for _, num_ranks, config in chosen]

    lines = [
        conditions(f"{SEQUENCES} sequences a step"),
        "",
        "| ranks | layout | rank | held, MB, dry | real | dry over real | sent, B, dry | real "
        "| equal |",
        "|--:|---|--:|--:|--:|--:|--:|--:|---|",
    ]
    for (name, num_ranks, config), dry in zip(chosen, dry_runs, strict=True):
        args = num_ranks, config, options.rounds
        lines.append(row(name, num_ranks, dry, run(peak_and_sent, *args, timeout=600, watch=False)))
    publish([*lines, *trillion], options.out)


if __name__ == "__main__":
    main()
