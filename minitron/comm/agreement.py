"""What the ranks of a run tell each other in plain Python objects: rare, small, not in a step.

`group` is None in a run of one process.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist

from minitron.config import ConfigError

Group = dist.ProcessGroup | None


def rank_and_size(group: Group) -> tuple[int, int]:
    """This rank's number in the group and how many there are; alone, (0, 1)."""
    return (0, 1) if group is None else (group.rank(), group.size())


def gathered(value, group: Group) -> list:
    """Every rank's `value`, which must be picklable, in rank order and on every rank."""
    if group is None:
        return [value]
    values = [None] * group.size()
    dist.all_gather_object(values, value, group=group)
    return values


@contextmanager
def one_fault_ends_all(group: Group) -> Iterator[None]:
    """Let a ConfigError on any rank end every rank with exit code 2; rank 0 alone tells it.

    Without this the other ranks would wait for the one that has left.
    """
    fault = None
    try:
        yield
    except ConfigError as error:
        fault = str(error)
    faults = gathered(fault, group)
    failed = [rank for rank, text in enumerate(faults) if text is not None]
    if not failed:
        return
    rank, _ = rank_and_size(group)
    if rank != 0:
        raise SystemExit(2)
    text = faults[failed[0]]
    raise ConfigError(text if failed[0] == 0 else f"{text} (on rank {failed[0]})")
