"""Our three versions of data parallelism against `torch.nn.parallel.DistributedDataParallel`.

    python benchmarks/data_parallel.py    # CPU: gloo, 2 and 4 ranks
    torchrun --nproc-per-node 8 --local-ranks-filter 0 benchmarks/data_parallel.py --ranks 8  # NCCL

Every side trains the same model from the same weights on the same tokens: forward, loss,
backward, gradients averaged. They take turns, round by round, so that a noisy machine disturbs
all alike. "Exposed" is what a step takes longer than the same step without communication, and
overlap the hidden part of what the communication takes alone: 1 - exposed / alone; "none" where
nothing is hidden, as on a CPU whose cores do the communicating too. Every number is
a median over the rounds, of the slowest rank.
"""

import statistics
from collections.abc import Callable

import torch
import torch.distributed as dist
from common import (
    conditions,
    publish,
    race,
    read_options,
)
from torch.nn.parallel import DistributedDataParallel

from minitron.config import ModelConfig
from minitron.launch import run
from minitron.model.transformer import Transformer, initialize
from minitron.parallel.data.ddp import (
    apply_bucketed_data_parallel,
    apply_hooked_data_parallel,
    apply_naive_data_parallel,
)
from minitron.precision import low_precision
from minitron.step import accumulate_gradients

SIZES = {  # model, sequences per rank and step, S
    "cpu": (ModelConfig("gpt", 4096, 128, 6, 256, 4, 4, 1024), 2, 128),
    "cuda": (ModelConfig("gpt", 50304, 1024, 12, 768, 12, 12, 3072), 16, 1024),
}
OURS = {
    "naive": apply_naive_data_parallel,
    "hooked": apply_hooked_data_parallel,
    "bucketed": apply_bucketed_data_parallel,
}
SIDES = [
    *OURS,
    "torch DDP",
    "torch DDP, gradients as views",
    "no communication",
    "communication alone",
]


def make_step(side: str, group: dist.ProcessGroup, device: torch.device) -> Callable[[], object]:
    config, num_sequences, S = SIZES[device.type]
    model = Transformer(config).to(device)
    initialize(model, seed=0)
    generator = torch.Generator().manual_seed(group.rank())
    tokens = torch.randint(config.vocab_size, (num_sequences, S + 1), generator=generator)
    batch = tokens[:, :-1].to(device), tokens[:, 1:].to(device)

    if side == "communication alone":  # one message, as large as all gradients
        gradients = torch.zeros(sum(p.numel() for p in model.parameters()), device=device)
        return lambda: dist.all_reduce(gradients, group=group)
    parallel = OURS[side](model, group) if side in OURS else None
    forward = model
    if side.startswith("torch DDP"):
        forward = DistributedDataParallel(
            model, process_group=group, gradient_as_bucket_view="views" in side
        )
    forward = low_precision(forward, device) if device.type == "cuda" else forward

    def step() -> None:
        model.zero_grad()
        accumulate_gradients(forward, [batch])
        if parallel:
            parallel.finish()

    return step


def measure(group: dist.ProcessGroup, rounds: int) -> list[list[float]]:
    """Seconds of each side and round on this rank."""
    on_gpu = "nccl" in str(dist.get_backend_config(group))
    device = torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")
    steps = [make_step(side, group, device) for side in SIDES]
    return race(steps, device, rounds)


def table(num_ranks: int, rounds: int) -> list[str]:
    """One row per side; ratios are those of single rounds."""
    by_rank = run(measure, num_ranks, rounds, timeout=600, watch=False)
    seconds = {
        side: [max(times) for times in zip(*(rank[index] for rank in by_rank), strict=True)]
        for index, side in enumerate(SIDES)
    }
    rows = []
    for side in SIDES[:-2]:
        rounds_of = list(
            zip(
                seconds[side],
                seconds["torch DDP"],
                seconds["no communication"],
                seconds["communication alone"],
                strict=True,
            )
        )
        exposed = statistics.median(step - compute for step, _, compute, _ in rounds_of)
        overlap = statistics.median(
            1 - (step - compute) / alone for step, _, compute, alone in rounds_of
        )
        hidden = f"{100 * overlap:.0f} %" if overlap > 0 else "none"
        ratio = statistics.median(step / theirs for step, theirs, _, _ in rounds_of)
        rows.append(
            f"| {num_ranks} | {side} | {1e3 * statistics.median(seconds[side]):.1f} | "
            f"{1e3 * exposed:.1f} | {hidden} | {ratio:.2f} |"
        )
    for side in SIDES[-2:]:
        median = 1e3 * statistics.median(seconds[side])
        rows.append(f"| {num_ranks} | {side} | {median:.1f} | | | |")
    return rows


def main() -> None:
    options = read_options(__doc__, rounds=20, sizes=SIZES)
    on_gpu = torch.cuda.is_available()
    lines = [
        conditions("bf16 autocast" if on_gpu else "float32"),
        "",
        "| ranks | version | ms per step | exposed, ms | overlap | time, this / torch DDP |",
        "|---|---|---|---|---|---|",
        *(row for num_ranks in options.ranks for row in table(num_ranks, options.rounds)),
    ]
    publish(lines, options.out)


if __name__ == "__main__":
    main()
