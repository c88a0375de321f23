"""Grader of 7.3: a loss whose logits are cut, against PyTorch's of whole ones."""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from minitron.measure.ledger import Call
from minitron.pytorch.private import DispatchMode, tensors_in
from teaching.graders import asked, expect
from teaching.graders.ch07_toy import (
    all_close,
    expect_close,
    in_words,
    random,
    scattered,
)
from teaching.graders.ranks import Wire, on_ranks, per_rank

B, S = 2, 5
IGNORED = -100
FACTOR = 0.25  # of the loss, before backward()


@dataclass(frozen=True)
class Case:
    how: str
    num_ids: int
    """V; 0: one for each rank."""
    dtype: torch.dtype = torch.float64
    scale: float = 1.0
    """The logits are about so large; the first ids' are positive, the last ids' negative."""
    counts: bool = True
    """Whether any target does."""

    @property
    def rounding(self) -> float:
        return 1e-12 if self.dtype == torch.float64 else 1e-4

    def data(self, size: int) -> tuple[Tensor, Tensor]:
        """Logits (B, S, V) and targets (B, S), two of them ignored."""
        num_ids = self.num_ids or max(size, 2)  # with one id every loss is 0, but for rounding
        logits = random(3, B, S, num_ids) + torch.linspace(1.5, -1.5, num_ids).double()
        targets = torch.linspace(0, num_ids - 1, B * S).round().long().view(B, S)
        targets[0, 1] = targets[1, 3] = IGNORED
        if not self.counts:
            targets.fill_(IGNORED)
        return (self.scale * logits).to(self.dtype), targets


CASES = [
    Case("V = 36, float64", 36),
    Case("V = 36, float32, logits up to some thousands", 36, torch.float32, 1500.0),
    Case("V = N, one column on each rank (two on a single one), float64", 0),
    Case("V = 12, float64, all targets ignored", 12, counts=False),
]


@dataclass(frozen=True)
class Seen:
    """What a rank has after the loss and its backward pass."""

    loss: object
    grad: Tensor | None
    shapes: set[tuple[int, ...]]
    """Of all tensors that were made."""
    forward: list[Call]
    backward: list[Call]
    changed: str = ""
    """Which of the arguments has other values than before."""


def grade_7_3(vocabulary_parallel_cross_entropy: Callable) -> None:
    """Compare loss, gradient, wire and the shapes of what is made, for four kinds of logits."""
    call = "vocabulary_parallel_cross_entropy(logits_shard, targets, group)"
    with asked(f"{call} and backward() on 1, 2, 3 and 4 ranks"):
        by_size = on_ranks(lose_all, vocabulary_parallel_cross_entropy)
    for index, case in enumerate(CASES):
        for size, by_rank in by_size.items():
            with asked(f"{call} on {size} ranks: {case.how}"):
                _expect_loss([mine[index] for mine in by_rank], case)


def lose_all(group, cross_entropy: Callable) -> list[Seen]:
    return [lose(group, cross_entropy, case) for case in CASES]


def lose(group, cross_entropy: Callable, case: Case) -> Seen:
    logits, targets = case.data(group.size())
    shard, mine = logits.chunk(group.size(), dim=-1)[group.rank()], targets.clone()
    logits_shard = scattered(shard).requires_grad_()
    with Wire({"all_reduce"}) as wire, Shapes() as made:
        loss = cross_entropy(logits_shard, mine, group)
        num_forward = len(wire.calls)
        if not isinstance(loss, Tensor) or loss.shape != ():
            return Seen(f"{loss!r:.60}", None, set(), wire.calls, [])
        (FACTOR * loss).backward()
    same = {"logits_shard": torch.equal(logits_shard.detach(), shard),
            "targets": torch.equal(mine, targets)}
    changed = " and ".join(name for name, is_same in same.items() if not is_same)
    return Seen(loss.detach().clone(), logits_shard.grad, made.shapes,
                wire.calls[:num_forward], wire.calls[num_forward:], changed)


