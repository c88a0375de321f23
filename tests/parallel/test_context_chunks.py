"""Chunks of a sequence: every rank has two, all of them are somewhere, and the work is even."""

import pytest
import torch

from minitron.parallel.context.chunks import (
    all_chunks,
    contiguous,
    in_sequence_order,
    num_scores,
    own_chunks,
    positions,
    zigzag,
)

SIZES = 1, 2, 3, 4, 16


@pytest.mark.parametrize("chunks_of", [zigzag, contiguous])
@pytest.mark.parametrize("size", SIZES)
def test_each_chunk_is_on_one_rank(chunks_of, size):
    assert sorted(all_chunks(chunks_of, size)) == list(range(2 * size))


def test_the_zigzag_is_that_of_llama_3():
    assert [zigzag(rank, 4) for rank in range(4)] == [(0, 7), (1, 6), (2, 5), (3, 4)]


@pytest.mark.parametrize("size", SIZES)
def test_every_rank_of_a_zigzag_computes_as_many_scores(size):
    scores = [num_scores(zigzag(rank, size), 8) for rank in range(size)]
    assert len(set(scores)) == 1
    S = 2 * size * 8
    assert sum(scores) == S * (S + 1) // 2


def test_of_4_contiguous_ranks_the_last_computes_7_times_as_many_as_the_first():
    scores = [num_scores(contiguous(rank, 4), 4096) for rank in range(4)]
    assert scores[3] / scores[0] == pytest.approx(7, rel=1e-3)


@pytest.mark.parametrize("chunks_of", [zigzag, contiguous])
@pytest.mark.parametrize("size", SIZES)
def test_positions_are_those_of_the_own_tokens(chunks_of, size):
    S = 2 * size * 3
    x = torch.arange(2 * S).view(2, S)
    parts = []
    for rank in range(size):
        chunks = chunks_of(rank, size)
        parts.append(own_chunks(x, chunks, size))
        assert torch.equal(parts[-1][0], positions(chunks, S // size, x.device))
    assert torch.equal(in_sequence_order(torch.cat(parts, 1), all_chunks(chunks_of, size)), x)


def test_a_sequence_that_chunks_do_not_divide_is_refused():
    with pytest.raises(
        ValueError,
        match="22 tokens does not divide into 8 chunks, 2 for each of 4 ranks: pad it to 24",
    ):
        own_chunks(torch.zeros(1, 22), (0, 7), 4)
