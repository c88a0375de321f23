"""Chapter 4's measurements: three trainings, a step on an emulated network, a sweep of buckets."""

import time
from collections.abc import Callable, Sequence
from functools import partial
from statistics import fmean, quantiles
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
from minitron.parallel.data.ddp import apply_bucketed_data_parallel
from minitron.step import make_optimizer, train_step
from teaching.claims import claim
from teaching.figures import Held
from teaching.lab import MEASURING, counting_rows, loss_of
from teaching.lab.gpu_models import OVERLAP
from teaching.lab.gpu_records import FOLDER, device_of, newest, rows_of
from teaching.overlap import (
    Compute,
    compute_in_proportion,
    exposed_seconds,
    gradient_sizes,
    in_buckets,
    step_lanes,
    transfers,
)

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


# What each rank holds


def held_by_ranks(
    model: ModelConfig, num_ranks: int, sequence_length: int
) -> dict[str, dict[str, Held]]:
    """Return rows for `holdings`: a batch of one sequence per rank, plain data parallelism."""
    recipe, num_parameters = cost.RECIPES["bf16"], cost.num_parameters(model)
    state = {
        "parameter": recipe.parameter,
        "gradient": recipe.gradient,
        "optimizer state": recipe.master + recipe.optimizer_state,
    }
    row = {kind: Held(num_bytes * num_parameters) for kind, num_bytes in state.items()}
    activations = cost.activation_bytes(model, 1, sequence_length)
    row["activation"] = Held(activations, 1 / num_ranks)
    return {f"rank {rank}": row for rank in range(num_ranks)}


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


class Trial:
    """A model in training that notes when each of its gradients is complete."""

    def __init__(self, group: ProcessGroup, apply: Apply | None = None):
        model, optimizer, micro_batches = start()
        self.ready = [0.0] * len(list(model.parameters()))
        for index, parameter in enumerate(model.parameters()):
            parameter.register_post_accumulate_grad_hook(partial(self._note, index))
        parallel = [] if apply is None else [apply(model, group)]
        self._step = partial(train_step, model, optimizer, micro_batches, 1e-3, 1.0, *parallel)

    def _note(self, index: int, parameter: nn.Parameter) -> None:
        self.ready[index] = time.perf_counter()

    def step(self) -> tuple[Ledger, Compute]:
        """Run a step; return what its ledger saw, and when its gradients were complete."""
        with Ledger() as ledger:
            self._step()
        begin, end = ledger.spans[0].start, ledger.spans[-1].end
        backward = next(span.start for span in ledger.spans if span.phase == "backward")
        ready = [at - begin for at in self.ready]
        return ledger, Compute(backward - begin, ready, end - max(self.ready))


def compute_alone(group: ProcessGroup, num_steps: int = 5) -> Compute:
    """Return the compute of the median of some steps without communication."""
    trial = Trial(group)
    return median_compute([trial.step()[1] for _ in range(num_steps + 1)][1:])


