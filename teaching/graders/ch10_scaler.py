"""Grader of 10.2: gradients by a script, step by step against what should become of them."""

import math
from collections.abc import Callable
from functools import cache, partial
from typing import NamedTuple

import torch
from torch import Tensor, nn

from teaching.graders import apart, asked, expect
from teaching.graders.arguments import copy_of
from teaching.graders.ch07_toy import is_close
from teaching.graders.numbers import a_not_b

CLOSE = 1e-5  # of the largest value: PyTorch's clipping adds 1e-6 to the norm
MAX_NORM = 2.5
FINE, LARGE = {"a": [0.3, -0.4, 1.2], "b": [0.5, -0.1]}, {"a": [6.0, 0.0, -8.0], "b": [0.0, 3.0]}
ONE = {"a": None, "b": [3.0, 4.0]}
ZERO = {"a": [0.0, 0.0, 0.0], "b": [0.0, 0.0]}
SCRIPT = {
    "fine": FINE,
    "large": LARGE,
    "none for a": ONE,
    "all zero": ZERO,
    "inf in b": {"a": [0.3, -0.4, 1.2], "b": [0.5, math.inf]},
    "-inf in a": {"a": [0.3, -math.inf, 1.2], "b": [0.5, 0.1]},
    "NaN in b": {"a": [0.3, 1.4, 1.2], "b": [math.nan, 0.1]},
    "NaN in b, none for a": {"a": None, "b": [math.nan, 0.1]},
}
STEPS = ["fine", "large", "inf in b", "fine", "none for a", "large", "fine", "NaN in b", "large",
         "fine", "all zero", "fine", "fine", "large", "fine", "fine", "-inf in a",
         "NaN in b, none for a", "fine", "fine", "fine", "large"]
OPTIMIZERS = {
    "SGD with momentum": partial(torch.optim.SGD, lr=0.1, momentum=0.9),
    "AdamW": partial(torch.optim.AdamW, lr=0.05, weight_decay=0.1),
}
GROUPS = (("a", "unused"), ("b",))
"""The optimizer's parameter groups; the second one learns half as fast."""


class Settings(NamedTuple):
    initial: float
    growth: float
    backoff: float
    interval: int


CASES = [("SGD with momentum", Settings(2.0**10, 2.0, 0.5, 3)),
         ("AdamW", Settings(2.0**40, 4.0, 0.125, 2)),
         ("SGD with momentum", Settings(2.0**-3, 2.0, 0.25, 1))]
"""One scale begins far above those that are usual, one falls below 1: neither end is a limit."""


class Seen(NamedTuple):
    """What there is after a step."""

    value: float
    weights: list[Tensor]
    state: list[Tensor]
    """What the optimizer remembers."""
    moved: object = True
    """What step() returned."""
    losses: list[float] = []
    """The loss itself, before and after scaled(loss)."""
    scaled: str = ""
    """What scaled(loss) returned, in words."""
    grads: dict[str, Tensor] = {}
    """After its backward pass; none if it has no such pass."""
    left: list[str] = []
    """Whose .grad is not None after step()."""


class Given(torch.autograd.Function):
    """A finite loss whose gradient is what it is given: the loss does not tell an overflow."""

    @staticmethod
    def forward(ctx, weight: Tensor, gradient: Tensor) -> Tensor:
        ctx.save_for_backward(gradient)
        return (weight * gradient.nan_to_num(0.0, 0.0, 0.0)).sum()

    @staticmethod
    def backward(ctx, grad_loss: Tensor):
        (gradient,) = ctx.saved_tensors
        return grad_loss * gradient, None


class Weights(nn.Module):
    """Three parameters, of which the last never has a gradient."""

    def __init__(self):
        super().__init__()
        for name, values in {"a": [1.0, -2.0, 0.5], "b": [0.25, 3.0], "unused": [1.0]}.items():
            self.register_parameter(name, nn.Parameter(torch.tensor(values, dtype=torch.float64)))

    def loss(self, gradients: dict[str, list | None]) -> Tensor:
        """A loss with these gradients."""
        return sum(Given.apply(getattr(self, name), torch.tensor(values, dtype=torch.float64))
                   for name, values in gradients.items() if values is not None)


def grade_10_2(LossScaler: type) -> None:
    """Play the script with two optimizers and three settings; compare after every step."""
    for name, settings in CASES:
        before = observe(model := Weights(), make_optimizer(name, model), settings.initial)
        for number in range(len(STEPS)):
            told = ", ".join(STEPS[max(0, number - 5):number + 1])
            with asked(f"step {number + 1} of a LossScaler with {name}, a and b in a parameter "
                       f"group each, max_norm={MAX_NORM:g} and "
                       f"{', '.join(f'{k}={v:g}' for k, v in settings._asdict().items())}; "
                       f"gradients {'... ' * (number > 5)}{told}"):
                seen = apart(play, LossScaler, name, settings, number + 1)
                _expect_scaled(seen, before.value, SCRIPT[STEPS[number]])
                _expect_right(seen, before, name, settings, number)
            before = seen


