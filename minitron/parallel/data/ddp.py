"""Data parallelism: every rank holds the full model and reads its own part of the global batch.

Idea: the gradient of the global batch is the mean of the ranks' gradients, so one all-reduce of
the gradients makes N processes train as one. The naive version does it after the backward pass.
The hooked one sends each gradient when it is ready, so that the network works while the backward
pass goes on. The bucketed one sends few large messages instead of many small ones.

Notation: N ranks; G bytes of gradients.

Each rank holds: all parameters, gradients and optimizer state, and the activations of its part.

Communication: per step one all-reduce of every gradient, 2 (N-1)/N G bytes sent and received per
rank, none under `no_sync`, and in `finish` a broadcast of each float buffer. Once, at the start, a
broadcast of rank 0's parameters and buffers; with buckets, of their order after the first step.

Read in this order: average_gradients, DataParallel, HookedDataParallel, BucketedDataParallel.

Reference: Li et al. 2020, "PyTorch Distributed" (section 3.2: the three versions and `no_sync`).
"""

import torch
import torch.distributed as dist
from torch import nn

from minitron.comm.collectives import all_reduce, broadcast
from minitron.cost.sharding import BUCKET_BYTES
from minitron.parallel.data.axis import DataAxis
from minitron.parallel.data.buckets import assign_buckets, by_dtype_and_device, in_backward_order
from minitron.parallel.flat import FlatGradients
from minitron.precision import zero_gradient
from minitron.pytorch.private import host_value

FIRST_BUCKET_BYTES = 2**20  # small, so that the network starts early


def average_gradients(model: nn.Module, group: dist.ProcessGroup) -> None:
    """Replace every `.grad` by its mean over the ranks, one after the other.

    A gradient that is None counts as zeros: the other ranks wait for this rank's part.
    """
    for parameter in model.parameters():
        if parameter.requires_grad:
            if parameter.grad is None:
                parameter.grad = zero_gradient(parameter)
            parameter.grad /= group.size()
            all_reduce(parameter.grad, group)


class DataParallel(DataAxis):
    """The naive version: communicate after the backward pass. A step with this or the others:

        with parallel.no_sync():              # every micro-batch of this rank but the last
            loss(first_part).backward()
        loss(last_part).backward()
        parallel.finish()                     # .grad is now the mean over the ranks
        optimizer.step(); optimizer.zero_grad()

    Every rank starts from rank 0's parameters and buffers. The numbers of micro-batches may
    differ; a rank without any calls `finish()` alone. A group of one communicates nothing. With
    an optimizer from `shard`, `zero_grad()` begins anew after a backward pass that has raised.

    With `find_unused_parameters` a parameter without a gradient counts as zeros; one that no rank
    has used keeps None: AdamW would let it decay. Costs an all-reduce and a wait for the device.
    """

    def __init__(self, model: nn.Module, group: dist.ProcessGroup, find_unused_parameters=False):
        super().__init__(model, group)
        self.find_unused_parameters = find_unused_parameters
        self.names: dict[nn.Parameter, str] = {}  # what is averaged; a tied weight is there once
        if group.size() > 1:
            self.names = {p: name for name, p in model.named_parameters() if p.requires_grad}
            self.broadcast_module_state()

    def finish(self) -> None:
        """Leave in every `.grad` the mean over the ranks; call it after the last backward pass.

        Raises ValueError if this rank has gradients for some parameters and none for others.
        """
        used = [parameter.grad is not None for parameter in self.names]
        if any(used) and not all(used) and not self.find_unused_parameters:
            missing = [name for p, name in self.names.items() if p.grad is None]
            raise ValueError(
                missing_gradient_message(missing, len(used), self.group.rank())
                + ", else pass find_unused_parameters=True"
            )
        self.fill_missing()
        self.average()
        if used and self.find_unused_parameters:
            num_users = torch.tensor(used, dtype=torch.int32, device=next(iter(self.names)).device)
            all_reduce(num_users, self.group)
            counts = host_value(num_users, when_fake=used)
            for parameter, count in zip(self.names, counts, strict=True):
                parameter.grad = parameter.grad if count else None
        # Here, not in the forward pass: every rank gets here, also without a micro-batch.
        self.copy_buffers()

    def fill_missing(self) -> None:
        """Let a gradient that is None be zeros: the other ranks wait for this rank's part."""
        for parameter in self.names:
            if parameter.grad is None:
                parameter.grad = zero_gradient(parameter)

    def average(self) -> None:
        """Average the gradients of all parameters in `names`."""
        if self.names:
            average_gradients(self.model, self.group)


