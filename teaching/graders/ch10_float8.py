"""Grader of 10.5: scales and values against float64, on one process, then a tensor that is cut."""

from collections.abc import Callable
from functools import cache
from itertools import product
from typing import NamedTuple

import torch
from torch import Tensor

from minitron.measure.ledger import Call
from minitron.pytorch.private import DispatchMode, convert_op
from teaching.graders import Mistake, apart, asked, expect
from teaching.graders.arguments import copy_of
from teaching.graders.ch06_toy import ShardWire
from teaching.graders.ch07_toy import in_words
from teaching.graders.numbers import a_not_b
from teaching.graders.ranks import on_ranks, per_rank

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
CLOSE = 1e-5
STUCK = "every rank must make the same call, even if its shard is all zeros"
NUMBER = 4  # bytes of a float32
IN_PLACE = "the caller still needs x. If x is float32, x.float() is x itself, and /= or clamp_ " \
           "change what was passed in"


class Answer(NamedTuple):
    values: Tensor
    scale: Tensor
    dtype: torch.dtype
    """Of the values, which travel between processes as float32."""
    converted: float = 0.0
    """The largest |quotient| that was converted to 8 bits."""


class Conversions(DispatchMode):
    """Sees the largest |value| that is converted to 8 bits."""

    def __init__(self):
        super().__init__()
        self.largest = 0.0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if func in CONVERTS and out.dtype in (E4M3, E5M2):
            source = args[CONVERTS[func]]
            self.largest = max(self.largest, float(source.double().abs().max()))
        return out


CONVERTS = {convert_op: 0, torch.ops.aten.copy_.default: 1}
"""Which argument an operator converts."""


def grade_10_5(quantize: Callable, quantize_shard: Callable) -> None:
    """Quantize whole tensors of three dtypes, then shards of one on 1 to 4 ranks."""
    for name, x in tensors().items():
        for dtype in (E4M3, E5M2):
            with asked(f"quantize({name}, {dtype})"):
                _expect_quantized(_call(quantize, x, dtype), x, dtype)
    for odd, dtype in product((torch.inf, -torch.inf, torch.nan), (E4M3, E5M2)):
        with asked(f"quantize([1, {odd}, 2], {dtype})"):
            answer = _call(quantize, torch.tensor([1.0, odd, 2.0]), dtype)
            values = answer.values * answer.scale
            expect(not values.isfinite().all(), seen=f"values * scale is {values.tolist()} for "
                   f"[1, {odd}, 2]", likely="an overflow must be seen: the loss scale, and anyone "
                   "who debugs the run, depend on it")

    names = list(shards(1))
    with asked(f"quantize_shard of {len(names)} tensors, cut over 1, 2, 3 and 4 ranks; some shards "
               "are all zeros"):
        by_size = on_ranks(try_all, quantize_shard, stuck=STUCK)
    for size, by_rank in by_size.items():
        for number, name in enumerate(names):
            for dtype in (E4M3, E5M2):
                with asked(f"quantize_shard of {name}, {dtype}, on {size} ranks"):
                    _expect_agreed([mine[number, dtype] for mine in by_rank],
                                   shards(size)[name], dtype)


def _call(quantize: Callable, x: Tensor, dtype: torch.dtype) -> Answer:
    answer, after, converted = apart(watch, quantize, x, dtype)
    changed = difference(after, x)
    expect(changed == "", seen=f"x has changed: {changed}", likely=IN_PLACE)
    return _answer(answer)._replace(converted=converted)


def watch(quantize: Callable, x: Tensor, dtype: torch.dtype) -> tuple:
    """What is returned, what x is then, and the largest quotient that was converted."""
    mine = copy_of(x)
    with Conversions() as conversions:
        answer = quantize(mine, dtype)
    return answer, mine, conversions.largest


def difference(seen: Tensor, before: Tensor) -> str:
    """Such as "[0, 2] is 3, and was 1": the first element that has another value."""
    changed = (seen != before) & ~(seen.isnan() & before.isnan())
    if not changed.any():
        return ""
    place = changed.nonzero()[0].tolist()
    return f"{place} is {seen[*place]:.6g}, and was {before[*place]:.6g}"


@cache
def tensors() -> dict[str, Tensor]:
    """Tensors by name: large, small, negative, of one value and of none but zero."""
    generator = torch.Generator().manual_seed(8)
    x = torch.randn(6, 16, generator=generator)
    return {
        "[-896, 2, 0]": torch.tensor([-896.0, 2.0, 0.0]),
        "a (6, 16) tensor, normal values": x,
        "normal values times 10^6": x * 1e6, "normal values times 10^-6": x * 1e-6,
        "values of which -900 is the largest": torch.cat([x, x.new_full((1, 16), -900.0)]),
        "rows of very different size": x * torch.logspace(0, -3, 6)[:, None],
        "[1, 69]": torch.tensor([1.0, 69.0]),  # 69 / (69 / 448) is more than 448
        "a (16, 6) tensor that is not contiguous": x.T,
        "bfloat16, normal values": x.bfloat16(),
        "float16, normal values times 10^-5": (x * 1e-5).half(),
        "float16, normal values times 10^4": (x * 1e4).half(),
        "one value, -3, of shape ()": torch.tensor(-3.0),
        "a (2, 3) tensor of zeros": torch.zeros(2, 3),
    }


