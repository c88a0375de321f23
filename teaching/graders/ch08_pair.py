"""Grader of 8.1: what the ranks have after the pair, forward and backward, and what was sent.

All values are small integers, so sums are exact and compared bit for bit.
"""

from collections.abc import Callable
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from minitron.pytorch.private import DispatchMode, tensors_in
from teaching.graders import Mistake, asked, expect
from teaching.graders.ch06_toy import ShardWire
from teaching.graders.ch07_toy import expect_dtype, in_short
from teaching.graders.ranks import on_ranks, per_rank

PART = (2, 3, 5)  # (B, S/N, D): with B = 1 nobody would see a wrong layout
TALK = {"all_gather", "reduce_scatter"}
WAIT = "wait for the collective before you use its output, and concatenate or split along dim"


@dataclass(frozen=True)
class Case:
    dim: int
    contiguous: bool = True
    part: tuple[int, ...] = PART
    dtype: torch.dtype = torch.float64
    seed: int = 0

    def __str__(self) -> str:
        return f"dim {self.dim}, shards {in_short(self.dtype)} of shape {self.part}" + (
            ", not contiguous" * (not self.contiguous))

    def whole(self, size: int) -> tuple[int, ...]:
        return tuple(n * size if dim == self.dim else n for dim, n in enumerate(self.part))

    def tensors(self, size: int, whole: bool, seed: int) -> list[Tensor]:
        """One for each rank, of the part's or of the whole's shape."""
        shape = self.whole(size) if whole else self.part
        return [self.tensor(shape, 100 * self.seed + 10 * seed + rank) for rank in range(size)]

    def tensor(self, shape: tuple[int, ...], seed: int) -> Tensor:
        generator = torch.Generator().manual_seed(seed)
        values = torch.randint(1, 100, shape, generator=generator).to(self.dtype)
        return values if self.contiguous else values.mT.contiguous().mT


CASES = [Case(1), Case(0), Case(2), Case(1, contiguous=False, seed=1), Case(1, part=(4, 3)),
         Case(1, part=(2, 3, 2, 2)), Case(1, dtype=torch.float32, seed=2)]


@dataclass(frozen=True)
class Seen:
    """What one rank has after forward and backward."""

    out: Tensor
    grad: Tensor | None
    """Of the input; None if the output's shape was wrong."""
    changed: list[str]
    calls: dict[str, list[tuple[str, int]]]
    """By phase: op and bytes of the full tensor."""


def grade_8_1(AllGather: type, ReduceScatter: type) -> None:
    """Look at each function's wire, output and gradient."""
    for function, name, gathers in ((AllGather, "AllGather.apply(x_shard, group, dim)", True),
                                    (ReduceScatter, "ReduceScatter.apply(x_partial, group, dim)",
                                     False)):
        with asked(f"{name} and backward, on 1, 2, 3 and 4 ranks, for several shapes and dims"):
            by_size = on_ranks(there_and_back, function, gathers)
        for size, by_rank in by_size.items():
            for index, case in enumerate(CASES):
                with asked(f"{name} and backward, on {size} rank{'s' * (size > 1)}, {case}"):
                    _expect_pair([mine[index] for mine in by_rank], case, gathers)


def there_and_back(group, function: type, gathers: bool) -> list[Seen]:
    seen, size = [], group.size()
    for case in CASES:
        x = case.tensors(size, whole=not gathers, seed=1)[group.rank()].requires_grad_()
        grad = case.tensors(size, whole=gathers, seed=2)[group.rank()]
        given = {"input": x, "gradient": grad}
        copies = {name: tensor.detach().clone() for name, tensor in given.items()}

        with ShardWire(allowed=TALK) as wire, ContiguousOnly():
            out = function.apply(x, group, case.dim)
            wire.note("backward")
            if out.shape == grad.shape:
                out.backward(grad)
        changed = [name for name, copy in copies.items() if not torch.equal(given[name], copy)]
        seen.append(Seen(out.detach(), x.grad, changed, calls_by_phase(wire.events)))
    return seen


