"""Every layout that the package can train: which fit, and which of them is fastest.

Nothing is guessed: each combination of the options is put to the checks that a run makes before it
begins, then weighed, then timed. What drops out is counted with its reason. Left out is what
another layout beats by the formulas: GPipe, which waits as long as 1F1B and holds more; ZeRO-2 that
reduces once a step, which is ZeRO-1; and variants of a layout that hold more so as to send less
along dp, where it would not be the fastest if it sent nothing there.

Read in this order: Candidate, Search, search, decisions, grid_of, checked, with_variants,
nothing_fits.
"""

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from itertools import product
from typing import NamedTuple, get_args

from minitron import cost
from minitron.config import Config, ConfigError, DataConfig, ParallelConfig, TrainConfig, require
from minitron.config.layout import divisors, require_layout
from minitron.plan.estimate import Estimate, estimate, memory_of
from minitron.plan.job import Decision, Job
from minitron.plan.variants import unsharded, variants

COMMUNICATION = ("tp", "pp", "dp")
SAME = 0.001  # of the seconds: no measurement resolves less
MOST_GPUS = 1_000_000
"""Several times as many as the largest clusters have; the layouts of more take too long."""


@dataclass(frozen=True)
class Candidate:
    """A layout, weighed and timed when it is asked."""

    job: Job
    decision: Decision

    @cached_property
    def estimate(self) -> Estimate:
        return estimate(self.job, self.decision, memory=self.memory)

    @property
    def seconds(self) -> float:
        """Of a step."""
        return self.estimate.seconds

    @cached_property
    def memory(self) -> dict[str, float]:
        """Bytes of the rank that holds most; sooner than by an estimate."""
        return memory_of(self.job, self.decision)

    @cached_property
    def total_bytes(self) -> float:
        return sum(self.memory.values())

    @property
    def fits(self) -> bool:
        return self.total_bytes <= self.job.limit

    @property
    def bubble(self) -> float:
        """Share of a step in which the pipeline's ranks wait."""
        return self.estimate.parts["bubble"] / self.seconds

    @property
    def communication(self) -> float:
        """Share of a step that nothing hides."""
        return sum(self.estimate.parts[axis] for axis in COMMUNICATION) / self.seconds

    def __str__(self) -> str:
        return words(self.decision)


def words(decision: Decision) -> str:
    """Describe the layout: "tp 8 + sequence, pp 4 x 5, dp 16, ZeRO-1, micro-batches of 2"."""
    axes = decision.parallel
    phrases = [
        f"tp {axes.tp}" + " + sequence" * axes.sequence,
        f"pp {axes.pp}"
        + f" x {axes.chunks}" * (axes.chunks > 1)
        + " zero-bubble" * (axes.schedule == "zero-bubble"),
        f"dp {axes.dp}",
        f"ZeRO-{axes.zero}" + f" in {axes.replicas} replicas" * (axes.replicas > 1),
    ]
    if unsharded(decision) != "nothing":
        phrases.append(f"{unsharded(decision)} kept unsharded")
    if decision.recompute != "none":
        phrases.append(f"{decision.recompute} recomputation")
    return ", ".join([*phrases, f"micro-batches of {decision.micro_batch_size}"])


class Reason(NamedTuple):
    """Why a layout cannot be trained, from a ConfigError: those of one kind count as one."""

    kind: str
    problem: str


