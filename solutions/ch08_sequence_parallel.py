"""Exercises of chapter 8: sequence parallelism. What every rank still holds whole is cut too.

Write a body, save, and ask `minitron check 8.1`, or check("8.1") in a notebook. Stuck:
`minitron hint 8.1`, three levels. Start again: `minitron reset 8.1`. The exercises do not build on
one another; take them in any order.

In 8.1, 8.2 and 8.4 every rank runs your code. `group` is the group of the ranks: group.rank(),
group.size(). With N ranks, these take contiguous tensors, and autograd knows nothing of them:

    all_gather_single(output, input, group)        fills output, (N n, ...), with the ranks' inputs,
                                                   (n, ...), in the order of the ranks
    reduce_scatter_single(output, input, group)    sums input, (N n, ...), over the ranks: output,
                                                   (n, ...), gets rows r n to (r + 1) n on rank r
    dist.all_reduce(tensor, group=group)           sums over the ranks, in place

All block; with async_op=True they return a work to wait() for.
"""

import torch
import torch.distributed as dist
from torch import Tensor, nn

from minitron.comm.collectives import all_gather_single, reduce_scatter_single
from minitron.comm.differentiable import all_gather, reduce_scatter


# Exercise 8.1 | Gather and scatter | 20 min | difficulty 2 | replaces minitron.comm.differentiable
# Train with your ReduceScatter on 2 ranks: --parallel.tp 2 --parallel.sequence
class AllGather(torch.autograd.Function):
    """Join what the ranks have; on the way back, sum their gradients and give each its part.

        x = AllGather.apply(x_shard, group, dim)

    x_shard is this rank's part of x along dim, (..., n/N, ...). x is whole, (..., n, ...), and the
    same on all ranks. Each rank goes on from x with a computation of its own, so each has another
    gradient of x; that of x_shard is this rank's part of their sum. On the wire: one all-gather of
    x forward, one reduce-scatter of its gradient backward.

    Mostly dim is 1, the sequence in (B, S/N, D); the collectives know dim 0 alone. x_shard and the
    gradients need not be contiguous. They belong to others too: leave their values as they are.

    Example: on 2 ranks x_shard is [[1], [3]] and [[2], [4]], and dim is 1: x is [[1, 2], [3, 4]].
    The gradient of x is [[1, 1], [1, 1]] on rank 0 and [[0, 10], [20, 0]] on rank 1; that of
    x_shard is [[1], [21]] on rank 0 and [[11], [1]] on rank 1.
    """

    @staticmethod
    def forward(ctx, x_shard: Tensor, group: dist.ProcessGroup, dim: int) -> Tensor:
        """Return x; what the backward pass needs is kept in attributes of ctx."""
        ### BEGIN SOLUTION
        ctx.group, ctx.dim = group, dim
        shards = x_shard.new_empty(group.size() * len(x_shard), *x_shard.shape[1:])
        all_gather_single(shards, x_shard.contiguous(), group)
        return torch.cat(shards.chunk(group.size()), dim)
        ### END SOLUTION

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None, None]:
        """Return the gradient of x_shard from that of x, and None for group and dim."""
        ### BEGIN SOLUTION
        parts = grad.chunk(ctx.group.size(), ctx.dim)
        grad_shard = grad.new_empty(parts[0].shape)
        reduce_scatter_single(grad_shard, torch.cat(parts), ctx.group)
        return grad_shard, None, None
        ### END SOLUTION


