"""Graders of chapter 4; those of the two classes have a file of their own.

Gradients are compared with one process that sees all the rows (ch04_toy), calls with the ledger.
"""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import product

from torch import Tensor

from minitron.measure.ledger import Call
from teaching.graders import asked, expect
from teaching.graders.ch04_buckets import grade_4_4
from teaching.graders.ch04_overlap import grade_4_3
from teaching.graders.ch04_toy import (
    Grads,
    Rows,
    Toy,
    alone,
    expect_gradients,
    expect_same_weights,
    forbid_library,
    gradient_bytes,
    gradients,
    weights,
)
from teaching.graders.ranks import Wire, on_ranks, per_rank

__all__ = ["grade_4_1", "grade_4_2", "grade_4_3", "grade_4_4"]


@dataclass(frozen=True)
class Averaged:
    """What a rank has after `average_gradients`."""

    grads: Grads
    weights: dict[str, Tensor]
    calls: list[Call]
    frozen: bool
    """Whether second.bias is still frozen, and all else trains."""


def grade_4_1(average_gradients: Callable) -> None:
    """Average the gradients of a model whose ranks use all, then different parameters."""
    with asked("average_gradients(model, group) after backward(), on 1, 2, 3 and 4 ranks; one "
               "weight is tied, one frozen"):
        _expect_average(average_gradients, Rows())
    with asked("the same, where `extra` is used by the odd ranks alone: the others have None"):
        _expect_average(average_gradients, Rows(uneven=True))


def average(group, average_gradients: Callable, rows: Rows) -> Averaged:
    forbid_library()
    model = Toy()
    rows.loss(model, group.rank(), 0).backward()
    with Wire(allowed={"all_reduce"}) as wire:
        average_gradients(model, group)
    frozen = [name for name, p in model.named_parameters() if not p.requires_grad]
    return Averaged(gradients(model), weights(model), wire.calls, frozen == ["second.bias"])


def _expect_average(average_gradients: Callable, rows: Rows) -> None:
    for size, seen in on_ranks(average, average_gradients, rows).items():
        right = alone(size, rows, steps=(1,))[0]
        expect_same_weights([s.weights for s in seen], right.weights)
        expect_gradients([s.grads for s in seen], right)
        expect(all(s.frozen for s in seen), seen="requires_grad of a parameter has changed",
               likely="the caller decides what is frozen: do not set requires_grad")
        if size > 1:
            _expect_frugal([s.calls for s in seen])


def _expect_frugal(calls: list[list[Call]]) -> None:
    """Each gradient once, in as many calls at most; and perhaps once who has which."""
    sizes = gradient_bytes(Toy())
    total = sum(sizes.values())
    least = total - sizes["spare"]  # which is None on all ranks
    sent = [_without_flags(mine, len(sizes)) for mine in calls]
    payloads = [sum(mine) for mine in sent]
    saw = per_rank([f"{len(mine)} all-reduces of {payload:,} bytes together"
                    for mine, payload in zip(sent, payloads, strict=True)])
    most, number = max(payloads), max(map(len, calls))
    fits = least <= min(payloads) and most <= total and number <= len(sizes)
    expect(fits, seen=f"{len(calls)} ranks, {saw}; the {len(sizes)} gradients have {total:,} bytes",
           likely=_why_other_traffic(most, total, number, sizes))


def _without_flags(calls: list[Call], num_gradients: int) -> list[int]:
    """Payloads, without one message that has a value for each gradient: who has it."""
    payloads = [call.payload for call in calls]
    flags = [call.payload for call in calls
             if call.payload == num_gradients * call.dtype.itemsize]
    if flags and sum(payloads) > sum(gradient_bytes(Toy()).values()):
        payloads.remove(flags[0])
    return payloads


