"""Exercises of chapter 7: tensor parallelism. N ranks compute each layer together.

Write a body, save, and ask `minitron check 7.1`, or check("7.1") in a notebook. Stuck:
`minitron hint 7.1`, three levels. Start again: `minitron reset 7.1`. The exercises do not build on
one another; take them in any order.

Every rank runs your code on the same samples. `group` is the group of ranks: group.rank(),
group.size(), which is N below. You may use

    dist.all_reduce(tensor, group=group)      sums over the ranks, in place; autograd does not see
                                              it. With op=dist.ReduceOp.MAX: the maximum
    all_reduce(x_partial, group)              in 7.2 and 7.3: returns the sum; its backward pass
                                              returns the gradient unchanged (g of 7.1)
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from minitron.comm.differentiable import all_reduce

IGNORED = -100  # the target of a token that does not count


# Exercise 7.1 | f and g | 15 min | difficulty 1 | replaces minitron.comm.differentiable
# Train with your AllReduce on 2 ranks: --parallel.tp 2
class Replicate(torch.autograd.Function):
    """Megatron's f: identity in the forward pass, all-reduce of the gradient in the backward pass.

        y = Replicate.apply(x, group)

    The setting: x is the same on all ranks, and each rank continues from y with a computation of
    its own, such as its columns of a weight. Each rank's backward pass therefore produces a partial
    sum of the gradient of x; only their total is the gradient.

    Communication: none in the forward pass, one all-reduce in the backward pass. Do not modify the
    gradient that autograd passes in: other nodes may use the same tensor. Results have the dtype of
    the input.

    Example: on 2 ranks x = [1, 2], and so is y. The gradient of y is [1, 0] on rank 0 and [4, 5]
    on rank 1. The gradient of x is [5, 5] on both.
    """

    @staticmethod
    def forward(ctx, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        """Return y; store what the backward pass needs in attributes of ctx."""
        ### BEGIN SOLUTION
        ctx.group = group
        return x.view_as(x)
        ### END SOLUTION

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None]:
        """Return the gradient of x, and None for the group, from the gradient of y."""
        ### BEGIN SOLUTION
        summed = grad.clone()
        dist.all_reduce(summed, group=ctx.group)
        return summed, None
        ### END SOLUTION


class AllReduce(torch.autograd.Function):
    """Megatron's g: all-reduce in the forward pass, identity in the backward pass.

        y = AllReduce.apply(x_partial, group)

    The setting: x_partial differs between ranks. It is this rank's partial sum, such as the output
    of its rows of a weight. From y on, all ranks compute the same thing, so the gradient of y is
    the same on all of them.

    Communication: one all-reduce in the forward pass, none in the backward pass. Do not modify x.
    Results have the dtype of the input.

    Example: on 2 ranks x is [1, 2] and [10, 20]; y is [11, 22] on both. The gradient of y is
    [3, 4] on both, and so is that of x.
    """

    @staticmethod
    def forward(ctx, x_partial: Tensor, group: dist.ProcessGroup) -> Tensor:
        """Return y."""
        ### BEGIN SOLUTION
        summed = x_partial.clone()
        dist.all_reduce(summed, group=group)
        return summed
        ### END SOLUTION

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None]:
        """Return the gradient of x, and None for the group, from the gradient of y."""
        ### BEGIN SOLUTION
        return grad, None
        ### END SOLUTION


# Exercise 7.2 | Row-parallel linear | 20 min | difficulty 2
class RowParallelLinear(nn.Module):
    """Compute a linear layer whose input is already sharded: N partial sums, one all-reduce.

        layer = RowParallelLinear(linear, group)    # linear is the same on all ranks
        out = layer(x_shard)                        # (..., I/N) -> (..., O)

    linear computes x @ weight.T + bias, with weight (O, I), and bias (O,) or None. It multiplies x
    by weight.T, of which rank r holds the rows r I/N to (r + 1) I/N. So each rank holds

    - self.weight: an nn.Parameter of shape (O, I/N) with its own storage, not a view of linear's;
    - self.bias: the full bias, an nn.Parameter of shape (O,), or None.

    x_shard holds the same range of x's last dimension. If N does not divide I, raise a ValueError
    whose message contains both numbers.

    out equals linear(x) on every rank, and from there on all ranks compute the same thing. After
    backward(), x_shard.grad and weight.grad are this rank's shards of the gradients that one
    process would have; bias.grad is the full gradient, on every rank. Communication: one all-reduce
    of out, in the forward pass.

    Example: weight [[2, 5]], bias [10], x = [3, 4]. Rank 0 has weight [[2]] and x_shard [3], rank 1
    [[5]] and [4]. The partial sums are 6 and 20; out is [36] on both, and bias.grad [1].
    """

    def __init__(self, linear: nn.Linear, group: dist.ProcessGroup):
        super().__init__()
        self.group = group
        ### BEGIN SOLUTION
        num_inputs, size = linear.in_features, group.size()
        if num_inputs % size != 0:
            raise ValueError(f"{num_inputs} inputs cannot be split into {size} equal parts")
        weight_shard = linear.weight.detach().chunk(size, dim=1)[group.rank()]
        self.weight = nn.Parameter(weight_shard.clone())  # a view would keep the full weight alive
        self.bias = linear.bias
        ### END SOLUTION

    def forward(self, x_shard: Tensor) -> Tensor:
        """Return all of the output, (..., O)."""
        ### BEGIN SOLUTION
        out_partial = F.linear(x_shard, self.weight)
        out = all_reduce(out_partial, self.group)
        # After the sum, or the bias is added N times.
        return out if self.bias is None else out + self.bias
        ### END SOLUTION


# Exercise 7.3 | Sharded logits | 25 min | difficulty 3 | replaces minitron.parallel.tensor.layers
# Train with yours on 2 ranks: --parallel.tp 2
def vocabulary_parallel_cross_entropy(
    logits_shard: Tensor, targets: Tensor, group: dist.ProcessGroup
) -> Tensor:
    """Sum the cross-entropy of all targets when each rank has some columns of the logits.

    Return, on every rank, F.cross_entropy(all logits, targets, reduction="sum"), shape ().

    - logits_shard, (B, S, V/N), float32 or float64: on rank r the logits of the token ids r V/N to
      (r + 1) V/N.
    - targets, (B, S): token ids, the same on all ranks; a target of IGNORED does not count.

    For any number m, the loss of one target is
    log(sum over all ids of exp(logit - m)) - (the target's logit - m). If m is the maximum over all
    ranks, no exp overflows. Treat m as a constant: the gradient is right without it.

    After backward(), logits_shard.grad is this rank's columns of the gradient. No rank may ever
    hold a tensor with V columns. Do not modify logits_shard or targets.

    Communication: in the forward pass, all-reduces of 3 B S values in total (per target a maximum,
    a sum and a logit); in the backward pass, none.

    Example: V = 2, one target, id 1. Rank 0 has the logit 0, rank 1 has log 3. m = log 3, the exps
    are 1/3 and 1, their sum is 4/3; rank 1 knows logit - m = 0. The loss is log(4/3) on both ranks,
    the gradient 1/4 on rank 0 and 3/4 - 1 on rank 1.
    """
    ### BEGIN SOLUTION
    largest = logits_shard.detach().amax(-1)  # (B, S)
    dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group)
    shifted = logits_shard - largest[..., None]

    num_columns = logits_shard.shape[-1]
    column = targets - group.rank() * num_columns
    is_mine = (column >= 0) & (column < num_columns)  # never for an ignored one
    known = shifted.gather(-1, column.where(is_mine, 0)[..., None]).squeeze(-1)

    partial = torch.stack([shifted.exp().sum(-1), known.where(is_mine, 0)])  # (2, B, S)
    total, own = all_reduce(partial, group)
    return (total.log() - own).where(targets != IGNORED, 0).sum()
    ### END SOLUTION


# Exercise 7.4 | Heads for every rank | 30 min | difficulty 3
class SplitAttention:
    """Give each rank some heads of an attention layer; complete the gradients of shared heads.

        split = SplitAttention(attention, group)    # once; then in every step:
        loss.backward()                             # per micro-batch
        split.finish()                              # after the last one

    The layer has H query heads and G key-value heads, each K wide. Query head h reads key-value
    head h // (H/G). Before the split, all weights are full-sized and the same on all ranks, and
    there are no biases:

    | weight | shape | a head is |
    |---|---|---|
    | attention.query.weight | (H K, D) | K consecutive rows |
    | attention.key.weight, attention.value.weight | (G K, D) | K consecutive rows |
    | attention.out.weight | (D, H K) | K consecutive columns |

    The constructor gives rank r of N

    - H/N consecutive query heads, in the order of the ranks; their range is self.query_heads;
    - the key-value heads that these read: G/N of them, or a single one if G < N; their range is
      self.kv_heads;
    - in place of each of the four weights an nn.Parameter with only these heads' rows or columns.

    If N does not divide H, or neither of N and G divides the other, raise a ValueError whose
    message contains both numbers.

    If G < N, N/G ranks hold the same key-value head, and each computes a partial sum of its
    gradient, from its own query heads. finish() replaces key.weight.grad and value.weight.grad by
    the total, on each of these ranks.

    Communication: none before finish(), and none at all if G >= N. Otherwise all-reduces over group
    with G K D values for the keys and as many for the values: one slot per key-value head, where a
    rank leaves the slots of other heads at zero.

    Example: H = 2, G = 1 on 2 ranks: query_heads are range(0, 1) and range(1, 2), kv_heads is
    range(0, 1) on both. After backward() key.weight.grad is [[1, 2]] on rank 0 and [[5, 5]] on
    rank 1; after finish() it is [[6, 7]] on both. On 4 ranks, H = 4 and G = 2 give rank 2 the
    query_heads range(2, 3) and the kv_heads range(1, 2).
    """

    def __init__(self, attention: nn.Module, group: dist.ProcessGroup):
        self.attention, self.group = attention, group
        self.head_width = attention.head_width
        self.num_heads = len(attention.query.weight) // self.head_width
        self.num_kv_heads = len(attention.key.weight) // self.head_width
        ### BEGIN SOLUTION
        rank, size, H, G = group.rank(), group.size(), self.num_heads, self.num_kv_heads
        if H % size != 0:
            raise ValueError(f"{H} query heads cannot be split over {size} ranks")
        if G % size != 0 and size % G != 0:
            raise ValueError(f"{G} key-value heads cannot be split over {size} ranks")
        self.query_heads = range(rank * H // size, (rank + 1) * H // size)
        first = rank * G // size
        self.kv_heads = range(first, first + max(1, G // size))

        self.keep(attention.query, self.query_heads, dim=0)
        self.keep(attention.key, self.kv_heads, dim=0)
        self.keep(attention.value, self.kv_heads, dim=0)
        self.keep(attention.out, self.query_heads, dim=1)

    def keep(self, layer: nn.Linear, heads: range, dim: int) -> None:
        """Leave `layer` the rows (dim 0) or the columns (dim 1) of `heads`."""
        start, length = heads.start * self.head_width, len(heads) * self.head_width
        weight_shard = layer.weight.detach().narrow(dim, start, length)
        layer.weight = nn.Parameter(weight_shard.clone())
        ### END SOLUTION

    def finish(self) -> None:
        """Sum the gradients of a key-value head over the ranks that hold it."""
        ### BEGIN SOLUTION
        if self.num_kv_heads >= self.group.size():
            return
        for layer in (self.attention.key, self.attention.value):
            grad = layer.weight.grad  # (K, D)
            of_heads = grad.new_zeros(self.num_kv_heads, *grad.shape)
            of_heads[self.kv_heads.start] = grad
            dist.all_reduce(of_heads, group=self.group)
            grad.copy_(of_heads[self.kv_heads.start])
        ### END SOLUTION
