"""Bytes on the wire and seconds of each collective, under the alpha-beta model.

A message of n bytes takes alpha + n / bandwidth seconds: alpha is the latency, the price of any
message, however short. A rank sends and receives at the same time, one message each way; its
links are its own; adding costs nothing (Thakur, Rabenseifner & Gropp 2005, section 3).

For each algorithm, `*_volume(num_elements, element_size, size, rank)` is what one rank sends and
receives, exact to the byte, and `*_seconds(num_bytes, size, latency, bandwidth)` is the time, with
equal chunks. `num_elements` and `num_bytes` are the full tensor's: for a reduce-scatter or an
all-gather before it is cut, or after it is put together. Latency is in seconds, bandwidth in bytes
per second and direction. A `rank` counts from the root where there is one.

Read in this order: chunk_sizes, the ring's six functions, the others, collective_volume.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from operator import mul
from typing import NamedTuple


class Volume(NamedTuple):
    """Bytes that one rank sends and receives."""

    sent: int
    received: int


class Link(NamedTuple):
    """What connects two ranks: seconds per message, and bytes per second and direction."""

    latency: float
    bandwidth: float


def message_seconds(num_bytes: float, latency: float, bandwidth: float) -> float:
    """Return the time of one message: alpha + n / bandwidth (Hockney 1994)."""
    return latency + num_bytes / bandwidth


def fit_link(num_bytes: Sequence[float], seconds: Sequence[float]) -> Link:
    """Fit latency and bandwidth to measured messages, by least squares of the relative errors."""
    # Relative, or the largest messages alone would decide, and the latency would be noise.
    weights = [1 / each**2 for each in seconds]

    def mean(values: Iterable[float]) -> float:
        return sum(map(mul, weights, values)) / sum(weights)

    offsets = [each - mean(num_bytes) for each in num_bytes]
    per_byte = mean(map(mul, offsets, seconds)) / mean(map(mul, offsets, offsets))
    return Link(mean(seconds) - per_byte * mean(num_bytes), 1 / per_byte)


def chunk_sizes(num_elements: int, size: int) -> list[int]:
    """Return the elements of each rank's chunk: longer ones first, differing by one at most.

    As `torch.tensor_split` cuts; with fewer elements than ranks the last chunks are empty.
    """
    shorter, num_longer = divmod(num_elements, size)
    return [shorter + (index < num_longer) for index in range(size)]


# Ring: each rank sends to the next one and receives from the one before, size - 1 times


def ring_reduce_scatter_volume(
    num_elements: int, element_size: int, size: int, rank: int
) -> Volume:
    """Return the bytes of a ring reduce-scatter: (N-1)/N of the tensor (Patarasuk & Yuan 2009).

    A rank sends every chunk but its own, whose sum ends there, and receives every chunk but that
    of the rank before it.
    """
    chunks = [element_size * n for n in chunk_sizes(num_elements, size)]
    return Volume(sum(chunks) - chunks[rank], sum(chunks) - chunks[rank - 1])


def ring_all_gather_volume(num_elements: int, element_size: int, size: int, rank: int) -> Volume:
    """Return the bytes of a ring all-gather: sends all chunks but the next rank's."""
    chunks = [element_size * n for n in chunk_sizes(num_elements, size)]
    return Volume(sum(chunks) - chunks[(rank + 1) % size], sum(chunks) - chunks[rank])


def ring_all_reduce_volume(num_elements: int, element_size: int, size: int, rank: int) -> Volume:
    """Return the bytes of a ring all-reduce: 2 (N-1)/N, the least (Patarasuk & Yuan 2009)."""
    scatter = ring_reduce_scatter_volume(num_elements, element_size, size, rank)
    gather = ring_all_gather_volume(num_elements, element_size, size, rank)
    return Volume(scatter.sent + gather.sent, scatter.received + gather.received)


def ring_reduce_scatter_seconds(
    num_bytes: float, size: int, latency: float, bandwidth: float
) -> float:
    """Return (N-1) (alpha + n / N / bandwidth)."""
    return (size - 1) * message_seconds(num_bytes / size, latency, bandwidth)


ring_all_gather_seconds = ring_reduce_scatter_seconds


def ring_all_reduce_seconds(num_bytes: float, size: int, latency: float, bandwidth: float) -> float:
    """Return 2 (N-1) (alpha + n / N / bandwidth): bytes hardly grow with N, the latency does."""
    return 2 * ring_reduce_scatter_seconds(num_bytes, size, latency, bandwidth)


# Naive: rank 0 receives every tensor, adds, and sends the sum back


