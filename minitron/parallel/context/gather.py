"""Context parallelism by an all-gather: every rank has all keys and values for a moment.

Idea: with grouped-query attention, keys and values are small compared with everything else. So each
rank gathers those of the whole sequence, and attends with its own queries. The message does not
overlap with compute, but it is a single large one, and any mask is as easy as on one device.

Notation: N ranks, `cp` in shapes. H query heads, G key-value heads.

Each rank holds: the queries, keys, values and output of its part of the sequence, and one number
for each query and head; temporarily, the keys and values of the whole sequence, and in the backward
pass their gradients, in float32 at least.

Communication: per attention and micro-batch an all-gather of keys and values, 2 (B, G, S, K), in
the forward pass, and another in the backward pass, which has not kept them; there a reduce-scatter
of their gradients. Together 6 G/H B S D (N-1)/N elements sent and received per rank, as the ring.

Read in this order: gathered_attention, GatheredAttention.forward, backward.

Reference: Llama team 2024, "The Llama 3 herd of models" (section 3.3.2).
"""

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup

from minitron.comm.differentiable import start_all_gather, start_reduce_scatter
from minitron.model.attention import require_no_dropout, weighted_mean
from minitron.parallel.context.chunk_attention import attend_chunks, attend_chunks_backward
from minitron.parallel.context.chunks import ChunksOf, all_chunks, zigzag

TOKENS = 3  # dim of keys and values together, (2, B, G, S, K)


def gathered_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dropout: float,
    group: ProcessGroup,
    chunks_of: ChunksOf = zigzag,
    documents: Tensor | None = None,
) -> Tensor:
    """Do what `ring_attention` does, by an all-gather of keys and values."""
    require_no_dropout(dropout)
    return GatheredAttention.apply(query, key, value, group, chunks_of, documents)


class GatheredAttention(torch.autograd.Function):
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
        ctx.group, ctx.documents = group, documents
        ctx.own = chunks_of(group.rank(), group.size())
        ctx.all = all_chunks(chunks_of, group.size())  # in the order in which they are gathered

        pair = start_all_gather(torch.stack([key, value]), group, TOKENS)()
        out, lse = attend_chunks(query, *pair, ctx.own, ctx.all, documents)
        out = out.to(query.dtype)
        ctx.save_for_backward(query, key, value, out, lse)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_out: Tensor):
        query, key, value, out, lse = ctx.saved_tensors
        pair = start_all_gather(torch.stack([key, value]), ctx.group, TOKENS)()
        grad_query, *of_pair = attend_chunks_backward(
            query,
            *pair,
            grad_out,
            lse,
            weighted_mean(grad_out, out),
            ctx.own,
            ctx.all,
            ctx.documents,
        )
        grad_key, grad_value = start_reduce_scatter(torch.stack(of_pair), ctx.group, TOKENS)()
        gradients = grad_query.to(query.dtype), grad_key.to(key.dtype), grad_value.to(value.dtype)
        return *gradients, None, None, None
