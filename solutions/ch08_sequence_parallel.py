"""Exercises of chapter 8: sequence parallelism. What tensor parallelism replicates is sharded too.

Write a body, save, and ask `minitron check 8.1`, or check("8.1") in a notebook. Stuck:
`minitron hint 8.1`, three levels. Start again: `minitron reset 8.1`. The exercises do not build on
one another; take them in any order.

In 8.1, 8.2 and 8.4 every rank runs your code. `group` is the group of ranks: group.rank(),
group.size(), which is N below. These take contiguous tensors, and autograd does not see them:

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
    """All-gather in the forward pass, reduce-scatter of the gradient in the backward pass.

        x = AllGather.apply(x_shard, group, dim)

    - x_shard, (..., n/N, ...): this rank's shard of x along dim.
    - x, (..., n, ...): the full tensor, the same on all ranks.

    Each rank continues from x with a computation of its own, so each has its own partial sum of the
    gradient of x. The gradient of x_shard is this rank's shard of their total.

    dim is usually 1, the sequence in (B, S/N, D), but the collectives above work along dimension 0
    only. x_shard and the gradients need not be contiguous. Do not modify either: other nodes may
    use the same tensors.

    Communication: one all-gather of x in the forward pass, one reduce-scatter of its gradient in
    the backward pass.

    Example: on 2 ranks x_shard is [[1], [3]] and [[2], [4]], and dim is 1: x is [[1, 2], [3, 4]].
    The gradient of x is [[1, 1], [1, 1]] on rank 0 and [[0, 10], [20, 0]] on rank 1; that of
    x_shard is [[1], [21]] on rank 0 and [[11], [1]] on rank 1.
    """

    @staticmethod
    def forward(ctx, x_shard: Tensor, group: dist.ProcessGroup, dim: int) -> Tensor:
        """Return x; store what the backward pass needs in attributes of ctx."""
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
    """Reduce-scatter in the forward pass, all-gather of the gradient in the backward pass.

        x_shard = ReduceScatter.apply(x_partial, group, dim)

    - x_partial, (..., n, ...): this rank's partial sum of x.
    - x_shard, (..., n/N, ...): this rank's shard, along dim, of the total over the ranks.

    What is said above of dim, of contiguous tensors and of not modifying them holds here too.

    Communication: one reduce-scatter of x_partial in the forward pass, one all-gather of the
    gradient in the backward pass.

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
    """Complete the gradients of which each rank has only a partial sum.

    Called once per step, after the last backward pass. Afterwards, every gradient on this rank must
    be what one process would have (for a sharded parameter: this rank's shard of it).

    `model` is minitron's Transformer (minitron/model/transformer.py), of the gpt or the llama
    family, with its usual parameter names, split over the group with sequence parallelism:

        query, key, value, up, gate, head    column-parallel: a rank holds some rows of the weight
                                             and of the bias, and applies them to all tokens
        out, down                            row-parallel: a rank holds some columns of the weight
                                             and applies them to all tokens; the output is
                                             reduce-scattered along the sequence, and then the bias,
                                             which is replicated, is added
        token_embedding                      a rank holds some rows of the vocabulary and looks up
                                             all tokens; the output is reduce-scattered too
        everything else                      is replicated, and applied to this rank's S/N tokens of
                                             every sequence

    backward() leaves the complete gradient of every sharded parameter. Decide which of the other
    gradients are partial sums, add those over the ranks, and leave all others unchanged. Parameters
    without a gradient, such as frozen ones, have none on any rank; leave them without one.

    Communication: one all-reduce of exactly the values that need it.

    Example: on 2 ranks final_norm.weight.grad is [1, 2] and [10, 20], head.weight.grad [[3, 4]] and
    [[5, 6]]. Afterwards final_norm.weight.grad is [11, 22] on both; head.weight.grad is as before.
    """
    ### BEGIN SOLUTION
    endings = ("norm.weight", "norm.bias", "out.bias", "down.bias", "position_embedding.weight")
    partial = [
        parameter.grad
        for name, parameter in model.named_parameters()
        if name.endswith(endings) and parameter.grad is not None
    ]

    flat = torch.cat([grad.flatten() for grad in partial])
    dist.all_reduce(flat, group=group)
    for grad, total in zip(partial, flat.split([g.numel() for g in partial]), strict=True):
        grad.copy_(total.view_as(grad))
    ### END SOLUTION


