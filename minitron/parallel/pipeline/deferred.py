"""Put the gradients of weights off: the backward pass of a linear layer in two halves.

A pipeline's stage before waits for the gradient of the input alone. So the backward pass computes
that, and leaves the product for the weight to be computed later, when the rank would be idle.

Reference: Qi et al. 2023, "Zero Bubble Pipeline Parallelism" (section 2.1).
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from minitron.model.float8 import Float8Linear, products_of


class Deferral:
    """Where the layers of a model leave what they put off; None: they put nothing off."""

    def __init__(self):
        self.later: list[Callable[[], None]] | None = None

    @contextmanager
    def collecting(self) -> Iterator[list[Callable[[], None]]]:
        """Let backward passes put weight gradients off; call what is in the list later."""
        self.later = []
        try:
            yield self.later
        finally:
            self.later = None


class DeferredLinear(nn.Linear):
    """A linear layer whose weight gradient may wait."""

    def forward(self, x: Tensor) -> Tensor:
        if torch.is_autocast_enabled(x.device.type):  # which casts the weight itself
            x = x.to(torch.get_autocast_dtype(x.device.type))
        return InTwoHalves.apply(self, x, self.weight, self.bias)


class InTwoHalves(torch.autograd.Function):
    @staticmethod
    def forward(ctx, layer: DeferredLinear, x: Tensor, weight: Tensor, bias: Tensor | None):
        ctx.layer = layer
        ctx.save_for_backward(x, weight)
        return products_of(layer).linear(x, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor):
        (x, weight), layer = ctx.saved_tensors, ctx.layer
        rows, x_rows = grad.flatten(0, -2), x.flatten(0, -2)
        grad_weight = grad_bias = None
        if ctx.needs_input_grad[2]:
            if layer.deferral.later is None:
                grad_weight = products_of(layer).grad_weight(rows, x_rows)
            else:
                layer.deferral.later.append(partial(add_gradient, layer, rows, x_rows))
        if ctx.needs_input_grad[3]:
            grad_bias = rows.sum(0)
        grad_x = products_of(layer).grad_input(rows, weight.to(grad.dtype)).view_as(x)
        return None, grad_x, grad_weight, grad_bias


@torch.no_grad()
def add_gradient(layer: nn.Linear, rows: Tensor, x_rows: Tensor) -> None:
    """The second half: rows (n, F) and x_rows (n, D) to a gradient (F, D), hooks included."""
    grad = products_of(layer).grad_weight(rows, x_rows)
    torch.autograd.backward(layer.weight, grad.to(layer.weight.dtype))


def apply_deferred_weight_gradients(model: nn.Module) -> Deferral:
    """Let the linear layers of `model` put weight gradients off where a backward pass asks it."""
    deferral = Deferral()
    for module in model.modules():
        if type(module) in (nn.Linear, Float8Linear):
            module.__class__ = DeferredLinear  # it stays where it is, with its hooks
            module.deferral = deferral
    return deferral
