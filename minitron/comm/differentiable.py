"""Collectives inside a model: each has a backward pass, which is its partner.

    function          forward           backward         from                 to
    all_reduce        all-reduce        identity         N partial sums       the same sum
    all_gather        all-gather        reduce-scatter   shards of x          the full x, N uses
    reduce_scatter    reduce-scatter    all-gather       N partial sums       shards of the sum
    all_to_all        all-to-all        all-to-all       cut along one dim    cut along another

Why they are pairs: where N ranks use one tensor, its gradient is the sum of N; where N tensors
are summed, each has the gradient of the sum. A tensor that all ranks hold alike has a gradient
that all ranks hold alike: it counts once, not N times.

`all_reduce` is g of Shoeybi et al. 2019 (section 3). Its conjugate f, an all-reduce in the backward
pass alone, stands in `model.linear`, where layers that read one x send one sum. `all_gather` and
`reduce_scatter` are g and its conjugate of Korthikanti et al. 2022 (section 4.2.2).

The `start_` functions have no backward pass. They return a function that waits for the result, so
that a layer can compute in between. What they send stays alive until then: the backend holds it.
"""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup

from minitron.comm.collectives import (
    all_gather_single,
    all_to_all_single,
    reduce_scatter_single,
)
from minitron.comm.collectives import all_reduce as all_reduce_in_place


def all_reduce(x_partial: Tensor, group: ProcessGroup) -> Tensor:
    """Sum `x_partial` over the ranks; all get the same sum."""
    return AllReduce.apply(x_partial, group)


def all_gather(x_shard: Tensor, group: ProcessGroup, dim: int) -> Tensor:
    """Join every rank's `x_shard` along `dim`: (..., n/N, ...) becomes (..., n, ...)."""
    return AllGather.apply(x_shard, group, dim)


def reduce_scatter(x_partial: Tensor, group: ProcessGroup, dim: int) -> Tensor:
    """Sum `x_partial` over the ranks, and keep this rank's part along `dim`, (..., n/N, ...).

    Raises ValueError if `dim` is not divisible by the number of ranks.
    """
    return ReduceScatter.apply(x_partial, group, dim)


def all_to_all(x: Tensor, group: ProcessGroup, split_dim: int, join_dim: int) -> Tensor:
    """Give rank r the part r along `split_dim`; join what all ranks give along `join_dim`.

    Raises ValueError if `split_dim` is not divisible by the number of ranks.
    """
    return AllToAll.apply(x, group, split_dim, join_dim)


class AllReduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x_partial: Tensor, group: ProcessGroup) -> Tensor:
        return summed(x_partial, group)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor):
        return grad, None


class AllGather(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x_shard: Tensor, group: ProcessGroup, dim: int) -> Tensor:
        ctx.group, ctx.dim = group, dim
        return start_all_gather(x_shard, group, dim)()

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor):
        return start_reduce_scatter(grad, ctx.group, ctx.dim)(), None, None


class ReduceScatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x_partial: Tensor, group: ProcessGroup, dim: int) -> Tensor:
        ctx.group, ctx.dim = group, dim
        return start_reduce_scatter(x_partial, group, dim)()

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor):
        return start_all_gather(grad, ctx.group, ctx.dim)(), None, None


class AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, group: ProcessGroup, split_dim: int, join_dim: int) -> Tensor:
        ctx.group, ctx.dims = group, (split_dim, join_dim)
        return exchanged(x, group, split_dim, join_dim)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor):
        split_dim, join_dim = ctx.dims
        return exchanged(grad, ctx.group, join_dim, split_dim), None, None, None


# Without a backward pass. PyTorch's collectives join and cut along dim 0: another costs a copy.


def start_all_reduce(x_partial: Tensor, group: ProcessGroup) -> Callable[[], Tensor]:
    """Start to sum `x_partial` in place; returns a function that waits for the sum."""
    work = all_reduce_in_place(x_partial, group, async_op=True)

    def wait() -> Tensor:
        work.wait()
        return x_partial

    return wait


def start_all_gather(x_shard: Tensor, group: ProcessGroup, dim: int) -> Callable[[], Tensor]:
    """Start to join `x_shard` along `dim`; returns a function that waits for the full x."""
    size, x_shard, dim = group.size(), x_shard.contiguous(), dim % x_shard.dim()
    stacked = x_shard.new_empty(size, *x_shard.shape)
    work = all_gather_single(stacked.flatten(0, 1), x_shard, group, async_op=True)

    def wait() -> Tensor:
        work.wait()
        return stacked.movedim(0, dim).flatten(dim, dim + 1)  # a view, if 1 sequence or dim 0

    return wait


def start_reduce_scatter(x_partial: Tensor, group: ProcessGroup, dim: int) -> Callable[[], Tensor]:
    """Start to sum `x_partial`; returns a function that waits for this rank's part along `dim`."""
    size, dim = group.size(), dim % x_partial.dim()
    part = equal_parts(x_partial, size, dim)[0]
    stacked = x_partial.unflatten(dim, (size, -1)).movedim(dim, 0).contiguous().flatten(0, 1)
    shard = x_partial.new_empty(part.shape)
    work = reduce_scatter_single(shard, stacked, group, async_op=True)

    def wait() -> Tensor:
        work.wait()
        return shard

    return wait


def summed(x_partial: Tensor, group: ProcessGroup) -> Tensor:
    """Return the sum over the ranks; `x_partial` stays as it is."""
    return start_all_reduce(x_partial.clone(memory_format=torch.contiguous_format), group)()


def exchanged(x: Tensor, group: ProcessGroup, split_dim: int, join_dim: int) -> Tensor:
    outgoing = torch.stack(equal_parts(x, group.size(), split_dim))
    incoming = torch.empty_like(outgoing)
    all_to_all_single(incoming, outgoing, group)
    return torch.cat(incoming.unbind(), join_dim)


def equal_parts(x: Tensor, count: int, dim: int) -> tuple[Tensor, ...]:
    """Cut `x` into `count` equal parts along `dim`."""
    if x.shape[dim] % count != 0:
        raise ValueError(
            f"dim {dim} of {tuple(x.shape)} has {x.shape[dim]} entries, which are not divisible by "
            f"{count} ranks: pad it to {-(-x.shape[dim] // count) * count}"
        )
    return x.chunk(count, dim)
