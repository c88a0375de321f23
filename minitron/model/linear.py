"""Linear layers whose backward pass is written out, so that a technique can change a part of it.

Idea: a layer y = x W^T + b has three matmuls: y, the gradient of x, the gradient of W.
PyTorch computes the two gradients at once, in the dtype of the tensors, on one device. Training at
scale asks for something else in three places. Each is an argument here, and has a null case:

    matmuls    in which precision they are computed               Matmuls: in that of the tensors
    exchange   what ranks send each other at the layer's input    NoExchange: nothing
    deferral   when the gradient of W is computed                 NoDeferral: with that of x

Float8 gives the first, tensor and sequence parallelism the second, zero-bubble pipelines the third,
in any combination and order.

With a deferral the backward pass has two halves. I computes the gradients of x and b, for which
another stage may wait; W computes that of the weight, later. Until W a layer keeps what forward has
saved of x, and the gradient of y. If x was gathered and only this rank's part of it saved, it is
the part that waits, and W gathers x again instead of I: the same bytes sent, and no full x held in
between. In I the message that sums the gradient of x has no matmul to hide behind any more; in W
the next layer's x travels while this one's gradient is computed.

Read in this order: Matmuls, NoExchange, LinearFunction, WeightGradients, Deferral, and
set_linear_hooks.

Reference: Qi et al. 2023, "Zero Bubble Pipeline Parallelism" (section 2.1: I and W).
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable


class Matmuls:
    """The three matmuls of a linear layer: of x (..., D), weight (F, D), output's grad (n, F)."""

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Compute the output (..., F)."""
        return F.linear(x, weight, bias)

    def grad_input(self, grad: Tensor, weight: Tensor) -> Tensor:
        """Compute the gradient (n, D) of x."""
        return grad @ weight

    def add_grad_input(self, total: Tensor, grad: Tensor, weight: Tensor) -> None:
        """Add the gradient of x to `total` (n, D), that of another layer with the same x."""
        total.addmm_(grad, weight)

    def grad_weight(self, grad: Tensor, x: Tensor) -> Tensor:
        """Compute the gradient (F, D) of the weight, from x (n, D)."""
        return grad.T @ x


class NoExchange:
    """What happens at the input of layers on one device: nothing."""

    regathers = False
    """Whether a layer saves its part of the input alone, and gathers it again for W."""

    def start_gather(self, x: Tensor) -> Callable[[], Tensor]:
        """Start to fetch what the layers read; returns a function that waits for it."""
        return lambda: x

    def start_reduce(self, grad_partial: Tensor) -> Callable[[], Tensor]:
        """Start to reduce this rank's partial gradient of x; returns a function that waits."""
        return lambda: grad_partial


class LinearFunction(torch.autograd.Function):
    """Linear layers of one input x; `parameters` are weight, bias, weight, bias, ...

    One function for all of them, so that one message carries the sum of their input gradients. It
    travels while the gradients of the weights are computed.
    """

    @staticmethod
    def forward(ctx, parts: "LinearHooks", x: Tensor, *parameters: Tensor | None):
        weights, biases = parameters[::2], parameters[1::2]
        x_full = parts.exchange.start_gather(x)()
        ctx.parts, ctx.weights = parts, weights
        ctx.save_for_backward(x if parts.exchange.regathers else x_full, *weights)
        return tuple(
            parts.matmuls.linear(x_full, *pair) for pair in zip(weights, biases, strict=True)
        )

    @staticmethod
    @once_differentiable
    def backward(ctx, *grads: Tensor):
        parts, (x, *weights) = ctx.parts, ctx.saved_tensors
        needs_x, *needs = ctx.needs_input_grad[1:]
        rows = [grad.flatten(0, -2) for grad in grads]  # (B S, F/tp)
        second_half = WeightGradients(parts, x, rows, ctx.weights, needs[::2])
        is_deferred = any(needs[::2]) and parts.deferral.defers(second_half)
        if not is_deferred:
            second_half.start()

        wait_for_grad_x = skip
        if needs_x:
            grad_partial = input_gradient(parts.matmuls, rows, weights)
            grad_partial = grad_partial.unflatten(0, grads[0].shape[:-1])
            wait_for_grad_x = parts.exchange.start_reduce(grad_partial)
            del grad_partial

        grad_weights = [None] * len(rows) if is_deferred else second_half.compute()
        grad_biases = [
            grad.sum(0) if needed else None for grad, needed in zip(rows, needs[1::2], strict=True)
        ]
        pairs = zip(grad_weights, grad_biases, strict=True)
        return None, wait_for_grad_x(), *(grad for pair in pairs for grad in pair)


def input_gradient(matmuls: Matmuls, rows: list[Tensor], weights: list[Tensor]) -> Tensor:
    """Return the input's gradient (B S, D) for weights (F, D), from gradient rows (B S, F)."""
    weights = [weight.to(rows[0].dtype) for weight in weights]  # as autocast has done
    total = matmuls.grad_input(rows[0], weights[0])
    for grad, weight in zip(rows[1:], weights[1:], strict=True):
        matmuls.add_grad_input(total, grad, weight)
    return total