class Shapes(DispatchMode):
    """Note the shape of every tensor that is made in the block."""

    def __init__(self):
        super().__init__()
        self.shapes: set[tuple[int, ...]] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        outputs = func(*args, **(kwargs or {}))
        self.shapes |= {tuple(tensor.shape) for tensor in tensors_in(outputs)}
        return outputs


def _expect_loss(seen: list[Seen], case: Case) -> None:
    size = len(seen)
    expect(all(isinstance(mine.loss, Tensor) for mine in seen),
           seen=per_rank([f"it returned {mine.loss}" if isinstance(mine.loss, str) else
                          "it returned a tensor of shape ()" for mine in seen]),
           likely="return one number, a tensor of shape (): the sum over all targets that are not "
                  "ignored")
    expect(not any(mine.changed for mine in seen),
           seen=per_rank([f"{mine.changed or 'nothing'} has other values than before"
                          for mine in seen]),
           likely="an in-place operation, such as logits_shard.data -= m or targets[...] = 0: the "
                  "caller still needs both tensors")
    logits, targets = case.data(size)
    if size > 1:
        _expect_no_more_columns(seen, logits.shape[-1])
        _expect_few_values(seen)

    whole = logits.double().requires_grad_()
    right = F.cross_entropy(
        whole.flatten(0, 1), targets.flatten(), reduction="sum", ignore_index=IGNORED)
    (FACTOR * right).backward()
    losses = [mine.loss for mine in seen]
    finite = [bool(loss.isfinite()) for loss in losses]
    expect(all(finite), seen=per_rank([f"the loss is {float(loss)}" for loss in losses])
           + f"; right is {float(right.detach()):.6g}",
           likely="exp overflows from 89 on in float32, from 710 on in float64: subtract the "
                  "largest logit first. And if all targets are ignored the sum is 0, not 0/0")
    expect_close("the loss", losses, [right.detach()] * size,
                 wrong_losses(logits.double(), targets, size),
                 _why_other_loss(losses), case.rounding)
    _expect_gradient([mine.grad for mine in seen], whole, targets, case)


def _expect_no_more_columns(seen: list[Seen], num_ids: int) -> None:
    whole = [[shape for shape in sorted(mine.shapes) if math.prod(shape) >= B * S * num_ids
              and {num_ids, B * S * num_ids} & set(shape)] for mine in seen if num_ids > len(seen)]
    expect(not any(whole), seen=per_rank([f"tensors of shape {', '.join(map(str, shapes)) or '-'} "
                                          "are made" for shapes in whole])
           + f", where V is {num_ids} and a rank has {num_ids // len(seen)} columns",
           likely="every rank holds the full vocabulary again: look for the target among the "
                  "rank's own columns, and send numbers, not columns")


