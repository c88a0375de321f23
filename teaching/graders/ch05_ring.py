"""Graders of 5.1 and 5.2: what the ranks hold, and which message went where.

The sum of integers in float64 is exact, so results are compared bit for bit.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from minitron.cost import chunk_sizes
from minitron.measure.ledger import Call
from teaching.graders import asked, expect
from teaching.graders.ranks import Wire, on_ranks, per_rank

STUCK = "does every rank call dist.send before it receives? dist.send returns when its tensor " \
        "has been received, so every rank waits: start an isend, receive, then wait for the isend"
VALUE = 8  # bytes, float64
RUBBISH = -1.0


@dataclass(frozen=True)
class Seen:
    """What one rank has after one call."""

    flat: Tensor
    result: object
    in_place: bool
    """Whether `result` is a part of the memory of flat."""
    calls: list[Call]
    num_open: int
    """Messages that were started and never waited for."""


def lengths(size: int) -> list[int]:
    """Values of flat: first a length that divides, then those that do not, at last the tiny."""
    return sorted({3 * size, 3 * size + 1, 4 * size - 1, size + 1, size - 1, 1, 0}, key=lambda n: (
        n != 3 * size, -n))


def run_trial(group, answer: Callable, start: Callable[[int, int, int], Tensor]) -> list[Seen]:
    """Call the answer on this rank with flat = start(rank, size, length), for every length."""
    seen = []
    for length in lengths(group.size()):
        flat = start(group.rank(), group.size(), length)
        with Wire(allowed={"send", "recv"}) as wire:
            result = answer(flat, group)
        in_place = isinstance(result, Tensor) and _address(result) == _address(flat)
        waited = {number for event, number in wire.events if event == "wait"}
        seen.append(Seen(flat, result, in_place, wire.calls, len(wire.calls) - len(waited)))
    return seen


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


# 5.1


def contribution(rank: int, size: int, length: int) -> Tensor:
    """10^rank in every place, times the place: each digit of a sum tells which rank is in it."""
    return 10.0**rank * torch.arange(1, length + 1, dtype=torch.float64)


def scatter(group, reduce_scatter_ring: Callable) -> list[Seen]:
    return run_trial(group, reduce_scatter_ring, contribution)


def grade_5_1(reduce_scatter_ring: Callable) -> None:
    """Look at every message, then at every rank's chunk of the sum."""
    call = "reduce_scatter_ring(flat, group)"
    with asked(f"{call} on 1, 2, 3 and 4 ranks, with flat of many lengths"):
        by_size = on_ranks(scatter, reduce_scatter_ring, stuck=STUCK)
    for size, by_rank in by_size.items():
        for index, length in enumerate(lengths(size)):
            with asked(f"{call} on {size} ranks, with flat of {length} values"):
                seen = [mine[index] for mine in by_rank]
                _expect_messages(seen, length, own_stays=True)
                _expect_sums(seen, length)
                _expect_all_done(seen)


def _expect_sums(seen: list[Seen], length: int) -> None:
    size = len(seen)
    total = sum(contribution(rank, size, length) for rank in range(size))
    for rank, (mine, right) in enumerate(zip(seen, total.tensor_split(size), strict=True)):
        result = mine.result
        expect(isinstance(result, Tensor), seen=f"rank {rank}: it returned {result!r:.60}",
               likely=f"return chunk {rank} of flat, which holds the sum")
        shown = f"rank {rank}: it returned {_values(result)}; chunk {rank} of the sum is " \
                f"{_values(right)}"
        expect(torch.equal(result, right), seen=shown,
               likely=_why_other_sum(result, total, rank, size))
        expect(torch.equal(mine.flat.tensor_split(size)[rank], right),
               seen=f"rank {rank}: chunk {rank} of flat holds "
                    f"{_values(mine.flat.tensor_split(size)[rank])}, the sum is {_values(right)}",
               likely="the returned tensor is correct, but not a part of flat: add in place with "
                      "chunk += received; chunk = chunk + received makes a new tensor")
        expect(mine.in_place or not right.numel(), seen=f"rank {rank}: a copy was returned",
               likely="return the view, chunks[rank], not a copy of it")


def _why_other_sum(result: Tensor, total: Tensor, rank: int, size: int) -> str:
    for other, chunk in enumerate(total.tensor_split(size)):
        if torch.equal(result, chunk):
            return f"that is chunk {other} of the sum: rank {rank} must receive chunk {rank} in " \
                   "the last step, so rank r first sends chunk r - 1"
    return "each chunk must pass every rank once and collect its values: send the sum of the " \
           "previous step, and add what arrives once"


# 5.2


def one_chunk(rank: int, size: int, length: int) -> Tensor:
    """The numbers 0, 1, ... where the rank's own chunk is, rubbish elsewhere."""
    flat = torch.full((length,), RUBBISH, dtype=torch.float64)
    right = torch.arange(length, dtype=torch.float64)
    flat.tensor_split(size)[rank].copy_(right.tensor_split(size)[rank])
    return flat


def gather(group, all_gather_ring: Callable) -> list[Seen]:
    return run_trial(group, all_gather_ring, one_chunk)


