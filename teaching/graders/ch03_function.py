"""Grader of 3.1: a recomputed function against the plain call, and what is held in between."""

import gc
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from minitron.measure.meter import Meter
from teaching.graders import apart, asked, expect
from teaching.graders.python_memory import python_bytes

ROWS, WIDTH, WIDE, NUM_TOKENS = 512, 8, 256, 11
KIB = 1024
OUTPUT, INNER = ROWS * WIDTH * 8, ROWS * WIDE * 8
"""Bytes of what the function returns, and of each tensor inside it."""


class Toy(nn.Module):
    """A float64 branch whose inner tensors are wide, which notes its calls."""

    def __init__(self, dropout: float):
        super().__init__()
        generator = torch.Generator().manual_seed(3)

        def random(*shape: int) -> nn.Parameter:
            values = torch.randn(shape, generator=generator, dtype=torch.float64)
            return nn.Parameter(values / math.sqrt(shape[0]))

        self.before, self.up, self.down = random(WIDTH, WIDTH), random(WIDTH, WIDE), \
            random(WIDE, WIDTH)
        self.table = random(NUM_TOKENS, WIDTH)
        self.dropout = dropout
        self.calls = 0

    def forward(self, x: Tensor, shift: Tensor, *selection: Tensor) -> Tensor:
        self.calls += 1
        if selection:  # int64 tokens, and which of them count, bool
            tokens, counts = selection
            x = torch.where(counts[:, None], x + self.table[tokens], x)
        hidden = F.dropout(torch.tanh(x @ self.up + shift), self.dropout)
        return F.dropout(torch.sin(hidden) @ self.down, self.dropout)


@dataclass(frozen=True)
class Case:
    """One step of two calls in a row."""

    dropout: float = 0.0
    frozen_input: bool = False
    held: float = 0.0
    """What .grad holds before."""
    selects: bool = False
    """Whether the function takes tokens and a mask, too."""


@dataclass(frozen=True)
class Seen:
    """What there was during the step, and after it."""

    result: Tensor | None
    shown: str
    """What was returned, if it is no tensor."""
    trains: bool
    grads: dict[str, Tensor | None]
    calls: tuple[int, int]
    """Of the function, in the forward and in the backward pass."""
    held: int
    """Bytes of tensors after the forward pass, beside what was there before."""
    objects: int
    """Bytes of NumPy arrays and Python objects that hang on the graph by then."""
    kept: int
    """Bytes of tensors after the backward pass, beside parameters and gradients."""
    random_state: Tensor
    marked: bool
    """Whether an input that requires no gradient does so now, or has one."""


def plain(function: Callable, *tensors: Tensor) -> Tensor:
    return function(*tensors)


@cache
def step_without_recomputation(case: Case) -> Seen:
    return step(plain, case)


def step(recompute: Callable, case: Case) -> Seen:
    """Call it twice in a row, and go back."""
    model = Toy(case.dropout)
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, case.held) if case.held else None
    model.before.requires_grad_(not case.frozen_input)
    inputs = torch.linspace(-1, 1, ROWS * WIDTH, dtype=torch.float64).view(ROWS, WIDTH)
    shift = torch.linspace(0, 1, WIDE, dtype=torch.float64)
    rows = torch.arange(ROWS)
    selection = (rows % NUM_TOKENS, rows % 3 > 0) if case.selects else ()

    torch.manual_seed(7)
    with Meter(model) as meter:
        before = sum(meter.now().values())
        result = recompute(model, inputs @ model.before, shift, *selection)
        result = recompute(model, result, shift, *selection)
        forward_calls, held = model.calls, sum(meter.now().values()) - before
        objects = python_bytes(*_graph(result))
        torch.rand(5)  # the backward pass finds the generator elsewhere
        trains = isinstance(result, Tensor) and result.requires_grad
        if trains:
            (result * torch.arange(WIDTH)).sum().backward()
        random_state = torch.get_rng_state()
        value = result.detach() if isinstance(result, Tensor) else None
        shown, result = repr(result)[:200], None
        gc.collect()
        now = meter.now()
        kept = sum(now.values()) - now["parameter"] - now["gradient"]
    grads = {name: p.grad for name, p in model.named_parameters()}
    calls = forward_calls, model.calls - forward_calls
    marked = shift.requires_grad or shift.grad is not None
    return Seen(value, shown, trains, grads, calls, held, objects, kept, random_state, marked)


def _graph(result) -> list[dict]:
    """What the functions of the graph behind `result` hold in attributes."""
    found, left, seen = [], [getattr(result, "grad_fn", None)], set()
    while left:
        node = left.pop()
        if node is not None and node not in seen:
            seen.add(node)
            found.append(getattr(node, "__dict__", {}))
            left += [after for after, _ in node.next_functions]
    return found


