"""Exercises of chapter 4: data parallelism. Every rank has the whole model and its own data.

Write a body, save, and ask `minitron check 4.1`, or check("4.1") in a notebook. Stuck:
`minitron hint 4.1`, three levels. Start again: `minitron reset 4.1`. The exercises do not build on
one another; take them in any order.

Every rank runs your code. `group` is the group of the ranks: group.rank(), group.size(), and
group=group in every call of torch.distributed, for it need not be the group of all ranks there
are. Allowed is dist.all_reduce alone, which adds up.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor, nn

from minitron.parallel.data import buckets
from minitron.parallel.one_device import OneDevice


class Given(OneDevice):
    """What 4.3 and 4.4 start from: equal weights, a switch, and a mean for the training loop.

    What else the training loop asks is answered as on one device, which has the whole model too.
    The package's classes accept a parameter without a gradient only with find_unused_parameters.
    Yours always accept one, so you can ignore the argument.
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
        """Say that the gradients of this micro-batch are not the last of the step."""
        self.synchronizes = False
        yield
        self.synchronizes = True

    def mean(self, tensor: Tensor) -> Tensor:
        """The mean of a small tensor, a loss say, over the ranks."""
        total = tensor.detach().clone()
        dist.all_reduce(total, group=self.group)
        return total / self.group.size()


# Exercise 4.1 | Naive averaging | 15 min | difficulty 1 | replaces minitron.parallel.data.ddp
# Train with yours on 2 ranks: apply_naive_data_parallel for apply_bucketed_data_parallel
def average_gradients(model: nn.Module, group: dist.ProcessGroup) -> None:
    """After the backward pass, make every gradient its mean over the ranks.

    The ranks hold equal weights, and each has run backward() on the mean loss of its own rows, as
    many as any other's. Afterwards .grad is on every rank what one process would have computed
    from all the rows. Weights do not change.

    A frozen parameter has no gradient, and takes no part. A parameter that requires a gradient may
    have none (.grad is None) on some ranks, whose rows did not use it: there it counts as zeros.
    A tied weight is one parameter. Each rank sends each gradient once: one all-reduce per
    parameter, or fewer.

    Shapes: .grad has its parameter's shape, () included; all have one dtype.

    Example: on 2 ranks .grad of w is [1, 2] on rank 0 and [3, 6] on rank 1; both end with [2, 4].
    If rank 1 has None, both end with [0.5, 1].
    """
    ### BEGIN SOLUTION
    for parameter in model.parameters():
        if parameter.requires_grad:
            if parameter.grad is None:  # the other ranks may have one, and wait for this rank
                parameter.grad = torch.zeros_like(parameter)
            dist.all_reduce(parameter.grad, group=group)
            parameter.grad /= group.size()
    ### END SOLUTION


# Exercise 4.2 | Fill the buckets | 10 min | difficulty 1 | replaces minitron.parallel.data.buckets
# Train with yours on 2 ranks
def assign_buckets(sizes: list[int], bucket_bytes: int) -> list[list[int]]:
    """Share out the gradients among buckets, in the order in which backward() finishes them.

    sizes[i] is the size of gradient i in bytes; 0 is the parameter that the model registered
    first, so its gradient comes last. Start with the last one. A gradient joins the current
    bucket if the bucket then holds bucket_bytes or less, else it starts the next one: a bucket
    that was left is never filled up later. A gradient larger than bucket_bytes has a bucket to
    itself. Every index is in one bucket, no bucket is empty, and each lists its indices in the
    order in which they joined.

    Example: sizes [40, 10, 20, 30] with bucket_bytes = 50 give [[3, 2], [1, 0]]: 30 + 20, then
    10 + 40. With 45 they give [[3], [2, 1], [0]]. On 2 ranks each bucket is one all-reduce.
    """
    ### BEGIN SOLUTION
    buckets: list[list[int]] = []
    held = 0
    for index in reversed(range(len(sizes))):
        if buckets and held + sizes[index] <= bucket_bytes:
            buckets[-1].append(index)
            held += sizes[index]
        else:
            buckets.append([index])
            held = sizes[index]
    return buckets
    ### END SOLUTION


