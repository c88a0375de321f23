"""How long a step takes and what a rank holds, for any layout, without running it.

A micro-batch's forward and backward pass on each rank of a pipeline: its operators, the collectives
that its layers wait for, the messages to its neighbors, and no less than the hosts need to start
all that. From these the schedule's length follows. After it comes what is done once a step:
gradients and weights travel, the optimizer updates.

Read in this order: Estimate, estimate, Pass, rank_passes, pipeline_seconds; then `operators`,
`traffic` and `memory`.
Reference: Narayanan et al. 2021, sections 2.2 and 3.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from operator import add

from minitron import cost
from minitron.config import ParallelConfig
from minitron.plan.job import Decision, Job
from minitron.plan.memory import extreme_ranks, memory_of, parameters_of
from minitron.plan.operators import (
    RATES,
    Cost,
    Rates,
    Work,
    accumulation,
    block_backward,
    block_forward,
    head_backward,
    head_forward,
    optimizer_seconds,
)
from minitron.plan.systems import MINITRON, System, blocks_per_rank
from minitron.plan.traffic import data_seconds, host_seconds, layer_seconds, message_seconds

__all__ = ["MINITRON", "RATES", "Estimate", "Rates", "System", "estimate", "memory_of"]


@dataclass(frozen=True)
class Estimate:
    """A step of a job in a layout.

    ZeRO-3's messages are assumed to travel while the device computes. No published run has
    confirmed that at scale; in one system, which gathered matrix by matrix, steps took up to four
    times as long (Narayanan et al. 2021, table 2; benchmarks/results/estimate.md).
    """

    parts: dict[str, float]
    """Seconds on the slowest rank: "matmul", "attention", "elementwise", "optimizer"; "host": the
    device waits for kernels to be started; "bubble"; "tp", "pp", "dp": what nothing hides, and what
    computing loses to messages beside it."""
    memory: dict[str, float]
    """Bytes on the rank that holds most, by the meter's kinds."""
    model_flops: float
    """Of the step, on all GPUs: forward and backward matmuls, all S x S scores of attention."""
    hardware_flops: float
    """The same with what is computed again."""
    peak_flops: float
    """Dense bfloat16 FLOP/s of all GPUs."""

    @property
    def seconds(self) -> float:
        return sum(self.parts.values())

    @property
    def mfu(self) -> float:
        """Model FLOPs over what the peak would have done in the time."""
        return self.model_flops / (self.seconds * self.peak_flops)

    @property
    def hfu(self) -> float:
        """Hardware FLOPs over the same."""
        return self.hardware_flops / (self.seconds * self.peak_flops)


def estimate(
    job: Job,
    decision: Decision,
    system: System = MINITRON,
    rates: Rates = RATES,
    memory: dict[str, float] | None = None,
) -> Estimate:
    """Estimate a step's time and memory; raises ConfigError for sizes that do not divide.

    `memory` is what `memory_of` has said, if it has been asked.
    """
    parallel, m = decision.parallel, decision.num_micro_batches(job)
    work = Work(
        job.model,
        job.device,
        decision.micro_batch_size,
        job.sequence_length,
        decision.layout,
        job.precision,
        system,
        rates,
    )
    ranks = rank_passes(job, decision, work)
    seconds, (forward, backward) = pipeline_seconds(ranks, parallel, m)
    parts = step_parts(forward, backward, m, seconds)

    counts = blocks_per_rank(job.model, parallel, system)
    num_held = max(
        parameters_of(job, parallel, rank, counts[rank]) for rank in extreme_ranks(counts)
    )
    num_gradients = num_held / (decision.num_shards if parallel.zero >= 2 else 1)
    num_updated = num_held / (decision.num_shards if parallel.zero >= 1 else 1)
    parts["optimizer"] = optimizer_seconds(work, num_gradients, num_updated)
    parts["dp"] = data_seconds(
        job, decision, system, num_held, (forward.seconds, backward.seconds), rates.overlap
    )

    tokens = job.global_batch_size * job.sequence_length
    model_flops = tokens * cost.training_flops_per_token(job.model, job.sequence_length)
    again = cost.recompute_flops_per_token(job.model, job.sequence_length, decision.recompute)
    return Estimate(
        parts=parts,
        memory=memory or memory_of(job, decision, system),
        model_flops=model_flops,
        hardware_flops=model_flops + tokens * again,
        peak_flops=job.num_gpus * job.device.bf16_flops,
    )


# What a rank does with a micro-batch


