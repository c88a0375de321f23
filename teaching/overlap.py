"""What a step with data parallelism takes, predicted: compute on one side, one link on the other.

A bucket of gradients can leave when the last of them is ready, and when the link is free. What is
still on its way when the backward pass ends is exposed: everyone waits for it.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import accumulate

import torch

from minitron import cost
from minitron.config import ModelConfig
from minitron.cost.sharding import BUCKET_BYTES
from minitron.measure.ledger import Call, Span
from minitron.model.transformer import Transformer
from minitron.parallel.data.ddp import FIRST_BUCKET_BYTES, assign_buckets
from teaching.figures import Block


@dataclass(frozen=True)
class Compute:
    """Seconds from the start of the step, without communication.

    `ready[i]` is when the gradient of parameter i is complete; `backward` is the last of them.
    """

    forward: float
    ready: list[float]
    optimizer: float = 0.0
    """How long the optimizer takes."""

    @property
    def backward(self) -> float:
        return max(self.ready)


def compute_in_proportion(sizes: list[int], forward: float, backward: float) -> Compute:
    """Compute whose backward pass takes `backward` seconds, shared out by the parameters' sizes.

    It walks from the last parameter to the first one.
    """
    done = list(accumulate(reversed(sizes)))
    return Compute(forward, [forward + backward * part / done[-1] for part in reversed(done)])


def gradient_sizes(model: ModelConfig, bytes_per_value: int = 2) -> list[int]:
    """Bytes of each parameter's gradient, in the order of the forward pass, by the config alone."""
    with torch.device("meta"):
        return [bytes_per_value * p.numel() for p in Transformer(model).parameters()]


def in_buckets(sizes: list[int], bucket_bytes: int = BUCKET_BYTES) -> list[list[int]]:
    """Indices of the gradients in each of the package's buckets: a small first one, then others."""
    first = assign_buckets(sizes, min(FIRST_BUCKET_BYTES, bucket_bytes))[0]
    return [first, *assign_buckets(sizes[: -len(first)], bucket_bytes)]


def hidden_share(calls: Iterable[Call], spans: Iterable[Span]) -> float:
    """Return which part of the time in which a rank's messages travel, the rank computes in too.

    `calls` and `spans` are a ledger's: what was sent, and what was computed.
    """
    travels = []  # intervals that do not overlap
    for start, end in sorted((call.started, call.finished) for call in calls):
        if travels and start <= travels[-1][1]:
            travels[-1][1] = max(travels[-1][1], end)
        else:
            travels.append([start, end])
    both = sum(
        max(0.0, min(end, span.end) - max(start, span.start))
        for start, end in travels
        for span in spans
    )
    return both / sum(end - start for start, end in travels)


def transfers(
    ready: list[float],
    sizes: list[int],
    buckets: list[list[int]],
    num_ranks: int,
    latency: float,
    bandwidth: float,
) -> list[tuple[float, float]]:
    """Start and end, in seconds, of each bucket's all-reduce by a ring, one after the other.

    `buckets` lists the parameters of each, in the order of sending; `sizes` are bytes.
    """
    spans, free = [], 0.0
    for bucket in buckets:
        start = max(free, *(ready[index] for index in bucket))
        num_bytes = sum(sizes[index] for index in bucket)
        free = start + cost.ring_all_reduce_seconds(num_bytes, num_ranks, latency, bandwidth)
        spans.append((start, free))
    return spans


def exposed_seconds(compute: Compute, sent: list[tuple[float, float]]) -> float:
    """How long the last bucket is still on its way when the backward pass has ended."""
    return max(0.0, sent[-1][1] - compute.backward)


def step_lanes(compute: Compute, sent: list[tuple[float, float]]) -> dict[str, list[Block]]:
    """Two lanes for `timeline`, in milliseconds: the optimizer starts when all is there."""
    there = max(compute.backward, sent[-1][1] if sent else 0.0)
    phases = [("forward", 0.0, compute.forward), ("backward", compute.forward, compute.backward)]
    if compute.optimizer:
        phases.append(("optimizer", there, there + compute.optimizer))
    return {
        "predicted compute": [Block(kind, 1e3 * start, 1e3 * end) for kind, start, end in phases],
        "predicted network": [
            Block("communication", 1e3 * start, 1e3 * end) for start, end in sent
        ],
    }
