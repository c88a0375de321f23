"""The one seam: what a training step, a checkpoint and the oracle ask of a parallel model.

A model that is divided over ranks, in whatever way, is a `ParallelModel`. So is a model on one
device (`one_device.OneDevice`, whose answers are those of one rank), and so are several axes
together (`grid.Grid`). Nobody above this module asks which kind it has.

A training step (see `step.train_step`):

    optimizer = parallel.shard(optimizer)                 once, before the first step
    loss = parallel.forward_backward(accumulate, micro_batches, divisor)
    parallel.clip(parameters, max_norm)
    optimizer.step()

To add a technique, derive from `OneDevice` and answer differently where it differs.

Read in this order: ParallelModel, from `data_part` to `shard`; then what the grid asks of an axis.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Literal

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from minitron.parallel.parts import LocalShard
from minitron.parallel.placement import Placement

MicroBatches = list[tuple[Tensor, Tensor]]
"""Pairs of inputs and targets, (B, S) token ids."""
SumLoss = Callable[[Tensor, Tensor], Tensor]
"""Of logits and targets: the cross-entropy summed over the targets that count, 0-d, nats."""
Accumulate = Callable[[MicroBatches, Tensor, SumLoss], Tensor]
"""Forward and backward of micro-batches whose layers are all on this rank (`step`)."""
OwnParts = Callable[[MicroBatches], MicroBatches]
"""Of whole sequences: this rank's part of each."""
Values = Callable[[str, torch.Size], Tensor]
"""A parameter's full value, by its global name and full shape."""
Kind = Literal["F", "B", "I", "W"]
"""Of a pass: forward, backward; or a backward pass in two, for the inputs and for the weights."""


