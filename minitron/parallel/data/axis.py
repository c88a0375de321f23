"""The data axis: ranks that hold the same layers and read other samples, whatever else they share.

With sharding the axis may be two: `group` is the ranks that divide the training state, `replicas`
those that hold the same part of it. Neighbors share; the replicas are further away.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor, nn

from minitron.comm.agreement import SINGLE_RANK, Group
from minitron.comm.collectives import all_reduce, broadcast_together
from minitron.parallel.interface import Kind
from minitron.parallel.one_device import OneDevice
from minitron.precision import discard_on_zero_grad


class DataAxis(OneDevice):
    """Ranks that average their gradients: what plain and sharded data parallelism share."""

    def __init__(self, model: nn.Module, group: dist.ProcessGroup, replicas: Group = SINGLE_RANK):
        super().__init__(model)
        self.group, self.replicas = group, replicas
        self.is_last = True  # the micro-batch that is running, of this step
        self.completes = True  # its gradients: the backward pass that is running is not half of one
        self.incomplete: frozenset[nn.Parameter] = frozenset()  # for another stage adds to them
        self.hooks: list = []
        self.buffers: list[Tensor] = []  # that follow rank 0's

    def broadcast_module_state(self) -> None:
        """Copy parameters and buffers of the axis's first rank to all others."""
        # Running statistics; a constant table is not in the state, and equal on all ranks.
        state = self.model.state_dict()
        self.buffers = [
            buffer
            for name, buffer in self.model.named_buffers()
            if name in state and buffer.is_floating_point()
        ]
        self.copy_from_rank_0(t.detach() for t in (*self.model.parameters(), *self.model.buffers()))

    def copy_buffers(self) -> None:
        """Copy rank 0's running statistics; every rank must call it."""
        self.copy_from_rank_0(self.buffers)

    def remove(self) -> None:
        """Take the hooks off the model."""
        for hook in self.hooks:
            hook.remove()

    @property
    def data_part(self) -> tuple[int, int]:
        """This rank's part of every global batch."""
        count = self.group.size() * self.replicas.size()
        return self.replicas.rank() * self.group.size() + self.group.rank(), count

    def shard(self, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        """Let `zero_grad` discard what `finish` has not given to the optimizer."""
        discard_on_zero_grad(optimizer, self.discard)
        return optimizer

    def discard(self) -> None:
        """Forget all gradients since the last step; every rank must call it."""

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Let gradients add up on this rank; the next backward pass outside sends their sum."""
        self.is_last = False
        try:
            yield
        finally:
            self.is_last = True

    @contextmanager
    def pass_context(
        self,
        stage: int,
        kind: Kind,
        is_last: bool,
        incomplete: frozenset[nn.Parameter],
    ) -> Iterator[None]:
        """Send gradients in the last backward pass of a stage alone."""
        self.is_last, self.completes, self.incomplete = is_last, kind != "I", incomplete
        try:
            yield
        finally:
            self.is_last = self.completes = True
            self.incomplete = frozenset()

    def mean(self, tensor: Tensor) -> Tensor:
        """Average a small tensor, a loss say, over the ranks; without a graph."""
        total = tensor.detach().clone()
        self.sum_over_ranks(total)
        return total / self.data_part[1]

    def sum_over_ranks(self, tensor: Tensor) -> None:
        """Sum a tensor over all ranks of the axis, in place."""
        for group in (self.group, self.replicas):
            if group.size() > 1:
                all_reduce(tensor, group)

    def copy_from_rank_0(self, tensors: Iterable[Tensor]) -> None:
        """Copy tensors of the axis's first rank to all others, in place."""
        tensors = list(tensors)
        broadcast_together(tensors, 0, self.group)
        if self.replicas.size() > 1:
            broadcast_together(tensors, 0, self.replicas)
