"""Chapter 6's measurements: the toy's judge, a clipped training, the meter's step."""

from collections.abc import Callable, Sequence
from functools import partial

import torch
from matplotlib.figure import Figure
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.utils.flop_counter import FlopCounterMode

from minitron import cost
from minitron.comm.mesh import make_mesh
from minitron.config import ModelConfig
from minitron.cost.sharding import (
    hybrid_volume,
    step_collectives,
    zero_bytes,
    zero_holdings,
    zero_volume,
)
from minitron.launch import run
from minitron.measure.ledger import Ledger
from minitron.measure.meter import Meter
from minitron.model.transformer import Transformer, initialize
from minitron.parallel.data.ddp import apply_bucketed_data_parallel
from minitron.parallel.data.fsdp import FullyShardedDataParallel, apply_fsdp
from minitron.parallel.data.zero import apply_zero1, apply_zero2
from minitron.proof.difference import first_difference
from minitron.proof.oracle import sample_batches, small_llama, trainings
from teaching.figures import Held, holdings
from teaching.lab import MEASURING, counting_rows, loss_of

Apply = Callable[[nn.Module, ProcessGroup], object]


def stages_of_llama(num_ranks: int = 4) -> Figure:
    """Draw what each of four ranks holds of Llama 3.2 1B at ZeRO-0 to 3, by the formula."""
    P = cost.num_parameters(cost.PUBLISHED["Llama 3.2 1B"])
    full, rows = zero_holdings(P, 1, 0), {}
    for stage in range(4):
        held = zero_holdings(P, num_ranks, stage)
        rows[f"ZeRO-{stage}"] = {kind: Held(held[kind], held[kind] / full[kind]) for kind in full}
    return holdings(rows)


# The toy


def bytes_kept(tensors: Sequence[Tensor]) -> int:
    """Return the bytes of the storages that these tensors keep alive."""
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    return sum(storages.values())


def judged(group: ProcessGroup, zero: Callable) -> tuple[Tensor, dict[str, int], int]:
    """Return weights, bytes kept by kind, and bytes sent per step (second and third)."""
    sent = []
    for num_steps in (1, 3):
        with Ledger() as ledger:
            kept = zero(group, num_steps)
        sent.append(ledger.bytes_sent())
    weights = torch.cat([t.view(-1) for t in kept["parameter"]])
    return weights, {k: bytes_kept(ts) for k, ts in kept.items()}, (sent[1] - sent[0]) // 2


def sent_by_formula(stage: int, weights: Tensor, num_ranks: int, rank: int) -> int:
    """Return the bytes that a rank sends per step of the chapter's ZeRO by hand.

    ZeRO-1 shards all weights (L, D, D) as one tensor, ZeRO-2 and ZeRO-3 shard each layer.
    """
    sizes = [weights.numel()] if stage == 1 else [layer.numel() for layer in weights]
    return sum(zero_volume(size, weights.itemsize, num_ranks, rank, stage).sent for size in sizes)


def report(zero: Callable, stage: int, start: Tensor, right: Tensor, num_ranks: int = 4) -> Figure:
    """Print each rank's error, and its traffic beside the formula's; draw what it keeps.

    `start` and `right` are the weights (L, D, D) before the training and those that one process
    ends with. After it, a rank holds all of them, or its part of each layer.
    """
    picture, full = {}, start.nbytes
    print("rank   error   bytes sent     formula   sent in units of P")
    for rank, (weights, kept, sent) in enumerate(run(judged, num_ranks, zero)):
        parts = right.flatten(1).tensor_split(num_ranks, dim=1)
        expected = right if weights.numel() == right.numel() else parts[rank]
        error = (weights - expected.reshape(-1)).abs().max()
        formula = sent_by_formula(stage, start, num_ranks, rank)
        print(f"{rank:4} {error:7.0e} {sent:12,} {formula:11,} {sent / full:20.4f}")
        shares = {"parameter": full, "gradient": full, "optimizer state": 2 * full}
        picture[f"rank {rank}"] = {
            kind: Held(kept[kind], kept[kind] / shares[kind]) for kind in kept
        }
    return holdings(picture)


