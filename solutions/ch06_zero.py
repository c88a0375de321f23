"""Exercises of chapter 6: ZeRO. A rank stores its shard, and the rest only while it is in use.

Write the body, save, and run `minitron check 6.1` in a terminal or check("6.1") in a notebook. If
you are stuck, `minitron hint 6.1` gives hints in three steps; `minitron reset 6.1` restores the
original. The exercises do not build on each other, so you can take them in any order.

In 6.2 to 6.4 every rank runs your code. `group` is the process group of the ranks: use group.rank()
and group.size(), which is N below. With shards of L values you may use

    reduce_scatter_single(output, input, group)    sums input, (N L,), over the ranks: output,
                                                   (L,), gets values r L to (r + 1) L of the sum
                                                   on rank r
    all_gather_single(output, input, group)        fills output, (N L,), with the ranks' inputs,
                                                   (L,), in the order of the ranks

Both block. With async_op=True they return at once, with a work handle that you must wait() for.
"""

from collections.abc import Callable, Iterable

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from minitron.comm.collectives import all_gather_single, reduce_scatter_single
from minitron.parallel.data.buckets import assign_buckets


def flatten(tensors: Iterable[Tensor], num_ranks: int) -> Tensor:
    """Concatenate tensors into one, (N L,), padded with zeros until N divides its length."""
    values = torch.cat([tensor.detach().flatten() for tensor in tensors])
    return F.pad(values, (0, -len(values) % num_ranks))


def views(flat: Tensor, like: list[Tensor]) -> list[Tensor]:
    """Split a tensor from `flatten` into views with the shapes of `like`, without the padding."""
    sizes = [tensor.numel() for tensor in like]
    parts = flat[: sum(sizes)].split(sizes)
    return [part.view(tensor.shape) for part, tensor in zip(parts, like, strict=True)]


