"""ZeRO's stages against PyTorch's `ZeroRedundancyOptimizer` and FSDP2 (`fully_shard`) in one run.

    python benchmarks/zero.py             # CPU: gloo, 2 and 4 ranks
    torchrun --nproc-per-node 8 --local-ranks-filter 0 benchmarks/zero.py --ranks 8   # GPUs: NCCL

Every side trains the same model from the same weights on the same tokens: forward, loss, backward,
gradients averaged, AdamW. They take turns, round by round, so that a noisy machine disturbs all
alike; a ratio is the median over the rounds, of the slowest rank. A side whose loss differs from
the first one's is an error. Bytes are counted in separate steps, one side at a time, since
counting costs time:

    peak    bytes held at the peak of a step, of the rank with the most. On the CPU the real sizes
            of all storages that operators touch: what gloo itself holds is not seen. On CUDA, what
            the allocator counted.
    sent    bytes that a rank sends in a step, the mean over the ranks, by the ledger's ring and
            tree algorithms; it sees what DistributedDataParallel starts from C++, and FSDP2's
            collectives. Also in units of a float32 all-gather of the P parameters, 4P (N-1)/N: an
            all-reduce of all gradients is 2. What really crosses may be more: gloo makes every
            reduce-scatter from an all-reduce of a copy, for all sides alike.

The second table shows what gathering ahead hides: "exposed" is how long a step waits for transfers,
"alone" what these would take one after the other. On the CPU the network is emulated, and each
collective of `fully_shard` blocks: to overlap, it needs CUDA streams.
"""

import argparse
import gc
import math
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from common import device_of, of_slowest, peak_bytes, race
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

from minitron import cost
from minitron.comm.launch import run
from minitron.comm.slow_network import SlowNetwork
from minitron.config import ModelConfig
from minitron.measure.ledger import Ledger
from minitron.model.transformer import Transformer, initialise
from minitron.parallel.data_parallel import apply_bucketed_data_parallel
from minitron.parallel.fsdp import apply_fsdp
from minitron.parallel.units import Unit
from minitron.parallel.zero import apply_zero1, apply_zero2
from minitron.step import accumulate_gradients, low_precision

Step = Callable[[], Tensor]

SIZES = {  # model, sequences per rank and step, S, bytes of a bucket
    "cpu": (ModelConfig("gpt", 2048, 128, 8, 256, 4, 4, 1024), 1, 128, 4 * 2**20),
    "cuda": (ModelConfig("gpt", 50304, 1024, 12, 768, 12, 12, 3072), 16, 1024, 25 * 2**20),
}
LATENCY, BANDWIDTH = 0.2e-3, 400e6  # of the emulated network
RIVALS = {  # ours -> theirs
    "data parallel": "DistributedDataParallel",
    "stage 1": "ZeroRedundancyOptimizer",
    "stage 2": "fully_shard, kept",
    "stage 3, kept": "fully_shard, kept",
    "stage 3": "fully_shard",
}
SIDES = list(dict.fromkeys([*RIVALS, *RIVALS.values()]))
PREFETCH_SIDES = ["stage 3", "stage 3, gathered late", "fully_shard"]

make_optimizer = partial(torch.optim.AdamW, lr=1e-3, fused=True)


# A step of each side


def make_step(side: str, group: dist.ProcessGroup, device: torch.device) -> Step:
    config, num_sequences, S, _ = SIZES[device.type]
    model = Transformer(config).to(device)
    initialise(model, seed=0)
    generator = torch.Generator().manual_seed(group.rank())
    tokens = torch.randint(config.vocab_size, (num_sequences, S + 1), generator=generator)
    batch = tokens[:, :-1].to(device), tokens[:, 1:].to(device)

    is_ours = side.startswith(("data parallel", "stage"))
    make = make_ours if is_ours else make_theirs
    forward, optimizer, finish = make(side, model, group, device)

    def step() -> Tensor:
        optimizer.zero_grad()
        loss = accumulate_gradients(forward, [batch])
        finish()
        optimizer.step()
        return loss

    return step


