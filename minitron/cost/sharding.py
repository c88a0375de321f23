"""What each rank holds and sends when the training state is divided over data-parallel ranks.

Stage 0 is data parallelism: every rank holds everything. Stage 1 divides the optimizer state and
the float32 master weights, stage 2 the gradients too, stage 3 the parameters too.

For mixed precision with Adam, in bytes per rank: 16 P; 4 P + 12 P/N; 2 P + 14 P/N; 16 P/N.
For float32: 16 P; 8 P + 8 P/N; 4 P + 12 P/N; 16 P/N.

Between the m micro-batches of a step two choices remain. Parameters of stage 3 are resharded after
each forward and backward pass, or stay unsharded for the step. Gradients of stages 2 and 3 add up
sharded or unsharded. With hybrid sharding (HSDP) S ranks divide the state and R replicas hold it,
N = R S; then sharded gradients can also add up reduced, summed over the replicas.

| gradients add up | reduce-scatters over S | all-reduces over R | a rank holds |
|---|---|---|---|
| "reduced" | m | m | P/S |
| "sharded" | m | 1 | P/S |
| "unsharded" | 1 | 1 | P |

Read in this order: zero_holdings, zero_bytes, zero_volume; then step_holdings, step_collectives,
hybrid_volume.
Reference: Rajbhandari et al. 2019, "ZeRO" (sections 3.1 and 5: bytes held; 7: bytes sent); Zhao et
al. 2023, "PyTorch FSDP" (section 3.2.2: hybrid sharding).
"""

from typing import Literal, NamedTuple

from minitron.cost.communication import (
    Volume,
    ring_all_gather_volume,
    ring_all_reduce_volume,
    ring_reduce_scatter_volume,
)
from minitron.cost.memory import RECIPES, Recipe

STAGES = (0, 1, 2, 3)
BUCKET_BYTES = 25 * 2**20
"""Of gradients that travel together, unless a run says otherwise."""

FULLY_SHARDED = Recipe(parameter=0, gradient=4, master=4, optimizer_state=8)
"""What stage 3 divides if its shards are float32, whatever dtype computes: they are the masters,
and 16-bit weights exist only while a unit computes (Zhao et al. 2023, section 4.4)."""

Accumulation = Literal["reduced", "sharded", "unsharded"]
"""What gradients of stages 2 and 3 are between the micro-batches of a step."""


def zero_holdings(
    num_parameters: int, num_ranks: int, stage: int, recipe: Recipe = RECIPES["bf16"]
) -> dict[str, int]:
    """Return bytes per rank of "parameter", "gradient" and "optimizer state" (with the masters).

    A sharded kind is rounded up to whole parameters. Temporarily unsharded tensors are left out:
    a bucket of gradients in stage 2 and 3, the unit that computes in stage 3.
    """
    return step_holdings(num_parameters, num_ranks, stage, recipe, recipe)


def zero_bytes(
    num_parameters: int, num_ranks: int, stage: int, recipe: Recipe = RECIPES["bf16"]
) -> int:
    """Return the bytes of model states per rank (Rajbhandari et al. 2019, figure 1 and table 1)."""
    return sum(zero_holdings(num_parameters, num_ranks, stage, recipe).values())


def zero_volume(
    num_elements: int,
    element_size: int,
    size: int,
    rank: int,
    stage: int,
    num_reductions: int = 1,
) -> Volume:
    """Return the bytes a rank sends and receives per step, in rings: (N-1)/N of 2 P, 2 P, 2 P, 3 P.

    Gradients are reduce-scattered `num_reductions` times: once, or after each micro-batch.
    Parameters are all-gathered once, in stage 3 before the forward and the backward pass of each
    micro-batch; `num_reductions` is then their number. `num_elements` are those of the
    parameters, with what fills up the shards. Reference: section 7.2.
    """
    num_gathers = 2 * num_reductions if stage >= 3 else 1
    calls = StepCollectives(num_gathers, num_reductions, all_reduces=0)
    return hybrid_volume(num_elements, element_size, element_size, (1, size), (0, rank), calls)[
        "shards"
    ]


# A step of several micro-batches


