"""What the rank that holds most has in its memory at the worst moment of a step.

The weights, gradients and optimizer state of its blocks and ends; the activations of all
micro-batches that are under way when a backward pass begins; and what is there for a moment. A
pipeline's first rank has most micro-batches under way and the embedding, its last rank the head
and the loss.

Read in this order: memory_of, holdings, parameters_of; then `rank_memory`.
"""

from dataclasses import replace

from minitron import cost
from minitron.config import ParallelConfig
from minitron.cost.precision import PRECISIONS
from minitron.cost.sharding import FULLY_SHARDED
from minitron.plan.job import Decision, Job
from minitron.plan.rank_memory import Rank, activations, parameters_per_rank, temporary
from minitron.plan.systems import MINITRON, System, blocks_per_rank


def memory_of(job: Job, decision: Decision, system: System = MINITRON) -> dict[str, float]:
    """Return the bytes of the rank that holds most, by the meter's kinds.

    Raises ConfigError for sizes that do not divide.
    """
    counts = blocks_per_rank(job.model, decision.parallel, system)
    held = (holdings(job, decision, system, rank, counts) for rank in extreme_ranks(counts))
    return max(held, key=lambda kinds: sum(kinds.values()))


def extreme_ranks(counts: list[int]) -> set[int]:
    """Return the last rank, and the first of the largest ones between two neighbors."""
    firsts = {counts.index(count) for count in set(counts)}
    return {len(counts) - 1, min(1, len(counts) - 1), *firsts}


def parameters_of(job: Job, parallel: ParallelConfig, rank: int, num_blocks: int) -> int:
    """Count the parameters that a rank of the pipeline holds: blocks, embedding, head."""
    model = job.model
    whole = parameters_per_rank(model, num_blocks, parallel.tp)
    num_ends = (rank == 0) + (rank == parallel.pp - 1)
    # Of a tied matrix both ends have a copy, and it counts once
    missing = (num_ends == 0) if model.tied_embedding else 2 - num_ends
    return whole - missing * model.vocab_size * model.width // parallel.tp


def holdings(
    job: Job, decision: Decision, system: System, rank: int, counts: list[int]
) -> dict[str, float]:
    """Return the bytes of one rank of the pipeline, which has `counts[rank]` blocks."""
    parallel, precision = decision.parallel, PRECISIONS[job.precision]
    num_parameters = parameters_of(job, parallel, rank, counts[rank])
    unsharded = precision.cost
    shards = FULLY_SHARDED if parallel.zero == 3 else unsharded
    if system.both_gradients:
        shards, unsharded = (
            replace(recipe, gradient=recipe.gradient + precision.parameters.itemsize)
            for recipe in (shards, unsharded)
        )
    state = cost.step_holdings(
        num_parameters,
        decision.num_shards,
        parallel.zero,
        shards,
        unsharded,
        parallel.reshard_each_pass,
        decision.accumulation,
    )
    if decision.accumulation == "reduced":  # what is on its way to the replicas
        state["gradient"] += precision.reduction.itemsize * num_parameters / decision.num_shards
    at = Rank(job, decision, system, rank, counts[rank], num_parameters)
    activation = activations(at)
    early = 0.0
    stay = at.has_buckets and precision.master is None
    if at.in_flight == decision.num_micro_batches(job) * parallel.chunks and not stay:
        # All are under way before the first gradients come, which then take the place of one
        early = min(state["gradient"], activation / decision.num_micro_batches(job))
    state["gradient"] -= early
    return state | {"activation": activation, "temporary": temporary(at, activation - early)}