def play(LossScaler: type, name: str, settings: Settings, num_steps: int) -> Seen:
    """What there is after so many steps of the script, from the beginning."""
    model = Weights()
    optimizer = make_optimizer(name, model)
    scaler = LossScaler(optimizer, MAX_NORM, *settings)
    for step in STEPS[:num_steps]:
        loss = model.loss(SCRIPT[step])
        losses, grads = [loss.item()], {}
        scaled = scaler.scaled(loss)
        losses.append(loss.item())
        if isinstance(scaled, Tensor) and scaled.requires_grad:
            scaled.backward()
            grads = {name: copy_of(p.grad) for name, p in model.named_parameters()
                     if p.grad is not None}
        moved = scaler.step()
    left = [name for name, p in model.named_parameters() if p.grad is not None]
    return observe(model, optimizer, float(scaler.value), moved, losses, repr(scaled)[:80], grads,
                   left)


def make_optimizer(name: str, model: Weights) -> torch.optim.Optimizer:
    optimizer = OPTIMIZERS[name]([{"params": [getattr(model, name) for name in group]}
                                  for group in GROUPS])
    optimizer.param_groups[1]["lr"] /= 2
    return optimizer


def observe(model: nn.Module, optimizer: torch.optim.Optimizer, value: float, *others) -> Seen:
    state = [tensor.clone() for parameter in model.parameters()
             for tensor in optimizer.state.get(parameter, {}).values() if tensor is not None]
    return Seen(value, [p.detach().clone() for p in model.parameters()], state, *others)


def _expect_scaled(seen: Seen, value: float, gradients: dict[str, list | None]) -> None:
    before, after = seen.losses
    expect(before == after, seen=f"the loss is {after:g} after scaled(loss), and was {before:g}",
           likely="loss *= ... changes the caller's tensor: return loss * self.value")
    expect(seen.grads != {}, seen=f"scaled(loss) returned {seen.scaled}",
           likely="a tensor that backward() can be called on: loss times self.value")
    for name, values in gradients.items():
        grad = seen.grads.get(name)
        if values is not None and all(map(math.isfinite, values)):
            right = torch.tensor(values, dtype=torch.float64) * value
            expect(is_close(grad, right), seen=f"after scaled(loss).backward() {name}.grad is "
                   f"{_list(grad)}, not {_list(right)}", likely="scaled(loss) is the loss times "
                   "self.value, and nothing else: the true gradient of it")


def _list(tensor: Tensor | None) -> str:
    return "None" if tensor is None else "[" + ", ".join(f"{x:.8g}" for x in tensor.tolist()) + "]"


def clip(norm: float) -> float:
    return min(1.0, MAX_NORM / norm) if norm else 1.0


def clip_all(norms: list[float], scale: float) -> list[float]:
    """What multiplies the true gradient of each parameter group, from the groups' norms."""
    return [clip(math.hypot(*norms))] * len(norms)


@cache
def simulate(
    name: str, settings: Settings, num_steps: int, factors: Callable = clip_all
) -> Seen:
    """What is there after `num_steps` steps; `factors` multiply the groups' gradients."""
    model, value = Weights(), settings.initial
    optimizer = make_optimizer(name, model)
    for step, event in zip(STEPS, history(settings, num_steps), strict=False):
        model.loss(SCRIPT[step]).backward()
        groups = [[p.grad for p in group["params"] if p.grad is not None]
                  for group in optimizer.param_groups]
        if event != "skipped":
            norms = [math.hypot(*(grad.norm() for grad in grads)) for grads in groups]
            for grads, factor in zip(groups, factors(norms, value), strict=True):
                for grad in grads:
                    grad *= factor
            optimizer.step()
        value *= {"fine": 1.0, "grown": settings.growth, "skipped": settings.backoff}[event]
        optimizer.zero_grad()
    return observe(model, optimizer, value, event != "skipped")


