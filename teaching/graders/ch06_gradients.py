"""Grader of 6.3: what arrives in the shards, when it is sent, and what is held meanwhile."""

import gc
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor, nn

from minitron.parallel.data.buckets import assign_buckets
from teaching.graders import Mistake, asked, expect
from teaching.graders.ch04_toy import Rows
from teaching.graders.ch06_toy import (
    ELEMENT,
    SMALL,
    Held,
    Odd,
    ShardWire,
    Tiny,
    cut,
    is_close,
)
from teaching.graders.python_memory import python_bytes
from teaching.graders.ranks import on_ranks, per_rank

BUCKET_BYTES = 600
LARGE_BUCKET_BYTES = 1100  # here two gradients that come in either order share a bucket
MICRO_BATCHES = 3  # the shards are emptied after the second
LATE_BUCKETS = 2  # the embedding's, complete at the very last, and that of `spare`, never
SQUARE, NUM_SQUARES, MANY = 64, 16, 4
AFTERWARDS = 0.2  # buckets: a part of one that has arrived is 1/4
UNDER_WAY = 5.5  # buckets: two whose gradients are there, what is flat, what is under way


@dataclass(frozen=True)
class HandedOver:
    """What a rank has after a micro-batch and finish()."""

    shards: list[Tensor]
    left: list[str]
    """The parameters that still have a gradient."""
    events: list[tuple]
    """In order: ("ready", name), ("reduce_scatter", bytes), ("wait", number)."""


def grade_6_3(ShardedGradients: type) -> None:
    """Three micro-batches; again where ranks differ in what they use; then count bytes."""
    for cases in (EVEN, UNEVEN):
        call = "ShardedGradients(model, group, bucket_bytes)"
        with asked(f"{call}: three micro-batches, on 1, 2, 3 and 4 ranks{cases[0].how}"):
            by_size = on_ranks(collect_all, ShardedGradients, cases,
                               stuck="a bucket may be complete before the previous one, and on "
                                     "some ranks it never is: send them in their order, and in "
                                     "finish() send those that remain, with zeros for None")
        for number, case in enumerate(cases):
            call = f"ShardedGradients(model, group, bucket_bytes={case.bucket_bytes})"
            for size, seen in by_size.items():
                with asked(f"{call}: a micro-batch and finish(), on {size} ranks{case.how}"):
                    _expect_all([mine[number] for mine in seen], case)

    with asked(f"the bytes held in a backward pass: {NUM_SQUARES} weights of {SQUARE} x {SQUARE}, "
               f"float64, a bucket each, on {MANY} ranks"):
        _expect_freed(on_ranks(hold, ShardedGradients, sizes=(MANY,))[MANY])


@dataclass(frozen=True)
class Case:
    """A model, which rows each rank reads, and how large the buckets are."""

    Model: type
    rows: Rows = Rows()
    how: str = ""
    bucket_bytes: int = BUCKET_BYTES


ORDERS = ", where odd ranks complete their gradients in another order, and only they use `extra`"
EVEN = [Case(Odd), Case(Tiny, how=", a model of two elements")]
UNEVEN = [Case(Odd, Rows(uneven=True), ORDERS, LARGE_BUCKET_BYTES),
          Case(Odd, Rows(uneven=True), ORDERS)]


def collect_all(group, ShardedGradients: type, cases: list[Case]) -> list[list[HandedOver]]:
    return [collect(group, ShardedGradients, case) for case in cases]


def collect(group, ShardedGradients: type, case: Case) -> list[HandedOver]:
    model, wire, seen = case.Model(), ShardWire(allowed={"reduce_scatter"}), []
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:  # before the learner's hooks: what they do comes after
            parameter.register_post_accumulate_grad_hook(
                lambda _, name=name: wire.note("ready", name))
    sharded = ShardedGradients(model, group, case.bucket_bytes)

    with wire:
        for number in range(MICRO_BATCHES):
            first = len(wire.events)
            case.rows.loss(model, group.rank(), number).backward()
            sharded.finish()
            left = [name for name, p in model.named_parameters() if p.grad is not None]
            events = [(name, getattr(what, "payload", what)) for name, what in wire.events[first:]]
            shards = [shard.clone() for shard in sharded.shards]
            seen.append(HandedOver(shards, left, events))
            if number == 1:
                for shard in sharded.shards:
                    shard.zero_()
    return seen


def buckets_of(case: Case) -> list[list[int]]:
    """The buckets of the parameters that require a gradient, by their numbers."""
    parameters = [p for p in case.Model().parameters() if p.requires_grad]
    return assign_buckets([p.nbytes for p in parameters], case.bucket_bytes)


@cache
def gradients(Model: type, rows: Rows, rank: int, number: int) -> list[Tensor]:
    """One rank's gradients of one micro-batch, zeros where it has none."""
    model = Model()
    rows.loss(model, rank, number).backward()
    return [torch.zeros_like(p) if p.grad is None else p.grad
            for p in model.parameters() if p.requires_grad]


def right_shards(
    case: Case, size: int, numbers: list[int], ranks: list[int] | None = None
) -> list[list[Tensor]]:
    """By bucket and rank: the shard of the gradients of `ranks`, added up and divided by size."""
    ranks = list(range(size)) if ranks is None else ranks
    mean = [sum(grads) / size for grads in
            zip(*(gradients(case.Model, case.rows, rank, n) for rank in ranks for n in numbers),
                strict=True)]
    return [cut([mean[index] for index in bucket], size) for bucket in buckets_of(case)]


def _expect_all(seen: list[list[HandedOver]], case: Case) -> None:
    for number in range(MICRO_BATCHES):
        _expect_handed_over([mine[number] for mine in seen], case, number)


