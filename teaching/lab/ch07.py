"""Chapter 7's figures and measurements: cut layers, training with a wrong one, overlap."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise
from statistics import median

import torch
import torch.distributed as dist
from matplotlib.figure import Figure
from torch import Tensor
from torch.distributed import ProcessGroup

from minitron import cost
from minitron.comm.differentiable import start_all_reduce
from minitron.config import ModelConfig
from minitron.launch import run
from minitron.launch.slow_network import SlowNetwork
from minitron.measure.ledger import Ledger
from minitron.measure.meter import Meter
from minitron.model.transformer import Transformer, initialize
from minitron.parallel.one_device import OneDevice
from minitron.parallel.tensor.layers import (
    AllReduceExchange,
    TensorParallel,
    apply_tensor_parallel,
)
from minitron.proof.oracle import small_model
from teaching import lab
from teaching.figures import Block, Matrix, cut, rank_lanes
from teaching.lab import counting_rows

# Figures


def two_ways() -> Figure:
    """Draw X A cut by columns and by rows over two ranks."""
    X = Matrix("X", "S x D", 1.2, 1)
    columns = [
        X,
        "x",
        Matrix("A", "D x F/2", 1, 1.8, columns=(0, 1)),
        "=",
        Matrix("Y", "S x F/2", 1.2, 1.8, columns=(0, 1)),
    ]
    rows = [
        Matrix("X", "S x D/2", 1.2, 1, columns=(0, 1)),
        "x",
        Matrix("A", "D/2 x F", 1, 1.8, rows=(0, 1)),
        "=",
        Matrix("Y", "S x F", 1.2, 1.8, sum_of=(0, 1)),
        "all-reduce",
        Matrix("Y", "S x F", 1.2, 1.8),
    ]
    return cut(
        {
            "by columns: each rank computes some columns of Y": columns,
            "by rows: each rank computes a partial sum of Y": rows,
        }
    )


def columns_then_rows() -> Figure:
    """Draw a feed-forward whose first matrix is cut by columns and whose second by rows."""
    return cut(
        {
            "up by columns, down by rows": [
                Matrix("X", "S x D", 1.2, 1),
                "x",
                Matrix("up", "D x F/2", 1, 1.8, columns=(0, 1)),
                "GELU",
                Matrix("hidden", "S x F/2", 1.2, 1.8, columns=(0, 1)),
                "x",
                Matrix("down", "F/2 x D", 1.8, 1, rows=(0, 1)),
                "=",
                Matrix("Y", "S x D", 1.2, 1, sum_of=(0, 1)),
                "all-reduce",
                Matrix("Y", "S x D", 1.2, 1),
            ]
        }
    )


def grouped_queries() -> Figure:
    """Draw four query heads and two key-value heads on four ranks."""
    ranks, pairs, X = (0, 1, 2, 3), ((0, 1), (2, 3)), Matrix("X", "S x D", 1.2, 1)
    return cut(
        {
            "4 query heads on 4 ranks: one each": [
                X,
                "x",
                Matrix("query", "D x K", 1, 1.8, columns=ranks),
                "=",
                Matrix("queries", "S x K", 1.2, 1.8, columns=ranks),
            ],
            "2 key-value heads on 4 ranks: each is held twice": [
                X,
                "x",
                Matrix("key", "D x K", 1, 1.8, columns=pairs),
                "=",
                Matrix("keys", "S x K", 1.2, 1.8, columns=pairs),
            ],
        }
    )


def vocabulary_cut() -> Figure:
    """Draw embedding and head, cut by tokens of the vocabulary over two ranks."""
    x = Matrix("X", "S x D", 1.2, 1)
    return cut(
        {
            "embedding: each rank looks up the tokens it holds": [
                Matrix("tokens, one-hot", "S x V/2", 1.2, 1.8, columns=(0, 1)),
                "x",
                Matrix("embedding", "V/2 x D", 1.8, 1, rows=(0, 1)),
                "=",
                Matrix("X", "S x D", 1.2, 1, sum_of=(0, 1)),
                "all-reduce",
                x,
            ],
            "head: each rank computes the logits of the tokens it holds": [
                x,
                "x",
                Matrix("head", "D x V/2", 1, 1.8, columns=(0, 1)),
                "=",
                Matrix("logits", "S x V/2", 1.2, 1.8, columns=(0, 1)),
                "all-reduce",
                Matrix("loss", "S", 1.2, 0.4),
            ],
        }
    )


# The trap: training with a layer that is wrong

SIZES = {
    "vocab_size": 36,
    "width": 24,
    "num_heads": 12,
    "num_kv_heads": 12,
    "ffn_width": 96,
    "max_sequence_length": 12,
}
small_gpt = partial(small_model, "gpt", **SIZES)
small_llama = partial(small_model, "llama", **SIZES | {"num_kv_heads": 2})

Apply = Callable[[torch.nn.Module, ProcessGroup], TensorParallel]


def loss_of(model: torch.nn.Module, parallel: OneDevice, rows: Tensor) -> Tensor:
    """Return the mean loss over the targets of `rows` (B, S+1)."""
    tokens, targets = rows[:, :-1], rows[:, 1:]
    return parallel.summed_loss(model(tokens), targets) / targets.numel()


def train(group: ProcessGroup, apply: Apply, num_steps: int = 20) -> tuple[list[float], Tensor]:
    """Return each step's loss, and at the end the parameters that every rank holds in full."""
    model, losses = small_gpt(), []
    initialize(model, seed=0)
    parallel = apply(model, group)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for step in range(num_steps):
        optimizer.zero_grad()
        loss = loss_of(model, parallel, counting_rows(step, 16, 9, 36))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    replicated = [
        parameter.detach().flatten()
        for name, parameter in model.named_parameters()
        if parallel.placements[name].count == 1
    ]
    return losses, torch.cat(replicated)


