"""The ranks' collectives side by side: their bytes as a table, and the first mismatched call.

Read in this order: Call, Numbering, merged, Matcher, first_mismatch.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from minitron.measure.operation import Operation, axis_of

MESSAGES = ("send", "recv")


@dataclass(frozen=True)
class Call:
    """One collective, send or receive of one rank; times are seconds of the ledger's clock."""

    number: int
    """Counts the collectives of a group from 0; a send or receive, those with the same peer."""
    op: str
    """all_reduce, reduce_scatter, all_gather, broadcast, reduce, gather, scatter, all_to_all,
    barrier, send or recv."""
    axis: str
    """The mesh's axis ("dp"), "world", or "group 3" for a group without a name."""
    dtype: torch.dtype
    payload: int
    """Bytes of the full tensor: before a reduce-scatter, after an all-gather; of a message."""
    sent: int
    received: int
    phase: str
    peer: int | None
    """The other end of a message, or the root of a collective that has one: a rank in the group."""
    size: int
    started: float
    finished: float | None = None
    """When the bytes were there; on CUDA and for messages, when a wait for them returned. None
    before that, and where there is nothing to wait for (functional collectives, blocking NCCL)."""
    ranks: tuple[int, ...] = ()
    """The group's ranks, as numbered in the whole world."""
    tag: int = 0
    reduce: str = ""
    """How values become one, "sum" or "max" say; "" where nothing is reduced."""
    group: str = ""
    """PyTorch's name of the group, the same on all its ranks."""

    @property
    def name(self) -> str:
        """Such as "all_reduce #17" or "send #3 to rank 1"."""
        if self.op not in MESSAGES:
            return f"{self.op} #{self.number}"
        peer = "any rank" if self.peer is None else f"rank {self.ranks[self.peer]}"
        tag = f", tag {self.tag}" if self.tag else ""
        return f"{self.op} #{self.number} {'to' if self.op == 'send' else 'from'} {peer}{tag}"

    def __str__(self) -> str:
        return f"{self.name} ({readable_bytes(self.payload)}, axis {self.axis})"


class Numbering:
    """Makes a Call of each operation that this rank issues, in order, and so knows its number."""

    def __init__(self):
        self._numbers: Counter = Counter()

    def call(self, operation: Operation, phase: str, now: float) -> Call:
        op, group, peer, tag = operation.op, operation.group, operation.peer, operation.tag
        axis, ranks = axis_of(group), tuple(dist.get_process_group_ranks(group))
        counted = (group.group_name,) + ((op, peer, tag) if op in MESSAGES else ())
        self._numbers[counted] += 1
        return Call(
            self._numbers[counted] - 1,
            op,
            axis,
            operation.dtype,
            operation.payload,
            *operation.volume,
            phase,
            peer,
            group.size(),
            now,
            ranks=ranks,
            tag=tag,
            reduce=operation.reduce,
            group=group.group_name,
        )


def readable_bytes(num_bytes: int) -> str:
    """Write a size as a person would: 4200000 -> 4.2 MB."""
    for size, unit in ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if num_bytes >= 0.9995 * size:
            return f"{num_bytes / size:.1f} {unit}"
    return f"{num_bytes} B"


# A table


@dataclass(frozen=True)
class Row:
    """The calls of one op, axis and phase: how many and how many bytes, rank by rank."""

    op: str
    axis: str
    phase: str
    calls: tuple[int, ...]
    payload: tuple[int, ...]
    sent: tuple[int, ...]
    received: tuple[int, ...]


class Table(list[Row]):
    """Rows in the order of their first call; printed, the bytes of a rank, or least..most."""

    def __str__(self) -> str:
        header = ("op", "axis", "phase", "calls", "payload", "sent", "received")
        lines = [header] + [
            (
                row.op,
                row.axis,
                row.phase,
                *map(_range, (row.calls, row.payload, row.sent, row.received)),
            )
            for row in self
        ]
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        aligned = [
            [
                cell.ljust(width) if column < 3 else cell.rjust(width)
                for column, (cell, width) in enumerate(zip(line, widths, strict=True))
            ]
            for line in lines
        ]
        return "\n".join("  ".join(cells) for cells in aligned)

    __repr__ = __str__


def merged(calls_by_rank: Sequence[Sequence[Call]]) -> Table:
    """Add up the calls of each rank by op, axis and phase."""
    kinds = {(c.op, c.axis, c.phase): None for calls in calls_by_rank for c in calls}  # in order

    def by_rank(kind: tuple, amount: Callable[[Call], int]) -> tuple[int, ...]:
        return tuple(
            sum(amount(c) for c in calls if (c.op, c.axis, c.phase) == kind)
            for calls in calls_by_rank
        )

    return Table(
        Row(
            *kind,
            by_rank(kind, lambda c: 1),
            by_rank(kind, lambda c: c.payload),
            by_rank(kind, lambda c: c.sent),
            by_rank(kind, lambda c: c.received),
        )
        for kind in kinds
    )


