"""What 9.4's grader runs: schedules, a stage, its micro-batches, and the same in one process."""

import gc
import weakref
from collections.abc import Callable
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor, nn

from minitron.parallel.pipeline.schedules import (
    Action,
    Schedule,
    alternate,
    gpipe,
    make,
    one_forward_one_backward,
)

WIDTH = 3
LARGE = 400
"""The width where copies in NumPy and the like are weighed."""
TOKENS = (4, 2, 5, 1, 3)  # of each micro-batch; no two alike, so that a tensor tells which it is
MOST_KEPT = 2  # local variables of the last forward and of the last backward pass


def eager(num_ranks: int, num_micro_batches: int) -> Schedule:
    """1F1B with a warm-up twice as long, so that messages have time to travel."""
    lists = []
    for rank in range(num_ranks):
        forwards = [Action("F", i, rank) for i in range(num_micro_batches)]
        backwards = [Action("B", i, rank) for i in range(num_micro_batches)]
        num_warm_up = min(num_micro_batches, 2 * (num_ranks - 1 - rank))
        lists.append(alternate(forwards, backwards, num_warm_up))
    return make("1F1B with a longer warm-up", num_micro_batches, lists)


def last_first(num_ranks: int, num_micro_batches: int) -> Schedule:
    """GPipe that goes back with the last micro-batch first."""
    lists = [
        [*(Action("F", i, rank) for i in range(num_micro_batches)),
         *(Action("B", i, rank) for i in reversed(range(num_micro_batches)))]
        for rank in range(num_ranks)
    ]
    return make("GPipe, last micro-batch backward first", num_micro_batches, lists)


class Case(NamedTuple):
    """A schedule, the number of its micro-batches, and their dtype."""

    make_schedule: Callable[[int, int], Schedule]
    num_micro_batches: int
    dtype: torch.dtype = torch.float64


CASES = [Case(gpipe, 5), Case(one_forward_one_backward, 5), Case(one_forward_one_backward, 2),
         Case(eager, 5), Case(last_first, 4), Case(one_forward_one_backward, 3, torch.float32)]


class Stage(nn.Module):
    """A layer that notes when it runs, forward and back, on how many tokens, and what stays.

    Without `note` it only computes.
    """

    def __init__(
        self, number: int, note: Callable[[str, int], None] | None = None, width: int = WIDTH,
        dtype: torch.dtype = torch.float64,
    ):
        super().__init__()
        generator = torch.Generator().manual_seed(number)
        self.linear = nn.Linear(width, width).double()
        for parameter in self.parameters():
            parameter.data.normal_(generator=generator)
        self.to(dtype)
        self.note = note
        self.refs: dict[int, list[weakref.ref]] = {}
        self.gone_back: list[int] = []
        self.most_kept = 0

    def forward(self, x: Tensor) -> Tensor:
        if self.note is None:
            return torch.tanh(self.linear(x))
        tokens = len(x)
        self.note("F", tokens)
        self.count_kept()
        out = torch.tanh(self.linear(x))

        def went_back(grad: Tensor) -> None:
            self.note("B", len(grad))
            self.count_kept()
            self.gone_back.append(tokens)

        if out.requires_grad:
            out.register_hook(went_back)  # which lives as long as the graph, not as the message
            received = [x] if x.requires_grad else []  # stage 0 reads what the grader holds
            self.refs[tokens] = [weakref.ref(kept) for kept in (went_back, *received)]
        return out

    def count_kept(self) -> None:
        """Count the micro-batches that have gone back, and whose input or output is still held."""
        if self.num_kept() > MOST_KEPT:
            gc.collect()
            self.most_kept = max(self.most_kept, self.num_kept())

    def num_kept(self) -> int:
        return sum(any(ref() is not None for ref in self.refs[tokens])
                   for tokens in self.gone_back)


def data(
    num_micro_batches: int, width: int = WIDTH, dtype: torch.dtype = torch.float64
) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(9)
    return [tuple(torch.randn(2, tokens, width, generator=generator, dtype=torch.float64).to(dtype))
            for tokens in TOKENS[:num_micro_batches]]


def sum_loss(out: Tensor, targets: Tensor) -> Tensor:
    return (out - targets).square().sum()


# One process


@cache
def alone(size: int, m: int, of_means: bool = False) -> tuple[Tensor, list[Tensor]]:
    """The loss, and the gradient of each stage, flattened.

    The mean over all tokens, or, as a mistake, the mean of the micro-batches' means.
    """
    stages = [Stage(number) for number in range(size)]
    micro_batches = data(m)
    num_tokens = sum(len(x) for x, _ in micro_batches)
    total = torch.zeros((), dtype=torch.float64)
    for x, targets in micro_batches:
        out = x
        for stage in stages:
            out = stage(out)
        total = total + sum_loss(out, targets) / (m * len(x) if of_means else num_tokens)
    total.backward()
    return total.detach(), [flat([p.grad for p in stage.parameters()]) for stage in stages]


def flat(grads: list[Tensor]) -> Tensor:
    return torch.cat([grad.flatten() for grad in grads])
