"""The grid of axes: several ways of dividing a model, as one parallel model.

Along `data` the ranks hold the same layers and read other samples, along `pipeline` they hold one
layer after the other. Along a layer axis they compute each layer together, for the same samples:
tensor parallelism cuts its matrices, context parallelism the sequence. For the training state other
tokens are as good as other samples, so the ranks of `data` are also those of an axis that divides
the sequence. An axis with one rank is a `OneDevice`. `masters` are float32 copies that the
optimizer updates, if there are any.

The grid knows no technique: it asks every axis the same questions (see `interface`) and combines
the answers. Another layer axis takes no change here.

Read in this order: Grid, from run_passes to shard; then how the blocks are joined.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from math import prod

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from minitron.model.transformer import global_name, global_parameters
from minitron.parallel.interface import (
    Accumulate,
    MicroBatches,
    OwnParts,
    ParallelModel,
    SumLoss,
    Values,
)
from minitron.parallel.one_device import OneDevice
from minitron.parallel.placement import Placement, together
from minitron.precision import NO_MASTERS, MasterWeights


class Grid(OneDevice):
    """Axes together, each an implementation of `ParallelModel` for the same `model`.

    `layers` are the layer axes, by any name, in the order in which they were applied to the model.
    What is left out has one rank.
    """

    def __init__(
        self,
        model: nn.Module,
        masters: MasterWeights = NO_MASTERS,
        data: ParallelModel | None = None,
        pipeline: ParallelModel | None = None,
        **layers: ParallelModel,
    ):
        super().__init__(model)
        alone = OneDevice(model)
        self.data, self.pipeline, self.layers = data or alone, pipeline or alone, layers
        self.axes = [self.data, *layers.values(), self.pipeline]
        self.loss_axis = next((axis for axis in self.axes if axis.divides_vocabulary), alone)
        self.pipeline.connect_data(self.data)
        self.masters = masters
        self.device = next(model.parameters()).device

    @property
    def data_part(self) -> tuple[int, int]:
        index, count = self.data.data_part
        return index // self.ranks_per_sample, count // self.ranks_per_sample

    @property
    def ranks_per_sample(self) -> int:
        return prod(axis.ranks_per_sample for axis in self.layers.values())

    @property
    def sequence_parts(self) -> int:
        return prod(axis.sequence_parts for axis in self.layers.values())

    def require_runnable(self, num_micro_batches: int) -> None:
        for axis in self.axes:
            axis.require_runnable(num_micro_batches)

    def num_in_flight(self, num_micro_batches: int) -> int:
        return self.pipeline.num_in_flight(num_micro_batches)

    # A step

    def run_passes(
        self,
        accumulate: Accumulate,
        micro_batches: MicroBatches,
        own_parts: OwnParts,
        divisor: Tensor,
        sum_loss: SumLoss,
    ) -> Tensor:
        return self.pipeline.run_passes(accumulate, micro_batches, own_parts, divisor, sum_loss)

    def run_forward_passes(
        self,
        forward: Callable[[Tensor], Tensor],
        micro_batches: MicroBatches,
        sum_loss: SumLoss,
    ) -> Tensor:
        return self.pipeline.run_forward_passes(forward, micro_batches, sum_loss)

    def summed_loss(self, logits: Tensor, targets: Tensor) -> Tensor:
        return self.loss_axis.summed_loss(logits, targets)

    def no_sync(self) -> AbstractContextManager:
        return self.data.no_sync()

    def finish(self) -> None:
        self.data.finish()
        self.masters.take_gradients()
        for axis in self.axes:
            axis.sum_partial_gradients(lambda parameter: self.optimizer_tensor(parameter).grad)

    def mean(self, tensor: Tensor) -> Tensor:
        return self.data.mean(tensor)

    # The optimizer

    def shard(self, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        for owner in (self.data, self.masters, *self.layers.values(), self.pipeline):
            optimizer = owner.shard(optimizer)
        return optimizer

    # Without a gradient

    def own_tokens(self, tokens: Tensor) -> Tensor:
        for axis in self.layers.values():
            tokens = axis.own_tokens(tokens)
        return tokens

    def sum_over_sequence(self, tensor: Tensor) -> Tensor:
        for axis in self.layers.values():
            tensor = axis.sum_over_sequence(tensor)
        return tensor

    def predict(self, tokens: Tensor) -> Tensor:
        return self.pipeline.predict(tokens)

    def full_logits(self, logits: Tensor) -> Tensor:
        for axis in reversed(self.layers.values()):
            logits = axis.full_logits(logits)
        return logits

    # The full model

    def fill(self, value: Values) -> None:
        local, parameters = self.local_values(value), dict(global_parameters(self.model))

        def also_for_masters(name: str, shape: torch.Size) -> Tensor:
            block = local(name, shape)
            self.masters.set(parameters[name], block)  # before it is rounded
            return block

        self.data.fill(also_for_masters)

    def full_parameters(self) -> dict[str, Tensor]:
        return self.all_gather_shards(self.data.full_parameters())

    def full_gradients(self) -> dict[str, Tensor | None]:
        return self.all_gather_shards(self.data.full_gradients() | self.masters.full_gradients())

    def all_gather_shards(self, blocks: dict[str, Tensor | None]) -> dict[str, Tensor | None]:
        blocks = {global_name(self.model, name): block for name, block in blocks.items()}
        for axis in reversed(self.layers.values()):
            blocks = axis.all_gather_shards(blocks)
        return self.pipeline.all_gather_shards(blocks)

    def copy_to_parameters(self) -> None:
        self.data.copy_to_parameters()
        self.masters.copy_to_parameters()

    # What each axis answers, combined

    def norm_groups(self) -> list[ProcessGroup]:
        return [group for axis in self.axes for group in axis.norm_groups()]

    def placement(self, name: str) -> Placement:
        return together(axis.placement(name) for axis in self.axes)

    def optimizer_tensor(self, parameter: nn.Parameter) -> Tensor:
        return self.masters.optimizer_tensor(parameter, self.data.optimizer_tensor(parameter))

    def owned(self, parameter: nn.Parameter) -> range:
        return self.data.owned(parameter)
