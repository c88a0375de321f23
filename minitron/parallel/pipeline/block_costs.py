"""What a model's blocks and ends cost, by which `plan.split_blocks` divides them into stages.

Read in this order: count_parameters, count_multiplications.
"""

from collections.abc import Callable

from torch import nn

Count = Callable[[nn.Module], tuple[list[float], float, float]]  # of the blocks, and of both ends


def count_parameters(model: nn.Module) -> tuple[list[float], float, float]:
    """Count what each block, the embedding and the head cost in memory."""
    return (
        [size_of(block) for block in model.blocks],
        size_of(model.token_embedding),
        size_of(model.head),
    )


def count_multiplications(model: nn.Module) -> tuple[list[float], float, float]:
    """Count what they cost in time: an embedding is a lookup, the rest are matmuls."""
    blocks, _, head = count_parameters(model)
    return blocks, 0.0, head


def size_of(module: nn.Module) -> float:
    return float(sum(parameter.numel() for parameter in module.parameters()))
