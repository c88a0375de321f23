"""Chapter 9's measurements: a pipeline by hand, a wrong scale of the loss, emulated stages."""

import time
from collections.abc import Callable, Sequence
from functools import partial
from types import SimpleNamespace
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from minitron.comm.agreement import SINGLE_RANK
from minitron.config import ConfigError, ModelConfig
from minitron.launch import RankError, run
from minitron.measure.ledger import Ledger
from minitron.measure.meter import Meter
from minitron.model.transformer import Transformer, initialize
from minitron.parallel.grid import Grid
from minitron.parallel.pipeline.plan import Message
from minitron.parallel.pipeline.schedules import Action, Schedule
from minitron.parallel.pipeline.simulator import Timeline
from minitron.parallel.pipeline.stages import apply_pipeline_parallel
from minitron.proof.difference import largest_difference
from minitron.proof.oracle import (
    assert_same_training,
    sample_batches,
    small_model,
    trainings,
    undivided,
)
from teaching.figures import measured_timeline
from teaching.lab import MEASURING, counting_rows
from teaching.wrapping import fill

MakeSchedule = Callable[[int, int], Schedule]
MicroBatches = list[tuple[Tensor, Tensor]]

# By hand


def receive_from(source: int, group: ProcessGroup, like: Tensor) -> Tensor | None:
    """Return what rank `source` sends, shaped like `like`; None beyond the ends of the pipeline."""
    if not 0 <= source < group.size():
        return None
    tensor = torch.empty_like(like)
    dist.recv(tensor, group=group, group_src=source)
    return tensor


def wait_for(leaving: Sequence[tuple[dist.Work | None, Tensor]]) -> None:
    """Wait until all sends have finished; `dist.send` returns no work to wait for."""
    for work, _ in leaving:
        if work is not None:
            work.wait()


def play_repeatedly(
    play: Callable, schedule: Schedule, num_repeats: int = 3
) -> tuple[list[Timeline], Tensor]:
    """Run `play` on the schedule's ranks: a timeline of each repeat, and all layers' gradients."""
    timelines = []
    for _ in range(num_repeats):
        grads, spans = zip(*run(play, schedule.num_ranks, schedule, watch=False), strict=True)
        timelines.append(measured_timeline(schedule, spans))
    return timelines, torch.cat(grads)


def spread(seconds: Sequence[float]) -> str:
    """Write the median of repeats, with the shortest and the longest."""
    ordered = sorted(seconds)
    return f"{ordered[len(ordered) // 2]:.0f} ({ordered[0]:.0f}-{ordered[-1]:.0f})"


def verdict(function: Callable, *args, **options) -> str:
    """Return "runs", or the error's message in lines of 76 columns."""
    try:
        function(*args, **options)
        return "runs"
    except (ConfigError, RankError, AssertionError) as error:
        return "\n".join(fill(line, 76, subsequent_indent="  ") for line in str(error).splitlines())


def written(steps: Sequence[Action | Message]) -> str:
    """Write a rank's list of actions and messages, in lines of 76 columns."""
    verbs = {True: "send", False: "receive"}
    return fill(
        ", ".join(
            f"{verbs[step.is_send]} {step.action}" if isinstance(step, Message) else f"{step}"
            for step in steps
        ),
        76,
    )


# The scale of the loss


def sum_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the cross-entropy summed over tokens, shape ()."""
    return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")


TINY = ModelConfig("gpt", 29, 12, 2, 24, 4, 4, 96)
OPTIMIZERS = {"AdamW": partial(torch.optim.AdamW, lr=1e-2), "SGD": partial(torch.optim.SGD, lr=0.3)}


def train(
    group: ProcessGroup,
    apply: Callable[[nn.Module, ProcessGroup], Grid],
    make_optimizer: Callable,
    num_steps: int = 30,
    m: int = 4,
) -> list[float]:
    """Train a tiny GPT on sequences that count; returns the loss reported in each step."""
    model, losses = Transformer(TINY), []
    initialize(model, seed=0)
    parallel = apply(model, group)
    optimizer = make_optimizer(model.parameters())
    for step in range(num_steps):
        rows = counting_rows(step, 8, 13, 29)
        optimizer.zero_grad()
        parts = [(part[:, :-1], part[:, 1:]) for part in rows.tensor_split(m)]
        loss = parallel.pipeline.run(parts, sum_loss, rows[:, 1:].numel())
        parallel.finish()  # sums the two partial gradients of a tied embedding
        losses.append(loss.item())
        optimizer.step()
    return losses


def losses_of(apply: Callable, optimizer: str, num_ranks: int = 2) -> list[float]:
    """Train on `num_ranks` ranks; returns the losses that the first rank reports."""
    return run(train, num_ranks, apply, OPTIMIZERS[optimizer], watch=False)[0]


def oracle(
    apply: Callable,
    num_ranks: int,
    family: str = "gpt",
    m: int = 2,
    batch_sizes: Sequence[int] = (4, 5, 4),
    num_layers: int = 4,
) -> str:
    """Return the first line of the oracle's verdict on a small model of `num_layers` blocks."""
    make_model = partial(small_model, family, num_layers=num_layers)
    try:
        assert_same_training(apply, num_ranks, make_model, m, batch_sizes)
        return "the same training"
    except AssertionError as error:
        return str(error).splitlines()[0]