def report(*applies: Apply, num_ranks: int = 2) -> None:
    """Train 20 steps with the package and with each of `applies`; print what one would look at."""
    print("loss at step               1           2       20    ranks agree")
    for apply in (apply_tensor_parallel, *applies):
        losses, replicated = zip(*run(train, num_ranks, apply, watch=False), strict=True)
        agree = all(torch.equal(replicated[0], other) for other in replicated)
        name = "correct" if apply is apply_tensor_parallel else apply.__name__
        print(
            f"{name:15} {losses[0][0]:12.6f} {losses[0][1]:11.6f} {losses[0][-1]:8.2f}    {agree}"
        )


def verdict(apply: Apply, num_ranks: int, make_model: Callable = small_gpt) -> str:
    """Return what the oracle says of a layer cut by `apply`."""
    return lab.verdict(apply, num_ranks, make_model, vocabulary=36, sequence=12)


# What is sent and held

B, S, WIDTH = 2, 48, 96


def ranks(count: int) -> str:
    """Return "1 rank", "2 ranks"."""
    return "1 rank" if count == 1 else f"{count} ranks"


def shape_of(num_layers: int) -> ModelConfig:
    return ModelConfig("gpt", 192, S, num_layers, WIDTH, 12, 12, 384)


def measured_step(group: ProcessGroup, num_layers: int) -> tuple[dict[str, int], list]:
    """Return the bytes held when activations peak, and the calls of one step."""
    rows = torch.randint(192, (B, S + 1), generator=torch.Generator().manual_seed(0))
    model = Transformer(shape_of(num_layers))
    initialize(model, seed=0)
    parallel = OneDevice(model) if group.size() == 1 else apply_tensor_parallel(model, group)

    def step() -> None:
        loss_of(model, parallel, rows).backward()
        parallel.finish()

    step()  # gradients exist from here on
    with Meter(model) as meter:
        step()
    with Ledger() as ledger:
        step()
    return max(meter.timeline, key=lambda m: m.bytes["activation"]).bytes, ledger.calls