# The trap: a training that clips


def adamw(parameters) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=3e-3)


def train(
    group: ProcessGroup, apply: Apply, num_steps: int = 20
) -> tuple[list[tuple[float, float]], Tensor]:
    """Return each step's loss and norm as this rank sees it, and the weights at the end."""
    torch.manual_seed(0)
    model, seen = small_llama(), []
    parallel = apply(model, group)
    optimizer = parallel.shard(adamw(model.parameters()))
    for step in range(num_steps):
        optimizer.zero_grad()
        loss = loss_of(model, counting_rows(step, 16, 8, 29)[group.rank() :: group.size()])
        loss.backward()
        parallel.finish()
        optimizer.step()
        seen.append((parallel.mean(loss).item(), parallel.norm.item()))
    return seen, torch.cat([p.detach().flatten() for p in model.parameters()])


def compare(apply: Apply, num_ranks: int) -> str:
    """Return what differs first from the same code on one rank, with SGD."""
    arguments = (apply, small_llama, sample_batches((9, 9, 7)), 1)
    alone, by_rank = (run(trainings, size, *arguments) for size in (1, num_ranks))
    found = first_difference(alone[0]["SGD"], [records["SGD"] for records in by_rank])
    return str(found or "the same training")


# What is held and sent

FP32 = cost.RECIPES["fp32"]
STAGES: dict[str, Apply] = {
    "ZeRO-0": partial(apply_bucketed_data_parallel, bucket_bytes=400_000),  # about a block
    "ZeRO-1": partial(apply_zero1, bucket_bytes=400_000),
    "ZeRO-2": partial(apply_zero2, bucket_bytes=400_000),
    "ZeRO-3": apply_fsdp,
}


def shape_of(num_layers: int) -> ModelConfig:
    return ModelConfig("gpt", 64, 16, num_layers, 96, 4, 4, 384)


def take_step(model: nn.Module, parallel, optimizer, *micro_batches: Tensor) -> None:
    """Take one training step on this rank's micro-batches."""
    *others, last = micro_batches
    optimizer.zero_grad()
    for rows in others:
        with parallel.no_sync():
            loss_of(model, rows).backward()
    loss_of(model, last).backward()
    parallel.finish()
    optimizer.step()


def metered(group: ProcessGroup, apply: Apply, num_layers: int) -> tuple[Meter, Callable]:
    """Meter a second step, of two micro-batches; return the meter and a call for a third."""
    model = Transformer(shape_of(num_layers))
    initialize(model, seed=0)
    parallel = apply(model, group)
    optimizer = parallel.shard(adamw(model.parameters()))
    rows = torch.randint(64, (8, 9), generator=torch.Generator().manual_seed(0))
    own = rows[group.rank() :: group.size()]
    step = partial(take_step, model, parallel, optimizer)
    step(own)
    with Meter(model, optimizer) as meter:
        step(*own.split(1))
    return meter, partial(step, own)


def measured(group: ProcessGroup, apply: Apply) -> tuple[dict[str, int], int, list, int]:
    """Return bytes held by kind, bytes at the peak, the calls and the FLOPs of one step.

    In ZeRO-3 the optimizer owns the sharded weights, and the meter calls them "master weight".
    """
    meter, step = metered(group, apply, num_layers=6)
    held = meter.now() | {"gradient": max(moment.bytes["gradient"] for moment in meter.timeline)}
    own = sum(
        t.bytes
        for t in meter.peak.tensors
        if (t.name, t.category) == ("master weight", "optimizer state")
    )
    held = {
        "parameter": held["parameter"] + own,
        "gradient": held["gradient"],
        "optimizer state": held["optimizer state"] - own,
    }
    with Ledger() as ledger, FlopCounterMode(display=False) as flops:
        step()
    return held, meter.peak.total, ledger.calls, flops.get_total_flops()


