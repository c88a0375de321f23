"""What a float can hold, read off its bit patterns: counted up, and looked at as floats.

Read in this order: Layout, representable, rounded, exponents.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

FORMATS = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "e4m3": torch.float8_e4m3fn,
    "e5m2": torch.float8_e5m2,
}
PATTERN = {32: torch.int32, 16: torch.int16, 8: torch.uint8}
"""Integers as long as a float."""
MOST_VALUES = 2**20


@dataclass(frozen=True)
class Layout:
    """How a float's bits are divided, and the positive numbers that follow from it."""

    exponent: int
    mantissa: int
    smallest_subnormal: float
    smallest_normal: float
    largest: float

    def spacing(self, value: float) -> float:
        """From `value` to the next larger magnitude, were there no largest exponent."""
        magnitude = max(abs(value), self.smallest_normal)
        return 2.0 ** (math.frexp(magnitude)[1] - 1 - self.mantissa)

    def finest(self, spacing: float) -> float:
        """The magnitude below which numbers are closer than `spacing`, 0 if they never are."""
        if spacing <= self.smallest_subnormal:
            return 0.0
        return 2.0 ** (math.ceil(math.log2(spacing)) + self.mantissa)


def layout_of(dtype: torch.dtype) -> Layout:
    """Count the bits of `dtype`; one more is the sign."""
    info = torch.finfo(dtype)
    mantissa = -round(math.log2(info.eps))
    return Layout(info.bits - 1 - mantissa, mantissa, info.tiny * info.eps, info.tiny, info.max)


def representable(dtype: torch.dtype, low: float, high: float) -> Tensor:
    """Every number in [low, high] that `dtype` holds, ascending, float64.

    Patterns of positive floats, read as integers, have the order of the floats. Raises ValueError
    for more than 2**20 of them.
    """
    nearest = 0.0 if low <= 0 <= high else min(abs(low), abs(high))
    first, last = (_pattern(dtype, value) for value in (nearest, max(abs(low), abs(high))))
    if last - first >= MOST_VALUES:
        raise ValueError(
            f"{dtype} holds {last - first + 1:,} numbers between {nearest:g} and "
            f"{max(abs(low), abs(high)):g}, more than {MOST_VALUES:,}: choose a shorter piece"
        )
    patterns = torch.arange(first, last + 1).to(PATTERN[torch.finfo(dtype).bits])
    magnitudes = patterns.view(dtype).double()
    values = torch.cat([-magnitudes.flip(0), magnitudes]).unique() + 0.0  # -0.0 becomes 0.0
    return values[(low <= values) & (values <= high)]


def rounded(dtype: torch.dtype, value: float) -> float:
    """The number that `dtype` holds in place of `value`, its largest in place of infinity."""
    limit = torch.finfo(dtype).max
    return torch.tensor(max(-limit, min(limit, value)), dtype=torch.float64).to(dtype).item()


def overflows(dtype: torch.dtype, value: float) -> bool:
    """Whether `value` rounds beyond the largest number: to what depends on format and version."""
    layout = layout_of(dtype)
    halfway = layout.largest + layout.spacing(layout.largest) / 2
    is_odd = _pattern(dtype, layout.largest) % 2 == 1  # ties go to the even neighbor
    return abs(value) > halfway or (abs(value) == halfway and is_odd)


def _pattern(dtype: torch.dtype, value: float) -> int:
    held = torch.tensor(rounded(dtype, value), dtype=dtype)
    return held.view(PATTERN[held.dtype.itemsize * 8]).item()


def exponents(tensor: Tensor) -> tuple[dict[int, int], int]:
    """Count the values in [2^e, 2^(e+1)) for every exponent e that occurs, and the zeros apart.

    Raises ValueError if a value is not finite.
    """
    values = tensor.detach().double().flatten()
    if not values.isfinite().all():
        raise ValueError(f"{(~values.isfinite()).sum()} of {values.numel()} values are not finite")
    nonzero = values[values != 0]
    found, counts = (nonzero.frexp().exponent - 1).unique(return_counts=True)
    return dict(zip(found.tolist(), counts.tolist(), strict=True)), len(values) - len(nonzero)


def flushed(tensor: Tensor, dtype: torch.dtype) -> float:
    """The share of the values that are not zero, but become zero in `dtype`."""
    nonzero = tensor[tensor != 0]
    return (nonzero.to(dtype) == 0).double().mean().item() if nonzero.numel() else 0.0


def overflown(tensor: Tensor, dtype: torch.dtype) -> float:
    """The share of the values that are not zero, but infinite in `dtype`."""
    nonzero = tensor[tensor != 0]
    return nonzero.to(dtype).isinf().double().mean().item() if nonzero.numel() else 0.0


def say(value: float) -> str:
    """16777216 -> 16,777,216, 1 / 3 -> 0.333333333: nine digits tell all numbers of fp32 apart."""
    if value == round(value) and abs(value) < 1e9:
        return f"{value:,.0f}"
    return f"{value:.9g}"
