"""FlashAttention by hand: attention in tiles, so that the S x S matrix never exists.

Idea: a softmax divides by the sum of its exponentials over all keys. A partial result, over some
of the keys, can still be corrected later if the logarithm of its own sum is kept: `merge` weights
two partial results by their sums. So each tile of queries visits one tile of keys after the other.
For the backward pass only the output and one number per query are saved; the probabilities of a
tile are recomputed from its scores and that number.

A partial result is a pair: out (B, H, Q, K), the mean of the values that these queries have seen,
and lse (B, H, Q), the log-sum-exp of their scores. A query that has seen nothing has 0 and -inf.
Within a tile the heads are grouped by the key-value head that serves them, (B, G, H/G, Q, K).
Everything is computed in float32 at least, whatever the dtype of the inputs, also under autocast.

Ring attention needs the pieces: `attend` and `attend_backward` take some queries and some keys of a
sequence that may be elsewhere, and `merge` joins what two ranks' keys have given.

Read in this order: merge, tile_forward, attend, tile_backward, attend_backward, tiled_attention.
Reference: Milakov & Gimelshein 2018 (online softmax); Dao et al. 2022, "FlashAttention" (section
3.1, algorithm 1; appendix B: the backward pass); Dao 2023 (log-sum-exp instead of two numbers).
"""

import math

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from minitron.config import require

TILE_SIZE = 256
"""Queries, and keys, of a tile: H/G x 256 x 256 scores in float32 for each key-value head."""
Documents = tuple[Tensor, Tensor] | None
"""Which document each query (B, Q) and each key (B, T) belongs to; None: all to one."""


def tiled_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dropout: float = 0.0,
    documents: Tensor | None = None,
    tile_size: int = TILE_SIZE,
) -> Tensor:
    """Attend causally, as `transformer.fused_attention`: (B, H, S, K), (B, G, S, K) twice.

    With `documents` (B, S), integers, a token sees those of its own document alone. Raises
    ConfigError for dropout.
    """
    require_no_dropout(dropout)
    return TiledAttention.apply(query, key, value, documents, tile_size)


def require_no_dropout(dropout: float) -> None:
    require(
        dropout == 0,
        f"model.dropout = {dropout}: attention in tiles drops no probabilities",
        "set model.dropout to 0",
        field="model.dropout",
    )


class TiledAttention(torch.autograd.Function):
    """Keeps the output and the log-sum-exp; the backward pass computes the rest again."""

    @staticmethod
    def forward(
        ctx, query: Tensor, key: Tensor, value: Tensor, documents: Tensor | None, tile_size: int
    ) -> Tensor:
        pair = None if documents is None else (documents, documents)
        out, lse = attend(query, key, value, documents=pair, tile_size=tile_size)
        out = out.to(query.dtype)
        ctx.save_for_backward(query, key, value, out, lse)
        ctx.documents, ctx.tile_size = pair, tile_size
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_out: Tensor):
        query, key, value, out, lse = ctx.saved_tensors
        gradients = attend_backward(
            query,
            key,
            value,
            grad_out,
            lse,
            weighted_mean(grad_out, out),
            documents=ctx.documents,
            tile_size=ctx.tile_size,
        )
        gradients = (
            grad.to(x.dtype) for grad, x in zip(gradients, (query, key, value), strict=True)
        )
        return *gradients, None, None


def merge(out: Tensor, lse: Tensor, other_out: Tensor, other_lse: Tensor) -> tuple[Tensor, Tensor]:
    """Join two partial results of the same queries, (..., Q, K) and (..., Q), over other keys."""
    total = torch.logaddexp(lse, other_lse)
    weight = (lse - finite(total)).exp()[..., None]
    other_weight = (other_lse - finite(total)).exp()[..., None]
    return out * weight + other_out * other_weight, total


def finite(lse: Tensor) -> Tensor:
    """Let a query that has seen nothing weigh nothing: -inf less -inf would be NaN."""
    return lse.clamp(min=torch.finfo(lse.dtype).min)


# Forward


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    offset: int = 0,
    documents: Documents = None,
    tile_size: int = TILE_SIZE,
) -> tuple[Tensor, Tensor]:
    """Return the partial result of queries (B, H, Q, K) over keys and values (B, G, T, K).

    The first query stands `offset` tokens after the first key in their sequence, and no query sees
    a later key. In float32 or better.
    """
    num_queries, num_keys = query.shape[2], key.shape[2]
    query = query.unflatten(1, (key.shape[1], -1))  # (B, G, H/G, Q, K)
    dtype = torch.promote_types(query.dtype, torch.float32)
    out = torch.zeros_like(query, dtype=dtype, memory_format=torch.contiguous_format)
    lse = out.new_full(out.shape[:-1], -math.inf)

    with torch.autocast(query.device.type, enabled=False):
        for rows, columns in visible_tiles(num_queries, num_keys, offset, tile_size):
            hidden = hidden_keys(rows, columns, offset, documents, query.device)
            found = tile_forward(
                query[..., rows, :], key[:, :, columns], value[:, :, columns], hidden
            )
            out[..., rows, :], lse[..., rows] = merge(out[..., rows, :], lse[..., rows], *found)
    return out.flatten(1, 2), lse.flatten(1, 2)