class ContiguousOnly(DispatchMode):
    """Refuse what NCCL refuses; gloo takes it."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "c10d" and not all(t.is_contiguous() for t in tensors_in(args)):
            raise ValueError("Tensors must be contiguous; gloo takes others, NCCL does not")
        return func(*args, **(kwargs or {}))


def calls_by_phase(events: list[tuple]) -> dict[str, list[tuple[str, int]]]:
    """Op and payload of what was sent before and after the event "backward"."""
    calls, phase = {"forward": [], "backward": []}, "forward"
    for name, what in events:
        if name == "backward":
            phase = name
        elif name in TALK:
            calls[phase].append((name, what.payload))
    return calls


def _expect_pair(seen: list[Seen], case: Case, gathers: bool) -> None:
    size = len(seen)
    xs = case.tensors(size, whole=not gathers, seed=1)
    grads = case.tensors(size, whole=gathers, seed=2)
    there, back = (gathered, scattered) if gathers else (scattered, gathered)
    right_outs, right_grads = there(xs, case), back(grads, case)

    shapes = [tuple(mine.out.shape) for mine in seen]
    right = tuple(right_outs[0].shape)
    expect(all(shape == right for shape in shapes),
           seen=per_rank([f"the output has the shape {shape}" for shape in shapes])
           + f"; right is {right}",
           likely="the collectives concatenate and split along dim 0, whatever dim is: rearrange "
                  "the input or the output for dim yourself")
    expect_dtype("the output", [mine.out.dtype for mine in seen], case.dtype)
    if size > 1:
        _expect_calls(seen, case.dtype.itemsize * size * prod(case.part), gathers)
    changed = [", ".join(mine.changed) for mine in seen]
    expect(not any(changed),
           seen=per_rank([f"changed in place: {names or 'nothing'}" for names in changed]),
           likely="the caller still needs these tensors: let the collective write into a new one")

    faults = [_why_not_gathered, _why_not_scattered]
    why_out, why_grad = faults if gathers else faults[::-1]
    if case.seed:
        earlier = CASES[0].tensors(size, whole=not gathers, seed=1)
        stale = [out.to(case.dtype) for out in there(earlier, CASES[0])]
        expect(not all(_same(mine.out, old) for mine, old in zip(seen, stale, strict=True)),
               seen="the output is that of the first call, with tensors of the same shape",
               likely="compute it in every call: the values differ")
    _expect_values("the output", [mine.out for mine in seen], right_outs, why_out, xs, case)
    _expect_values("the gradient of the input", [mine.grad for mine in seen], right_grads,
                   why_grad, grads, case)


def _expect_calls(seen: list[Seen], payload: int, gathers: bool) -> None:
    there, back = ("all_gather", "reduce_scatter")[::1 if gathers else -1]
    for phase, op in (("forward", there), ("backward", back)):
        made = [mine.calls[phase] for mine in seen]
        expect(all(calls == [(op, payload)] for calls in made),
               seen=per_rank([f"{phase}: {_words(calls)}" for calls in made])
               + f"; right is {_words([(op, payload)])}",
               likely=f"one {op} {phase}: each is the other's backward pass")


def _words(calls: list[tuple[str, int]]) -> str:
    return ", ".join(f"{op} of {payload} bytes" for op, payload in calls) or "nothing is sent"


def gathered(shards: list[Tensor], case: Case) -> list[Tensor]:
    return [torch.cat(shards, case.dim)] * len(shards)


def scattered(partial: list[Tensor], case: Case) -> list[Tensor]:
    return list(sum(partial).chunk(len(partial), case.dim))


def _expect_values(
    what: str, mine: list[Tensor | None], right: list[Tensor], why: Callable,
    given: list[Tensor], case: Case,
) -> None:
    same = [_same(*pair) for pair in zip(mine, right, strict=True)]
    if not all(same):
        which = ", ".join(str(rank) for rank, ok in enumerate(same) if not ok)
        first = same.index(False)
        raise Mistake(f"{what} is wrong on rank {which}; on rank {first} "
                      f"{_first_difference(mine[first], right[first])}", why(mine, given, case))


def _same(seen: Tensor | None, right: Tensor) -> bool:
    return seen is not None and seen.shape == right.shape and torch.equal(seen, right)


def _first_difference(seen: Tensor | None, right: Tensor) -> str:
    if seen is None:
        return "it is None"
    place = (seen != right).nonzero()[0].tolist()
    return f"it has {seen[*place]:g} at {place}, where {right[*place]:g} is right"


def _why_not_gathered(mine: list[Tensor], shards: list[Tensor], case: Case) -> str:
    size, whole = len(shards), torch.cat(shards, case.dim)
    return _first_fault(mine, {
        "the output is viewed in another shape: the collectives concatenate along dim 0, so split "
        "the output into N parts and concatenate these along dim":
            [torch.cat(shards).view_as(whole)] * size,
        "that is divided by N: an all-gather sums nothing, so divide nothing":
            [whole / size] * size,
    })


def _why_not_scattered(mine: list[Tensor], partial: list[Tensor], case: Case) -> str:
    size, total = len(partial), sum(partial)
    parts = total.chunk(size, case.dim)
    rows = [part.view_as(parts[0]) for part in total.flatten().chunk(size)]
    return _first_fault(mine, {
        "that is the mean: add the N partial sums without dividing":
            [part / size for part in parts],
        "that is split along dim 0, the only one the collective knows: split along dim into N "
        "parts, and send these one after the other": rows,
    })


def _first_fault(mine: list[Tensor | None], faults: dict[str, list[Tensor]]) -> str:
    for why, tensors in faults.items():
        if all(_same(*pair) for pair in zip(mine, tensors, strict=True)):
            return why
    return WAIT
