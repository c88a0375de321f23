"""Fully sharded data parallelism, ZeRO's stage 3: each rank keeps one N-th of everything.

Idea: a layer needs its parameters only while it computes. So each block is a unit that gathers
its parameters before its forward pass and frees them after it, and again around its backward pass;
then a reduce-scatter leaves each rank its part of the gradients. What comes before and after the
blocks is one more unit, the root. While a unit computes, the next is on its way.

Notation: N ranks; P parameters, with the up to N-1 elements that fill up each flat tensor.

Each rank holds: 1/N of parameters, gradients and optimizer state; beside them the parameters of
two units at most, the one that computes and the next (three if a recomputation spans several
blocks), and the gradients of two, the one that computes and the one before, which travel. The
root's add up until the backward pass ends: a tied embedding comes first and last.

Communication: per step each flat tensor is gathered twice and its gradients are reduce-scattered
once, together 3P (N-1)/N elements sent and received per rank; what is frozen is gathered only.
With `reshard_after_forward=False` parameters stay from the forward to the backward pass:
2P (N-1)/N, as in data parallelism. With `reshard_each_pass=False` they stay for all micro-batches
of a step, which suits a pipeline: one gather instead of 2 m. At the start, a broadcast of rank 0's
parameters. Every rank must run the same number of micro-batches, one at least. Where a pipeline
has both ends of the model on one rank, each pass through either of them gathers the root.

Read in this order: flat.owned_ranges, flat.FlatUnit, units.Unit, FullyShardedDataParallel.

Reference: Rajbhandari et al. 2019, "ZeRO" (sections 5.3 and 7.2.2); Zhao et al. 2023, "PyTorch
FSDP" (section 3). The steps of a unit's life have the names of PyTorch's FSDP2, `fully_shard`.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn

from minitron.comm.agreement import SINGLE_RANK, Group
from minitron.comm.collectives import in_messages
from minitron.model.transformer import materialize
from minitron.parallel.data.ddp import missing_gradient_message
from minitron.parallel.data.sharded import ShardedDataParallel
from minitron.parallel.data.units import Unit, root_modules, split_into_units
from minitron.parallel.interface import Kind, Values
from minitron.pytorch.private import call_after_backward, tensors_in


class FullyShardedDataParallel(ShardedDataParallel):
    """Hooks on a model with `blocks` that gather, free and reduce; its code and names stay.

    A step is that of `DataParallel`, the optimizer one from `shard`; gradients are in the pieces'
    `.grad`. They are reduced after each micro-batch and add up in the shards; without
    `sync_every_micro_batch` they add up unsharded under `no_sync` and travel once: P elements held.
    With `reshard_each_pass=False` parameters are gathered once a step, and stay until `finish`.

    Every rank starts from rank 0's parameters; those of a model on the meta device, which `device`
    replaces, are NaN until `fill`. What travels and computes has `compute_dtype`, bfloat16 say,
    and gradients travel in `reduce_dtype`, else in that too; shards, their gradients and the
    optimizer keep the model's dtype. (Under autocast, each rank would save a 16-bit copy of every
    matrix for the backward pass.)
    """

    def __init__(
        self,
        model: nn.Module,
        group: dist.ProcessGroup,
        reshard_after_forward: bool = True,
        sync_every_micro_batch: bool = True,
        compute_dtype: torch.dtype | None = None,
        reduce_dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        reshard_each_pass: bool = True,
        replicas: Group = SINGLE_RANK,
        **sharding,
    ):
        super().__init__(model, group, replicas, sync_every_micro_batch, **sharding)
        self.reshard_after_forward = reshard_after_forward and reshard_each_pass
        self.reshard_after_backward = reshard_each_pass
        self.stage = 0  # of this rank's, through which a micro-batch passes
        self.active: int | None = None  # the unit whose backward pass is running
        self.reducing: Unit | None = None  # whose gradients are on their way
        self.recomputing: Unit | None = None  # gathered for a recomputation alone

        have_values = not any(parameter.is_meta for parameter in model.parameters())
        require_real(model, device, have_values)
        materialize(model, device, in_memory=False)
        self.names = {parameter: name for name, parameter in model.named_parameters()}
        values = {p: p.detach() for p in self.names} if have_values else {}
        options = {
            "device": device,
            "compute_dtype": compute_dtype,
            "reduce_dtype": reduce_dtype,
            "replicas": replicas,
            "apart": set(self.pipeline.shared_parameters()),
        }
        self.units = [
            Unit(name, parameters, group, **options)
            for name, parameters in split_into_units(model).items()
        ]
        self.root = self.units[-1]
        self.stage_units: list[list[Unit]] = []  # the root is the first one's that has any of it
        for stage in self.pipeline.stage_parameters():
            known = [unit for units in self.stage_units for unit in units]
            self.stage_units.append(
                [
                    unit
                    for unit in self.units
                    if unit not in known and unit.parameters.intersection(stage)
                ]
            )
        self.register_shards([flat for unit in self.units for flat in unit.flats])
        for parameters in in_messages(self.flat_of if have_values else ()):
            self.start_from({parameter: values.pop(parameter) for parameter in parameters})
        self.copy_from_rank_0(model.buffers())
        self.add_hooks()

    def start_from(self, values: dict[nn.Parameter, Tensor]) -> None:
        """Set parameters to rank 0's values."""
        own = {
            parameter: value.to(self.flat_of[parameter].shard.device, copy=True).contiguous()
            for parameter, value in values.items()
        }
        self.copy_from_rank_0(own.values())
        for parameter, value in own.items():
            self.flat_of[parameter].set(parameter, value)

    def add_hooks(self) -> None:
        self.model.register_forward_pre_hook(self.start_forward)
        self.model.register_forward_hook(self.end_forward)
        for index, block in enumerate(self.model.blocks):
            block.register_forward_pre_hook(partial(self.pre_forward, index))
            block.register_forward_hook(partial(self.post_forward, index))
        for module in root_modules(self.model):
            module.register_forward_pre_hook(lambda *_: self.root.wait_for_unshard())
            if not isinstance(module, nn.Embedding):  # whose backward pass reads no parameters
                module.register_forward_hook(partial(self.listen, len(self.units) - 1))

    # Forward: root (embedding), blocks 0 to L-1, root (head)

    def start_forward(self, *_) -> None:
        self.end_failed_backward()
        self.root.unshard()
        self.units[0].unshard()

    def pre_forward(self, index: int, *_) -> None:
        """Wait for this unit's all-gather; prefetch the next."""
        unit = self.units[index]
        if self.active is not None:  # a recomputation, within the backward pass
            self.recomputing = unit if unit.is_sharded else None
            unit.wait_for_unshard()
            return
        if self.frees_after_forward():
            self.root.reshard()
        unit.wait_for_unshard()
        self.prefetch(index + 1)

    def post_forward(self, index: int, module: nn.Module, inputs: tuple, output) -> None:
        """Free a block's parameters."""
        unit = self.units[index]
        if self.active is None:
            self.listen(index, module, inputs, output)
        if unit is self.recomputing or (self.active is None and self.frees_after_forward()):
            unit.reshard()
            self.recomputing = None

    def listen(self, index: int, module: nn.Module, inputs: tuple, output) -> None:
        """Let `pre_backward` be called when the gradient of the unit's output is there."""
        for tensor in tensors_in(output):
            if tensor.requires_grad:
                tensor.register_hook(partial(self.pre_backward, index))

    def end_forward(self, *_) -> None:
        if not torch.is_grad_enabled():  # else the root is where the backward pass begins
            self.root.reshard()

    def frees_after_forward(self) -> bool:
        return self.reshard_after_forward or not torch.is_grad_enabled()

    # Backward: root (head), blocks L-1 to 0, root (embedding)

    def pre_backward(self, index: int, *_) -> None:
        """End the unit before, have this one's parameters there, and those of the next coming."""
        if self.active == index:
            return
        is_first = self.active is None
        if is_first:
            call_after_backward(self.end_backward)
        else:
            self.post_backward(self.active)
        self.active = index
        self.units[index].wait_for_unshard()
        if index > 0 and (is_first or self.units[index] is not self.root):
            self.prefetch(index - 1)

    def prefetch(self, index: int) -> None:
        """Start to gather a unit, unless the pass ends before: it is another stage's."""
        unit = self.units[index]
        if unit is self.root or unit in self.stage_units[self.stage]:
            unit.unshard()

    def post_backward(self, index: int) -> None:
        """Free a unit's parameters, and send its gradients."""
        unit = self.units[index]
        if self.reshard_after_backward:
            unit.reshard()
        if unit is not self.root:  # which has gradients to come
            self.reduce(unit)

    def reduce(self, unit: Unit) -> None:
        """Start to reduce a unit's gradients, when those of the unit before have arrived."""
        if self.reduces:
            self.finish_reduce()
            parameters = (p for flat in unit.trainable for p in flat.parameters)
            self.used.update(p for p in parameters if p.grad is not None)
            unit.start_reduce()
            self.reducing = unit

    def finish_reduce(self) -> None:
        if self.reducing is not None:
            self.reducing.finish_reduce(self.reduces_over_replicas)
            self.reducing = None

    def end_backward(self) -> None:
        self.post_backward(self.active)
        self.active = None
        if self.root in self.stage_units[self.stage]:
            self.reduce(self.root)
        self.finish_reduce()
        if self.reshard_after_backward:
            self.reshard()

    def end_failed_backward(self) -> None:
        """Begin anew if the last backward pass has raised, or a recomputation in it."""
        if self.active is not None:
            self.active = self.recomputing = None
            self.finish_reduce()
            self.reshard()

    @contextmanager
    def pass_context(
        self,
        stage: int,
        kind: Kind,
        is_last: bool,
        incomplete: frozenset[nn.Parameter],
    ) -> Iterator[None]:
        """Free a stage's parameters after a forward pass, reduce its gradients after W."""
        self.stage = stage
        with super().pass_context(stage, kind, is_last, incomplete):
            yield
            if kind == "F" and self.frees_after_forward():
                self.reshard()
            if kind == "W":
                for unit in reversed(self.stage_units[stage]):
                    self.reduce(unit)
                self.finish_reduce()
        self.stage = 0

    def reshard(self) -> None:
        for unit in self.units:
            unit.reshard()

    copy_to_parameters = reshard  # what is gathered is old now

    # What a step asks

    def finish(self) -> None:
        """Have in every piece's `.grad` the mean over the ranks; call it after the last backward.

        Raises ValueError if a trainable parameter has no gradient on this rank.
        """
        self.reshard()  # after a forward pass without a backward pass
        trainable = [p for p, piece in self.pieces.items() if piece.requires_grad]
        missing = [self.names[p] for p in trainable if p not in self.used]
        self.used.clear()
        if missing:
            raise ValueError(
                missing_gradient_message(missing, len(trainable), self.group.rank())
                + ", and leave no_sync for the last micro-batch"
            )
        for flat in self.flats:
            flat.set_gradients()

    def discard(self) -> None:
        self.end_failed_backward()
        super().discard()

    def fill(self, value: Values) -> None:
        self.reshard()  # or what is there would be taken for current
        super().fill(value)

    def full_parameters(self) -> dict[str, Tensor]:
        """Gather every parameter by name, on the CPU; every rank must call it."""
        full = self.gather(lambda piece: piece.detach())
        return {name: full[p] for p, name in self.names.items()}


def require_real(model: nn.Module, device: torch.device | str | None, have_values: bool) -> None:
    """Raise ValueError for a model on the meta device that cannot be filled."""
    if device is None and not have_values:
        raise ValueError("the model is on the meta device: pass the device to train on")
    for name, buffer in model.named_buffers():
        if buffer.is_meta:
            raise ValueError(
                f"{name} is a buffer on the meta device, and fill() sets "
                "only parameters: create it on the device to train on"
            )


def apply_fsdp(model: nn.Module, group: dist.ProcessGroup, **options) -> FullyShardedDataParallel:
    """Let `model` train over `group`, sharded; options as in `FullyShardedDataParallel`."""
    return FullyShardedDataParallel(model, group, **options)
