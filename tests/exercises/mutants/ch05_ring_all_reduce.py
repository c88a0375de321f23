"""Wrong answers to chapter 5's exercises that people really give, and other right ones.

Each wrong answer's docstring is the misconception; `MISTAKES` pairs it with what the grader must
say of it. `RIGHT_ANSWERS` are written differently from ours and must pass.
"""

import math
from itertools import accumulate

import numpy
import torch
import torch.distributed as dist

from minitron.cost import Link, Volume

# 5.1


def swap(outgoing, to, incoming, source, group):
    """Send and receive at the same time."""
    send = dist.isend(outgoing, group=group, group_dst=to)
    dist.recv(incoming, group=group, group_src=source)
    send.wait()


def ring_of(flat, group):
    rank, size = group.rank(), group.size()
    return flat.tensor_split(size), rank, size, (rank + 1) % size, (rank - 1) % size


def right_batched(flat, group):
    """Both messages posted by one call, bounds by hand, empty messages left out."""
    size, rank = group.size(), group.rank()
    bounds = [0, *accumulate(n for n in map(len, flat.tensor_split(size)))]

    def chunk(index):
        return flat[bounds[index % size] : bounds[index % size + 1]]

    for step in range(1, size):
        incoming = torch.zeros_like(chunk(rank - step - 1))
        operations = []
        if len(chunk(rank - step)):
            operations.append(
                dist.P2POp(
                    dist.isend, chunk(rank - step), group=group, group_peer=(rank + 1) % size
                )
            )
        if len(incoming):
            operations.append(
                dist.P2POp(dist.irecv, incoming, group=group, group_peer=(rank + size - 1) % size)
            )
        for work in dist.batch_isend_irecv(operations) if operations else []:
            work.wait()
        chunk(rank - step - 1).add_(incoming)
    return chunk(rank)


def right_rank_0_receives_first(flat, group):
    """Blocking calls, and one rank that breaks the circle."""
    chunks, rank, size, after, before = ring_of(flat, group)
    for step in range(size - 1):
        outgoing, total = chunks[rank - 1 - step], chunks[(rank - 2 - step) % size]
        received = torch.empty_like(total)
        if rank == 0:
            dist.recv(received, group=group, group_src=before)
            dist.send(outgoing, group=group, group_dst=after)
        else:
            dist.send(outgoing, group=group, group_dst=after)
            dist.recv(received, group=group, group_src=before)
        total.add_(received)
    return chunks[rank]


def never_waits_for_its_send(flat, group):
    """What was sent has arrived somewhere: this rank may still be reading it."""
    chunks, rank, size, after, before = ring_of(flat, group)
    for step in range(size - 1):
        total = chunks[(rank - 2 - step) % size]
        received = torch.empty_like(total)
        dist.isend(chunks[(rank - 1 - step) % size], group=group, group_dst=after)
        dist.recv(received, group=group, group_src=before)
        total += received
    return chunks[rank]


def gathers_without_waiting(flat, group):
    """recv waits, so nobody else needs to: isend is still under way."""
    chunks, rank, size, after, before = ring_of(flat, group)
    for step in range(size - 1):
        dist.isend(chunks[(rank - step) % size], group=group, group_dst=after)
        dist.recv(chunks[(rank - 1 - step) % size], group=group, group_src=before)


def sends_the_whole_tensor(flat, group):
    """The summands go round the ring: the whole tensor goes over the wire N-1 times."""
    chunks, rank, size, after, before = ring_of(flat, group)
    passing = flat.clone()
    for _ in range(size - 1):
        received = torch.empty_like(flat)
        swap(passing, after, received, before, group)
        flat += received
        passing = received
    return chunks[rank]


def one_step_short(flat, group):
    """The last step is missing."""
    chunks, rank, size, after, before = ring_of(flat, group)
    for step in range(size - 2):
        total = chunks[(rank - 2 - step) % size]
        received = torch.empty_like(total)
        swap(chunks[(rank - 1 - step) % size], after, received, before, group)
        total += received
    return chunks[rank]


