"""Exercises of chapter 6: ZeRO. A rank keeps its shard, and holds the rest while it is in use.

Write a body, save, and ask `minitron check 6.1`, or check("6.1") in a notebook. Stuck:
`minitron hint 6.1`, three levels. Start again: `minitron reset 6.1`. The exercises do not build on
one another; take them in any order.

In 6.2 to 6.4 every rank runs your code. `group` is the group of the ranks: group.rank(),
group.size(). With N ranks and shards of L values, allowed are

    reduce_scatter_single(output, input, group)    sums input, (N L,), over the ranks: output,
                                                   (L,), gets values r L to (r + 1) L on rank r
    all_gather_single(output, input, group)        fills output, (N L,), with the ranks' inputs,
                                                   (L,), in the order of the ranks

Both block; with async_op=True they return a work to wait() for.
"""

from collections.abc import Callable, Iterable

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from minitron.comm.collectives import all_gather_single, reduce_scatter_single
from minitron.parallel.data.buckets import assign_buckets


def flatten(tensors: Iterable[Tensor], num_ranks: int) -> Tensor:
    """Copy tensors end to end into one, (N L,), with zeros behind until N divides its length."""
    values = torch.cat([tensor.detach().flatten() for tensor in tensors])
    return F.pad(values, (0, -len(values) % num_ranks))


def views(flat: Tensor, like: list[Tensor]) -> list[Tensor]:
    """Cut what `flatten` made into views with the shapes of `like`; the zeros are left out."""
    sizes = [tensor.numel() for tensor in like]
    parts = flat[:sum(sizes)].split(sizes)
    return [part.view(tensor.shape) for part, tensor in zip(parts, like, strict=True)]


# Exercise 6.1 | Shard ranges | 10 min | difficulty 1 | replaces minitron.parallel.flat
# Train with yours on 2 ranks: --parallel.zero 1
def owned_ranges(sizes: list[int], num_ranks: int, rank: int) -> list[range]:
    """Which elements of each parameter does `rank` own?

    Parameters of `sizes` elements lie end to end, n elements in all. They are cut into N shards
    of L = ceil(n / N), one after the other: rank 0 owns the first L elements. The last shards may
    have fewer, or none. For each parameter, in order, return the range of its own elements,
    counted from its own start, that lie in the shard of `rank`. A range may be empty.

    Example: sizes [3, 4] on 2 ranks: n = 7, L = 4. Rank 0 owns [range(0, 3), range(0, 1)], that is
    all of the first parameter and one element of the second; rank 1 [range(0, 0), range(1, 4)].
    """
    ### BEGIN SOLUTION
    length = -(-sum(sizes) // num_ranks)
    owned = []
    start = 0  # of the parameter, in the whole
    for size in sizes:
        first, stop = (min(max(0, edge - start), size)
                       for edge in (rank * length, (rank + 1) * length))
        owned.append(range(first, stop))
        start += size
    return owned
    ### END SOLUTION


# Exercise 6.2 | ZeRO-1 step | 25 min | difficulty 2
class ShardedOptimizer:
    """Let each rank keep one N-th of the optimizer's state, and update one N-th of the parameters.

        sharded = ShardedOptimizer(model, group, make_optimizer)    # once; then in every step:
        loss(my_rows).backward()
        norm = sharded.step(max_norm)

    The parameters are equal on all ranks. Flattened they are N L values, and rank r's shard is
    the values r L to (r + 1) L. make_optimizer([tensor, ...]) returns a torch.optim optimizer:
    call it once, for this rank's shard alone.

    step begins with .grad of this rank's rows; None counts as zeros. The gradient is the mean over
    the ranks. If its global norm, the root of the sum of the squares of all its elements, exceeds
    max_norm, it is multiplied by max_norm / norm; the norm may also be 0. Then the optimizer
    updates the shard, and every rank gets the others' shards into its parameters. Returned is the
    norm before clipping, shape (). Afterwards every .grad is None, and beside the parameters a rank
    holds its shard, the optimizer's state for it, and the shard's gradient: nothing of the model's
    size.

    On the wire, per step: one reduce-scatter and one all-gather of N L values each, and a
    dist.all_reduce(tensor, group=group) of one number.

    Example: on 2 ranks w = [1, 2, 3], with a zero behind, so L = 2. The ranks' .grad are [6, 0, 0]
    and [0, 0, 8]; the mean is [3, 0, 4]. Rank 0 has [3, 0] of it, rank 1 [4, 0]; the norm is 5 on
    both. With max_norm = 2.5 and plain SGD at rate 1 both end with w = [-0.5, 2, 1].
    """

    def __init__(
        self, model: nn.Module, group: dist.ProcessGroup,
        make_optimizer: Callable[[list[Tensor]], torch.optim.Optimizer],
    ):
        self.group = group
        self.parameters = [p for p in model.parameters() if p.requires_grad]
        ### BEGIN SOLUTION
        flat = flatten(self.parameters, group.size())
        self.shard = flat.chunk(group.size())[group.rank()].clone()
        self.optimizer = make_optimizer([self.shard])
        ### END SOLUTION

    def step(self, max_norm: float) -> Tensor:
        """Update the parameters of all ranks; returns the global norm of the gradient."""
        ### BEGIN SOLUTION
        grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in self.parameters]
        flat = flatten(grads, self.group.size()) / self.group.size()
        self.shard.grad = torch.empty_like(self.shard)
        reduce_scatter_single(self.shard.grad, flat, self.group)

        square = self.shard.grad.square().sum()  # of this rank's part alone
        dist.all_reduce(square, group=self.group)
        norm = square.sqrt()
        self.shard.grad *= (max_norm / norm).clamp(max=1)

        self.optimizer.step()
        all_gather_single(flat, self.shard, self.group)
        for parameter, values in zip(self.parameters, views(flat, self.parameters), strict=True):
            parameter.data.copy_(values)
            parameter.grad = None
        return norm
        ### END SOLUTION


