"""Graders of 4.3 and 4.4: three training steps, and in which order things happen in each."""

import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import product

import torch
import torch.distributed as dist
from torch import Tensor, nn

from minitron.course.graders import asked, expect
from minitron.course.graders.ch04_toy import (
    STEPS,
    Grads,
    Right,
    Rows,
    Toy,
    alone,
    descend,
    expect_gradients,
    expect_same_weights,
    forbid_library,
    gradient_bytes,
    gradients,
    weights,
)
from minitron.course.graders.object_memory import python_bytes, reachable
from minitron.course.graders.ranks import Wire, many_ranks, on_ranks, per_rank
from minitron.measure.meter import Meter
from minitron.parallel.data_parallel import assign_buckets

LATE_BUCKETS = {600: 2, 1100: 1}
"""By bucket_bytes: buckets that wait for the embedding, complete at the very last, or for `spare`.

The larger ones hold `left` and `right` together, which come in either order."""
UNORDERED = "a bucket may be complete before the one that comes before it, and on some ranks " \
            "never: send them in their order, whatever is complete, and the rest in finish(), " \
            "with zeros for what is None"
SQUARE = 64
MOST_HELD = 1.2  # times the gradients
PATIENCE = 1.0  # seconds
SLACK = 512  # bytes


@dataclass(frozen=True)
class Step:
    """What a rank saw of one step, up to finish()."""

    grads: Grads
    weights: dict[str, Tensor]
    events: list[tuple]
    """In order: ("ready", name), ("all_reduce", bytes), ("wait", number), ("last", None) when the
    last micro-batch begins, ("finish", None)."""
    num_works: int
    """Works that the learner's object still holds after finish()."""
    num_bytes: int
    """Bytes that it holds then in tensors and arrays, beside parameters and gradients."""

    def payloads(self, before: str = "", after: str = "") -> list[int]:
        """Bytes of each all-reduce, before or after the event of this name."""
        start = self.place(after) if after else 0
        stop = self.place(before) if before else len(self.events)
        return [what for name, what in self.events[start:stop] if name == "all_reduce"]

    def place(self, event: str) -> int:
        """Where the first event of this name is."""
        return [name for name, _ in self.events].index(event)


def train(group, Parallel: type, rows: Rows, *settings) -> list[Step]:
    """Train the toy on this rank with the learner's class."""
    forbid_library()
    model, wire, steps, done = Toy(), Wire(allowed={"all_reduce"}), [], 0
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:  # before the learner's hooks: what they do comes after
            parameter.register_post_accumulate_grad_hook(
                lambda _, name=name: wire.note("ready", name))
    parallel = Parallel(model, group, *settings)

    with wire:
        for num_micro_batches in STEPS:
            first = len(wire.events)
            for index in range(num_micro_batches):
                last = index == num_micro_batches - 1
                if last:
                    wire.note("last")
                with nullcontext() if last else parallel.no_sync():
                    rows.loss(model, group.rank(), done + index).backward()
            wire.note("finish")
            parallel.finish()
            events = [(name, getattr(what, "payload", what)) for name, what in wire.events[first:]]
            steps.append(Step(gradients(model), weights(model), events, *_held(parallel, model)))
            descend(model)
            done += num_micro_batches
    return steps


def _held(parallel, model: nn.Module) -> tuple[int, int]:
    """How many works, and how many bytes beside parameters and gradients, `parallel` holds."""
    num_works, storages = 0, {}
    for held in reachable(parallel):
        num_works += isinstance(held, dist.Work)
        if isinstance(held, Tensor):
            storage = held.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
    for parameter in model.parameters():
        for tensor in (parameter, parameter.grad):
            if tensor is not None:
                storages.pop(tensor.untyped_storage().data_ptr(), None)
    return num_works, sum(storages.values()) + python_bytes(parallel)


@many_ranks
def grade_4_3(HookedDataParallel: type) -> None:
    """Train three steps, and look at each gradient, call and event."""
    with asked("three steps of HookedDataParallel(model, group), on 1, 2, 3 and 4 ranks"):
        by_size = on_ranks(train, HookedDataParallel, Rows())
    sizes = gradient_bytes(Toy())
    del sizes["spare"]
    for number, request in enumerate(_requests("HookedDataParallel(model, group)")):
        for size, seen in by_size.items():
            with asked(f"{request}, on {size} ranks"):
                _expect_step([steps[number] for steps in seen], alone(size)[number],
                             partial(_expect_one_each, sizes), least_early=1)
    with asked("the same three steps: what HookedDataParallel holds after each finish()"):
        _expect_no_old_works(by_size)


def _expect_no_old_works(by_size: dict[int, list[list[Step]]]) -> None:
    for size, seen in by_size.items():
        held = [[step.num_works for step in steps] for steps in seen]
        expect(all(mine[-1] <= mine[0] for mine in held),
               seen=f"{size} ranks, " + per_rank(
                   [f"{', '.join(map(str, mine))} works are held after finish() of step 1, 2, 3"
                    for mine in held]),
               likely="the works of earlier steps are never forgotten: each holds its tensor, and "
                      "finish() waits for all of them again. Clear the list in finish()")
        grown = [steps[-1].num_bytes - steps[0].num_bytes for steps in seen]
        expect(max(grown) <= SLACK, seen=f"{size} ranks, " + per_rank(
                   [f"{n:,} bytes more are held after step 3 than after step 1" for n in grown]),
               likely="something of every step is kept, tensors or arrays: after finish() .grad is "
                      "all there is")


