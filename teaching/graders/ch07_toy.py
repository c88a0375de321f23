"""What the graders of chapter 7 share: tensors compared rank by rank, calls in words."""

import re
from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from minitron.measure.ledger import Call
from teaching.graders import Mistake, expect
from teaching.graders.numbers import a_not_b
from teaching.graders.ranks import per_rank, relative_error

ROUNDING = 1e-12  # of the largest value, in float64
ELEMENT = 8  # bytes


def random(seed: int, *shape: int) -> Tensor:
    """Normal values in float64, the same wherever they are asked for."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def scattered(x: Tensor) -> Tensor:
    """The same values, not contiguous in memory."""
    return x.mT.contiguous().mT


def is_close(seen, right: Tensor, most: float = ROUNDING) -> bool:
    """Whether two tensors are equal but for rounding; zeros must be zeros."""
    if not isinstance(seen, Tensor) or seen.shape != right.shape:
        return False
    seen, right = seen.detach().double(), right.detach().double()
    return torch.equal(seen, right) or relative_error(seen, right) < most


def all_close(seen: list, right: list[Tensor], most: float = ROUNDING) -> bool:
    """Whether every rank has what is right for it."""
    return all(is_close(*pair, most) for pair in zip(seen, right, strict=True))


def expect_close(
    what: str, seen: list, right: list[Tensor], faults: Iterable[tuple[str, list[Tensor]]],
    likely: str, most: float = ROUNDING,
) -> None:
    """Expect of `what` on every rank what is right for it.

    `faults` are pairs: a cause, and what every rank would have then. `likely` if none of them fits.
    """
    same = [is_close(*pair, most) for pair in zip(seen, right, strict=True)]
    if all(same):
        return
    for why, wrong in faults:
        if all_close(seen, wrong, most):
            likely = why
            break
    texts = ["right" if ok else _difference(mine, expected, most)
             for ok, mine, expected in zip(same, seen, right, strict=True)]
    raise Mistake(f"{what} is wrong. {per_rank(texts)}", likely)


def expect_dtype(what: str, seen: list[torch.dtype], right: torch.dtype) -> None:
    """Expect of `what` on every rank the dtype of what came in."""
    expect(all(dtype == right for dtype in seen),
           seen=per_rank([f"{what} is {in_short(dtype)}" for dtype in seen])
           + f"; the input is {in_short(right)}",
           likely="keep the dtype: .double(), .float() or a new tensor without dtype= changes it, "
                  "and in training 16 bits would become 32 or 64, held and on the wire")


def in_short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _difference(seen, right: Tensor, most: float) -> str:
    """Such as "[0, 2] is 3, not 1": the first entry that is wrong."""
    if not isinstance(seen, Tensor):
        return f"{seen!r:.60}"
    if seen.shape != right.shape:
        return f"shape {tuple(seen.shape)}, not {tuple(right.shape)}"
    is_right = (seen - right).abs() <= most * right.abs().max()
    first = tuple((~is_right).nonzero()[0].tolist())
    place = f"{list(first)} is " if first else ""
    return place + a_not_b(float(seen[first]), float(right[first]))


def in_words(calls: list[Call]) -> str:
    """Such as "all_reduce of 96 bytes"."""
    return ", ".join(f"{call.op} of {call.payload} bytes" for call in calls) or "nothing"


def expect_calls(when: str, calls: list[list[Call]], right: list[int], likely: str) -> None:
    """Expect on every rank one all-reduce for each of `right`, bytes, in any order."""
    sent = [sorted(call.payload for call in mine) == sorted(right) for mine in calls]
    wanted = ", ".join(f"all_reduce of {n} bytes" for n in right) or "nothing"
    once = all(len(mine) == len(right) for mine in calls)
    if right and once and all(call.payload == 2 * right[0] for mine in calls for call in mine):
        likely = "as many values as are right, each of twice the bytes: " \
            f"{in_short(calls[0][0].dtype)} is sent. Keep the dtype of the input"
    expect(all(sent), seen=per_rank([f"{when} {in_words(mine)} is sent" for mine in calls])
           + f"; right is {wanted}", likely=likely)


def expect_little(
    seen: list[tuple[int, int]], whole: int, part: int, likely: str
) -> None:
    """Expect every rank to hold its `part`, bytes, and no more in any form.

    `seen`: on every rank the bytes of tensors, and those of other Python objects.
    """
    expect(all(tensors <= 1.1 * part for tensors, _ in seen),
           seen=per_rank([f"{tensors:,} bytes are alive; the full layer has {whole:,}, a rank's "
                          f"shard {part:,}" for tensors, _ in seen]), likely=likely)
    expect(all(objects <= 0.1 * part for _, objects in seen),
           seen=per_rank([f"besides its tensors {objects:,} bytes of NumPy arrays or other Python "
                          "objects are alive" for _, objects in seen]),
           likely="a copy in NumPy, bytes or a list takes memory too: a rank keeps only its shard, "
                  "as parameters")


def refusal(make: Callable[[], object]) -> tuple[str, str]:
    """The name and the message of what `make` raises."""
    try:
        make()
    except Exception as error:
        return type(error).__name__, str(error)
    return "no error", ""


def expect_refusal(refusals: list[tuple[str, str]], numbers: tuple[int, int]) -> None:
    """Expect of every rank a ValueError whose message has both numbers."""
    expect(all(name == "ValueError" for name, _ in refusals),
           seen=per_rank([f"{name} is raised" for name, _ in refusals]),
           likely=f"{numbers[0]} over {numbers[1]} ranks: raise a ValueError before splitting "
                  "anything. Unequal shards would fail later, somewhere else")
    both = [set(map(str, numbers)) <= set(re.findall(r"\d+", message)) for _, message in refusals]
    expect(all(both), seen=per_rank([f"the message is {message!r}" for _, message in refusals]),
           likely=f"the message must contain both numbers, {numbers[0]} and {numbers[1]}")
