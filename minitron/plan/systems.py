"""How training systems differ where it shows in time and memory, and how they divide a pipeline.

Read in this order: System, MINITRON, blocks_per_rank.
"""

from dataclasses import dataclass
from functools import cache
from math import floor
from typing import Literal

from minitron import cost
from minitron.config import ModelConfig, ParallelConfig


@dataclass(frozen=True)
class System:
    """What a training system does; by default as minitron."""

    attention: cost.AttentionKind = "fused"
    fuses: bool = False
    """Elementwise operators that follow one another are one kernel: bias and GELU; dropout and
    residual; SiLU and its product; scale, mask and softmax."""
    balance: Literal["parameters", "time", "blocks"] = "parameters"
    """What the stages of a pipeline have about equally much of."""
    scatters_messages: bool = False
    """Without sequence parallelism too, each tensor-parallel rank sends a part of what goes to the
    next stage (Narayanan et al. 2021, section 4.1)."""
    overlaps_gradients: bool = True
    """Without ZeRO, gradients travel in buckets while the backward pass computes. If not, they
    travel after it."""
    hides_tensor: bool = False
    """Collectives along tp travel while matmuls compute."""
    hides_data: bool = False
    """In a pipeline, and with stage 1, gradients and weights travel while a rank computes."""
    reduces_last: bool = False
    """With stage 1, gradients travel after the backward pass and not during it."""
    shards_ahead: bool = True
    """With stage 3 a block's weights are gathered together, while the block before it computes, and
    its gradients travel likewise. If not, each matrix travels alone, when it is needed, and once
    more for a recomputation: nothing hides it."""
    host_seconds: float = 0.0
    """What its hosts take for a collective inside the layers beside starting it, for each rank of
    its group. Nobody has measured it for minitron; 0 leaves a kernel's start."""
    host_seconds_beside_pipeline: float = 0.0
    """The same while a pipeline's messages travel between nodes."""
    both_gradients: bool = False
    """A 16-bit gradient stays beside the float32 sum."""
    copies: int = 0
    """Copies of a block's input, (B, S, D/tp), that layers cut by tp > 1 keep beside what autograd
    needs."""


MINITRON = System()


def blocks_per_rank(model: ModelConfig, parallel: ParallelConfig, system: System) -> list[int]:
    """Return each pipeline rank's number of blocks, as `pipeline.plan.split_blocks` does."""
    p = parallel.pp
    if p == 1:
        return [model.num_layers]
    vocabulary = model.vocab_size * model.width / cost.num_block_parameters(model)  # in blocks
    first = vocabulary if system.balance == "parameters" else 0.0
    last = 0.0 if system.balance == "blocks" else vocabulary
    stages = even_stages(model.num_layers, p * parallel.chunks, first, last)
    if system.balance == "time":  # first the early ones
        stages = even_stages(model.num_layers, p * parallel.chunks, last, first)[::-1]
    return [sum(stages[rank::p]) for rank in range(p)]


@cache
def even_stages(num_blocks: int, num_stages: int, first: float, last: float) -> tuple[int, ...]:
    """Return the blocks of each stage, so that the most expensive stage costs least.

    A block costs 1; the first and the last stage cost `first` and `last` more. Later stages are
    filled first.
    """
    ends = [first, *[0.0] * (num_stages - 2), last]
    limits = sorted(count + end for count in range(1, num_blocks + 1) for end in set(ends))
    for limit in limits:
        room = [floor(limit - end + 1e-9) for end in ends]
        if min(room) >= 1 and sum(room) >= num_blocks:
            break
    stages = []
    for index in range(num_stages):  # as few as leave no room behind
        left = num_blocks - sum(stages)
        stages.append(max(1, left - sum(room[index + 1 :])))
    return tuple(stages)