class ReduceScatter(torch.autograd.Function):
    """Sum what the ranks have, and give each its part; on the way back, join the gradients.

        x_shard = ReduceScatter.apply(x_partial, group, dim)

    x_partial is one of N summands of x, (..., n, ...). x_shard is this rank's part of the sum along
    dim, (..., n/N, ...). On the wire: one reduce-scatter of x_partial forward, one all-gather of
    the gradient backward. dim, layout and whose tensors they are: as above.

    Example: on 2 ranks x_partial is [[1, 2], [3, 4]] and [[10, 20], [30, 40]], and dim is 1:
    x_shard is [[11], [33]] on rank 0 and [[22], [44]] on rank 1. Its gradient is [[1], [2]] and
    [[3], [4]]; that of x_partial is [[1, 3], [2, 4]] on both.
    """

    @staticmethod
    def forward(ctx, x_partial: Tensor, group: dist.ProcessGroup, dim: int) -> Tensor:
        """Return x_shard."""
        ### BEGIN SOLUTION
        ctx.group, ctx.dim = group, dim
        parts = x_partial.chunk(group.size(), dim)
        x_shard = x_partial.new_empty(parts[0].shape)
        reduce_scatter_single(x_shard, torch.cat(parts), group)
        return x_shard
        ### END SOLUTION

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None, None]:
        """Return the gradient of x_partial from that of x_shard, and None for group and dim."""
        ### BEGIN SOLUTION
        size = ctx.group.size()
        grads = grad.new_empty(size * len(grad), *grad.shape[1:])
        all_gather_single(grads, grad.contiguous(), ctx.group)
        return torch.cat(grads.chunk(size), ctx.dim), None, None
        ### END SOLUTION


# Exercise 8.2 | Gradients of other tokens | 15 min | difficulty 2
def sum_partial_gradients(model: nn.Module, group: dist.ProcessGroup) -> None:
    """Make every gradient of a sequence-parallel model what it is in one process.

    It is called once per step, after the last backward pass. `model` is minitron's Transformer
    (minitron/model/transformer.py), of the gpt or of the llama family: its parameters have their
    usual names. It is cut over the group:

        query, key, value, up, gate, head    read all tokens. A rank has some of the rows of their
                                             weights, and of their biases
        out, down                            read all tokens. A rank has some of the columns of
                                             their weights: the sum over the ranks is scattered,
                                             then the bias is added, which every rank has whole
        token_embedding                      a rank has some of the vocabulary's rows, and looks
                                             all tokens up in them; that sum is scattered too
        everything else                      is whole on every rank, and is used for this rank's
                                             tokens alone, S/N of every sequence

    Of a parameter that is cut, backward() brings this rank's part of the gradient, complete. Which
    gradients are not complete? Make those the same on all ranks, and leave the others as they are.
    Parameters without a gradient, such as frozen ones, have none on any rank, and keep none. On the
    wire: one all-reduce, of the values that need it.

    Example: on 2 ranks final_norm.weight.grad is [1, 2] and [10, 20], head.weight.grad [[3, 4]] and
    [[5, 6]]. Afterwards final_norm.weight.grad is [11, 22] on both; head.weight.grad is as before.
    """
    ### BEGIN SOLUTION
    endings = ("norm.weight", "norm.bias", "out.bias", "down.bias", "position_embedding.weight")
    partial = [parameter.grad for name, parameter in model.named_parameters()
               if name.endswith(endings) and parameter.grad is not None]

    flat = torch.cat([grad.flatten() for grad in partial])
    dist.all_reduce(flat, group=group)
    for grad, total in zip(partial, flat.split([g.numel() for g in partial]), strict=True):
        grad.copy_(total.view_as(grad))
    ### END SOLUTION