def right_scale(x: Tensor, dtype: torch.dtype) -> float:
    return float(x.double().abs().max()) / torch.finfo(dtype).max or 1.0


def _answer(answer) -> Answer:
    pair = isinstance(answer, tuple) and len(answer) == 2 and \
        all(isinstance(part, Tensor) for part in answer)
    expect(pair, seen=f"it returned {answer!r:.80}", likely="two tensors: the values, and the "
           "scale, of shape ()")
    values, scale = answer
    return Answer(values.float(), scale, values.dtype)


def _expect_quantized(answer: Answer, x: Tensor, dtype: torch.dtype) -> None:
    _expect_kind(answer, x, dtype)
    right, seen = right_scale(x, dtype), float(answer.scale)
    if not _is_close(seen, right):
        raise Mistake(f"the scale is {a_not_b(seen, right, digits=6)}",
                      _why_other_scale(seen, right, x, dtype))
    _expect_values(answer, x, dtype)
    _expect_clamped(answer, dtype)


def _expect_kind(answer: Answer, x: Tensor, dtype: torch.dtype) -> None:
    values, scale, seen, _ = answer
    expect(scale.shape == (), seen=f"the scale has shape {tuple(scale.shape)}, not ()",
           likely="one scale for all of x, 0-d: x.abs().max()")
    expect(scale.dtype == torch.float32, seen=f"the scale is {scale.dtype}",
           likely="the scale must be float32: 16 bits are too coarse, or their range is too small")
    expect(seen == dtype, seen=f"the values are {seen}, not {dtype}",
           likely="convert the quotients to dtype, and return them like that: 1 byte each")
    expect(values.shape == x.shape, seen=f"the values have shape {tuple(values.shape)}, not "
           f"{tuple(x.shape)}", likely="every element of x has its value, in its place")


def _is_close(seen: float, right: float) -> bool:
    return abs(seen - right) <= CLOSE * right


def _why_other_scale(seen: float, right: float, x: Tensor, dtype: torch.dtype) -> str:
    largest, limit = float(x.double().abs().max()), torch.finfo(dtype).max
    if largest == 0:
        return "all of x is zero: there is nothing to scale, and 0 / 0 is NaN. The scale is 1"
    faults = {
        "that is the inverse: x is values * scale, so the scale is large for a large x": 1 / right,
        "the largest of the absolute values: a negative one counts as well":
            float(x.double().max()) / limit,
        "each dtype has its own largest number: torch.finfo(dtype).max":
            largest / torch.finfo(E4M3 if dtype == E5M2 else E5M2).max,
        "values are x / scale, with a scale that depends on x": 1.0,
        "that is the largest |x|: divide it by the largest number of dtype": largest,
    }
    likely = next((why for why, value in faults.items() if _is_close(seen, value)),
                  "the largest |x| over torch.finfo(dtype).max")
    if x.dtype != torch.float32 and _is_close(seen, _scale_in(x, dtype)):
        likely = f"the scale was computed in {x.dtype}, which is too coarse: convert before you " \
                 "divide"
    return likely


def _scale_in(x: Tensor, dtype: torch.dtype) -> float:
    return float(x.abs().max() / torch.finfo(dtype).max)


def _expect_values(answer: Answer, x: Tensor, dtype: torch.dtype) -> None:
    right, scale, limit = x.double(), float(answer.scale), torch.finfo(dtype).max
    seen = answer.values.double() * scale
    nearest = (right / scale).clamp(-limit, limit).float().to(dtype).double() * scale
    most = (nearest - right).abs() + CLOSE * right.abs()  # of two that are as near, either
    wrong = ~((seen - right).abs() <= most)  # NaN compares false
    if not wrong.any():
        return
    place = int(wrong.flatten().nonzero()[0])
    value, wanted, best = (float(t.flatten()[place]) for t in (seen, right, nearest))
    rounded = (right / scale).round().to(dtype).double() * scale
    coarse = (x / scale).to(dtype).double() * scale  # in x's own dtype
    likely = "values are x / scale, divided in float32, then converted"
    if not seen.isfinite().all():
        likely = "a quotient is beyond the largest number, or is 0 / 0: clamp, and take 1 as the " \
                 "scale of zeros"
    elif torch.equal(seen, rounded):
        likely = "no rounding of your own: the conversion to dtype rounds, in steps below 1 for " \
                 "small numbers"
    elif x.dtype != torch.float32 and torch.equal(seen, coarse):
        likely = f"divided in {x.dtype}, and so rounded twice: x.float() first"
    raise Mistake(f"values * scale is {value:.7g} where x is {wanted:.7g}; the nearest in {dtype} "
                  f"is {best:.7g}", likely)


