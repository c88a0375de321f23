"""Grader of 6.2: who updates what, what is sent, what comes out, and what is still held."""

import gc
import math
from dataclasses import dataclass
from functools import cache, partial

import torch
from torch import Tensor, nn

from minitron.measure.ledger import Call
from teaching.graders import asked, expect
from teaching.graders.ch04_toy import Rows, weights
from teaching.graders.ch06_toy import (
    CLOSE,
    ELEMENT,
    SMALL,
    Held,
    Odd,
    ShardWire,
    Tiny,
    cut,
    is_close,
    shard_length,
)
from teaching.graders.python_memory import python_bytes
from teaching.graders.ranks import on_ranks, per_rank

OPTIMIZERS = {
    "AdamW": partial(torch.optim.AdamW, lr=0.05, weight_decay=0.1),
    "SGD with momentum": partial(torch.optim.SGD, lr=0.1, momentum=0.9),
}
STEPS, ROWS = 3, Rows(uneven=True)
EMPTY = STEPS
"""The number of a last step in which no rank has run backward()."""
SQUARE, NUM_SQUARES, MANY = 64, 4, 4
STATE = 4.4  # shards: itself, its gradient, two states; and some


@dataclass(frozen=True)
class Update:
    """What a rank has after a step."""

    norm: Tensor
    weights: dict[str, Tensor]
    left: list[str]
    """The parameters that still have a gradient."""
    calls: list[Call]
    num_given: list[int]
    """Elements of each optimizer that was made."""


def grade_6_2(ShardedOptimizer: type) -> None:
    """Train three steps, on a model no number of ranks divides and one with two elements.

    Then a fourth, in which no rank has a gradient.
    """
    with asked("four steps of ShardedOptimizer(model, group, make_optimizer) for models with "
               f"{num_elements(Odd())} and with {num_elements(Tiny())} elements, on 1, 2, 3 and 4 "
               "ranks"):
        by_size = on_ranks(train_all, ShardedOptimizer, cases())
    for number, (Model, name, max_norm) in enumerate(cases()):
        for size, seen in by_size.items():
            with asked(f"step(max_norm={max_norm:g}) of ShardedOptimizer with {name}, "
                       f"{num_elements(Model())} elements on {size} ranks"):
                _expect_steps([by_case[number] for by_case in seen], Model, name, max_norm)
    with asked(f"the bytes held after a step with AdamW: {NUM_SQUARES} weights of {SQUARE} x "
               f"{SQUARE}, float64, on {MANY} ranks"):
        _expect_little(on_ranks(hold, ShardedOptimizer, sizes=(MANY,))[MANY])


@cache
def cases() -> list[tuple[type, str, float]]:
    """Model, optimizer, max_norm: one that is exceeded, one that is not, one that is."""
    norms = {Model: total_norm(alone(Model, 1, "AdamW", math.inf)[0][0]) for Model in (Odd, Tiny)}
    return [(Odd, "SGD with momentum", norms[Odd] / 4), (Odd, "AdamW", 9 * norms[Odd]),
            (Tiny, "SGD with momentum", norms[Tiny] / 4),
            (Tiny, "SGD with momentum", 9 * norms[Tiny])]


def num_elements(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters() if p.requires_grad)


def train_all(group, ShardedOptimizer: type, cases: list[tuple]) -> list[list[Update]]:
    return [train(group, ShardedOptimizer, *case) for case in cases]


def train(group, ShardedOptimizer: type, Model: type, name: str, max_norm: float) -> list[Update]:
    model, updates, made = Model(), [], []

    def make_optimizer(tensors):
        made.append(OPTIMIZERS[name](tensors))
        return made[-1]

    sharded = ShardedOptimizer(model, group, make_optimizer)
    for number in range(STEPS + 1):
        if number != EMPTY:
            ROWS.loss(model, group.rank(), number).backward()
        with ShardWire(allowed={"reduce_scatter", "all_gather", "all_reduce"}) as wire:
            norm = sharded.step(max_norm)
        left = [name for name, p in model.named_parameters() if p.grad is not None]
        given = [sum(p.numel() for group in optimizer.param_groups for p in group["params"])
                 for optimizer in made]
        updates.append(Update(norm, weights(model), left, wire.calls, given))
    return updates


