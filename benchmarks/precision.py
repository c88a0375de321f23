"""Every recipe of low precision against `torch.amp` in one run: speed, memory, messages.

    python benchmarks/precision.py                                  # CPU: gloo, 1 and 2 ranks
    torchrun --nproc-per-node 1 benchmarks/precision.py --ranks 1   # a GPU
    torchrun --nproc-per-node 8 --local-ranks-filter 0 benchmarks/precision.py --ranks 8   # GPUs

Every side trains the same Llama from the same weights on the same tokens: forward, loss, backward,
gradients averaged and clipped, AdamW. Ours is built from a config, as `minitron train` does it;
theirs is torch.autocast, with torch.amp.GradScaler for fp16 and DistributedDataParallel for several
ranks. Theirs keeps parameters in float32: it has no counterpart of the recipes that do not, which
therefore meet its autocast to the same 16 bits, and fp8 that to bf16. Sides take turns, round by
round, so that a noisy machine disturbs all alike; a ratio is the median over the rounds, of the
slowest rank. Bytes are counted in separate steps, one side at a time, since counting costs time:

    products    native: the device has instructions for matrix products of the dtype; emulated:
                it converts to a wider one, or computes number by number, and the time says nothing
                of a device that has them.
    state       bytes per parameter of weights, gradients, masters and optimizer state, by formula.
    peak        bytes held at the peak of a step, of the rank with the most. On the CPU the real
                sizes of all storages that operators touch; on CUDA, what the allocator counted.
    sent        bytes that a rank sends in a step, the mean over the ranks, by the ledger's
                algorithms.

A side whose loss in the fifth step differs from float32's by more than 2 % is an error. On the CPU
roundings change it by less than 0.1 %, an update left out by 4 %.
"""

from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from common import Step, conditions, contest, have_gpus, publish, read_options
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from minitron.config import Config, DataConfig, ModelConfig, TrainConfig
from minitron.model.float8 import E4M3, multiplies_float8
from minitron.model.transformer import Transformer, initialize
from minitron.parallelize import build, lay_out
from minitron.precision import PRECISIONS, low_precision
from minitron.step import make_optimizer, train_step

SIZES = {  # model, sequences per rank and step, S
    "cpu": (ModelConfig("llama", 1024, 128, 4, 128, 4, 4, 384), 4, 128),
    "cuda": (ModelConfig("llama", 32000, 2048, 4, 2048, 32, 8, 5632), 4, 2048),
}
TORCH = {
    "torch, fp32": PRECISIONS["fp32"],
    "torch.amp, bf16": PRECISIONS["bf16-autocast"],
    "torch.amp, fp16": replace(
        PRECISIONS["bf16-autocast"], compute=torch.float16, scales_loss=True
    ),
}
RIVALS = dict.fromkeys(PRECISIONS, "torch.amp, bf16") | {  # ours -> theirs
    "fp32": "torch, fp32",
    "fp16": "torch.amp, fp16",
}
TOLERANCE = 0.02
RATE, CLIP_NORM = 1e-3, 1.0
INSTRUCTIONS = {  # as Linux calls them, of x86 and Arm
    torch.bfloat16: {"avx512_bf16", "amx_bf16", "bf16"},
    torch.float16: {"avx512_fp16", "amx_fp16", "asimdhp"},
}


# A step of each side


def make_step(side: str, group: dist.ProcessGroup, device: torch.device) -> Step:
    config, num_sequences, S = SIZES[device.type]
    generator = torch.Generator().manual_seed(group.rank())
    tokens = torch.randint(config.vocab_size, (num_sequences, S + 1), generator=generator)
    inputs, targets = tokens[:, :-1].to(device), tokens[:, 1:].to(device)
    make = make_theirs if side in TORCH else make_ours
    return make(side, group, device, inputs, targets)


