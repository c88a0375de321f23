"""Chapter 12's helpers: layouts in words, estimates of published steps, claims and what is so."""

from collections.abc import Sequence
from concurrent.futures import Executor, Future
from dataclasses import replace

from minitron import cost
from minitron.config import Config, DataConfig, ParallelConfig, TrainConfig
from minitron.plan.dryrun import dry_run
from minitron.plan.estimate import estimate
from minitron.plan.explain import doubled
from minitron.plan.hardware import Device
from minitron.plan.job import Decision, Job
from minitron.plan.published import Row
from minitron.plan.search import Candidate, Search

# Layouts


def cut(
    dp: int, tp: int = 1, pp: int = 1, chunks: int = 1, recompute: str = "none",
    micro_batch: int = 1, zero: int = 1,
) -> Decision:
    """Return a layout, with sequence parallelism wherever there is tensor parallelism."""
    schedule = "interleaved" if chunks > 1 else "1f1b"
    parallel = ParallelConfig(dp=dp, tp=tp, pp=pp, chunks=chunks, schedule=schedule,
                              sequence=tp > 1, zero=zero)
    return Decision(parallel, recompute, micro_batch)


def brief(candidate: Candidate) -> str:
    """Return the layout in few words; b is the number of sequences in a micro-batch."""
    words = str(candidate).replace("micro-batches of", "b").replace(" + sequence", "")
    words = words.replace(", weights and gradients kept unsharded", " (unsharded)")
    words = words.replace("zero-bubble", "ZB")
    return words.replace("full recomputation", "recomputed").replace(" recomputation", "")


def config_of(job: Job, layout: Decision) -> Config:
    """Return what a run of this job in this layout is configured with."""
    train = TrainConfig(global_batch_size=job.global_batch_size, recompute=layout.recompute,
                        micro_batch_size=layout.micro_batch_size, precision=job.precision)
    data = DataConfig(sequence_length=job.sequence_length)
    return Config(job.model, data, train, layout.parallel)


def begin(pool: Executor, job: Job, layout: Decision, rank: int) -> Future:
    """Start a dry run of a rank in another process; ask for its `result()` later."""
    return pool.submit(dry_run, config_of(job, layout), job.num_gpus, rank)


def best_with(resource: str, found: Search) -> Candidate:
    """Return the fastest layout on devices with twice as much of a resource.

    Tried are the 300 best layouts of the search, and all that fit only now.
    """
    given = replace(found.job, device=doubled(found.job.device, resource))
    now_fit = [each for each in found.too_large if each.total_bytes <= given.limit]
    layouts = [each.decision for each in found.candidates[:300] + now_fit]
    return min((Candidate(given, layout) for layout in layouts), key=lambda each: each.seconds)


# Published steps


def label(row: Row) -> str:
    """Return the first author, or the system, and the model."""
    first = row.source.split()[0]
    return row.name if row.name.startswith(first) else f"{first} {row.name}"


def seconds_on(device: Device, row: Row) -> float:
    """Return the estimate on a device; where a source leaves something open, the fastest."""
    given = replace(row.job, device=device)
    return min(estimate(given, each, row.system).seconds for each in row.decisions)


def errors_by_source(rows: Sequence[Row]) -> dict[str, list[float]]:
    """Return the relative errors of the estimates, by the first word of the source."""
    found: dict[str, list[float]] = {}
    for row in rows:
        error = row.predict().seconds / row.seconds - 1
        found.setdefault(label(row).split()[0], []).append(error)
    return found


# Claims


def fact(number: int, what: str, claimed: float, computed: float, unit: str) -> str:
    """Return a line with a claimed and a computed number; within 5 % it counts as right."""
    ratio = computed / claimed
    verdict = "right" if abs(ratio - 1) < 0.05 else f"{ratio:,.3g} x"
    return f"{number:>2} {what:36} {claimed:>7,.6g} {computed:>10,.4g} {unit:7} {verdict}"


def saved(stage: int, num_ranks: int) -> float:
    """Return the bytes of the training state without ZeRO over those with a stage of it."""
    full, sharded = (sum(cost.zero_holdings(2**30, num_ranks, each).values())
                     for each in (0, stage))
    return full / sharded
