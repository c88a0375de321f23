"""Ring, naive, doubling and halving all-reduce from send/recv, and wrappers over torch.distributed.

The functions of the first part use only point-to-point messages, on any number of ranks and any
size of tensor. Every all-reduce works in place and leaves the same bits on every rank. What each
sends and how long it takes is in `minitron.cost.communication`, under the same name.

Read in this order: reduce_scatter_ring, all_gather_ring, ring_shift, all_reduce_ring; then the
others: naive, doubling, halving.
References: Patarasuk & Yuan 2009 (ring); Thakur, Rabenseifner & Gropp 2005, section 4.5.
"""

import math
from collections.abc import Callable, Iterable, Iterator
from functools import lru_cache

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from minitron.cost import power_of_two
from minitron.pytorch.spans import span

# gloo's. NCCL runs messages in the order in which they are posted: there, a receive ahead of its
# turn would hold up the send behind it, on all ranks at once.
POSTS_AHEAD = ("cpu",)

# Bytes. A chunk is one message up to here; a larger one travels in pieces, so that one is added
# while the next comes in, and what has come in is still in the core's cache.
LARGEST_PIECE = 2**20

# Ring: send to the next rank, receive from the one before


def all_reduce_ring(tensor: Tensor, group: ProcessGroup) -> None:
    """Sum `tensor` over the ranks, in place: every rank ends with the same bits."""
    flat = flattened(tensor)
    reduce_scatter_ring(flat, group)
    all_gather_ring(flat, group)


def reduce_scatter_ring(flat: Tensor, group: ProcessGroup) -> Tensor:
    """Sum chunk `rank` of `flat` (n,) over the ranks, and return it, a view of about (n/N,).

    In place: the other chunks hold partial sums afterwards. `flat` is cut as by tensor_split.
    """
    rank, size = group.rank(), group.size()
    chunks = in_pieces(flat, size)

    # A chunk starts at the rank after its own, and adds a term on every rank it visits.
    outgoing = [piece for step in range(size - 1) for piece in chunks[(rank - 1 - step) % size]]
    sums = [piece for step in range(size - 1) for piece in chunks[(rank - 2 - step) % size]]
    buffers = receive_buffers(len(chunks[0][0]), flat)
    incoming = [buffers[index % 3][: len(piece)] for index, piece in enumerate(sums)]

    for index in ring_shift(outgoing, incoming, group, ahead=2):
        sums[index] += incoming[index]
    return flat.tensor_split(size)[rank]


def receive_buffers(length: int, like: Tensor) -> list[Tensor]:
    """Return two to fill while a third is added, kept for the next call: fresh ones cost more.

    On a virtual machine the first touch of 4 KB can take 3 us, as long as sending them does. What
    is fake, or made in inference mode, is of no use to a later call, and is not kept.
    """
    is_plain = type(like) is Tensor and not torch.is_inference_mode_enabled()
    make = kept_buffers if is_plain else new_buffers
    return make(length, like.dtype, like.device)


def new_buffers(length: int, dtype: torch.dtype, device: torch.device) -> list[Tensor]:
    return [torch.empty(length, dtype=dtype, device=device) for _ in range(3)]


kept_buffers = lru_cache(maxsize=1)(new_buffers)


def all_gather_ring(flat: Tensor, group: ProcessGroup) -> None:
    """Fill `flat` (n,) with every rank's chunk: before, chunk `rank` is valid; after, all are."""
    rank, size = group.rank(), group.size()
    chunks = in_pieces(flat, size)
    outgoing = [piece for step in range(size - 1) for piece in chunks[(rank - step) % size]]
    incoming = [piece for step in range(size - 1) for piece in chunks[(rank - 1 - step) % size]]
    for _ in ring_shift(outgoing, incoming, group, ahead=len(incoming)):
        pass  # what came in is what goes out in the next step


def in_pieces(flat: Tensor, size: int) -> list[tuple[Tensor, ...]]:
    """Cut `flat` into a chunk for each rank, and each chunk into the pieces that are sent."""
    chunks = flat.tensor_split(size)
    num_pieces = math.ceil(chunks[0].nbytes / LARGEST_PIECE) or 1
    return [chunk.tensor_split(num_pieces) for chunk in chunks]


