"""Which gradients travel together: buckets that fill up in the order of the backward pass.

Read in this order: assign_buckets, bucket_parameters.
"""

from collections.abc import Iterable

from torch import nn


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
        [alike[index] for index in indices] for alike in by_dtype_and_device(parameters)
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