@dataclass(frozen=True)
class Pass:
    """One micro-batch forward, or backward, through all blocks of a rank."""

    work: Cost
    tp: float
    """Seconds that its layers wait for collectives."""
    hosts: float
    """Seconds that hosts take for these, beside the device."""
    pp: float
    """Seconds of the messages to the next stages."""
    kernel: float
    """Seconds that the host takes to start a kernel."""

    @property
    def waiting(self) -> float:
        """Seconds that the device waits for the hosts, which start every collective: also those
        that the device does not wait for, so that are not in `tp`."""
        started = self.kernel * self.work.num_kernels + self.hosts
        return max(0.0, started - self.work.seconds - self.tp)

    @property
    def seconds(self) -> float:
        return self.work.seconds + self.tp + self.waiting + self.pp


Passes = tuple[Pass, Pass]  # forward and backward


def rank_passes(job: Job, decision: Decision, work: Work) -> list[Passes]:
    """Return each rank's passes; those between the first and the last rank may share one object."""
    hidden = work.tokens * job.model.width * work.value
    message = message_seconds(job, decision, work.system, hidden)
    waits = layer_seconds(job, decision, work.system, hidden, work.rates.overlap)
    hosts = host_seconds(job, decision, work.system, work.rates.kernel)
    blocks, heads = computation(work, decision.recompute)

    def passes(num_blocks: int, is_last: bool) -> Passes:
        made = []
        for phase, block, head in zip(("forward", "backward"), blocks, heads, strict=True):
            done = block.times(num_blocks) + head if is_last else block.times(num_blocks)
            # Embedding and head make one pair, half a block's; both are on the last rank here
            tp = waits[phase] * (num_blocks + is_last / 2)
            made.append(Pass(done, tp, hosts[phase] * num_blocks, message, work.rates.kernel))
        return tuple(made)

    counts = blocks_per_rank(job.model, decision.parallel, work.system)
    inner = {count: passes(count, is_last=False) for count in set(counts[:-1])}
    return [*(inner[count] for count in counts[:-1]), passes(counts[-1], is_last=True)]


@lru_cache(maxsize=4096)
def computation(
    work: Work, recompute: cost.RecomputeKind
) -> tuple[tuple[Cost, Cost], tuple[Cost, Cost]]:
    """Return a block's passes, and the head's; cached, since a search asks for them again."""
    backward = block_backward(work, recompute) + accumulation(work)
    return (block_forward(work), backward), (head_forward(work), head_backward(work))


# The schedule


def pipeline_seconds(
    ranks: Sequence[Passes], parallel: ParallelConfig, m: int
) -> tuple[float, Passes]:
    """Return the seconds from the first pass to the last, and the pace-setting rank's passes.

    That rank is never idle but while it waits for others: until the first micro-batch has come down
    to it, and gone on to the last rank and back, and as long again at the end. With v chunks it
    waits for a v-th of them. Exactly what the simulator plays, if all ranks have the same work or
    the last one most; in 1F1B whatever the first and the last have; else within 5 % in 1F1B and
    10 % with chunks, as far as tests/plan/test_estimate_pipeline.py looks.
    Reference: Narayanan et al. 2021, section 2.2; Qi et al. 2023, table 2, for I and W of equal
    length.
    """
    forward = [passes[0].seconds for passes in ranks]
    backward = [passes[1].seconds for passes in ranks]
    whole = sum(forward) + sum(backward)
    longest, slowest, before = 0.0, 0, 0.0
    for rank, own in enumerate(map(add, forward, backward)):
        after = whole - before - own
        if parallel.schedule == "zero-bubble":
            waits = sum(forward) - forward[rank]
        elif parallel.schedule == "gpipe":
            waits = before + after
        else:
            waits = before + return_seconds(
                after, forward[rank], backward[rank], m, num_after=len(ranks) - 1 - rank
            )
        if m * own + waits / parallel.chunks > longest:
            longest, slowest = m * own + waits / parallel.chunks, rank
        before += own
    return longest, ranks[slowest]


def return_seconds(after: float, forward: float, backward: float, m: int, num_after: int) -> float:
    """Return the seconds a rank waits for micro-batches to return from `num_after` later ranks.

    It takes them `after` seconds. Meanwhile the rank works on as many other micro-batches as there
    are ranks after it: forward at the beginning, backward at the end.
    """
    if m > num_after + 1:
        return max(0, after - num_after * forward) + max(0, after - num_after * backward)
    return max(0, after - (m - 1) * min(forward, backward))


def step_parts(forward: Pass, backward: Pass, m: int, seconds: float) -> dict[str, float]:
    """Return what the slowest rank does in the `seconds` of its m micro-batches."""
    return {
        "matmul": m * (forward.work.matmul + backward.work.matmul),
        "attention": m * (forward.work.attention + backward.work.attention),
        "elementwise": m * (forward.work.elementwise + backward.work.elementwise),
        "host": m * (forward.waiting + backward.waiting),
        "bubble": seconds - m * (forward.seconds + backward.seconds),
        "tp": m * (forward.tp + backward.tp),
        "pp": m * (forward.pp + backward.pp),
    }