def ring_shift(
    outgoing: list[Tensor], incoming: list[Tensor], group: ProcessGroup, ahead: int
) -> Iterator[int]:
    """Send outgoing[step] to the next rank; yield each step once incoming[step] has arrived.

    Receives are posted up to `ahead` steps before their turn where that is possible: a message
    that finds its place ready needs no handshake.
    """
    following, previous = (group.rank() + 1) % group.size(), (group.rank() - 1) % group.size()
    if outgoing and outgoing[0].device.type not in POSTS_AHEAD:
        for step in range(len(outgoing)):
            exchange(outgoing[step], following, incoming[step], previous, group)
            yield step
        return

    receives = [dist.irecv(t, group=group, group_src=previous) for t in incoming[:ahead]]
    sends = []
    for step in range(len(outgoing)):
        for place in incoming[step + ahead : step + ahead + 1]:
            receives.append(dist.irecv(place, group=group, group_src=previous))
        sends.append(dist.isend(outgoing[step], group=group, group_dst=following))
        receives[step].wait()
        yield step
    for send in sends:
        send.wait()


def exchange(
    outgoing: Tensor, destination: int, incoming: Tensor, source: int, group: ProcessGroup
) -> None:
    """Send one tensor and receive another at the same time; returns when both are done."""
    start_exchange(outgoing, destination, incoming, source, group)()


def start_exchange(
    outgoing: Tensor, destination: int, incoming: Tensor, source: int, group: ProcessGroup
) -> Callable[[], Tensor]:
    """Start to send one tensor and receive another; returns a function that waits for the second.

    Posted together: if all ranks sent first and received then, each would wait for the next.
    """
    works = dist.batch_isend_irecv(
        [
            dist.P2POp(dist.isend, outgoing, group=group, group_peer=destination),
            dist.P2POp(dist.irecv, incoming, group=group, group_peer=source),
        ]
    )

    def wait() -> Tensor:
        for work in works:
            work.wait()
        return incoming

    return wait


def flattened(tensor: Tensor) -> Tensor:
    """View `tensor` as (n,), outside of autograd; raises ValueError if it is not contiguous."""
    if not tensor.is_contiguous():
        raise ValueError(
            f"a tensor of shape {tuple(tensor.shape)} with strides {tensor.stride()} cannot be "
            "reduced in place: pass a contiguous one, tensor.contiguous()"
        )
    return tensor.detach().view(-1)


# Naive: rank 0 does it all


def all_reduce_naive(tensor: Tensor, group: ProcessGroup) -> None:
    """Sum `tensor` over the ranks, in place: rank 0 receives all, adds, and sends the sum."""
    flat = flattened(tensor)
    if group.rank() > 0:
        dist.send(flat, group=group, group_dst=0)
        dist.recv(flat, group=group, group_src=0)
        return

    received = torch.empty_like(flat)
    for source in range(1, group.size()):
        dist.recv(received, group=group, group_src=source)
        flat += received
    for destination in range(1, group.size()):
        dist.send(flat, group=group, group_dst=destination)


# Doubling and halving: partners at distance 1, 2, 4, ...


def all_reduce_doubling(tensor: Tensor, group: ProcessGroup) -> None:
    """Sum `tensor` over the ranks, in place: swap whole tensors with log2(N) partners."""
    flat, rank = flattened(tensor), group.rank()
    received = torch.empty_like(flat)

    def double(distances: list[int]) -> None:
        for distance in distances:
            partner = rank ^ distance
            exchange(flat, partner, received, partner, group)
            flat.add_(received)  # a + b here, b + a there: the same bits

    with_power_of_two_ranks(double, flat, received, group)


def all_reduce_halving(tensor: Tensor, group: ProcessGroup) -> None:
    """Sum `tensor` over the ranks, in place, by recursive halving and then doubling.

    Halving is a reduce-scatter: each partner keeps adding one half of what both still sum, at
    last one chunk. Doubling is an all-gather: the same exchanges, backwards.
    """
    flat, rank = flattened(tensor), group.rank()
    received = torch.empty_like(flat)
    chunks = flat.tensor_split(power_of_two(group.size()))

    def block(rank: int, width: int) -> Tensor:
        first = rank - rank % width  # `width` chunks from here on, which lie side by side
        start = sum(map(len, chunks[:first]))
        return flat[start : start + sum(map(len, chunks[first : first + width]))]

    def halve_and_double(distances: list[int]) -> None:
        for width in reversed(distances):
            kept, given = block(rank, width), block(rank ^ width, width)
            exchange(given, rank ^ width, received[: len(kept)], rank ^ width, group)
            kept += received[: len(kept)]
        for width in distances:
            whole, missing = block(rank, width), block(rank ^ width, width)
            exchange(whole, rank ^ width, missing, rank ^ width, group)

    with_power_of_two_ranks(halve_and_double, flat, received, group)