def skip() -> None:
    """Return None, for an input that needs no gradient."""


class WeightGradients:
    """The second half of a backward pass: the gradients of the weights that read one x.

    `x` is what the forward pass has saved of it; `needed` tells which weights train.
    """

    def __init__(
        self,
        parts: "LinearHooks",
        x: Tensor,
        rows: list[Tensor],
        weights: Sequence[Tensor],
        needed: Sequence[bool],
    ):
        self.parts, self.x, self.rows = parts, x, rows
        self.weights, self.needed = weights, needed
        self.wait_for_x: Callable[[], Tensor] = lambda: x

    def start(self) -> None:
        """Gather x, if only this rank's part of it was saved."""
        if self.parts.exchange.regathers and any(self.needed):
            self.wait_for_x = self.parts.exchange.start_gather(self.x)

    def compute(self) -> list[Tensor | None]:
        """Wait for x; returns a gradient (F, D) for each weight that needs one."""
        x_rows = self.wait_for_x().flatten(0, -2)  # (B S, D)
        del self.wait_for_x  # and its buffer
        return [
            self.parts.matmuls.grad_weight(grad, x_rows) if needed else None
            for grad, needed in zip(self.rows, self.needed, strict=True)
        ]

    @torch.no_grad()
    def accumulate(self) -> None:
        """Add the gradients to `.grad`, as autograd does: the weights' hooks hear of it."""
        for weight, grad in zip(self.weights, self.compute(), strict=True):
            if grad is not None:
                torch.autograd.backward(weight, grad.to(weight.dtype))


class NoDeferral:
    """The gradients of weights are computed in the backward pass that asks for them."""

    def defers(self, half: WeightGradients) -> bool:
        """Return whether `half` will be computed later."""
        return False

    @contextmanager
    def collecting(self) -> Iterator[list[WeightGradients]]:
        """Let backward passes defer gradients of weights; pass the list to `accumulate_all`."""
        yield []


class Deferral(NoDeferral):
    """Collects the gradients of weights that are to be computed later."""

    def __init__(self):
        self.is_collecting, self.later = False, []

    def defers(self, half: WeightGradients) -> bool:
        if self.is_collecting:
            self.later.append(half)
        return self.is_collecting

    @contextmanager
    def collecting(self) -> Iterator[list[WeightGradients]]:
        self.is_collecting, self.later = True, []
        try:
            yield self.later
        finally:
            self.is_collecting, self.later = False, []


def accumulate_all(later: list[WeightGradients]) -> None:
    """Compute deferred gradients in the order of the list, and free what each one keeps.

    While one is computed, the x of the next is gathered.
    """
    for first in later[:1]:
        first.start()
    while later:
        half = later.pop(0)
        for upcoming in later[:1]:
            upcoming.start()
        half.accumulate()


# Layers


@dataclass(frozen=True)
class LinearHooks:
    """What a layer has been given."""

    matmuls: Matmuls = Matmuls()
    exchange: NoExchange = NoExchange()
    deferral: NoDeferral = NoDeferral()

    def compute(self, x: Tensor, *parameters: Tensor | None) -> tuple[Tensor, ...]:
        """Return the outputs of layers with the `parameters` weight, bias, ... for x (B, S, D)."""
        if torch.is_autocast_enabled(x.device.type):  # which casts the weights itself
            x = x.to(torch.get_autocast_dtype(x.device.type))
        return LinearFunction.apply(self, x, *parameters)


class Linear(nn.Linear):
    """A linear layer with `parts` from `set_linear_hooks`."""

    def forward(self, x: Tensor) -> Tensor:
        return self.parts.compute(x, self.weight, self.bias)[0]


def set_linear_hooks(layer: nn.Linear, kind: type[Linear] = Linear, **parts) -> None:
    """Give a linear layer other `matmuls`, `exchange` or `deferral`; it keeps what it has else.

    The layer stays where it is, with its parameters, name and hooks; only its class changes, to
    `kind`, if it is none yet.
    """
    given = layer.parts if isinstance(layer, Linear) else LinearHooks()
    if not isinstance(layer, kind):
        layer.__class__ = kind
    layer.parts = replace(given, **parts)


def set_all_linear_hooks(model: nn.Module, **parts) -> None:
    """Give every linear layer of `model` the same."""
    for layer in model.modules():
        if isinstance(layer, nn.Linear):
            set_linear_hooks(layer, **parts)


def apply_deferred_weight_gradients(model: nn.Module) -> Deferral:
    """Let the linear layers of `model` defer weight gradients where a backward pass asks for it."""
    deferral = Deferral()
    set_all_linear_hooks(model, deferral=deferral)
    return deferral
