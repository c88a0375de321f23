"""Flat buffers: parameters and gradients that travel together, end to end in one tensor.

Idea: one large message costs less than many small ones, and a tensor of many parameters can be cut
into equal parts, whatever the parameters' shapes. Data parallelism sends gradients in flat buffers
(`FlatGradients`), ZeRO-1 and 2 cut them and the parameters into shards (`FlatShards`), and ZeRO-3
holds the parameters only while they are needed (`FlatUnit`).

Notation: N ranks; n elements in a buffer, those that fill up its end included.

    shard                        what a rank keeps of a buffer: one N-th
    piece                        what a shard holds of one parameter, maybe nothing
    unshard, reshard             gather the parameters from all shards; free them
    start_reduce, finish_reduce  average the gradients over the ranks, each rank's shard of them

The same shard may be on several ranks, the `replicas`: a gradient is reduce-scattered among the
ranks that have the shards, and what arrives is all-reduced over the replicas of the shard.

Read in this order: owned_ranges, Flat, FlatGradients, FlatShards (from take to set_gradients),
FlatUnit.
"""

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn

from minitron.comm.agreement import SINGLE_RANK, Group
from minitron.comm.collectives import all_gather_single, all_reduce, reduce_scatter_single
from minitron.precision import gradient_dtype
from minitron.pytorch.private import resize_storage


