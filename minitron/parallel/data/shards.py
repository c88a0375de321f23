"""Parameters in flat buckets, cut into equal shards: what the stages of ZeRO share.

A bucket is one flat tensor with a shard for each of the N ranks, filled up at its end so that all
shards are equally long. A piece is what a shard holds of one parameter.

Read in this order: owned_ranges, Bucket (its attributes, take to hand_over, unshard), share_out.
"""

from collections.abc import Callable, Iterable
from functools import wraps

import torch
import torch.distributed as dist
from torch import Tensor, nn

from minitron.comm.agreement import gathered
from minitron.comm.collectives import all_gather_single, reduce_scatter_single
from minitron.parallel.data.ddp import assign_buckets
from minitron.precision import gradient_dtype


def owned_ranges(sizes: list[int], num_ranks: int, rank: int) -> list[range]:
    """Which elements of each parameter `rank` owns, for parameters of `sizes` in one bucket.

    They lie one after the other, in shards of ceil(n / N) elements; the last ones may lack some.
    """
    length = -(-sum(sizes) // num_ranks)
    ranges = []
    start = -rank * length  # of the parameter, counted from the start of the shard
    for size in sizes:
        ranges.append(range(min(max(0, -start), size), min(max(0, length - start), size)))
        start += size
    return ranges


def share_out(parameters: Iterable[nn.Parameter], bucket_bytes: int) -> list[list[nn.Parameter]]:
    """Fill buckets of one dtype and device each, in the order in which gradients come: last first.

    `parameters` are in the order of the forward pass.
    """
    kinds: dict[tuple, list[nn.Parameter]] = {}
    for parameter in parameters:
        kinds.setdefault((parameter.dtype, parameter.device), []).append(parameter)
    buckets = [
        [alike[index] for index in indices] for alike in kinds.values()
        for indices in assign_buckets([parameter.nbytes for parameter in alike], bucket_bytes)
    ]
    place = {parameter: index for index, parameter in enumerate(parameters)}
    return sorted(buckets, key=lambda bucket: -place[bucket[-1]])


class Bucket:
    """Parameters of one dtype that travel together, as views into one flat tensor.

    flat    (n,)    the parameters, and up to N-1 elements more
    shard   (n/N,)  the part of it that this rank updates
    master  (n/N,)  the shard in float32; the shard itself if the parameters are float32
    pieces          by parameter, this rank's elements of it in `master`: what is optimized
    """

    def __init__(self, parameters: list[nn.Parameter], group: dist.ProcessGroup):
        self.parameters, self.group = parameters, group
        rank, size = group.rank(), group.size()
        self.sizes = [parameter.numel() for parameter in parameters]
        self.grad_dtype = gradient_dtype(parameters[0])
        length = -(-sum(self.sizes) // size)
        self.flat = parameters[0].detach().new_zeros(size * length)
        for parameter, view in self.views(self.flat).items():
            parameter.data = view.copy_(parameter.detach())
        self.shard = self.flat[rank * length:(rank + 1) * length]
        self.master = self.shard.to(torch.promote_types(self.shard.dtype, torch.float32))

        ranges = owned_ranges(self.sizes, size, rank)
        self.owned = {p: own for p, own in zip(parameters, ranges, strict=True) if own}
        self.pieces = self.cut(self.master)
        self.grad_full: Tensor | None = None  # (n,) while it is filled and sent
        self.grad_shard: Tensor | None = None  # (n/N,), the mean over the ranks

    def views(self, flat: Tensor) -> dict[nn.Parameter, Tensor]:
        """Cut a tensor (n,) into the parameters, in their shapes."""
        parts = flat[:sum(self.sizes)].split(self.sizes)
        return {p: part.view(p.shape) for p, part in zip(self.parameters, parts, strict=True)}

    def cut(self, shard: Tensor) -> dict[nn.Parameter, Tensor]:
        """Cut a tensor (n/N,) into the pieces of this rank."""
        sizes = [len(own) for own in self.owned.values()]
        return dict(zip(self.owned, shard[:sum(sizes)].split(sizes), strict=True))

    def take(self, parameter: nn.Parameter) -> None:
        """Move a gradient in here, divided by N; None counts as zeros."""
        if self.grad_full is None:
            self.grad_full = torch.empty_like(self.flat, dtype=self.grad_dtype)
            self.grad_views = self.views(self.grad_full)
        if parameter.grad is None:
            self.grad_views[parameter].zero_()
        else:
            torch.mul(parameter.grad, 1 / self.group.size(), out=self.grad_views[parameter])
            parameter.grad = None

    def start_reduce(self) -> None:
        """Start the reduce-scatter of the gradients."""
        self.arriving = torch.empty_like(self.shard, dtype=self.grad_dtype)
        self.work = reduce_scatter_single(self.arriving, self.grad_full, self.group, async_op=True)

    def finish_reduce(self) -> None:
        """Add what has arrived to the shard's gradient, and free the full one."""
        self.work.wait()
        if self.grad_shard is None:
            self.grad_shard = self.arriving
        else:
            self.grad_shard += self.arriving
        self.grad_full = self.grad_views = self.arriving = self.work = None

    def hand_over(self, unused: set[nn.Parameter]) -> None:
        """Give each piece its gradient, None where no rank has used the parameter."""
        for parameter, grad in self.cut(self.grad_shard.to(self.master.dtype)).items():
            self.pieces[parameter].grad = None if parameter in unused else grad
        self.grad_shard = None

    def unshard(self) -> dist.Work:
        """Start to fill `flat` with the shards of all ranks."""
        if self.master is not self.shard:
            self.shard.copy_(self.master)
        return all_gather_single(self.flat, self.shard, self.group, async_op=True)


def also_discard(optimizer: torch.optim.Optimizer, discard: Callable[[], None]) -> None:
    """Let `optimizer.zero_grad` call `discard` too: it knows the gradients of the pieces alone."""
    zero_grad = optimizer.zero_grad

    @wraps(zero_grad)
    def zero_all(set_to_none: bool = True) -> None:
        discard()
        zero_grad(set_to_none)

    optimizer.zero_grad = zero_all


def gather_pieces(
    own: dict[nn.Parameter, Tensor | None], buckets: list[Bucket], group: dist.ProcessGroup
) -> dict[nn.Parameter, Tensor | None]:
    """Join what every rank has for its pieces, on the CPU; all ranks must call it."""
    whole = {}
    for bucket in buckets:  # one at a time, to keep the messages small
        # A copy, or the whole bucket would be sent: pickle keeps what a view is a part of.
        kept = {number: own[p].to("cpu", copy=True) for number, p in enumerate(bucket.parameters)
                if own.get(p) is not None}
        by_rank = gathered(kept, group)
        for number, p in enumerate(bucket.parameters):
            parts = [of_rank[number] for of_rank in by_rank if number in of_rank]
            whole[p] = torch.cat(parts).view(p.shape) if parts else None
    return whole
