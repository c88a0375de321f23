"""What the processes of a run agree on: plain Python values, which never touch the device.

A run of one process has the group `SINGLE_RANK`.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from minitron.config import ConfigError


class SingleRank:
    """The null case of a process group: one rank, alone."""

    def rank(self) -> int:
        """Return this rank's number, 0."""
        return 0

    def size(self) -> int:
        """Return the number of ranks, 1."""
        return 1


SINGLE_RANK = SingleRank()
Group = dist.ProcessGroup | SingleRank


def second_group(group: Group) -> Group:
    """Make another group of the same ranks, for messages that must not mix with `group`'s."""
    if group.size() == 1:
        return group
    return dist.new_group(dist.get_process_group_ranks(group), backend="gloo")


def all_gather_objects(value, group: Group) -> list:
    """Return every rank's `value`, which must be picklable, in rank order and on every rank."""
    if group.size() == 1:
        return [value]
    values = [None] * group.size()
    dist.all_gather_object(values, value, group=group)
    return values


def all_gather_tensors(
    tensors: dict[str, Tensor | None], group: Group
) -> list[dict[str, Tensor | None]]:
    """Return every rank's named tensors, on the CPU; None stays None.

    They travel as NumPy bytes: pickling a small tensor takes PyTorch ten times as long.
    """
    packed = {
        name: None if tensor is None else to_bytes(tensor) for name, tensor in tensors.items()
    }
    return [
        {name: None if each is None else from_bytes(*each) for name, each in theirs.items()}
        for theirs in all_gather_objects(packed, group)
    ]


def to_bytes(tensor: Tensor) -> tuple[np.ndarray, torch.dtype, torch.Size]:
    """Return a tensor's bytes, dtype and shape."""
    return tensor.cpu().reshape(-1).view(torch.uint8).numpy(), tensor.dtype, tensor.shape


def from_bytes(values: np.ndarray, dtype: torch.dtype, shape: torch.Size) -> Tensor:
    """Return the tensor of `to_bytes`, with memory of its own."""
    tensor = torch.empty(shape, dtype=dtype)
    tensor.view(-1).view(torch.uint8).copy_(torch.from_numpy(values))
    return tensor


def all_reduce_max_int(number: int, group: Group) -> int:
    """Return the largest of the ranks' numbers: cheap enough for every step."""
    if group.size() == 1:
        return number
    numbers = torch.tensor([number])
    dist.all_reduce(numbers, op=dist.ReduceOp.MAX, group=group)
    return int(numbers)


def all_gather_or_raise(act: Callable, group: Group) -> list:
    """Return what `act` returns on each rank; raises OSError on all ranks if it does on one."""
    try:
        outcome = act()
    except OSError as error:
        outcome = error
    outcomes = all_gather_objects(outcome, group)
    for each in outcomes:
        if isinstance(each, OSError):
            raise each
    return outcomes


def on_rank_0(act: Callable, group: Group) -> None:
    """Act on rank 0 alone; all wait for it, and raise the OSError that it does."""
    all_gather_or_raise(act if group.rank() == 0 else lambda: None, group)


@contextmanager
def raise_on_all_ranks(group: Group) -> Iterator[None]:
    """Raise on every rank what a user got wrong on any of them.

    Without this the other ranks would wait for the one that has left. Nothing within may wait for
    other ranks unless all of them fail alike there.
    """
    own = sent = None
    try:
        yield
    except ConfigError as error:
        own = sent = error
    except OSError as error:
        own, sent = error, ConfigError(str(error))
    faults = all_gather_objects(sent, group)
    failed = [rank for rank, fault in enumerate(faults) if fault is not None]
    if failed:
        raise own or faults[failed[0]].on_rank(failed[0])


@contextmanager
def exit_on_all_ranks(group: Group) -> Iterator[None]:
    """Let what a user got wrong on any rank end every rank with exit code 2; rank 0 tells it."""
    try:
        with raise_on_all_ranks(group):
            yield
    except (ConfigError, OSError):
        if group.rank() != 0:
            raise SystemExit(2) from None
        raise