# Exercise 6.1 | Shard ranges | 10 min | difficulty 1 | replaces minitron.parallel.flat
# Train with yours on 2 ranks: --parallel.zero 1
def owned_ranges(sizes: list[int], num_ranks: int, rank: int) -> list[range]:
    """Return which elements of each parameter `rank` owns.

    The parameters, with `sizes` elements each, are concatenated: n elements in total. These are
    split into N consecutive shards of L = ceil(n / N) elements: rank 0 owns the first L, rank 1 the
    next L, and so on. The last shards may have fewer elements, or none.

    Return one range per parameter, in order: which of its elements lie in the shard of `rank`,
    counted from that parameter's first element. A range may be empty.

    Example: sizes [3, 4] on 2 ranks: n = 7, L = 4. Rank 0 owns [range(0, 3), range(0, 1)]: all of
    the first parameter and one element of the second. Rank 1 owns [range(0, 0), range(1, 4)].
    """
    ### BEGIN SOLUTION
    length = -(-sum(sizes) // num_ranks)
    owned = []
    start = 0  # of the parameter, in the concatenation
    for size in sizes:
        first, stop = (
            min(max(0, edge - start), size) for edge in (rank * length, (rank + 1) * length)
        )
        owned.append(range(first, stop))
        start += size
    return owned
    ### END SOLUTION


# Exercise 6.2 | ZeRO-1 step | 25 min | difficulty 2
class ShardedOptimizer:
    """Let each rank store one N-th of the optimizer's state and update one N-th of the parameters.

        sharded = ShardedOptimizer(model, group, make_optimizer)    # once; then in every step:
        loss(my_rows).backward()
        norm = sharded.step(max_norm)

    The setting: the parameters are equal on all ranks. Flattened and padded, they are N L values,
    and rank r's shard is the values r L to (r + 1) L. make_optimizer([tensor, ...]) returns a
    torch.optim optimizer; call it once, with this rank's shard only.

    step starts from the .grad that this rank's rows produced (None counts as zeros) and

    1. averages the gradient over the ranks; this rank keeps its shard of the average;
    2. computes the global norm, the root of the sum of the squares of all N L elements. If it
       exceeds max_norm, multiplies the gradient by max_norm / norm. The norm may be 0;
    3. lets the optimizer update the shard, and copies all ranks' shards into the parameters;
    4. returns the norm before clipping, shape ().

    Afterwards every .grad is None. Besides the parameters, a rank then holds its shard, the shard's
    gradient and the optimizer's state for it, and no other tensor that grows with the model.

    Communication per step: one reduce-scatter and one all-gather of N L values each, and a
    dist.all_reduce(tensor, group=group) of one number.

    Example: on 2 ranks w = [1, 2, 3], padded with one zero, so L = 2. The ranks' .grad are
    [6, 0, 0] and [0, 0, 8]; the mean is [3, 0, 4]. Rank 0 keeps [3, 0] of it, rank 1 [4, 0]; the
    norm is 5 on both. With max_norm = 2.5 and plain SGD with learning rate 1, both ranks end with
    w = [-0.5, 2, 1].
    """

    def __init__(
        self,
        model: nn.Module,
        group: dist.ProcessGroup,
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


# Exercise 6.3 | ZeRO-2 gradients | 25 min | difficulty 2
class ShardedGradients:
    """Reduce-scatter each gradient bucket during the backward pass; keep a shard, free the rest.

        sharded = ShardedGradients(model, group, bucket_bytes)      # once; then in every step:
        loss(my_rows).backward(); sharded.finish()                  # per micro-batch
        (the optimizer reads sharded.shards)
        for shard in sharded.shards: shard.zero_()

    What is given:

    - self.buckets[i]: the parameters of bucket i. Bucket 0 holds the parameters whose gradients the
      backward pass completes first.
    - self.shards[i], (L,): this rank's shard of bucket i's gradient, initially zeros.

    To reduce a bucket means:

    1. flatten the gradients of its parameters; a parameter without a gradient counts as zeros;
    2. reduce-scatter these N L values and divide by N, which gives this rank's shard of the mean;
    3. add that to self.shards[i], so that shards accumulate over micro-batches;
    4. set the .grad of the bucket's parameters to None; keep nothing of the bucket but the shard.

    When to reduce a bucket: as soon as all its gradients are complete *and* the previous bucket has
    been reduced. The order matters: ranks may complete their gradients in different orders, but
    they must all reduce the same bucket at the same time. finish() reduces the buckets that remain.
    At no time may a rank hold the gradients of all buckets.

    Communication per micro-batch: one reduce-scatter per bucket. You may wait for each at once; at
    the latest, wait for it before you start the next.

    Example: on 2 ranks, bucket 0 holds b (2 values) and a (1 value). The gradients are b = [2, 4]
    and a = [6] on rank 0, b = [4, 8] and a = None on rank 1. One reduce-scatter sums [2, 4, 6, 0]
    and [4, 8, 0, 0]. Halved, shards[0] is [3, 6] on rank 0 and [3, 0] on rank 1. After a second
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
        """Reduce the buckets that can be reduced, now that the .grad of `parameter` is complete."""
        ### BEGIN SOLUTION
        self.complete.add(parameter)
        while self.num_sent < len(self.buckets) and self.complete.issuperset(
            self.buckets[self.num_sent]
        ):
            self.reduce_bucket(self.num_sent)
        ### END SOLUTION

    def reduce_bucket(self, index: int) -> None:
        """Reduce bucket `index`, as described above."""
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
        """Reduce the buckets that remain; the next backward pass starts with bucket 0 again."""
        ### BEGIN SOLUTION
        while self.num_sent < len(self.buckets):
            self.reduce_bucket(self.num_sent)
        self.complete.clear()
        self.num_sent = 0
        ### END SOLUTION


# Exercise 6.4 | A ZeRO-3 unit | 30 min | difficulty 3
class ShardedUnit:
    """Store one N-th of a module's parameters, and hold them all only while the module computes.

        units = [ShardedUnit(block, group) for block in blocks]     # once; then in every step:
        loss(my_rows).backward()                                    # per micro-batch
        optimizer.step(); optimizer.zero_grad()                     # of every unit.shard

    self.shard is an nn.Parameter, (L,): this rank's shard of the module's flattened parameters,
    which are equal on all ranks at the start. Its .grad is the mean over the ranks and accumulates
    over micro-batches. The module's own parameters keep their names and shapes. Their values exist
    only between unshard and reshard: around the forward pass, and again around the backward pass.
    You may assume that every parameter gets a gradient in every backward pass.

    | method | what it does |
    |---|---|
    | unshard | all-gathers the shards into one flat tensor, of which the parameters are views |
    | reshard | frees the values of that flat tensor |
    | collect | once all .grad of the unit are complete: reduce-scatters and frees them, reshards |

    Freeing: autograd keeps views of the flat tensor for the backward pass, so dropping your
    reference is not enough. flat.untyped_storage().resize_(0) releases the memory anyway, and
    resize_(num_bytes) makes room to fill the same tensor again.

    Communication per micro-batch: two all-gathers and one reduce-scatter, of N L values each.

    Example: on 2 ranks, a module has w = [1, 2, 3]; rank 0 keeps [1, 2], rank 1 [3, 0]. Before
    forward() both gather [1, 2, 3, 0]; after it, w holds nothing. Before backward() they gather
    again. The ranks' gradients of w are [1, 2, 3] and [3, 2, 1]; shard.grad is [2, 2] and [2, 0].
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
        """Reduce the gradients and free everything once the last parameter's .grad is complete."""
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