@cache
def alone(
    Model: type, size: int, name: str, max_norm: float, mistake: str = ""
) -> list[tuple[list, dict]]:
    """One process: by step, the mean gradients before clipping, and the weights after.

    Mistakes: "by shard", where each of `size` shards is clipped by a norm of its own; "always",
    where a small gradient is enlarged; "by value", where each element is clipped.
    """
    model, done = Model(), []
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = OPTIMIZERS[name](trained)
    for number in range(STEPS + 1):
        optimizer.zero_grad()
        if number != EMPTY:
            losses = [ROWS.loss(model, rank, number) for rank in range(size)]
            (sum(losses) / size).backward()
        for parameter in trained:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        mean = [parameter.grad.clone() for parameter in trained]
        shards = [torch.cat([grad.flatten() for grad in mean])]
        if mistake == "by shard":
            shards = cut(mean, size)
        most = math.inf if mistake == "always" else 1.0
        scaled = torch.cat([shard * min(most, max_norm / (total_norm([shard]) or 1e-300))
                            for shard in shards])
        if mistake == "by value":
            scaled = shards[0].clamp(-max_norm, max_norm)
        sizes = [parameter.numel() for parameter in trained]
        for parameter, grad in zip(trained, scaled[:sum(sizes)].split(sizes), strict=True):
            parameter.grad = grad.view_as(parameter).clone()
        optimizer.step()
        done.append((mean, weights(model)))
    return done


def total_norm(tensors: list[Tensor]) -> float:
    return math.sqrt(sum(float(tensor.square().sum()) for tensor in tensors))


def _expect_steps(seen: list[list[Update]], Model: type, name: str, max_norm: float) -> None:
    size, total = len(seen), num_elements(Model())
    _expect_sharded([steps[-1].num_given for steps in seen], total)
    for number, (mean, right) in enumerate(alone(Model, size, name, max_norm)):
        updates = [steps[number] for steps in seen]
        if size > 1:
            _expect_traffic([update.calls for update in updates], total)
        _expect_norm([update.norm for update in updates], mean, max_norm)
        _expect_weights([update.weights for update in updates], right, _wrong_weights(
            mean, updates, [alone(Model, size, name, math.inf)[number][1],
                            *(alone(Model, size, name, max_norm, mistake)[number][1]
                              for mistake in ("by shard", "always", "by value"))]), number)
        left = [update.left for update in updates]
        expect(not any(left), seen=per_rank([f"{len(names)} parameters have a .grad after step"
                                             for names in left]),
               likely="set parameter.grad to None; otherwise the next backward pass adds to it")


def _wrong_weights(
    mean: list[Tensor], updates: list[Update], others: list[dict]
) -> dict[str, dict]:
    """What the weights would be after a mistake, by what it is."""
    unclipped, by_shard, always, by_value = others
    size = len(updates)
    own = [f"{total_norm([shard]):.4g}" for shard in cut(mean, size)]
    return {
        "the gradient was not clipped: multiply the shard's gradient by max_norm / norm": unclipped,
        f"each rank clipped by the norm of its own shard ({', '.join(own)}) instead of the global "
        f"norm ({total_norm(mean):.4g}), which it returned: use the same number for both":
            by_shard,
        "a gradient whose norm is below max_norm was enlarged to it: clip only if norm exceeds "
        "max_norm": always,
        "every element was clipped to max_norm separately, which changes the direction: multiply "
        "all of them by max_norm / norm": by_value,
    }


def _expect_sharded(given: list[list[int]], total: int) -> None:
    length = shard_length(total, len(given))
    once = [len(mine) == 1 for mine in given]
    expect(all(once), seen=per_rank([f"make_optimizer was called {len(n)} times" for n in given]),
           likely="call it once, in __init__: a new optimizer has forgotten its state")
    few = [mine[0] <= length for mine in given]
    expect(all(few), seen=per_rank([f"the optimizer has {n} of {total} elements" for n, in given])
           + f"; a shard has {length}",
           likely="this optimizer is not sharded: every rank also keeps state for values that "
                  "other ranks update. Make it for this rank's shard only")