def starts_with_its_own(flat, group):
    """Rank r sends chunk r first: then chunk r + 1 ends there."""
    chunks, rank, size, after, before = ring_of(flat, group)
    for step in range(size - 1):
        total = chunks[(rank - 1 - step) % size]
        received = torch.empty_like(total)
        swap(chunks[(rank - step) % size], after, received, before, group)
        total += received
    return chunks[(rank + 1) % size]


def straight_to_the_owner(flat, group):
    """Each chunk sent to its owner: as many bytes, but not to the neighbor."""
    chunks, rank, size, *_ = ring_of(flat, group)
    for distance in range(1, size):
        to, source = (rank + distance) % size, (rank - distance) % size
        received = torch.empty_like(chunks[rank])
        swap(chunks[to], to, received, source, group)
        chunks[rank].add_(received)
    return chunks[rank]


def cuts_rounded_up(flat, group):
    """Chunks of ceil(n / N) values, the last ones shorter: tensor_split cuts otherwise."""
    rank, size = group.rank(), group.size()
    length = -(-len(flat) // size)
    chunks = [flat[index * length : (index + 1) * length] for index in range(size)]
    for step in range(size - 1):
        total = chunks[(rank - 2 - step) % size]
        received = torch.empty_like(total)
        swap(
            chunks[(rank - 1 - step) % size], (rank + 1) % size, received, (rank - 1) % size, group
        )
        total += received
    return chunks[rank]


def whole_all_reduce(flat, group):
    """The all-gather as well: only the reduce-scatter is asked for."""
    chunk = right_rank_0_receives_first(flat, group)
    right_carries_along(flat, group)
    return chunk


def returns_a_copy(flat, group):
    """The values are right, but the caller wants the place in flat."""
    return right_rank_0_receives_first(flat, group).clone()


def sends_its_own_summands(flat, group):
    """Every step sends what the rank had at the start: nothing is collected."""
    chunks, rank, size, after, before = ring_of(flat, group)
    first = flat.clone().tensor_split(size)
    for step in range(size - 1):
        total = chunks[(rank - 2 - step) % size]
        received = torch.empty_like(total)
        swap(first[(rank - 1 - step) % size], after, received, before, group)
        total += received
    return chunks[rank]


def adds_out_of_place(flat, group):
    """chunk + received is a new tensor: flat does not hold the sum."""
    chunks, rank, size, after, before = ring_of(flat, group)
    chunks = list(chunks)
    for step in range(size - 1):
        index = (rank - 2 - step) % size
        received = torch.empty_like(chunks[index])
        swap(chunks[(rank - 1 - step) % size], after, received, before, group)
        chunks[index] = chunks[index] + received
    return chunks[rank]


def all_send_first(flat, group):
    """Everyone sends, then everyone receives: nobody comes to receive."""
    chunks, rank, size, after, before = ring_of(flat, group)
    for step in range(size - 1):
        total = chunks[(rank - 2 - step) % size]
        received = torch.empty_like(total)
        dist.send(chunks[(rank - 1 - step) % size], group=group, group_dst=after)
        dist.recv(received, group=group, group_src=before)
        total += received
    return chunks[rank]


def uses_all_reduce(flat, group):
    """The library can do it: it can, and that is not the exercise."""
    dist.all_reduce(flat, group=group)
    return flat.tensor_split(group.size())[group.rank()]


# 5.2


def right_receives_posted_first(flat, group):
    """All receives have their places before anything is sent."""
    chunks, rank, size, after, before = ring_of(flat, group)
    receives = [
        dist.irecv(chunks[(rank - step) % size], group=group, group_src=before)
        for step in range(1, size)
    ]
    sends = []
    for step in range(size - 1):
        if step > 0:
            receives[step - 1].wait()
        sends.append(dist.isend(chunks[(rank - step) % size], group=group, group_dst=after))
    for work in [*receives[-1:], *sends]:
        work.wait()


def right_carries_along(flat, group):
    """A copy is passed on and written where it belongs; rank 0 receives first."""
    chunks, rank, size, after, before = ring_of(flat, group)
    carried = chunks[rank].clone()
    for owner in [(rank - step) % size for step in range(1, size)]:
        received = torch.empty_like(chunks[owner])
        if rank == 0:
            dist.recv(received, group=group, group_src=before)
            dist.send(carried, group=group, group_dst=after)
        else:
            dist.send(carried, group=group, group_dst=after)
            dist.recv(received, group=group, group_src=before)
        chunks[owner].copy_(received)
        carried = received


def gathers_whole_tensors(flat, group):
    """The tensor goes round, rubbish and all."""
    chunks, rank, size, after, before = ring_of(flat, group)
    for step in range(size - 1):
        received = torch.empty_like(flat)
        swap(flat, after, received, before, group)
        owner = (rank - 1 - step) % size
        chunks[owner].copy_(received.tensor_split(size)[owner])


def gathers_one_step_short(flat, group):
    """The last step is missing."""
    chunks, rank, size, after, before = ring_of(flat, group)
    for step in range(size - 2):
        swap(chunks[(rank - step) % size], after, chunks[(rank - 1 - step) % size], before, group)


def gathers_one_step_more(flat, group):
    """N steps for N ranks: in the last one everybody gets what it came with."""
    chunks, rank, size, after, before = ring_of(flat, group)
    for step in range(size if size > 1 else 0):
        received = torch.empty_like(chunks[(rank - 1 - step) % size])
        swap(chunks[(rank - step) % size], after, received, before, group)
        chunks[(rank - 1 - step) % size].copy_(received)


def gathers_on_one_rank_too(flat, group):
    """N steps for N ranks, and so one on a single rank: it would be its own neighbor."""
    chunks, rank, size, after, before = ring_of(flat, group)
    for step in range(size):
        swap(chunks[(rank - step) % size], after, chunks[(rank - 1 - step) % size], before, group)


def sends_its_own_again(flat, group):
    """Every step sends the rank's own chunk: the others never get further than one rank."""
    chunks, rank, size, after, before = ring_of(flat, group)
    for step in range(size - 1):
        received = torch.empty_like(chunks[(rank - 1) % size])
        swap(chunks[rank], after, received, before, group)
        chunks[(rank - 1 - step) % size][: len(received)] = received[
            : len(chunks[(rank - 1 - step) % size])
        ]


def wrong_places(flat, group):
    """What comes in is put where the next rank's chunk belongs."""
    chunks, rank, size, after, before = ring_of(flat, group)
    carried = chunks[rank].clone()
    for step in range(1, size):
        received = torch.empty_like(chunks[(rank - step) % size])
        swap(carried, after, received, before, group)
        place = chunks[(rank + step) % size]
        place[: len(received)] = received[: len(place)]
        carried = received


def gathers_backwards(flat, group):
    """The ring turned round: rank r sends to r - 1."""
    chunks, rank, size, after, before = ring_of(flat, group)
    for step in range(size - 1):
        swap(chunks[(rank + step) % size], before, chunks[(rank + 1 + step) % size], after, group)


def to_everyone(flat, group):
    """Each rank sends its chunk to all the others: no ring, and N-1 receivers at once."""
    chunks, rank, size, *_ = ring_of(flat, group)
    for distance in range(1, size):
        to, source = (rank + distance) % size, (rank - distance) % size
        swap(chunks[rank], to, chunks[source], source, group)


def starts_at_the_wrong_chunk(flat, group):
    """As if reduce-scatter had left chunk r + 1 on rank r: the own chunk is overwritten."""
    chunks, rank, size, after, before = ring_of(flat, group)
    for step in range(size - 1):
        swap(chunks[(rank + 1 - step) % size], after, chunks[(rank - step) % size], before, group)


def gathers_all_send_first(flat, group):
    """Everyone sends, then everyone receives: nobody comes to receive."""
    chunks, rank, size, after, before = ring_of(flat, group)
    for step in range(size - 1):
        dist.send(chunks[(rank - step) % size], group=group, group_dst=after)
        dist.recv(chunks[(rank - 1 - step) % size], group=group, group_src=before)


def never_waits(flat, group):
    """irecv has returned, so the chunk is there: it is on its way."""
    chunks, rank, size, after, before = ring_of(flat, group)
    works = []
    for step in range(size - 1):
        works.append(dist.isend(chunks[(rank - step) % size], group=group, group_dst=after))
        works.append(dist.irecv(chunks[(rank - 1 - step) % size], group=group, group_src=before))
    for work in works:
        work.wait()


# 5.3


def right_differences(num_elements, size):
    """The bounds of chunk r, rounded up, and what lies between them."""
    bounds = [-(-num_elements * rank // size) for rank in range(size + 1)]
    return sorted((b - a for a, b in zip(bounds, bounds[1:], strict=False)), reverse=True)


def forgets_the_remainder(num_elements, size):
    """Integer division: the last values are in no chunk."""
    return [num_elements // size] * size


def remainder_to_the_last(num_elements, size):
    """The last rank takes what is left."""
    chunks = [num_elements // size] * size
    chunks[-1] += num_elements % size
    return chunks


def longer_ones_last(num_elements, size):
    """The longer chunks at the end."""
    shorter, num_longer = divmod(num_elements, size)
    return [shorter] * (size - num_longer) + [shorter + 1] * num_longer


def rounded_up(num_elements, size):
    """As torch.chunk: rounded up, so the last ones are short, and there may be too few."""
    length = math.ceil(num_elements / size)
    return [
        len(range(start, min(start + length, num_elements)))
        for start in range(0, num_elements, length or 1)
    ]


def as_floats(num_elements, size):
    """A share of everything: values cannot be halved."""
    return [num_elements / size] * size


def right_step_by_step(num_elements, element_size, size, rank):
    """Every message by itself."""
    shorter, num_longer = divmod(num_elements, size)

    def num_bytes(chunk):
        return element_size * (shorter + (chunk % size < num_longer))

    def sends(rank):
        scatter = sum(num_bytes(rank - step) for step in range(1, size))
        return scatter + sum(num_bytes(rank - step) for step in range(size - 1))

    return Volume(sends(rank), sends(rank - 1))


def chunks_of(num_elements, element_size, size):
    shorter, num_longer = divmod(num_elements, size)
    return [element_size * (shorter + (index < num_longer)) for index in range(size)]


def equal_chunks(num_elements, element_size, size, rank):
    """2 (N-1)/N of the tensor: the chunks are not equal."""
    num_bytes = 2 * (size - 1) * num_elements * element_size // size
    return Volume(num_bytes, num_bytes)


def as_much_in_as_out(num_elements, element_size, size, rank):
    """Sent is received: by another rank."""
    sent = right_step_by_step(num_elements, element_size, size, rank).sent
    return Volume(sent, sent)


def scatter_alone(num_elements, element_size, size, rank):
    """Half of the work: the sum must come back to everyone."""
    chunks = chunks_of(num_elements, element_size, size)
    return Volume(sum(chunks) - chunks[rank], sum(chunks) - chunks[rank - 1])


def n_steps(num_elements, element_size, size, rank):
    """N steps for N ranks."""
    num_bytes = 2 * num_elements * element_size
    return Volume(num_bytes, num_bytes)


def whole_tensors(num_elements, element_size, size, rank):
    """The whole tensor in every message."""
    num_bytes = 2 * (size - 1) * num_elements * element_size
    return Volume(num_bytes, num_bytes)


def values_not_bytes(num_elements, element_size, size, rank):
    """A value is not a byte."""
    return right_step_by_step(num_elements, 1, size, rank)


def exchanged(num_elements, element_size, size, rank):
    """Received, sent."""
    return Volume(*reversed(right_step_by_step(num_elements, element_size, size, rank)))


# 5.4


def right_normal_equations(num_bytes, seconds):
    """Weighted means, without a library for least squares."""
    weights = [1 / t**2 for t in seconds]
    total = sum(weights)
    n0 = sum(w * n for w, n in zip(weights, num_bytes, strict=True)) / total
    t0 = sum(w * t for w, t in zip(weights, seconds, strict=True)) / total
    rows = list(zip(weights, num_bytes, seconds, strict=True))
    slope = sum(w * (n - n0) * (t - t0) for w, n, t in rows)
    slope /= sum(w * (n - n0) ** 2 for w, n, _ in rows)
    return Link(t0 - slope * n0, 1 / slope)


def plain_squares(num_bytes, seconds):
    """Absolute errors: the largest message alone decides."""
    per_byte, latency = numpy.polyfit(num_bytes, seconds, 1)
    return Link(float(latency), float(1 / per_byte))


def seconds_per_byte(num_bytes, seconds):
    """The slope is not the bandwidth, but 1 over it."""
    latency, bandwidth = right_normal_equations(num_bytes, seconds)
    return Link(latency, 1 / bandwidth)


def through_the_origin(num_bytes, seconds):
    """Bytes over seconds of the longest message: no latency."""
    return Link(0.0, num_bytes[-1] / seconds[-1])


def exchanged_link(num_bytes, seconds):
    """polyfit gives the slope first."""
    latency, bandwidth = right_normal_equations(num_bytes, seconds)
    return Link(bandwidth, latency)


def in_bits(num_bytes, seconds):
    """Networks are sold by the bit."""
    latency, bandwidth = right_normal_equations(num_bytes, seconds)
    return Link(latency, 8 * bandwidth)


def first_and_last(num_bytes, seconds):
    """A line through two of the points: the others count as well."""
    per_byte = (seconds[-1] - seconds[0]) / (num_bytes[-1] - num_bytes[0])
    return Link(seconds[0] - per_byte * num_bytes[0], 1 / per_byte)


def as_tensors(num_bytes, seconds):
    """A tensor of one value is not a float."""
    latency, bandwidth = right_normal_equations(num_bytes, seconds)
    return Link(torch.tensor(latency), torch.tensor(bandwidth))


def right_bisection(size, latency, bandwidth):
    """The difference of the times is a straight line in n: its zero by halving."""

    def gain(n):
        ring = 2 * (size - 1) * (latency + n / size / bandwidth)
        return math.log2(size) * (latency + n / bandwidth) - ring

    low, high = 0.0, 1e30
    if gain(high) <= 0:
        return math.inf
    for _ in range(300):
        middle = (low + high) / 2
        low, high = (low, middle) if gain(middle) > 0 else (middle, high)
    return high


def solved(more_messages, fewer_bytes, latency, bandwidth):
    return more_messages * latency * bandwidth / fewer_bytes if fewer_bytes > 0 else math.inf


def half_a_ring(size, latency, bandwidth):
    """N-1 messages: that is only the reduce-scatter."""
    steps = math.log2(size)
    return (
        solved(size - 1 - steps, steps - (size - 1) / size, latency, bandwidth)
        if size > 2
        else math.inf
    )


def one_chunk_in_all(size, latency, bandwidth):
    """The ring sends one chunk of n/N bytes: it sends 2 (N-1) of them."""
    steps = math.log2(size)
    return (
        solved(2 * (size - 1) - steps, steps - 1 / size, latency, bandwidth)
        if size > 2
        else math.inf
    )


def natural_logarithm(size, latency, bandwidth):
    """log is not log2."""
    steps = math.log(size)
    return solved(2 * (size - 1) - steps, steps - 2 * (size - 1) / size, latency, bandwidth)


def never_infinite(size, latency, bandwidth):
    """Divides whatever the sign: on 2 ranks there is no such length."""
    steps = math.log2(size)
    return (2 * (size - 1) - steps) * latency * bandwidth / max(steps - 2 * (size - 1) / size, 1e-9)


def in_bits_again(size, latency, bandwidth):
    """Bits for bytes."""
    steps = math.log2(size)
    return 8 * solved(2 * (size - 1) - steps, steps - 2 * (size - 1) / size, latency, bandwidth)


RIGHT_ANSWERS = {
    "reduce_scatter_ring": [right_batched, right_rank_0_receives_first],
    "all_gather_ring": [right_receives_posted_first, right_carries_along],
    "chunk_sizes": [right_differences],
    "ring_all_reduce_volume": [right_step_by_step],
    "fit_link": [right_normal_equations],
    "ring_wins_from": [right_bisection],
}

MISTAKES = {
    "reduce_scatter_ring": {
        starts_with_its_own: "rank r first sends chunk r - 1",
        sends_the_whole_tensor: "the whole tensor is sent in every step",
        one_step_short: "too few steps",
        straight_to_the_owner: "rank r sends only to (r + 1) % N",
        cuts_rounded_up: "one chunk as in tensor_split",
        whole_all_reduce: "is that a complete all-reduce",
        returns_a_copy: "a copy was returned",
        sends_its_own_summands: "send the sum of the previous step",
        adds_out_of_place: "chunk + received makes a new tensor",
        all_send_first: "start an isend, receive, then wait",
        uses_all_reduce: "all_reduce is called; use only recv and send",
        never_waits_for_its_send: "never waited for",
    },
    "all_gather_ring": {
        sends_its_own_again: "send in each step what the previous step received",
        gathers_whole_tensors: "the whole tensor is sent in every step",
        gathers_one_step_short: "too few steps",
        gathers_one_step_more: "one step too many",
        gathers_on_one_rank_too: "a single rank has no neighbor",
        wrong_places: "receive each chunk in its own place",
        gathers_backwards: "rank r sends only to (r + 1) % N",
        to_everyone: "rank r sends only to (r + 1) % N",
        starts_at_the_wrong_chunk: "the rank's own chunk was valid before",
        gathers_all_send_first: "start an isend, receive, then wait",
        never_waits: "some values were never filled",
        gathers_without_waiting: "never waited for",
    },
    "chunk_sizes": {
        forgets_the_remainder: "what becomes of the remainder",
        remainder_to_the_last: "lengths differ by at most one",
        longer_ones_last: "the longer ones come first",
        rounded_up: "differ by at most one",
        as_floats: "a list of integers",
    },
    "ring_all_reduce_volume": {
        equal_chunks: "correct for equal chunks",
        as_much_in_as_out: "receives what the previous rank sends",
        scatter_alone: "that is only the reduce-scatter",
        n_steps: "a rank sends two of them only once",
        whole_tensors: "a message is one chunk",
        values_not_bytes: "those are numbers of values",
        exchanged: "sent and received are exchanged",
    },
    "fit_link": {
        plain_squares: "the largest message alone decides",
        through_the_origin: "has no latency",
        seconds_per_byte: "that is the seconds per byte",
        exchanged_link: "latency and bandwidth are exchanged",
        in_bits: "bits per second",
        first_and_last: "over all messages",
        as_tensors: "two floats",
    },
    "ring_wins_from": {
        half_a_ring: "2 (N-1) messages",
        never_infinite: "in twice the messages",
        one_chunk_in_all: "n/N bytes each",
        natural_logarithm: "not the natural logarithm",
        in_bits_again: "bits",
    },
}
