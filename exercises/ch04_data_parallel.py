"""Exercises of chapter 4: data parallelism. Every rank holds the full model and has its own data.

Write the body, save, and run `minitron check 4.1` in a terminal or check("4.1") in a notebook. If
you are stuck, `minitron hint 4.1` gives hints in three steps; `minitron reset 4.1` restores the
original. The exercises do not build on each other, so you can take them in any order.

Every rank runs your code. `group` is the process group of the ranks: use group.rank() and
group.size(), and pass group=group to every torch.distributed call, because some ranks may not
belong to this group. The only collective you may use is dist.all_reduce, which computes a sum.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor, nn

from minitron.parallel.data import buckets
from minitron.parallel.one_device import OneDevice


class Given(OneDevice):
    """Base class of 4.3 and 4.4: equal weights at the start, no_sync(), and mean().

    Everything else the training loop needs is inherited from training on one device, because a
    rank holds the full model too. You can ignore find_unused_parameters: the package's classes
    need it to accept a parameter without a gradient, but yours always accept one.
    """

    def __init__(
        self, model: nn.Module, group: dist.ProcessGroup, find_unused_parameters: bool = False
    ):
        super().__init__(model)
        self.group = group
        self.data_part = group.rank(), group.size()
        self.synchronizes = True
        for tensor in [*model.parameters(), *model.buffers()]:
            dist.broadcast(tensor.detach(), group=group, group_src=0)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Let backward passes only accumulate gradients, because more micro-batches follow."""
        self.synchronizes = False
        yield
        self.synchronizes = True

    def mean(self, tensor: Tensor) -> Tensor:
        """Average a small tensor, such as the loss, over the ranks."""
        total = tensor.detach().clone()
        dist.all_reduce(total, group=self.group)
        return total / self.group.size()


# Exercise 4.1 | Naive averaging | 15 min | difficulty 1 | replaces minitron.parallel.data.ddp
# Train with yours on 2 ranks: apply_naive_data_parallel for apply_bucketed_data_parallel
def average_gradients(model: nn.Module, group: dist.ProcessGroup) -> None:
    """Replace every gradient by its mean over the ranks, after the backward pass.

    The setting: all ranks hold the same weights and have the same number of rows, and each rank has
    called backward() on the mean loss of its own rows. When your function returns, .grad on every
    rank must be what one process would have computed from all rows. Do not change the weights.

    Skip frozen parameters. A parameter that requires a gradient may have .grad = None on some
    ranks, because their rows did not use it; count it as zeros there. A tied weight is a single
    parameter. Send each gradient once: at most one all-reduce per parameter.

    Shapes: .grad has the shape of its parameter, which may be (). All gradients have one dtype.

    Example: on 2 ranks, .grad of w is [1, 2] on rank 0 and [3, 6] on rank 1; both end with [2, 4].
    If rank 1 has None, both end with [0.5, 1].
    """
    raise NotImplementedError("Exercise 4.1 - Naive averaging.  Hint: minitron hint 4.1")


# Exercise 4.2 | Fill the buckets | 10 min | difficulty 1 | replaces minitron.parallel.data.buckets
# Train with yours on 2 ranks
def assign_buckets(sizes: list[int], bucket_bytes: int) -> list[list[int]]:
    """Assign the gradients to buckets, in the order in which backward() completes them.

    sizes[i] is the size of gradient i in bytes. Index 0 is the parameter that the model registered
    first, so its gradient is completed last: start with the last index.

    A gradient joins the current bucket if the bucket then holds at most bucket_bytes. Otherwise it
    starts a new bucket, and earlier buckets are never added to again. A gradient larger than
    bucket_bytes gets a bucket of its own. Every index is in exactly one bucket, no bucket is empty,
    and each bucket lists its indices in the order in which they joined.

    Example: sizes [40, 10, 20, 30] with bucket_bytes = 50 give [[3, 2], [1, 0]]: 30 + 20, then
    10 + 40. With bucket_bytes = 45 they give [[3], [2, 1], [0]].
    """
    raise NotImplementedError("Exercise 4.2 - Fill the buckets.  Hint: minitron hint 4.2")