def step_holdings(
    num_parameters: int,
    num_shards: int,
    stage: int,
    shards: Recipe,
    unsharded: Recipe,
    reshards: bool = True,
    accumulation: Accumulation = "sharded",
) -> dict[str, int]:
    """Return bytes per rank between micro-batches, by the same kinds as `zero_holdings`.

    Stage 3 that reshards: P/S of everything, `shards.total` bytes each. Without, the parameters are
    there twice: P unsharded beside P/S. Gradients of stages 2 and 3: P if they add up unsharded,
    else P/S. `num_shards` is S; the number of replicas changes nothing. `shards` counts the bytes
    of what is divided, `unsharded` those of what is not (in stage 3 16-bit parameters, say).
    """
    shard = -(-num_parameters // num_shards)
    parameter = shards.parameter * shard if stage >= 3 else 0
    if stage < 3 or not reshards:
        parameter += unsharded.parameter * num_parameters
    if stage >= 2 and accumulation != "unsharded":
        gradient = shards.gradient * shard
    else:
        gradient = unsharded.gradient * num_parameters
    return {
        "parameter": parameter,
        "gradient": gradient,
        "optimizer state": (shards.master + shards.optimizer_state)
        * (shard if stage >= 1 else num_parameters),
    }


class StepCollectives(NamedTuple):
    """How often a step sends all of a rank's parameters, or the gradients of all of them."""

    all_gathers: int
    """Over the shards."""
    reduce_scatters: int
    """Over the shards."""
    all_reduces: int
    """Over the replicas, of this rank's shard."""


def step_collectives(
    stage: int,
    num_micro_batches: int,
    reshards: bool = True,
    accumulation: Accumulation = "sharded",
) -> StepCollectives:
    """Count a step's collectives: stage 3 with resharding gathers 2 m times, else once.

    Gradients: see the table above; below stage 2 they add up unsharded. The stages of a pipeline do
    the same with the parameters of their own: their forward and backward passes are interleaved,
    so that parameters which stay for the step are gathered once however many there are.
    """
    m = num_micro_batches
    if stage < 2:
        accumulation = "unsharded"
    return StepCollectives(
        all_gathers=2 * m if stage >= 3 and reshards else 1,
        reduce_scatters=1 if accumulation == "unsharded" else m,
        all_reduces=m if accumulation == "reduced" else 1,
    )


def replica_volume(
    num_elements: int,
    element_size: int,
    num_shards: int,
    num_replicas: int,
    rank: int,
    num_reductions: int = 1,
) -> Volume:
    """Return what hybrid sharding sends per step beside `zero_volume` within a replica.

    Each shard's gradient is all-reduced over the replicas `num_reductions` times: once, or after
    each micro-batch. `rank` counts the replicas. Reference: Zhao et al. 2023 (section 3.2.2).
    """
    shard = num_elements // num_shards
    once = ring_all_reduce_volume(shard, element_size, num_replicas, rank)
    return Volume(num_reductions * once.sent, num_reductions * once.received)


def hybrid_volume(
    num_elements: int,
    gathered_size: int,
    reduced_size: int,
    grid: tuple[int, int],
    place: tuple[int, int],
    calls: StepCollectives,
) -> dict[str, Volume]:
    """Return the bytes a rank sends and receives per step, over its "shards" and its "replicas".

    With G gathers of b bytes a value, and of gradients, with c bytes, A reduce-scatters and B
    all-reduces: (S-1)/S P (G b + A c) over the shards, and 2 (R-1)/R P/S B c over the replicas.
    `grid` is (R, S), `place` this rank's number along both; `num_elements` is P, with what fills up
    the shards so that S divides it.
    """
    (num_replicas, num_shards), (replica, shard) = grid, place
    gather = ring_all_gather_volume(num_elements, gathered_size, num_shards, shard)
    scatter = ring_reduce_scatter_volume(num_elements, reduced_size, num_shards, shard)
    reduced = replica_volume(
        num_elements, reduced_size, num_shards, num_replicas, replica, calls.all_reduces
    )
    return {
        "shards": Volume(
            *(
                calls.all_gathers * gathered + calls.reduce_scatters * scattered
                for gathered, scattered in zip(gather, scatter, strict=True)
            )
        ),
        "replicas": reduced,
    }
