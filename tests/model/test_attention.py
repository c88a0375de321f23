"""Attention in tiles is SDPA's, in float64 to 12 digits, and never has the S x S matrix."""

import math
from functools import partial
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from minitron.config import ConfigError
from minitron.measure.meter import Meter
from minitron.model import attention
from minitron.model.attention import (
    attend,
    attend_backward,
    merge,
    tiled_attention,
    visible_tiles,
    weighted_mean,
)
from minitron.model.recompute import apply_selective_recompute
from minitron.proof.oracle import small_llama

TOLERANCE = 1e-12  # of a tensor's largest value


def draw(B=2, H=6, G=2, S=23, K=5, dtype=torch.float64):
    """Query, key, value and the output's gradient."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(B, heads, S, K) for heads in (H, G, G, H)]
    return [
        torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes
    ]


def documents_of(B=2, S=23):
    """Three documents in one sequence, of other lengths in each; single tokens among them."""
    ids = torch.zeros(B, S, dtype=torch.int64)
    ids[0, 7:], ids[0, 8:], ids[1, 13:], ids[1, S - 1 :] = 1, 2, 5, 3
    return ids


def sdpa(query, key, value, documents=None):
    visible = torch.ones(query.shape[2], query.shape[2], dtype=torch.bool).tril()[None, None]
    if documents is not None:
        visible = visible & (documents[:, None, :, None] == documents[:, None, None, :])
    return F.scaled_dot_product_attention(query, key, value, attn_mask=visible, enable_gqa=True)


def with_gradients(function, query, key, value, grad_out):
    inputs = [x.detach().clone().requires_grad_() for x in (query, key, value)]
    out = function(*inputs)
    return [out.detach(), *torch.autograd.grad(out, inputs, grad_out)]


def error(got, want):
    """The largest, over output and gradients, of a tensor's largest value."""
    return max(
        float((g.double() - w.double()).abs().max() / w.double().abs().max())
        for g, w in zip(got, want, strict=True)
    )


@pytest.mark.parametrize("tile_size", [1, 4, 8, 23, 64])
@pytest.mark.parametrize("heads", [(6, 6), (6, 2), (6, 1)], ids=str)
@pytest.mark.parametrize("documents", [None, documents_of()], ids=["one document", "packed"])
def test_output_and_gradients_are_those_of_sdpa(tile_size, heads, documents):
    tensors = draw(H=heads[0], G=heads[1])
    tiled = partial(tiled_attention, documents=documents, tile_size=tile_size)
    want = with_gradients(partial(sdpa, documents=documents), *tensors)
    assert error(with_gradients(tiled, *tensors), want) < TOLERANCE


def test_large_scores_do_not_overflow():
    """The exponential of a score of 710 does; scores of thousands have lost three digits."""
    query, key, value, grad = draw()
    tensors = 30 * query, 30 * key, value, grad
    found = with_gradients(partial(tiled_attention, tile_size=4), *tensors)
    assert error(found, with_gradients(sdpa, *tensors)) < 1e3 * TOLERANCE


@pytest.mark.parametrize("dtype, bound", [(torch.float32, 2e-6), (torch.bfloat16, 1e-2)])
def test_lower_precision_rounds_only_what_goes_in_and_out(dtype, bound):
    tensors = draw(S=200, dtype=dtype)
    found = with_gradients(partial(tiled_attention, tile_size=16), *tensors)
    assert all(each.dtype == dtype for each in found)
    exact = with_gradients(sdpa, *(x.double() for x in tensors))
    assert error(found, exact) < bound
    out, lse = attend(*tensors[:3], tile_size=16)
    assert out.dtype == lse.dtype == torch.float32
    assert error([out], exact[:1]) < 2e-6  # of the same rounded inputs


def test_autocast_does_not_round_what_is_computed_inside():
    tensors = [x.float() for x in draw()]
    with torch.autocast("cpu", torch.bfloat16):
        found = with_gradients(partial(tiled_attention, tile_size=4), *tensors)
    assert error(found, with_gradients(sdpa, *tensors)) < 2e-6


# The two pieces of ring attention


@pytest.mark.parametrize("documents", [None, documents_of()], ids=["one document", "packed"])
def test_keys_in_two_parts_give_the_same_after_a_merge(documents):
    query, key, value, grad_out = draw()
    cut = 9
    pair = None if documents is None else (documents, documents[:, :cut])
    first = attend(query, key[:, :, :cut], value[:, :, :cut], documents=pair, tile_size=4)
    pair = None if documents is None else (documents, documents[:, cut:])
    last = attend(query, key[:, :, cut:], value[:, :, cut:], -cut, pair, tile_size=4)
    assert torch.equal(last[1][:, :, :cut].isinf(), torch.ones(2, 6, cut, dtype=torch.bool))

    want = with_gradients(partial(sdpa, documents=documents), query, key, value, grad_out)
    for one, other in ((first, last), (last, first)):
        out, lse = merge(*one, *other)
        assert error([out], want[:1]) < TOLERANCE
    pair = None if documents is None else (documents, documents[:, :cut])
    grads = attend_backward(
        query,
        key[:, :, :cut],
        value[:, :, :cut],
        grad_out,
        lse,
        weighted_mean(grad_out, out),
        documents=pair,
        tile_size=5,
    )
    assert error(grads[1:], [grad[:, :, :cut] for grad in want[2:]]) < TOLERANCE


