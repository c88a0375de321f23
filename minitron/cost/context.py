"""What each of N ranks sends when the sequence is divided inside attention too.

Norms, linear layers and the loss send nothing, and hold 1/N of the activations: their formulas are
those of a sequence of S/N tokens.

Read in this order: keys_and_values, context_parallel_volume.
Reference: Liu et al. 2023 (ring); Llama team 2024, section 3.3.2 (all-gather); Jacobs et al. 2023
(Ulysses); Fang & Zhao 2024, table 2.
"""

from typing import Literal

from minitron.config import ModelConfig, require
from minitron.cost.communication import Volume

ContextKind = Literal["ring", "all-gather", "ulysses"]


def keys_and_values(model: ModelConfig, num_tokens: int) -> int:
    """Count the elements of a block's keys and values: 2 G K for each token, 2 D G/H."""
    return 2 * num_tokens * model.num_kv_heads * model.head_width


def context_parallel_volume(
    model: ModelConfig,
    batch_size: int,
    sequence_length: int,
    size: int,
    kind: ContextKind,
    element_size: int = 2,
    grad_element_size: int = 4,
) -> Volume:
    """Return the bytes that a rank sends and receives per block and micro-batch, both passes.

    In units of B S D elements, ring and all-gather 6 G/H (N-1)/N: keys and values travel in both
    passes, so that none but a rank's own are kept, and their gradients once, with
    `grad_element_size` bytes each. (Table 2 of Fang & Zhao has 4 for a ring: as much as one trip of
    each.) Ulysses (4 + 4 G/H)/N (N-1)/N, which is 8/N of that share without grouped queries:
    queries, keys, values and output, and their gradients. Recomputation is not counted.
    Raises ConfigError if the ranks do not divide the sequence, or, in Ulysses, the key-value heads.
    """
    require_divides("sequence length", sequence_length, size)
    tokens = batch_size * sequence_length // size  # of a rank
    pair = keys_and_values(model, tokens)
    if kind != "ulysses":
        num_bytes = (size - 1) * pair * (2 * element_size + grad_element_size)
        return Volume(num_bytes, num_bytes)

    require_divides("model.num_kv_heads", model.num_kv_heads, size)
    all_four = 2 * tokens * model.width + pair
    num_bytes = 2 * (size - 1) * all_four // size * element_size
    return Volume(num_bytes, num_bytes)


def require_divides(name: str, count: int, size: int) -> None:
    require(
        count % size == 0,
        f"{name} = {count} is not divisible by {size} ranks of context parallelism",
        f"raise it to {-(-count // size) * size}, or take fewer ranks",
    )