def sent_per_block(num_ranks: int) -> tuple[list[int], list[int]]:
    """Measure the bytes each rank sends for a block, and for embedding, head and loss together."""
    one, three = (
        [
            sum(call.sent for call in calls)
            for _, calls in run(measured_step, num_ranks, layers, watch=False)
        ]
        for layers in (1, 3)
    )
    block = [(b - a) // 2 for a, b in zip(one, three, strict=True)]
    return block, [a - b for a, b in zip(one, block, strict=True)]


# Overlap in the backward pass

WIDE = ModelConfig("gpt", 256, 128, 1, 768, 4, 4, 3072)
TOKENS = 512
ROWS_OF_WEIGHT = {"up": 3072 // 2, "query, key, value": 3 * 768 // 2, "head": 256 // 2}
"""Rows of each weight on one of two ranks, whose gradient is computed during an all-reduce."""


class WaitsAtOnce(AllReduceExchange):
    """Waits for the sum of the input gradients before it computes anything else."""

    def start_reduce(self, grad_partial: Tensor) -> Callable[[], Tensor]:
        total = super().start_reduce(grad_partial)()
        return lambda: total


def weight_gradient_seconds(group: ProcessGroup) -> dict[str, float]:
    """Return the median time of the matmul that gives each weight's gradient, on its own."""
    times: dict[str, list[float]] = {name: [] for name in ROWS_OF_WEIGHT}
    for name, num_rows in 10 * [*ROWS_OF_WEIGHT.items()]:
        grad, x = torch.ones(TOKENS, num_rows), torch.ones(TOKENS, 768)
        start = time.perf_counter()
        grad.T @ x
        times[name].append(time.perf_counter() - start)
    return {name: median(seconds) for name, seconds in times.items()}


def backward_steps(
    group: ProcessGroup, exchange: type[AllReduceExchange], bandwidth: float, num_steps: int = 5
) -> list[tuple[list, list]]:
    """Return the backward pass's calls and compute spans of several steps, after a first one."""
    rows = torch.randint(256, (4, 129), generator=torch.Generator().manual_seed(0))
    model, steps = Transformer(WIDE), []
    initialize(model, seed=0)
    parallel = TensorParallel(model, exchange(group))
    for _ in range(num_steps + 1):
        dist.barrier(group)
        with SlowNetwork(0.0, bandwidth), Ledger() as ledger:
            loss_of(model, parallel, rows).backward()
        steps.append((backward_of(ledger.calls), backward_of(ledger.spans)))
    return steps[1:]


def backward_of(events: Sequence) -> list:
    """Return the calls or spans of the backward pass."""
    return [event for event in events if event.phase == "backward"]


def standstill(calls: Sequence, spans: Sequence, transfer: float) -> float:
    """Return the seconds the backward pass waits for the link, without waiting for a late rank."""
    total = 0.0
    for call, (before, after) in zip(calls, pairwise(spans), strict=True):
        late = max(0.0, call.finished - call.started - transfer)
        total += max(0.0, after.start - before.end - late)
    return total


def compute_and_network(name: str, events: tuple[Sequence, Sequence]) -> dict[str, list[Block]]:
    """Return lanes for `timeline` from one rank's calls and spans.

    The transfers of a figure are all alike, so none is named.
    """
    compute, network = rank_lanes(*([each] for each in events)).values()
    unnamed = [replace(block, label=" ") for block in network]
    return {f"{name}: compute": compute, f"{name}: network": unnamed}


# Async tensor parallelism: a layer in chunks


def row_parallel_in_chunks(
    x: Tensor, weight: Tensor, num_chunks: int, group: ProcessGroup
) -> Tensor:
    """Return a row-parallel layer's output, all-reduced in chunks of tokens.

    x is (tokens, K/t), weight (D, K/t), the output (tokens, D). Each chunk's all-reduce travels
    while the next chunk is computed.
    """
    waits = [start_all_reduce(rows @ weight.T, group) for rows in x.chunk(num_chunks)]
    return torch.cat([wait() for wait in waits])


def row_parallel_seconds(
    group: ProcessGroup, num_chunks: int, bandwidth: float, repeats: int = 9
) -> list[float]:
    """Time `row_parallel_in_chunks` on an emulated network `repeats` times, after a first time."""
    x, weight = torch.ones(TOKENS, 1536), torch.ones(768, 1536)
    times = []
    for _ in range(repeats + 1):
        dist.barrier(group)
        with SlowNetwork(0.0, bandwidth):
            start = time.perf_counter()
            row_parallel_in_chunks(x, weight, num_chunks, group)
            times.append(time.perf_counter() - start)
    return times[1:]


def row_parallel_events(
    group: ProcessGroup, num_chunks: int, bandwidth: float, repeats: int = 9
) -> tuple[list, list]:
    """Return calls and compute spans of the fastest of `repeats` runs, after a first one."""
    x, weight, runs = torch.ones(TOKENS, 1536), torch.ones(768, 1536), []
    for _ in range(repeats + 1):
        dist.barrier(group)
        with SlowNetwork(0.0, bandwidth), Ledger() as ledger, ledger.phase("matmul"):
            row_parallel_in_chunks(x, weight, num_chunks, group)
        runs.append((ledger.calls, ledger.spans))
    return min(runs[1:], key=lambda events: events[1][-1].end - events[1][0].start)


def fastest_chunks(seconds: Mapping[int, Sequence[float]]) -> str:
    """Say which number of chunks is fastest, and whether all its runs beat those of one chunk."""
    best = min(seconds, key=lambda chunks: median(seconds[chunks]))
    if best == 1:
        return "chunks do not pay on this machine: each costs more than it hides"
    if max(seconds[best]) < min(seconds[1]):
        ratio = median(seconds[1]) / median(seconds[best])
        return f"{best} chunks are fastest, {ratio:.2f} times as fast as 1; the spreads are apart"
    return f"{best} chunks have the lowest median, but their spread overlaps with that of 1"


def row_parallel_compute_seconds(group: ProcessGroup) -> float:
    """Return the median time of the matmul alone, while the other ranks do the same."""
    x, weight, times = torch.ones(TOKENS, 1536), torch.ones(768, 1536), []
    for _ in range(10):
        dist.barrier(group)
        start = time.perf_counter()
        x @ weight.T
        times.append(time.perf_counter() - start)
    return median(times)


def all_reduce_bytes() -> int:
    """Return the bytes that one all-reduce of the layer's output moves per rank, float32."""
    return cost.ring_all_reduce_volume(TOKENS * 768, 4, 2, 0).sent