def naive_all_reduce_volume(num_elements: int, element_size: int, size: int, rank: int) -> Volume:
    """Return the bytes with rank 0 in the middle: N-1 tensors in and out there, one elsewhere."""
    num_tensors = size - 1 if rank == 0 else 1
    num_bytes = num_tensors * num_elements * element_size
    return Volume(num_bytes, num_bytes)


def naive_all_reduce_seconds(
    num_bytes: float, size: int, latency: float, bandwidth: float
) -> float:
    """Return 2 (N-1) (alpha + n / bandwidth): all of it crosses the link of rank 0."""
    return 2 * (size - 1) * message_seconds(num_bytes, latency, bandwidth)


# Doubling and halving: partners at distance 1, 2, 4, ... below P, the largest power of two. Each
# rank from P on is folded into rank - P: it hands over its tensor before, and gets the sum after.


def doubling_all_reduce_volume(
    num_elements: int, element_size: int, size: int, rank: int
) -> Volume:
    """Return the bytes of recursive doubling: the full tensor to each of log2(P) partners.

    Reference: Thakur, Rabenseifner & Gropp 2005, section 4.5.
    """
    num_bytes = num_elements * element_size
    num_partners = int(math.log2(power_of_two(size))) if rank < power_of_two(size) else 0
    total = num_partners * num_bytes + _folded_bytes(num_bytes, size, rank)
    return Volume(total, total)


def halving_all_reduce_volume(num_elements: int, element_size: int, size: int, rank: int) -> Volume:
    """Return the bytes of recursive halving and doubling: as few as a ring's, in fewer messages.

    Halving sends every chunk but its own, and receives what stays after each cut; doubling is the
    same, backwards. Reference: as above, where it is called Rabenseifner's algorithm.
    """
    power = power_of_two(size)
    total = _folded_bytes(num_elements * element_size, size, rank)
    if rank < power:
        chunks = [element_size * n for n in chunk_sizes(num_elements, power)]
        total += sum(chunks) - chunks[rank]
        for width in (2**k for k in range(int(math.log2(power)))):  # chunks that stay after a cut
            first = rank - rank % width
            total += sum(chunks[first : first + width])
    return Volume(total, total)


def _folded_bytes(num_bytes: int, size: int, rank: int) -> int:
    return num_bytes if rank >= power_of_two(size) or rank + power_of_two(size) < size else 0


def power_of_two(size: int) -> int:
    """Return the largest power of two that is not above `size`."""
    return 2 ** (size.bit_length() - 1)


def doubling_all_reduce_seconds(
    num_bytes: float, size: int, latency: float, bandwidth: float
) -> float:
    """Return log2(P) (alpha + n / bandwidth), and two messages more if N is no power of two."""
    power = power_of_two(size)
    num_messages = math.log2(power) + 2 * (power < size)
    return num_messages * message_seconds(num_bytes, latency, bandwidth)


def halving_all_reduce_seconds(
    num_bytes: float, size: int, latency: float, bandwidth: float
) -> float:
    """Return 2 log2(P) alpha + 2 (P-1)/P n / bandwidth, and two messages more if N is not P."""
    power = power_of_two(size)
    folded = 2 * (power < size) * message_seconds(num_bytes, latency, bandwidth)
    share = (power - 1) / power
    return 2 * math.log2(power) * latency + 2 * share * num_bytes / bandwidth + folded


# Trees and levels: what large machines use where a ring's latency is too long


def tree_all_reduce_seconds(num_bytes: float, size: int, latency: float, bandwidth: float) -> float:
    """Return (sqrt(4 ceil(log2 N) alpha) + sqrt(2 n / bandwidth))^2: the way up and down.

    Two binary trees sum half of the tensor each, and spread it, in k packets of the best size. A
    rank is a leaf in one and has two children in the other, and takes one packet at a time: up
    2 ceil(log2 N) + 2 k steps, down as many. Reference: Sanders, Speck & Traff 2009, "Two-tree
    algorithms for full bandwidth broadcast, reduction and scan".
    """
    if size == 1:
        return 0.0
    path = 4 * math.ceil(math.log2(size)) * latency
    return (math.sqrt(path) + math.sqrt(2 * num_bytes / bandwidth)) ** 2


def hierarchical_all_reduce_seconds(
    num_bytes: float, ranks_per_node: int, num_nodes: int, inside: Link, across: Link
) -> float:
    """Add up a reduce-scatter inside each node, an all-reduce across nodes, an all-gather inside.

    Across, each rank sums its n / ranks_per_node bytes with its like in the other nodes, over a
    link of its own: the slow link carries the smallest part.
    """
    part = num_bytes / ranks_per_node
    return ring_all_reduce_seconds(num_bytes, ranks_per_node, *inside) + ring_all_reduce_seconds(
        part, num_nodes, *across
    )


