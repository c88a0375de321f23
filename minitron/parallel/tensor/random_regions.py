"""Dropout under tensor parallelism: which random numbers ranks share, and which are their own.

What all ranks have a copy of must be dropped alike on all: their common generator does that, as
long as all draw from it equally often. What a rank holds alone, heads or tokens, must be dropped
unlike the others': for these it draws own numbers, and then returns to the common ones.

Reference: Shoeybi et al. 2019, appendix B.2 (model parallel random number generation).
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from minitron.model.recompute import get_random_states, set_random_states
from minitron.pytorch.private import host_value


@contextmanager
def rank_local_rng(rank: int, device: torch.device) -> Iterator[None]:
    """Draw other numbers than the other ranks for a while; afterwards all go on alike.

    The seed comes from the generator that all share, so a recomputation draws the same numbers.
    """
    drawn = torch.randint(2**62, ())  # on the CPU: no wait for the device
    seed = host_value(drawn, when_fake=0)
    states = get_random_states(device)
    torch.manual_seed(seed + rank)
    try:
        yield
    finally:
        set_random_states(device, states)


def attention_with_local_rng(
    core: Callable, rank: int, query: Tensor, key: Tensor, value: Tensor, dropout: float
) -> Tensor:
    """Call the attention function `core` for this rank's heads."""
    if dropout == 0:
        return core(query, key, value, dropout=dropout)
    with rank_local_rng(rank, query.device):
        return core(query, key, value, dropout=dropout)


class OwnDropout(nn.Dropout):
    """Drops other values on every `rank`, for each has other tokens."""

    def forward(self, x: Tensor) -> Tensor:
        if self.p == 0 or not self.training:
            return x
        with rank_local_rng(self.rank, x.device):
            return super().forward(x)
