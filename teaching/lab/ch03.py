"""Chapter 3's measurements: a copying task, early stopping, GPT-3, operators, offloading."""

import dataclasses
import math
import weakref
from bisect import bisect_left
from collections.abc import Callable, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import pairwise

import numpy as np
import torch
from matplotlib import rc_context
from matplotlib.figure import Figure
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)
from torch.utils.flop_counter import FlopCounterMode

from minitron.config import ModelConfig, TrainConfig
from minitron.measure.live import Moment
from minitron.measure.meter import Meter
from minitron.model.transformer import Transformer, initialize, materialized_attention, run_in_order
from minitron.pytorch.private import fake_tensors
from minitron.step import make_optimizer, train_step
from teaching.exercises import ROOT
from teaching.figures_style import BLACK, SERIES, STYLE, canvas

Policy = Callable[[Transformer], None]
aten = torch.ops.aten


# The trap: a task whose loss falls with the wrong masks, too

COPYING = ModelConfig("gpt", 64, 64, 2, 64, 4, 4, 256, dropout=0.2)
COPYING_FLOOR = 7 / 23 * math.log(COPYING.vocab_size)
"""Nats per token if all is copied: 7 of the 23 targets are random, the other 16 are copies."""


def copying_batch(step: int) -> tuple[Tensor, Tensor]:
    """Return inputs and targets (16, 23): each token repeats the one eight places earlier."""
    own = torch.Generator().manual_seed(step)
    tokens = torch.randint(COPYING.vocab_size, (16, 8), generator=own).repeat(1, 3)
    return tokens[:, :-1], tokens[:, 1:]


def train(policy: Policy, seed: int, num_steps: int = 120) -> list[float]:
    """Return the losses of a training; the seed determines the weights and the dropout masks."""
    torch.manual_seed(seed)
    model = Transformer(COPYING)
    initialize(model, seed)
    policy(model)
    optimizer = make_optimizer(model, TrainConfig(), torch.device("cpu"))
    return [
        float(train_step(model, optimizer, [copying_batch(step)], 3e-3, 1.0)[0])
        for step in range(num_steps)
    ]


# A step's memory over time


def num_teeth(timeline: Sequence[Moment]) -> int:
    """Count how often the activations of a backward pass rise above half of their most."""
    held = [moment.bytes["activation"] for moment in timeline if moment.phase == "backward"]
    half = max(held) / 2
    return sum(before < half <= after for before, after in pairwise(held))


# What early stopping saves: FLOPs counted here, and times that were recorded

RECORD = ROOT / "benchmarks" / "results" / "recompute_cpu.md"
RECORDED_MODELS = {
    "gpt, dropout": ModelConfig("gpt", 1024, 128, 6, 256, 4, 4, 1024, dropout=0.1),
    "gpt": ModelConfig("gpt", 1024, 128, 6, 256, 4, 4, 1024),
    "llama": ModelConfig("llama", 1024, 128, 6, 256, 4, 2, 768),
}
"""As in benchmarks/recompute.py, which wrote the record."""


def recorded_on() -> str:
    """Return on what the times were recorded, and by which program."""
    conditions, command = RECORD.read_text("utf-8").splitlines()[0].split("; ")
    return f"{conditions}, by {command.strip('`').split()[1]}"


def recorded_time(name: str) -> float:
    """Return the time of a step with every block recomputed, relative to the plain step's."""
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in RECORD.read_text("utf-8").splitlines()
        if line.startswith("|")
    ]
    plain = next(row for row in rows if row[:2] == [name, "none"])
    return float(plain[rows[0].index("time, ours / this")])


def flops_of_step(config: ModelConfig, policy: Policy = lambda model: None) -> int:
    """Return the FLOPs of a step on one full sequence.

    Attention is materialized: PyTorch's counter does not count the CPU's fused kernel.
    """
    model = Transformer(config)
    initialize(model, seed=0)
    for block in model.blocks:
        block.attention.attention_fn = materialized_attention
    policy(model)
    tokens = torch.zeros(1, config.max_sequence_length, dtype=torch.long)
    with FlopCounterMode(display=False) as counter:
        model(tokens).sum().backward()
    return counter.get_total_flops()


# A layer of GPT-3 without values, and what a paper measured of a smaller model

PAPER_MILLISECONDS = {"none": (7.7, 11.9), "selective": (7.7, 13.2), "full": (7.7, 19.5)}
"""Forward pass and backward pass of a layer of `PAPER_22B`: Korthikanti et al. 2022, table 4."""
PAPER_22B = ModelConfig("gpt", 51_200, 2048, 48, 6144, 64, 64, 4 * 6144, dropout=0.1)


def layer_without_values(config: ModelConfig, length: int, policy: Policy) -> tuple[int, int]:
    """Return activation bytes and FLOPs of one layer's forward and backward pass, in bfloat16.

    Fake tensors have a shape and a dtype but no memory, so nothing is computed.
    """
    one_layer = dataclasses.replace(config, num_layers=1)
    with fake_tensors():
        x = torch.zeros(1, length, config.width, dtype=torch.bfloat16, requires_grad=True)
        with default_dtype(torch.bfloat16):
            model = Transformer(one_layer)
        model.blocks[0].attention.attention_fn = materialized_attention
        policy(model)
        with Meter(model) as meter, FlopCounterMode(display=False) as counter:
            out = model.run_blocks(model.blocks, x.clone(), None)
            kept = meter.now()["activation"]
            out.sum().backward()
    return kept, counter.get_total_flops()


@contextmanager
def default_dtype(dtype: torch.dtype):
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


# Segments, and what a budget buys