def _expect_few_values(seen: list[Seen]) -> None:
    num_values = [sum(call.payload // call.dtype.itemsize for call in mine.forward)
                  for mine in seen]
    expect(all(n <= 3 * B * S for n in num_values),
           seen=per_rank([f"forward: {in_words(mine.forward)} is sent, {n} values"
                          for mine, n in zip(seen, num_values, strict=True)])
           + f"; {B} x {S} targets need {3 * B * S}",
           likely="send three numbers per target: the largest logit, the sum of exps, and the "
                  "target's logit")
    expect(not any(mine.backward for mine in seen),
           seen=per_rank([f"backward: {in_words(mine.backward)} is sent" for mine in seen])
           + "; right is nothing",
           likely="the gradient of the loss is the same on all ranks: pass it through, as "
                  "all_reduce of minitron.comm.differentiable does; another sum makes it N times "
                  "too large")


def _why_other_loss(losses: list[Tensor]) -> str:
    if not all_close(losses, losses[:1] * len(losses), 1e-4):
        return "the ranks have different losses: each rank has the sum of exps and the target's " \
               "logit of its own columns only; sum both over the ranks"
    return "log(sum of exp(logit - m)) - (own logit - m), summed over the targets that are not " \
           "ignored; the own logit comes from the rank that has the target, and the other ranks " \
           "add 0"


def wrong_losses(
    logits: Tensor, targets: Tensor, size: int
) -> Iterator[tuple[str, list[Tensor]]]:
    """What is likely, and what each rank's loss would be then; all alike."""
    counts, largest = targets != IGNORED, logits.amax(-1)
    shifted = logits - largest[..., None]
    log_sum = shifted.exp().sum(-1).log()
    own = shifted.gather(-1, targets.clamp(min=0)[..., None]).squeeze(-1)
    right = (log_sum - own)[counts].sum()

    yield "that is the mean: return the sum", [right / counts.sum()] * size
    yield f"that is the loss {size} times", [size * right] * size
    for added in (log_sum, log_sum + largest, log_sum - own):
        yield ("an ignored target contributes nothing: leave out its log(sum) too",
               [right + added[~counts].sum()] * size)
    for sign in (-1, 1):
        yield ("shift both by the same m, or neither",
               [right + sign * largest[counts].sum()] * size)

    shards = shifted.chunk(size, dim=-1)
    for clamped in (True, False):
        known = sum(other_logits(shards, targets, clamped))
        yield ("a rank that does not have the target adds another id's logit: let it add 0",
               [(log_sum - known)[counts].sum()] * size)
    tops = [shard.amax(-1) for shard in shards]
    sums = sum((shard - top[..., None]).exp().sum(-1)
               for shard, top in zip(shards, tops, strict=True))
    owner = targets.clamp(min=0) // shards[0].shape[-1]
    own_top = torch.stack(tops).gather(0, owner[None]).squeeze(0)
    for known in (own, own - own_top):
        yield ("each rank subtracts its own largest logit: m must be the largest over all ranks",
               [(sums.log() - known)[counts].sum()] * size)


def other_logits(shards: tuple[Tensor, ...], targets: Tensor, clamped: bool) -> Iterator[Tensor]:
    """What each rank adds if it takes some column of its own, whether it has the target or not."""
    num_columns = shards[0].shape[-1]
    for rank, shard in enumerate(shards):
        column = targets - rank * num_columns
        column = column.clamp(0, num_columns - 1) if clamped else column % num_columns
        yield shard.gather(-1, column[..., None]).squeeze(-1)


def _expect_gradient(grads: list, whole: Tensor, targets: Tensor, case: Case) -> None:
    size = len(grads)
    right = whole.grad.chunk(size, dim=-1)
    softmax = whole.detach().softmax(-1)
    counts = (targets != IGNORED)[..., None]
    faults = {
        f"that is {size} times the gradient": size * whole.grad,
        f"that is 1/{size} of the gradient": whole.grad / size,
        "the loss was multiplied by a number before backward(): multiply by the gradient that "
        "comes in": whole.grad / FACTOR,
        "that is only the softmax: subtract 1 at the target": FACTOR * softmax * counts,
        "ignored targets have a gradient": whole.grad + FACTOR * softmax * ~counts,
    }
    likely = "softmax of all columns, less 1 at the target, for the columns of this rank; zeros " \
             "for an ignored target"
    if _only_at_the_largest(grads, right):
        likely = "it is wrong where this rank's logits are the largest: m is a constant: take " \
                 "the maximum of logits_shard.detach()"
    expect_close("logits_shard.grad", grads, list(right),
                 [(why, list(wrong.chunk(size, -1))) for why, wrong in faults.items()],
                 likely, case.rounding)


def _only_at_the_largest(grads: list, right: tuple[Tensor, ...]) -> bool:
    """Whether in each row of every rank's gradient one entry at most is wrong."""
    if not all(isinstance(grad, Tensor) and grad.shape == r.shape
               for grad, r in zip(grads, right, strict=True)) or right[0].shape[-1] < 2:
        return False
    wrong = [(grad - r).abs() > 1e-4 for grad, r in zip(grads, right, strict=True)]
    return all(bool((w.sum(-1) <= 1).all()) for w in wrong) and any(bool(w.any()) for w in wrong)
