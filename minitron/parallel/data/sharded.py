"""What the stages of ZeRO have in common: an optimizer that updates this rank's pieces alone.

A technique divides the model's parameters into flat buffers (`parallel.flat`) and says when they
are unsharded, resharded and reduced. The optimizer, clipping, and the full model again are here.

Read in this order: ShardedDataParallel, from finish to shard.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager

import torch
import torch.distributed as dist
from torch import Tensor, nn

from minitron.comm.agreement import SINGLE_RANK, Group
from minitron.model.transformer import global_parameters
from minitron.parallel.data.axis import DataAxis
from minitron.parallel.flat import FlatShards
from minitron.parallel.interface import Kind, ParallelModel, Values
from minitron.parallel.one_device import OneDevice
from minitron.precision import update_instead


class ShardedDataParallel(DataAxis):
    """Data parallelism in which each rank keeps and updates a shard of every flat buffer.

    A step is that of `DataParallel`; the optimizer must have been given to `shard`, and the
    gradients are then not in the parameters' `.grad` but in those of its pieces. For optimizers
    that treat every element alike: SGD, Adam and most others, but not LBFGS, Adafactor or Muon.

    `group` divides the state; each of the `replicas` of a rank has the same shard (hybrid
    sharding). With `sync_every_micro_batch` gradients are reduced after each micro-batch, so that
    their sums are sharded, with `sync_replicas_every_micro_batch` over the replicas too. Otherwise
    they are reduced in the last micro-batch. The stages of a `pipeline` have buffers of their own,
    and so has what two of them share.
    """

    def __init__(
        self,
        model: nn.Module,
        group: dist.ProcessGroup,
        replicas: Group = SINGLE_RANK,
        sync_every_micro_batch: bool = True,
        sync_replicas_every_micro_batch: bool = False,
        pipeline: ParallelModel | None = None,
    ):
        super().__init__(model, group, replicas)
        self.is_stage = pipeline is not None  # other ranks have other layers
        self.pipeline = pipeline or OneDevice(model)
        self.sync_every_micro_batch = sync_every_micro_batch
        self.sync_replicas_every_micro_batch = sync_replicas_every_micro_batch
        self.used: set[nn.Parameter] = set()  # had a gradient on this rank, since `finish`
        self.names: dict[nn.Parameter, str] = {}  # what has a gradient or is sharded

    def register_shards(self, flats: list[FlatShards]) -> None:
        """Keep a shard of each of `flats`."""
        self.flats = flats
        self.flat_of = {p: flat for flat in flats for p in flat.parameters}
        self.pieces = {p: piece for flat in flats for p, piece in flat.pieces.items()}

    @property
    def reduces(self) -> bool:
        """Whether the gradients of the running micro-batch are reduced after it."""
        return self.completes and (self.is_last or self.sync_every_micro_batch)

    @property
    def reduces_over_replicas(self) -> bool:
        """Whether they are then reduced over the replicas too."""
        every = self.sync_replicas_every_micro_batch or self.replicas.size() == 1
        return self.is_last or every

    def pass_context(
        self,
        stage: int,
        kind: Kind,
        is_last: bool,
        incomplete: frozenset[nn.Parameter],
    ) -> AbstractContextManager:
        assert self.is_stage, (
            "both end stages hold the embedding and must shard it in the same "
            "way if it is tied: pass `pipeline`"
        )
        return super().pass_context(stage, kind, is_last, incomplete)

    # What a technique does

    def discard(self) -> None:
        for flat in self.flats:
            flat.accumulate_reduced()
            flat.reset()
        for parameter in self.names:
            parameter.grad = None
        self.used.clear()

    # The optimizer

    def shard(self, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        """Let `optimizer`, made for the model's parameters, update this rank's pieces instead.

        Every `step` ends with `after_step`.
        """
        for group in optimizer.param_groups:
            group["params"] = [p for p in group["params"] if p in self.pieces]
        update_instead(optimizer, self.pieces, self.owned)
        optimizer.register_step_pre_hook(self.require_finished)
        optimizer.register_step_post_hook(lambda *_: self.after_step())
        return super().shard(optimizer)

    def after_step(self) -> None:
        """Let the model have what the optimizer has updated."""
        self.copy_to_parameters()

    def require_finished(self, *_) -> None:
        if self.used or any(parameter.grad is not None for parameter in self.names):
            raise ValueError("optimizer.step() before finish(): the gradients are not complete")

    def optimizer_tensor(self, parameter: nn.Parameter) -> Tensor:
        return self.pieces.get(parameter, parameter)

    def owned(self, parameter: nn.Parameter) -> range:
        if parameter not in self.flat_of:
            return super().owned(parameter)
        return self.flat_of[parameter].owned[parameter]

    def norm_groups(self) -> list[dist.ProcessGroup]:
        return [self.group]

    # The full model

    @torch.no_grad()
    def fill(self, value: Values) -> None:
        """Set every parameter, and this rank's pieces of it, to its part of a full value."""
        for name, parameter in global_parameters(self.model):
            full = value(name, parameter.shape)
            if parameter in self.flat_of:
                self.flat_of[parameter].set(parameter, full)
            else:
                parameter.copy_(full)

    def full_gradients(self) -> dict[str, Tensor | None]:
        """Gather every gradient after `finish`, by name, on the CPU; every rank must call it."""
        full = self.gather(lambda piece: piece.grad)
        return {name: full[p] for p, name in self.names.items() if p.requires_grad}

    def gather(self, of: Callable[[Tensor], Tensor | None]) -> dict[nn.Parameter, Tensor | None]:
        """Join what the ranks have `of` their pieces, by parameter, on the CPU."""
        full = {}
        for flat in self.flats:
            full.update(flat.gather({p: of(piece) for p, piece in flat.pieces.items()}))
        return full