def grade_3_1(recompute: Callable) -> None:
    """Compare values, gradients and random state with the plain call's; count calls and bytes."""

    def compare(case: Case, likely: str = "") -> tuple[Seen, Seen]:
        mine, right = apart(step, recompute, case), step_without_recomputation(case)
        _expect_values(mine, right, likely)
        return mine, right

    with asked("recompute(function, x, shift), twice in a row, then backward(); no dropout"):
        mine, _ = compare(Case())
        _expect_recomputation(mine)
    with asked("the same, where neither x nor shift requires a gradient: the weights that the "
               "function holds do"):
        compare(Case(frozen_input=True),
                "autograd sees no input that requires a gradient, so it never calls `backward`: "
                "pass an empty tensor that requires one as an extra input")
    with asked("the same, with .grad holding 0.5 everywhere"):
        compare(Case(held=0.5), "add to .grad, as backward() does; do not replace it")
    with asked("recompute(function, x, shift, tokens, counts): tokens are int64, counts is bool"):
        compare(Case(selects=True), "return a gradient for each input: None for one that holds "
                "integers or requires no gradient")
    with asked("a function with dropout: 20 % of the values are dropped, at two places"):
        mine, right = compare(Case(dropout=0.2), "recomputation dropped other values: store "
                              "torch.get_rng_state() before the first call, and set it for the "
                              "second")
        expect(torch.equal(mine.random_state, right.random_state),
               seen="after backward() the random generator is not where it would be without "
                    "recomputation",
               likely="store the state before recomputing, and restore it afterwards: otherwise "
                      "the next dropout draws numbers that have been used already")
    with asked("recompute(function, x, shift) under torch.no_grad()"):
        _expect_plain_without_gradients(*apart(call_without_gradients, recompute))


def _expect_values(mine: Seen, plain: Seen, likely: str) -> None:
    expect(mine.result is not None, seen=f"it returned {mine.shown}",
           likely="return what the function returned")
    expect(torch.equal(mine.result, plain.result),
           seen="the result itself differs from function(*tensors)",
           likely="the first call must be the plain one: same inputs and random numbers, no seed")
    expect(mine.trains, seen="the result does not require a gradient",
           likely=likely or "the result must be connected to the inputs: torch.no_grad() or "
                            "detach() outside of an autograd.Function cuts it off")
    expect(not mine.marked, seen="shift, which required no gradient, requires one afterwards",
           likely="the tensors are the caller's: mark detached copies, t.detach().requires_grad_()")
    for name, right in plain.grads.items():
        grad = mine.grads[name]
        if right is None:
            continue
        role = "a weight before the first call" if name == "before" else \
            "a weight that the function holds"
        expect(grad is not None, seen=f"{role} has no gradient",
               likely="return the gradient of each input, in order" if name == "before" else
               likely or "torch.autograd.grad fills no .grad: torch.autograd.backward from the "
               "recomputed result reaches the weights too")
        error = (grad - right).abs().max().item()
        expect(error < 1e-12, seen=f"the gradient of {role} is wrong: largest error {error:.3g}, "
               f"where the right one's largest entry is {right.abs().max().item():.3g}",
               likely=likely or _explain(grad, right))


def _explain(grad: Tensor, right: Tensor) -> str:
    if torch.allclose(grad, 2 * right):
        return "twice the right gradient: the inner backward pass went past its inputs (detach " \
               "them), or ran twice"
    return "start the inner backward pass from the gradient that you were given, and stop it at " \
           "the detached inputs"


def _expect_recomputation(seen: Seen) -> None:
    forward_calls, backward_calls = seen.calls
    expect(forward_calls == 2, seen=f"{forward_calls} calls in the forward pass, not 2",
           likely="one call now, one in the backward pass")
    needed = 3 * OUTPUT
    likely = "the graph of the first call is alive: do not record it (the forward of an " \
             "autograd.Function does not), and save only the inputs"
    if seen.held < needed + INNER:
        likely = "copies of the inputs: ctx.save_for_backward keeps the tensors themselves, " \
                 "which exist anyway"
    expect(seen.held <= needed + OUTPUT // 2,  # and the states of the random generator
           seen=f"{seen.held / KIB:.0f} KiB are held after the forward pass; x and the two results "
                f"are {needed / KIB:.0f} KiB, each tensor inside the function {INNER / KIB:.0f}",
           likely=likely)
    expect(seen.objects <= OUTPUT // 2,
           seen=f"{seen.objects / KIB:.0f} KiB of NumPy arrays or Python objects hang on the graph "
                "after the forward pass",
           likely="a copy in NumPy or bytes takes memory like any other: keep the input tensors")
    expect(backward_calls == 2,
           seen=f"{backward_calls} calls in the backward pass of two recomputed calls, not 2",
           likely="recompute each call once, and take all gradients from that")
    expect(seen.kept <= OUTPUT + OUTPUT // 2,  # the result itself, and random states
           seen=f"{seen.kept / KIB:.0f} KiB are still held after the backward pass, beside "
                "parameters and gradients",
           likely="store what belongs to one call in its ctx, which is freed with the graph; a "
                  "list or a variable outside keeps it alive")


def call_without_gradients(recompute: Callable) -> tuple[bool, int]:
    """Whether the result requires a gradient, and how often the function was called."""
    model = Toy(0.0)
    with torch.no_grad():
        result = recompute(model, torch.ones(2, WIDTH, dtype=torch.float64), torch.zeros(WIDE))
    return result.requires_grad, model.calls


def _expect_plain_without_gradients(requires_grad: bool, calls: int) -> None:
    expect(not requires_grad and calls == 1,
           seen=f"requires_grad is {requires_grad}, and there were {calls} calls",
           likely="enable recording in the backward pass only: torch.enable_grad() around the "
                  "first call overrides the caller's no_grad")