# Exercise 8.3 | What a rank saves | 20 min | difficulty 2
def saved_bytes(
    batch_size: int,
    sequence_length: int,
    width: int,
    num_heads: int,
    num_ranks: int,
    sequence_parallel: bool,
    selective: bool,
) -> int:
    """Count the bytes that a rank saves for the backward pass of one gpt block, shared by N ranks.

    B, S, D, H and N are the first five arguments; the feed-forward is F = 4 D wide. Values have 2
    bytes, dropout is on, and its masks have 1 byte per value. On one rank, N = 1, a block saves

        the input of each of the two norms, (B, S, D)
        the input that query, key and value share, and the input of up
        query, key and value
        the input of out
        the input of GELU, and the input of down
        the mask of each of the two dropouts on the residual stream
        the output of softmax, (B, H, S, S), before and after dropout
        the mask of that dropout

    With N ranks, decide how much of each line a rank saves:

    - Tensor parallelism always applies: query, key, value and up are column-parallel, out and down
      row-parallel, and each rank has H/N heads.
    - sequence_parallel: the package's sequence parallelism (section 6 of the chapter, with
      regather).
    - selective: the backward pass recomputes attention from query, key and value.

    N divides H, D and S. Counts are exact integers. Small terms are left out: the norms' means and
    deviations, and the causal mask.

    Example: B 1, S 2, D 4, H 2 on 2 ranks. Tensor parallelism alone: 196 bytes. With
    sequence_parallel 156; selective as well, 136.
    """
    ### BEGIN SOLUTION
    wide = batch_size * sequence_length * width
    square = batch_size * num_heads * sequence_length**2

    # norms, inputs of the columns, masks | query, key, value, out, gelu, down
    around, inside = (2 + 2) * 2 + 2, (3 + 1 + 8) * 2
    saved = inside * wide // num_ranks
    saved += around * wide // (num_ranks if sequence_parallel else 1)
    return saved if selective else saved + (2 * 2 + 1) * square // num_ranks
    ### END SOLUTION


# Exercise 8.4 | Gather it again | 20 min | difficulty 2
class GatheredLinear(torch.autograd.Function):
    """Compute a column-parallel layer on all tokens, but save only this rank's tokens.

        y_shard = GatheredLinear.apply(x_shard, weight_shard, group)

    - x_shard, (B, S/N, D): this rank's tokens of x; ranks hold consecutive parts of the sequence.
    - weight_shard, (F/N, D): this rank's rows of the weight.
    - y_shard, (B, S, F/N): x @ weight_shard.T, for all tokens.

    Plain autograd would save the full x for the gradient of the weight, which is N times x_shard.
    Save x_shard instead and gather x again in the backward pass. Between forward and backward your
    function may keep nothing that did not exist before the call, except y_shard. x_shard and the
    gradient of y_shard need not be contiguous; do not modify them.

    The gradient of y_shard differs between ranks. Each rank computes a partial sum of the gradient
    of x, and the gradient of x_shard is this rank's shard of their total. The gradient of
    weight_shard is complete on its rank.

    Communication: one all-gather of x in the forward pass; one all-gather of x and one
    reduce-scatter of the same size in the backward pass. Besides the collectives above you may use
    all_gather(x_shard, group, dim) and reduce_scatter(x_partial, group, dim) from
    minitron/comm/differentiable.py, which work along any dimension.

    Example: B, D and F/N are 1, S is 2. On 2 ranks x_shard is [[[3]]] and [[[4]]], weight_shard
    [[2]] and [[5]]: y_shard is [[[6], [8]]] on rank 0 and [[[15], [20]]] on rank 1. If its gradient
    is 1 everywhere, that of x_shard is [[[7]]] and that of weight_shard [[7]], on both.
    """

    @staticmethod
    def forward(ctx, x_shard: Tensor, weight_shard: Tensor, group: dist.ProcessGroup) -> Tensor:
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