def test_nothing_merged_with_nothing_is_nothing():
    out, lse = torch.zeros(1, 1, 2, 3), torch.full((1, 1, 2), -math.inf)
    merged = merge(out, lse, out, lse)
    assert torch.equal(merged[0], out) and torch.equal(merged[1], lse)


@pytest.mark.parametrize(
    "num_queries, num_keys, offset, tile_size",
    [(23, 23, 0, 4), (6, 10, 4, 4), (6, 10, -3, 4), (5, 7, -9, 2), (8, 3, 20, 8)],
)
def test_the_plan_has_every_tile_in_which_a_query_sees_a_key(
    num_queries, num_keys, offset, tile_size
):
    tiles = visible_tiles(num_queries, num_keys, offset, tile_size)
    planned = [
        (i, j)
        for rows, columns in tiles
        for i in range(num_queries)[rows]
        for j in range(num_keys)[columns]
    ]
    seen = {(i, j) for i in range(num_queries) for j in range(num_keys) if j <= i + offset}
    assert len(planned) == len(set(planned)) and seen <= set(planned)
    for rows, columns in tiles:  # and no other
        assert columns.start <= rows.stop - 1 + offset


def test_dropout_is_refused():
    with pytest.raises(ConfigError, match="model.dropout = 0.1: attention in tiles"):
        tiled_attention(*draw()[:3], dropout=0.1)


# Inside a model


def test_a_model_takes_it_as_its_attention_function():
    tokens = torch.arange(14).view(2, 7)
    results = []
    for function in (None, tiled_attention):
        torch.manual_seed(0)
        model = small_llama().double()
        for block in model.blocks:
            block.attention.attention_fn = function or block.attention.attention_fn
        if function:
            apply_selective_recompute(model)
        logits = model(tokens)
        logits.logsumexp(-1).sum().backward()
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        results.append([logits.detach(), *gradients])
    assert error(*results) < TOLERANCE


# What is held


def peaks(S, function):
    """Bytes at the peak of a forward and a backward pass, beside the inputs."""
    inputs = [x.requires_grad_() for x in draw(1, 2, 1, S, 16, torch.float32)[:3]]
    with Meter(nn.Linear(1, 1)) as meter:
        function(*inputs).sum().backward()
    return meter.peak.total


def test_memory_grows_with_the_sequence_not_with_its_square():
    small, large = (peaks(S, partial(tiled_attention, tile_size=128)) for S in (1024, 2048))
    assert small < large < 2.1 * small
    assert large < 2 * 2048 * 2048 * 4 / 4  # a quarter of the scores of two heads
    squared = [peaks(S, sdpa) for S in (1024, 2048)]
    assert squared[1] > 3 * squared[0]  # the meter would see them


# Mutations: take the essential line out, and the comparison must tell


def not_rescaled(out, lse, other_out, other_lse):
    return out + other_out, torch.logaddexp(lse, other_lse)


def own_lse(query, key, value, grad_out, lse, mean_grad, hidden):
    scores = attention.tile_scores(query, key, hidden)
    return tile_backward(query, key, value, grad_out, scores.logsumexp(-1), mean_grad, hidden)


def no_mean(grad_out, out):
    return torch.zeros_like(out[..., 0])


def diagonal_is_skipped(num_queries, num_keys, offset, tile_size):
    return [
        (rows, columns)
        for rows, columns in visible_tiles(num_queries, num_keys, offset, tile_size)
        if columns.start < rows.start or rows.start == 0
    ]


def nothing_hidden(rows, columns, offset, documents, device):
    return None


def no_documents(rows, columns, offset, documents, device):
    return hidden_keys(rows, columns, offset, None, device)


tile_backward, hidden_keys = attention.tile_backward, attention.hidden_keys
MUTANTS = {
    "partial results are added": ("merge", not_rescaled),
    "a tile's own log-sum-exp in the backward pass": ("tile_backward", own_lse),
    "the mean of the softmax is forgotten": ("weighted_mean", no_mean),
    "tiles on the diagonal are skipped": ("visible_tiles", diagonal_is_skipped),
    "the future is seen": ("hidden_keys", nothing_hidden),
    "other documents are seen": ("hidden_keys", no_documents),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_a_mutation_is_seen(name):
    tensors, documents = draw(), documents_of()
    tiled = partial(tiled_attention, documents=documents, tile_size=4)
    with patch.object(attention, *MUTANTS[name]):
        found = with_gradients(tiled, *tensors)
    want = with_gradients(partial(sdpa, documents=documents), *tensors)
    assert not error(found, want) < 1e-6
