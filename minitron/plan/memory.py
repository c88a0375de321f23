"""What the rank that holds most has in its memory when a backward pass begins.

The weights, gradients and optimizer state of its blocks and ends; the activations of all
micro-batches that are under way; and what is there for a moment. A pipeline's first rank has most
micro-batches under way and the embedding, its last rank the head and the loss.

Read in this order: memory_of, holdings, parameters_of, activations, temporary.
"""

from dataclasses import replace

from minitron import cost
from minitron.config import ParallelConfig
from minitron.cost.sharding import FULLY_SHARDED
from minitron.plan.decide import Decision, Job
from minitron.plan.systems import MINITRON, System, blocks_per_rank
from minitron.precision import PRECISIONS

SCHEDULES = {"gpipe": "GPipe", "1f1b": "1F1B", "interleaved": "interleaved 1F1B",
             "zero-bubble": "ZB-H1"}


def memory_of(job: Job, decision: Decision, system: System = MINITRON) -> dict[str, float]:
    """Bytes of the rank that holds most, by the meter's kinds.

    Raises ConfigError for sizes that do not divide.
    """
    counts = blocks_per_rank(job.model, decision.parallel, system)
    held = (holdings(job, decision, system, rank, counts) for rank in extreme_ranks(counts))
    return max(held, key=lambda kinds: sum(kinds.values()))


def extreme_ranks(counts: list[int]) -> set[int]:
    """The last rank, and of those with as many blocks the first, which has most under way."""
    return {len(counts) - 1, *(counts.index(count) for count in set(counts))}


def parameters_of(job: Job, parallel: ParallelConfig, rank: int, num_blocks: int) -> int:
    """Values that a rank of the pipeline holds: its blocks, the embedding, the head."""
    model = job.model
    whole = cost.tensor_parallel_parameters(replace(model, num_layers=num_blocks), parallel.tp)
    num_ends = (rank == 0) + (rank == parallel.pp - 1)
    # Of a tied matrix both ends have a copy, and it counts once
    missing = (num_ends == 0) if model.tied_embedding else 2 - num_ends
    return whole - missing * model.vocab_size * model.width // parallel.tp


def holdings(
    job: Job, decision: Decision, system: System, rank: int, counts: list[int]
) -> dict[str, float]:
    """Bytes of one rank of the pipeline, which has `counts[rank]` blocks."""
    parallel, precision = decision.parallel, PRECISIONS[job.precision]
    num_parameters = parameters_of(job, parallel, rank, counts[rank])
    recipe = FULLY_SHARDED if parallel.zero == 3 else precision.cost
    if system.both_gradients:
        recipe = replace(recipe, gradient=recipe.gradient + precision.parameters.itemsize)
    state = cost.zero_holdings(num_parameters, parallel.dp, parallel.zero, recipe)
    return state | {
        "activation": activations(job, decision, system, rank, counts[rank]),
        "temporary": temporary(job, decision, rank, counts[rank], num_parameters),
    }


def activations(
    job: Job, decision: Decision, system: System, rank: int, num_blocks: int
) -> float:
    """Bytes that the micro-batches under way keep for their backward passes."""
    parallel, model = decision.parallel, job.model
    value = PRECISIONS[job.precision].activations.itemsize
    sizes = decision.micro_batch_size, job.sequence_length, value, system.attention
    options = {"recompute": decision.recompute, "layout": decision.layout}
    block = cost.activation_bytes_per_layer(model, *sizes, **options)
    if decision.recompute != "full":
        tokens = decision.micro_batch_size * job.sequence_length
        block += system.copies * value * tokens * model.width // parallel.tp
    under_way = cost.activations_held(
        SCHEDULES[parallel.schedule], parallel.pp, decision.num_micro_batches(job), rank,
        parallel.chunks)
    held = under_way * num_blocks / parallel.chunks * block
    if rank < parallel.pp - 1:
        return held
    one = replace(model, num_layers=1)
    return held + cost.activation_bytes(one, *sizes, **options) \
        - cost.activation_bytes_per_layer(one, *sizes, **options)


def temporary(
    job: Job, decision: Decision, rank: int, num_blocks: int, num_parameters: int
) -> float:
    """Bytes that are there for a moment: the loss's gradients, a block that is replayed, weights
    that are gathered or rounded."""
    parallel, precision = decision.parallel, PRECISIONS[job.precision]
    value = precision.activations.itemsize
    tokens = decision.micro_batch_size * job.sequence_length
    largest = 0
    if rank == parallel.pp - 1:  # two float32 gradients at the loss
        largest = 2 * 4 * tokens * job.model.vocab_size // parallel.tp
    if decision.recompute == "full":
        largest = max(largest, cost.activation_bytes_per_layer(
            job.model, decision.micro_batch_size, job.sequence_length, value,
            layout=decision.layout))
    if parallel.zero == 3:  # the root and two blocks are whole, weights and gradients
        units = replace(job.model, num_layers=min(2, num_blocks))
        largest += 2 * value * cost.tensor_parallel_parameters(units, parallel.tp)
    elif precision.autocasts:
        largest += value * num_parameters  # 16-bit copies of the weights
    return largest
