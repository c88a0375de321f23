"""Exercises of chapter 5: the ring all-reduce, built from messages between neighbors.

Write a body, save, and ask `minitron check 5.1`, or check("5.1") in a notebook. Stuck:
`minitron hint 5.1`, three levels. Start again: `minitron reset 5.1`. The exercises do not build on
one another; take them in any order.

In 5.1 and 5.2 every rank runs your code. `group` is the group of the ranks: group.rank(),
group.size(). Allowed are messages alone, between ranks numbered in the group:

    dist.send(tensor, group=group, group_dst=rank)     returns when the tensor has been taken
    dist.recv(tensor, group=group, group_src=rank)     returns when it is filled
    work = dist.isend(...); work = dist.irecv(...)     start, and return at once; then work.wait()
"""

import math

import torch
import torch.distributed as dist
from torch import Tensor

from minitron.cost import Link, Volume


# Exercise 5.1 | Ring reduce-scatter | 30 min | difficulty 3 | replaces minitron.comm.collectives
def reduce_scatter_ring(flat: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Sum `flat` over the ranks; rank r ends with chunk r of the sum, and returns it.

    flat is (n,), of one length and dtype on all ranks. Of N ranks each has a chunk, as
    flat.tensor_split(N) cuts them, views of flat: lengths differ by one at most, and with fewer
    values than ranks some are empty. Chunk r of flat holds its sum afterwards, and that view is
    what you return. What the other chunks hold then does not matter.

    The ring: in each of N-1 steps a rank sends one chunk to the next rank, (r + 1) % N, receives
    one from the one before, (r - 1) % N, and adds it to its own. What it has added it sends in the
    next step. So each chunk travels once round the ring, collects all the summands, and must end
    at home: which one does rank r send first? An empty chunk may be sent or left out.

    Example: on 2 ranks flat is [1, 2, 3] and [10, 20, 30]; chunks 0 and 1 have 2 values and 1.
    Rank 0 sends [3], receives [10, 20], returns [11, 22]. Rank 1 returns [33].
    """
    ### BEGIN SOLUTION
    rank, size = group.rank(), group.size()
    chunks = flat.tensor_split(size)
    for step in range(size - 1):
        outgoing = chunks[(rank - 1 - step) % size]
        total = chunks[(rank - 2 - step) % size]
        received = torch.empty_like(total)

        # If all ranks waited for their send to be taken, none would come to receive.
        send = dist.isend(outgoing, group=group, group_dst=(rank + 1) % size)
        dist.recv(received, group=group, group_src=(rank - 1) % size)
        send.wait()
        total += received
    return chunks[rank]
    ### END SOLUTION


# Exercise 5.2 | Ring all-gather | 15 min | difficulty 2 | replaces minitron.comm.collectives
def all_gather_ring(flat: Tensor, group: dist.ProcessGroup) -> None:
    """Fill `flat` on every rank with the chunks of all: rank r comes with chunk r alone.

    flat is (n,), of one length and dtype on all ranks. Of N ranks each has a chunk, as
    flat.tensor_split(N) cuts them, views of flat: lengths differ by one at most, and with fewer
    values than ranks some are empty. Before, chunk r is valid on rank r, and all else is rubbish.
    Afterwards all of flat is valid, and the same on every rank.

    The ring: in each of N-1 steps a rank sends one chunk to the next rank, (r + 1) % N, and
    receives one from the one before, (r - 1) % N. No rank sends to any other. An empty chunk may
    be sent or left out.

    Example: on 2 ranks flat is [1, 2, ?] and [?, ?, 3]. Rank 0 sends [1, 2] and receives [3], rank
    1 the other way round; both end with [1, 2, 3].
    """
    ### BEGIN SOLUTION
    rank, size = group.rank(), group.size()
    chunks = flat.tensor_split(size)
    for step in range(size - 1):
        # What has come in is what goes out in the next step.
        send = dist.isend(chunks[(rank - step) % size], group=group, group_dst=(rank + 1) % size)
        missing = chunks[(rank - 1 - step) % size]
        dist.recv(missing, group=group, group_src=(rank - 1) % size)
        send.wait()
    ### END SOLUTION


# Exercise 5.3 | Uneven chunks, to the byte | 20 min | difficulty 2 | replaces minitron.cost
def chunk_sizes(num_elements: int, size: int) -> list[int]:
    """Cut `num_elements` into one chunk for each of `size` ranks: the lengths, in rank order.

    They add up to num_elements, differ by one at most, and the longer ones come first. This is
    how Tensor.tensor_split cuts; do without a tensor, for a planner asks for billions of values.

    Example: chunk_sizes(3, 2) is [2, 1], chunk_sizes(10, 4) is [3, 3, 2, 2], chunk_sizes(2, 4) is
    [1, 1, 0, 0].
    """
    ### BEGIN SOLUTION
    shorter, num_longer = divmod(num_elements, size)
    return [shorter + 1] * num_longer + [shorter] * (size - num_longer)
    ### END SOLUTION


def ring_all_reduce_volume(num_elements: int, element_size: int, size: int, rank: int) -> Volume:
    """Count the bytes that `rank` sends and receives in a ring all-reduce, exactly.

    The tensor has num_elements values of element_size bytes, cut as chunk_sizes cuts. On N = size
    ranks, r = rank does 2 (N-1) steps, sends to rank r + 1 and receives from rank r - 1:
    reduce-scatter, every chunk ends at home: it sends chunks r-1, r-2, ... down to r+1;
    all-gather: it sends chunks r, r-1, ... down to r+2.
    All numbers are mod N. Returns Volume(sent, received). On one rank nothing is sent.

    Example: 3 values of 4 bytes on 2 ranks, chunks of 8 and 4 bytes. Rank 0 sends chunk 1, then
    chunk 0, and receives chunk 0, then chunk 1: Volume(12, 12). On 4 ranks, 10 values of 1 byte:
    rank 1 sends chunks 0, 3, 2 and 1, 0, 3: Volume(15, 14).
    """
    ### BEGIN SOLUTION
    chunks = [element_size * n for n in chunk_sizes(num_elements, size)]

    def sent_by(rank: int) -> int:
        without_two = sum(chunks) - chunks[rank % size], sum(chunks) - chunks[(rank + 1) % size]
        return sum(without_two)

    return Volume(sent_by(rank), sent_by(rank - 1))  # it receives what the one before it sends
    ### END SOLUTION


# Exercise 5.4 | Measure, fit, choose | 25 min | difficulty 3
def fit_link(num_bytes: list[int], seconds: list[float]) -> Link:
    """Fit a link to measured messages: message i had num_bytes[i] bytes and took seconds[i].

    The model: a message of n bytes takes latency + n / bandwidth seconds. Find the latency and the
    bandwidth with the smallest sum of squared relative errors, (predicted / measured - 1)^2. Plain
    squares would do for equal sizes; measured from 1 byte to 100 MB, the error of the largest one
    would outweigh the whole latency. Returns Link(latency, bandwidth), in seconds and bytes/s.

    The errors are linear in the latency and in the seconds per byte: a least-squares problem with
    two unknowns. torch.linalg.lstsq is one way, in float64. The messages have two sizes at least.

    Example: two ranks time 0 bytes at 0.001 s and 1,000,000 bytes at 0.011 s between them: the
    latency is 0.001 s, the bandwidth 100,000,000 bytes/s.
    """
    ### BEGIN SOLUTION
    n = torch.tensor(num_bytes, dtype=torch.float64)
    t = torch.tensor(seconds, dtype=torch.float64)
    # predicted / measured = latency * (1 / t) + per_byte * (n / t), which should be 1
    columns = torch.stack([1 / t, n / t], dim=1)
    scale = columns.norm(dim=0)  # the columns' units differ by many powers of ten
    ones = torch.ones(len(t), 1, dtype=torch.float64)
    latency, per_byte = torch.linalg.lstsq(columns / scale, ones).solution[:, 0] / scale
    return Link(latency.item(), 1 / per_byte.item())
    ### END SOLUTION


def ring_wins_from(size: int, latency: float, bandwidth: float) -> float:
    """Find the bytes of a tensor from which on the ring all-reduce is the faster one.

    On N = size ranks, a power of two, 2 or more, a tensor of n bytes is summed by
    ring: 2 (N-1) messages in a row, of n/N bytes each;
    recursive doubling: log2(N) messages in a row, of n bytes each.
    A message of m bytes takes latency + m / bandwidth seconds, latency > 0. Returns the n at which
    both take the same time: below it doubling is faster, above it the ring. math.inf if the ring
    never is.

    Example: latency 0.001 s, bandwidth 1,000,000 bytes/s. On 2 ranks the ring takes 2 messages of
    n/2 bytes, doubling one of n: the ring never wins, math.inf. On 4 ranks 6 messages of n/4 bytes
    stand against 2 of n: both take 0.018 s at 8000 bytes.
    """
    ### BEGIN SOLUTION
    ring, doubling = 2 * (size - 1), math.log2(size)  # messages in a row
    more_messages = ring - doubling
    fewer_bytes = doubling - ring / size  # as a share of n
    if fewer_bytes <= 0:
        return math.inf
    return more_messages * latency * bandwidth / fewer_bytes
    ### END SOLUTION
