"""Grader of 10.1: gradients with known edges, judged by thresholds and not by a conversion."""

import math
from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor

from teaching.graders import Mistake, asked
from teaching.graders.arguments import call_unchanged
from teaching.graders.numbers import ROUNDED, a_not_b, apart, is_rounded

Gradients = dict[str, Tensor]

HALF_SMALLEST = 2.0**-25
"""What is not larger rounds to zero: halfway to 2^-24, the even one of the two is 0."""
SMALLEST_NORMAL = 2.0**-14
LARGEST = 65504.0
TOO_LARGE = 65520.0
"""From halfway between 65504 and 65536 on a number becomes infinite."""
NO_LIMIT = 2.0**126


def gradients(**values: list[float] | float) -> Gradients:
    return {name: torch.tensor(numbers, dtype=torch.float32) for name, numbers in values.items()}


ABOVE = HALF_SMALLEST * (1 + 2.0**-20)
EXAMPLE = gradients(w=[2.0**-30, 2.0**-24, 0.0], b=[1.0, -1.0])
SHARES = {
    "the docstring's example": (EXAMPLE, 1.0),
    "w = [2^-30, -2^-30, 1, -1]": (gradients(w=[2.0**-30, -2.0**-30, 1, -1]), 1.0),
    "w = [2^-26, 2^-16, 2^-20, 2^-24]": (gradients(w=[2**-26, 2**-16, 2**-20, 2**-24]), 1.0),
    "w = [2^-30, 1.2 * 2^-25, 1, 1]": (gradients(w=[2**-30, 1.2 * 2**-25, 1, 1]), 1.0),
    "w = [2^-25, a little more than 2^-25]": (gradients(w=[HALF_SMALLEST, ABOVE]), 1.0),
    "w = [2^-30, 0, 0, 1]": (gradients(w=[2.0**-30, 0, 0, 1]), 1.0),
    "w = [2^-30], b = [1, 1, 1]": (gradients(w=[2.0**-30], b=[1, 1, 1]), 1.0),
    "the docstring's example, with scale 64": (EXAMPLE, 64.0),
    "w = [2^-30, 1, 1, inf, -inf, NaN]":
        (gradients(w=[2.0**-30, 1, 1, math.inf, -math.inf, math.nan]), 1.0),
    "w = [2^-45, 2, 3, 4] with scale 65536, where three overflow":
        (gradients(w=[2.0**-45, 2, 3, 4]), 65536.0),
    "zeros alone, and a tensor without elements": (gradients(w=[0.0, -0.0], b=[]), 1.0),
    "w = 2^-30, of shape (), and b = [1, 1]": (gradients(w=2.0**-30, b=[1, 1]), 1.0),
}
SCALES = {
    "the docstring's example, max_share=0.3": (EXAMPLE, 0.3),
    "the docstring's example, max_share=0.1": (EXAMPLE, 0.1),
    "the docstring's example, max_share=0.25": (EXAMPLE, 0.25),
    "w = [2^-30, 2^-24, 0], b = [2000, -1], max_share=0.1":
        (gradients(w=[2.0**-30, 2.0**-24, 0], b=[2000, -1]), 0.1),
    "w = [1, 70000], max_share=0.5": (gradients(w=[1, 70000]), 0.5),
    "w = [2^-26, 16379.5], max_share=0": (gradients(w=[2.0**-26, 16379.5]), 0.0),
    "w = [2^-26, 16380], max_share=0": (gradients(w=[2.0**-26, 16380]), 0.0),
    "w = [2^-30, -40000], max_share=0.1": (gradients(w=[2.0**-30, -40000]), 0.1),
    "w = [1, inf], max_share=0.5": (gradients(w=[1, math.inf]), 0.5),
    "w = [1, NaN], max_share=0.5": (gradients(w=[1, math.nan]), 0.5),
    "w = [2^-30, 2^-40, 2^-50, 2^-20], max_share=0.5":
        (gradients(w=[2.0**-30, 2.0**-40, 2.0**-50, 2.0**-20]), 0.5),
    "w = [2^-60], max_share=0": (gradients(w=[2.0**-60]), 0.0),
    "w = [2^-140], max_share=0": (gradients(w=[2.0**-140]), 0.0),
    "w = 2^-30, of shape (), max_share=0": (gradients(w=2.0**-30), 0.0),
    "one of 2000 values is 2^-26, the others are 1, max_share=0":
        (gradients(w=[2.0**-26, *[1.0] * 1999]), 0.0),
    "zeros alone, max_share=0": (gradients(w=[0.0, 0.0]), 0.0),
}


def grade_10_1(flushed_share: Callable, smallest_scale: Callable) -> None:
    """Ask for the share of gradients at every edge, then for scales that exist or do not."""
    for name, (given, scale) in {**SHARES, "3000 values, scale 1024": (many(), 1024.0)}.items():
        with asked(f"flushed_share of {name}"):
            seen = _number(_call(flushed_share, given, scale))
            _expect_share(seen, given, scale)
    for name, (given, most) in {**SCALES, "3000 values, max_share=0.01": (many(), 0.01)}.items():
        with asked(f"smallest_scale of {name}"):
            seen = _call(smallest_scale, given, most)
            _expect_scale(None if seen is None else _number(seen), given, most)


@cache
def many() -> Gradients:
    """Gradients of two layers whose sizes spread over many powers of two."""
    generator = torch.Generator().manual_seed(10)
    spread = torch.randn(3000, generator=generator) * 6 - 24
    values = torch.exp2(spread) * torch.randn(3000, generator=generator).sign()
    return {"w": values[:2900].view(29, 100).T, "b": values[2900:]}  # w is not contiguous


