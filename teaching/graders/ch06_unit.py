"""Grader of 6.4: a stack of units against one process, and what is there between the units."""

import gc
import warnings
from dataclasses import dataclass, field
from functools import cache

import torch
from torch import Tensor, nn

from teaching.graders import Mistake, asked, expect
from teaching.graders.ch06_toy import (
    ELEMENT,
    SMALL,
    Held,
    ShardWire,
    cut,
    data,
    is_close,
    loss_of,
    make_blocks,
    shard_length,
    storage_bytes,
)
from teaching.graders.python_memory import python_bytes
from teaching.graders.ranks import on_ranks, per_rank

STEPS, MICRO_BATCHES = 2, 2
SQUARE, NUM_SQUARES, MANY = 64, 16, 4
ROUNDING = 1.5  # units, for activations and for what Python has not collected yet
UNDER_WAY = 5.5  # units: parameters, gradients, both flat, what has arrived
FREED = ("storage of size 0", "was killed")
"""How an operator ends that reads a freed storage."""


@dataclass
class Seen:
    """What a rank saw."""

    made: list[tuple[int, int]] = field(default_factory=list)
    """By unit: elements of its shard, bytes of its parameters between uses."""
    outs: list[Tensor] = field(default_factory=list)
    between: list[tuple] = field(default_factory=list)
    """Whenever a unit has been used: when, its number, bytes of its parameters."""
    left: list[int] = field(default_factory=list)
    """By micro-batch: how many parameters have a gradient afterwards."""
    events: list[tuple] = field(default_factory=list)
    steps: list[list[tuple[Tensor, Tensor]]] = field(default_factory=list)
    """By step and unit: the shard's gradient, and the shard after the optimizer's step."""


def grade_6_4(ShardedUnit: type) -> None:
    """Train three units for two steps; then look at the bytes of sixteen."""
    call = "units = [ShardedUnit(block, group) for block in blocks]"
    with asked(f"{call}; two steps of two micro-batches, on 1, 2, 3 and 4 ranks"):
        by_size = _explain_freed(train, ShardedUnit)
        for size, seen in by_size.items():
            with asked(f"{call}; two steps of two micro-batches, on {size} ranks"):
                _expect_sharded(seen)
                _expect_between(seen)
                if size > 1:
                    _expect_calls(seen)
                _expect_numbers(seen)
    with asked(f"the bytes held: {NUM_SQUARES} units of one weight, {SQUARE} x {SQUARE}, float64, "
               f"on {MANY} ranks"):
        _expect_little(_explain_freed(hold, ShardedUnit, sizes=(MANY,))[MANY])


def _explain_freed(trial, ShardedUnit: type, **options) -> dict[int, list]:
    try:
        return on_ranks(trial, ShardedUnit, **options)
    except Mistake as mistake:
        if any(words in mistake.seen for words in FREED):
            mistake.likely = "a parameter is read after its storage was freed: unshard before " \
                             "forward and again before backward, and reshard when no gradient is " \
                             "missing"
        raise


def quiet() -> None:
    """Say nothing of a unit whose input needs no gradient, as the first one's."""
    warnings.filterwarnings("ignore", message="Full backward hook is firing")


def train(group, ShardedUnit: type) -> Seen:
    quiet()
    seen, blocks, wire = Seen(), make_blocks(), ShardWire({"reduce_scatter", "all_gather"})
    units = [ShardedUnit(block, group) for block in blocks]
    shards = [unit.shard for unit in units]
    seen.made = [(shard.numel(), storage_bytes(block))
                 for shard, block in zip(shards, blocks, strict=True)]
    optimizer = torch.optim.AdamW(shards, lr=0.05)

    with wire:
        for step in range(STEPS):
            for number in range(step * MICRO_BATCHES, (step + 1) * MICRO_BATCHES):
                x = data(group.rank(), number)[0]
                wire.note("forward")
                for index, block in enumerate(blocks):
                    x = block(x)
                    seen.between.append(("forward", index, storage_bytes(block)))
                seen.outs.append(x.detach().clone())
                wire.note("backward")
                loss_of(x, group.rank(), number).backward()
                for index, block in enumerate(blocks):
                    seen.between.append(("backward", index, storage_bytes(block)))
                seen.left.append(sum(p.grad is not None for b in blocks for p in b.parameters()))
            grads = [None if shard.grad is None else shard.grad.clone() for shard in shards]
            optimizer.step()
            optimizer.zero_grad()
            seen.steps.append([(grad, shard.detach().clone())
                               for grad, shard in zip(grads, shards, strict=True)])
    seen.events = [(name, getattr(what, "payload", None)) for name, what in wire.events]
    return seen


