"""Chapter 6's prefetch: on an emulated network, measured and predicted; on a GPU, recorded."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from statistics import median

import torch
import torch.distributed as dist
from matplotlib.figure import Figure
from torch import nn
from torch.distributed import ProcessGroup

from minitron import cost
from minitron.config import ModelConfig
from minitron.cost import collective_seconds
from minitron.launch import run
from minitron.launch.slow_network import SlowNetwork
from minitron.measure.ledger import Call, Ledger, Span
from minitron.measure.record import Row
from minitron.model.transformer import Transformer, initialize
from minitron.parallel.data.fsdp import FullyShardedDataParallel, Unit, apply_fsdp
from teaching.figures import Block, ranges, rank_lanes, timeline
from teaching.lab import MEASURING
from teaching.lab.ch06 import Apply, adamw, loss_of
from teaching.lab.gpu_models import OVERLAP
from teaching.lab.gpu_records import FOLDER, device_of, newest, rows_of
from teaching.overlap import hidden_share

WIDE = ModelConfig("gpt", 256, 128, 6, 192, 4, 4, 768)
TOKENS = torch.randint(256, (4, 129), generator=torch.Generator().manual_seed(0))

Step = tuple[list[Call], list[Span], float]
"""A rank's calls and spans in a forward and a backward pass, and the seconds that both took."""


def compute_alone(group: ProcessGroup) -> list[float]:
    """Return the median seconds of a forward and of a backward pass without communication."""
    model, took = Transformer(WIDE), []
    initialize(model, seed=0)
    for _ in range(10):
        with Ledger() as ledger:
            loss_of(model, TOKENS).backward()
        took.append(compute_of(ledger.spans))
    return [median(times) for times in zip(*took, strict=True)]


def compute_of(spans: Sequence) -> list[float]:
    """Return the seconds computed in the forward and in the backward pass."""
    return [
        sum(span.end - span.start for span in spans if span.phase == phase)
        for phase in ("forward", "backward")
    ]


def without_prefetch(model: nn.Module, group: ProcessGroup) -> FullyShardedDataParallel:
    """FSDP that asks for a unit's parameters when it needs them, not before."""
    parallel = apply_fsdp(model, group)
    for unit in parallel.units:
        unit.unshard = lambda: None
        unit.wait_for_unshard = partial(_ask_and_wait, unit)
    return parallel


def _ask_and_wait(unit: Unit) -> None:
    Unit.unshard(unit)
    for gather in unit.gathers:
        gather.wait()
    unit.gathers = []


WAYS: dict[str, tuple[Apply, bool]] = {
    "without prefetch": (without_prefetch, False),
    "with prefetch": (apply_fsdp, True),
}
"""What is compared, and whether its prediction prefetches."""


def measure(network: tuple[float, float]) -> dict[str, list[Step]]:
    """Return rank 0's steps of two on an emulated network (latency, bandwidth), by way."""
    applies = [apply for apply, _ in WAYS.values()]
    found = run(slow_passes, 2, applies, network, timeout=MEASURING, watch=False)[0]
    return dict(zip(WAYS, found, strict=True))


def slow_passes(
    group: ProcessGroup, applies: Sequence[Apply], network: tuple[float, float], num_steps: int = 5
) -> list[list[Step]]:
    """Return, for each of `applies`, calls, spans and seconds of several forward-backward passes.

    The variants take turns, so that whatever else the machine does meets all of them. The time ends
    when the last gradient has arrived: the optimizer is not in it. The first pass is dropped.
    """
    parts = []
    for apply in applies:
        model = Transformer(WIDE)
        initialize(model, seed=0)
        parallel = apply(model, group)
        parts.append((model, parallel, parallel.shard(adamw(model.parameters()))))

    steps: list[list] = [[] for _ in applies]
    for _ in range(num_steps + 1):
        for (model, parallel, optimizer), kept in zip(parts, steps, strict=True):
            optimizer.zero_grad()
            dist.barrier(group)
            with SlowNetwork(*network), Ledger() as ledger:
                start = time.perf_counter()
                loss_of(model, TOKENS).backward()
                parallel.finish()
                seconds = time.perf_counter() - start
            optimizer.step()
            kept.append((ledger.calls, ledger.spans, seconds))
    return [kept[1:] for kept in steps]


def predict_lanes(
    passes: Sequence[float], transfer: float, prefetch: bool
) -> dict[str, list[Block]]:
    """Predict compute and network of a forward and a backward pass, in ms, as a queue.

    `passes` are the seconds of the two passes, `transfer` those of one block's all-gather or
    reduce-scatter. With prefetch the next block's parameters are requested when a block begins to
    compute, without it when the block ends. A block's gradients leave when its backward ends.
    """
    L, compute, link, now = WIDE.num_layers, [], [], 0.0

    def send(asked: float) -> float:
        begin = max(asked, link[-1].end if link else 0.0)
        link.append(Block("communication", begin, begin + 1e3 * transfer))
        return link[-1].end

    for k in range(2 * L):
        if k in (0, L) or not prefetch:
            arrived = send(now)
        begin = max(now, arrived)
        now = begin + 1e3 * passes[k >= L] / L
        compute.append(Block("forward" if k < L else "backward", begin, now))
        if prefetch and k not in (L - 1, 2 * L - 1):
            arrived = send(begin)
        if k >= L:
            send(now)
    return {"predicted compute": compute, "predicted network": link}


def predicted_seconds(passes: Sequence[float], transfer: float, prefetch: bool) -> float:
    """Return when the last gradient has arrived, by `predict_lanes`."""
    return 1e-3 * predict_lanes(passes, transfer, prefetch)["predicted network"][-1].end


