"""Exercises of chapter 7: tensor parallelism. A layer is cut inside, and N ranks compute it.

Write a body, save, and ask `minitron check 7.1`, or check("7.1") in a notebook. Stuck:
`minitron hint 7.1`, three levels. Start again: `minitron reset 7.1`. The exercises do not build on
one another; take them in any order.

Every rank runs your code, on the same samples. `group` is the group of the ranks: group.rank(),
group.size(). Allowed are

    dist.all_reduce(tensor, group=group)      sums over the ranks, in place; autograd knows nothing
                                              of it. op=dist.ReduceOp.MAX: the largest, not the sum
    all_reduce(x_partial, group)              in 7.2 and 7.3: returns the sum, and its backward
                                              pass hands the gradient on as it is (g of 7.1)
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
    """Megatron's f: x goes in as it is; on the way back, its gradient is summed over the ranks.

        y = Replicate.apply(x, group)

    x is the same on all ranks, and each goes on from y with a computation of its own: with its
    columns of a weight, say. So each rank's backward pass brings another part of the gradient of
    x, and only the sum of all parts is the gradient. On the wire: nothing forward, one all-reduce
    backward. What autograd hands you belongs to others too: leave its values as they are. Results
    have the dtype of the input.

    Example: on 2 ranks x = [1, 2], and so is y. The gradient of y is [1, 0] on rank 0 and [4, 5]
    on rank 1. The gradient of x is [5, 5] on both.
    """

    @staticmethod
    def forward(ctx, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        """Return y; what the backward pass needs is kept in attributes of ctx."""
        raise NotImplementedError("Exercise 7.1 - f and g.  Hint: minitron hint 7.1")

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None]:
        """Return the gradient of x, and None for the group, from the gradient of y."""
        raise NotImplementedError("Exercise 7.1 - f and g.  Hint: minitron hint 7.1")


class AllReduce(torch.autograd.Function):
    """Megatron's g: y is the sum of the ranks' x; on the way back, the gradient goes on as it is.

        y = AllReduce.apply(x_partial, group)

    x_partial differs from rank to rank: it is this rank's part of a sum, say from its rows of a
    weight.
    From y on all ranks compute the same, and so the gradient of y is the same on all. On the wire:
    one all-reduce forward, nothing backward. Leave the values of x as they are. Results have the
    dtype of the input.

    Example: on 2 ranks x is [1, 2] and [10, 20]; y is [11, 22] on both. The gradient of y is
    [3, 4] on both, and so is that of x.
    """

    @staticmethod
    def forward(ctx, x_partial: Tensor, group: dist.ProcessGroup) -> Tensor:
        """Return y."""
        raise NotImplementedError("Exercise 7.1 - f and g.  Hint: minitron hint 7.1")

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None]:
        """Return the gradient of x, and None for the group, from the gradient of y."""
        raise NotImplementedError("Exercise 7.1 - f and g.  Hint: minitron hint 7.1")


# Exercise 7.2 | Row-parallel linear | 20 min | difficulty 2
class RowParallelLinear(nn.Module):
    """Compute a linear layer whose input is already cut: N partial sums, one all-reduce.

        layer = RowParallelLinear(linear, group)    # linear is the same on all ranks
        out = layer(x_shard)                        # (..., I/N) -> (..., O)

    linear is x @ weight.T + bias, with weight (O, I), and bias (O,) or None. The matrix that x is
    multiplied by is weight.T, and rank r holds its rows r I/N to (r + 1) I/N: as self.weight, an
    nn.Parameter of shape (O, I/N), and no more of it. self.bias is whole on every rank, an
    nn.Parameter of shape (O,), or None. x_shard is the same part of x. If N does not divide I,
    raise a ValueError whose message has both numbers.

    out is linear(x) on every rank. From there on all ranks compute the same. After backward()
    x_shard.grad and weight.grad are this rank's part of what one process would have, bias.grad is
    all of it, on every rank. On the wire: one all-reduce of out, in the forward pass.

    Example: weight [[2, 5]], bias [10], x = [3, 4]. Rank 0 has weight [[2]] and x_shard [3], rank 1
    [[5]] and [4]. The partial sums are 6 and 20; out is [36] on both, and bias.grad [1].
    """

    def __init__(self, linear: nn.Linear, group: dist.ProcessGroup):
        super().__init__()
        self.group = group
        raise NotImplementedError("Exercise 7.2 - Row-parallel linear.  Hint: minitron hint 7.2")

    def forward(self, x_shard: Tensor) -> Tensor:
        """Return all of the output, (..., O)."""
        raise NotImplementedError("Exercise 7.2 - Row-parallel linear.  Hint: minitron hint 7.2")


# Exercise 7.3 | Cut vocabulary | 25 min | difficulty 3 | replaces minitron.parallel.tensor.layers
# Train with yours on 2 ranks: --parallel.tp 2
def vocabulary_parallel_cross_entropy(
    logits_shard: Tensor, targets: Tensor, group: dist.ProcessGroup
) -> Tensor:
    """Add up the cross-entropy of all targets, where each rank has some columns of the logits.

    logits_shard is (B, S, V/N): on rank r the logits of the ids r V/N to (r + 1) V/N, float32 or
    float64. targets, (B, S), are ids, the same on all ranks; a target of IGNORED does not count.
    Returned is, on every rank, F.cross_entropy(all logits, targets, reduction="sum"), shape ().

    With any m, the loss of one target is log(sum of exp(logit - m) over all ids) - (its own
    logit - m). If m is the largest logit of all ranks, no exp overflows. m is a constant, not a
    function of the logits: the gradient is right without it.

    No rank may hold a tensor with V columns: that is what the cut is for. On the wire, forward:
    all-reduces of 3 B S values in all (for each target a largest logit, a sum and a logit);
    backward: nothing. After backward() logits_shard.grad is this rank's columns of the gradient.
    Logits and targets belong to the caller: leave their values as they are.

    Example: V = 2, one target, id 1. Rank 0 has the logit 0, rank 1 has log 3. m = log 3, the exps
    are 1/3 and 1, their sum is 4/3; rank 1 knows logit - m = 0. The loss is log(4/3) on both ranks,
    the gradient 1/4 on rank 0 and 3/4 - 1 on rank 1.
    """
    raise NotImplementedError("Exercise 7.3 - Cut vocabulary.  Hint: minitron hint 7.3")


# Exercise 7.4 | Heads for every rank | 30 min | difficulty 3
class SplitAttention:
    """Give each rank some heads of an attention layer, and mend the gradients of what is shared.

        split = SplitAttention(attention, group)    # once; then in every step:
        loss.backward()                             # per micro-batch
        split.finish()                              # after the last

    H query heads, G key-value heads, each K wide: query head h reads key-value head h // (H/G).
    attention.query.weight is (H K, D), key.weight and value.weight (G K, D): K rows after one
    another are a head. out.weight is (D, H K): K columns after one another belong to a head. All
    are whole, and the same on all ranks; there are no biases.

    Of N ranks, rank r gets H/N query heads after one another, the first of them on rank 0, and the
    key-value heads that they read: G/N of them, or one alone if G < N. self.query_heads and
    self.kv_heads are their ranges. Each of the four weights becomes an nn.Parameter of the rows or
    columns of this rank's heads, and nothing else is held. If N does not divide H, or neither of N
    and G divides the other, raise a ValueError whose message has both numbers.

    If G < N, N/G ranks hold the same key-value head, and each has a part of its gradient, from its
    own query heads. finish() makes key.weight.grad and value.weight.grad the sum of these parts, on
    each of these ranks. On the wire: nothing before finish(), and nothing at all if G >= N; else
    all-reduces over group, of G K D values for the keys and as many for the values. That is a place
    for each of the G heads: what a rank leaves at zero adds nothing to the heads of others.

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
        raise NotImplementedError("Exercise 7.4 - Heads for every rank.  Hint: minitron hint 7.4")

    def finish(self) -> None:
        """Sum the gradients of a key-value head over the ranks that hold it."""
        raise NotImplementedError("Exercise 7.4 - Heads for every rank.  Hint: minitron hint 7.4")