def _expect_clamped(answer: Answer, dtype: torch.dtype) -> None:
    limit = torch.finfo(dtype).max
    expect(answer.converted <= limit, seen=f"a quotient of {answer.converted:.9g} was converted to "
           f"{dtype}, whose largest number is {limit:g}", likely="clamp the quotients: what a "
           "conversion makes of one that is too large depends on device and version")


# A tensor that is cut


def try_all(group, quantize_shard) -> dict[tuple, tuple[Answer, list[Call], str]]:
    evidence = {}
    for number, mine in enumerate(shards(group.size()).values()):
        for dtype in (E4M3, E5M2):
            shard = copy_of(mine[group.rank()])
            with ShardWire(allowed={"all_reduce"}) as wire, Conversions() as conversions:
                answer = quantize_shard(shard, dtype, group)
            try:
                seen = _answer(answer)._replace(converted=conversions.largest)
                changed = difference(shard, mine[group.rank()])
                evidence[number, dtype] = seen, wire.calls, changed
            except Mistake as mistake:
                raise TypeError(f"{mistake.seen}; {mistake.likely}") from None
    return evidence


@cache
def shards(num_ranks: int) -> dict[str, list[Tensor]]:
    """Cut tensors by name: the largest |x| on rank 0, on the last rank, and zeros on some."""
    generator = torch.Generator().manual_seed(80)
    whole = [torch.randn(2 + rank, 5, generator=generator) for rank in range(num_ranks)]
    first, last, some = ([part.clone() for part in whole] for _ in range(3))
    first[0][0, 0], last[-1][1, 1] = -900.0, 4997.0  # over a 448th of it: more than 448
    some = [1e-6 * part if rank % 2 == 0 else torch.zeros_like(part)
            for rank, part in enumerate(some)]
    return {
        "a tensor whose largest |x|, -900, is on rank 0": first,
        "one whose largest, 4997, is on the last rank": last,
        "one with small values, of which odd ranks have zeros": some,
        "one of bfloat16": [part.bfloat16() for part in first],
        "one whose shards are not contiguous": [part.T for part in first],
        "one of zeros": [torch.zeros_like(part) for part in whole],
    }


def _expect_agreed(
    seen: list[tuple[Answer, list[Call], str]], x: list[Tensor], dtype: torch.dtype
) -> None:
    answers, calls, changed = zip(*seen, strict=True)
    expect(not any(changed), seen=per_rank([f"the shard has changed: {text}" if text else
                                            "unchanged" for text in changed]), likely=IN_PLACE)
    for answer, mine in zip(answers, x, strict=True):
        _expect_kind(answer, mine, dtype)
    whole = torch.cat([mine.flatten() for mine in x])
    right = right_scale(whole, dtype)
    scales = [float(answer.scale) for answer in answers]
    if not all(_is_close(scale, right) for scale in scales):
        raise Mistake(per_rank([f"scale {scale:.8g}" for scale in scales])
                      + f"; correct is {right:.8g}", _why_not_agreed(scales, whole, x, dtype))

    once = [len(mine) == 1 and mine[0].payload == NUMBER for mine in calls]
    expect(all(once), seen=per_rank([in_words(mine) for mine in calls])
           + f"; correct is one all_reduce of {NUMBER} bytes", likely=STUCK if not all(calls) else
           "send the largest value, as one float32, not the tensor")
    for answer, mine in zip(answers, x, strict=True):
        _expect_values(answer, mine, dtype)
        _expect_clamped(answer, dtype)


def _why_not_agreed(
    scales: list[float], whole: Tensor, x: list[Tensor], dtype: torch.dtype
) -> str:
    if len(x) == 1 or not whole.any():
        return _why_other_scale(scales[0], right_scale(whole, dtype), whole, dtype)
    own = [right_scale(mine, dtype) for mine in x]
    largest = [float(mine.double().abs().max()) for mine in x]
    if all(map(_is_close, scales, own)):
        return "each rank has used its own shard's scale: the products of shards are added up, " \
               "so all need that of the full tensor"
    if _is_close(scales[0], sum(largest) / torch.finfo(dtype).max):
        return "the ranks' values were added up: take the largest, with dist.ReduceOp.MAX"
    if _is_close(scales[0], max(own)):
        return "agree on the largest value, not on the scale: that is 1 for a shard of zeros, " \
               "and can be larger than all others"
    return _why_other_scale(scales[0], right_scale(whole, dtype), whole, dtype)