@dataclass
class Search:
    """What has been found for a job."""

    job: Job
    candidates: list[Candidate] = field(default_factory=list)
    """Those that fit, fastest first; of equally fast ones first what holds least."""
    too_large: list[Candidate] = field(default_factory=list)
    """Those that do not fit, smallest first."""
    refused: Counter[Reason] = field(default_factory=Counter)
    """How many cannot be trained, by the reason."""

    @property
    def num_layouts(self) -> int:
        return len(self.candidates) + len(self.too_large) + self.refused.total()

    @property
    def trusted(self) -> Candidate:
        """The fastest layout whose estimate measured steps confirm."""
        return next(filter(self.trusts, self.candidates))

    def trusts(self, candidate: Candidate) -> bool:
        """Return whether its estimate counts: that of ZeRO-3 does if nothing else fits."""
        return candidate.decision.parallel.zero < 3 or self.only_zero3_fits

    @cached_property
    def only_zero3_fits(self) -> bool:
        return all(each.decision.parallel.zero == 3 for each in self.candidates)

    def dropped(self) -> list[tuple[int, str]]:
        """Count the layouts that dropped out for each reason, most first.

        Reasons of one kind count as one, reported as the first of them.
        """
        first, counts = {}, Counter()
        if self.too_large:
            usable, there = self.job.limit / 1e9, self.job.device.memory_bytes / 1e9
            counts[f"do not fit in {usable:.0f} GB, the usable part of {there:.0f}"] = len(
                self.too_large
            )
        for reason, count in self.refused.items():
            counts[first.setdefault(reason.kind, reason.problem)] += count
        return [(count, reason) for reason, count in counts.most_common()]


def search(job: Job) -> Search:
    """Weigh and time every layout; raises ConfigError, with what would help, if none fits."""
    found = Search(job)
    for decision in decisions(job, found.refused):
        candidate = Candidate(job, decision)
        (found.candidates if candidate.fits else found.too_large).append(candidate)
    found.candidates = with_variants(found.candidates)
    found.too_large.sort(key=lambda each: each.total_bytes)
    if not found.candidates:
        raise ConfigError(nothing_fits(found))
    return found


# Which layouts there are


def decisions(job: Job, refused: Counter[Reason]) -> Iterator[Decision]:
    """Yield every layout that can be trained; counts the others in `refused`, by the reason."""
    require(job.num_gpus > 0, f"{job.num_gpus} GPUs: a plan needs one or more")
    for sizes in layouts(job):
        num_sequences = math.ceil(job.global_batch_size / sizes["dp"])
        kinds = [*product(get_args(cost.RecomputeKind), batch_sizes(num_sequences))]
        try:
            parallel = grid_of(job, sizes)
        except ConfigError as error:
            refused[Reason(error.kind, error.problem)] += len(kinds)
            continue
        for recompute, micro_batch_size in kinds:
            try:
                yield checked(job, Decision(parallel, recompute, micro_batch_size))
            except ConfigError as error:
                refused[Reason(error.kind, error.problem)] += 1


