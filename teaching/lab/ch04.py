"""Chapter 4's measurements: three trainings, a step on an emulated network, a sweep of buckets."""

import time
from collections.abc import Callable, Sequence
from statistics import quantiles
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from minitron import cost
from minitron.config import ModelConfig, TrainConfig
from minitron.launch import run
from minitron.launch.slow_network import SlowNetwork
from minitron.measure.ledger import Ledger
from minitron.model.transformer import Transformer, initialize
from minitron.parallel.data.ddp import (
    FIRST_BUCKET_BYTES,
    apply_bucketed_data_parallel,
    assign_buckets,
)
from minitron.step import make_optimizer, train_step
from teaching.lab import MEASURING, counting_rows, loss_of
from teaching.lab.gpu_models import OVERLAP
from teaching.lab.gpu_records import FOLDER, newest, rows_of
from teaching.overlap import Compute, step_lanes, transfers

Apply = Callable[[nn.Module, ProcessGroup], object]
Version = tuple[Callable, Callable]
"""What installs hooks before the training, and what runs after each backward pass."""


# The trap: three versions of averaging


def nothing(model: nn.Module, group: ProcessGroup) -> None:
    """Do not hook anything, or do not finish anything."""


def train(group: ProcessGroup, hook: Callable, finish: Callable, num_steps: int) -> list[float]:
    """Train a table of 64 tokens to count in sevens; return this rank's losses."""
    torch.manual_seed(0)
    model, losses = nn.Sequential(nn.Embedding(64, 32), nn.Linear(32, 64)), []
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    hook(model, group)
    for step in range(num_steps):
        optimizer.zero_grad()
        loss = loss_of(model, counting_rows(step, 16, 25, 64)[group.rank() :: group.size()])
        loss.backward()
        finish(model, group)
        optimizer.step()
        losses.append(loss.item())
    return losses


def train_all(group: ProcessGroup, versions: Sequence[Version], num_steps: int = 60) -> Tensor:
    """Return this rank's losses (version, step)."""
    return torch.tensor([train(group, *version, num_steps) for version in versions])


# A step on an emulated network

WIDE = ModelConfig("gpt", 256, 128, 4, 256, 4, 4, 1024, tied_embedding=False)


def start(seed: int = 0) -> tuple[Transformer, torch.optim.Optimizer, list]:
    """Return a model, its optimizer, and one micro-batch of 512 tokens."""
    model = Transformer(WIDE)
    initialize(model, seed)
    rows = torch.randint(256, (4, 129), generator=torch.Generator().manual_seed(seed))
    optimizer = make_optimizer(model, TrainConfig(), torch.device("cpu"))
    return model, optimizer, [(rows[:, :-1], rows[:, 1:])]


def gradient_bytes() -> list[int]:
    return [parameter.nbytes for parameter in start()[0].parameters()]


