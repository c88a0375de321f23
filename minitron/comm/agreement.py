"""What the processes of a run agree on: plain Python values, which never touch the device.

`group` is None in a run of one process.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist

from minitron.config import ConfigError

Group = dist.ProcessGroup | None


def rank_and_size(group: Group) -> tuple[int, int]:
    """This rank's number in the group and how many there are; alone, (0, 1)."""
    return (0, 1) if group is None else (group.rank(), group.size())


def second_group(group: Group) -> Group:
    """The same ranks once more: for messages that must not mix with those of `group`."""
    if group is None:
        return None
    return dist.new_group(dist.get_process_group_ranks(group), backend="gloo")


def gathered(value, group: Group) -> list:
    """Every rank's `value`, which must be picklable, in rank order and on every rank."""
    if group is None:
        return [value]
    values = [None] * group.size()
    dist.all_gather_object(values, value, group=group)
    return values


def largest(number: int, group: Group) -> int:
    """The largest of the ranks' numbers: cheap enough for every step."""
    if group is None:
        return number
    numbers = torch.tensor([number])
    dist.all_reduce(numbers, op=dist.ReduceOp.MAX, group=group)
    return int(numbers)


def agreed(act: Callable, group: Group) -> list:
    """What `act` returns on each rank; raises OSError on all if it does on one."""
    try:
        outcome = act()
    except OSError as error:
        outcome = error
    outcomes = gathered(outcome, group)
    for each in outcomes:
        if isinstance(each, OSError):
            raise each
    return outcomes


def on_rank_0(act: Callable, group: Group) -> None:
    """Act on rank 0 alone; all wait for it, and raise the OSError that it does."""
    rank, _ = rank_and_size(group)
    agreed(act if rank == 0 else lambda: None, group)


@contextmanager
def one_fault_fails_all(group: Group) -> Iterator[None]:
    """Raise on every rank what a user got wrong on any of them.

    Without this the other ranks would wait for the one that has left. Nothing within may wait for
    other ranks unless all of them fail alike there.
    """
    fault: ConfigError | OSError | None = None
    try:
        yield
    except (ConfigError, OSError) as error:
        fault = error
    faults = gathered(None if fault is None else str(fault), group)
    failed = [rank for rank, text in enumerate(faults) if text is not None]
    if failed:
        raise fault or ConfigError(f"{faults[failed[0]]} (on rank {failed[0]})")


@contextmanager
def one_fault_ends_all(group: Group) -> Iterator[None]:
    """Let what a user got wrong on any rank end every rank with exit code 2; rank 0 tells it."""
    try:
        with one_fault_fails_all(group):
            yield
    except (ConfigError, OSError):
        rank, _ = rank_and_size(group)
        if rank != 0:
            raise SystemExit(2) from None
        raise