# Exercise 6.3 | The ZeRO-2 hand-over | 25 min | difficulty 2
class ShardedGradients:
    """Hand each bucket of gradients over during the backward pass, keep a shard, free the rest.

        sharded = ShardedGradients(model, group, bucket_bytes)      # once; then in every step:
        loss(my_rows).backward(); sharded.finish()                  # per micro-batch
        (the optimizer reads self.shards)
        for shard in self.shards: shard.zero_()

    self.buckets lists the parameters that require a gradient, bucket by bucket, those whose
    gradients come first in the first. self.shards[i], (L,), begins as zeros: into it you add this
    rank's part of the mean over the ranks of bucket i, flattened, for every micro-batch.

    A bucket travels when its last gradient is complete and the bucket before it has been handed
    over, for all ranks must send in the same order; what is left travels in finish(). A parameter
    without a gradient counts as zeros. On the wire, per micro-batch: one reduce-scatter per bucket,
    of its N L values.

    Once a bucket is handed over, the .grad of its parameters is None, and nothing of it is held but
    the shard: not all buckets at once, at no time. You may wait for a reduce-scatter right away;
    if not, wait for it before you start the next.

    Example: on 2 ranks bucket 0 holds b (2 values) and a (1 value). Rank 0 has the gradients
    b = [2, 4], a = [6], rank 1 has b = [4, 8], a = None. One reduce-scatter sums [2, 4, 6, 0] and
    [4, 8, 0, 0]. Halved, shards[0] is [3, 6] on rank 0 and [3, 0] on rank 1. After a second
    micro-batch with the same gradients it is [6, 12] and [6, 0].
    """

    def __init__(self, model: nn.Module, group: dist.ProcessGroup, bucket_bytes: int):
        self.group = group
        parameters = [p for p in model.parameters() if p.requires_grad]
        plan = assign_buckets([p.nbytes for p in parameters], bucket_bytes)
        self.buckets = [[parameters[index] for index in indices] for indices in plan]
        lengths = [-(-sum(p.numel() for p in bucket) // group.size()) for bucket in self.buckets]
        self.shards = [parameters[0].new_zeros(length).detach() for length in lengths]
        ### BEGIN SOLUTION
        self.complete: set[nn.Parameter] = set()
        self.num_sent = 0
        for parameter in parameters:
            parameter.register_post_accumulate_grad_hook(self.collect)
        ### END SOLUTION

    def collect(self, parameter: nn.Parameter) -> None:
        """Hand over what can be handed over, now that the .grad of `parameter` is complete."""
        ### BEGIN SOLUTION
        self.complete.add(parameter)
        while self.num_sent < len(self.buckets) \
                and self.complete.issuperset(self.buckets[self.num_sent]):
            self.reduce_bucket(self.num_sent)
        ### END SOLUTION

    def reduce_bucket(self, index: int) -> None:
        """Reduce-scatter bucket `index`, add what arrives to its shard, free its gradients."""
        ### BEGIN SOLUTION
        bucket, size = self.buckets[index], self.group.size()
        grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in bucket]
        flat = flatten(grads, size) / size
        for parameter in bucket:
            parameter.grad = None

        arrived = torch.empty_like(self.shards[index])
        reduce_scatter_single(arrived, flat, self.group)
        self.shards[index] += arrived
        self.num_sent += 1
        ### END SOLUTION

    def finish(self) -> None:
        """Hand over the buckets that are left; the next backward pass starts from the first."""
        ### BEGIN SOLUTION
        while self.num_sent < len(self.buckets):
            self.reduce_bucket(self.num_sent)
        self.complete.clear()
        self.num_sent = 0
        ### END SOLUTION


# Exercise 6.4 | A ZeRO-3 unit | 30 min | difficulty 3
class ShardedUnit:
    """Keep one N-th of a module's parameters, and hold all of them only while it computes.

        units = [ShardedUnit(block, group) for block in blocks]     # once; then in every step:
        loss(my_rows).backward()                                    # per micro-batch
        optimizer.step(); optimizer.zero_grad()                     # made for all unit.shard

    self.shard is an nn.Parameter, (L,): this rank's part of the module's parameters, flattened,
    which are equal on all ranks at the start. Its .grad is the mean over the ranks, and adds up
    over micro-batches. The parameters keep their names and shapes, not their values: those are
    there from unshard to reshard, around the forward and around the backward pass. Each of them
    gets a gradient in every backward pass.

    unshard: all-gather the shards into one flat tensor, whose views the parameters are.
    reshard: free it. Autograd keeps views of it for the backward pass, so one more reference is
    always there: flat.untyped_storage().resize_(0) gives the bytes back all the same, and
    resize_(bytes) makes room to fill the same tensor again.
    collect: when all .grad of the unit are complete, reduce-scatter them, free them, reshard.

    On the wire, per micro-batch: two all-gathers and one reduce-scatter, of N L values each.

    Example: on 2 ranks a module has w = [1, 2, 3]; rank 0 keeps [1, 2], rank 1 [3, 0]. Before
    forward() both gather [1, 2, 3, 0]; after it w holds nothing. Before backward() they gather
    again. Their gradients of w are [1, 2, 3] and [3, 2, 1]; shard.grad is [2, 2] and [2, 0].
    """

    def __init__(self, module: nn.Module, group: dist.ProcessGroup):
        self.group = group
        self.parameters = list(module.parameters())
        ### BEGIN SOLUTION
        self.flat = flatten(self.parameters, group.size())
        self.num_bytes = self.flat.nbytes
        self.shard = nn.Parameter(self.flat.chunk(group.size())[group.rank()].clone())
        self.num_complete = 0
        for parameter, view in zip(self.parameters, views(self.flat, self.parameters), strict=True):
            parameter.data = view
            parameter.register_post_accumulate_grad_hook(self.collect)
        self.reshard()

        module.register_forward_pre_hook(self.unshard)
        module.register_forward_hook(self.reshard)
        module.register_full_backward_pre_hook(self.unshard)
        ### END SOLUTION

    def unshard(self, *_) -> None:
        """Fill the parameters with the shards of all ranks."""
        ### BEGIN SOLUTION
        self.flat.untyped_storage().resize_(self.num_bytes)
        all_gather_single(self.flat, self.shard.detach(), self.group)
        ### END SOLUTION

    def reshard(self, *_) -> None:
        """Free the parameters; the shard stays."""
        ### BEGIN SOLUTION
        self.flat.untyped_storage().resize_(0)
        ### END SOLUTION

    def collect(self, parameter: nn.Parameter) -> None:
        """Reduce the gradients and free everything, if that of `parameter` was the last one."""
        ### BEGIN SOLUTION
        self.num_complete += 1
        if self.num_complete < len(self.parameters):
            return
        flat = flatten([p.grad for p in self.parameters], self.group.size()) / self.group.size()
        arrived = torch.empty_like(self.shard)
        reduce_scatter_single(arrived, flat, self.group)

        self.shard.grad = arrived if self.shard.grad is None else self.shard.grad + arrived
        for p in self.parameters:
            p.grad = None
        self.num_complete = 0
        self.reshard()
        ### END SOLUTION
