"""A dry run: the real training step of one rank of many, on a laptop, with tensors without values.

Idea: what a rank holds, sends and multiplies follows from the shapes of its tensors. PyTorch's fake
tensors have shapes and no memory, its "fake" process group answers every message at once. So the
code that trains on thousands of GPUs runs here, unchanged, and the same instruments read it: the
meter, the ledger, and a counter of FLOPs.

A long step repeats itself. So short ones are run, each with one period more than the one before:
one micro-batch, or p of them where the schedule is interleaved. Once two peaks are equal, byte by
byte, more periods do not change it, and each sends what the last step had more. Where that would be
more work, as in GPipe, which holds every micro-batch, the whole step is run. No layer is left out.

Not seen: what the meter does not see, CUDA itself and NCCL's buffers. The operators are those of
the CPU, but for two of which a GPU's kernels keep less; a compiled model may keep less than this.

Read in this order: dry_run, keep_as_gpus_do, measured, lengths, Step, Flops.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from math import ceil
from typing import Literal, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.flop_counter import flop_registry

from minitron.config import Config, require
from minitron.measure.calls import Call
from minitron.measure.ledger import Ledger
from minitron.measure.live import Snapshot
from minitron.measure.meter import Meter
from minitron.model.transformer import Transformer
from minitron.parallelize import lay_out
from minitron.plan.job import require_gpus
from minitron.pytorch.private import (
    DispatchMode,
    device_of,
    device_op,
    fake_tensors,
    init_fake_process_group,
)
from minitron.running.memory import require_memory
from minitron.running.starting import with_vocabulary_of_data
from minitron.running.training import Training

LARGEST_MEMORY = 1e15
"""Bytes of a rank. PyTorch counts a tensor's in an int64."""


class Traffic(NamedTuple):
    """The calls of one op along one axis, and the bytes of this rank."""

    calls: int
    sent: int
    received: int


@dataclass(frozen=True)
class Step:
    """What one step of a rank holds, sends and computes."""

    peak: Snapshot
    """What is alive when most is."""
    traffic: dict[tuple[str, str], Traffic]
    """By op and axis, such as ("all_reduce", "dp")."""
    flops: int
    """Of all matmuls that are run, also those run again; of attention, all S x S scores."""

    @property
    def bytes_sent(self) -> dict[tuple[str, str], int]:
        """By op and axis."""
        return {key: traffic.sent for key, traffic in self.traffic.items()}

    def extended(self, shorter: "Step", times: int) -> "Step":
        """Return this step plus `times` the difference between it and a `shorter` one."""

        def more(long: int, short: int) -> int:
            return long + times * (long - short)

        traffic = {
            key: Traffic(*map(more, row, shorter.traffic[key])) for key, row in self.traffic.items()
        }
        return replace(self, traffic=traffic, flops=more(self.flops, shorter.flops))


@dataclass(frozen=True)
class DryRun(Step):
    """A step of one rank of many."""

    num_gpus: int
    rank: int
    place: dict[str, int]
    """The rank's number along each axis: "pp", "dp", "tp", and "cp" if there is one."""
    num_micro_batches: int
    """Of the step, on this rank."""
    num_run: int
    """So many of them were run; the others are like them."""
    seconds: float
    """That the dry run took."""


def dry_run(
    config: Config, num_gpus: int, rank: int = 0, kernels: Literal["gpu", "cpu"] = "gpu"
) -> DryRun:
    """Run a training step of `rank` of `num_gpus` as `config` says, without a GPU.

    `kernels` says whose activations are kept, a GPU's or those of ranks on this machine's CPU.
    A `parallel.dp` of 0 follows from the number of GPUs. It is the second step: the optimizer has
    its state. Raises ConfigError if model, batch and ranks do not fit together, if there is no such
    rank, and in a process that has a process group already.
    """
    start, device = time.perf_counter(), torch.device("cpu")
    config = prepared(config, num_gpus)
    require(0 <= rank < num_gpus, f"rank {rank} of {num_gpus} GPUs", f"use 0 to {num_gpus - 1}")
    with fake_group(num_gpus, rank):
        mesh = lay_out(config.parallel, num_gpus, device)
        place = {axis: mesh.rank(axis) for axis in axes_of(config)}
        with fake_tensors():
            training = Training(config, mesh, device)
            if kernels == "gpu":
                keep_as_gpus_do(training.model)
            step, num_run = measured(training)
    m = training.num_micro_batches(config.train.global_batch_size)
    return DryRun(
        **vars(step),
        num_gpus=num_gpus,
        rank=rank,
        place=place,
        num_micro_batches=m,
        num_run=num_run,
        seconds=time.perf_counter() - start,
    )


def axes_of(config: Config) -> tuple[str, ...]:
    return ("pp", "dp") + ("cp",) * (config.parallel.cp > 1) + ("tp",)


def prepared(config: Config, num_gpus: int) -> Config:
    """Return the config with a vocabulary, not compiled; raises ConfigError if it cannot be run."""
    require(num_gpus > 0, f"{num_gpus} GPUs: a dry run needs 1 or more")
    if config.model.vocab_size == 0:
        config = with_vocabulary_of_data(config)
    config = replace(config, train=replace(config.train, compile=False))
    require_gpus(config, num_gpus)
    require_memory(config, num_gpus, LARGEST_MEMORY, "no GPU that a dry run knows")
    return config


