"""Which gradients travel together: buckets that fill up in the order of the backward pass.

Read in this order: assign_buckets, bucket_parameters, BucketQueue.
"""

from collections.abc import Callable, Iterable

from torch import nn

from minitron.parallel.flat import FlatShards
from minitron.pytorch.spans import span


def assign_buckets(sizes: list[int], bucket_bytes: int) -> list[list[int]]:
    """Share out gradients of `sizes` bytes, the last one first, among buckets of `bucket_bytes`.

    A gradient that no longer fits into the open bucket opens the next; a larger one has its own.
    """
    buckets: list[list[int]] = []
    held = 0
    for index in reversed(range(len(sizes))):
        if not buckets or held + sizes[index] > bucket_bytes:
            buckets.append([])
            held = 0
        buckets[-1].append(index)
        held += sizes[index]
    return buckets


def bucket_parameters(
    parameters: Iterable[nn.Parameter], bucket_bytes: int
) -> list[list[nn.Parameter]]:
    """Fill buckets of one dtype and device each, in the order in which gradients come: last first.

    `parameters` are in the order of the forward pass.
    """
    parameters = list(parameters)
    buckets = [
        [alike[index] for index in indices]
        for alike in by_dtype_and_device(parameters)
        for indices in assign_buckets([parameter.nbytes for parameter in alike], bucket_bytes)
    ]
    return in_backward_order(buckets, parameters)


def by_dtype_and_device(parameters: list[nn.Parameter]) -> list[list[nn.Parameter]]:
    """Group the parameters by dtype and device."""
    kinds: dict[tuple, list[nn.Parameter]] = {}
    for parameter in parameters:
        kinds.setdefault((parameter.dtype, parameter.device), []).append(parameter)
    return list(kinds.values())


def in_backward_order(
    buckets: list[list[nn.Parameter]], parameters: list[nn.Parameter]
) -> list[list[nn.Parameter]]:
    """Sort buckets by when they fill up: the last parameter's gradient comes first."""
    place = {parameter: index for index, parameter in enumerate(parameters)}
    return sorted(buckets, key=lambda bucket: -place[bucket[-1]])


class BucketQueue:
    """Buckets that are reduced one after the other, in an order that all ranks share.

    A bucket waits for those before it, whatever the order in which gradients come. At most
    `max_in_flight` travel at a time: their full gradients are held.
    """

    def __init__(
        self,
        buckets: list[FlatShards],
        max_in_flight: int,
        finish_reduce: Callable[[FlatShards], None],
    ):
        self.buckets, self.max_in_flight = buckets, max_in_flight
        self.finish_reduce = finish_reduce
        self.bucket_of = {p: bucket for bucket in buckets for p in bucket.parameters}
        self.reset()

    def reset(self) -> None:
        """Begin with the first bucket again."""
        self.ready: set[nn.Parameter] = set()
        self.num_missing = {bucket: len(bucket.parameters) for bucket in self.buckets}
        self.in_flight: list[FlatShards] = []
        self.num_sent = 0

    def accept(self, parameter: nn.Parameter) -> None:
        """Move one more gradient into its bucket, and send the buckets whose turn has come."""
        bucket = self.bucket_of[parameter]
        bucket.take(parameter)
        self.ready.add(parameter)
        self.num_missing[bucket] -= 1
        while (
            self.num_sent < len(self.buckets) and self.num_missing[self.buckets[self.num_sent]] == 0
        ):
            self.send(self.buckets[self.num_sent])

    def send(self, bucket: FlatShards) -> None:
        """Start to reduce one bucket."""
        while len(self.in_flight) >= self.max_in_flight:
            self.finish_reduce(self.in_flight.pop(0))
        with span("ZeRO reduce bucket", self.num_sent):
            bucket.start_reduce()
        self.in_flight.append(bucket)
        self.num_sent += 1

    def wait(self) -> None:
        """Let all that is on its way arrive."""
        for bucket in self.in_flight:
            self.finish_reduce(bucket)
        self.reset()
