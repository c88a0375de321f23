"""Attention between some chunks of a sequence and others: what each rank computes.

The chunks of queries (B, H, Q, K), and those of keys and values (B, G, T, K), are equally long.
They stand in any order: their numbers say where in the sequence they are.

Read in this order: visible_pairs, attend_chunks, attend_chunks_backward.
"""

import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from minitron.model.attention import Documents, attend, attend_backward, merge


def visible_pairs(
    query_chunks: Sequence[int], key_chunks: Sequence[int], length: int, documents: Tensor | None
) -> Iterator[tuple[slice, slice, int, Documents]]:
    """Yield each pair of chunks in which a query sees a key: queries, keys, offset, documents.

    `length` is a chunk's. `documents` (B, S) are of the whole sequence.
    """
    for i, chunk in enumerate(query_chunks):
        for j, other in enumerate(key_chunks):
            if other > chunk:  # all of it is in the future
                continue
            of_both = (
                None
                if documents is None
                else tuple(
                    documents[:, each * length : (each + 1) * length] for each in (chunk, other)
                )
            )
            rows, columns = (slice(k * length, (k + 1) * length) for k in (i, j))
            yield rows, columns, (chunk - other) * length, of_both


def attend_chunks(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    query_chunks: Sequence[int],
    key_chunks: Sequence[int],
    documents: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the queries' partial result over these keys, as `attention.attend` does."""
    dtype = torch.promote_types(query.dtype, torch.float32)
    out = torch.zeros_like(query, dtype=dtype, memory_format=torch.contiguous_format)
    lse = out.new_full(out.shape[:-1], -math.inf)
    length = query.shape[2] // len(query_chunks)
    for rows, columns, *where in visible_pairs(query_chunks, key_chunks, length, documents):
        found = attend(query[:, :, rows], key[:, :, columns], value[:, :, columns], *where)
        out[:, :, rows], lse[:, :, rows] = merge(out[:, :, rows], lse[:, :, rows], *found)
    return out, lse


def attend_chunks_backward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    grad_out: Tensor,
    lse: Tensor,
    mean_grad: Tensor,
    query_chunks: Sequence[int],
    key_chunks: Sequence[int],
    documents: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return what these keys contribute to the gradient of the queries, and these queries to those
    of keys and values, as `attention.attend_backward` does."""
    grad_query, grad_key, grad_value = (
        torch.zeros_like(x, dtype=lse.dtype, memory_format=torch.contiguous_format)
        for x in (query, key, value)
    )
    length = query.shape[2] // len(query_chunks)
    for rows, columns, *where in visible_pairs(query_chunks, key_chunks, length, documents):
        of_query, of_key, of_value = attend_backward(
            query[:, :, rows],
            key[:, :, columns],
            value[:, :, columns],
            grad_out[:, :, rows],
            lse[:, :, rows],
            mean_grad[:, :, rows],
            *where,
        )
        grad_query[:, :, rows] += of_query
        grad_key[:, :, columns] += of_key
        grad_value[:, :, columns] += of_value
    return grad_query, grad_key, grad_value
