"""A small model with every kind of parameter that can trip an answer up, and the right answers.

Each rank has rows of its own; one process computes what all of them should get.
"""

from dataclasses import dataclass
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from teaching.graders import expect
from teaching.graders.ranks import SIZES, Forbidden, factor, per_rank, relative_error

VOCAB, WIDTH, INNER, ROWS = 11, 6, 7, 4
RATE = 0.5
STEPS = (1, 1, 3)
"""Micro-batches of each step; those before the last of a step run under no_sync()."""

ROUNDED = 0.02
"""A relative error below which a gradient is the right one, rounded: bfloat16 has 8 bits."""

Grads = dict[str, Tensor | None]


class Toy(nn.Module):
    """float64. Unused: spare. Tied: embedding and head. Frozen: second.bias. Shape (): scale."""

    def __init__(self):
        super().__init__()
        self.spare = nn.Parameter(torch.zeros(3))
        self.embedding = nn.Embedding(VOCAB, WIDTH)
        self.left = nn.Linear(WIDTH, INNER, bias=False)
        self.right = nn.Linear(WIDTH, INNER)
        self.extra = nn.Parameter(torch.zeros(INNER))
        self.scale = nn.Parameter(torch.ones(()))
        self.second = nn.Linear(INNER, WIDTH)
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)
        self.head.weight = self.embedding.weight
        self.second.bias.requires_grad_(False)
        self.double()
        generator = torch.Generator().manual_seed(4)
        for parameter in self.parameters():
            parameter.data.normal_(generator=generator)

    def forward(self, tokens: Tensor, extra: bool, swapped: bool) -> Tensor:
        x = self.embedding(tokens)
        # What was computed last gives its gradient first.
        branches = [self.right, self.left] if swapped else [self.left, self.right]
        hidden = sum(torch.tanh(branch(x)) for branch in branches)
        if extra:
            hidden = hidden + self.extra
        return self.head(self.second(self.scale * torch.tanh(hidden)))


@dataclass(frozen=True)
class Rows:
    """Which rows a rank sees, and which way they take through the model."""

    uneven: bool = False
    """Odd ranks use `extra` and compute the branches in the other order; even ranks do neither."""

    def loss(self, model: Toy, rank: int, number: int) -> Tensor:
        """The mean loss of micro-batch `number` of `rank`."""
        generator = torch.Generator().manual_seed(100 * rank + number)
        tokens, targets = torch.randint(VOCAB, (2, ROWS), generator=generator)
        odd = rank % 2 == 1
        extra = odd or not self.uneven
        return F.cross_entropy(model(tokens, extra, odd and self.uneven), targets)


def gradients(model: nn.Module) -> Grads:
    """Copies of all gradients by name, a tied one once."""
    return {name: None if p.grad is None else p.grad.clone()
            for name, p in model.named_parameters()}


def weights(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in model.named_parameters()}


@dataclass(frozen=True)
class Right:
    """One step in one process."""

    mean: Grads
    """The gradient of the loss over all ranks' rows."""
    own: list[Grads]
    """What each rank accumulates of its own rows."""
    weights: dict[str, Tensor]


@cache
def alone(size: int, rows: Rows = Rows(), steps: tuple[int, ...] = STEPS) -> list[Right]:
    """Train one process on the rows of all ranks; each step's gradients."""
    model, done, right = Toy(), 0, []
    for num_micro_batches in steps:
        numbers = range(done, done + num_micro_batches)
        own = []
        for rank in range(size):
            for number in numbers:
                rows.loss(model, rank, number).backward()
            own.append(gradients(model))
            model.zero_grad()

        sum(rows.loss(model, rank, number) / size
            for rank in range(size) for number in numbers).backward()
        right.append(Right(gradients(model), own, weights(model)))
        descend(model)
        done += num_micro_batches
    return right


def descend(model: nn.Module) -> None:
    """One step of plain gradient descent; drops the gradients."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter -= RATE * parameter.grad
    model.zero_grad()


def gradient_bytes(model: nn.Module) -> dict[str, int]:
    """Bytes of each gradient there will be, by name."""
    return {name: p.numel() * p.element_size() for name, p in model.named_parameters()
            if p.requires_grad}


def forbid_library() -> None:
    """Refuse torch's own data parallelism in this process, which is a rank of a grader."""
    def refuse(self, *args, **kwargs):
        raise Forbidden("DistributedDataParallel is used; use only all_reduce")
    nn.parallel.DistributedDataParallel.__init__ = refuse


