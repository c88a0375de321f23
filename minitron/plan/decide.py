"""Which layout for a model on so many GPUs: a decision tree that asks the estimator.

The tree shards the model as little as it can: not at all, then layers over the GPUs of a node, then
stages over nodes. Of each cut it asks two questions. What must be sharded or recomputed so that it
fits? And is a step faster than with the cut before? `memory.memory_of` and `estimate.estimate`
answer, as they do in a search of all layouts (search.py).

The tree looks at about a dozen layouts, and says why it takes one. It never looks at interleaved or
zero-bubble schedules, ZeRO-2 and 3 in a pipeline, hybrid sharding, or selective recomputation, nor
at tensor parallelism over several nodes where anything else fits; so its choice may be slower than
the best of a search.

Read in this order: job.py; decide, cuts, remedy, enlarged.
Reference: Narayanan et al. 2021, section 3 (takeaways 1 to 3).
"""

import math
from dataclasses import replace

from minitron import cost
from minitron.config import ConfigError, ParallelConfig, require
from minitron.config.layout import divisors
from minitron.cost.precision import PRECISIONS
from minitron.plan.estimate import estimate
from minitron.plan.job import Decision, Job, size_of
from minitron.plan.memory import memory_of


def decide(job: Job) -> Decision:
    """Choose a layout; raises ConfigError if the model fits in none."""
    parameters, each = cost.num_parameters(job.model) / 1e9, PRECISIONS[job.precision].cost.total
    steps = [
        f"the training state: {each} B x {parameters:.3g} G = {each * parameters:.1f} GB; "
        f"a GPU holds {job.limit / 1e9:.0f} GB"
    ]
    best, fastest, least = None, math.inf, math.inf
    for tp, pp in cuts(job):
        if best is not None and tp > job.gpus_per_node:
            break  # over the network only if nothing else fits
        option = remedy(job, tp, pp)
        held, parts = total_bytes(job, option), estimate(job, option).parts
        least, seconds = min(least, held), sum(parts.values())
        steps.append(f"{option}: does it fit? {compared(held / 1e9, job)}")
        if held > job.limit:
            continue
        answer = "< {:.3g} s: yes" if seconds < fastest else ">= {:.3g} s: no"
        compare = f"; faster? {seconds:.3g} s {answer.format(fastest)}"
        steps[-1] += f"; {seconds:.3g} s a step" if best is None else compare
        if seconds < fastest:
            best, fastest = option, seconds
        elif option.recompute == "none" and parts["dp"] < 0.05 * seconds:
            break  # a further cut could save little more

    require(
        best is not None,
        f"{size_of(job.model)} parameters need {least / 1e9:.0f} GB on each "
        f"of {job.num_gpus} GPUs, and {job.limit / 1e9:.0f} GB are usable",
        f"take about {math.ceil(job.num_gpus * least / job.limit)} GPUs",
    )
    return replace(best, steps=tuple(steps))


def compared(gigabytes: float, job: Job) -> str:
    limit = job.limit / 1e9
    answer = f"<= {limit:.0f} GB: yes" if gigabytes <= limit else f"> {limit:.0f} GB: no"
    return f"{gigabytes:.1f} GB {answer}"


def total_bytes(job: Job, decision: Decision) -> float:
    """Return the bytes on the rank that holds most."""
    return sum(memory_of(job, decision).values())


def cuts(job: Job) -> list[tuple[int, int]]:
    """Return pairs (tp, pp) in the order of the tree; tp beyond a node comes last.

    Raises ConfigError if the global batch has too few sequences for any.
    """
    widths = [t for t in divisors(job.num_gpus) if divides(job, t)]
    widest = max(t for t in widths if t <= job.gpus_per_node)
    path = [(t, 1) for t in widths if t <= widest]
    path += [
        (widest, p)
        for p in divisors(job.num_gpus)
        if job.num_gpus // widest % p == 0 and 1 < p <= job.model.num_layers
    ]
    path += [(t, 1) for t in widths if t > widest]

    fewest = job.num_gpus // max(t * p for t, p in path)
    require(
        fewest <= job.global_batch_size,
        f"{job.num_gpus} GPUs hold at least {fewest} copies "
        f"of the model, but a step has only {job.global_batch_size} sequences",
        "raise the global batch, or take fewer GPUs",
    )
    return [(t, p) for t, p in path if job.num_gpus // (t * p) <= job.global_batch_size]


def divides(job: Job, tp: int) -> bool:
    """Return whether the model can be cut in `tp` equal parts, and nodes in such groups."""
    try:
        cost.activation_bytes(job.model, 1, job.sequence_length, layout=cost.Layout(tp, tp > 1))
    except ConfigError:
        return False
    node = min(job.gpus_per_node, job.num_gpus)
    return node % tp == 0 or tp % node == 0


def remedy(job: Job, tp: int, pp: int) -> Decision:
    """Return the first that fits of ZeRO-0 to 3, then of these with recomputation, or the last."""
    dp = job.num_gpus // (tp * pp)
    last_stage = 0 if dp == 1 else 3 if pp == 1 else 1
    for recompute in ("none", "full"):
        for zero in range(last_stage + 1):
            parallel = ParallelConfig(dp=dp, tp=tp, sequence=tp > 1, pp=pp, zero=zero)
            option = Decision(parallel, recompute)
            if total_bytes(job, option) <= job.limit:
                return enlarged(job, option)
    return option


def enlarged(job: Job, option: Decision) -> Decision:
    """Double the micro-batches while they fit; a pipeline wants many, so it keeps them small."""
    larger = replace(option, micro_batch_size=2 * option.micro_batch_size)
    divides_batch = option.num_micro_batches(job) % 2 == 0
    if option.parallel.pp > 1 or not divides_batch or total_bytes(job, larger) > job.limit:
        return option
    return enlarged(job, larger)
