"""Grader of 3.1: a replayed function against the plain call, and what is held in between."""

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from minitron.course.graders import asked, expect
from minitron.measure.meter import Meter

ROWS, WIDTH, WIDE = 16, 8, 256
KIB = 1024


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
        self.dropout = dropout
        self.calls = 0

    def forward(self, x: Tensor, shift: Tensor) -> Tensor:
        self.calls += 1
        hidden = F.dropout(torch.tanh(x @ self.up + shift), self.dropout)
        return F.dropout(torch.sin(hidden) @ self.down, self.dropout)


class Run:
    """One step of two calls in a row, plain if `recompute` is None; what it left behind."""

    def __init__(self, recompute: Callable | None, dropout: float, frozen_input: bool = False,
                 held: float = 0.0):
        self.model = Toy(dropout)
        for parameter in self.model.parameters():
            parameter.grad = torch.full_like(parameter, held) if held else None
        self.model.before.requires_grad_(not frozen_input)
        call = recompute or (lambda function, *tensors: function(*tensors))
        inputs = torch.linspace(-1, 1, ROWS * WIDTH, dtype=torch.float64).view(ROWS, WIDTH)
        shift = torch.linspace(0, 1, WIDE, dtype=torch.float64)

        torch.manual_seed(7)
        with Meter(self.model) as meter:
            before = sum(meter.now().values())
            self.result = call(self.model, inputs @ self.model.before, shift)
            self.result = call(self.model, self.result, shift)
            self.forward_calls = self.model.calls
            self.held = sum(meter.now().values()) - before
            torch.rand(5)  # the backward pass finds the generator elsewhere
            self.trains = isinstance(self.result, Tensor) and self.result.requires_grad
            if self.trains:
                (self.result * torch.arange(WIDTH)).sum().backward()
        self.backward_calls = self.model.calls - self.forward_calls
        self.random_state = torch.get_rng_state()


def grade_3_1(recompute: Callable) -> None:
    """Compare values, gradients and random state with the plain call's; count calls and bytes."""
    keep = torch.get_rng_state()
    with asked("recompute(function, x, shift), twice in a row, then backward(); no dropout"):
        _expect_values(Run(recompute, 0.0), Run(None, 0.0), "")
        _expect_replay(Run(recompute, 0.0))
    with asked("the same, where neither x nor shift requires a gradient: the weights that the "
               "function holds do"):
        _expect_values(Run(recompute, 0.0, frozen_input=True), Run(None, 0.0, frozen_input=True),
                       "autograd sees no input that requires a gradient, so nothing goes back: "
                       "pass an empty tensor that requires one as an extra input")
    with asked("the same, with .grad holding 0.5 everywhere"):
        _expect_values(Run(recompute, 0.0, held=0.5), Run(None, 0.0, held=0.5),
                       "add to .grad, as backward() does; do not replace it")
    with asked("a function with dropout: 20 % of the values are dropped, at two places"):
        mine, plain = Run(recompute, 0.2), Run(None, 0.2)
        _expect_values(mine, plain, "the replay dropped other values: note torch.get_rng_state() "
                       "before the first call, and set it for the replay")
        expect(torch.equal(mine.random_state, plain.random_state),
               seen="after backward() the random generator is not where it would be without "
                    "recomputation",
               likely="note the state before the replay, and set it back afterwards: else the "
                      "next dropout draws numbers that were used already")
    with asked("recompute(function, x, shift) under torch.no_grad()"):
        _expect_plain_without_gradients(recompute)
    torch.set_rng_state(keep)


def _expect_values(mine: Run, plain: Run, likely: str) -> None:
    expect(isinstance(mine.result, Tensor),
           seen=f"it returned {mine.result!r}"[:200], likely="return what the function returned")
    expect(torch.equal(mine.result, plain.result),
           seen="the result itself differs from function(*tensors)",
           likely="the first call is the plain one: same inputs, same random numbers, no new seed")
    expect(mine.trains, seen="the result does not require a gradient",
           likely=likely or "the result must be connected to the inputs: torch.no_grad() or "
                            "detach() outside of an autograd.Function cuts it off")
    others = dict(plain.model.named_parameters())
    for name, parameter in mine.model.named_parameters():
        right = others[name].grad
        if right is None:
            continue
        role = "a weight before the first call" if name == "before" else \
            "a weight that the function holds"
        expect(parameter.grad is not None, seen=f"{role} has no gradient",
               likely="return the gradient of each input, in order" if name == "before" else
               likely or "torch.autograd.grad fills no .grad: torch.autograd.backward from the "
               "replay's result reaches the weights too")
        error = (parameter.grad - right).abs().max().item()
        expect(error < 1e-12, seen=f"the gradient of {role} is wrong: largest error {error:.3g}, "
               f"where the right one's largest entry is {right.abs().max().item():.3g}",
               likely=likely or _explain(parameter.grad, right))


def _explain(grad: Tensor, right: Tensor) -> str:
    if torch.allclose(grad, 2 * right):
        return "twice the right gradient: the replay went back past its inputs (detach them), " \
               "or went back twice"
    return "start the replay's backward pass with the gradient that you were given, and stop it " \
           "at the detached inputs"


def _expect_replay(run: Run) -> None:
    output = ROWS * WIDTH * 8
    inner = ROWS * WIDE * 8
    allowed = 3 * output + inner - 1  # x, two outputs, and anything smaller than one inner tensor
    expect(run.forward_calls == 2, seen=f"{run.forward_calls} calls in the forward pass, not 2",
           likely="one call now, one in the backward pass")
    expect(run.held <= allowed,
           seen=f"{run.held / KIB:.0f} KiB are held after the forward pass; x and the two results "
                f"are {3 * output / KIB:.0f} KiB, each tensor inside the function "
                f"{inner / KIB:.0f}",
           likely="the graph of the first call is alive: record nothing there (the forward of an "
                  "autograd.Function does not), and save the inputs only")
    expect(run.backward_calls == 2,
           seen=f"{run.backward_calls} calls in the backward pass of two recomputed calls, not 2",
           likely="replay each once, and take all gradients from that one replay")


def _expect_plain_without_gradients(recompute: Callable) -> None:
    model = Toy(0.0)
    with torch.no_grad():
        result = recompute(model, torch.ones(2, WIDTH, dtype=torch.float64), torch.zeros(WIDE))
    expect(not result.requires_grad and model.calls == 1,
           seen=f"requires_grad is {result.requires_grad}, and there were {model.calls} calls",
           likely="switch recording on in the backward pass only: torch.enable_grad() around the "
                  "first call undoes the caller's no_grad")