class HookedDataParallel(DataParallel):
    """Send each gradient when it is ready, while the backward pass computes the others."""

    def __init__(self, model: nn.Module, group: dist.ProcessGroup, find_unused_parameters=False):
        super().__init__(model, group, find_unused_parameters)
        self.ready: dict[nn.Parameter, None] = {}  # in the order in which they came
        self.works: list[dist.Work] = []  # of the buckets that have been sent
        self.make_buckets(list(self.names))
        self.hooks = [p.register_post_accumulate_grad_hook(self.collect) for p in self.names]

    def make_buckets(self, parameters: list[nn.Parameter]) -> None:
        """Decide what is sent together: each gradient alone.

        `parameters` are in the order of the forward pass, so the last one's gradient comes first.
        """
        self.buckets = [[parameter] for parameter in reversed(parameters)]

    def collect(self, parameter: nn.Parameter) -> None:
        """Take a complete gradient. A hook's argument is the parameter, not its `.grad`."""
        if self.is_last and self.completes and parameter not in self.incomplete:
            self.accept(parameter)

    def accept(self, parameter: nn.Parameter) -> None:
        """Prepare one more gradient, and send the buckets whose turn has come.

        A bucket waits for those before it: all ranks must send in the same order, whatever the
        order in which their gradients come.
        """
        if parameter in self.ready:
            raise ValueError(
                f"{self.names[parameter]}: a second gradient before finish(): run every backward "
                "pass of a step but the last under no_sync()"
            )
        self.prepare(parameter)
        self.ready[parameter] = None
        while len(self.works) < len(self.buckets) and self.is_full(self.buckets[len(self.works)]):
            self.works.append(self.send(len(self.works)))

    def is_full(self, bucket: list[nn.Parameter]) -> bool:
        # from the end, where the latest is: most often the first answer is no
        return all(parameter in self.ready for parameter in reversed(bucket))

    def prepare(self, parameter: nn.Parameter) -> None:
        """Divide the gradient by N, so that the sum over the ranks is the mean."""
        parameter.grad /= self.group.size()

    def send(self, index: int) -> dist.Work:
        """Start the all-reduce of one bucket."""
        (parameter,) = self.buckets[index]
        return all_reduce(parameter.grad, self.group, async_op=True)

    def average(self) -> None:
        """Send what no hook has sent, and wait for everything."""
        for parameter in reversed(self.names):
            if parameter not in self.ready:
                self.accept(parameter)
        for work in self.works:
            work.wait()
        self.ready, self.works = {}, []

    def discard(self) -> None:
        if self.ready:  # some are on their way: the other ranks wait for the rest of them
            self.fill_missing()
            self.average()


class BucketedDataParallel(HookedDataParallel):
    """Send gradients in flat buckets of `bucket_bytes`; every `.grad` is a view into one.

    The first step shows in which order gradients become ready; the buckets are then made again
    in the order of rank 0.
    """

    def __init__(
        self,
        model: nn.Module,
        group: dist.ProcessGroup,
        bucket_bytes: int = BUCKET_BYTES,
        find_unused_parameters=False,
    ):
        self.bucket_bytes = bucket_bytes
        self.rebuilt = False
        super().__init__(model, group, find_unused_parameters)

    def make_buckets(self, parameters: list[nn.Parameter]) -> None:
        """Lay out the buckets, one dtype and device each, in the order in which they fill up."""
        buckets = [
            bucket
            for alike in by_dtype_and_device(parameters)
            for bucket in self.bucket_parameters(alike)
        ]
        self.buckets = in_backward_order(buckets, parameters)
        self.flats = [FlatGradients(bucket, self.group) for bucket in self.buckets]
        self.flat_of = {p: flat for flat in self.flats for p in flat.parameters}

    def bucket_parameters(self, parameters: list[nn.Parameter]) -> list[list[nn.Parameter]]:
        sizes = [parameter.nbytes for parameter in parameters]
        first = assign_buckets(sizes, min(FIRST_BUCKET_BYTES, self.bucket_bytes))[0]
        others = assign_buckets(sizes[: -len(first)], self.bucket_bytes)
        return [[parameters[index] for index in indices] for indices in (first, *others)]

    def collect(self, parameter: nn.Parameter) -> None:
        super().collect(parameter)
        view = self.flat_of[parameter].grad_views[parameter]
        if parameter.grad is not None and parameter.grad is not view:
            parameter.grad = view.copy_(parameter.grad)  # hold no gradient beside its bucket

    def prepare(self, parameter: nn.Parameter) -> None:
        """Bring the gradient into its bucket, divided by N."""
        self.flat_of[parameter].take(parameter)

    def send(self, index: int) -> dist.Work:
        return self.flats[index].start_reduce()

    def average(self) -> None:
        ready = self.ready
        super().average()
        if not self.rebuilt and self.names:
            self.rebuild(list(ready))

    def rebuild(self, ready: list[nn.Parameter]) -> None:
        """Make the buckets again, for gradients that come in the order of rank 0's `ready`."""
        parameters = list(self.names)
        number = {parameter: index for index, parameter in enumerate(parameters)}
        agreed = torch.tensor([number[parameter] for parameter in ready], device=ready[0].device)
        broadcast(agreed, 0, self.group)
        own_order = [number[parameter] for parameter in ready]
        ready = [parameters[index] for index in host_value(agreed, when_fake=own_order)]

        self.make_buckets(ready[::-1])
        for parameter, flat in self.flat_of.items():
            parameter.grad = flat.grad_views[parameter].copy_(parameter.grad)
        self.rebuilt = True


def missing_gradient_message(missing: list[str], num_parameters: int, rank: int) -> str:
    names = ", ".join(missing[:4]) + (", ..." if len(missing) > 4 else "")
    return (
        f"rank {rank}: no gradient for {len(missing)} of {num_parameters} parameters "
        f"({names}): freeze what is never used by requires_grad_(False)"
    )


def apply_naive_data_parallel(model: nn.Module, group: dist.ProcessGroup, **options):
    """Let `model` train data-parallel over `group`; `options` are those of `DataParallel`."""
    return DataParallel(model, group, **options)


def apply_hooked_data_parallel(model: nn.Module, group: dist.ProcessGroup, **options):
    """Do the same as `apply_naive_data_parallel`, with overlap."""
    return HookedDataParallel(model, group, **options)


def apply_bucketed_data_parallel(model: nn.Module, group: dist.ProcessGroup, *args, **options):
    """Do the same, with overlap and buckets; `args` may be `bucket_bytes`."""
    return BucketedDataParallel(model, group, *args, **options)