def cut(num_blocks: int, length: int) -> list[int]:
    """Return the lengths of segments of `length` blocks; the last one may be shorter."""
    return [min(length, num_blocks - start) for start in range(0, num_blocks, length)]


def least_peak(num_blocks: int, activation_bytes: int, input_bytes: int) -> int:
    """Return the lowest peak of segments of any lengths, equal or not.

    Below a given peak, segment j has room for the blocks whose activations fit beside j inputs.
    """

    def blocks_that_fit(peak: int) -> int:
        room = range(peak, 0, -input_bytes)
        return sum(each // activation_bytes for each in room[:num_blocks])

    peaks = sorted(
        before * input_bytes + length * activation_bytes
        for before in range(num_blocks)
        for length in range(1, num_blocks + 1)
    )
    return peaks[bisect_left(peaks, num_blocks, key=blocks_that_fit)]


@rc_context(STYLE)
def frontier(
    budgets: Sequence[int], paid: Sequence[float], every: Sequence[int], formula: Sequence[float]
) -> Figure:
    """Draw the FLOPs added at each of `budgets`, in bytes, and the stairs of the formula."""
    figure, axes = canvas()
    axes.step(
        [budget / 1e6 for budget in every],
        [100 * share for share in formula],
        "--",
        where="post",
        color=BLACK,
        linewidth=1.2,
        zorder=3,
    )
    axes.plot(
        [budget / 1e6 for budget in budgets],
        [100 * share for share in paid],
        "o",
        color=SERIES[0],
        markersize=7,
        clip_on=False,
    )
    for name, color, at in (("measured", SERIES[0], 0.84), ("formula", BLACK, 0.92)):
        axes.text(0.98, at, name, color=color, ha="right", transform=axes.transAxes)
    axes.set_xlim(0, budgets[-1] / 1e6)
    axes.set_ylim(bottom=0)
    axes.set_xlabel("budget for activations (MB)")
    axes.set_ylabel("FLOPs added (%)")
    return figure


# Per operator


def keep_if_expensive(threshold: float) -> Policy:
    """Keep the outputs of matmuls that take more than `threshold` FLOPs per byte to recompute.

    Everything else in a block is recomputed: the other matmuls and all that is not a matmul. Built
    from PyTorch's selective activation checkpointing, which asks about each operator.
    """

    def choose(context, op, *args, **kwargs) -> CheckpointPolicy:
        keep = flops_per_byte(op, args) > threshold
        return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE

    return checkpoint_blocks(partial(create_selective_checkpoint_contexts, choose))


def flops_per_byte(op, args: tuple) -> float:
    """Return the FLOPs that a byte of the operator's output takes: 2 per term of its sum."""
    left = {aten.mm.default: 0, aten.bmm.default: 0, aten.addmm.default: 1}.get(op)
    return 0.0 if left is None else 2 * args[left].shape[-1] / args[left].element_size()


def checkpoint_blocks(contexts: Callable) -> Policy:
    """Run every block under PyTorch's own checkpoint with these contexts."""

    def run_blocks(blocks: nn.ModuleList, x: Tensor, rotation) -> Tensor:
        for block in blocks:
            x = checkpoint(
                partial(block, rotation=rotation), x, use_reentrant=False, context_fn=contexts
            )
        return x

    return lambda model: setattr(model, "run_blocks", run_blocks)


# Offloading


@dataclasses.dataclass
class HostCopy:
    """A storage's bytes on the host, and on the device while some of its readers wait for it."""

    bytes: np.ndarray
    num_readers: int = 0
    fetched: torch.UntypedStorage | None = None


class Host:
    """Memory that the device's meter does not see: NumPy's. It counts what crosses the link."""

    def __init__(self, model: nn.Module):
        self.bytes_sent = self.bytes_fetched = 0
        self.weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
        self.sent: dict[int, tuple[weakref.ref, HostCopy]] = {}

    def send(self, tensor: Tensor) -> Callable[[], Tensor]:
        """Copy what autograd saves, a storage once; weights stay. Return how to get it back."""
        storage = tensor.untyped_storage()
        if storage.data_ptr() in self.weights:
            return lambda: tensor
        offset, shape, strides = tensor.storage_offset(), tensor.shape, tensor.stride()
        copy, dtype = self._copy(storage), tensor.dtype
        copy.num_readers += 1
        return lambda: torch.empty(0, dtype=dtype).set_(self._fetch(copy), offset, shape, strides)

    def _copy(self, storage: torch.UntypedStorage) -> HostCopy:
        known, copy = self.sent.get(storage.data_ptr(), (lambda: None, None))
        if known() is None:  # a new storage, perhaps at the address of one that is gone
            copy = HostCopy(torch.tensor([], dtype=torch.uint8).set_(storage).numpy().copy())
            self.sent[storage.data_ptr()] = weakref.ref(storage), copy
            self.bytes_sent += storage.nbytes()
        return copy

    def _fetch(self, copy: HostCopy) -> torch.UntypedStorage:
        """Bring a storage back for its first reader, and keep it until its last."""
        if copy.fetched is None:
            copy.fetched = torch.from_numpy(copy.bytes.copy()).untyped_storage()
            self.bytes_fetched += copy.bytes.nbytes
        storage = copy.fetched
        copy.num_readers -= 1
        if copy.num_readers == 0:
            copy.fetched = None
        return storage


def offload_blocks(host: Host) -> Policy:
    """Keep on the host what the blocks save for the backward pass."""

    def run_blocks(blocks: nn.ModuleList, x: Tensor, rotation) -> Tensor:
        with saved_tensors_hooks(host.send, lambda fetch: fetch()):
            return run_in_order(blocks, x, rotation)

    return lambda model: setattr(model, "run_blocks", run_blocks)
