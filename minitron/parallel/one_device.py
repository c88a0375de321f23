"""One device: the null case of `ParallelModel`, and the base of every technique.

Nothing is divided and nothing is sent, so every answer is the plain one. A technique derives from
`OneDevice` and overrides what it does otherwise.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from minitron.model.transformer import fill, global_parameters
from minitron.parallel.clipping import clip_pieces
from minitron.parallel.interface import (
    Accumulate,
    Kind,
    MicroBatches,
    OwnParts,
    ParallelModel,
    SumLoss,
    Values,
)
from minitron.parallel.parts import LocalShard
from minitron.parallel.placement import WHOLE, Placement
from minitron.pytorch.spans import span

IGNORED = -100
"""A target with this value does not count: padding, say."""


def summed_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the summed cross-entropy of logits (B, S, V) and counted targets (B, S), nats."""
    return F.cross_entropy(
        logits.flatten(0, 1), targets.flatten(), reduction="sum", ignore_index=IGNORED
    )


class OneDevice(ParallelModel):
    """A model that is all on this rank."""

    data: ParallelModel | None = None  # whose ranks read other samples, if that is not this
    data_part = (0, 1)
    sequence_parts = ranks_per_sample = 1
    divides_vocabulary = False

    def __init__(self, model: nn.Module):
        self.model = model

    def require_runnable(self, num_micro_batches: int) -> None:
        pass

    def num_in_flight(self, num_micro_batches: int) -> int:
        return 1

    # A step

    def forward_backward(
        self, accumulate: Accumulate, micro_batches: MicroBatches, divisor: Tensor
    ) -> Tensor:
        # `divisor` counts the tokens of whole sequences. Gradients and losses are averaged over the
        # ranks that have their parts too, so each divides by its share, or they would be 1/cp.
        divisor = divisor / self.ranks_per_sample
        loss = self.run_passes(accumulate, micro_batches, self.own_parts, divisor, self.summed_loss)
        self.finish()
        return loss

    def mean(self, tensor: Tensor) -> Tensor:
        return tensor.detach()

    def clip(self, parameters: list[Tensor], max_norm: float) -> Tensor:
        groups = self.norm_groups()
        if not groups:
            return nn.utils.clip_grad_norm_(parameters, max_norm)
        first = next(self.model.parameters())
        like = first.new_zeros((), dtype=torch.promote_types(first.dtype, torch.float32))
        copies = {
            self.optimizer_tensor(p): self.placement(name).copies
            for name, p in global_parameters(self.model)
        }
        return clip_pieces(parameters, max_norm, like, groups, copies)

    # The optimizer

    def shard(self, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        return optimizer

    def make_optimizer(
        self, factory: Callable[[list], torch.optim.Optimizer]
    ) -> torch.optim.Optimizer:
        trainable = [p for p in self.model.parameters() if p.requires_grad]
        return self.shard(factory([{"params": trainable}]))  # of a stage maybe none

    # Without a gradient

    @torch.no_grad()
    def sum_losses(
        self, forward: Callable[[Tensor], Tensor], micro_batches: MicroBatches
    ) -> Tensor:
        own = self.own_parts(micro_batches)
        return self.sum_over_sequence(self.run_forward_passes(forward, own, self.summed_loss))

    def own_parts(self, micro_batches: MicroBatches) -> MicroBatches:
        """Return this rank's part of each sequence."""
        return [
            (self.own_tokens(inputs), self.own_tokens(targets)) for inputs, targets in micro_batches
        ]

    def full_model(self) -> nn.Module:
        return FullModel(self)

    # The full model

    def fill(self, value: Values) -> None:
        fill(self.model, self.local_values(value))

    def local_values(self, value: Values) -> Values:
        """Wrap `value` so that it takes the shape of this rank's block, and returns that block."""

        def local(name: str, block: torch.Size) -> Tensor:
            placement = self.placement(name)
            return placement.local(value(name, placement.full_shape(block)))

        return local

    def full_parameters(self) -> dict[str, Tensor]:
        return self.all_gather_shards(
            {name: p.detach() for name, p in self.model.named_parameters()}
        )

    def full_gradients(self) -> dict[str, Tensor | None]:
        return self.all_gather_shards(
            {
                name: self.optimizer_tensor(p).grad
                for name, p in self.model.named_parameters()
                if p.requires_grad
            }
        )

    def parts(self) -> Iterator[tuple[str, LocalShard]]:
        for name, parameter in global_parameters(self.model):
            own = self.owned(parameter)
            if own:
                block, placement = parameter.shape, self.placement(name)
                full, offset = placement.full_shape(block), placement.offset(block)
                yield (
                    name,
                    LocalShard(
                        tuple(full), tuple(block), offset, own, self.optimizer_tensor(parameter)
                    ),
                )

    def copy_to_parameters(self) -> None:
        pass

    # What the grid asks of each axis: a step

    def run_passes(
        self,
        accumulate: Accumulate,
        micro_batches: MicroBatches,
        own_parts: OwnParts,
        divisor: Tensor,
        sum_loss: SumLoss,
    ) -> Tensor:
        loss, data = torch.zeros_like(divisor), self.data or self
        for number, micro_batch in enumerate(micro_batches, start=1):
            is_last = number == len(micro_batches)
            with nullcontext() if is_last else data.no_sync(), span("micro-batch", number):
                loss = loss + accumulate(own_parts([micro_batch]), divisor, sum_loss)
        return loss

    def run_forward_passes(
        self,
        forward: Callable[[Tensor], Tensor],
        micro_batches: MicroBatches,
        sum_loss: SumLoss,
    ) -> Tensor:
        return sum(sum_loss(forward(inputs), targets) for inputs, targets in micro_batches)

    def summed_loss(self, logits: Tensor, targets: Tensor) -> Tensor:
        return summed_loss(logits, targets)

    def no_sync(self) -> AbstractContextManager:
        return nullcontext()

    def finish(self) -> None:
        pass

    def sum_partial_gradients(self, gradient: Callable[[nn.Parameter], Tensor | None]) -> None:
        pass

    def connect_data(self, data: ParallelModel) -> None:
        self.data = data

    def pass_context(
        self,
        stage: int,
        kind: Kind,
        is_last: bool,
        incomplete: frozenset[nn.Parameter],
    ) -> AbstractContextManager:
        return nullcontext()

    def stage_parameters(self) -> list[list[nn.Parameter]]:
        return [list(self.model.parameters())]

    def shared_parameters(self) -> list[nn.Parameter]:
        return []

    # What the grid asks of each axis: which part of the model it holds

    def norm_groups(self) -> list[ProcessGroup]:
        return []

    def placement(self, name: str) -> Placement:
        return WHOLE

    def optimizer_tensor(self, parameter: nn.Parameter) -> Tensor:
        return parameter

    def owned(self, parameter: nn.Parameter) -> range:
        return range(parameter.numel())

    def all_gather_shards(self, blocks: dict[str, Tensor | None]) -> dict[str, Tensor | None]:
        return blocks

    def own_tokens(self, tokens: Tensor) -> Tensor:
        return tokens

    def sum_over_sequence(self, tensor: Tensor) -> Tensor:
        return tensor

    def predict(self, tokens: Tensor) -> Tensor:
        return self.model(tokens)

    def full_logits(self, logits: Tensor) -> Tensor:
        return logits


class FullModel(nn.Module):
    """A divided model as one from tokens (B, S) to logits (B, S, V), on every rank."""

    def __init__(self, parallel: ParallelModel):
        super().__init__()
        self.parallel, self.config = parallel, parallel.model.config
        self.model = parallel.model  # whose mode, to train or not, this one shares
        self.train(self.model.training)

    def forward(self, tokens: Tensor) -> Tensor:
        S = tokens.shape[1]
        # fill up to equal parts: it changes no earlier logits
        tokens = F.pad(tokens, (0, -S % self.parallel.sequence_parts))
        own = self.parallel.own_tokens(tokens)
        return self.parallel.full_logits(self.parallel.predict(own))[:, :S]
