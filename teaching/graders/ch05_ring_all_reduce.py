"""Graders of chapter 5; those of the ring on real ranks have a file of their own.

Chunks are compared with torch.tensor_split, bytes with a ring that is walked message by message,
links with the one that made the measurements.
"""

import math
from collections.abc import Callable
from itertools import product

import torch

from minitron import cost
from teaching.graders import asked, expect
from teaching.graders.ch05_ring import grade_5_1, grade_5_2

__all__ = ["grade_5_1", "grade_5_2", "grade_5_3", "grade_5_4"]

# 5.3


def grade_5_3(chunk_sizes: Callable, ring_all_reduce_volume: Callable) -> None:
    """Compare the lengths with tensor_split, then the bytes with a walk round the ring."""
    for num_elements, size in [(12, 4), (10, 4), (3, 2), (7, 4), (2, 4), (0, 3), (5, 1), (11, 3)]:
        with asked(f"chunk_sizes(num_elements={num_elements}, size={size})"):
            _expect_chunks(chunk_sizes(num_elements, size), num_elements, size)
    with asked("chunk_sizes(num_elements=70_000_000_001, size=1024)"):
        _expect_large_chunks(chunk_sizes(70_000_000_001, 1024))

    for num_elements, size in [(12, 4), (10, 4), (3, 2), (2, 4), (0, 3), (5, 1), (1001, 7)]:
        for element_size, rank in product((1, 4), range(size)):
            with asked(f"ring_all_reduce_volume(num_elements={num_elements}, "
                       f"element_size={element_size}, size={size}, rank={rank})"):
                volume = ring_all_reduce_volume(num_elements, element_size, size, rank)
                _expect_volume(volume, num_elements, element_size, size, rank)


def _expect_chunks(answer, num_elements: int, size: int) -> None:
    right = [len(chunk) for chunk in torch.empty(num_elements).tensor_split(size)]
    integers = isinstance(answer, list) and all(type(n) is int for n in answer)
    expect(integers, seen=f"it returned {answer!r:.80}",
           likely="a list of integers: divide with //")
    likely = "num_elements // size for each, and one more for each of the first " \
             "num_elements % size"
    if len(answer) != size:
        likely = f"return one length for each of the {size} ranks, 0 for an empty chunk"
    elif sum(answer) != num_elements:
        likely = f"they add up to {sum(answer)}: what becomes of the remainder of the division?"
    elif sorted(answer) == sorted(right):
        likely = "the longer ones come first"
    elif max(answer) - min(answer) > 1:
        likely = "lengths differ by at most one: in every step the ring waits for the longest chunk"
    expect(answer == right, seen=f"it returned {answer}, not {right}", likely=likely)


def _expect_large_chunks(answer: list[int]) -> None:
    right = cost.chunk_sizes(70_000_000_001, 1024)
    expect(answer == right, seen=f"it starts with {answer[:3]}, not {right[:3]}",
           likely="use integers: a float cannot hold all the digits")


def walk(num_elements: int, element_size: int, size: int) -> list[tuple[int, int]]:
    """Bytes sent and received by each rank, message by message."""
    chunks = [element_size * len(c) for c in torch.empty(num_elements).tensor_split(size)]
    sent, received = [0] * size, [0] * size
    for first in (-1, 0):  # the chunk that a rank sends first, counted from its own
        for step, rank in product(range(size - 1), range(size)):
            message = chunks[(rank + first - step) % size]
            sent[rank] += message
            received[(rank + 1) % size] += message
    return list(zip(sent, received, strict=True))


def _expect_volume(answer, num_elements: int, element_size: int, size: int, rank: int) -> None:
    right = walk(num_elements, element_size, size)[rank]
    pair = isinstance(answer, tuple) and [type(n) for n in answer] == [int, int]
    expect(pair, seen=f"it returned {answer!r:.80}",
           likely="Volume(sent, received), two integers: divide with //, if at all")
    answer = tuple(answer)
    expect(answer == right, seen=f"{answer} bytes sent and received, not {right}",
           likely=_why_other_volume(answer, num_elements, element_size, size, rank))


