"""Linear layers that multiply 8-bit floats: twice the speed of 16 bits, where the device has them.

Idea: e4m3 has 3 bits of mantissa and ends at 448, e5m2 has 2 and ends at 57344. A tensor fits
after a division by one scale, which maps its largest value to the largest that the dtype has.
Weights and inputs take e4m3; gradients, whose values are further apart, e5m2. Sums have 32 bits.

Only the products have 8 bits: parameters, gradients and what layers pass on keep their dtype. So
it saves time and not memory. Where the device has no such product it is emulated: the numbers are
rounded to 8 bits and multiplied as what they were before. That shows the numerics, not the speed.

Read in this order: Products, quantise, multiply, Float8Products, apply_float8.

Reference: Micikevicius et al. 2022, "FP8 Formats for Deep Learning" (sections 2 and 3).
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from minitron.pytorch.private import multiply_float8

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
MULTIPLE = 16  # of which the hardware wants every dimension


class Products:
    """The three products of a linear layer: of x (..., D), weight (F, D), output's grad (n, F).

    Who cuts a layer, or puts a half of its backward pass off, computes them by itself.
    """

    @staticmethod
    def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """(..., F), differentiable."""
        return F.linear(x, weight, bias)

    @staticmethod
    def grad_input(grad: Tensor, weight: Tensor, total: Tensor | None = None) -> Tensor:
        """(n, D), added to `total` if there is one: layers that read the same x."""
        return grad @ weight if total is None else total.addmm_(grad, weight)

    @staticmethod
    def grad_weight(grad: Tensor, x: Tensor) -> Tensor:
        """(F, D), of x (n, D)."""
        return grad.T @ x


def quantise(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Round x to `dtype`; returns values and scale, 0-d and float32: x is about values * scale.

    The scale is max|x| over the largest number of `dtype`, and 1 for a tensor of zeros.
    """
    largest, limit = x.abs().amax().float(), torch.finfo(dtype).max
    scale = torch.where(largest > 0, largest / limit, 1.0)
    # The quotient may pass the limit by a rounding, and what a cast makes of that (NaN, or the
    # limit: e4m3 has no infinity) depends on device and version.
    return (x.float() / scale).clamp(-limit, limit).to(dtype), scale


def multiplies_float8(device: torch.device) -> bool:
    """Whether `device` multiplies 8-bit floats itself: NVIDIA's from Ada and Hopper on."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 9)


def multiply(a: Tensor, a_dtype: torch.dtype, b: Tensor, b_dtype: torch.dtype) -> Tensor:
    """a (n, k) times b (k, m), each rounded to 8 bits first; the product has a's dtype."""
    (a8, a_scale), (b8, b_scale) = quantise(a, a_dtype), quantise(b, b_dtype)
    if multiplies_float8(a.device) and all(size % MULTIPLE == 0 for size in (*a.shape, *b.shape)):
        columns = b8.T.contiguous().T  # it reads rows of the first, columns of the second
        return multiply_float8(a8.contiguous(), columns, a_scale, b_scale, a.dtype)
    product = a8.to(a.dtype) @ b8.to(a.dtype)
    return (product.float() * (a_scale * b_scale)).to(a.dtype)


class Float8Products(Products):
    """Those with operands of 8 bits, one scale for each tensor; the bias is added afterwards."""

    @staticmethod
    def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        out = Float8Product.apply(x, weight)
        return out if bias is None else out + bias

    @staticmethod
    def grad_input(grad: Tensor, weight: Tensor, total: Tensor | None = None) -> Tensor:
        product = multiply(grad, E5M2, weight, E4M3)
        return product if total is None else total.add_(product)

    @staticmethod
    def grad_weight(grad: Tensor, x: Tensor) -> Tensor:
        return multiply(grad.T, E5M2, x, E4M3)


class Float8Product(torch.autograd.Function):
    """x (..., D) and weight (F, D) to (..., F), in 8 bits forward and back."""

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return multiply(x.flatten(0, -2), E4M3, weight.T, E4M3).unflatten(0, x.shape[:-1])

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor):
        x, weight = ctx.saved_tensors
        rows, grad_x, grad_weight = grad.flatten(0, -2), None, None
        if ctx.needs_input_grad[0]:
            grad_x = Float8Products.grad_input(rows, weight).view_as(x)
        if ctx.needs_input_grad[1]:
            grad_weight = Float8Products.grad_weight(rows, x.flatten(0, -2))
        return grad_x, grad_weight


class Float8Linear(nn.Linear):
    """A linear layer that multiplies 8-bit floats."""

    def forward(self, x: Tensor) -> Tensor:
        return Float8Products.linear(x, self.weight, self.bias)


def apply_float8(model: nn.Module) -> None:
    """Let the linear layers of `model` multiply in 8 bits; their parameters and names stay."""
    for module in model.modules():
        if type(module) is nn.Linear:
            module.__class__ = Float8Linear  # it stays where it is, with its hooks
            module.products = Float8Products  # and this stays where it becomes another class


def products_of(layer: nn.Module) -> type[Products]:
    """In which products the layer multiplies: those it has been given, else PyTorch's."""
    return getattr(layer, "products", Products)
