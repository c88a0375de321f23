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
"""

import gc

import torch
import torch.distributed as dist
from common import conditions, device_of, have_gpus, publish, read_options

from minitron.comm.launch import run
from minitron.config import Config, DataConfig, ModelConfig, ParallelConfig, TrainConfig
from minitron.measure.ledger import Ledger
from minitron.measure.meter import Meter
from minitron.parallelize import lay_out
from minitron.plan.dryrun import DryRun, dry_run, micro_batches
from minitron.run import Training

SIZES = {  # model, S
    "cpu": (ModelConfig("gpt", 2048, 128, 4, 256, 4, 4, 1024), 128),
    "cuda": (ModelConfig("gpt", 50304, 2048, 8, 2048, 16, 16, 8192), 2048),
}
LAYOUTS = {  # precision, recomputation, axes
    "fp32": ("fp32", "none", {}),
    "autocast": ("bf16-autocast", "none", {}),
    "masters, recomputed": ("bf16-fp32-grads", "full", {}),
    "ZeRO 1": ("bf16", "none", {"zero": 1}),
    "ZeRO 2": ("bf16", "none", {"zero": 2}),
    "ZeRO 3": ("bf16", "full", {"zero": 3}),
    "tensor": ("bf16", "none", {"tp": 2}),
    "sequence": ("bf16", "none", {"tp": 2, "sequence": True}),
    "1F1B": ("bf16-fp32-grads", "none", {"pp": 2}),
    "interleaved": ("bf16", "full", {"pp": 2, "schedule": "interleaved", "chunks": 2}),
    "all axes": ("bf16-fp32-grads", "full", {"tp": 2, "sequence": True, "pp": 2, "zero": 1}),
}
SEQUENCES = 8  # a step, of all ranks


def config_of(name: str, kind: str, num_ranks: int) -> Config | None:
    """The config of a layout; None if it needs other numbers of ranks."""
    precision, recompute, axes = LAYOUTS[name]
    parallel, (model, S) = ParallelConfig(**axes), SIZES[kind]
    if num_ranks % (parallel.tp * parallel.pp) or (axes and num_ranks == 1):
        return None
    train = TrainConfig(global_batch_size=SEQUENCES, micro_batch_size=1, precision=precision,
                        recompute=recompute)
    return Config(model, DataConfig(sequence_length=S), train, parallel)


def peak_and_sent(group: dist.ProcessGroup, config: Config, rounds: int) -> tuple[int, int]:
    """What this rank holds and sends in a step."""
    device = device_of(group)
    gc.collect()
    before = torch.cuda.memory_allocated(device) if device.type == "cuda" else 0
    mesh = None if group.size() == 1 else lay_out(config.parallel, group.size(), device)
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


def predicted(config: Config, num_ranks: int) -> DryRun:
    """The dry run of the stage that holds most."""
    stages = range(config.parallel.pp)
    runs = (dry_run(config, num_ranks, stage * num_ranks // len(stages)) for stage in stages)
    return max(runs, key=lambda each: each.peak.total)


def row(name: str, num_ranks: int, dry: DryRun, by_rank: list[tuple[int, int]]) -> str:
    held, sent = by_rank[dry.rank]
    gap, dry_sent = 100 * (dry.peak.total / held - 1), sum(dry.bytes_sent.values())
    return f"| {num_ranks} | {name} | {dry.rank} | {dry.peak.total / 1e6:,.2f} " \
        f"| {held / 1e6:,.2f} | {gap:+.2f} % | {dry_sent:,} | {sent:,} " \
        f"| {'yes' if dry_sent == sent else 'no'} |"


def main() -> None:
    options = read_options(__doc__, rounds=3, ranks=(1, 2, 4))
    kind = "cuda" if have_gpus() else "cpu"
    chosen = [(name, num_ranks, config) for num_ranks in options.ranks for name in LAYOUTS
              if (config := config_of(name, kind, num_ranks)) is not None]
    # First, for a dry run needs a process without a group of ranks.
    dry_runs = [predicted(config, num_ranks) for _, num_ranks, config in chosen]

    lines = [conditions(f"{SEQUENCES} sequences a step"), "",
             "| ranks | layout | rank | held, MB, dry | real | dry over real | sent, B, dry | real "
             "| equal |", "|--:|---|--:|--:|--:|--:|--:|--:|---|"]
    for (name, num_ranks, config), dry in zip(chosen, dry_runs, strict=True):
        args = num_ranks, config, options.rounds
        lines.append(row(name, num_ranks, dry, run(peak_and_sent, *args, timeout=600, watch=False)))
    publish(lines, options.out)


if __name__ == "__main__":
    main()