def _range(values: tuple[int, ...]) -> str:
    least, most = min(values), max(values)
    return f"{most:,}" if least == most else f"{least:,}..{most:,}"


# A comparison


@dataclass(frozen=True)
class Arrival:
    """A rank has come to a call; the rank's last collective of each group before it."""

    rank: int
    call: Call
    before: dict[tuple, Call]


class Matcher:
    """Compare ranks while they run: every rank of a group must make the same calls in its order.

    One that is merely behind is no mismatch. A send is compared with the receive it meets.

    Two ranks that have two groups in common must issue the collectives of both in the same order,
    too. gloo completes asynchronous ones in any order; NCCL runs each as a kernel that waits for
    the other ranks' kernels, and two of them may wait for each other. Messages are exempt: ranks
    of a pipeline send and receive in orders of their own.
    """

    def __init__(self):
        self._waiting: dict[tuple, list[Arrival]] = {}
        self._last: dict[int, dict[tuple, Call]] = {}  # collective, by rank and group
        self._receives_anything: set[tuple] = set()

    def add(self, rank: int, call: Call) -> str | None:
        """Take the next call of `rank`; returns the mismatch in words, if it is one."""
        meeting, num_ranks = self._meeting(rank, call)
        if meeting is None:
            return None
        last = self._last.setdefault(rank, {})
        arrival = Arrival(rank, call, {} if call.op in MESSAGES else dict(last))
        waiting = self._waiting.setdefault(meeting, [])
        waiting.append(arrival)
        if call.op not in MESSAGES:
            last[_group(call)] = call

        if _signature(call) != _signature(waiting[0].call):
            return _mismatch([other.rank for other in waiting[:-1]], waiting[0].call, rank, call)
        for other in waiting[:-1]:
            crossed = _crossed_order(arrival, other) or _crossed_order(other, arrival)
            if crossed:
                return crossed
        if len(waiting) == num_ranks:
            del self._waiting[meeting]
        return None

    def _meeting(self, rank: int, call: Call) -> tuple[tuple | None, int]:
        """Return what calls that belong together have in common, and how many they are."""
        group = _group(call)
        if call.op not in MESSAGES:
            return (*group, call.number), call.size
        if call.peer is None:
            self._receives_anything.add((*group, rank))
            return None, 0
        ends = rank, call.ranks[call.peer]
        source, destination = ends if call.op == "send" else ends[::-1]
        if (*group, destination) in self._receives_anything:
            return None, 0  # which message it met is unknown
        return (*group, source, destination, call.tag, call.number), 2


def first_mismatch(calls_by_rank: Sequence[Sequence[Call]]) -> str | None:
    """Find the earliest call in which ranks part, by op, size, dtype, root or reduction."""
    pairs = [(rank, call) for rank, calls in enumerate(calls_by_rank) for call in calls]
    matcher = Matcher()
    for rank, call in sorted(pairs, key=lambda pair: pair[1].started):
        mismatch = matcher.add(rank, call)
        if mismatch:
            return mismatch
    return None


def _group(call: Call) -> tuple:
    return call.group, call.axis, call.ranks


def _crossed_order(early: Arrival, late: Arrival) -> str | None:
    """Tell whether `late` has issued what `early` will issue only after the call they meet in."""
    for group, call in late.before.items():
        known = early.before.get(group)
        if early.rank in call.ranks and (known is None or known.number < call.number):
            return (
                f"rank {late.rank} issued {call} before {late.call}, rank {early.rank} has "
                "come to the latter without it: ranks that share two groups must issue the "
                "collectives of both in the same order, or they can deadlock with NCCL"
            )
    return None


def _signature(call: Call) -> tuple:
    """Return what must be equal in calls that meet."""
    if call.op in MESSAGES:
        return call.payload, call.dtype
    if call.op == "all_to_all":  # ranks may send more or less
        return call.op, call.dtype
    return call.op, call.payload, call.dtype, call.peer, call.reduce


def _mismatch(waiting: list[int], first: Call, rank: int, call: Call) -> str:
    if len(waiting) == 1:
        who = f"rank {waiting[0]} waits"
    else:
        who = f"ranks {', '.join(map(str, waiting[:-1]))} and {waiting[-1]} wait"
    if call.op != first.op and call.op not in MESSAGES:
        return f"{who} in {first}, rank {rank} in {call.name}"
    return (
        f"{who} in {first.name} ({_difference(first, call)}, axis {first.axis}), "
        f"rank {rank} in {call.name} ({_difference(call, first)})"
    )


def _difference(call: Call, other: Call) -> str:
    """Return what `call` has that `other` has not."""
    facts = []
    if call.payload != other.payload:
        rounded = readable_bytes(call.payload)
        equal = rounded == readable_bytes(other.payload)
        facts.append(f"{call.payload:,} B" if equal else rounded)
    if call.dtype != other.dtype:
        facts.append(str(call.dtype).removeprefix("torch."))
    if call.peer != other.peer and call.op not in MESSAGES:
        facts.append(f"root {call.peer}")
    if call.reduce != other.reduce:
        facts.append(call.reduce)
    return ", ".join(facts)
