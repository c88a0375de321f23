"""ZeRO's stages against PyTorch's `ZeroRedundancyOptimizer` and FSDP2 (`fully_shard`) in one run.

    python benchmarks/zero.py             # CPU: gloo, 2 and 4 ranks
    torchrun --nproc-per-node 8 --local-ranks-filter 0 benchmarks/zero.py --ranks 8   # GPUs: NCCL

Every side trains the same model from the same weights on the same tokens: AdamW, forward, loss,
backward, gradients averaged. The update comes first, so that a side that ends it before the
parameters are gathered waits for them within its own time. Sides take turns, round by round, so
that a noisy machine disturbs all alike; a ratio is the median over the rounds, of the slowest rank.
A side whose loss differs from the first one's is an error. Bytes are counted in separate steps, one
side at a time, since counting costs time:

    peak    bytes held at the peak of a step, of the rank with the most. On the CPU the real sizes
            of all storages that operators touch: what gloo itself holds is not seen. On CUDA, what
            the allocator counted.
    sent    bytes that a rank sends in a step, the mean over the ranks, by the ledger's ring and
            tree algorithms; it sees what DistributedDataParallel starts from C++, and FSDP2's
            collectives. Also in units of a float32 all-gather of the P parameters, 4P (N-1)/N: an
            all-reduce of all gradients is 2. What really crosses may be more: gloo makes every
            reduce-scatter from an all-reduce of a copy, for all sides alike.

The second table is what the backend takes for the collectives of stage 1 (reduce-scatter,
all-gather) and of its rival (all-reduce, broadcasts) without any training, each for all parameters.
On the CPU those of stage 1 are the slower ones: gloo's reduce-scatter is an all-reduce of a copy,
and its all-gather fills a buffer of its own and copies that.

The third table shows what gathering ahead hides: "exposed" is how long a step waits for transfers,
"alone" what these would take one after the other. On the CPU the network is emulated, and each
collective of `fully_shard` blocks: to overlap, it needs CUDA streams.
"""

import math
import statistics
from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist
from common import (
    BANDWIDTH,
    LATENCY,
    Step,
    compare,
    conditions,
    device_of,
    of_slowest,
    overlap_rows,
    publish,
    race,
    read_options,
)
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

from minitron import cost
from minitron.comm.collectives import (
    all_gather_single,
    all_reduce,
    broadcast,
    reduce_scatter_single,
)
from minitron.config import ModelConfig
from minitron.launch import run
from minitron.launch.slow_network import SlowNetwork
from minitron.model.transformer import Transformer, initialize
from minitron.parallel.data.ddp import apply_bucketed_data_parallel
from minitron.parallel.data.fsdp import apply_fsdp
from minitron.parallel.data.units import Unit
from minitron.parallel.data.zero import apply_zero1, apply_zero2
from minitron.precision import low_precision
from minitron.step import accumulate_gradients

SIZES = {  # model, sequences per rank and step, S, bytes of a bucket
    "cpu": (ModelConfig("gpt", 2048, 128, 8, 256, 4, 4, 1024), 1, 128, 4 * 2**20),
    "cuda": (ModelConfig("gpt", 50304, 1024, 12, 768, 12, 12, 3072), 16, 1024, 25 * 2**20),
}
RIVALS = {  # ours -> theirs
    "data parallel": "DistributedDataParallel",
    "stage 1": "ZeroRedundancyOptimizer",
    "stage 2": "fully_shard, kept",
    "stage 3, kept": "fully_shard, kept",
    "stage 3": "fully_shard",
}
PREFETCH_SIDES = ["stage 3", "stage 3, gathered late", "fully_shard"]

make_optimizer = partial(torch.optim.AdamW, lr=1e-3, fused=True)


# A step of each side


def make_step(side: str, group: dist.ProcessGroup, device: torch.device) -> Step:
    config, num_sequences, S, _ = SIZES[device.type]
    model = Transformer(config).to(device)
    initialize(model, seed=0)
    generator = torch.Generator().manual_seed(group.rank())
    tokens = torch.randint(config.vocab_size, (num_sequences, S + 1), generator=generator)
    batch = tokens[:, :-1].to(device), tokens[:, 1:].to(device)

    is_ours = side.startswith(("data parallel", "stage"))
    make = make_ours if is_ours else make_theirs
    forward, optimizer, finish = make(side, model, group, device)

    def step() -> Tensor:
        optimizer.step()  # first: the forward pass hides what is gathered ahead, if anything does
        optimizer.zero_grad()
        loss = accumulate_gradients(forward, [batch])
        finish()
        return loss

    return step


def make_ours(side: str, model: nn.Module, group: dist.ProcessGroup, device: torch.device):
    bucket_bytes = SIZES[device.type][-1]
    if side.startswith("stage 3"):
        parallel = apply_fsdp(
            model,
            group,
            reshard_after_forward="kept" not in side,
            compute_dtype=torch.bfloat16 if device.type == "cuda" else None,
        )
        if "gathered late" in side:
            for unit in parallel.units:
                unit.__class__ = LateUnit
        return in_float32(model), parallel.make_optimizer(make_optimizer), parallel.finish

    if side == "data parallel":
        parallel = apply_bucketed_data_parallel(model, group, bucket_bytes)
        optimizer = make_optimizer(model.parameters())
    else:
        ahead = partial(apply_zero1, overlap_gather=True)
        apply = ahead if side == "stage 1" else apply_zero2
        parallel = apply(model, group, bucket_bytes)
        optimizer = parallel.make_optimizer(make_optimizer)
    forward = low_precision(model, device) if device.type == "cuda" else model
    return forward, optimizer, parallel.finish