def layouts(job: Job) -> Iterator[dict]:
    """Yield fields of ParallelConfig; ZeRO over one rank divides nothing."""
    for tp in divisors(job.num_gpus):
        for pp in divisors(job.num_gpus // tp):
            dp = job.num_gpus // (tp * pp)
            stages = range(4) if dp > 1 else (0,)
            for sequence, zero, pipeline in product({False, tp > 1}, stages, pipelines(job, pp)):
                yield {"dp": dp, "tp": tp, "pp": pp, "sequence": sequence, "zero": zero, **pipeline}


def pipelines(job: Job, pp: int) -> list[dict]:
    """List schedules: 1F1B, zero bubble, and interleaved with every fitting number of chunks."""
    if pp == 1:
        return [{}]
    counts = divisors(math.ceil(job.model.num_layers / pp))[1:]
    return [
        {},
        {"schedule": "zero-bubble"},
        *({"schedule": "interleaved", "chunks": chunks} for chunks in counts),
    ]


def batch_sizes(num_sequences: int) -> list[int]:
    """Return powers of two, and all that a rank reads in a step."""
    powers = (2**k for k in range(num_sequences.bit_length()))
    return [*(size for size in powers if size < num_sequences), num_sequences]


def grid_of(job: Job, sizes: dict) -> ParallelConfig:
    """Build a layout's axes; raises ConfigError if they do not go together, or with the nodes."""
    parallel, node = ParallelConfig(**sizes), min(job.gpus_per_node, job.num_gpus)
    require(
        node % parallel.tp == 0 or parallel.tp % node == 0,
        f"parallel.tp = {parallel.tp}: its groups would straddle nodes of {node} GPUs",
        field="parallel.tp",
        kind="tp groups that span nodes",
    )
    return parallel


def checked(job: Job, decision: Decision) -> Decision:
    """Return the layout if a run would accept it; raises ConfigError if it would not."""
    require_layout(config_of(job, decision), job.num_gpus)
    return decision


def config_of(job: Job, decision: Decision) -> Config:
    """Return the config of the job in this layout; raises ConfigError if it cannot work."""
    undivided = undivided_config(job, decision.recompute, decision.micro_batch_size)
    return replace(undivided, parallel=decision.parallel)


@lru_cache(maxsize=4096)
def undivided_config(job: Job, recompute: cost.RecomputeKind, micro_batch_size: int) -> Config:
    """Build what layouts share that differ in their axes alone: its fields are checked once."""
    train = TrainConfig(
        global_batch_size=job.global_batch_size,
        micro_batch_size=micro_batch_size,
        precision=job.precision,
        recompute=recompute,
    )
    return Config(job.model, DataConfig(sequence_length=job.sequence_length), train)


# What holds more to send less along dp


def with_variants(candidates: Sequence[Candidate]) -> list[Candidate]:
    """Return the fastest first, and among them the variants that fit and may be the fastest of all.

    `candidates` are without variants, which take at least as long as their layout takes without
    what it sends along dp.
    """
    found = list(candidates)
    fastest = min((each.seconds for each in found), default=math.inf)
    for each in sorted(candidates, key=at_least):
        if at_least(each) >= fastest:
            break
        fitting = [
            other
            for decision in variants(each.decision, each.job.gpus_per_node)
            if (other := Candidate(each.job, decision)).fits
        ]
        least = each.seconds
        for other in sorted(fitting, key=lambda other: other.total_bytes):
            if other.seconds < (1 - SAME) * least:  # or it holds more for nothing
                found.append(other)
                least = other.seconds
        fastest = min(fastest, least)
    return sorted(found, key=speed)


def at_least(candidate: Candidate) -> float:
    """Return the seconds that its variants take at least."""
    return candidate.seconds - candidate.estimate.parts["dp"]


def speed(candidate: Candidate) -> tuple[float, float]:
    return candidate.seconds, candidate.total_bytes


# Nothing fits


def nothing_fits(found: Search) -> str:
    """Say why nothing fits, by how much, and how many GPUs, or how much memory, would do."""
    job = found.job
    if not found.too_large:
        count, reason = found.dropped()[0]
        return (
            f"none of {found.num_layouts:,} layouts for {job.num_gpus} GPUs can be trained; "
            f"{count:,} of them: {reason}"
        )
    smallest = found.too_large[0]
    held = smallest.total_bytes
    remedies = [f"{job.device.memory_bytes * held / job.limit / 1e9:.0f} GB each"]
    enough = enough_gpus(job)
    if enough:
        remedies.insert(0, f"{enough} GPUs")
    return (
        f"none of {found.num_layouts:,} layouts fits: the smallest, {smallest}, needs "
        f"{held / 1e9:.0f} GB on each of {job.num_gpus} GPUs, and {job.limit / 1e9:.0f} GB are "
        f"usable; {' or '.join(remedies)} would do"
    )


def enough_gpus(job: Job) -> int | None:
    """Return the fewest of 2, 4, ..., 1024 times as many GPUs on which a layout fits."""
    for factor in (2**k for k in range(1, 11)):
        larger = replace(job, num_gpus=factor * job.num_gpus)
        if any(Candidate(larger, each).fits for each in decisions(larger, Counter())):
            return larger.num_gpus
    return None
