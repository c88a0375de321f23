"""Graders of chapter 7; those of whole layers and of the loss have a file of their own each."""

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from minitron.measure.ledger import Call
from teaching.graders import apart, asked, expect
from teaching.graders.ch07_heads import grade_7_4
from teaching.graders.ch07_linear import grade_7_2
from teaching.graders.ch07_toy import (
    ROUNDING,
    expect_calls,
    expect_close,
    expect_dtype,
    in_short,
    random,
    scattered,
)
from teaching.graders.ch07_vocabulary import grade_7_3
from teaching.graders.ranks import Wire, on_ranks, per_rank

__all__ = ["grade_7_1", "grade_7_2", "grade_7_3", "grade_7_4"]



class Case(NamedTuple):
    """What is sent through."""

    shape: tuple[int, ...]
    dtype: torch.dtype = torch.float64
    contiguous: bool = True
    seed: int = 0

    @property
    def rounding(self) -> float:
        return ROUNDING if self.dtype == torch.float64 else 1e-6

    def __str__(self) -> str:
        return f"{in_short(self.dtype)} of shape {self.shape}" + (
            "" if self.contiguous else ", not contiguous")

    def tensor(self, seed: int) -> Tensor:
        values = random(1000 * self.seed + seed, *self.shape).to(self.dtype)
        return values if self.contiguous else scattered(values)


CASES = [Case((3, 5)), Case((1,)), Case(()), Case((3, 5), seed=1),
         Case((3, 5), contiguous=False, seed=2), Case((2, 3), torch.float32)]
SENT = {
    ("backward", "forward"): "x is already the same on all ranks: f does its all-reduce in the "
                             "backward pass, where each rank has a partial sum of the gradient",
    ("backward", "backward"): "each rank's backward pass has a partial sum of the gradient of x: "
                              "all-reduce it, once",
    ("forward", "forward"): "each rank's x is a partial sum: all-reduce it, once",
    ("forward", "backward"): "every rank already has the full gradient of y: pass it through. A "
                             "sum over the ranks would make it N times too large",
}
"""Where the sum belongs, what is judged, and why that is wrong."""


@dataclass(frozen=True)
class Passed:
    """What a rank has after one way forward and back."""

    y: Tensor
    grad: Tensor
    """The gradient of x."""
    changed: list[str]
    """What has other values than before."""
    forward: list[Call]
    backward: list[Call]


def grade_7_1(Replicate: type, AllReduce: type) -> None:
    """Send tensors of three shapes forward and gradients back, and look what is sent when."""
    for name, Function, sums in (("Replicate", Replicate, "backward"),
                                 ("AllReduce", AllReduce, "forward")):
        call = f"y = {name}.apply(x, group); y.backward(grad)"
        with asked(f"{call} on 1, 2, 3 and 4 ranks"):
            _expect_written(name, apart(missing_methods, Function))
            by_size = on_ranks(pass_all, Function, sums)
        for size, by_rank in by_size.items():
            for index, case in enumerate(CASES):
                with asked(f"{call} on {size} ranks, with x and grad {case}"):
                    _expect_passed([mine[index] for mine in by_rank], case, sums)


def missing_methods(Function: type) -> list[str]:
    return [method for method in ("forward", "backward")
            if getattr(Function, method) is getattr(torch.autograd.Function, method)]


def _expect_written(name: str, missing: list[str]) -> None:
    expect(not missing, seen=f"{name} has no {' and no '.join(missing)}",
           likely="both are static methods of the class, called forward and backward")


def pass_all(group, Function: type, sums: str) -> list[Passed]:
    return [pass_through(group, Function, case, sums) for case in CASES]


def pass_through(group, Function: type, case: Case, sums: str) -> Passed:
    x, grad = start(group.rank(), case, sums)
    x.requires_grad_()
    x_inside = x * 1  # no leaf: PyTorch lets it be changed in place
    before = {"x": x_inside.detach().clone(), "the gradient of y": grad.clone()}

    with Wire({"all_reduce"}) as wire:
        y = Function.apply(x_inside, group)
        y_then, num_forward = y.detach().clone(), len(wire.calls)
        y.backward(grad)

    after = {"x": x_inside, "the gradient of y": grad}
    changed = [name for name, tensor in after.items() if not tensor.equal(before[name])]
    return Passed(y_then, x.grad, changed, wire.calls[:num_forward], wire.calls[num_forward:])


def start(rank: int, case: Case, sums: str) -> tuple[Tensor, Tensor]:
    """x and the gradient of y; the one that is to be summed differs from rank to rank."""
    x = case.tensor(rank if sums == "forward" else 0)
    return x, case.tensor(100 + (rank if sums == "backward" else 0))


def _expect_passed(seen: list[Passed], case: Case, sums: str) -> None:
    size = len(seen)
    expect_dtype("y", [mine.y.dtype for mine in seen], case.dtype)
    message = [case.dtype.itemsize * math.prod(case.shape)]
    come_in = zip(*(start(rank, case, sums) for rank in range(size)), strict=True)
    for phase, parts in zip(("forward", "backward"), map(list, come_in), strict=True):
        is_sum = phase == sums
        if size > 1:
            expect_calls(f"{phase}:", [getattr(mine, phase) for mine in seen],
                         message if is_sum else [], SENT[sums, phase])
        what, values = ("y", [mine.y for mine in seen]) if phase == "forward" else \
            ("the gradient of x", [mine.grad for mine in seen])
        earlier = [start(rank, case._replace(seed=0), sums)[phase == "backward"]
                   for rank in range(size)]
        _expect_values(what, values, parts, is_sum, earlier, case.rounding)

    changed = [" and ".join(mine.changed) for mine in seen]
    expect(not any(changed), seen=per_rank([f"{names or 'nothing'} has other values than before"
                                            for names in changed]),
           likely="dist.all_reduce works in place, and the caller still needs that tensor: clone "
                  "it first")


def _expect_values(
    what: str, seen: list, parts: list[Tensor], is_sum: bool, earlier: list[Tensor], most: float
) -> None:
    size, total = len(seen), sum(parts)
    right = [total] * size if is_sum else parts
    faults = {
        "that is this rank's input: return the sum, after waiting for the all-reduce": parts,
        "that is the mean: add the parts without dividing": [total / size] * size,
        "that is the sum from an earlier call with tensors of the same shape: sum again in each "
        "call":
            [sum(earlier)] * size,
        f"that is 1/{size} of it: the input is already complete": [part / size for part in parts],
    }
    likely = "the sum of the input over the ranks" if is_sum else \
        "pass the input through unchanged"
    expect_close(what, seen, right, faults.items(), likely, most)
