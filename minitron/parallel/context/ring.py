"""Ring attention: keys and values travel round the ring of ranks while each computes.

Idea: the queries of a rank need the keys and values of every rank, but not all at once. Each rank
passes the ones it holds on to the next rank, and attends to them while they travel; partial results
are merged by their log-sum-exp. After N steps every query has seen every key before it, and no rank
has held the keys and values of the whole sequence.

Notation: N ranks, `cp` in shapes. H query heads, G key-value heads.

Each rank holds: the queries, keys, values and output of its part of the sequence, and one number
for each query and head; temporarily, two more ranks' keys and values: those that it computes with
and those that are arriving.

Communication: per attention and micro-batch N-1 messages of keys and values, 2 (B, G, S/cp, K),
in the forward pass, and as many in the backward pass, which has not kept them. There the gradients
of keys and values follow them, N-1 messages too, in float32 at least: each rank adds what its
queries contribute, and the last hop returns the sum to its owner. Together 6 G/H B S D (N-1)/N
elements sent and received per rank. (Fang & Zhao's table has 4: as much as one trip of keys and
values and one of their gradients.)

Read in this order: travel, ring_attention, RingAttention.forward, backward.

Reference: Liu et al. 2023, "Ring Attention" (section 3); Fang & Zhao 2024 (table 2: volumes).
"""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup

from minitron.comm.collectives import start_exchange
from minitron.model.attention import merge, require_no_dropout, weighted_mean
from minitron.parallel.context.chunk_attention import attend_chunks, attend_chunks_backward
from minitron.parallel.context.chunks import ChunksOf, zigzag


def ring_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dropout: float,
    group: ProcessGroup,
    chunks_of: ChunksOf = zigzag,
    documents: Tensor | None = None,
) -> Tensor:
    """Attend causally over the whole sequence: (B, H, S/cp, K), (B, G, S/cp, K) twice.

    Every rank has the two chunks that `chunks_of` says. With `documents` (B, S), of the whole
    sequence, a token sees those of its own document alone. Raises ConfigError for dropout.
    """
    require_no_dropout(dropout)
    return RingAttention.apply(query, key, value, group, chunks_of, documents)


class RingAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        group: ProcessGroup,
        chunks_of: ChunksOf,
        documents: Tensor | None,
    ) -> Tensor:
        rank, size, seen = group.rank(), group.size(), None
        for source, pair in travel(torch.stack([key, value]), group):
            found = attend_chunks(
                query, *pair, chunks_of(rank, size), chunks_of(source, size), documents
            )
            seen = found if seen is None else merge(*seen, *found)
        out, lse = seen[0].to(query.dtype), seen[1]
        ctx.save_for_backward(query, key, value, out, lse)
        ctx.group, ctx.chunks_of, ctx.documents = group, chunks_of, documents
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_out: Tensor):
        query, key, value, out, lse = ctx.saved_tensors
        group, chunks_of = ctx.group, ctx.chunks_of
        rank, size = group.rank(), group.size()
        fixed = grad_out, lse, weighted_mean(grad_out, out)
        grad_query, arriving = 0, None

        for source, pair in travel(torch.stack([key, value]), group):
            of_query, *of_pair = attend_chunks_backward(
                query, *pair, *fixed, chunks_of(rank, size), chunks_of(source, size), ctx.documents
            )
            grad_query += of_query
            sums = torch.stack(of_pair)
            if source == rank:
                own = sums  # already on its rank; the others follow their keys and values
                continue
            if arriving is not None:
                sums += arriving()  # what the ranks before have contributed for this source
            arriving = start_shift(sums, group)

        if arriving is not None:
            own += arriving()  # what all other ranks have
        grad_key, grad_value = own
        gradients = grad_query.to(query.dtype), grad_key.to(key.dtype), grad_value.to(value.dtype)
        return *gradients, None, None, None


def travel(own: Tensor, group: ProcessGroup) -> Iterator[tuple[int, Tensor]]:
    """Yield each rank's number and tensor, this rank's `own` first, then that of the rank before.

    The next one is on its way meanwhile.
    """
    rank, size = group.rank(), group.size()
    held = own
    for step in range(size - 1):
        arriving = start_shift(held, group)
        yield (rank - step) % size, held
        held = arriving()
    yield (rank + 1) % size, held


def start_shift(tensor: Tensor, group: ProcessGroup) -> Callable[[], Tensor]:
    """Start to send to the next rank; returns a function that waits for what the one before sends.

    `tensor` must stay as it is until then.
    """
    rank, size = group.rank(), group.size()
    return start_exchange(
        tensor, (rank + 1) % size, torch.empty_like(tensor), (rank - 1) % size, group
    )
