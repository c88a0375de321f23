"""Grader of 10.4: gradients that overflow on one rank, or on some, or are not there at all."""

import math
from functools import cache, partial
from typing import NamedTuple

import torch
from torch import Tensor

from minitron.measure.ledger import Call
from teaching.graders import asked, expect
from teaching.graders.ch06_toy import ShardWire
from teaching.graders.ch07_toy import in_words, is_close
from teaching.graders.ranks import on_ranks, per_rank

CLOSE = 1e-5
SCALE, BACKOFF, MAX_NORM = 1024.0, 0.25, 2.5
MOST_BYTES = 16
OPTIMIZERS = {
    "SGD with momentum": partial(torch.optim.SGD, lr=0.1, momentum=0.9),
    "AdamW": partial(torch.optim.AdamW, lr=0.05, weight_decay=0.1),
}
STUCK = "every rank must make the same call, even if its own gradient is finite or None: only " \
        "the others know whether they had an overflow"
WORDS = {"fine": "a fine gradient", "zero": "a gradient of zeros",
        "none": "no gradient", "nan": "a NaN", "inf": "an infinity"}


class Step(NamedTuple):
    """What the gradient of a step is on every rank: on rank 0, on the last one, on the others."""

    first: str
    last: str
    others: str = "fine"
    size: float = 1.0

    def kind(self, rank: int, num_ranks: int) -> str:
        return self.first if rank == 0 else self.last if rank == num_ranks - 1 else self.others

    def kinds(self, num_ranks: int) -> list[str]:
        return [self.kind(rank, num_ranks) for rank in range(num_ranks)]


STEPS = [Step("fine", "fine"), Step("fine", "fine", size=0.01), Step("fine", "nan"),
         Step("fine", "fine"), Step("inf", "fine"), Step("fine", "none"), Step("none", "fine"),
         Step("inf", "nan"), Step("nan", "none"), Step("none", "nan", "none"),
         Step("none", "none", "none"), Step("fine", "-inf", "none"), Step("fine", "fine"),
         Step("zero", "zero", "zero"), Step("zero", "fine", "none"), Step("fine", "fine")]


class Seen(NamedTuple):
    """What a rank has after a step."""

    scale: float
    weights: list[Tensor]
    state: list[Tensor]
    left: bool
    """Whether a .grad is not None."""
    calls: list[Call]


def grade_10_4(step_together) -> None:
    """Play the steps on 1 to 4 ranks; compare wire, weights, memory of the optimizer and scale."""
    with asked(f"{len(STEPS)} calls of step_together on 1, 2, 3 and 4 ranks, some with an overflow "
               "on one rank, some with a rank without a gradient"):
        by_size = on_ranks(play_all, step_together, stuck=STUCK)
    for name in OPTIMIZERS:
        for size, played in by_size.items():
            for number in range(len(STEPS)):
                with asked(f"step_together with {name} on {size} ranks, max_norm={MAX_NORM:g}, "
                           f"step {number + 1}: {in_step(number, size)}"):
                    ranks = [mine[name] for mine in played]
                    before = [mine[number - 1] if number else start(name, rank)
                              for rank, mine in enumerate(ranks)]
                    _expect_right([mine[number] for mine in ranks], before, name, number)


def in_step(number: int, num_ranks: int) -> str:
    """Such as "rank 0: a fine gradient; rank 1: a NaN"."""
    return per_rank([WORDS[kind.strip("-")] for kind in STEPS[number].kinds(num_ranks)])


def play_all(group, step_together) -> dict[str, list[Seen]]:
    return {name: play(group, step_together, name) for name in OPTIMIZERS}


def play(group, step_together, name: str) -> list[Seen]:
    rank, scale, steps = group.rank(), SCALE, []
    shards = make_shards(rank)
    optimizer = make_optimizer(name, shards)
    for number in range(len(STEPS)):
        give(shards, rank, group.size(), number, scale)
        with ShardWire(allowed={"all_reduce"}) as wire:
            answer = step_together(shards, optimizer, scale, MAX_NORM, group, BACKOFF)
        try:
            scale = float(answer)
        except (TypeError, ValueError):
            raise TypeError(f"it returned {answer!r:.80}, which is not the loss scale of the next "
                            "step") from None
        left = any(shard.grad is not None for shard in shards)
        steps.append(observe(shards, optimizer, scale, left, wire.calls))
        for shard in shards:
            shard.grad = None
    return steps