def make_theirs(side: str, model: nn.Module, group: dist.ProcessGroup, device: torch.device):
    if side.startswith("fully_shard"):
        on_gpu = device.type == "cuda"
        options = dict(
            mesh=DeviceMesh.from_group(group, device.type),
            reshard_after_forward="kept" not in side,
            mp_policy=MixedPrecisionPolicy(torch.bfloat16 if on_gpu else None),
        )
        for block in model.blocks:
            fully_shard(block, **options)
        fully_shard(model, **options)
        return in_float32(model), make_optimizer(model.parameters()), lambda: None

    parallel = DistributedDataParallel(
        model,
        process_group=group,
        gradient_as_bucket_view=True,
        bucket_cap_mb=SIZES[device.type][-1] / 2**20,
    )
    if side == "ZeroRedundancyOptimizer":
        optimizer = ZeroRedundancyOptimizer(
            model.parameters(),
            torch.optim.AdamW,
            process_group=group,
            parameters_as_bucket_view=True,
            **make_optimizer.keywords,
        )
    else:
        optimizer = make_optimizer(model.parameters())
    forward = low_precision(parallel, device) if device.type == "cuda" else parallel
    return forward, optimizer, lambda: None


def in_float32(model: nn.Module) -> Callable[[Tensor], Tensor]:
    return lambda tokens: model(tokens).float()


class LateUnit(Unit):
    """A unit of stage 3 that is gathered when it is needed, never ahead."""

    def unshard(self) -> None:
        pass

    def wait_for_unshard(self) -> None:
        super().unshard()
        super().wait_for_unshard()


def table(num_ranks: int, rounds: int) -> list[str]:
    """One row per side; sent also in units of an all-gather of the float32 parameters."""
    config = SIZES["cuda" if torch.cuda.is_available() else "cpu"][0]
    unit = 4 * cost.num_parameters(config) * max(1, num_ranks - 1) / num_ranks
    return compare(make_step, RIVALS, num_ranks, rounds, unit)


# The collectives alone


def time_collectives(group: dist.ProcessGroup, rounds: int) -> dict[str, list[float]]:
    """Seconds on this rank, round by round, of each collective for all parameters."""
    device, rank, size = device_of(group), group.rank(), group.size()
    config, _, _, bucket_bytes = SIZES[device.type]
    num_buckets = math.ceil(4 * cost.num_parameters(config) / bucket_bytes)
    flat = torch.zeros(num_buckets * bucket_bytes // 4, device=device)
    buckets = flat.chunk(num_buckets)
    own = [bucket.chunk(size)[rank] for bucket in buckets]
    arriving = torch.empty_like(own[0])

    works = {
        "all-reduce": lambda: [all_reduce(bucket, group) for bucket in buckets],
        "broadcasts of the shards": lambda: [
            broadcast(shard, source, group) for source, shard in enumerate(flat.chunk(size))
        ],
        "reduce-scatter": lambda: [
            reduce_scatter_single(arriving, bucket, group) for bucket in buckets
        ],
        "all-gather": lambda: [
            all_gather_single(bucket, shard, group)
            for bucket, shard in zip(buckets, own, strict=True)
        ],
    }
    return dict(zip(works, race(list(works.values()), device, rounds), strict=True))


def collective_rows(num_ranks: int, rounds: int) -> list[str]:
    """One row per collective, and the sum of each side's two."""
    by_rank = run(time_collectives, num_ranks, rounds, timeout=600, watch=False)
    seconds = dict(zip(by_rank[0], of_slowest([list(r.values()) for r in by_rank]), strict=True))
    for side, (reduce, gather) in {
        "ZeroRedundancyOptimizer": ("all-reduce", "broadcasts of the shards"),
        "stage 1": ("reduce-scatter", "all-gather"),
    }.items():
        both = zip(seconds[reduce], seconds[gather], strict=True)
        seconds[f"{side}: {reduce}, {gather}"] = list(map(sum, both))
    return [
        f"| {num_ranks} | {name} | {1e3 * statistics.median(times):.1f} |"
        for name, times in seconds.items()
    ]


def main() -> None:
    options = read_options(__doc__, rounds=12, sizes=SIZES)
    on_gpu = torch.cuda.is_available()
    lines = [
        conditions("bfloat16" if on_gpu else "float32"),
        "",
        "| ranks | version | ms per step | peak MB | sent MB | sent, 4P (N-1)/N "
        "| against | time, ours / theirs | peak, ours / theirs |",
        "|---|---|---|---|---|---|---|---|---|",
        *(row for num_ranks in options.ranks for row in table(num_ranks, options.rounds)),
        "",
        "The collectives alone, of all parameters:",
        "",
        "| ranks | collective | ms |",
        "|---|---|---|",
        *(row for num_ranks in options.ranks for row in collective_rows(num_ranks, options.rounds)),
        "",
        "Gathering ahead" + ("" if on_gpu else f", {SlowNetwork(LATENCY, BANDWIDTH)}") + ":",
        "",
        "| ranks | version | ms per step | transfers alone, ms | exposed, ms | hidden |",
        "|---|---|---|---|---|---|",
        *overlap_rows(make_step, PREFETCH_SIDES, options.ranks[0], options.rounds),
    ]
    publish(lines, options.out)


if __name__ == "__main__":
    main()
