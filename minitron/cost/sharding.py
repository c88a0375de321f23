"""What each rank holds and sends when the training state is divided over N data-parallel ranks.

Stage 0 is data parallelism: every rank holds everything. Stage 1 divides the optimizer state and
the float32 master weights, stage 2 the gradients too, stage 3 the parameters too.

For mixed precision with Adam, in bytes per rank: 16 P; 4 P + 12 P/N; 2 P + 14 P/N; 16 P/N.
For float32: 16 P; 8 P + 8 P/N; 4 P + 12 P/N; 16 P/N.

Read in this order: zero_holdings, zero_bytes, zero_volume.
Reference: Rajbhandari et al. 2019, "ZeRO" (sections 3.1 and 5: bytes held; 7: bytes sent).
"""

from minitron.cost.communication import (
    Volume,
    ring_all_gather_volume,
    ring_all_reduce_volume,
    ring_reduce_scatter_volume,
)
from minitron.cost.memory import RECIPES, Recipe

STAGES = (0, 1, 2, 3)

FULLY_SHARDED = Recipe(parameter=0, gradient=4, master=4, optimizer_state=8)
"""What stage 3 divides if its shards are float32, whatever dtype computes: they are the masters,
and 16-bit weights exist only while a unit computes (Zhao et al. 2023, section 4.4)."""


def zero_holdings(
    num_parameters: int, num_ranks: int, stage: int, recipe: Recipe = RECIPES["bf16"]
) -> dict[str, int]:
    """Bytes per rank of "parameter", "gradient" and "optimizer state", master weights in the last.

    A divided kind is rounded up to whole parameters. Without what is whole for a moment: a bucket
    of gradients in stage 2 and 3, the unit that computes in stage 3.
    """
    shard = -(-num_parameters // num_ranks)
    return {
        "parameter": recipe.parameter * (shard if stage >= 3 else num_parameters),
        "gradient": recipe.gradient * (shard if stage >= 2 else num_parameters),
        "optimizer state":
            (recipe.master + recipe.optimizer_state) * (shard if stage >= 1 else num_parameters),
    }


def zero_bytes(
    num_parameters: int, num_ranks: int, stage: int, recipe: Recipe = RECIPES["bf16"]
) -> int:
    """Bytes of the model states per rank (Rajbhandari et al. 2019, figure 1 and table 1)."""
    return sum(zero_holdings(num_parameters, num_ranks, stage, recipe).values())


def zero_volume(
    num_elements: int, element_size: int, size: int, rank: int, stage: int,
    num_reductions: int = 1,
) -> Volume:
    """Bytes that one rank sends and receives per step, in rings: (N-1)/N of 2 P, 2 P, 2 P, 3 P.

    Gradients are reduce-scattered `num_reductions` times: once, or after each micro-batch.
    Parameters are all-gathered once, in stage 3 before the forward and the backward pass of each
    micro-batch; `num_reductions` is then their number. `num_elements` are those of the
    parameters, with what fills up the shards. Reference: section 7.2.
    """
    num_gathers = 2 * num_reductions if stage >= 3 else 1
    scatter = ring_reduce_scatter_volume(num_elements, element_size, size, rank)
    gather = ring_all_gather_volume(num_elements, element_size, size, rank)
    return Volume(
        num_reductions * scatter.sent + num_gathers * gather.sent,
        num_reductions * scatter.received + num_gathers * gather.received,
    )


def replica_volume(
    num_elements: int, element_size: int, num_shards: int, num_replicas: int, rank: int,
    num_reductions: int = 1,
) -> Volume:
    """What hybrid sharding sends beside `zero_volume` within a replica, per step.

    Each shard's gradient is all-reduced over the replicas `num_reductions` times: once, or after
    each micro-batch. `rank` counts the replicas. Reference: Zhao et al. 2023 (section 3.2.2).
    """
    shard = num_elements // num_shards
    once = ring_all_reduce_volume(shard, element_size, num_replicas, rank)
    return Volume(num_reductions * once.sent, num_reductions * once.received)
