"""Linear layers that multiply 8-bit floats: twice the speed of 16 bits, where the device has them.

Idea: e4m3 has 3 bits of mantissa and ends at 448, e5m2 has 2 and ends at 57344. A tensor fits
after a division by one scale, which maps its largest value to the largest that the dtype has.
Weights and inputs take e4m3; gradients, whose values are further apart, e5m2. Sums have 32 bits.

Only the operands of matmuls have 8 bits: parameters, gradients and what layers pass on keep their
dtype. So it saves time and not memory. Where the device has no such matmul it is emulated: the
numbers are rounded to 8 bits and multiplied as what they were before. That shows the numerics, not
the speed.

Read in this order: quantize, multiply, Float8Matmuls, apply_float8.

Reference: Micikevicius et al. 2022, "FP8 Formats for Deep Learning" (sections 2 and 3).
"""

import torch
from torch import Tensor, nn

from minitron.model.linear import Matmuls, customize_all
from minitron.pytorch.private import multiply_float8

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
MULTIPLE = 16  # of which the hardware wants every dimension


def quantize(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Round x to `dtype`; returns values and scale, 0-d and float32: x is about values * scale.

    The scale is max|x| over the largest number of `dtype`, and 1 for a tensor of zeros or of no
    elements.
    """
    largest = x.abs().amax().float() if x.numel() > 0 else x.new_zeros((), dtype=torch.float32)
    limit = torch.finfo(dtype).max
    scale = torch.where(largest > 0, largest / limit, 1.0)
    # The quotient may pass the limit by a rounding, and what a cast makes of that (NaN, or the
    # limit: e4m3 has no infinity) depends on device and version.
    return (x.float() / scale).clamp(-limit, limit).to(dtype), scale


def multiplies_float8(device: torch.device) -> bool:
    """Return whether `device` multiplies 8-bit floats itself: NVIDIA's from Ada and Hopper on."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 9)


def multiply(a: Tensor, a_dtype: torch.dtype, b: Tensor, b_dtype: torch.dtype) -> Tensor:
    """Multiply a (n, k) by b (k, m), each rounded to 8 bits first; the product has a's dtype."""
    (a8, a_scale), (b8, b_scale) = quantize(a, a_dtype), quantize(b, b_dtype)
    if multiplies_float8(a.device) and all(size % MULTIPLE == 0 for size in (*a.shape, *b.shape)):
        columns = b8.T.contiguous().T  # it reads rows of the first, columns of the second
        return multiply_float8(a8.contiguous(), columns, a_scale, b_scale, a.dtype)
    product = a8.to(a.dtype) @ b8.to(a.dtype)
    return (product.float() * (a_scale * b_scale)).to(a.dtype)


class Float8Matmuls(Matmuls):
    """Those with operands of 8 bits, one scale for each tensor; the bias is added afterwards."""

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        out = multiply(x.flatten(0, -2), E4M3, weight.T, E4M3).unflatten(0, x.shape[:-1])
        return out if bias is None else out + bias

    def grad_input(self, grad: Tensor, weight: Tensor) -> Tensor:
        return multiply(grad, E5M2, weight, E4M3)

    def add_grad_input(self, total: Tensor, grad: Tensor, weight: Tensor) -> None:
        total.add_(multiply(grad, E5M2, weight, E4M3))

    def grad_weight(self, grad: Tensor, x: Tensor) -> Tensor:
        return multiply(grad.T, E5M2, x, E4M3)


def apply_float8(model: nn.Module) -> None:
    """Let the linear layers of `model` multiply in 8 bits; their parameters and names stay."""
    customize_all(model, matmuls=Float8Matmuls())