def start(name: str, rank: int) -> Seen:
    shards = make_shards(rank)
    return observe(shards, make_optimizer(name, shards), SCALE, False, [])


def make_optimizer(name: str, shards: list[Tensor]) -> torch.optim.Optimizer:
    """Each shard is a parameter group of its own; the second one learns half as fast."""
    optimizer = OPTIMIZERS[name]([{"params": [shard]} for shard in shards])
    optimizer.param_groups[1]["lr"] /= 2
    return optimizer


def make_shards(rank: int) -> list[Tensor]:
    """Two shards of a rank, of which the second has another length on every rank."""
    generator = torch.Generator().manual_seed(rank)
    return [torch.randn(length, generator=generator) for length in (4, 2 + rank)]


def give(shards: list[Tensor], rank: int, num_ranks: int, number: int, scale: float) -> None:
    """Give the shards their scaled gradients of a step; the second one has none now and then."""
    kind = STEPS[number].kind(rank, num_ranks)
    generator = torch.Generator().manual_seed(1000 + 10 * number + rank)
    for index, shard in enumerate(shards):
        grad = scale * (1 + rank) * STEPS[number].size * torch.randn(len(shard),
                                                                     generator=generator)
        if index == 0 and kind.strip("-") in ("nan", "inf"):
            grad[1] = float(kind)
        if kind == "zero":
            grad.zero_()
        is_there = kind != "none" and (index == 0 or number % 3)
        shard.grad = grad if is_there else None


def observe(shards, optimizer, scale: float, left: bool, calls: list[Call]) -> Seen:
    state = [tensor.clone() for shard in shards
             for tensor in optimizer.state.get(shard, {}).values() if tensor is not None]
    return Seen(scale, [shard.clone() for shard in shards], state, left, calls)


@cache
def right_steps(num_ranks: int, name: str, mistake: str = "") -> list[list[Seen]]:
    """By step and rank, what one process finds that has all shards.

    `mistake`, such as "unclipped" or "own norm", gives the gradient another factor.
    """
    shards = [make_shards(rank) for rank in range(num_ranks)]
    optimizers = [make_optimizer(name, mine) for mine in shards]
    scale, steps = SCALE, []
    for number in range(len(STEPS)):
        for rank, mine in enumerate(shards):
            give(mine, rank, num_ranks, number, scale)
        norms = [_norm(mine) / scale for mine in shards]
        norm = math.hypot(*norms)
        for mine, own, optimizer in zip(shards, norms, optimizers, strict=True):
            factor = {
                "": clip(norm),
                "own norm": clip(own),
                "max": clip(max(norms)),
                "sum": clip(sum(norms)),
                "mean": clip(norm / math.sqrt(num_ranks)),
                "square": clip(norm * norm),
                "always": MAX_NORM / norm if norm else 1.0,
                "unclipped": 1.0,
            }[mistake]
            for shard in mine:
                if shard.grad is not None:
                    shard.grad *= factor / scale
            if math.isfinite(norm):
                optimizer.step()
            optimizer.zero_grad()
        scale *= 1 if math.isfinite(norm) else BACKOFF
        steps.append([observe(mine, optimizer, scale, False, [])
                      for mine, optimizer in zip(shards, optimizers, strict=True)])
    return steps


def clip(norm: float) -> float:
    return min(1.0, MAX_NORM / norm) if norm else 1.0


def _norm(shards: list[Tensor]) -> float:
    return math.sqrt(sum(float(s.grad.double().square().sum()) for s in shards
                         if s.grad is not None))


def _expect_right(seen: list[Seen], before: list[Seen], name: str, number: int) -> None:
    _expect_one_message([mine.calls for mine in seen])
    overflow = any(kind.strip("-") in ("nan", "inf") for kind in STEPS[number].kinds(len(seen)))
    broken = [not all(shard.isfinite().all() for shard in mine.weights) for mine in seen]
    expect(not any(broken), seen=per_rank(["its weights are not finite" if bad else "fine"
                                           for bad in broken]),
           likely="the optimizer stepped though there was an overflow: look first, for infinity "
                  "and for NaN" if overflow else
                  "there was no overflow. If the norm is 0, max_norm / norm is infinite, and "
                  "0 x infinity is NaN: multiply only if the norm exceeds max_norm")
    if overflow:
        _expect_skipped(seen, before)
    else:
        _expect_moved(seen, before, name, number)
    _expect_scale(seen, before, overflow)
    left = [mine.left for mine in seen]
    expect(not any(left), seen=per_rank(["a .grad is left" if mine else "none" for mine in left]),
           likely="every .grad is None afterwards, also when the step was skipped")