def _why_other_traffic(most: int, total: int, number: int, sizes: dict[str, int]) -> str:
    frozen = Toy().second.bias.nbytes
    if most in (2 * total, 2 * (total - sizes["spare"])):
        return "everything is sent twice: averaging equal gradients again does not change them, " \
               "so the values are right, but half of the traffic is wasted"
    if most in (total + frozen, total + frozen - sizes["spare"]):
        return "second.bias is frozen but sent: skip parameters that do not require a gradient"
    if most - total == sizes["embedding.weight"] or \
            most - total == sizes["embedding.weight"] - sizes["spare"]:
        return "the tied weight is sent under both of its names, or another tensor as large as " \
               "it: model.parameters() lists it once"
    if number > len(sizes):
        return "more calls than gradients: if None counts as zeros, the ranks need not ask each " \
               "other who has a gradient; if you do ask, one message for all of them is enough"
    if most < total:
        return "fewer bytes than the gradients have: send one for each parameter that requires a " \
               "gradient, in its own dtype"
    return "send the gradient of each parameter that requires one, once, and nothing else"


# 4.2


def grade_4_2(assign_buckets: Callable) -> None:
    """Compare with the buckets of many lists of sizes, one list after the other by hand."""
    lists = [[40, 10, 20, 30], [], [7], [30, 30, 30], [60, 10, 10], [10, 60, 10], [10, 10, 60],
             [25, 25, 25, 25], [0, 50, 0, 50, 0], [1, 2, 3, 4, 5, 6, 7, 8, 9, 10]]
    for sizes, bucket_bytes in product(lists, (50, 45, 1, 1000)):
        with asked(f"assign_buckets(sizes={sizes}, bucket_bytes={bucket_bytes})"):
            given = list(sizes)
            buckets = assign_buckets(given, bucket_bytes)
            expect(given == sizes, seen="it changed the list `sizes`", likely="work on a copy")
            _expect_buckets(buckets, sizes, bucket_bytes)


def right_buckets(sizes: list[int], bucket_bytes: int) -> list[list[int]]:
    """By cutting: the longest run from the end that fits is a bucket, then the rest."""
    buckets, left = [], list(range(len(sizes)))[::-1]
    while left:
        fitting = [n for n in range(1, len(left) + 1)
                   if sum(sizes[index] for index in left[:n]) <= bucket_bytes]
        length = max(fitting, default=1)
        buckets.append(left[:length])
        left = left[length:]
    return buckets


def _expect_buckets(buckets, sizes: list[int], bucket_bytes: int) -> None:
    right = right_buckets(sizes, bucket_bytes)
    lists = isinstance(buckets, list) and all(isinstance(b, list) for b in buckets)
    expect(lists and all(type(index) is int for bucket in buckets for index in bucket),
           seen=f"it returned {buckets!r}"[:200], likely="a list of lists of indices")
    held = [sum(sizes[index] for index in bucket if 0 <= index < len(sizes)) for bucket in buckets]
    expect(buckets == right, seen=f"{buckets}, which hold {held} bytes; correct is {right}",
           likely=_why_other_buckets(buckets, right, held, sizes, bucket_bytes))


def _why_other_buckets(
    buckets: list[list[int]], right: list[list[int]], held: list[int], sizes: list[int],
    bucket_bytes: int,
) -> str:
    flat = [index for bucket in buckets for index in bucket]
    missing = sorted(set(range(len(sizes))) - set(flat))
    last = len(sizes) - 1
    if missing:
        return f"gradients {missing} are in no bucket: is the last one kept when the loop ends?"
    if len(flat) > len(sizes):
        return "a gradient is in two buckets, or an index does not exist"
    if not all(buckets):
        return "a bucket is empty: start one only when there is a gradient to put into it"
    full = [n for n, bucket in zip(held, buckets, strict=True) if len(bucket) > 1]
    if max(full, default=0) > bucket_bytes:
        return f"a bucket holds more than {bucket_bytes}: check before the gradient joins it"
    if flat != [index for bucket in right for index in bucket]:
        if sorted(flat) == flat:
            return f"backward() completes gradient {last} first and 0 last: start at the end"
        return "keep the order of backward(), from last to first: do not sort by size, do not " \
               "add to an earlier bucket, do not reorder within a bucket"
    return f"a bucket may hold exactly {bucket_bytes}: it takes every gradient that still fits"