def make_ours(side: str, model: nn.Module, group: dist.ProcessGroup, device: torch.device):
    bucket_bytes = SIZES[device.type][-1]
    if side.startswith("stage 3"):
        parallel = apply_fsdp(model, group, reshard_after_forward="kept" not in side,
                              compute_dtype=torch.bfloat16 if device.type == "cuda" else None)
        if "gathered late" in side:
            for unit in parallel.units:
                unit.__class__ = LateUnit
        return in_float32(model), parallel.make_optimizer(make_optimizer), parallel.finish

    if side == "data parallel":
        parallel = apply_bucketed_data_parallel(model, group, bucket_bytes)
        optimizer = make_optimizer(model.parameters())
    else:
        apply = apply_zero1 if side == "stage 1" else apply_zero2
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
        model, process_group=group, gradient_as_bucket_view=True,
        bucket_cap_mb=SIZES[device.type][-1] / 2**20,
    )
    if side == "ZeroRedundancyOptimizer":
        optimizer = ZeroRedundancyOptimizer(
            model.parameters(), torch.optim.AdamW, process_group=group,
            parameters_as_bucket_view=True, **make_optimizer.keywords,
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


# What each side holds, sends and takes


def count(side: str, group: dist.ProcessGroup, device: torch.device) -> tuple[int, int, float]:
    """Peak bytes of this rank, the bytes that it sends, and its loss in the fifth step."""
    gc.collect()
    before = torch.cuda.memory_allocated(device) if device.type == "cuda" else 0
    step = make_step(side, group, device)
    step()
    peak = peak_bytes(step, device, before)
    with Ledger() as ledger:
        step()
    return peak, ledger.bytes_sent(), step().item()


def measure(group: dist.ProcessGroup, rounds: int) -> tuple[list[tuple], list[list[float]]]:
    """What `count` says of each side on this rank, and the side's seconds round by round."""
    device = device_of(group)
    counts = [count(side, group, device) for side in SIDES]
    for side, (*_, loss) in zip(SIDES, counts, strict=True):
        if not math.isclose(loss, counts[0][-1], rel_tol=0.02 if device.type == "cuda" else 1e-4):
            raise ValueError(f"{side}: loss {loss}, but {SIDES[0]}: {counts[0][-1]}")
    gc.collect()
    return counts, race([make_step(side, group, device) for side in SIDES], device, rounds)


def table(num_ranks: int, rounds: int) -> list[str]:
    """One row per side; ratios are ours over theirs."""
    by_rank = run(measure, num_ranks, rounds, timeout=600, watch=False)
    seconds = dict(zip(SIDES, of_slowest([times for _, times in by_rank]), strict=True))
    counts = dict(zip(SIDES, zip(*(counts for counts, _ in by_rank), strict=True), strict=True))
    peaks = {side: max(rank[0] for rank in ranks) for side, ranks in counts.items()}

    config = SIZES["cuda" if torch.cuda.is_available() else "cpu"][0]
    all_parameters = 4 * cost.num_parameters(config) * max(1, num_ranks - 1) / num_ranks
    rows = []
    for side in SIDES:
        ratios = "| | "
        if side in RIVALS:
            rival = RIVALS[side]
            times = zip(seconds[side], seconds[rival], strict=True)
            time = statistics.median(ours / theirs for ours, theirs in times)
            ratios = f"{rival} | {time:.2f} | {peaks[side] / peaks[rival]:.2f}"
        sent = statistics.mean(rank[1] for rank in counts[side])
        in_units = sent / all_parameters
        rows.append(
            f"| {num_ranks} | {side} | {1e3 * statistics.median(seconds[side]):.1f} "
            f"| {peaks[side] / 1e6:.1f} | {sent / 1e6:.2f} | {in_units:.2f} | {ratios} |"
        )
    return rows


# Gathering ahead


def over_slow_network(step: Step, waits: list[tuple[float, float]]) -> Callable[[], None]:
    """The step over the emulated network; appends how long it waits, and its transfers alone."""

    def slow_step() -> None:
        with SlowNetwork(LATENCY, BANDWIDTH), Ledger() as ledger:
            start = time.perf_counter()
            step()
            seconds = time.perf_counter() - start
        computing = sum(span.end - span.start for span in ledger.spans)
        alone = sum(
            cost.collective_seconds(call.op, call.payload, call.size, LATENCY, BANDWIDTH)
            for call in ledger.calls
        )
        waits.append((seconds - computing, alone))

    return slow_step


def measure_prefetch(group: dist.ProcessGroup, rounds: int) -> tuple[list, list]:
    """Seconds on this rank, by side of `prefetch_table` and round; on the CPU, the waits too."""
    device = device_of(group)
    steps = [make_step(side, group, device) for side in PREFETCH_SIDES]
    if device.type == "cuda":
        return race(steps, device, rounds), []
    waits = [[] for _ in steps]
    return race(list(map(over_slow_network, steps, waits)), device, rounds), waits


def prefetch_table(num_ranks: int, rounds: int) -> list[str]:
    """Stage 3 with and without gathering ahead; on the CPU, over an emulated network."""
    by_rank = run(measure_prefetch, num_ranks, rounds, timeout=600, watch=False)
    seconds, waits = zip(*by_rank, strict=True)
    rows = []
    for index, (side, times) in enumerate(zip(PREFETCH_SIDES, of_slowest(seconds), strict=True)):
        cells = "| | "
        if waits[0]:
            # The rank that waits least: another waits for that one as well.
            least = [min(ranks) for ranks in zip(*(sides[index] for sides in waits), strict=True)]
            exposed, alone = map(statistics.median, zip(*least[-rounds:], strict=True))
            cells = f"{1e3 * alone:.1f} | {1e3 * exposed:.1f} | {100 * (1 - exposed / alone):.0f} %"
        rows.append(f"| {num_ranks} | {side} | {1e3 * statistics.median(times):.1f} | {cells} |")
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--out", type=Path, help="write the tables here as Markdown too")
    options = parser.parse_args()

    on_gpu = torch.cuda.is_available()
    device = torch.cuda.get_device_name() if on_gpu else "CPU, 1 thread a rank"
    lines = [
        f"{device}, torch {torch.__version__}, {'bfloat16' if on_gpu else 'float32'}; "
        f"`{' '.join(['python', *sys.argv])}`",
        "",
        "| ranks | version | ms per step | peak MB | sent MB | sent, 4P (N-1)/N "
        "| against | time, ours / theirs | peak, ours / theirs |",
        "|---|---|---|---|---|---|---|---|---|",
        *(row for num_ranks in options.ranks for row in table(num_ranks, options.rounds)),
        "",
        "Gathering ahead" + ("" if on_gpu else f", {SlowNetwork(LATENCY, BANDWIDTH)}") + ":",
        "",
        "| ranks | version | ms per step | transfers alone, ms | exposed, ms | hidden |",
        "|---|---|---|---|---|---|",
        *prefetch_table(options.ranks[0], options.rounds),
    ]
    print("\n".join(lines))
    if options.out:
        options.out.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