@dataclass(frozen=True)
class Right:
    outs: list[list[Tensor]]
    """By micro-batch and rank."""
    steps: list[list[tuple[list[Tensor], list[Tensor]]]]
    """By step and unit: the gradient's shards of all ranks, and the unit's after the step."""


@cache
def alone(size: int) -> Right:
    blocks, outs, steps = make_blocks(), [], []
    model = nn.Sequential(*blocks)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    for step in range(STEPS):
        for number in range(step * MICRO_BATCHES, (step + 1) * MICRO_BATCHES):
            mine = [model(data(rank, number)[0]) for rank in range(size)]
            sum(loss_of(out, rank, number) / size for rank, out in enumerate(mine)).backward()
            outs.append([out.detach() for out in mine])
        grads = [cut([p.grad for p in block.parameters()], size) for block in blocks]
        optimizer.step()
        optimizer.zero_grad()
        units = [cut(list(block.parameters()), size) for block in blocks]
        steps.append(list(zip(grads, units, strict=True)))
    return Right(outs, steps)


def _expect_sharded(seen: list[Seen]) -> None:
    totals = [sum(p.numel() for p in block.parameters()) for block in make_blocks()]
    for index, total in enumerate(totals):
        made = [mine.made[index] for mine in seen]
        length = shard_length(total, len(seen))
        expect(all(n == length for n, _ in made),
               seen=per_rank([f"unit {index}'s shard has {n} elements" for n, _ in made])
               + f"; L is {length}, of {total}",
               likely="the module is not sharded: shard is this rank's part of the flattened "
                      "parameters, L = ceil(n / N) elements" if made[0][0] > length else
                      "flatten the parameters and pad them with zeros to N L values")
        _expect_nothing_there([held for _, held in made], f"after __init__ of unit {index}",
                              "the module shards nothing: the parameters still hold all their "
                              "values. Make them views of a flat tensor, and reshard at the end "
                              "of __init__")


def _expect_nothing_there(held: list[int], when: str, likely: str) -> None:
    expect(not any(held), seen=per_rank([f"{when} its parameters hold {n} bytes" for n in held])
           + "; correct is 0", likely=likely)


def _expect_between(seen: list[Seen]) -> None:
    whys = {"forward": "reshard in a forward hook of the module (register_forward_hook)",
            "backward": "reshard when the last gradient of the unit has been reduced"}
    for events in zip(*(mine.between for mine in seen), strict=True):
        when, index, _ = events[0]
        _expect_nothing_there([held for *_, held in events], f"after {when} of unit {index}",
                              whys[when])
    left = [max(mine.left) for mine in seen]
    expect(not any(left), seen=per_rank([f"{n} parameters have a .grad after backward()"
                                         for n in left]),
           likely="the full gradients are freed once they are reduced: set parameter.grad to None")


def _expect_calls(seen: list[Seen]) -> None:
    size, blocks = len(seen), make_blocks()
    full = [size * ELEMENT * shard_length(sum(p.numel() for p in block.parameters()), size)
            for block in blocks]
    right = {("forward", "all_gather"): full, ("backward", "all_gather"): full[::-1],
             ("forward", "reduce_scatter"): [], ("backward", "reduce_scatter"): full[::-1]}
    whys = {"all_gather": "unshard once before forward (a forward pre-hook) and once before "
                          "backward (a full backward pre-hook), and not in between",
            "reduce_scatter": "once per unit and backward pass, when its last gradient is complete"}
    for (when, op), payloads in right.items():
        sent = [_payloads(mine.events, when, op) for mine in seen]
        expect(all(sorted(mine) == sorted(payloads) for by_rank in sent for mine in by_rank),
               seen=per_rank([f"in {when} {op}s of {', '.join(map(str, mine[0])) or 'no'} bytes"
                              for mine in sent]) +
               f"; correct are {', '.join(map(str, payloads)) or 'none'}", likely=whys[op])