# The other collectives, with a rank counted from the root (source or destination)


def broadcast_volume(num_elements: int, element_size: int, size: int, rank: int) -> Volume:
    """Return the bytes of a binomial tree: every rank that has the tensor sends it on.

    Rank r > 0 receives it from r without its highest bit, and then sends it to r + 2^k for each
    2^k > r. Reference: Thakur, Rabenseifner & Gropp 2005, section 4.2.
    """
    num_bytes = num_elements * element_size
    num_children = sum(rank < 2**k < size - rank for k in range(size.bit_length()))
    return Volume(num_children * num_bytes, num_bytes if rank > 0 else 0)


def reduce_volume(num_elements: int, element_size: int, size: int, rank: int) -> Volume:
    """Return the bytes of the same tree, walked from its leaves to the root."""
    sent, received = broadcast_volume(num_elements, element_size, size, rank)
    return Volume(received, sent)


def broadcast_seconds(num_bytes: float, size: int, latency: float, bandwidth: float) -> float:
    """Return ceil(log2 N) (alpha + n / bandwidth)."""
    return math.ceil(math.log2(size)) * message_seconds(num_bytes, latency, bandwidth)


def gather_volume(num_elements: int, element_size: int, size: int, rank: int) -> Volume:
    """Return the bytes of chunks sent to the root, each straight from its owner."""
    chunks = [element_size * n for n in chunk_sizes(num_elements, size)]
    return Volume(chunks[rank], 0) if rank > 0 else Volume(0, sum(chunks) - chunks[0])


def scatter_volume(num_elements: int, element_size: int, size: int, rank: int) -> Volume:
    """Return the bytes of chunks sent by the root, each straight to its owner."""
    sent, received = gather_volume(num_elements, element_size, size, rank)
    return Volume(received, sent)


def all_to_all_volume(num_elements: int, element_size: int, size: int, rank: int) -> Volume:
    """Return the bytes if each rank has a chunk for every other: N-1 sent, N-1 received."""
    chunks = [element_size * n for n in chunk_sizes(num_elements, size)]
    return Volume(sum(chunks) - chunks[rank], (size - 1) * chunks[rank])


# By the name of the operation, as the ledger writes it
VOLUMES: dict[str, Callable[[int, int, int, int], Volume]] = {
    "all_reduce": ring_all_reduce_volume,
    "reduce_scatter": ring_reduce_scatter_volume,
    "all_gather": ring_all_gather_volume,
    "broadcast": broadcast_volume,
    "reduce": reduce_volume,
    "gather": gather_volume,
    "scatter": scatter_volume,
    "all_to_all": all_to_all_volume,
    "barrier": lambda num_elements, element_size, *_: Volume(0, 0),
    "send": lambda num_elements, element_size, *_: Volume(num_elements * element_size, 0),
    "recv": lambda num_elements, element_size, *_: Volume(0, num_elements * element_size),
}

SECONDS: dict[str, Callable[[float, int, float, float], float]] = {
    "all_reduce": ring_all_reduce_seconds,
    "reduce_scatter": ring_reduce_scatter_seconds,
    "all_gather": ring_all_gather_seconds,
    "broadcast": broadcast_seconds,
    "reduce": broadcast_seconds,
    # N-1 chunks, one after the other: at the root, or on every rank
    "gather": ring_reduce_scatter_seconds,
    "scatter": ring_reduce_scatter_seconds,
    "all_to_all": ring_reduce_scatter_seconds,
    "barrier": broadcast_seconds,  # empty messages, to distance 1, 2, 4, ... (Hensgen et al. 1988)
    "send": lambda num_bytes, size, *link: message_seconds(num_bytes, *link),
    "recv": lambda num_bytes, size, *link: message_seconds(num_bytes, *link),
}


def collective_volume(
    op: str, num_elements: int, element_size: int, size: int, rank: int, root: int = 0
) -> Volume:
    """Return the bytes that `rank` sends and receives in an `op`; `root` sends it or gets it."""
    return VOLUMES[op](num_elements, element_size, size, (rank - root) % size)


def collective_seconds(
    op: str, num_bytes: float, size: int, latency: float, bandwidth: float
) -> float:
    """Return the time of one `op` of `num_bytes` on `size` ranks, if all of them start at once."""
    return SECONDS[op](num_bytes, size, latency, bandwidth)