@contextmanager
def fake_group(num_ranks: int, rank: int) -> Iterator[None]:
    """Act as `rank` of `num_ranks` that do not exist: messages arrive at once, and say nothing."""
    require(
        not dist.is_initialized(),
        "this process has a process group already, and a dry run makes one of its own",
        "run it in another process, or destroy the group first",
    )
    init_fake_process_group(rank, num_ranks)
    try:
        yield
    finally:
        dist.destroy_process_group()


def keep_as_gpus_do(model: Transformer) -> None:
    """Let attention drop nothing, for a GPU's kernel keeps no mask of S x S; and let RMSNorm keep
    no copies in float32, as the CPU's does, which makes it of several operators."""
    for block in model.blocks:
        if hasattr(block, "attention"):  # or it is another rank's
            block.attention.dropout = 0.0
    for module in model.modules():
        if isinstance(module, nn.RMSNorm):
            module.forward = partial(fused_rms_norm, module)


def fused_rms_norm(norm: nn.RMSNorm, x: Tensor) -> Tensor:
    return FusedRMSNorm.apply(norm.weight, x)  # asked now: a shard may have taken its place


class FusedRMSNorm(torch.autograd.Function):
    """What PyTorch's CUDA kernel keeps: its input, and 1/rms of each row.

    Reference: aten::_fused_rms_norm, since PyTorch 2.9 (pull request 153666).
    """

    @staticmethod
    def forward(ctx, weight: Tensor, x: Tensor) -> Tensor:
        ctx.save_for_backward(weight, x, x.new_empty(*x.shape[:-1], 1, dtype=torch.float32))
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, Tensor]:
        weight, x, _ = ctx.saved_tensors
        return torch.empty_like(weight), torch.empty_like(x)


# A step, or what is enough of it


def measured(training: Training) -> tuple[Step, int]:
    """Measure a full step, and return how many micro-batches were run for it."""
    whole, count = training.config.train.global_batch_size, training.num_micro_batches
    shortest, short, period = lengths(training)
    training.update(micro_batches(training, shortest), 0.0)  # makes the optimizer's state
    before, num_run = None, 0
    for length in range(short, whole, period):
        num_run += count(length)
        if num_run + (count(length + period) if before is None else 0) >= count(whole):
            break  # it is less to run all
        step = run(training, length)
        if before is not None and step.peak.bytes == before.peak.bytes:
            return step.extended(before, (whole - length) // period), num_run
        before = step
    return run(training, whole), count(whole)


def lengths(training: Training) -> tuple[int, int, int]:
    """Return the shortest step, one that fills this rank's part of the pipeline, and a period.

    In sequences over all ranks. Two micro-batches more than are held: one so that gradients are
    there when the most is held, one so that its successor's messages are. A V is full when the
    first micro-batch has gone down and up.
    """
    parallel, train = training.config.parallel, training.config.train
    whole, ranks = train.global_batch_size, training.data_size
    fewest, divisor = parallel.micro_batch_rule
    period = ranks * train.micro_batch_size * divisor

    def at_least(num_micro_batches: int, length: int) -> int:
        missing = num_micro_batches - training.num_micro_batches(length)
        return length + max(0, ceil(missing / divisor)) * period

    shortest = at_least(fewest, whole - (whole - ranks) // period * period)
    fills = max(most_held(training), 2 * parallel.pp if parallel.is_v else 0)
    return shortest, at_least(fills + 2, shortest), period


def most_held(training: Training) -> int:
    """Return the most micro-batches that are in flight at once on this rank."""
    global_batch_size = training.config.train.global_batch_size
    return training.parallel.num_in_flight(training.num_micro_batches(global_batch_size))


def micro_batches(training: Training, num_sequences: int) -> list:
    """Return this rank's micro-batches, in a step of so many sequences over all ranks."""
    own = len(range(training.data_rank, num_sequences, training.data_size))
    batch = torch.zeros(own, training.config.data.sequence_length + 1, dtype=torch.int64)
    return training.micro_batches(batch, num_sequences)


def run(training: Training, num_sequences: int) -> Step:
    """Run a step, with the instruments attached."""
    pairs = micro_batches(training, num_sequences)
    with Meter(training.model, training.optimizer) as meter, Ledger() as ledger, Flops() as flops:
        training.update(pairs, 0.0)
    return Step(meter.peak, summed(ledger.calls), flops.total)


def summed(calls: list[Call]) -> dict[tuple[str, str], Traffic]:
    """Add up calls and bytes by op and axis, in the order of the first calls."""
    found: dict[tuple[str, str], Traffic] = {}
    for call in calls:
        before = found.get((call.op, call.axis), (0, 0, 0))
        added = zip(before, (1, call.sent, call.received), strict=True)
        found[call.op, call.axis] = Traffic(*map(sum, added))
    return found


FORMULAS = {operator.__name__: formula for operator, formula in flop_registry.items()}


class Flops(DispatchMode):
    """Count the FLOPs of matmuls while it is entered; a multiply-add counts as two."""

    def __init__(self):
        super().__init__()
        self.total = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is device_op:  # half of all calls: answer for the modes below
            return device_of(args[0])
        outputs = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__.removesuffix("_")  # addmm_ is addmm, in place
        if name.startswith("_scaled_dot_product"):
            self.total += attention_flops(name, args)
        elif name in FORMULAS:
            self.total += FORMULAS[name](*args, **(kwargs or {}), out_val=outputs)
        return outputs


def attention_flops(name: str, args: tuple) -> int:
    """Count the FLOPs of fused attention: two matmuls forward, five backward (scores again)."""
    is_backward = "backward" in name
    query, key = args[1:3] if is_backward else args[:2]  # (B, H, S, K), (B, G, S, K)
    return (10 if is_backward else 4) * query.numel() * key.shape[-2]