def _payloads(events: list[tuple], when: str, op: str) -> list[list[int]]:
    """The bytes of each call of `op`, for each forward or backward pass."""
    passes, phase = [], None
    for name, payload in events:
        if name in ("forward", "backward"):
            phase = name
            if name == when:
                passes.append([])
        elif name == op and phase == when:
            passes[-1].append(payload)
    return passes


def _expect_numbers(seen: list[Seen]) -> None:
    size = len(seen)
    right = alone(size)
    for step in range(STEPS):
        for number in range(step * MICRO_BATCHES, (step + 1) * MICRO_BATCHES):
            same = [is_close(mine.outs[number], right.outs[number][rank])
                    for rank, mine in enumerate(seen)]
            expect(all(same), seen=f"the output of micro-batch {number} is wrong, before its "
                   "backward()", likely="unshard must gather the shards as they are now, also "
                   "after optimizer.step(), and each parameter must be the view of its own place")
        for index, (grads, shards) in enumerate(right.steps[step]):
            mine, after = zip(*(rank.steps[step][index] for rank in seen), strict=True)
            expect(all(is_close(*pair) for pair in zip(mine, grads, strict=True)),
                   seen=f"unit {index}: shard.grad is wrong in step {step}",
                   likely=_why_other_gradient(mine, grads))
            expect(all(is_close(*pair) for pair in zip(after, shards, strict=True)),
                   seen=f"unit {index}: the shard is wrong after step {step}",
                   likely="shard is the nn.Parameter that the optimizer updates: on rank r, values "
                          "r L to (r + 1) L, padded with zeros")


def _why_other_gradient(mine: tuple, right: list[Tensor]) -> str:
    size = len(right)
    if any(grad is None for grad in mine):
        return "shard.grad is None: put the result of the reduce-scatter there"
    if all(is_close(*pair) for pair in zip(mine, [size * grad for grad in right], strict=True)):
        return "that is the sum over the ranks: divide by group.size()"
    return "it is the mean over the ranks, added to what shard.grad holds from the micro-batches " \
           "before; reduce when the gradients of all parameters of the unit are complete"


def hold(group, ShardedUnit: type) -> tuple[int, int, int, int]:
    """Bytes held after __init__ and after forward, the most in the backward pass, and after it."""
    quiet()
    with Held() as held:
        blocks = [nn.Linear(SQUARE, SQUARE, bias=False).double() for _ in range(NUM_SQUARES)]
        units = [ShardedUnit(block, group) for block in blocks]
        gc.collect()
        shards = sum(unit.shard.nbytes for unit in units)
        made = held.settled(shards + SMALL) + python_bytes(*units)

        x = torch.ones(1, SQUARE, dtype=torch.float64)
        for block in blocks:
            x = block(x)
        forward = held.now()
        held.peak = 0
        x.sum().backward()
        peak = held.peak
        del x
        gc.collect()
        after = held.settled(2 * shards + SMALL) + python_bytes(*units)
    return made, forward, peak, after


def _expect_little(seen: list[tuple[int, int, int, int]]) -> None:
    unit = SQUARE * SQUARE * ELEMENT
    shards = NUM_SQUARES / MANY
    limits = {
        "after __init__": (shards + ROUNDING, "the module shards nothing: its values are still "
                           "held somewhere. Make shard a copy (clone), and free the flat tensor"),
        "after forward": (shards + ROUNDING, "autograd keeps views of the flat tensors: free the "
                          "storage, flat.untyped_storage().resize_(0), and fill the same tensor "
                          "again, instead of making a new one"),
        "at the peak of backward": (2 * shards + UNDER_WAY, "each unit frees its parameters and "
                                    "gradients, and flat tensors of them, before the next begins"),
        "after backward": (2 * shards + ROUNDING / 3, "once reduced, gradients are held in "
                           "shard.grad only: does an attribute, a work or an array still hold a "
                           "flat one?"),
    }
    for number, (when, (most, likely)) in enumerate(limits.items()):
        expect(all(mine[number] < most * unit for mine in seen),
               seen=per_rank([f"{when} {mine[number]:,} bytes are held" for mine in seen])
               + f"; {NUM_SQUARES} units have {NUM_SQUARES * unit:,}, their shards "
               f"{int(shards * unit):,}", likely=likely)