def compute_alone(group: ProcessGroup, num_steps: int = 5) -> Compute:
    """Return the compute of the step with the median duration, of steps without communication."""
    model, optimizer, micro_batches = start()
    number = {p: index for index, p in enumerate(model.parameters())}
    ready, steps = [0.0] * len(number), []
    for each in number:
        each.register_post_accumulate_grad_hook(
            lambda p: ready.__setitem__(number[p], time.perf_counter()))
    for _ in range(num_steps + 1):
        with Ledger() as ledger:
            train_step(model, optimizer, micro_batches, 1e-3, 1.0)
        begin, end = ledger.spans[0].start, ledger.spans[-1].end
        forward = ledger.spans[0].end - begin
        steps.append(Compute(forward, [at - begin for at in ready], end - max(ready)))
    steps = sorted(steps[1:], key=lambda step: step.backward + step.optimizer)
    return steps[len(steps) // 2]


class Network(NamedTuple):
    """An emulated network between two ranks."""

    latency: float
    """Seconds per message."""
    bandwidth: float
    """Bytes per second and direction."""

    @classmethod
    def for_machine(cls, compute: Compute, sizes: list[int]) -> "Network":
        """Choose the network by this machine's speed, so that the pictures look alike anywhere.

        All gradients' bytes take 60 % of the backward pass; the latencies of all gradients, sent
        one by one, take as long as the backward pass.
        """
        backward = compute.backward - compute.forward
        return cls(round(backward / (2 * len(sizes)), 5), round(sum(sizes) / (0.6 * backward), -6))

    def predict(
        self, compute: Compute, buckets: list[list[int]], overlapped: bool = True
    ) -> list[tuple[float, float]]:
        """Return when each bucket travels; without overlap all gradients are ready at the end."""
        sizes = gradient_bytes()
        ready = compute.ready if overlapped else [compute.backward] * len(sizes)
        return transfers(ready, sizes, buckets, 2, self.latency, self.bandwidth)


def buckets_of(bucket_bytes: int) -> list[list[int]]:
    """Return the package's buckets: a small first one, then the others."""
    sizes = gradient_bytes()
    first = assign_buckets(sizes, min(FIRST_BUCKET_BYTES, bucket_bytes))[0]
    return [first, *assign_buckets(sizes[: -len(first)], bucket_bytes)]


def recorded_step() -> tuple[int, float]:
    """Return the bytes of a recorded step's gradients, with 16 bits each, and its backward pass."""
    [row] = rows_of(newest("overlap", FOLDER), lambda row: row["case"] == "plain step")
    backward = 1e-3 * (row["update_start_ms"] - row["forward_end_ms"])
    return 2 * cost.num_parameters(OVERLAP.model), backward


class Step(NamedTuple):
    """A step of all ranks: what the ledgers saw, and the seconds of the slowest rank."""

    calls: list[list]
    spans: list[list]
    seconds: float


def slow_steps(
    group: ProcessGroup, applies: Sequence[Apply], network: Network, num_steps: int
) -> list[list[tuple[list, list, float]]]:
    """Return, for each of `applies`, calls, spans and seconds of several steps of this rank.

    They take turns, so that whatever else the machine does meets all of them.
    """
    parts = []
    for apply in applies:
        model, optimizer, micro_batches = start()
        parts.append((model, optimizer, micro_batches, apply(model, group)))
    steps: list[list] = [[] for _ in applies]
    for _ in range(num_steps + 1):
        for (model, optimizer, micro_batches, parallel), kept in zip(parts, steps, strict=True):
            dist.barrier(group)
            begin = time.perf_counter()
            with SlowNetwork(*network), Ledger() as ledger:
                train_step(model, optimizer, micro_batches, 1e-3, 1.0, parallel)
            kept.append((ledger.calls, ledger.spans, time.perf_counter() - begin))
    return [kept[1:] for kept in steps]


def measure(applies: Sequence[Apply], network: Network, num_steps: int = 5) -> list[list[Step]]:
    """Return, for each of `applies`, several steps on two ranks, the fastest first."""
    ranks = run(slow_steps, 2, applies, network, num_steps, timeout=MEASURING, watch=False)
    found = []
    for by_rank in zip(*ranks, strict=True):
        steps = []
        for each in zip(*by_rank, strict=True):
            calls, spans, seconds = zip(*each, strict=True)
            steps.append(Step(list(calls), list(spans), max(seconds)))
        found.append(sorted(steps, key=lambda step: step.seconds))
    return found


def spread(steps: Sequence[Step]) -> tuple[float, float, float]:
    """Return the quartiles of the steps in milliseconds: half of them lie in between."""
    low, middle, high = quantiles((1e3 * step.seconds for step in steps), method="inclusive")
    return low, middle, high


def end_of(compute: Compute, sent: list[tuple[float, float]]) -> float:
    """Return when the predicted step ends, in milliseconds."""
    return step_lanes(compute, sent)["predicted compute"][-1].end


def sized(bucket_bytes: int) -> Apply:
    return lambda model, group: apply_bucketed_data_parallel(
        model, group, bucket_bytes=bucket_bytes)


def told_apart(spreads: dict[str, tuple[float, float, float]]) -> str:
    """Say which variant was the fastest, and which others these repeats cannot tell from it.

    Two variants are told apart if the median of neither lies between the other's quartiles.
    """
    best = min(spreads, key=lambda name: spreads[name][1])
    low, middle, high = spreads[best]
    alike = [name for name, (least, median_, most) in spreads.items()
             if name != best and (median_ <= high or least <= middle)]
    slower = [name for name in spreads if name != best and name not in alike]
    text = f"{best} was the fastest"
    if alike:
        text += f"; these repeats cannot tell it from {_listed(alike)}"
    if slower:
        text += f"; {_listed(slower)} {'was' if len(slower) == 1 else 'were'} slower"
    return text + "."


def _listed(names: list[str]) -> str:
    return " and ".join(filter(None, [", ".join(names[:-1]), names[-1]]))