def _expect_one_message(calls: list[list[Call]]) -> None:
    small = [len(mine) == 1 and mine[0].payload <= MOST_BYTES for mine in calls]
    large = max((call.payload for mine in calls for call in mine), default=0)
    num = {len(mine) for mine in calls}
    likely = "do not send the gradients, but one number that is infinite or NaN if any of them " \
             "is" if large > MOST_BYTES else \
             "no rank learns of an overflow on another rank" if num == {0} else \
             STUCK if num == {0, 1} else \
             "one message answers both: what the norm is, and whether all gradients are finite"
    expect(all(small), seen=per_rank([in_words(mine) for mine in calls])
           + f"; correct is one all_reduce of at most {MOST_BYTES} bytes", likely=likely)


def _expect_skipped(seen: list[Seen], before: list[Seen]) -> None:
    moved = [not all(map(torch.equal, *pair))
             for pair in zip([s.weights for s in seen], [b.weights for b in before], strict=True)]
    likely = "an overflow on one rank must stop all of them, or their weights come from " \
             "different steps"
    if all(moved):
        likely = "no optimizer.step() on any rank: a maximum can lose a NaN, an infinity is an " \
                 "overflow, too, and with zero gradients momentum still moves the weights"
    expect(not any(moved), seen=per_rank(["its weights moved" if m else "skipped" for m in moved]),
           likely=likely)
    changed = [len(mine.state) != len(old.state) or not all(map(torch.equal, mine.state, old.state))
               for mine, old in zip(seen, before, strict=True)]
    expect(not any(changed), seen=per_rank(["its optimizer state has changed" if c else
                                            "skipped" for c in changed]),
           likely="no optimizer.step() at all: with zero gradients the moments decay")


def _expect_moved(seen: list[Seen], before: list[Seen], name: str, number: int) -> None:
    def same_as(mistake: str = "") -> list[bool]:
        right = right_steps(len(seen), name, mistake)[number]
        return [all(is_close(*pair, CLOSE) for pair in zip(a.weights, b.weights, strict=True))
                for a, b in zip(seen, right, strict=True)]

    same = same_as()
    faults = {
        "clip by the norm over all ranks: every rank has used the norm of its own shards":
            "own norm",
        "that is the largest of the ranks' norms: add up their squares": "max",
        "that is the sum of the ranks' norms: add up their squares": "sum",
        "the squares of all ranks are added up, not averaged": "mean",
        "that is the square of the norm: take the root": "square",
        "its norm always becomes max_norm: either the gradient is not divided by the scale before "
        "clipping, or it is multiplied even if the norm is below max_norm": "always",
        "the gradient is not clipped": "unclipped",
    }
    likely = next((why for why, mistake in faults.items() if all(same_as(mistake))),
                  "divide by the scale, clip by the norm over all ranks, then step: every shard, "
                  "whichever parameter group it is in")
    still = [not ok and all(map(torch.equal, mine.weights, old.weights))
             for ok, mine, old in zip(same, seen, before, strict=True)]
    if any(still):
        likely = "nothing has overflowed: every rank steps, even if all gradients are zero, " \
                 "because of momentum and weight decay. None counts as zero"
    expect(all(same), seen=per_rank(["correct" if ok else "did not step" if s else
                                     "its weights are wrong"
                                     for ok, s in zip(same, still, strict=True)]), likely=likely)


def _expect_scale(seen: list[Seen], before: list[Seen], overflow: bool) -> None:
    right = before[0].scale * (BACKOFF if overflow else 1)
    scales = [mine.scale for mine in seen]
    likely = "after a skipped step the scale is multiplied by backoff, otherwise it stays"
    if len(set(scales)) > 1:
        likely = "all ranks need the same scale, because they multiply the next loss by it: " \
                 "decide by a number that all ranks have"
    expect(all(scale == right for scale in scales),
           seen=per_rank([f"the scale is {scale:g}" for scale in scales])
           + f"; correct is {right:g}",
           likely=likely)