def _expect_handed_over(seen: list[HandedOver], case: Case, number: int) -> None:
    size = len(seen)
    numbers = [0, 1][:number + 1] if number < 2 else [number]
    right = right_shards(case, size, numbers)
    if size > 1:
        _expect_calls(seen, [size * len(shards[0]) * ELEMENT for shards in right],
                      least_early=0 if case.rows.uneven else len(right) - LATE_BUCKETS)
    left = [micro_batch.left for micro_batch in seen]
    expect(not any(left), seen=per_rank([f"{len(names)} parameters still have a .grad"
                                         for names in left]),
           likely="free a gradient once it has been reduced: set parameter.grad to None. If it is "
                  "completed only after its bucket was sent, the bucket was sent too early")
    for index, shards in enumerate(right):
        mine = [micro_batch.shards[index] for micro_batch in seen]
        same = [is_close(*pair) for pair in zip(mine, shards, strict=True)]
        if not all(same):
            which = ", ".join(str(rank) for rank, ok in enumerate(same) if not ok)
            raise Mistake(f"shards[{index}] is wrong on rank {which}",
                          _why_other_shard(mine, index, case, numbers))


def _expect_calls(seen: list[HandedOver], right: list[int], least_early: int) -> None:
    sent = [[what for name, what in micro_batch.events if name == "reduce_scatter"]
            for micro_batch in seen]
    likely = "one reduce-scatter for each of self.buckets, in their order, of one flat tensor: " \
             "all of its gradients end to end, zeros for None, padded with zeros to N L values"
    if min(map(len, sent)) < len(right):
        likely = "a bucket with a parameter that gets no gradient is never complete: finish() " \
                 "sends those that remain; and every backward pass starts with none sent"
    expect(all(mine == right for mine in sent),
           seen=per_rank([f"reduce-scatters of {', '.join(map(str, mine)) or 'no'} bytes"
                          for mine in sent]) + f"; correct are {', '.join(map(str, right))}",
           likely=likely)

    early = []
    for micro_batch in seen:
        names = [name for name, _ in micro_batch.events]
        early.append(names[:len(names) - names[::-1].index("ready")].count("reduce_scatter"))
    expect(min(early) >= least_early,
           seen=per_rank([f"{n} reduce-scatters before its last gradient is complete"
                          for n in early]) + f"; {least_early} or more can be",
           likely="send from the hook, as soon as the bucket is complete: in finish() all "
                  "gradients are held at once, as they would be without ZeRO")


def _why_other_shard(
    mine: list[Tensor], index: int, case: Case, numbers: list[int]
) -> str:
    size = len(mine)
    right = right_shards(case, size, numbers)[index]
    last = right_shards(case, size, numbers[-1:])[index]
    faults = {
        "that is the sum over the ranks: divide by group.size()": [size * s for s in right],
        "divided by group.size() twice": [s / size for s in right],
        "that is the last micro-batch only: add the result to the shard": last,
        "the shard is still zero: add the result once the reduce-scatter has been waited for":
            [0 * s for s in right],
        "that is another rank's shard: rank r owns the values r L to (r + 1) L":
            right[1:] + right[:1],
    }
    for part in (1, size):
        own = [right_shards(case, size, numbers, [rank])[index][rank] / part * size
               for rank in range(size)]
        faults["that is this rank's own gradient, without the other ranks' contributions"] = own
    for why, shards in faults.items():
        if all(is_close(*pair) for pair in zip(mine, shards, strict=True)):
            return why
    return "a shard is the mean over the ranks of the bucket's flattened gradients, in order, " \
           "added up over micro-batches. Is the bucket complete when it is sent, and the " \
           "reduce-scatter waited for before its result is used?"


def hold(group, ShardedGradients: type) -> tuple[int, int, int]:
    """Bytes held beside the parameters, at the peak of a backward pass and after finish().

    And those of one weight.
    """
    size = SQUARE * SQUARE * ELEMENT
    with Held() as held:
        model = nn.Sequential(*(nn.Linear(SQUARE, SQUARE, bias=False) for _ in range(NUM_SQUARES)))
        sharded = ShardedGradients(model.double(), group, size)
        loss = model(torch.ones(1, SQUARE, dtype=torch.float64)).sum()
        gc.collect()
        held.peak = 0
        loss.backward()
        sharded.finish()
        gc.collect()
        peak, parameters = held.peak, NUM_SQUARES * size
        after = held.settled(parameters + parameters // group.size() + SMALL)
        after += python_bytes(sharded)
    return peak - parameters, after - parameters, size


def _expect_freed(seen: list[tuple[int, int, int]]) -> None:
    shards = NUM_SQUARES / MANY
    few = [after < (shards + AFTERWARDS) * size for _, after, size in seen]
    expect(all(few),
           seen=per_rank([f"{after:,} bytes besides the parameters after finish(), where the "
                          f"shards have {int(shards * size):,}, a bucket {size:,}"
                          for _, after, size in seen]),
           likely="once a bucket is reduced, nothing is held but the shard: does an attribute, a "
                  "work or an array still hold its flat gradient or the result?")
    few = [peak < (shards + UNDER_WAY) * size for peak, _, size in seen]
    expect(all(few),
           seen=per_rank([f"at the peak {peak:,} bytes besides the parameters, where all gradients "
                          f"have {NUM_SQUARES * size:,}, the shards {int(shards * size):,}, a "
                          f"bucket {size:,}" for peak, _, size in seen]),
           likely="buckets are still held after they were reduced: free .grad, the flat tensor "
                  "and the work, and wait for one reduce-scatter before the next starts")
