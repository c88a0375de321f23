"""Linear layers that multiply 8-bit floats, at up to twice the speed of 16 bits on GPUs with FP8.

Idea: e4m3 has 3 mantissa bits and ends at 448, e5m2 has 2 and ends at 57344. To make a tensor fit,
divide it by one scale, which maps its largest value to the largest number of the dtype. Weights and
inputs use e4m3; gradients, whose magnitudes vary more, use e5m2. Matmuls accumulate in float32.

Only the operands of matmuls have 8 bits. Parameters, gradients and the activations passed between
layers keep their dtype, so this saves time but no memory. Where the device has no FP8 matmul it is
emulated: operands are rounded to 8 bits and multiplied in their original dtype, which shows the
numerics but not the speed.

Read in this order: quantize, multiply, Float8Matmuls, apply_float8.

Reference: Micikevicius et al. 2022, "FP8 Formats for Deep Learning" (sections 2 and 3).
"""

import torch
from torch import Tensor, nn

from minitron.model.linear import Matmuls, set_all_linear_hooks
from minitron.pytorch.private import multiply_float8

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
MULTIPLE = 16  # the hardware needs every dimension to be a multiple of this


def quantize(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Round x to `dtype` with one scale; returns (values, scale), where x is about values * scale.

    The scale, 0-d and float32, is max|x| divided by the largest number of `dtype`. It is 1 if x is
    all zeros or has no elements.
    """
    largest = x.abs().amax().float() if x.numel() > 0 else x.new_zeros((), dtype=torch.float32)
    limit = torch.finfo(dtype).max
    scale = torch.where(largest > 0, largest / limit, 1.0)
    # Rounding can push the quotient slightly past the limit. What a cast makes of it then (NaN or
    # the limit, since e4m3 has no infinity) depends on the device and the version: so clamp.
    return (x.float() / scale).clamp(-limit, limit).to(dtype), scale


def multiplies_float8(device: torch.device) -> bool:
    """Return whether `device` has FP8 matmuls: NVIDIA GPUs do since Ada and Hopper."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 9)


def multiply(a: Tensor, a_dtype: torch.dtype, b: Tensor, b_dtype: torch.dtype) -> Tensor:
    """Round a (n, k) and b (k, m) to 8 bits and multiply them; the product has a's dtype."""
    (a8, a_scale), (b8, b_scale) = quantize(a, a_dtype), quantize(b, b_dtype)
    if multiplies_float8(a.device) and all(size % MULTIPLE == 0 for size in (*a.shape, *b.shape)):
        columns = b8.T.contiguous().T  # the kernel wants a row-major and b column-major
        return multiply_float8(a8.contiguous(), columns, a_scale, b_scale, a.dtype)
    product = a8.to(a.dtype) @ b8.to(a.dtype)
    return (product.float() * (a_scale * b_scale)).to(a.dtype)


class Float8Matmuls(Matmuls):
    """Matmuls of 8-bit operands with one scale per tensor; the bias is added after scaling."""

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
    """Let the linear layers of `model` multiply in 8 bits; parameters and names do not change."""
    set_all_linear_hooks(model, matmuls=Float8Matmuls())