def _expect_right(
    seen: Seen, before: Seen, name: str, settings: Settings, number: int
) -> None:
    right = simulate(name, settings, number + 1)
    finite = all(weights.isfinite().all() for weights in seen.weights)
    expect(finite, seen="the weights are not finite any more",
           likely="the gradient is zero, and so is its norm: max_norm / norm is infinite, and "
                  "0 x infinity is NaN. Multiply only if the norm exceeds max_norm"
           if SCRIPT[STEPS[number]] == ZERO else
           "the optimizer stepped with an infinite or NaN gradient: look for both first, in the "
           "gradients of all parameters in all parameter groups; the loss may be finite")
    if not right.moved:
        _expect_skipped(seen, before)
    else:
        _expect_moved(seen, before, name, settings, number)

    expect(isinstance(seen.moved, bool) and seen.moved == right.moved,
           seen=f"step() returned {seen.moved!r:.60}, not {right.moved}",
           likely="return whether the optimizer has stepped, True or False")
    expect(seen.value == right.value,
           seen=f"afterwards the scale is {a_not_b(seen.value, right.value)}",
           likely=_why_other_value(seen.value, before.value, settings, number))
    expect(not seen.left, seen=f"a .grad is not None: that of {' and '.join(seen.left)}",
           likely="set every .grad to None, even after a skipped step: otherwise the next backward "
                  "pass adds to what has overflowed")


def _expect_skipped(seen: Seen, before: Seen) -> None:
    same = all(map(torch.equal, seen.weights, before.weights))
    expect(same, seen="the gradient was not finite, but the weights have changed",
           likely="do not call optimizer.step(): even with zero gradients, momentum and weight "
                  "decay still move the weights")
    remembers = len(seen.state) == len(before.state) and \
        all(map(torch.equal, seen.state, before.state))
    expect(remembers, seen="the weights have not changed, but the optimizer state "
           "has", likely="skip optimizer.step() itself: if you restore the weights, or set the "
           "gradient to zeros, its moments have still changed")


def _expect_moved(
    seen: Seen, before: Seen, name: str, settings: Settings, number: int
) -> None:
    def same_as(*factor) -> bool:
        other = simulate(name, settings, number + 1, *factor)
        return all(is_close(*pair, CLOSE)
                   for pair in zip(seen.weights, other.weights, strict=True))

    if same_as():
        return
    faults = {
        "each parameter group is clipped by its own norm: max_norm is for the norm of all "
        "parameters together": lambda norms, scale: map(clip, norms),
        "the second parameter group is neither divided by the scale nor clipped: go through all "
        "of optimizer.param_groups": lambda norms, scale: [clip(norms[0]), scale],
        "its norm always becomes max_norm: either the gradient is not divided by the scale before "
        "clipping, or it is multiplied even if the norm is below max_norm":
            lambda norms, scale: [MAX_NORM / (math.hypot(*norms) or MAX_NORM)] * 2,
        "clipped first, divided by the scale afterwards: max_norm is for the true gradient":
            lambda norms, scale: [clip(math.hypot(*norms) * scale)] * 2,
        "the gradient is not clipped": lambda norms, scale: [1.0] * 2,
        "neither divided by the scale nor clipped": lambda norms, scale: [scale] * 2,
    }
    likely = next((why for why, factors in faults.items() if same_as(factors)),
                  "divide by the self.value that the loss had, then clip the norm of all "
                  "parameters together, then step")
    if all(map(torch.equal, seen.weights, before.weights)):
        likely = "the gradient was finite, and there was no step; None and zero are no overflow, " \
                 "and a large one is clipped"
    shown = ", ".join(map(_list, seen.weights[:2]))
    right = ", ".join(map(_list, simulate(name, settings, number + 1).weights[:2]))
    expect(False, seen=f"the weights a, b are {shown}, not {right}", likely=likely)


def _why_other_value(value: float, before: float, settings: Settings, number: int) -> str:
    events = history(settings, number + 1)
    if events[-1] == "skipped":
        return "after an overflow, multiply it by backoff, even if the scale then falls below 1"
    if value == before:
        return "after `interval` consecutive good steps, including clipped ones, it is " \
               "multiplied by growth: in the last of them, not in the next one. There is no " \
               "upper limit"
    if events[-1] == "grown" or value != before * settings.growth:
        return "multiply by self.growth, once, after the last of `interval` good steps; there is " \
               "no upper limit"
    changes = [event for event in events if event != "fine"]
    return {
        "skipped": "count consecutive good steps: a skipped step resets the count to 0",
        "grown": "after growth, the count starts again at 0",
    }.get(changes[-1] if changes else "", "it grows after `interval` good steps, not before")


def history(settings: Settings, num_steps: int) -> list[str]:
    """What each step of the script is: fine, skipped, or one after which the value has grown."""
    events, good = [], 0
    for step in STEPS[:num_steps]:
        values = [x for numbers in SCRIPT[step].values() if numbers for x in numbers]
        good = good + 1 if all(map(math.isfinite, values)) else 0
        grown = good == settings.interval
        events.append("skipped" if not good else "grown" if grown else "fine")
        good = 0 if grown else good
    return events