def with_power_of_two_ranks(
    algorithm: Callable[[list[int]], None], flat: Tensor, received: Tensor, group: ProcessGroup
) -> None:
    """Run an algorithm for a power of two ranks, with distances 1, 2, 4, ..., on any number.

    The ranks beyond the power give their tensor to one below it, and get the sum at the end.
    """
    rank, size, power = group.rank(), group.size(), power_of_two(group.size())
    if rank >= power:
        dist.send(flat, group=group, group_dst=rank - power)
        dist.recv(flat, group=group, group_src=rank - power)
        return

    is_partner = rank + power < size
    if is_partner:
        dist.recv(received, group=group, group_src=rank + power)
        flat += received
    algorithm([2**k for k in range(power.bit_length() - 1)])
    if is_partner:
        dist.send(flat, group=group, group_dst=rank + power)


# PyTorch's own, under one name for all versions; with async_op they return a Work to wait for

# torch 2.13 renamed them, and warns of the old names
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def all_reduce(tensor: Tensor, group: ProcessGroup, async_op: bool = False):
    """Sum `tensor` over the ranks, in place."""
    with span(group, "all_reduce"):
        return dist.all_reduce(tensor, group=group, async_op=async_op)


def all_gather_single(output: Tensor, input: Tensor, group: ProcessGroup, async_op: bool = False):
    """Put every rank's `input` (n, ...) into `output` (N n, ...), in the order of the ranks."""
    with span(group, "all_gather"):
        return _all_gather(output, input, group=group, async_op=async_op)


def reduce_scatter_single(
    output: Tensor, input: Tensor, group: ProcessGroup, async_op: bool = False
):
    """Sum `input` (N n, ...) over the ranks; `output` (n, ...) is the part of this rank."""
    with span(group, "reduce_scatter"):
        return _reduce_scatter(output, input, group=group, async_op=async_op)


def broadcast(tensor: Tensor, source: int, group: ProcessGroup, async_op: bool = False):
    """Copy `tensor` of rank `source`, counted in the group, to all ranks of it, in place."""
    with span(group, "broadcast"):
        return dist.broadcast(tensor, group=group, group_src=source, async_op=async_op)


def broadcast_together(tensors: Iterable[Tensor], source: int, group: ProcessGroup) -> None:
    """Do the same for many tensors, in place; small neighbors share a message, and its latency.

    What is on the meta device has no values, and is left out.
    """
    for alike in in_messages(tensor for tensor in tensors if not tensor.is_meta):
        if len(alike) == 1:
            broadcast(alike[0], source, group)
            continue
        flat = torch.cat([tensor.flatten() for tensor in alike])
        broadcast(flat, source, group)
        for tensor, values in zip(alike, flat.split([t.numel() for t in alike]), strict=True):
            tensor.copy_(values.view_as(tensor))


def all_gather_together(tensors: Iterable[Tensor], group: ProcessGroup) -> Iterator[Tensor]:
    """Yield what all ranks have for each tensor (...), as (N, ...); small ones share a message."""
    for alike in in_messages(tensors):
        flat = torch.cat([tensor.flatten() for tensor in alike])
        gathered = flat.new_empty(group.size(), len(flat))
        all_gather_single(gathered.flatten(), flat, group)
        for tensor, parts in zip(alike, gathered.split([t.numel() for t in alike], 1), strict=True):
            yield parts.reshape(group.size(), *tensor.shape)


def in_messages(tensors: Iterable[Tensor]) -> Iterator[list[Tensor]]:
    """Group neighbors of one dtype and device, up to LARGEST_PIECE bytes unless one has more."""
    alike: list[Tensor] = []
    for tensor in tensors:
        fits = sum(each.nbytes for each in alike) + tensor.nbytes <= LARGEST_PIECE
        if alike and not (
            fits and alike[0].dtype == tensor.dtype and alike[0].device == tensor.device
        ):
            yield alike
            alike = []
        alike.append(tensor)
    if alike:
        yield alike


def all_reduce_max(tensor: Tensor, group: ProcessGroup) -> None:
    """Leave in each element of `tensor` the largest over the ranks, in place."""
    with span(group, "all_reduce"):
        dist.all_reduce(tensor, dist.ReduceOp.MAX, group=group)


def all_to_all_single(output: Tensor, input: Tensor, group: ProcessGroup) -> None:
    """Send part r of `input` (N n, ...) to rank r; part r of `output` is what rank r sent."""
    with span(group, "all_to_all"):
        dist.all_to_all_single(output, input, group=group)