def _expect_traffic(calls: list[list[Call]], total: int) -> None:
    size = len(calls)
    full = size * shard_length(total, size) * ELEMENT
    moved = [[call for call in mine if call.op != "all_reduce"] for mine in calls]
    reduced = [[call for call in mine if call.op == "all_reduce"] for mine in calls]
    saw = per_rank([", ".join(f"{call.op} of {call.payload} bytes" for call in mine) or "nothing"
                    for mine in calls])
    large = max((call.payload for mine in reduced for call in mine), default=0)
    expect(large <= ELEMENT, seen=saw, likely="all_reduce is for one number here: for the gradient "
           "it sends twice as much as a reduce-scatter, and each rank needs only its shard")
    expect(all([(call.op, call.payload) for call in mine]
               == [("reduce_scatter", full), ("all_gather", full)] for mine in moved),
           seen=f"{saw}; correct is a reduce_scatter, then an all_gather, of {full} bytes each",
           likely="one flat tensor of N L values holds all parameters: its shards are reduced to "
                  "their owners before the optimizer's step, and gathered after it")


def _expect_norm(norms: list, mean: list[Tensor], max_norm: float) -> None:
    norm, size = total_norm(mean), len(norms)
    numbers = [isinstance(seen, Tensor) and seen.shape == () for seen in norms]
    expect(all(numbers), seen=per_rank([f"it returned {seen!r:.80}" for seen in norms]),
           likely="return the norm, a tensor of shape ()")
    parts = [total_norm([shard]) for shard in cut(mean, size)]
    faults = {
        "squares add up, norms do not: all-reduce the square, then take the root": sum(parts),
        "that is the square: take the root": norm**2,
        "that is the norm of the sum over the ranks: the gradient is the mean": norm * size,
        "divided by N twice": norm / size,
        "that is the norm after clipping: return the one before": min(norm, max_norm),
    }
    likely = "the root of the sum of the squares of all elements of the mean gradient, on all ranks"
    for why, value in faults.items():
        if size > 1 and all(math.isclose(float(seen), value, rel_tol=1e-6) for seen in norms):
            likely = why
    if all(math.isclose(float(seen), part, rel_tol=1e-6) for seen, part in
           zip(norms, parts, strict=True)):
        likely = "that is the norm of this rank's shard: every rank would clip by a factor of " \
                 "its own. Add the squares up over the ranks"
    expect(all(math.isclose(float(seen), norm, rel_tol=CLOSE) for seen in norms),
           seen=per_rank([f"the norm {float(seen):.6g}" for seen in norms])
           + f"; correct is {norm:.6g}", likely=likely)


def _expect_weights(
    seen: list[dict], right: dict, mistakes: dict[str, dict], number: int
) -> None:
    for name, weight in right.items():
        same = [is_close(mine[name], weight) for mine in seen]
        which = ", ".join(str(rank) for rank, ok in enumerate(same) if not ok)
        likely = "the optimizer updates the shard with the clipped mean gradient; then every " \
                 "parameter gets its values from the gathered shards"
        for why, wrong in mistakes.items():
            if all(is_close(mine[other], wrong[other]) for mine in seen for other in right):
                likely = why
        if not all(mine[name].isfinite().all() for mine in seen):
            likely = "0 / 0 is nan: with a gradient of zeros the norm is 0. Divide only if the " \
                     "norm exceeds max_norm, or clamp max_norm / norm to 1"
        elif not all(is_close(mine[name], seen[0][name]) for mine in seen):
            likely = "the ranks have different weights: gather the updated shards, and copy them " \
                     "into the parameters"
        step = f"step {number}" if number != EMPTY else "the step without a gradient on any rank"
        expect(all(same), seen=f"{step}: {name} is wrong on rank {which}", likely=likely)


def hold(group, ShardedOptimizer: type) -> tuple[int, int]:
    """Bytes held after a step beside the parameters, and bytes of a shard."""
    with Held() as held:
        model = nn.Sequential(*(nn.Linear(SQUARE, SQUARE, bias=False) for _ in range(NUM_SQUARES)))
        sharded = ShardedOptimizer(model.double(), group, OPTIMIZERS["AdamW"])
        model(torch.ones(1, SQUARE, dtype=torch.float64)).sum().backward()
        sharded.step(1.0)
        gc.collect()
        needed = num_elements(model) * ELEMENT
        shard = needed // group.size()
        return held.settled(needed + 4 * shard + SMALL) - needed + python_bytes(sharded), shard


def _expect_little(seen: list[tuple[int, int]]) -> None:
    few = [held < STATE * shard for held, shard in seen]
    expect(all(few), seen=per_rank([f"{held:,} bytes besides the parameters, where a shard has "
                                    f"{shard:,}" for held, shard in seen]),
           likely="something of the model's size is kept: the flat gradient, the gathered "
                  "parameters, or a shard that is a view of all of them (clone it)")