def grade_5_2(all_gather_ring: Callable) -> None:
    """Look at every message, then at every chunk of every rank."""
    call = "all_gather_ring(flat, group)"
    with asked(f"{call} on 1, 2, 3 and 4 ranks, with flat of many lengths"):
        by_size = on_ranks(gather, all_gather_ring, stuck=STUCK)
    for size, by_rank in by_size.items():
        for index, length in enumerate(lengths(size)):
            with asked(f"{call} on {size} ranks, with flat of {length} values"):
                seen = [mine[index] for mine in by_rank]
                _expect_messages(seen, length, own_stays=False)
                _expect_all_chunks(seen, length)
                _expect_all_done(seen)


def _expect_all_chunks(seen: list[Seen], length: int) -> None:
    size = len(seen)
    right = torch.arange(length, dtype=torch.float64)
    owners = torch.repeat_interleave(torch.tensor(chunk_sizes(length, size)))
    for rank, mine in enumerate(seen):
        wrong = sorted(set(owners[mine.flat != right].tolist()))
        likely = "send in each step what the previous step received, and receive each chunk in " \
                 "its own place: rank r receives chunk r - 1 first, then r - 2"
        if rank in wrong:
            likely = "the rank's own chunk was valid before the call: send it first, and receive " \
                     "chunk r - 1"
        elif bool((mine.flat == RUBBISH).any()):
            likely = "some values were never filled: a chunk was passed on before it arrived, " \
                     "or was never received"
        expect(not wrong, seen=f"rank {rank}: flat is {_values(mine.flat)}, wrong in "
                               f"chunk{'s' * (len(wrong) > 1)} {', '.join(map(str, wrong))}; "
                               f"correct is {_values(right)}", likely=likely)


# The wire


def _expect_messages(seen: list[Seen], length: int, own_stays: bool) -> None:
    size = len(seen)
    calls = [mine.calls for mine in seen]
    _expect_neighbors(calls, size)
    sent = [_payloads(mine, "send") for mine in calls]
    chunks = [VALUE * n for n in chunk_sizes(length, size)]
    for rank, payloads in enumerate(sent):
        kept = rank if own_stays else (rank + 1) % size
        right = [n for other, n in enumerate(chunks) if other != kept and n]
        _expect_number(payloads, right, size, rank)
        expect(sorted(payloads) == sorted(right),
               seen=f"rank {rank} sent messages of {_list(payloads)} bytes; the chunks have "
                    f"{_list(chunks)}",
               likely=_why_other_bytes(payloads, chunks))


def _expect_all_done(seen: list[Seen]) -> None:
    left_open = [mine.num_open for mine in seen]
    expect(not any(left_open),
           seen=per_rank([f"{n} messages were started but never waited for" for n in left_open]),
           likely="isend and irecv return immediately: keep the work and call wait(), or the chunk "
                  "may change while it is still being sent")


def _expect_neighbors(calls: list[list[Call]], size: int) -> None:
    wrong = {}
    for rank, mine in enumerate(calls):
        to = {call.peer for call in mine if call.op == "send"} - {(rank + 1) % size}
        source = {call.peer for call in mine if call.op == "recv"} - {(rank - 1) % size, None}
        if to or source:
            verbs = [f"sent to rank {peer}" for peer in sorted(to)]
            wrong[rank] = " and ".join(
                verbs + [f"received from rank {peer}" for peer in sorted(source)])
    expect(not wrong, seen=f"{size} ranks, {per_rank(wrong)}",
           likely="rank r sends only to (r + 1) % N and receives only from (r - 1) % N")


def _expect_number(payloads: list[int], right: list[int], size: int, rank: int) -> None:
    number = len(payloads)
    likely = "one chunk in each of the N-1 steps"
    if number == size and size > 1:
        likely = "one step too many: after N-1 steps every chunk has been on every rank"
    elif number == 2 * (size - 1) and size > 2:
        likely = "is that a complete all-reduce? This exercise asks for one half of it, N-1 steps"
    elif number < len(right):
        likely = "too few steps: a chunk travels to N-1 other ranks"
    expect(number == len(right),
           seen=f"rank {rank} sent {number} message{'s' * (number != 1)} that "
                f"{'are' if number != 1 else 'is'} not empty; a ring over {size} ranks sends "
                f"{len(right)} here", likely=likely)


def _why_other_bytes(payloads: list[int], chunks: list[int]) -> str:
    if len(chunks) > 1 and max(payloads, default=0) == sum(chunks):
        return "the whole tensor is sent in every step: send one chunk, " \
               f"1/{len(chunks)} of it"
    return "every message is one chunk as in tensor_split, none is sent twice"


def _payloads(calls: list[Call], op: str) -> list[int]:
    return [call.payload for call in calls if call.op == op and call.payload]


def _list(numbers: list[int]) -> str:
    return ", ".join(map(str, numbers)) or "no"


def _values(tensor: Tensor) -> str:
    shown = [f"{value:g}" for value in tensor.flatten().tolist()]
    return f"[{', '.join(shown if len(shown) < 13 else [*shown[:8], '...'])}]"