# What differs, and why


def expect_gradients(seen: list[Grads], right: Right, unused_stays_none: bool = False) -> None:
    """Compare the gradients of all ranks with one process's."""
    for name, mean in right.mean.items():
        grads = [by_name[name] for by_name in seen]
        if mean is None:
            frozen = name == "second.bias"
            strict = frozen or unused_stays_none
            nothing = [g is None or not (strict or g.any()) for g in grads]
            kind = "is frozen" if frozen else "is used by no rank"
            expect(all(nothing), seen=f"{name}, which {kind}, has a gradient: {_which(nothing)}",
                   likely="skip parameters that do not require a gradient" if frozen else
                   "do not send a gradient that backward() did not compute")
            continue
        there = [g is not None and g.shape == mean.shape for g in grads]
        expect(all(there), seen=f"{name}.grad, of shape {tuple(mean.shape)}, is missing or has "
               f"another shape: {_which(there)}",
               likely="every rank must end with the same gradients, in their parameters' shapes")
        own = [mine[name] for mine in right.own]
        expect(all(relative_error(g, mean) < 1e-12 for g in grads),
               seen=f"{name}.grad is wrong. " + _in_words(grads, own, mean),
               likely=_why(grads, own, mean))


def _which(fine: list[bool]) -> str:
    return "on rank " + ", ".join(str(rank) for rank, ok in enumerate(fine) if not ok)


def _in_words(grads: list[Tensor], own: list[Tensor | None], mean: Tensor) -> str:
    return per_rank([_name(*pair, mean, len(grads)) for pair in zip(grads, own, strict=True)])


def _name(grad: Tensor, own: Tensor | None, mean: Tensor, size: int) -> str:
    names = {"the mean": mean, "the sum": size * mean, "zeros": 0 * mean}
    if own is not None:
        names |= {"its own gradient": own, f"its own gradient / {size}": own / size}
    for name, tensor in names.items():
        if relative_error(grad - tensor + mean, mean) < 1e-12:
            return name
    if relative_error(grad, mean) < ROUNDED:
        return "nearly the mean"
    times = factor(grad, mean)
    return "not a multiple of the mean" if times is None else f"{times:.4g} times the mean"


def _why(grads: list[Tensor], own: list[Tensor | None], mean: Tensor) -> str:
    size = len(grads)
    error = max(relative_error(grad, mean) for grad in grads)
    if error < ROUNDED:
        return f"correct except for rounding, with an error of {error:.0e} of the largest entry: " \
               "are gradients sent or divided in another dtype? float32 has 7 digits, float16 " \
               "and bfloat16 have 3 or 2; these are float64"
    names = {_name(*pair, mean, size) for pair in zip(grads, own, strict=True)}
    if names == {"the sum"}:
        return "all_reduce computes a sum: divide by group.size(), either before you start it or " \
               "after you have waited for it"
    if names & {"its own gradient", f"its own gradient / {size}"}:
        return "the other ranks' values did not arrive: reduce .grad itself, in place, and " \
               "wait for every asynchronous all_reduce before you use its result"
    factors = [factor(grad, mean) for grad in grads]
    if None not in factors and max(factors) - min(factors) < 1e-9:
        return _why_factor(factors[0], size)
    return "is something other than the accumulated gradient sent, or is .grad changed between " \
           "all_reduce and wait()? It is complete after the last micro-batch's backward pass, " \
           "and the all-reduce reads and writes it until wait()"


def _why_factor(times: float, size: int) -> str:
    causes = {0: "every rank sent zeros: it was sent before backward() or after zero_grad()",
              1 / size: "divided twice", size / max(SIZES): "divided by the number of all ranks: "
              "use group.size(), the number in this group"}
    return next((cause for value, cause in causes.items() if abs(times - value) < 1e-9),
                f"divide the sum by group.size(), here {size}, once")


def expect_same_weights(seen: list[dict[str, Tensor]], right: dict[str, Tensor]) -> None:
    """Nothing but the optimizer moves a weight."""
    for name, weight in right.items():
        same = [relative_error(mine[name], weight) < 1e-12 for mine in seen]
        expect(all(same), seen=f"the weight {name} itself has changed, {_which(same)}",
               likely="a parameter was reduced, not its gradient: the gradient is parameter.grad "
                      "(a hook is given the parameter)")