def measured_lanes(
    calls: Sequence[Call], spans: Sequence[Span], network: tuple[float, float], num_ranks: int = 2
) -> dict[str, list[Block]]:
    """Return one rank's lanes, with each transfer as long as it occupied the emulated link."""
    return rank_lanes([on_the_link(calls, network, num_ranks)], [spans])


def on_the_link(
    calls: Sequence[Call], network: tuple[float, float], num_ranks: int = 2
) -> list[Call]:
    """Return the calls, each as long as it occupied the emulated link.

    Transfers queue for the link in the order of their calls. The ledger alone would not do: gloo's
    reduce-scatter does not tell when it ends, so it seems to last until the rank waits for it.
    """
    free, transfers = 0.0, []
    for call in sorted(calls, key=lambda call: call.started):
        seconds = collective_seconds(call.op, call.payload, num_ranks, *network)
        free = max(free, call.started) + seconds
        transfers.append(replace(call, finished=free))
    return transfers


@dataclass(frozen=True)
class Comparison:
    """Milliseconds of a forward and a backward pass, measured and predicted."""

    measured: list[float]
    """Of every step, sorted."""
    predicted: float
    """By the compute times without communication."""
    with_own_compute: float
    """By the compute times in the measured steps."""

    @property
    def spread(self) -> float:
        return self.measured[-1] - self.measured[0]

    @property
    def errors(self) -> tuple[float, float]:
        """How much longer it took than predicted, and the part that is due to compute."""
        return median(self.measured) - self.predicted, self.with_own_compute - self.predicted


def compare(
    steps: dict[str, list[Step]], passes: Sequence[float], transfer: float
) -> dict[str, Comparison]:
    """Compare measured steps with predictions; arguments as in `predict_lanes`."""
    compared = {}
    for name, (_, prefetch) in WAYS.items():
        by_step = [compute_of(spans) for _, spans, _ in steps[name]]
        own = [median(times) for times in zip(*by_step, strict=True)]
        compared[name] = Comparison(
            sorted(1e3 * seconds for *_, seconds in steps[name]),
            *(1e3 * predicted_seconds(each, transfer, prefetch) for each in (passes, own)),
        )
    return compared


def print_times(compared: dict[str, Comparison]) -> None:
    """Print predicted and measured times, and what prefetch gains."""
    print("ms                 predicted   measured  (spread)        predicted, own compute")
    rows = []
    for name, each in compared.items():
        rows.append((each.predicted, median(each.measured), each.with_own_compute))
        first, middle, again = rows[-1]
        print(
            f"{name:18} {first:9.0f} {middle:10.0f}  ({each.measured[0]:.0f} to "
            f"{each.measured[-1]:.0f}) {again:20.0f}"
        )
    first, middle, again = (without - with_it for without, with_it in zip(*rows, strict=True))
    print(f"gain               {first:9.0f} {middle:10.0f} {again:33.0f}")
    print(
        "prefetch pays here" if middle > 0 else "no gain here: the processor, not the link, is busy"
    )


def print_errors(compared: dict[str, Comparison]) -> None:
    """Print what each error consists of, and what to think of the gain's."""
    print("ms                 longer than predicted   due to compute   the rest")
    errors = {name: each.errors for name, each in compared.items()}
    errors["gain"] = tuple(a - b for a, b in zip(*errors.values(), strict=True))
    for name, (error, of_compute) in errors.items():
        print(f"{name:18} {error:21.0f} {of_compute:16.0f} {error - of_compute:10.0f}")

    parts = of_compute, error - of_compute
    if max(map(abs, parts)) <= max(each.spread for each in compared.values()):
        meaning = "are no larger than the spread of the repeats: noise"
    elif parts[0] * parts[1] > 0:
        meaning = "add up"
    else:
        meaning = "have opposite signs: they cancel, at least in part"
    print("in the gain, the two parts", meaning)


def fastest(steps: Sequence[Step]) -> Step:
    return min(steps, key=lambda step: step[2])


def draw_fastest(
    steps: dict[str, list[Step]],
    passes: Sequence[float],
    transfer: float,
    network: tuple[float, float],
    name: str,
) -> Figure:
    """Draw the fastest step of a way, measured below predicted."""
    calls, spans, _ = fastest(steps[name])
    predicted = predict_lanes(passes, transfer, WAYS[name][1])
    return timeline(measured_lanes(calls, spans, network), predicted, "ms, network emulated")


def hidden_in_fastest(steps: Sequence[Step], network: tuple[float, float]) -> float:
    """Return the share of the time on the link in which the rank computes, in the fastest step."""
    calls, spans, _ = fastest(steps)
    return hidden_share(on_the_link(calls, network), spans)


def recorded_steps() -> dict[str, Row]:
    """Return the recorded rows of a plain step and of one with FSDP, on one GPU."""
    return {row["case"]: row for row in rows_of(newest("overlap", FOLDER)) if "busy_ms" in row}


def draw_copies() -> Figure:
    """Draw how long recorded gathers and reductions copy, and how much of it compute hides."""
    record = newest("overlap", FOLDER)
    # two gathers and a reduction, of one rank: each reads and writes 16-bit values once
    copied = 3 * 2 * 2 * cost.num_parameters(OVERLAP.model)
    milliseconds = 1e3 * copied / device_of(record).memory_bandwidth
    row = recorded_steps()["FSDP step"]
    return ranges(
        {"copies": (row["other_streams_ms"],) * 3, "hidden": (row["hidden_ms"],) * 3},
        {"copies": milliseconds, "hidden": milliseconds},
        "ms of copies in one step",
    )