def _why_other_volume(
    answer: tuple[int, int], num_elements: int, element_size: int, size: int, rank: int
) -> str:
    right, total = walk(num_elements, element_size, size)[rank], num_elements * element_size
    scatter = cost.ring_reduce_scatter_volume(num_elements, element_size, size, rank)
    gather = cost.ring_all_gather_volume(num_elements, element_size, size, rank)
    faults = {
        right[::-1]: "sent and received are exchanged",
        tuple(gather): "that is only the all-gather: the reduce-scatter comes before it",
        tuple(scatter): "that is only the reduce-scatter: the all-gather sends about as much again",
        (2 * total, 2 * total): "that is every chunk twice: a rank sends two of them only once",
        (2 * (size - 1) * total,) * 2: "a message is one chunk, not the tensor",
        (right[0] // element_size, right[1] // element_size):
            f"those are numbers of values: each value has {element_size} bytes",
        (right[0], right[0]): "a rank receives what the previous rank sends: with uneven chunks "
                              "that differs from what it sends itself",
    }
    even = 2 * (size - 1) * total // size
    likely = "list the chunks of its 2 (N-1) messages as in the docstring, and add up their bytes"
    if answer == (even, even):
        likely = "2 (N-1)/N of the tensor is correct for equal chunks; these are not equal"
    return faults.get(answer, likely)


# 5.4

LINKS = [cost.Link(1e-3, 1e8), cost.Link(2e-5, 25e9), cost.Link(5e-6, 4e11)]
SIZES = [0, 1_000, 100_000, 10_000_000, 100_000_000]


def grade_5_4(fit_link: Callable, ring_wins_from: Callable) -> None:
    """Fit exact and disturbed measurements of known links; then compare the times at the answer."""
    for link in LINKS:
        seconds = [cost.message_seconds(n, *link) for n in SIZES]
        with asked(f"fit_link({SIZES}, seconds) with exact seconds of {_link(link)}"):
            _expect_link(fit_link(list(SIZES), list(seconds)), link, SIZES, seconds)
    link = LINKS[1]
    disturbed = [factor * cost.message_seconds(n, *link) for n, factor in
                 zip(SIZES, (1.02, 0.98, 1.03, 0.97, 1.2), strict=True)]
    with asked(f"fit_link({SIZES}, seconds), where the seconds are some percent off those of "
               f"{_link(link)}: {', '.join(f'{t:.3g}' for t in disturbed)}"):
        right = cost.fit_link(SIZES, disturbed)
        _expect_link(fit_link(list(SIZES), list(disturbed)), right, SIZES, disturbed)

    for size, link in product((8, 4, 2, 64, 1024), LINKS):
        with asked(f"ring_wins_from(size={size}, latency={link.latency:g}, "
                   f"bandwidth={link.bandwidth:g})"):
            _expect_crossover(ring_wins_from(size, *link), size, link)


def _expect_link(answer, right: cost.Link, sizes: list[int], seconds: list[float]) -> None:
    pair = isinstance(answer, tuple) and len(answer) == 2
    expect(pair and all(isinstance(n, float) for n in answer), seen=f"it returned {answer!r:.80}",
           likely="Link(latency, bandwidth), two floats: tensor.item() makes one")
    close = all(math.isclose(a, b, rel_tol=1e-4) for a, b in zip(answer, right, strict=True))
    expect(close, seen=f"{_link(cost.Link(*answer))}; correct is {_link(right)}",
           likely=_why_other_link(cost.Link(*answer), right, sizes, seconds))


def _why_other_link(
    answer: cost.Link, right: cost.Link, sizes: list[int], seconds: list[float]
) -> str:
    if math.isclose(answer.bandwidth, 1 / right.bandwidth, rel_tol=1e-3):
        return "that is the seconds per byte: the bandwidth is its reciprocal"
    if math.isclose(answer.latency, right.bandwidth, rel_tol=1e-3) or math.isclose(
            answer.latency, 1 / right.bandwidth, rel_tol=1e-3):
        return "latency and bandwidth are exchanged"
    if math.isclose(answer.bandwidth, 8 * right.bandwidth, rel_tol=1e-3):
        return "that is bits per second: return bytes per second"
    if abs(answer.latency) < 1e-3 * right.latency:
        return "a line through the origin has no latency: fit two unknowns"
    plain = _plain_fit(sizes, seconds)
    if math.isclose(answer.latency, plain.latency, rel_tol=1e-3):
        return "that minimizes the absolute errors, so the largest message alone decides: " \
               "divide each error by its measured time"
    return "minimize the sum of (predicted / measured - 1)^2 over all messages, in float64: the " \
           "coefficients are 1 / t and n / t, and the right-hand side is 1"


def _plain_fit(sizes: list[int], seconds: list[float]) -> cost.Link:
    n, t = (torch.tensor(values, dtype=torch.float64) for values in (sizes, seconds))
    per_byte = ((n - n.mean()) * (t - t.mean())).sum() / ((n - n.mean()) ** 2).sum()
    return cost.Link(float(t.mean() - per_byte * n.mean()), float(1 / per_byte))


def _link(link: cost.Link) -> str:
    return f"latency {link.latency:.3g} s, bandwidth {link.bandwidth:.3g} bytes/s"


def _expect_crossover(answer, size: int, link: cost.Link) -> None:
    expect(isinstance(answer, int | float), seen=f"it returned {answer!r:.80}",
           likely="a number of bytes, or math.inf")
    if size == 2:
        expect(answer == math.inf, seen=f"it returned {answer:g}, not inf",
               likely="on 2 ranks the ring sends as many bytes as doubling, in twice the messages")
        return
    times = [seconds(answer, size, *link) for seconds in
             (cost.ring_all_reduce_seconds, cost.doubling_all_reduce_seconds)]
    expect(answer > 0 and math.isfinite(answer) and math.isclose(*times, rel_tol=1e-6),
           seen=f"at {answer:g} bytes the ring takes {times[0]:.4g} s, doubling {times[1]:.4g} s",
           likely=_why_other_crossover(answer, size, link))


def _why_other_crossover(answer: float, size: int, link: cost.Link) -> str:
    steps, doubling = 2 * (size - 1), math.log2(size)
    product_ = link.latency * link.bandwidth
    faults = {
        "a ring all-reduce has 2 (N-1) messages: a reduce-scatter and an all-gather":
            (size - 1 - doubling) * product_ / (doubling - (size - 1) / size),
        "the ring sends 2 (N-1) messages of n/N bytes each: 2 (N-1)/N of n in total":
            (steps - doubling) * product_ / (doubling - 1 / size),
        "doubling sends the whole tensor in each of its log2(N) messages, not once":
            (steps - doubling) * product_ / abs(1 - steps / size),
        "use log2(N), not the natural logarithm":
            (steps - math.log(size)) * product_ / (math.log(size) - steps / size),
        "is that a number of bits or of values? Return bytes; the bandwidth is in bytes per second":
            8 * (steps - doubling) * product_ / (doubling - steps / size),
    }
    for likely, value in faults.items():
        if math.isclose(answer, value, rel_tol=1e-6):
            return likely
    return "set 2 (N-1) (latency + n / N / bandwidth) and log2(N) (latency + n / bandwidth) " \
           "equal, and solve for n"