def make_ours(side: str, group, device: torch.device, inputs: Tensor, targets: Tensor) -> Step:
    config = Config(
        SIZES[device.type][0],
        DataConfig(sequence_length=inputs.shape[1]),
        TrainConfig(precision=side),
    )
    mesh = lay_out(config.parallel, group.size(), device)
    model, parallel = build(config, mesh, device)
    optimizer = parallel.shard(make_optimizer(model, config.train, device))
    precision = PRECISIONS[side]
    forward = low_precision(model, device, precision)
    loss_scale = precision.make_loss_scale()

    def step() -> Tensor:
        batch = [(inputs, targets)]
        return train_step(forward, optimizer, batch, RATE, CLIP_NORM, parallel, loss_scale)[0]

    return step


def make_theirs(side: str, group, device: torch.device, inputs: Tensor, targets: Tensor) -> Step:
    precision = TORCH[side]
    model = Transformer(SIZES[device.type][0]).to(device)
    initialize(model, seed=0)
    optimizer = make_optimizer(model, TrainConfig(learning_rate=RATE), device)
    scaler = torch.amp.GradScaler(device.type, enabled=precision.scales_loss)
    forward = model
    if group.size() > 1:
        forward = DistributedDataParallel(model, process_group=group, gradient_as_bucket_view=True)

    def step() -> Tensor:
        optimizer.zero_grad()
        with torch.autocast(device.type, precision.compute, enabled=precision.autocasts):
            loss = F.cross_entropy(forward(inputs).float().flatten(0, 1), targets.flatten())
        scaler.scale(loss).backward()

        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), CLIP_NORM)
        scaler.step(optimizer)
        scaler.update()

        mean = loss.detach() / group.size()  # as ours: that of the global batch
        dist.all_reduce(mean, group=group)
        return mean

    return step


# What the device can


def cpu_flags() -> set[str]:
    """What Linux says that the processor has; nothing elsewhere."""
    path = Path("/proc/cpuinfo")
    return set(path.read_text().split()) if path.exists() else set()


def multiplies(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether the device has instructions for matrix products of `dtype`."""
    if dtype == torch.float32:
        return True
    if dtype == E4M3:
        return multiplies_float8(device)
    if device.type == "cuda":
        return dtype == torch.float16 or torch.cuda.is_bf16_supported(including_emulation=False)
    return bool(INSTRUCTIONS[dtype] & cpu_flags())


def table(num_ranks: int, rounds: int, device: torch.device) -> list[str]:
    """One row per side."""
    _, num_sequences, S = SIZES[device.type]
    num_tokens = num_ranks * num_sequences * S
    rows = []
    for side, result in contest(make_step, RIVALS, num_ranks, rounds, TOLERANCE).items():
        precision = (PRECISIONS | TORCH)[side]
        products = "native" if multiplies(precision.compute, device) else "emulated"
        rows.append(
            f"| {num_ranks} | {side} | {products} | {1e3 * result.seconds:.1f} "
            f"| {num_tokens / result.seconds:,.0f} | {precision.cost.total} "
            f"| {result.peak / 1e6:.1f} | {result.sent / 1e6:.2f} | {result.cells} |"
        )
    return rows


def main() -> None:
    options = read_options(__doc__, rounds=12, ranks=(1, 2), sizes=SIZES)
    device = torch.device("cuda" if have_gpus() else "cpu")
    found = sorted(set().union(*INSTRUCTIONS.values()) & cpu_flags())
    on_cpu = f"native products of 16 bits: {', '.join(found) or 'none'}"
    lines = [
        conditions("float32 without TF32" if device.type == "cuda" else on_cpu),
        "",
        "| ranks | recipe | products | ms per step | tokens/s | state, B per parameter | peak MB "
        "| sent MB | against | time, ours / theirs | peak, ours / theirs |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
        *(row for num_ranks in options.ranks for row in table(num_ranks, options.rounds, device)),
    ]
    publish(lines, options.out)


if __name__ == "__main__":
    main()
