"""Grader of 4.4: the steps of 4.3 in buckets, ranks that differ, and the bytes that are held."""

import time
from itertools import product

import torch
from torch import nn

from minitron.measure.meter import Meter
from minitron.parallel.data.buckets import assign_buckets
from teaching.graders import asked, expect
from teaching.graders.ch04_overlap import (
    Step,
    expect_no_old_works,
    expect_step,
    requests,
    train,
)
from teaching.graders.ch04_toy import STEPS, Rows, Toy, alone, gradient_bytes
from teaching.graders.python_memory import python_bytes
from teaching.graders.ranks import on_ranks, per_rank

LATE_BUCKETS = {600: 2, 1100: 1}
"""By bucket_bytes: buckets that wait for the embedding, complete at the very last, or for `spare`.

The larger ones hold `left` and `right` together, which come in either order."""
UNORDERED = "a bucket may be complete before the previous one, and on some ranks it never is: " \
            "send them in their order, and in finish() send those that remain, with zeros for " \
            "None"
SQUARE = 64
MOST_HELD = 1.2  # times the gradients
PATIENCE = 1.0  # seconds


def grade_4_4(BucketedDataParallel: type) -> None:
    """Train three steps; again with ranks that differ in what they use; then count bytes."""
    calls = {bucket_bytes: f"BucketedDataParallel(model, group, bucket_bytes={bucket_bytes})"
             for bucket_bytes in LATE_BUCKETS}
    bucket_bytes, call = next(iter(calls.items()))
    with asked(f"three steps of {call}, on 1, 2, 3 and 4 ranks"):
        by_size = on_ranks(train, BucketedDataParallel, Rows(), bucket_bytes)
    for number, request in enumerate(requests(call)):
        for size, seen in by_size.items():
            with asked(f"{request}, on {size} ranks"):
                _expect_bucketed_step(seen, number, Rows(), bucket_bytes)
    with asked(f"the same three steps of {call}: what is held after each finish()"):
        expect_no_old_works(by_size)

    uneven = Rows(uneven=True)
    for bucket_bytes, call in reversed(calls.items()):  # what loses gradients before what is slow
        with asked(f"{call}, where odd ranks complete `left` before `right`, the others after it, "
                   "and only odd ranks use `extra`"):
            by_size = on_ranks(train, BucketedDataParallel, uneven, bucket_bytes, stuck=UNORDERED)
            for seen, number in product(by_size.values(), range(len(STEPS))):
                _expect_bucketed_step(seen, number, uneven, bucket_bytes)

    with asked(f"the bytes held after finish(): four weights of {SQUARE} x {SQUARE}, float64"):
        _expect_nothing_beside(on_ranks(hold, BucketedDataParallel, sizes=(2,))[2])


def _expect_bucketed_step(
    seen: list[list[Step]], number: int, rows: Rows, bucket_bytes: int
) -> None:
    sizes = gradient_bytes(Toy())
    names = list(sizes)
    buckets = [{names[index]: sizes[names[index]] for index in bucket}
               for bucket in assign_buckets(list(sizes.values()), bucket_bytes)]

    def expect_calls(seen: list[Step]) -> None:
        _expect_each_bucket([sum(bucket.values()) for bucket in buckets], seen)
        _expect_complete(buckets, seen, first_step=number == 0)

    expect_step([steps[number] for steps in seen], alone(len(seen), rows)[number], expect_calls,
                 len(buckets) - LATE_BUCKETS[bucket_bytes], unused_stays_none=False)


def _expect_each_bucket(buckets: list[int], seen: list[Step]) -> None:
    payloads = [step.payloads() for step in seen]
    likely = "one all-reduce for each of self.buckets, in their order, with zeros for None"
    counts = {len(mine) for mine in payloads}
    if max(counts) > len(buckets):
        likely = "one all-reduce per bucket: concatenate its gradients in one flat tensor"
    elif min(counts) < len(buckets):
        likely = "a bucket with a parameter that gets no gradient is never complete: finish() " \
                 "sends the rest; and every step starts with no bucket sent"
    saw = [f"{len(mine)} all-reduces of {', '.join(map(str, mine)) or 'no'} bytes"
           for mine in payloads]
    expect(all(mine == buckets for mine in payloads),
           seen=f"{per_rank(saw)}; the buckets have {', '.join(map(str, buckets))}", likely=likely)


def _expect_complete(buckets: list[dict], seen: list[Step], first_step: bool) -> None:
    early = {rank: names for rank, step in enumerate(seen)
             if (names := _sent_before_ready(buckets, step))}
    before_last = {what for step in seen for name, what in step.events[:step.place("last")]
                   if name == "ready"}
    likely = "a bucket was sent before all of its gradients were complete: they come in any " \
             "order, so check every one of them"
    if before_last & set(sum(early.values(), [])):
        likely = "a gradient is complete after the last micro-batch: hooks that ran under " \
                 "no_sync() do not count"
    elif not first_step:
        likely = "a bucket was sent before it was complete: does finish() reset what was kept " \
                 "track of in the last step?"
    saw = {rank: f"sent before complete: {', '.join(names)}" for rank, names in early.items()}
    expect(not early, seen=per_rank(saw), likely=likely)


def _sent_before_ready(buckets: list[dict], step: Step) -> list[str]:
    """Names of gradients that were complete later than their bucket was sent, or never."""
    ready, unsent, early = set(), iter(buckets), []
    for event, what in step.events[step.place("last"):step.place("finish")]:
        if event == "ready":
            ready.add(what)
        elif event == "all_reduce":
            early += [name for name in next(unsent) if name not in ready]
    return early


def hold(group, Parallel: type) -> tuple[int, int]:
    """Bytes of all gradients, and bytes held after finish() beside the parameters."""
    model = nn.Sequential(*(nn.Linear(SQUARE, SQUARE, bias=False) for _ in range(4))).double()
    with Meter(model) as meter:
        parallel = Parallel(model, group, 2 * SQUARE * SQUARE * 8)
        model(torch.ones(1, SQUARE, dtype=torch.float64)).sum().backward()
        parallel.finish()
        needed = sum(gradient_bytes(model).values())
        give_up = time.monotonic() + PATIENCE
        while True:
            now = meter.now()
            held = now["gradient"] + now["temporary"] + python_bytes(parallel)
            if held < MOST_HELD * needed or time.monotonic() > give_up:
                return needed, held
            time.sleep(0.01)  # the network's own thread may hold a tensor a little longer


def _expect_nothing_beside(seen: list[tuple[int, int]]) -> None:
    few = [held < MOST_HELD * needed for needed, held in seen]
    expect(all(few), seen=per_rank([f"{held:,} bytes of gradients and temporary tensors, where "
                                    f".grad needs {needed:,}" for needed, held in seen]),
           likely="flat tensors are still held besides .grad: free them in finish(), or let each "
                  ".grad be a view of one")