def median_compute(steps: Sequence[Compute]) -> Compute:
    """Return the step with the median duration."""
    return sorted(steps, key=lambda step: step.backward + step.optimizer)[len(steps) // 2]


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
    return in_buckets(gradient_bytes(), bucket_bytes)


# A step that was recorded on a GPU


def recorded_step() -> tuple[list[int], Compute]:
    """Return the bytes of a recorded step's gradients, with 16 bits each, and its compute.

    The start and the end of the backward pass are recorded. In between, the gradients are complete
    in proportion to their sizes; the embedding, which multiplies nothing, takes no time.
    """
    [row] = rows_of(newest("overlap", FOLDER), lambda row: row["case"] == "plain step")
    start, end = 1e-3 * row["forward_end_ms"], 1e-3 * row["update_start_ms"]
    sizes = gradient_sizes(OVERLAP.model)
    return sizes, compute_in_proportion([0, *sizes[1:]], start, end - start)


def recorded_times() -> dict[str, float]:
    """Return milliseconds of the recorded step, each beside what was expected.

    "Other kernels" are those of neither a matrix multiplication nor the optimizer. By their names
    attention's kernels are counted as multiplications; the planner has one time for them and for
    the copies and casts around them.
    """
    record = newest("overlap", FOLDER)
    [row] = rows_of(record, lambda row: row["case"] == "plain step")
    device = device_of(record)
    parts = OVERLAP.estimate(device, "bf16-autocast").parts
    compute = sum(parts[kind] for kind in ("matmul", "attention", "elementwise"))
    flops = OVERLAP.num_tokens * cost.backward_flops_per_token(
        OVERLAP.model, OVERLAP.sequence_length
    )
    return {
        "backward pass, recorded": row["update_start_ms"] - row["forward_end_ms"],
        "  at 40 % of the peak": 1e3 * flops / (0.4 * device.bf16_flops),
        "  predicted by the planner": 1e3 * compute * 2 / 3,
        "other kernels of the step, recorded": row["elementwise_ms"] + row["copy_ms"],
        "  planned, attention included": 1e3 * (parts["attention"] + parts["elementwise"]),
    }


def tokens_to_hide(
    model: ModelConfig, num_ranks: int, latency: float, bandwidth: float, speed: float
) -> dict[str, float]:
    """Return how many tokens per rank make the backward pass as long as the all-reduces.

    First by the rule: 4 P FLOPs per token at `speed`, and 2 x 2 P bytes. Then with one correction
    after the other. Attention's FLOPs are those of sequences of 8,192 tokens.
    """
    num_parameters, sizes = cost.num_parameters(model), gradient_sizes(model)
    travel = 2 * sum(sizes) / bandwidth
    num_bytes, latencies = bytes_and_latency(sizes, num_ranks, latency, bandwidth)
    flops = 4 * num_parameters
    attention = 2 * model.num_layers * 4 * 8192 * model.width
    exact = cost.backward_flops_per_token(model, 8192)
    return {
        "the rule": travel * speed / flops,
        "bytes x (N-1)/N": num_bytes * speed / flops,
        "attention": num_bytes * speed / (flops + attention),
        "input embedding": num_bytes * speed / exact,
        "latency": (num_bytes + latencies) * speed / exact,
    }


def bytes_and_latency(
    sizes: list[int], num_ranks: int, latency: float, bandwidth: float
) -> tuple[float, float]:
    """Return the seconds that the buckets' all-reduces take for their bytes, and for latency."""
    num_bytes, num_buckets = sum(sizes), len(in_buckets(sizes))
    return (
        cost.ring_all_reduce_seconds(num_bytes, num_ranks, 0, bandwidth),
        num_buckets * cost.ring_all_reduce_seconds(0, num_ranks, latency, bandwidth),
    )


# The measured steps


class Step(NamedTuple):
    """A step of all ranks: what the ledgers saw, and seconds."""

    calls: list[list]
    spans: list[list]
    seconds: float
    """Of the slowest rank."""
    backward: float
    """From the forward pass to the last gradient, mean of the ranks."""
    exposed: float
    """From the last gradient until all of them have been reduced, mean of the ranks."""
    slowest: float
    """The backward pass of the rank that takes longest for it."""


def exposed_in(ledger: Ledger, backward_end: float) -> float:
    """Return how long gradients are on their way after the end of the backward pass, seconds.

    The number of tokens and the loss, 8 bytes or fewer, are no gradients.
    """
    reduced = max(call.finished for call in ledger.calls if call.payload > 8)
    return max(0.0, reduced - backward_end)


def slow_steps(
    group: ProcessGroup, applies: Sequence[Apply], network: Network, num_steps: int
) -> tuple[Compute, list[list[tuple]]]:
    """Return the compute of a step that sends nothing, and for each of `applies` several steps.

    They take turns, so that whatever else the machine does meets all of them. A step of this rank
    is its calls, spans, seconds, the seconds of its backward pass, and those exposed after it.
    """
    alone, trials = Trial(group), [Trial(group, apply) for apply in applies]
    computes: list[Compute] = []
    steps: list[list[tuple]] = [[] for _ in applies]
    for _ in range(num_steps + 1):
        dist.barrier(group)
        computes.append(alone.step()[1])
        for trial, kept in zip(trials, steps, strict=True):
            dist.barrier(group)
            begin = time.perf_counter()
            with SlowNetwork(*network):
                ledger, compute = trial.step()
            seconds = time.perf_counter() - begin
            kept.append(
                (
                    ledger.calls,
                    ledger.spans,
                    seconds,
                    compute.backward - compute.forward,
                    exposed_in(ledger, max(trial.ready)),
                )
            )
    return median_compute(computes[1:]), [kept[1:] for kept in steps]


def measure(
    applies: dict[str, Apply], network: Network, num_steps: int = 5
) -> tuple[Compute, dict[str, list[Step]]]:
    """Return a step without communication, and several with each of `applies`, on two ranks.

    The steps of each are sorted, the fastest first.
    """
    ranks = run(
        slow_steps, 2, list(applies.values()), network, num_steps, timeout=MEASURING, watch=False
    )
    computes, by_rank = zip(*ranks, strict=True)
    found = {}
    for name, trials in zip(applies, zip(*by_rank, strict=True), strict=True):
        steps = [_of_all_ranks(each) for each in zip(*trials, strict=True)]
        found[name] = sorted(steps, key=lambda step: step.seconds)
    return computes[0], found


def _of_all_ranks(by_rank: Sequence[tuple]) -> Step:
    calls, spans, seconds, backward, exposed = zip(*by_rank, strict=True)
    longest = max(seconds), fmean(backward), fmean(exposed), max(backward)
    return Step(list(calls), list(spans), *longest)


def median_step(steps: Sequence[Step]) -> Step:
    """Return the step in the middle; they are sorted."""
    return steps[len(steps) // 2]


def spread(steps: Sequence[Step]) -> tuple[float, float, float]:
    """Return the quartiles of the steps in milliseconds: half of them lie in between."""
    low, middle, high = quantiles((1e3 * step.seconds for step in steps), method="inclusive")
    return low, middle, high


def end_of(compute: Compute, sent: list[tuple[float, float]]) -> float:
    """Return when the predicted step ends, in milliseconds."""
    return step_lanes(compute, sent)["predicted compute"][-1].end


def print_steps(
    compute: Compute, sent: dict[str, list[tuple[float, float]]], steps: dict[str, list[Step]]
) -> None:
    """Print the predicted and the measured milliseconds of each version."""
    print("                                  step (ms)        exposed (ms)   backward (ms)")
    print("         calls predicted median (half of 5)  predicted measured  alone measured")
    alone = 1e3 * (compute.backward - compute.forward)
    for name, found in steps.items():
        low, middle, high = spread(found)
        measured = f"{middle:.0f} ({low:.0f} to {high:.0f})"
        step, exposed = median_step(found), 1e3 * exposed_seconds(compute, sent[name])
        print(
            f"{name:8} {len(step.calls[0]):5} {end_of(compute, sent[name]):9.0f} {measured:>18} "
            f"{exposed:10.0f} {1e3 * step.exposed:8.0f} {alone:6.0f} {1e3 * step.backward:8.0f}"
        )


def predict_again(
    network: Network, compute: Compute, steps: Sequence[Step], bucket_bytes: int
) -> float:
    """Predict a step whose backward pass is as long as measured, on the slowest rank; ms."""
    stretch = median_step(steps).slowest / (compute.backward - compute.forward)
    ready = [compute.forward + stretch * (at - compute.forward) for at in compute.ready]
    slower = Compute(compute.forward, ready, compute.optimizer)
    return end_of(slower, network.predict(slower, buckets_of(bucket_bytes)))


def explained(
    spreads: dict[str, tuple[float, float, float]],
    predicted: dict[str, float],
    again: dict[str, float],
    steps: dict[str, list[Step]],
) -> str:
    """Claim that the backward passes got longer beside more buckets, and predict better; ms."""
    first, second = (
        fmean(abs(middle - guess[name]) for name, (_, middle, _) in spreads.items())
        for guess in (predicted, again)
    )
    backward = {name: 1e3 * median_step(found).slowest for name, found in steps.items()}
    most, least = next(iter(backward)), next(reversed(backward))
    return claim(
        second < first and backward[most] > backward[least],
        f"The slower rank's backward pass takes {backward[most]:.0f} ms with {most} and "
        f"{backward[least]:.0f} ms with {least}. Without this the predictions are off by "
        f"{first:.0f} ms on average, with it by {second:.0f} ms.",
    )


def print_buckets(
    compute: Compute,
    predicted: dict[str, float],
    again: dict[str, float],
    steps: dict[str, list[Step]],
) -> None:
    """Print both predictions of each bucket size beside what was measured; ms."""
    print("                                   step (ms)                     backward (ms)")
    print("          buckets predicted  again  median (half of 5)       alone slower rank")
    alone = 1e3 * (compute.backward - compute.forward)
    for name, found in steps.items():
        low, middle, high = spread(found)
        measured, step = f"{middle:.0f} ({low:.0f} to {high:.0f})", median_step(found)
        num_buckets = len(step.calls[0]) - 2  # two send the number of tokens and the loss
        print(
            f"{name:9} {num_buckets:7} {predicted[name]:9.0f} {again[name]:6.0f} "
            f"{measured:>19} {alone:11.0f} {1e3 * step.slowest:11.0f}"
        )


def sized(bucket_bytes: int) -> Apply:
    return lambda model, group: apply_bucketed_data_parallel(
        model, group, bucket_bytes=bucket_bytes
    )


def told_apart(spreads: dict[str, tuple[float, float, float]]) -> str:
    """Say which variant was the fastest, and which others these repeats cannot tell from it.

    Two variants are told apart if the median of neither lies between the other's quartiles.
    """
    best = min(spreads, key=lambda name: spreads[name][1])
    low, middle, high = spreads[best]
    alike = [
        name
        for name, (least, median_, most) in spreads.items()
        if name != best and (median_ <= high or least <= middle)
    ]
    slower = [name for name in spreads if name != best and name not in alike]
    text = f"{best} was the fastest"
    if alike:
        text += f"; these repeats cannot tell it from {_listed(alike)}"
    if slower:
        text += f"; {_listed(slower)} {'was' if len(slower) == 1 else 'were'} slower"
    return text + "."


def _listed(names: list[str]) -> str:
    return " and ".join(filter(None, [", ".join(names[:-1]), names[-1]]))
