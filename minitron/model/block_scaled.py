"""Formats whose values share a scale per block: MXFP8 and NVFP4, and linear layers that use them.

Idea: with one scale per tensor, a single outlier pushes every other value toward zero. Give each
block of consecutive values its own scale, and an outlier spoils only its own block.

    format   block   values            block scale                tensor scale   bits per value
    MXFP8    32      e4m3, up to 448   e8m0, a power of two       none           8 + 8/32 = 8.25
    NVFP4    16      e2m1, up to 6     e4m3, which ends at 448    float32        4 + 8/16 = 4.5

A matmul sums over blocks, so blocks run along the dimension that it sums over. NVIDIA's Blackwell
GPUs multiply both formats; here they are emulated: values are rounded, scaled back and multiplied
in the tensor's own dtype. That shows the numerics and saves neither bytes nor time.

Read in this order: BlockScaled, quantize_mxfp8, quantize_nvfp4, round_to_e2m1, BlockScaledMatmuls.

Reference: Rouhani et al. 2023, "Microscaling Data Formats for Deep Learning" (algorithm 1), and the
Open Compute Project's Microscaling Formats specification 1.0; NVIDIA 2025, "Pretraining Large
Language Models with NVFP4" (arXiv 2509.25149).
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn

from minitron.model.linear import Matmuls, set_all_linear_hooks

E4M3, E8M0 = torch.float8_e4m3fn, torch.float8_e8m0fnu
LARGEST_E4M3, LARGEST_E2M1 = 448.0, 6.0
MX_BLOCK, NV_BLOCK = 32, 16


class BlockScaled(NamedTuple):
    """A tensor as values and scales: the values of a block are multiplied by all their scales."""

    values: Tensor
    """(..., n): e4m3, or e2m1 numbers held in float32, since PyTorch packs two of them in a byte"""
    block_scales: Tensor
    """(..., n / block)"""
    tensor_scale: Tensor
    """0-d, float32"""

    def dequantize(self) -> Tensor:
        """Return the numbers (..., n) that are held, in float32."""
        blocks = self.values.float().unflatten(-1, (self.block_scales.shape[-1], -1))
        scales = self.block_scales.float() * self.tensor_scale
        return (blocks * scales[..., None]).flatten(-2)


def quantize_mxfp8(x: Tensor, round_scale_up: bool = False) -> BlockScaled:
    """Round x (..., n) to MXFP8, in blocks along its last dimension.

    A block's scale puts its largest value between 256 and 512, and what then lies beyond 448
    becomes 448, as the specification suggests. With `round_scale_up` the scale is the next power of
    two where that is needed to keep the largest value at or below 448 (Mishra et al. 2025,
    "Recipes for Pre-training LLMs with MXFP8", arXiv 2506.08027). A block with an infinity or a NaN
    becomes NaN. Raises ValueError unless 32 divides n.
    """
    blocks = in_blocks(x, MX_BLOCK)
    largest = blocks.abs().amax(-1)
    mantissa, exponent = largest.frexp()  # mantissa from 1/2 to 1; 448 is 7/8 of 2^9
    exponent = exponent - 9 + (mantissa > LARGEST_E4M3 / 2**9) * round_scale_up
    scales = torch.ldexp(torch.ones_like(largest), exponent.clamp(-127, 127))
    scales = scales.where(largest != 0, 1.0).where(largest.isfinite(), torch.nan)
    values = (blocks / scales[..., None]).clamp(-LARGEST_E4M3, LARGEST_E4M3).to(E4M3)
    return BlockScaled(values.flatten(-2), scales.to(E8M0), torch.ones((), device=x.device))


def quantize_nvfp4(x: Tensor) -> BlockScaled:
    """Round x (..., n) to NVFP4, in blocks along its last dimension.

    The tensor's scale lets block scales use all of e4m3's range, and a block's scale, rounded to
    e4m3, maps its largest value to about 6. A block that is small enough for its scale to round to
    0 becomes zeros. A tensor with an infinity or a NaN becomes NaN. Raises ValueError unless 16
    divides n.
    """
    blocks = in_blocks(x, NV_BLOCK)
    largest = blocks.abs().amax(-1)
    tensor_scale = largest.amax() / (LARGEST_E2M1 * LARGEST_E4M3)
    tensor_scale = tensor_scale.where(tensor_scale != 0, 1.0)
    block_scales = (largest / LARGEST_E2M1 / tensor_scale).clamp(max=LARGEST_E4M3).to(E4M3)
    scales = block_scales.float()[..., None] * tensor_scale
    values = round_to_e2m1(torch.where(scales == 0, 0.0, blocks / scales))
    return BlockScaled(values.flatten(-2), block_scales, tensor_scale)


def round_to_e2m1(x: Tensor) -> Tensor:
    """Round float32 to the nearest of 0, 0.5, 1, 1.5, 2, 3, 4, 6 and their negatives.

    Ties go to the even mantissa, and what lies beyond 6 becomes 6.
    """
    power = x.abs().clamp(1, LARGEST_E2M1).frexp().exponent - 1  # 0, 1 or 2
    step = torch.ldexp(torch.full_like(x, 0.5), power)
    return ((x / step).round() * step).clamp(-LARGEST_E2M1, LARGEST_E2M1)


def in_blocks(x: Tensor, size: int) -> Tensor:
    """Return x (..., n) in float32 as (..., n / size, size)."""
    if x.shape[-1] == 0 or x.shape[-1] % size:
        raise ValueError(
            f"the last dimension, {x.shape[-1]}, is not a positive multiple of the "
            f"block size, {size}: pad it with zeros"
        )
    return x.float().unflatten(-1, (-1, size))


class BlockScaledMatmuls(Matmuls):
    """Matmuls whose operands are rounded by `quantize`, in blocks along the summed dimension."""

    def __init__(self, quantize: Callable[[Tensor], BlockScaled]):
        self.quantize = quantize

    def multiply(self, a: Tensor, b_transposed: Tensor) -> Tensor:
        """Return a (n, k) times the transpose of b_transposed (m, k): (n, m), in a's dtype."""
        left, right = (self.quantize(x).dequantize().to(x.dtype) for x in (a, b_transposed))
        return left @ right.T

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        out = self.multiply(x.flatten(0, -2), weight).unflatten(0, x.shape[:-1])
        return out if bias is None else out + bias

    def grad_input(self, grad: Tensor, weight: Tensor) -> Tensor:
        return self.multiply(grad, weight.T)

    def add_grad_input(self, total: Tensor, grad: Tensor, weight: Tensor) -> None:
        total.add_(self.multiply(grad, weight.T))

    def grad_weight(self, grad: Tensor, x: Tensor) -> Tensor:
        return self.multiply(grad.T, x.T)


def apply_block_scaling(model: nn.Module, quantize: Callable[[Tensor], BlockScaled]) -> None:
    """Let the linear layers of `model` round the operands of their matmuls by `quantize`."""
    set_all_linear_hooks(model, matmuls=BlockScaledMatmuls(quantize))
