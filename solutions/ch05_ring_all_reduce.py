"""Exercises of chapter 5: the ring all-reduce, built from messages between neighbors.

Write the body, save, and run `minitron check 5.1` in a terminal or check("5.1") in a notebook. If
you are stuck, `minitron hint 5.1` gives hints in three steps; `minitron reset 5.1` restores the
original. The exercises do not build on each other, so you can take them in any order.

In 5.1 and 5.2 every rank runs your code. `group` is the process group of the ranks: group.rank()
is this rank's number, group.size() the number of ranks. Use only messages between these ranks:

    dist.send(tensor, group=group, group_dst=rank)    returns when the receiver has taken the tensor
    dist.recv(tensor, group=group, group_src=rank)    returns when the tensor is filled
    work = dist.isend(...); work = dist.irecv(...)    return immediately; call work.wait() later
"""

import math

import torch
import torch.distributed as dist
from torch import Tensor

from minitron.cost import Link, Volume


# Exercise 5.1 | Ring reduce-scatter | 30 min | difficulty 3 | replaces minitron.comm.collectives
def reduce_scatter_ring(flat: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Sum `flat` over the ranks; rank r ends with chunk r of the sum, and returns it.

    flat has shape (n,), with the same length and dtype on all N ranks. flat.tensor_split(N) divides
    it into one chunk per rank. The chunks are views of flat; their lengths differ by at most one,
    and if there are fewer values than ranks, some are empty. When rank r returns, chunk r of its
    flat holds the sum of all ranks' chunks r, and it returns that view. The other chunks may hold
    anything.

    The ring: in each of N-1 steps, rank r sends one chunk to the next rank, (r + 1) % N, receives
    another from the previous rank, (r - 1) % N, and adds what it received to its own chunk of the
    same number. It sends that sum in the next step. So each chunk travels around the ring, collects
    every rank's values, and must end on the rank that returns it. Which chunk must rank r send
    first? You may send empty chunks or skip them.

    Example: on 2 ranks, flat is [1, 2, 3] on rank 0 and [10, 20, 30] on rank 1. Chunk 0 has two
    values and chunk 1 has one. Rank 0 sends [3], receives [10, 20], and returns [11, 22]. Rank 1
    returns [33].
    """
    ### BEGIN SOLUTION
    rank, size = group.rank(), group.size()
    chunks = flat.tensor_split(size)
    for step in range(size - 1):
        outgoing = chunks[(rank - 1 - step) % size]
        total = chunks[(rank - 2 - step) % size]
        received = torch.empty_like(total)

        # If every rank waited for its send to be received, none would get to its receive.
        send = dist.isend(outgoing, group=group, group_dst=(rank + 1) % size)
        dist.recv(received, group=group, group_src=(rank - 1) % size)
        send.wait()
        total += received
    return chunks[rank]
    ### END SOLUTION


# Exercise 5.2 | Ring all-gather | 15 min | difficulty 2 | replaces minitron.comm.collectives
def all_gather_ring(flat: Tensor, group: dist.ProcessGroup) -> None:
    """Fill `flat` on every rank with the chunks of all ranks; at first, rank r has only chunk r.

    flat has shape (n,), with the same length and dtype on all N ranks. flat.tensor_split(N) divides
    it into one chunk per rank. The chunks are views of flat; their lengths differ by at most one,
    and if there are fewer values than ranks, some are empty. Before the call, rank r has valid
    values in chunk r only. Afterwards all of flat is valid and the same on every rank.

    The ring: in each of N-1 steps, rank r sends one chunk to the next rank, (r + 1) % N, and
    receives another from the previous rank, (r - 1) % N. It sends to no other rank. You may send
    empty chunks or skip them.

    Example: on 2 ranks, flat is [1, 2, ?] on rank 0 and [?, ?, 3] on rank 1. Rank 0 sends [1, 2]
    and receives [3]; rank 1 sends [3] and receives [1, 2]. Both end with [1, 2, 3].
    """
    ### BEGIN SOLUTION
    rank, size = group.rank(), group.size()
    chunks = flat.tensor_split(size)
    for step in range(size - 1):
        # Send what the previous step received.
        send = dist.isend(chunks[(rank - step) % size], group=group, group_dst=(rank + 1) % size)
        missing = chunks[(rank - 1 - step) % size]
        dist.recv(missing, group=group, group_src=(rank - 1) % size)
        send.wait()
    ### END SOLUTION


# Exercise 5.3 | Uneven chunks, to the byte | 20 min | difficulty 2 | replaces minitron.cost
def chunk_sizes(num_elements: int, size: int) -> list[int]:
    """Return the lengths of the chunks of `num_elements` values on `size` ranks, in rank order.

    The lengths add up to num_elements and differ by at most one, and the longer chunks come first,
    as in Tensor.tensor_split. Do not create a tensor: planning a training run asks for billions of
    values.

    Examples: chunk_sizes(3, 2) is [2, 1], chunk_sizes(10, 4) is [3, 3, 2, 2], and chunk_sizes(2, 4)
    is [1, 1, 0, 0].
    """
    ### BEGIN SOLUTION
    shorter, num_longer = divmod(num_elements, size)
    return [shorter + 1] * num_longer + [shorter] * (size - num_longer)
    ### END SOLUTION


def ring_all_reduce_volume(num_elements: int, element_size: int, size: int, rank: int) -> Volume:
    """Count the bytes that `rank` sends and receives in a ring all-reduce, exactly.

    The tensor has num_elements values of element_size bytes each. It is split into chunks of the
    lengths that chunk_sizes returns. There are N = size ranks. In each of 2 (N-1) steps, rank r
    sends one chunk to rank r + 1 and receives another from rank r - 1:

    - in the reduce-scatter, it sends chunks r-1, r-2, ... down to r+1;
    - in the all-gather, it sends chunks r, r-1, ... down to r+2.

    All rank and chunk numbers are mod N. Returns Volume(sent, received). With one rank, nothing is
    sent.

    Examples: 3 values of 4 bytes on 2 ranks make chunks of 8 and 4 bytes. Rank 0 sends chunk 1,
    then chunk 0, and receives chunk 0, then chunk 1: Volume(12, 12). With 10 values of 1 byte on 4
    ranks, rank 1 sends chunks 0, 3, 2 in the reduce-scatter and 1, 0, 3 in the all-gather:
    Volume(15, 14).
    """
    ### BEGIN SOLUTION
    chunks = [element_size * n for n in chunk_sizes(num_elements, size)]

    def sent_by(rank: int) -> int:
        without_two = sum(chunks) - chunks[rank % size], sum(chunks) - chunks[(rank + 1) % size]
        return sum(without_two)

    return Volume(sent_by(rank), sent_by(rank - 1))  # what the previous rank sends
    ### END SOLUTION


# Exercise 5.4 | Measure, fit, choose | 25 min | difficulty 3
def fit_link(num_bytes: list[int], seconds: list[float]) -> Link:
    """Fit a link to measured messages: message i had num_bytes[i] bytes and took seconds[i].

    The model: a message of n bytes takes latency + n / bandwidth seconds. Find the latency and the
    bandwidth that minimize the sum over all messages of the squared relative error,
    (predicted / measured - 1)^2. Returns Link(latency, bandwidth), in seconds and bytes/s.

    Why relative errors? With absolute errors and sizes from 1 byte to 100 MB, the error of the
    largest message would outweigh the whole latency.

    The relative errors are linear in the latency and in the seconds per byte, so this is a
    least-squares problem with two unknowns. One way to solve it is torch.linalg.lstsq in float64.
    There are at least two different message sizes.

    Example: a message of 0 bytes takes 0.001 s and one of 1,000,000 bytes takes 0.011 s. The
    latency is 0.001 s and the bandwidth 100,000,000 bytes/s.
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
    """Return the tensor size in bytes above which the ring all-reduce is faster than doubling.

    There are N = size ranks; N is a power of two, at least 2. To sum a tensor of n bytes,

    - the ring needs 2 (N-1) messages of n/N bytes, one after the other;
    - recursive doubling needs log2(N) messages of n bytes, one after the other.

    A message of m bytes takes latency + m / bandwidth seconds, with latency > 0. Returns the n at
    which both take the same time, or math.inf if the ring is never faster.

    Examples, with latency 0.001 s and bandwidth 1,000,000 bytes/s: on 2 ranks, the ring needs 2
    messages of n/2 bytes and doubling needs one of n bytes, so the ring is never faster: math.inf.
    On 4 ranks, the ring needs 6 messages of n/4 bytes and doubling needs 2 of n bytes. Both take
    0.018 s at 8000 bytes, so the result is 8000.
    """
    ### BEGIN SOLUTION
    ring, doubling = 2 * (size - 1), math.log2(size)  # messages
    more_messages = ring - doubling
    fewer_bytes = doubling - ring / size  # as a share of n
    if fewer_bytes <= 0:
        return math.inf
    return more_messages * latency * bandwidth / fewer_bytes
    ### END SOLUTION