# Exercise 4.3 | Overlap by hooks | 20 min | difficulty 2 | replaces minitron.parallel.data.ddp
# Train with yours on 2 ranks: apply_hooked_data_parallel for apply_bucketed_data_parallel
class HookedDataParallel(Given):
    """Average each gradient over the ranks while the backward pass is still computing others.

        parallel = HookedDataParallel(model, group)     # once; then in every step:
        with parallel.no_sync():                        # if there are several micro-batches,
            loss(first_rows).backward()                 # for all of them but the last
        loss(last_rows).backward()
        parallel.finish()
        optimizer.step(); optimizer.zero_grad()

    As soon as backward() has completed a parameter's .grad, start its all-reduce with
    async_op=True, and do not wait for it before finish(). After finish(), .grad on every rank is
    the mean of what the ranks have accumulated, and your object keeps nothing else from the step.

    In each step, send one all-reduce per parameter that has a gradient, in the shape of .grad.
    Under no_sync(), self.synchronizes is False: send nothing, and let gradients accumulate in .grad
    as they would without this class. Skip frozen parameters. A parameter that no rank uses keeps
    .grad = None. A tied weight is a single parameter; PyTorch calls its hook once, after both uses
    have added to .grad.

    Example: on 2 ranks, a model has layers 0 and 1. When backward() completes layer 1's gradient,
    its all-reduce starts. While it runs, backward() computes layer 0's gradient, whose all-reduce
    starts next. finish() waits for both. If layer 0's .grad was [1, 2] on rank 0 and [3, 6] on rank
    1, it is then [2, 4] on both.
    """

    def __init__(
        self, model: nn.Module, group: dist.ProcessGroup, find_unused_parameters: bool = False
    ):
        super().__init__(model, group, find_unused_parameters)
        raise NotImplementedError("Exercise 4.3 - Overlap by hooks.  Hint: minitron hint 4.3")

    def reduce(self, parameter: nn.Parameter) -> None:
        """Start the all-reduce of the .grad of `parameter`, which has just been completed."""
        raise NotImplementedError("Exercise 4.3 - Overlap by hooks.  Hint: minitron hint 4.3")

    def finish(self) -> None:
        """Wait for every all-reduce of this step, so that .grad is the mean."""
        raise NotImplementedError("Exercise 4.3 - Overlap by hooks.  Hint: minitron hint 4.3")


# Exercise 4.4 | Buckets | 30 min | difficulty 3 | replaces minitron.parallel.data.ddp
# Train with yours on 2 ranks
class BucketedDataParallel(Given):
    """Do the same as 4.3 in buckets: a few large messages instead of many small ones.

    self.buckets lists the parameters that require a gradient, bucket by bucket, beginning with
    those whose gradients are completed first. Send each bucket as one all-reduce of one flat
    tensor, which holds the bucket's gradients one after the other, in the bucket's order.

    Send a bucket during the backward pass, as soon as all of its gradients are complete and the
    previous bucket has been sent. Ranks may complete their gradients in different orders, but all
    of them must send the buckets in this one order. Do not wait before finish(), which first sends
    the remaining buckets. A parameter without a gradient on this rank counts as zeros.

    In each step, send every bucket once, with everything that has accumulated; under no_sync(),
    send nothing. After finish(), .grad is the mean on every rank (zeros or None if no rank had a
    gradient). Apart from .grad, keep nothing as large as the gradients: either free the flat
    tensors, or let each .grad be a view into one.

    Shapes: .grad has the shape of its parameter, which may be (). All gradients have one dtype.

    Example: on 2 ranks, bucket 0 holds b (2 values) and a (1 value). Rank 0 has the gradients
    b = [2, 4] and a = [6]; rank 1 has b = [4, 8] and a = None. One all-reduce sums [2, 4, 6] and
    [4, 8, 0]; both ranks end with b = [3, 6] and a = [3].
    """

    def __init__(
        self,
        model: nn.Module,
        group: dist.ProcessGroup,
        bucket_bytes: int = 25 * 2**20,
        find_unused_parameters: bool = False,
    ):
        super().__init__(model, group, find_unused_parameters)
        parameters = [p for p in model.parameters() if p.requires_grad]
        sizes = [p.numel() * p.element_size() for p in parameters]
        plan = buckets.assign_buckets(sizes, bucket_bytes)
        self.buckets = [[parameters[index] for index in indices] for indices in plan]
        raise NotImplementedError("Exercise 4.4 - Buckets.  Hint: minitron hint 4.4")

    def collect(self, parameter: nn.Parameter) -> None:
        """Send every bucket that can be sent now that the .grad of `parameter` is complete."""
        raise NotImplementedError("Exercise 4.4 - Buckets.  Hint: minitron hint 4.4")

    def send(self, index: int) -> dist.Work:
        """Start the all-reduce of self.buckets[index]."""
        raise NotImplementedError("Exercise 4.4 - Buckets.  Hint: minitron hint 4.4")

    def finish(self) -> None:
        """Send the remaining buckets, wait for all of them, and leave the mean in .grad."""
        raise NotImplementedError("Exercise 4.4 - Buckets.  Hint: minitron hint 4.4")
