"""Grader of 4.3: three training steps, and in which order things happen in each."""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial

import torch.distributed as dist
from torch import Tensor, nn

from teaching.graders import asked, expect
from teaching.graders.ch04_toy import (
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
from teaching.graders.python_memory import python_bytes, reachable
from teaching.graders.ranks import Wire, on_ranks, per_rank

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


def grade_4_3(HookedDataParallel: type) -> None:
    """Train three steps, and look at each gradient, call and event."""
    with asked("three steps of HookedDataParallel(model, group), on 1, 2, 3 and 4 ranks"):
        by_size = on_ranks(train, HookedDataParallel, Rows())
    sizes = gradient_bytes(Toy())
    del sizes["spare"]
    for number, request in enumerate(requests("HookedDataParallel(model, group)")):
        for size, seen in by_size.items():
            with asked(f"{request}, on {size} ranks"):
                expect_step([steps[number] for steps in seen], alone(size)[number],
                             partial(_expect_one_each, sizes), least_early=1)
    with asked("the same three steps: what HookedDataParallel holds after each finish()"):
        expect_no_old_works(by_size)


def expect_no_old_works(by_size: dict[int, list[list[Step]]]) -> None:
    for size, seen in by_size.items():
        held = [[step.num_works for step in steps] for steps in seen]
        expect(all(mine[-1] <= mine[0] for mine in held),
               seen=f"{size} ranks, " + per_rank(
                   [f"{', '.join(map(str, mine))} works are held after finish() of step 1, 2, 3"
                    for mine in held]),
               likely="the works of earlier steps are never dropped: each holds its tensor, and "
                      "finish() waits for all of them again. Clear the list in finish()")
        grown = [steps[-1].num_bytes - steps[0].num_bytes for steps in seen]
        expect(max(grown) <= SLACK, seen=f"{size} ranks, " + per_rank(
                   [f"{n:,} bytes more are held after step 3 than after step 1" for n in grown]),
               likely="tensors or arrays of every step are kept: after finish(), nothing but .grad "
                      "may remain")


def requests(call: str) -> list[str]:
    return [f"{call}: the first step, backward() and finish()",
            f"{call}: the second step, backward() and finish()",
            f"{call}: a step of three micro-batches, the first two under no_sync()"]


def expect_step(
    seen: list[Step], right: Right, expect_calls: Callable, least_early: int,
    unused_stays_none: bool = True,
) -> None:
    expect_same_weights([step.weights for step in seen], right.weights)
    if len(seen) > 1:
        silent = [len(step.payloads(before="last")) for step in seen]
        expect(not any(silent), seen=per_rank([f"{n} all-reduces under no_sync()" for n in silent]),
               likely="no_sync() sets self.synchronizes to False: check it when a gradient is "
                      "complete")
        expect_calls(seen)
        _expect_overlap(seen, least_early)
    expect_gradients([step.grads for step in seen], right, unused_stays_none)


def _expect_one_each(sizes: dict[str, int], seen: list[Step]) -> None:
    payloads = [step.payloads() for step in seen]
    counts = {len(mine) for mine in payloads}
    likely = "send .grad itself, in one message, once"
    if max(counts) > len(sizes):
        likely = "more calls than gradients: is a hook registered twice for the tied weight, or " \
                 "again in every step, or is a gradient sent twice?"
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
           likely="each wait blocks the backward pass: pass async_op=True, keep what all_reduce "
                  "returns, and wait for it in finish()")
    expect(min(early) >= least_early,
           seen=per_rank([f"{n} all-reduces are started before its last gradient is complete"
                          for n in early]) + f"; {least_early} or more can be",
           likely="send from the hook, as soon as the gradients are complete: by finish() the "
                  "backward pass is over, and nothing overlaps")


def _before_the_last_gradient(step: Step) -> tuple[int, int]:
    """How many all-reduces were issued by then, and how many waited for."""
    names = [name for name, _ in step.events]
    stop = len(names) - names[::-1].index("ready")
    return names[:stop].count("all_reduce"), names[:stop].count("wait")