def _call(function: Callable, given: Gradients, number: float):
    return call_unchanged(
        function, given, number, names="gradients",
        likely="an operation in place, such as values *= scale: the caller needs them")


def _number(answer) -> float:
    try:
        return float(answer)
    except (TypeError, ValueError):
        raise Mistake(f"it returned {answer!r:.80}", "return one number, for all tensors "
                      "together") from None


def joined(given: Gradients) -> Tensor:
    return torch.cat([values.flatten() for values in given.values()]).double()


def right_share(given: Gradients, scale: float) -> float:
    values = joined(given)
    return _share(values[values != 0] * scale, HALF_SMALLEST)


def _share(values: Tensor, threshold: float) -> float:
    return float((values.abs() <= threshold).sum()) / max(len(values), 1)


def right_scale(given: Gradients, max_share: float) -> float | None:
    values, scale = joined(given), 1.0
    while (values * scale).abs().lt(TOO_LARGE).all() and scale < NO_LIMIT:
        if right_share(given, scale) <= max_share:
            return scale
        scale *= 2
    return None


def _expect_share(seen: float, given: Gradients, scale: float) -> None:
    right = right_share(given, scale)
    if not math.isclose(seen, right, rel_tol=1e-6, abs_tol=1e-12):
        raise Mistake(a_not_b(seen, right), _why_other_share(seen, right, given, scale))


def _why_other_share(seen: float, right: float, given: Gradients, scale: float) -> str:
    values = joined(given)
    scaled = values[values != 0] * scale
    each = [right_share({name: v}, scale) for name, v in given.items()]
    faults = {
        "if all values are zero there is nothing to divide by: return 0":
            math.nan if len(scaled) == 0 else -1,
        "that is a percentage": 100 * right,
        "that is a number of values: divide it by the number of nonzero values":
            right * len(scaled),
        "that is the share of values that are not flushed": 1 - right,
        "zeros do not count: they were zero before": right * len(scaled) / max(len(values), 1),
        "a zero is not flushed: it was zero before": _share(values * scale, HALF_SMALLEST),
        "a value below 2^-24 does not always become zero: it is rounded to the nearest number, "
        "which is 2^-24 for values above 2^-25": float((scaled.abs() < 2.0**-24).double().mean()),
        "a value below the smallest normal number, 2^-14, is not zero: there are 1023 subnormal "
        "numbers": float((scaled.abs() < SMALLEST_NORMAL).double().mean()),
        "2^-25 is halfway between 0 and 2^-24, and a tie is rounded to the even one: 0":
            float((scaled.abs() < HALF_SMALLEST).double().mean()),
        "a mean of the tensors' shares: a small tensor would count as much as a large one":
            sum(each) / len(each),
        "the scale does not count: multiply before the conversion, in float32": right_share(
            given, 1.0),
        "infinity and NaN are nonzero values, too, and they are not flushed":
            _share(scaled[scaled.abs() < math.inf], HALF_SMALLEST),
        "a value that is or becomes infinite or NaN is not flushed: it is not zero": right + float(
            (~(scaled.abs() < TOO_LARGE)).double().mean()),
        "a value that overflows is not zero, so it is not flushed":
            _share(scaled[scaled.abs() < TOO_LARGE], HALF_SMALLEST),
    }
    for why, value in faults.items():
        if math.isclose(seen, value, rel_tol=1e-6) or (math.isnan(seen) and math.isnan(value)):
            return why
    if is_rounded(seen, right):
        return ROUNDED
    return "count the values that are nonzero before and zero after, in all tensors, and divide " \
           "by the number that are nonzero before"


def _expect_scale(seen: float | None, given: Gradients, most: float) -> None:
    right = right_scale(given, most)
    if seen != right:
        raise Mistake(f"{_in_words(seen)}, not {_in_words(right)}",
                      _why_other_scale(seen, right, given, most))


def _in_words(scale: float | None) -> str:
    if scale is None or scale <= 0 or not math.isfinite(scale):
        return str(scale)
    power = math.log2(scale)
    return f"{scale:g}" if power < 10 or power % 1 else f"2^{power:.0f}"


def _why_other_scale(
    seen: float | None, right: float | None, given: Gradients, most: float
) -> str:
    values = joined(given)
    if seen is None:
        return _why_none(right, values)
    if right is not None and seen == math.log2(right):
        return "that is the exponent: return the power of two itself"
    if not math.isfinite(seen) or seen < 1 or math.log2(seen) % 1:
        return "return a power of two, at least 1: any other factor rounds the gradients"
    if not values.isfinite().all():
        return "a gradient is infinite or NaN already: no scale helps, the answer is None"
    largest = float(values.abs().max()) * seen
    if largest >= TOO_LARGE:
        return f"the largest one becomes {largest:g}, which is infinite in float16" + (
            ": then None" if right is None else "")
    share = right_share(given, seen)
    if share > most:
        seen_share, limit = apart(share, most, digits=3)
        return f"there {seen_share} of the gradients is flushed, where at most {limit} may be"
    if right_share(given, right) == most > 0:
        return "at most max_share may be flushed: a scale with exactly that share is good"
    return "a smaller one is good enough: begin with 1 and stop at the first good one"


def _why_none(right: float, values: Tensor) -> str:
    if not len(values[values != 0]):
        return "all gradients are zero: nothing is flushed, so 1 is good"
    if LARGEST < float(values.abs().max()) * right < TOO_LARGE:
        return "numbers a little larger than 65504 become 65504: infinity begins halfway to 65536"
    return "there is one: it may be far beyond 2^24, and a share of exactly max_share is good"
