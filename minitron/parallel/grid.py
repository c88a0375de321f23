"""The grid of axes: several ways of dividing a model, as one parallel model.

Along `tensor` the ranks compute each layer together, along `pipeline` one after the other, on the
same samples; along `data` they hold the same layers and read other samples. Along `context` they
read the same samples too, each its part of a sequence. For the training state that is as good as
other samples, so the ranks of `data` are those of both axes. An axis with one rank is a
`OneDevice`. `masters` are float32 copies that the optimizer updates, if there are any.

The grid knows no technique: it asks every axis the same questions (see `interface`) and combines
the answers.

Read in this order: Grid, from forward_backward to clip; then how the blocks are joined.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from math import prod

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from minitron.model.transformer import global_name, global_parameters
from minitron.parallel.interface import Accumulate, MicroBatches, ParallelModel, SumLoss, Values
from minitron.parallel.one_device import OneDevice
from minitron.precision import NO_MASTERS, MasterWeights


class Grid(OneDevice):
    """Axes together, each an implementation of `ParallelModel` for the same `model`.

    `axes` are `data`, `context`, `tensor` and `pipeline`; those that are left out have one rank.
    """

    def __init__(
        self, model: nn.Module, masters: MasterWeights = NO_MASTERS, **axes: ParallelModel
    ):
        super().__init__(model)
        alone = OneDevice(model)
        self.data, self.context, self.tensor, self.pipeline = self.axes = [
            axes.pop(name, alone) for name in ("data", "context", "tensor", "pipeline")
        ]
        assert not axes, f"no such axes: {list(axes)}"
        self.pipeline.connect_data(self.data)
        self.masters = masters
        self.device = next(model.parameters()).device

    @property
    def data_part(self) -> tuple[int, int]:
        index, count = self.data.data_part
        return index // self.ranks_per_sample, count // self.ranks_per_sample

    @property
    def ranks_per_sample(self) -> int:
        return self.context.ranks_per_sample

    @property
    def sequence_parts(self) -> int:
        return self.context.sequence_parts * self.tensor.sequence_parts

    def require_runnable(self, num_micro_batches: int) -> None:
        for axis in self.axes:
            axis.require_runnable(num_micro_batches)

    def num_in_flight(self, num_micro_batches: int) -> int:
        return self.pipeline.num_in_flight(num_micro_batches)

    # A step

    def rounds(self, micro_batches: MicroBatches) -> list[MicroBatches]:
        return self.pipeline.rounds(micro_batches)

    def no_sync(self) -> AbstractContextManager:
        return self.data.no_sync()

    def forward_backward(
        self,
        accumulate: Accumulate,
        micro_batches: MicroBatches,
        divisor: Tensor,
        sum_loss: SumLoss,
    ) -> Tensor:
        through_stages = partial(self.pipeline.forward_backward, accumulate)
        return self.context.forward_backward(through_stages, micro_batches, divisor, sum_loss)

    def summed_loss(self, logits: Tensor, targets: Tensor) -> Tensor:
        return self.tensor.summed_loss(logits, targets)

    def finish(self) -> None:
        self.data.finish()
        self.masters.take_gradients()
        for axis in self.axes:
            axis.sum_partial_gradients(lambda parameter: self.optimized(parameter).grad)

    def mean(self, tensor: Tensor) -> Tensor:
        return self.data.mean(tensor)

    # The optimizer

    def shard(self, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        for owner in (self.data, self.masters, self.tensor, self.pipeline):
            optimizer = owner.shard(optimizer)
        return optimizer

    # Without a gradient

    @torch.no_grad()
    def sum_losses(
        self,
        forward: Callable[[Tensor], Tensor],
        micro_batches: MicroBatches,
        sum_loss: SumLoss,
    ) -> Tensor:
        own = [tuple(map(self.own_tokens, pair)) for pair in micro_batches]
        return self.sum_over_sequence(self.pipeline.sum_losses(forward, own, sum_loss))

    def own_tokens(self, tokens: Tensor) -> Tensor:
        return self.context.own_tokens(tokens)

    def sum_over_sequence(self, tensor: Tensor) -> Tensor:
        return self.context.sum_over_sequence(tensor)

    def predict(self, tokens: Tensor) -> Tensor:
        return self.pipeline.predict(self.own_tokens(tokens))

    def full_logits(self, logits: Tensor) -> Tensor:
        return self.context.full_logits(self.tensor.full_logits(logits))

    # The full model

    def fill(self, value: Values) -> None:
        block, parameters = self.tensor.part_of(value), dict(global_parameters(self.model))

        def also_for_masters(name: str, shape: torch.Size) -> Tensor:
            full = block(name, shape)
            self.masters.set(parameters[name], full)  # before it is rounded
            return full

        self.data.fill(also_for_masters)

    def full_parameters(self) -> dict[str, Tensor]:
        return self.join_blocks(self.data.full_parameters())

    def full_gradients(self) -> dict[str, Tensor | None]:
        return self.join_blocks(self.data.full_gradients() | self.masters.full_gradients())

    def join_blocks(self, blocks: dict[str, Tensor | None]) -> dict[str, Tensor | None]:
        blocks = {global_name(self.model, name): block for name, block in blocks.items()}
        return self.pipeline.join_blocks(self.tensor.join_blocks(blocks))

    def copy_to_parameters(self) -> None:
        self.data.copy_to_parameters()
        self.masters.copy_to_parameters()

    # What each axis answers, combined

    def norm_groups(self) -> list[ProcessGroup]:
        return [group for axis in self.axes for group in axis.norm_groups()]

    def num_copies(self, name: str) -> int:
        return prod(axis.num_copies(name) for axis in self.axes)

    def optimized(self, parameter: nn.Parameter) -> Tensor:
        return self.masters.optimized(parameter, self.data.optimized(parameter))

    def owned(self, parameter: nn.Parameter) -> range:
        return self.data.owned(parameter)

    def is_saved(self, name: str) -> bool:
        return all(axis.is_saved(name) for axis in self.axes)

    def place(self, name: str, shape: torch.Size) -> tuple[torch.Size, tuple[int, ...]]:
        return self.tensor.place(name, shape)

    def part_of(self, value: Values) -> Values:
        return self.tensor.part_of(value)
