"""Our recomputation against `torch.utils.checkpoint`, time and memory side by side in one run.

    python benchmarks/recompute.py                     # CPU: float32
    python benchmarks/recompute.py --device cuda       # GPU: bf16 autocast

Every side replays each block of the same model from the same weights on the same tokens: forward,
loss, backward. They take turns, round by round, so that a noisy machine disturbs all alike; a
ratio is the median over the rounds. Memory is what the model's device holds at the peak of the
step beyond weights and gradients: the meter's count on the CPU, the allocator's on CUDA.
"""

import argparse
import statistics
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from common import race
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from minitron.config import ModelConfig
from minitron.measure.meter import Meter
from minitron.model.recompute import apply_full_recompute
from minitron.model.transformer import Transformer, initialize
from minitron.precision import low_precision
from minitron.step import accumulate_gradients

Step = Callable[[], object]

SIZES = {  # family -> (model, sequences per step, S)
    "cpu": {
        "gpt": (ModelConfig("gpt", 1024, 128, 6, 256, 4, 4, 1024), 4, 128),
        "gpt, dropout": (ModelConfig("gpt", 1024, 128, 6, 256, 4, 4, 1024, dropout=0.1), 4, 128),
        "llama": (ModelConfig("llama", 1024, 128, 6, 256, 4, 2, 768), 4, 128),
    },
    "cuda": {
        "gpt": (ModelConfig("gpt", 50304, 1024, 12, 768, 12, 12, 3072), 16, 1024),
        "gpt, dropout": (
            ModelConfig("gpt", 50304, 1024, 12, 768, 12, 12, 3072, dropout=0.1),
            16,
            1024,
        ),
        "llama": (
            ModelConfig("llama", 32000, 2048, 16, 2048, 32, 8, 5632, tied_embedding=False),
            8,
            2048,
        ),
    },
}


def apply_theirs(model: Transformer, use_reentrant: bool) -> None:
    def run_blocks(blocks, x, rotation):
        for block in blocks:
            x = checkpoint(block, x, rotation, use_reentrant=use_reentrant)
        return x

    model.run_blocks = run_blocks


SIDES = {
    "none": lambda model: None,
    "ours": apply_full_recompute,
    "not reentrant": partial(apply_theirs, use_reentrant=False),
    "reentrant": partial(apply_theirs, use_reentrant=True),
}


def build(policy: Callable, config: ModelConfig, batch: tuple[Tensor, Tensor]):
    """A model with its policy, and the function that takes one step of it."""
    device = batch[0].device
    model = Transformer(config).to(device)
    initialize(model, seed=0)
    policy(model)
    forward = low_precision(model, device) if device.type == "cuda" else model
    return model, lambda: accumulate_gradients(forward, [batch])


def peak_bytes(model: Transformer, step: Step, device: torch.device) -> int:
    """Most bytes held during a step beyond what is held before it, weights and gradients."""
    step()
    if device.type == "cuda":
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        step()
        return torch.cuda.max_memory_allocated(device) - before
    with Meter(model) as meter:
        before = sum(meter.now().values())
        step()
    return meter.peak.total - before


def compare(name: str, config: ModelConfig, batch: tuple[Tensor, Tensor], rounds: int) -> list[str]:
    """The rows of the table for one model; ratios are ours over theirs."""
    device = batch[0].device
    sides = [build(policy, config, batch) for policy in SIDES.values()]
    seconds = race([step for _, step in sides], device, rounds)
    peaks = [peak_bytes(model, step, device) for model, step in sides]

    ours = list(SIDES).index("ours")
    rows = []
    for side, times, peak in zip(SIDES, seconds, peaks, strict=True):
        ratio = statistics.median(a / b for a, b in zip(seconds[ours], times, strict=True))
        rows.append(
            f"| {name} | {side} | {1e3 * statistics.median(times):.1f} | {peak / 1e6:,.2f} "
            f"| {ratio:.2f} | {peaks[ours] / peak:.2f} |"
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--out", type=Path, help="write the table here as Markdown too")
    options = parser.parse_args()
    device = torch.device(options.device)

    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    precision = "bf16 autocast" if device.type == "cuda" else "float32"
    lines = [
        f"{name}, {torch.get_num_threads()} threads, torch {torch.__version__}, {precision}; "
        f"`{' '.join(['python', *sys.argv])}`",
        "",
        "| model | recompute | ms per step | peak MB | time, ours / this | peak, ours / this |",
        "|---|---|---|---|---|---|",
    ]
    print("\n".join(lines))
    for family, (config, batch_size, S) in SIZES[device.type].items():
        torch.manual_seed(0)
        tokens = torch.randint(0, config.vocab_size, (batch_size, S + 1), device=device)
        batch = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
        rows = compare(family, config, batch, options.rounds)
        print("\n".join(rows))
        lines += rows
    if options.out:
        options.out.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