def peaks(group: ProcessGroup, apply: Apply, layers: Sequence[int]) -> list[int]:
    return [metered(group, apply, count)[0].peak.total for count in layers]


def fullest(apply: Apply, *layers: int) -> list[int]:
    """Return the bytes at the peak of the fullest of four ranks, for each number of layers."""
    ranks = run(peaks, 4, apply, layers, timeout=MEASURING, watch=False)
    return list(map(max, zip(*ranks, strict=True)))


def predict_layers(
    stage: int, apply: Apply, limit: float, num_measured: int = 3
) -> tuple[int, float]:
    """Predict the most layers that stay below `limit` bytes per rank, of four, and their peak.

    Formulas give the training state and the activations of a micro-batch, one sequence; what comes
    on top is measured with `num_measured` layers, and taken to be the same with any number.
    """

    def known(layers: int) -> int:
        state = zero_bytes(cost.num_parameters(shape_of(layers)), 4, stage, FP32)
        return state + layers * cost.activation_bytes_per_layer(shape_of(layers), 1, 8, 4)

    on_top = fullest(apply, num_measured)[0] - known(num_measured)
    layers = max(count for count in range(1, 50) if known(count) + on_top <= limit)
    return layers, known(layers) + on_top


# Hybrid sharding


def hybrid_step(group: ProcessGroup, grid: tuple[int, int]) -> tuple[dict[str, int], int]:
    """Return the bytes that one FSDP step sends by axis, and of training state at rest.

    `grid` is (replicas, shards).
    """
    mesh = make_mesh("cpu", replicas=grid[0], dp=grid[1])
    model = Transformer(shape_of(4))
    initialize(model, seed=0)
    parallel = apply_fsdp(model, mesh.group("dp"), replicas=mesh.group("replicas"))
    optimizer = parallel.shard(adamw(model.parameters()))
    rows = torch.randint(64, (8, 9), generator=torch.Generator().manual_seed(0))
    own = rows[group.rank() :: group.size()]
    take_step(model, parallel, optimizer, own)
    with Ledger() as ledger:
        take_step(model, parallel, optimizer, own)
    sent = {
        axis: sum(call.sent for call in ledger.calls if call.axis == axis)
        for axis in ("dp", "replicas")
    }
    state = sum(tensor.nbytes for group in optimizer.param_groups for tensor in group["params"])
    return sent, state


def between_nodes(
    grid: tuple[int, int], by_rank: Sequence[dict[str, int]], ranks_per_node: int
) -> int:
    """Return the bytes that all ranks send to another node in rings over `grid`'s axes.

    `by_rank` has the bytes that each rank sends along "dp" and "replicas". In a ring, a rank sends
    all of them to the next one.
    """
    replicas, shards = grid
    total = 0
    for rank, sent in enumerate(by_rank):
        replica, shard = divmod(rank, shards)
        following = {
            "dp": replica * shards + (shard + 1) % shards,
            "replicas": (replica + 1) % replicas * shards + shard,
        }
        total += sum(
            sent[axis]
            for axis, other in following.items()
            if other // ranks_per_node != rank // ranks_per_node
        )
    return total


def hybrid_formula(grid: tuple[int, int]) -> dict[str, int]:
    """Return the bytes sent by rank 0 in a step, by axis (Zhao et al. 2023, section 3.2.2)."""
    P = cost.num_parameters(shape_of(4))
    volumes = hybrid_volume(P, 4, 4, grid, (0, 0), step_collectives(3, 1))
    return {"dp": volumes["shards"].sent, "replicas": volumes["replicas"].sent}


def apply_hybrid(model: nn.Module, group: ProcessGroup) -> FullyShardedDataParallel:
    """Shard over pairs of ranks, and replicate over the pairs."""
    mesh = make_mesh("cpu", replicas=group.size() // 2, dp=2)
    return apply_fsdp(model, mesh.group("dp"), replicas=mesh.group("replicas"))