def tile_forward(
    query: Tensor, key: Tensor, value: Tensor, hidden: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Return the partial result of one tile: queries (B, G, H/G, Q, K), keys (B, G, T, K)."""
    scores = tile_scores(query, key, hidden)
    lse = scores.logsumexp(-1)
    probabilities = (scores - finite(lse)[..., None]).exp()
    return heads_times(probabilities, value.to(scores.dtype)), lse


def tile_scores(query: Tensor, key: Tensor, hidden: Tensor | None) -> Tensor:
    """Return the scores (B, G, H/G, Q, T) of one tile, -inf where `hidden`."""
    dtype = torch.promote_types(query.dtype, torch.float32)
    scores = heads_times(query.to(dtype), key.to(dtype).mT) / math.sqrt(query.shape[-1])
    return scores if hidden is None else scores.masked_fill(hidden, -math.inf)


# Backward


def attend_backward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    grad_out: Tensor,
    lse: Tensor,
    mean_grad: Tensor,
    offset: int = 0,
    documents: Documents = None,
    tile_size: int = TILE_SIZE,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return what these keys contribute to the gradient of the queries, and these queries to
    the gradients of keys and values, in float32 or better.

    `lse` (B, H, Q) is that of all the keys that the queries have seen, also elsewhere, and
    `mean_grad` is `weighted_mean` of their whole output.
    """
    num_queries, num_keys = query.shape[2], key.shape[2]
    groups = key.shape[1], -1
    query, grad_out, lse, mean_grad = (
        each.unflatten(1, groups) for each in (query, grad_out, lse, mean_grad)
    )
    grad_query, grad_key, grad_value = (
        torch.zeros_like(x, dtype=lse.dtype, memory_format=torch.contiguous_format)
        for x in (query, key, value)
    )

    with torch.autocast(query.device.type, enabled=False):
        for rows, columns in visible_tiles(num_queries, num_keys, offset, tile_size):
            hidden = hidden_keys(rows, columns, offset, documents, query.device)
            of_query, of_key, of_value = tile_backward(
                query[..., rows, :],
                key[:, :, columns],
                value[:, :, columns],
                grad_out[..., rows, :],
                lse[..., rows],
                mean_grad[..., rows],
                hidden,
            )
            grad_query[..., rows, :] += of_query
            grad_key[:, :, columns] += of_key
            grad_value[:, :, columns] += of_value
    return grad_query.flatten(1, 2), grad_key, grad_value


def tile_backward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    grad_out: Tensor,
    lse: Tensor,
    mean_grad: Tensor,
    hidden: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of one tile's queries, keys and values, from the queries' final `lse`.

    A softmax passes on how much better a probability is than the mean: `mean_grad` is that mean,
    over all keys, so no tile has to know the others.
    """
    scores = tile_scores(query, key, hidden)
    query, key, value, grad_out = (x.to(scores.dtype) for x in (query, key, value, grad_out))
    probabilities = (scores - finite(lse)[..., None]).exp()  # of the whole row

    grad_probabilities = heads_times(grad_out, value.mT)
    grad_scores = probabilities * (grad_probabilities - mean_grad[..., None])
    grad_scores /= math.sqrt(query.shape[-1])
    return (
        heads_times(grad_scores, key),
        summed_over_queries(grad_scores, query),
        summed_over_queries(probabilities, grad_out),
    )


def weighted_mean(grad_out: Tensor, out: Tensor) -> Tensor:
    """Return the mean of a row's gradients of its probabilities, weighted by these, (B, H, Q).

    That needs no probability: it is the scalar product of the output and its gradient.
    """
    dtype = torch.promote_types(out.dtype, torch.float32)
    return (grad_out.to(dtype) * out.to(dtype)).sum(-1)


# Matmuls of heads that share a key-value head; which keys are seen


def heads_times(x: Tensor, matrix: Tensor) -> Tensor:
    """Multiply x (B, G, H/G, Q, a) by the matrix (B, G, a, b) of each key-value head."""
    return (x.flatten(2, 3) @ matrix).unflatten(2, x.shape[2:4])


def summed_over_queries(x: Tensor, y: Tensor) -> Tensor:
    """Sum the outer products of x (B, G, H/G, Q, a) and y (..., Q, b) over a group's queries."""
    return x.flatten(2, 3).mT @ y.flatten(2, 3)  # (B, G, a, b)


def visible_tiles(
    num_queries: int, num_keys: int, offset: int, tile_size: int
) -> list[tuple[slice, slice]]:
    """List the tiles, as queries and keys, in which a query sees a key."""
    tiles = []
    for first in range(0, num_queries, tile_size):
        rows = slice(first, min(first + tile_size, num_queries))
        for start in range(0, min(num_keys, rows.stop + offset), tile_size):
            tiles.append((rows, slice(start, min(start + tile_size, num_keys))))
    return tiles


def hidden_keys(
    rows: slice, columns: slice, offset: int, documents: Documents, device: torch.device
) -> Tensor | None:
    """Return which of a tile's keys its queries do not see, (Q, T) or (B, 1, 1, Q, T), or None."""
    hidden = None
    if columns.stop - 1 > rows.start + offset:  # the diagonal crosses this tile
        last_seen = torch.arange(rows.start, rows.stop, device=device) + offset
        hidden = torch.arange(columns.start, columns.stop, device=device) > last_seen[:, None]
    if documents is not None:
        of_queries, of_keys = documents
        is_other = of_queries[:, rows, None] != of_keys[:, None, columns]
        is_other = is_other[:, None, None]
        hidden = is_other if hidden is None else hidden | is_other
    return hidden