class ParallelModel(ABC):
    """A model, as this rank holds it, and how the ranks train it together.

    Global names are those that parameters have in the undivided model.
    """

    model: nn.Module

    # Which samples

    @property
    @abstractmethod
    def data_part(self) -> tuple[int, int]:
        """Which part of a global batch this rank reads: (index, count); (0, 1) is all of it."""

    @abstractmethod
    def require_runnable(self, num_micro_batches: int) -> None:
        """Raise ConfigError if a step of so many micro-batches cannot run."""

    @abstractmethod
    def num_in_flight(self, num_micro_batches: int) -> int:
        """Return the most micro-batches whose activations this rank holds at once."""

    # A step

    @abstractmethod
    def forward_backward(
        self, accumulate: Accumulate, micro_batches: MicroBatches, divisor: Tensor
    ) -> Tensor:
        """Add to `.grad` the gradient of a step; returns this rank's part of the loss, 0-d.

        `micro_batches` are this rank's, all of them; the loss is summed over their tokens and
        divided by `divisor`. Gradients are then the mean over all samples, the same on every rank
        that holds the parameter. `accumulate(micro_batches, divisor, sum_loss)` runs micro-batches
        where every layer is on this rank.
        """

    @abstractmethod
    def mean(self, tensor: Tensor) -> Tensor:
        """Average a small tensor over the ranks that read other samples; without a graph."""

    @abstractmethod
    def clip(self, parameters: list[Tensor], max_norm: float) -> Tensor:
        """Scale gradients to a global norm of `max_norm` at most; returns the norm before, 0-d.

        `parameters` are what the optimizer updates; the norm is that of the full model.
        """

    # The optimizer

    @abstractmethod
    def shard(self, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        """Let `optimizer`, made for the model's parameters, update what this rank owns; return it.

        It has not taken a step yet; its groups and their options stay.
        """

    @abstractmethod
    def make_optimizer(
        self, factory: Callable[[list], torch.optim.Optimizer]
    ) -> torch.optim.Optimizer:
        """Return `factory(trainable parameters)`, sharded."""

    # Without a gradient

    @abstractmethod
    def sum_losses(
        self, forward: Callable[[Tensor], Tensor], micro_batches: MicroBatches
    ) -> Tensor:
        """Return the summed loss of this rank's samples, 0-d, nats; without a gradient."""

    @abstractmethod
    def full_model(self) -> nn.Module:
        """Return a module from tokens (B, S) to logits (B, S, V), for all ranks to call."""

    # The full model, whatever the number of ranks

    @abstractmethod
    def fill(self, value: Values) -> None:
        """Set every parameter to its part of `value(name, full shape)`; one is held at a time."""

    @abstractmethod
    def full_parameters(self) -> dict[str, Tensor]:
        """Return every parameter, unsharded, by its global name; every rank must call it."""

    @abstractmethod
    def full_gradients(self) -> dict[str, Tensor | None]:
        """Return every trainable parameter's gradient after `finish`, or None, in the same way."""

    @abstractmethod
    def parts(self) -> Iterator[tuple[str, LocalShard]]:
        """Yield, by global name, the part of each parameter that this rank updates and saves."""

    @abstractmethod
    def copy_to_parameters(self) -> None:
        """Bring what the optimizer updates into the model, after it has been loaded."""

    # What the grid asks of each axis: a step

    @abstractmethod
    def run_passes(
        self,
        accumulate: Accumulate,
        micro_batches: MicroBatches,
        own_parts: OwnParts,
        divisor: Tensor,
        sum_loss: SumLoss,
    ) -> Tensor:
        """Run every micro-batch forward and backward; returns the sum of `sum_loss / divisor`.

        `own_parts` is asked when a micro-batch runs, so that no two are held at once.
        """

    @abstractmethod
    def run_forward_passes(
        self,
        forward: Callable[[Tensor], Tensor],
        micro_batches: MicroBatches,
        sum_loss: SumLoss,
    ) -> Tensor:
        """Return the sum of `sum_loss` over micro-batches; without a gradient."""

    @abstractmethod
    def summed_loss(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Return the cross-entropy of this rank's logits, summed over counted targets, nats."""

    @abstractmethod
    def no_sync(self) -> AbstractContextManager:
        """Return the context of a micro-batch that is not the step's last one."""

    @abstractmethod
    def finish(self) -> None:
        """Leave the mean over all samples in the gradients, after the last backward pass."""

    @abstractmethod
    def sum_partial_gradients(self, gradient: Callable[[nn.Parameter], Tensor | None]) -> None:
        """Sum those gradients of which each rank of this axis has a partial sum, in place.

        `gradient` tells where a parameter's gradient is after `finish`. Part of `finish`.
        """

    @abstractmethod
    def connect_data(self, data: "ParallelModel") -> None:
        """Let every pass run in the context that `data` wants: `no_sync`, or `pass_context`."""

    @abstractmethod
    def pass_context(
        self,
        stage: int,
        kind: Kind,
        is_last: bool,
        incomplete: frozenset[nn.Parameter],
    ) -> AbstractContextManager:
        """Return the context of one micro-batch's pass through this rank's stage number `stage`.

        With `is_last` the stage's gradients are those of the whole step after it. Those of
        `incomplete` are not: another stage of this rank reads these parameters too, and its passes
        complete them.
        """

    @abstractmethod
    def stage_parameters(self) -> list[list[nn.Parameter]]:
        """Return the parameters of each of this rank's stages, in the order of the forward pass."""

    @abstractmethod
    def shared_parameters(self) -> list[nn.Parameter]:
        """Return the parameters that another stage's rank has too, with a part of the gradient.

        Sharding must treat them alike on both ranks: each gets a flat buffer of its own.
        """

    # What the grid asks of each axis: which part of the model it holds

    @abstractmethod
    def norm_groups(self) -> list[ProcessGroup]:
        """Return the groups whose ranks hold different gradients: their squares are summed."""

    @abstractmethod
    def placement(self, name: str) -> Placement:
        """Return which block of a parameter this rank holds, of those along this axis."""

    @abstractmethod
    def optimizer_tensor(self, parameter: nn.Parameter) -> Tensor:
        """Return what the optimizer updates for `parameter`: its shard, its master, or itself."""

    @abstractmethod
    def owned(self, parameter: nn.Parameter) -> range:
        """Return which of the parameter's elements, flattened, this rank updates."""

    @abstractmethod
    def all_gather_shards(self, blocks: dict[str, Tensor | None]) -> dict[str, Tensor | None]:
        """Join what the ranks of this axis have for their blocks, by global name."""

    @abstractmethod
    def predict(self, tokens: Tensor) -> Tensor:
        """Return the logits of this rank's tokens (B, S/cp), without a gradient."""

    @abstractmethod
    def full_logits(self, logits: Tensor) -> Tensor:
        """Return the logits (B, S, V) of what `predict` returns; without a gradient."""

    @abstractmethod
    def own_tokens(self, tokens: Tensor) -> Tensor:
        """Return this rank's part of the sequences of inputs or targets (B, S), (B, S/cp)."""

    @abstractmethod
    def sum_over_sequence(self, tensor: Tensor) -> Tensor:
        """Sum a small tensor over the ranks that have the sequences' parts; without a graph."""

    @property
    @abstractmethod
    def ranks_per_sample(self) -> int:
        """How many neighbors along the data axis read the same samples, each a part of them."""

    @property
    @abstractmethod
    def sequence_parts(self) -> int:
        """In how many parts the sequence is divided: they must be equal."""

    @property
    @abstractmethod
    def divides_vocabulary(self) -> bool:
        """Whether `summed_loss` takes this rank's part of the vocabulary's logits."""
