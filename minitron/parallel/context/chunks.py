"""Which part of the sequence each rank has: chunks, as functions of integers.

A sequence of S tokens is 2N chunks for N ranks, and each rank has two of them. A token sees those
before it, so a later chunk is more work. With a contiguous cut the last of 4 ranks computes 7 times
as many scores as the first, which then waits. The zigzag gives rank i chunk i and chunk 2N-1-i, an
early one and a late one: together as much as those of any other rank.

    4 ranks       chunks      0 1 2 3 4 5 6 7
    zigzag        of rank     0 1 2 3 3 2 1 0
    contiguous    of rank     0 0 1 1 2 2 3 3

Read in this order: zigzag, num_scores, positions, own_chunks, in_sequence_order.
Reference: Llama team 2024, "The Llama 3 herd of models" (section 3.3.2).
"""

from collections.abc import Callable

import torch
from torch import Tensor

ChunksOf = Callable[[int, int], tuple[int, int]]
"""Of a rank and the number of ranks: the numbers of the two chunks that it has."""


def zigzag(rank: int, size: int) -> tuple[int, int]:
    """Return an early and a late chunk, which are as much work as those of any other rank."""
    return rank, 2 * size - 1 - rank


def contiguous(rank: int, size: int) -> tuple[int, int]:
    """Return two chunks that follow each other: the ranks' tokens, joined, are the sequence."""
    return 2 * rank, 2 * rank + 1


def all_chunks(chunks_of: ChunksOf, size: int) -> list[int]:
    """List the chunks of all ranks, rank by rank."""
    return [chunk for rank in range(size) for chunk in chunks_of(rank, size)]


def num_scores(chunks: tuple[int, ...], chunk_length: int) -> int:
    """Count the pairs of a query in `chunks` and a key that it sees."""
    before = sum(chunks) * chunk_length**2
    return before + len(chunks) * chunk_length * (chunk_length + 1) // 2


def positions(chunks: tuple[int, ...], num_tokens: int, device: torch.device) -> Tensor:
    """Return where in the sequence a rank's `num_tokens` tokens stand, (S/cp,)."""
    length = num_tokens // len(chunks)
    return torch.cat(
        [torch.arange(chunk * length, (chunk + 1) * length, device=device) for chunk in chunks]
    )


def own_chunks(x: Tensor, chunks: tuple[int, ...], size: int) -> Tensor:
    """Return the `chunks` that one of `size` ranks has of x (B, S, ...), (B, S/cp, ...).

    Raises ValueError if the sequence does not divide into chunks.
    """
    count = len(chunks) * size
    if x.shape[1] % count != 0:
        raise ValueError(
            f"a sequence of {x.shape[1]} tokens does not divide into {count} chunks, "
            f"{len(chunks)} for each of {size} ranks: pad it to {-(-x.shape[1] // count) * count}"
        )
    parts = x.chunk(count, 1)
    return torch.cat([parts[chunk] for chunk in chunks], 1)


def in_sequence_order(x: Tensor, chunks: list[int]) -> Tensor:
    """Return x (B, S, ...), whose chunks stand in the order of `chunks`, in the sequence's."""
    parts = dict(zip(chunks, x.chunk(len(chunks), 1), strict=True))
    return torch.cat([parts[chunk] for chunk in sorted(parts)], 1)
