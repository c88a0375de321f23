"""Ulysses: inside attention the ranks divide the heads, and the sequence everywhere else.

Idea: heads do not need each other, tokens do. So an all-to-all before attention gives each rank the
whole sequence for some of the heads, any attention for one device does the work, and an all-to-all
after it gives the tokens back.

Notation: N ranks, `cp` in shapes. H query heads, G key-value heads; N must divide G.

Each rank holds: the queries, keys, values and output of the whole sequence for 1/N of the heads,
as many elements as of its part of the sequence for all heads.

Communication: per attention and micro-batch an all-to-all of queries, keys, values and output, each
1/N of the whole, in the forward pass, and as many in the backward pass: (4 + 4 G/H) B S D / N
elements, of which a rank sends and receives (N-1)/N. With more ranks each sends less, unlike in a
ring.

Read in this order: ulysses_attention; then differentiable.all_to_all.

Reference: Jacobs et al. 2023, "DeepSpeed Ulysses" (section 3); Fang & Zhao 2024 (table 2).
"""

from collections.abc import Callable

from torch import Tensor
from torch.distributed import ProcessGroup

from minitron.comm.differentiable import all_to_all
from minitron.model.attention import require_no_dropout
from minitron.model.transformer import fused_attention
from minitron.parallel.context.chunks import ChunksOf, contiguous

HEADS, TOKENS = 1, 2  # dims of (B, H, S, K)


def ulysses_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dropout: float,
    group: ProcessGroup,
    chunks_of: ChunksOf = contiguous,
    core: Callable = fused_attention,
) -> Tensor:
    """Attend causally over the whole sequence: (B, H, S/cp, K), (B, G, S/cp, K) twice.

    `core` attends on one device to (B, H/cp, S, K) and (B, G/cp, S, K). Raises ConfigError for
    dropout, and ValueError for tokens that are not cut contiguously or heads that do not divide.
    """
    require_no_dropout(dropout)
    if chunks_of is not contiguous:
        raise ValueError(
            f"chunks_of = {chunks_of.__name__}: the ranks' tokens, joined, must be in "
            "the sequence's order: pass chunks_of=contiguous"
        )
    query, key, value = (all_to_all(x, group, HEADS, TOKENS) for x in (query, key, value))
    out = core(query, key, value, dropout)
    return all_to_all(out, group, TOKENS, HEADS)