def _requests(call: str) -> list[str]:
    return [f"{call}: the first step, backward() and finish()",
            f"{call}: the second step, backward() and finish()",
            f"{call}: a step of three micro-batches, the first two under no_sync()"]


def _expect_step(
    seen: list[Step], right: Right, expect_calls: Callable, least_early: int,
    unused_stays_none: bool = True,
) -> None:
    expect_same_weights([step.weights for step in seen], right.weights)
    if len(seen) > 1:
        silent = [len(step.payloads(before="last")) for step in seen]
        expect(not any(silent), seen=per_rank([f"{n} all-reduces under no_sync()" for n in silent]),
               likely="no_sync() sets self.synchronises to False: look at it when a gradient is "
                      "complete")
        expect_calls(seen)
        _expect_overlap(seen, least_early)
    expect_gradients([step.grads for step in seen], right, unused_stays_none)


def _expect_one_each(sizes: dict[str, int], seen: list[Step]) -> None:
    payloads = [step.payloads() for step in seen]
    counts = {len(mine) for mine in payloads}
    likely = "send .grad itself, all of it, once"
    if max(counts) > len(sizes):
        likely = "more calls than gradients: is a hook registered twice for the tied weight, or " \
                 "anew in every step, or does something send again what was sent?"
    elif max(counts) < len(sizes):
        likely = "a parameter without a hook, or a hook that does not fire in this step"
    saw = [f"{len(mine)} all-reduces of {', '.join(map(str, mine))} bytes" for mine in payloads]
    expect(all(sorted(mine) == sorted(sizes.values()) for mine in payloads),
           seen=f"{per_rank(saw)}; the {len(sizes)} gradients have "
                f"{', '.join(map(str, sizes.values()))}", likely=likely)


def _expect_overlap(seen: list[Step], least_early: int) -> None:
    early, waits = zip(*map(_before_the_last_gradient, seen), strict=True)
    expect(not any(waits), seen=per_rank([f"it waits {n} times before its last gradient is complete"
                                          for n in waits]),
           likely="each wait stops the backward pass: pass async_op=True, keep what all_reduce "
                  "returns, and wait for it in finish()")
    expect(min(early) >= least_early,
           seen=per_rank([f"{n} all-reduces are issued before its last gradient is complete"
                          for n in early]) + f"; {least_early} or more can be",
           likely="send from the hook, as soon as what is to be sent is complete: in finish() the "
                  "backward pass is over, and nothing overlaps")


def _before_the_last_gradient(step: Step) -> tuple[int, int]:
    """How many all-reduces were issued by then, and how many waited for."""
    names = [name for name, _ in step.events]
    stop = len(names) - names[::-1].index("ready")
    return names[:stop].count("all_reduce"), names[:stop].count("wait")


# 4.4


@many_ranks
def grade_4_4(BucketedDataParallel: type) -> None:
    """Train three steps; again with ranks that differ in what they use; then count bytes."""
    calls = {bucket_bytes: f"BucketedDataParallel(model, group, bucket_bytes={bucket_bytes})"
             for bucket_bytes in LATE_BUCKETS}
    bucket_bytes, call = next(iter(calls.items()))
    with asked(f"three steps of {call}, on 1, 2, 3 and 4 ranks"):
        by_size = on_ranks(train, BucketedDataParallel, Rows(), bucket_bytes)
    for number, request in enumerate(_requests(call)):
        for size, seen in by_size.items():
            with asked(f"{request}, on {size} ranks"):
                _expect_bucketed_step(seen, number, Rows(), bucket_bytes)
    with asked(f"the same three steps of {call}: what is held after each finish()"):
        _expect_no_old_works(by_size)

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

    _expect_step([steps[number] for steps in seen], alone(len(seen), rows)[number], expect_calls,
                 len(buckets) - LATE_BUCKETS[bucket_bytes], unused_stays_none=False)


def _expect_each_bucket(buckets: list[int], seen: list[Step]) -> None:
    payloads = [step.payloads() for step in seen]
    likely = "one all-reduce for each of self.buckets, in their order, with zeros for what is None"
    counts = {len(mine) for mine in payloads}
    if max(counts) > len(buckets):
        likely = "one all-reduce per bucket, once: put its gradients end to end in one flat tensor"
    elif min(counts) < len(buckets):
        likely = "a bucket with a parameter that gets no gradient is never complete: finish() " \
                 "sends what was not sent; and a new step starts with nothing sent"
    saw = [f"{len(mine)} all-reduces of {', '.join(map(str, mine)) or 'no'} bytes"
           for mine in payloads]
    expect(all(mine == buckets for mine in payloads),
           seen=f"{per_rank(saw)}; the buckets have {', '.join(map(str, buckets))}", likely=likely)


def _expect_complete(buckets: list[dict], seen: list[Step], first_step: bool) -> None:
    early = {rank: names for rank, step in enumerate(seen)
             if (names := _sent_before_ready(buckets, step))}
    before_last = {what for step in seen for name, what in step.events[:step.place("last")]
                   if name == "ready"}
    likely = "a bucket was sent before all of its gradients were there: they come in any order, " \
             "so look for every one of them"
    if before_last & set(sum(early.values(), [])):
        likely = "a gradient is complete after the last micro-batch: what a hook saw under " \
                 "no_sync() does not count"
    elif not first_step:
        likely = "a bucket was sent before it was complete: is what finish() must forget from " \
                 "the last step forgotten?"
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
           likely="flat tensors are still held beside .grad: forget them in finish(), or let .grad "
                  "be views of them")