def gradient_error(apply: Callable, num_ranks: int, batch_size: int, m: int = 2) -> float:
    """Return how far the first step's gradients are off, relative to a tensor's largest value."""
    make_model = partial(small_model, "gpt", num_layers=4)
    arguments = make_model, sample_batches((batch_size,)), m, ("SGD",)
    one, *by_rank = (
        [moment for moment in records["SGD"] if moment.kind == "gradient"]
        for records in (
            trainings(SINGLE_RANK, undivided, *arguments),
            *run(trainings, num_ranks, apply, *arguments, watch=False),
        )
    )
    return largest_difference(one, by_rank)


# Emulated stages: how long a step takes


class Sleep(torch.autograd.Function):
    """Identity that takes `seconds` in the forward pass, as many for I and as many for W."""

    @staticmethod
    def forward(ctx, x, seconds, deferral):
        ctx.seconds, ctx.deferral = seconds, deferral
        time.sleep(seconds)
        return x.view_as(x)

    @staticmethod
    def backward(ctx, out_grad):
        time.sleep(ctx.seconds)
        weights = SimpleNamespace(start=list, accumulate=partial(time.sleep, ctx.seconds))
        ctx.deferral.defers(weights) or weights.accumulate()
        return out_grad, None, None


SMALL = ModelConfig("gpt", 64, 16, 8, 16, 4, 4, 64)


def micro_batches(m: int, shape: ModelConfig) -> MicroBatches:
    """Return m micro-batches of one random sequence each: inputs and targets, shape (1, S)."""
    size, generator = (m, 1, shape.max_sequence_length + 1), torch.Generator().manual_seed(0)
    rows = torch.randint(shape.vocab_size, size, generator=generator)
    return [(row[:, :-1], row[:, 1:]) for row in rows]


def sleeping_steps(
    group: ProcessGroup, make_schedule: MakeSchedule, m: int, nap: float, num_steps: int
) -> list[list]:
    """Run steps of a small pipeline whose blocks sleep; returns this rank's spans of each step."""
    model = Transformer(SMALL)
    initialize(model, seed=0)
    parallel = apply_pipeline_parallel(model, group, make_schedule)
    for block in model.blocks:
        block.register_forward_hook(lambda block, _, out: Sleep.apply(out, nap, parallel.deferral))
    steps = []
    for _ in range(num_steps):
        dist.barrier(group)
        with Ledger() as ledger:
            parallel.run(micro_batches(m, SMALL), sum_loss, 16 * m)
        steps.append(ledger.spans)
    return steps


def emulated_steps(
    make_schedule: MakeSchedule, p: int, m: int, stage_ms: float = 20, num_steps: int = 5
) -> list[Timeline]:
    """Run steps on p real ranks, each of which holds 1/p of eight blocks that sleep.

    A rank's share of the blocks takes `stage_ms` for F, for I and for W of one micro-batch.
    The first step, which warms up, is left out.
    """
    nap = stage_ms / 1e3 * p / SMALL.num_layers
    ranks = run(
        sleeping_steps, p, make_schedule, m, nap, num_steps + 1, timeout=MEASURING, watch=False
    )
    steps = zip(*ranks, strict=True)
    return [measured_timeline(make_schedule(p, m), spans) for spans in steps][1:]


def mean_durations(timeline: Timeline) -> dict[str, float]:
    """Return the mean duration of the passes of each kind, in ms."""
    durations: dict[str, list[float]] = {}
    for each in (each for lane in timeline.passes for each in lane):
        durations.setdefault(each.action.kind, []).append(each.end - each.start)
    return {kind: sum(times) / len(times) for kind, times in durations.items()}


# What a rank holds and sends

SHAPE = ModelConfig("gpt", 64, 32, 8, 64, 4, 4, 256, tied_embedding=False)


class Measured(NamedTuple):
    """What one rank of a step held and sent."""

    peak_activation_bytes: int
    bytes_sent: int
    messages_sent: int


def meter_rank(group: ProcessGroup, make_schedule: MakeSchedule, m: int) -> Measured:
    """Run a step of eight blocks, one sequence of 32 tokens a micro-batch, and measure a rank."""
    model = Transformer(SHAPE)
    initialize(model, seed=0)
    parallel = apply_pipeline_parallel(model, group, make_schedule)
    with Ledger() as ledger, Meter(model) as meter:
        parallel.run(micro_batches(m, SHAPE), sum_loss, 32 * m)
    peak = max(moment.bytes["activation"] for moment in meter.timeline)
    num_sends = sum(call.op == "send" for call in ledger.calls)
    return Measured(peak, ledger.bytes_sent("send"), num_sends)


def metered(make_schedule: MakeSchedule, p: int, m: int) -> list[Measured]:
    """Measure each of p ranks in one step."""
    return run(meter_rank, p, make_schedule, m, watch=False)