# Exercise 4.3 | Overlap by hooks | 20 min | difficulty 2 | replaces minitron.parallel.data.ddp
# Train with yours on 2 ranks: apply_hooked_data_parallel for apply_bucketed_data_parallel
class HookedDataParallel(Given):
    """Average each gradient over the ranks while the backward pass still computes the others.

        parallel = HookedDataParallel(model, group)     # once; then in every step:
        with parallel.no_sync():                        # if there are several micro-batches,
            loss(first_rows).backward()                 # for all of them but the last
        loss(last_rows).backward()
        parallel.finish()
        optimizer.step(); optimizer.zero_grad()

    When backward() has completed a parameter's .grad, its all-reduce is issued at once, with
    async_op=True, and nobody waits for it before finish(). After finish(), .grad is on every rank
    the mean over the ranks of what each has accumulated, and nothing else of the step is held.

    One all-reduce per step and parameter that has got a gradient, in the shape of .grad. Under
    no_sync(), where self.synchronizes is False, there is none; gradients add up in .grad as they
    would without this class. Frozen parameters take no part. A parameter that no rank uses keeps
    .grad = None. A tied weight is one parameter; PyTorch calls its hook once, when both of its
    places have added to .grad.

    Example: on 2 ranks a model has layers 0 and 1. backward() completes layer 1's gradient: its
    all-reduce starts. While it runs, backward() computes layer 0's, whose all-reduce starts too.
    finish() waits for both. If layer 0's .grad was [1, 2] and [3, 6], it is [2, 4] on both ranks.
    """

    def __init__(
        self, model: nn.Module, group: dist.ProcessGroup, find_unused_parameters: bool = False
    ):
        super().__init__(model, group, find_unused_parameters)
        ### BEGIN SOLUTION
        self.works: list[dist.Work] = []
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(self.reduce)
        ### END SOLUTION

    def reduce(self, parameter: nn.Parameter) -> None:
        """Issue the all-reduce of `parameter`, whose .grad has just been completed."""
        ### BEGIN SOLUTION
        if self.synchronizes:
            parameter.grad /= self.group.size()  # before the sum: it must not change under way
            work = dist.all_reduce(parameter.grad, group=self.group, async_op=True)
            self.works.append(work)
        ### END SOLUTION

    def finish(self) -> None:
        """Wait for every all-reduce of this step; afterwards .grad is the mean."""
        ### BEGIN SOLUTION
        for work in self.works:
            work.wait()
        self.works.clear()
        ### END SOLUTION


# Exercise 4.4 | Buckets | 30 min | difficulty 3 | replaces minitron.parallel.data.ddp
# Train with yours on 2 ranks
class BucketedDataParallel(Given):
    """As 4.3, but the gradients travel in buckets: few large messages instead of many small ones.

    self.buckets lists the parameters that require a gradient, bucket by bucket, those whose
    gradients come first in the first. A bucket is sent as one all-reduce of one flat tensor: its
    gradients end to end, in the bucket's order. It is sent during the backward pass, when its last
    gradient is complete and the bucket before it has been sent: never out of order, because the
    ranks need not complete their gradients in the same order, but must send the same buckets.
    Nobody waits before finish(); finish() first sends what was not sent. A parameter without a
    gradient on this rank counts as zeros.

    Every step outside no_sync() sends every bucket once, with all that has accumulated. After
    finish(), .grad is the mean on every rank (zeros or None if no rank had one), and nothing of
    the gradients' size is held beside .grad: a flat tensor is gone, or .grad are views of it.

    Shapes: .grad as the parameter, () included; all have one dtype.

    Example: on 2 ranks, bucket 0 holds b (2 values) and a (1 value). Rank 0 has the gradients
    b = [2, 4], a = [6], rank 1 has b = [4, 8], a = None. One all-reduce sums [2, 4, 6] and
    [4, 8, 0]; both ranks end with b = [3, 6] and a = [3].
    """

    def __init__(
        self, model: nn.Module, group: dist.ProcessGroup, bucket_bytes: int = 25 * 2**20,
        find_unused_parameters: bool = False,
    ):
        super().__init__(model, group, find_unused_parameters)
        parameters = [p for p in model.parameters() if p.requires_grad]
        sizes = [p.numel() * p.element_size() for p in parameters]
        plan = buckets.assign_buckets(sizes, bucket_bytes)
        self.buckets = [[parameters[index] for index in indices] for indices in plan]
        ### BEGIN SOLUTION
        self._start_over()
        for parameter in parameters:
            parameter.register_post_accumulate_grad_hook(self.collect)
        ### END SOLUTION

    def collect(self, parameter: nn.Parameter) -> None:
        """Send what can be sent, now that the .grad of `parameter` is complete."""
        ### BEGIN SOLUTION
        if self.synchronizes:
            self.complete.add(parameter)
            while self.num_sent < len(self.buckets) \
                    and self.complete.issuperset(self.buckets[self.num_sent]):
                self.send(self.num_sent)
        ### END SOLUTION

    def send(self, index: int) -> dist.Work:
        """Issue the all-reduce of self.buckets[index]."""
        ### BEGIN SOLUTION
        bucket = self.buckets[index]
        grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in bucket]
        flat = torch.cat([grad.flatten() for grad in grads]) / self.group.size()
        parts = flat.split([p.numel() for p in bucket])
        for parameter, part in zip(bucket, parts, strict=True):
            parameter.grad = part.view_as(parameter)  # the sum arrives where .grad looks
        self.works.append(dist.all_reduce(flat, group=self.group, async_op=True))
        self.num_sent += 1
        return self.works[-1]
        ### END SOLUTION

    def finish(self) -> None:
        """Send the buckets that were not sent, wait for all, leave the mean in .grad."""
        ### BEGIN SOLUTION
        while self.num_sent < len(self.buckets):
            self.send(self.num_sent)
        for work in self.works:
            work.wait()
        self._start_over()

    def _start_over(self) -> None:
        self.complete: set[nn.Parameter] = set()
        self.works: list[dist.Work] = []
        self.num_sent = 0
        ### END SOLUTION