def owned_ranges(sizes: list[int], num_ranks: int, rank: int) -> list[range]:
    """Return which elements of each parameter `rank` owns, for parameters of `sizes` in one buffer.

    They lie one after the other, in shards of ceil(n / N) elements; the last ones may lack some.
    """
    length = -(-sum(sizes) // num_ranks)
    ranges = []
    start = -rank * length  # of the parameter, counted from the start of the shard
    for size in sizes:
        ranges.append(range(min(max(0, -start), size), min(max(0, length - start), size)))
        start += size
    return ranges


class Flat:
    """Which place each of some parameters has in a tensor (n,), and in this rank's shard (n/N,)."""

    def __init__(self, parameters: list[nn.Parameter], group: Group = SINGLE_RANK):
        self.parameters, self.group = parameters, group
        self.sizes = [parameter.numel() for parameter in parameters]
        self.length = -(-sum(self.sizes) // group.size())
        self.num_elements = group.size() * self.length
        ranges = owned_ranges(self.sizes, group.size(), group.rank())
        self.owned = dict(zip(parameters, ranges, strict=True))

    def views(self, full: Tensor) -> dict[nn.Parameter, Tensor]:
        """Cut a tensor (n,) into the parameters, in their shapes."""
        parts = full[: sum(self.sizes)].split(self.sizes)
        return {p: part.view(p.shape) for p, part in zip(self.parameters, parts, strict=True)}

    def cut(self, shard: Tensor) -> dict[nn.Parameter, Tensor]:
        """Cut a tensor (n/N,) into the pieces of this rank."""
        sizes = [len(own) for own in self.owned.values()]
        return dict(zip(self.owned, shard[: sum(sizes)].split(sizes), strict=True))


class FlatGradients(Flat):
    """Gradients of full parameters: every `.grad` is a view of the buffer, averaged in place."""

    def __init__(self, parameters: list[nn.Parameter], replicas: dist.ProcessGroup):
        super().__init__(parameters)
        self.replicas = replicas
        first = parameters[0]
        self.grad_full = first.new_empty(self.num_elements, dtype=gradient_dtype(first))
        self.grad_views = self.views(self.grad_full)

    def take(self, parameter: nn.Parameter) -> None:
        """Bring a gradient into the buffer, divided by the number of ranks."""
        view = self.grad_views[parameter]
        parameter.grad = torch.mul(parameter.grad, 1 / self.replicas.size(), out=view)

    def start_reduce(self) -> dist.Work:
        """Start the all-reduce of the gradients."""
        return all_reduce(self.grad_full, self.replicas, async_op=True)


class CompletedWork:
    """The null case of a `dist.Work`: nothing is on its way."""

    def wait(self) -> None:
        """Return at once."""


COMPLETED = CompletedWork()


class FlatShards(Flat):
    """Parameters as views of one tensor, of which this rank updates a shard.

    full    (n,)    what the model computes with: its parameters are views
    shard   (n/N,)  what the optimizer updates; at least float32
    pieces          by parameter, its part of the shard

    Gradients travel in `reduce_dtype`, and those that have arrived add up in `grad_dtype`.
    """

    def __init__(self, parameters: list[nn.Parameter], group: Group, replicas: Group = SINGLE_RANK):
        super().__init__(parameters, group)
        self.replicas = replicas
        self.grad_dtype = self.reduce_dtype = gradient_dtype(parameters[0])
        self.full = parameters[0].detach().new_zeros(self.num_elements)
        for parameter, view in self.views(self.full).items():
            parameter.data = view.copy_(parameter.detach())
        self.own = self.full[group.rank() * self.length :][: self.length]
        self.shard = self.own.to(torch.promote_types(self.own.dtype, torch.float32))
        self.pieces = self.cut(self.shard)
        self.reset()

    @torch.no_grad()
    def set(self, parameter: nn.Parameter, value: Tensor) -> None:
        """Set a parameter to a full `value`, and its piece before that is rounded."""
        parameter.copy_(value)
        self.set_piece(parameter, value)

    def set_piece(self, parameter: nn.Parameter, value: Tensor) -> None:
        """Set this rank's piece of a parameter to its part of a full `value`."""
        own = self.owned[parameter]
        self.pieces[parameter].detach().copy_(value.flatten()[own.start : own.stop])

    def unshard(self) -> dist.Work:
        """Start to fill `full` with the shards of all ranks."""
        if self.shard is not self.own:
            self.own.copy_(self.shard)
        return all_gather_single(self.full, self.own, self.group, async_op=True)

    def gather(self, own: dict[nn.Parameter, Tensor | None]) -> dict[nn.Parameter, Tensor | None]:
        """Join what the ranks have for their pieces, on the CPU; None is None on all of them."""
        shard, full = torch.zeros_like(self.shard), self.shard.new_empty(self.num_elements)
        for parameter, place in self.cut(shard).items():
            if own[parameter] is not None:
                place.copy_(own[parameter])
        all_gather_single(full, shard, self.group)
        return {p: None if own[p] is None else view.cpu() for p, view in self.views(full).items()}

    # Gradients

    def reset(self) -> None:
        """Hold no gradients; what is on its way must have arrived."""
        self.work: dist.Work | CompletedWork = COMPLETED  # which keeps what it sends
        self.grad_full: Tensor | None = None  # (n,) while it is filled and sent
        self.replica_sum: Tensor | None = None  # (n/N,), a sum that has not left for the replicas
        self.global_sum: Tensor | None = None  # (n/N,), that sum on its way
        self.grad_shard: Tensor | None = None  # (n/N,), the sum of what has arrived

    def accumulate(self, parameter: nn.Parameter) -> None:
        """Let a gradient add up in here over several micro-batches: `.grad` becomes a view.

        There may be none yet: a zero-bubble schedule defers it, and autograd tells the hook anyway.
        """
        if parameter.grad is None:
            return
        view = self.grad_view(parameter)
        if parameter.grad is not view:
            parameter.grad = view.copy_(parameter.grad)

    def grad_view(self, parameter: nn.Parameter) -> Tensor:
        """Return the view of the buffer that holds a parameter's full gradient."""
        if self.grad_full is None:
            self.grad_full = self.shard.new_empty(self.num_elements, dtype=self.reduce_dtype)
            self.grad_views = self.views(self.grad_full)
        return self.grad_views[parameter]

    def take(self, parameter: nn.Parameter) -> None:
        """Move a gradient in here, divided by the number of ranks; None counts as zeros."""
        view = self.grad_view(parameter)
        if parameter.grad is None:
            view.zero_()
        else:
            num_ranks = self.group.size() * self.replicas.size()
            torch.mul(parameter.grad, 1 / num_ranks, out=view)
            parameter.grad = None

    def start_reduce(self) -> None:
        """Start the reduce-scatter of the gradients."""
        self.accumulate_reduced()
        self.arriving = self.grad_full.new_empty(self.length)
        self.work = reduce_scatter_single(self.arriving, self.grad_full, self.group, async_op=True)

    def finish_reduce(self, over_replicas: bool = True) -> None:
        """Free the full gradients; add what has arrived to the shard's.

        With `over_replicas` the sum since the last time starts to travel over the replicas.
        """
        self.work.wait()
        total = self.arriving if self.replica_sum is None else self.replica_sum.add_(self.arriving)
        self.grad_full = self.grad_views = self.arriving = None
        self.work = COMPLETED
        if not over_replicas:
            self.replica_sum = total.to(self.grad_dtype)
        else:
            self.global_sum, self.replica_sum = total.to(self.reduce_dtype), None
            if self.replicas.size() > 1:
                self.work = all_reduce(self.global_sum, self.replicas, async_op=True)
            else:
                self.accumulate_reduced()

    def accumulate_reduced(self) -> None:
        """Add to the shard's gradient what has traveled over the replicas."""
        if self.global_sum is not None:
            self.work.wait()
            if self.grad_shard is None:
                self.grad_shard = self.global_sum.to(self.grad_dtype)
            else:
                self.grad_shard += self.global_sum
            self.global_sum, self.work = None, COMPLETED

    def set_gradients(self, unused: Iterable[nn.Parameter] = ()) -> None:
        """Give each piece its gradient; None if it is `unused`, or there is none."""
        self.accumulate_reduced()
        grads = {} if self.grad_shard is None else self.cut(self.grad_shard.to(self.shard.dtype))
        for parameter, piece in self.pieces.items():
            piece.grad = None if parameter in unused else grads.get(parameter)
        self.reset()


class FlatUnit(FlatShards):
    """Parameters that are there only while they are needed: `full` is empty when sharded.

    The shard is a tensor of its own, in the parameters' dtype; `full` has `compute_dtype`.
    """

    def __init__(
        self,
        parameters: list[nn.Parameter],
        group: Group,
        replicas: Group = SINGLE_RANK,
        device: torch.device | str | None = None,
        compute_dtype: torch.dtype | None = None,
        reduce_dtype: torch.dtype | None = None,
    ):
        Flat.__init__(self, parameters, group)
        self.replicas = replicas
        first = parameters[0]
        self.is_trainable, device = first.requires_grad, device or first.device
        self.shard = torch.full((self.length,), torch.nan, dtype=first.dtype, device=device)
        self.pieces = {
            parameter: nn.Parameter(piece, self.is_trainable)
            for parameter, piece in self.cut(self.shard).items()
        }

        dtype = compute_dtype or first.dtype
        self.grad_dtype, self.reduce_dtype = first.dtype, reduce_dtype or dtype
        self.full = torch.empty(self.num_elements, dtype=dtype, device=device)
        self.full_views = self.views(self.full)
        # In place of a freed parameter: reading it yields NaN, not freed memory.
        self.absent = torch.full((), torch.nan, dtype=dtype, device=device)
        self.reset()

    def set(self, parameter: nn.Parameter, value: Tensor) -> None:
        """Set this rank's piece of a parameter to its part of a full `value`."""
        self.set_piece(parameter, value.detach())

    def unshard(self) -> dist.Work:
        """Start to fill `full`, and let the parameters be there."""
        resize_storage(self.full, self.full.nbytes)
        for parameter, view in self.full_views.items():
            parameter.data = view
        # Kept until it has left: while a GPU sends it, nothing else may take its memory.
        self.leaving = self.shard.to(self.full.dtype)
        return all_gather_single(self.full, self.leaving, self.group, async_op=True)

    def reshard(self) -> None:
        """Let go of the full parameters."""
        for parameter in self.parameters:
            parameter.data = self.absent.expand(parameter.shape)
        resize_storage(self.full, 0)