# Exercise 8.3 | What a rank saves | 20 min | difficulty 2
def saved_bytes(
    batch_size: int, sequence_length: int, width: int, num_heads: int, num_ranks: int,
    sequence_parallel: bool, selective: bool,
) -> int:
    """Count the bytes that one gpt block saves in forward, on one of N ranks that share it.

    B, S, D, H and N are the first five arguments; the feed-forward is F = 4 D wide. Values have 2
    bytes, dropout is on, and its masks have 1 byte per value. On one rank, N = 1, a block saves

        the inputs of both norms                               2 B S D values
        what query, key and value read, and what up reads      2 B S D values
        query, key and value                                   3 B S D values
        what out reads                                         1 B S D values
        what gelu reads, and what down reads                   8 B S D values
        the masks of both branches' outputs                    2 B S D masks
        softmax's output, the same after dropout               2 B H S S values
        the mask of that dropout                               1 B H S S masks

    Tensor parallelism gives a rank some of the heads and some of the F. Which of these does it cut,
    and which has every rank in full? With sequence_parallel a rank has S/N tokens of everything
    between the cut layers; and query, key, value and up keep their part of what they read, as they
    gather it again for the backward pass. If selective, attention is computed again, from query,
    key and value to what out reads: what lies between them is not saved.

    N divides H, D and S. Counts are exact integers. Left out is what is small: the norms' means and
    deviations, and the mask of the future.

    Example: B 1, S 2, D 4, H 2 on 2 ranks. Tensor parallelism alone: 196 bytes. With
    sequence_parallel 156; selective as well, 136.
    """
    ### BEGIN SOLUTION
    wide = batch_size * sequence_length * width
    square = batch_size * num_heads * sequence_length**2

    # norms, what the cut layers read, masks | query, key, value, out, gelu, down
    around, inside = (2 + 2) * 2 + 2, (3 + 1 + 8) * 2
    saved = inside * wide // num_ranks
    saved += around * wide // (num_ranks if sequence_parallel else 1)
    return saved if selective else saved + (2 * 2 + 1) * square // num_ranks
    ### END SOLUTION


# Exercise 8.4 | Gather it again | 20 min | difficulty 2
class GatheredLinear(torch.autograd.Function):
    """Compute a linear layer on all tokens, and keep the input of this rank's tokens alone.

        y_shard = GatheredLinear.apply(x_shard, weight_shard, group)

    x_shard, (B, S/N, D), are this rank's tokens of x, the ranks' parts of the sequence one after
    the other. weight_shard, (F/N, D), are this rank's rows of the weight. y_shard, (B, S, F/N),
    is x @ weight_shard.T, for all tokens.

    Plain autograd would save x for the gradient of the weight: N times x_shard. Save x_shard
    instead, and gather x again in the backward pass. From forward to backward nothing is held that
    was not there before; y_shard belongs to the caller. Neither x_shard nor the gradient of y_shard
    need be contiguous, and others read them too: leave their values as they are.

    The gradient of y_shard is another one on every rank. Each rank has a summand of the gradient of
    x, and that of x_shard is this rank's part of their sum. That of weight_shard is complete on its
    rank. On the wire: one all-gather of x forward; backward the same again, and one reduce-scatter
    of x's size.

    Beside the collectives above, all_gather(x_shard, group, dim) and reduce_scatter(x_partial,
    group, dim) of minitron/comm/differentiable.py are there: they join and cut along dim.

    Example: B, D and F/N are 1, S is 2. On 2 ranks x_shard is [[[3]]] and [[[4]]], weight_shard
    [[2]] and [[5]]: y_shard is [[[6], [8]]] on rank 0 and [[[15], [20]]] on rank 1. If its gradient
    is 1 everywhere, that of x_shard is [[[7]]] and that of weight_shard [[7]], on both.
    """

    @staticmethod
    def forward(
        ctx, x_shard: Tensor, weight_shard: Tensor, group: dist.ProcessGroup
    ) -> Tensor:
        """Return y_shard; tensors for the backward pass go into ctx.save_for_backward."""
        ### BEGIN SOLUTION
        ctx.group = group
        ctx.save_for_backward(x_shard, weight_shard)
        return all_gather(x_shard, group, 1) @ weight_shard.T
        ### END SOLUTION

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        """Return the gradients of x_shard and weight_shard, and None for the group."""
        ### BEGIN SOLUTION
        x_shard, weight_shard = ctx.saved_tensors
        x = all_gather(x_shard, ctx.group, 1)
        grad_weight = grad.flatten(0, 1).T @ x.flatten(0, 1)
        return reduce_scatter(grad @ weight_shard, ctx.group, 1), grad_weight, None
        ### END SOLUTION
