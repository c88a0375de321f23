"""What each rank holds and sends when the layers themselves are cut over t tensor-parallel ranks.

Columns, then rows: a pair of linear layers is cut so that one sum over the ranks follows it. A
block is two pairs, query-key-value with out and up with down; head and embedding, at the two ends
of the model, are the two halves of one more.

Read in this order: Layout, tensor_parallel_calls, the volumes, tensor_parallel_parameters. The
activations are in `memory`.
Reference: Narayanan et al. 2021, section 3.2; Korthikanti et al. 2022, section 4.2.
"""

from dataclasses import dataclass

from minitron.config import ModelConfig, require
from minitron.cost.communication import Volume, collective_volume
from minitron.cost.compute import num_norm_parameters


@dataclass(frozen=True)
class Layout:
    """How the layers of a model are cut over ranks."""

    tensor_parallel: int = 1
    """Ranks that compute every layer together, t."""
    sequence_parallel: bool = False
    """Between the cut layers each rank has 1/t of the sequence: norms, dropout, residual stream."""
    regather: bool = True
    """With sequence parallelism, a cut layer keeps its rank's part of the input, and gathers the
    whole again in the backward pass; if False it keeps all of it."""


ONE_DEVICE = Layout()


def share(name: str, count: int, size: int) -> int:
    """Return one rank's part of `count`; raises ConfigError if `size` ranks do not divide it."""
    require(
        count % size == 0,
        f"{name} = {count} is not divisible by {size} ranks of tensor parallelism",
        f"raise it to {-(-count // size) * size}, or take fewer ranks",
    )
    return count // size


def kv_heads_per_rank(model: ModelConfig, size: int) -> int:
    """Return the key-value heads on one rank: G/t; one, shared by t/G ranks, if G < t."""
    G = model.num_kv_heads
    return 1 if size % G == 0 else share("model.num_kv_heads", G, size)


def tokens_between_layers(batch_size: int, sequence_length: int, layout: Layout) -> int:
    """Return for how many tokens one rank holds norms, dropout and residual stream."""
    if not layout.sequence_parallel:
        return batch_size * sequence_length
    return batch_size * share("sequence length", sequence_length, layout.tensor_parallel)


# Sent and received


def tensor_parallel_calls(layout: Layout) -> dict[str, dict[str, int]]:
    """Count a block's calls of each collective per micro-batch, by phase; each of (B, S, D).

    An all-reduce after attention and one after the feed-forward; in the backward pass for the
    inputs of the two. With sequence parallelism each is a reduce-scatter and an all-gather, as
    many bytes; the paper's count leaves out the inputs that the backward pass gathers again, for
    they travel while it computes (Korthikanti et al. 2022, section 4.2.2).
    """
    if not layout.sequence_parallel:
        return {"forward": {"all_reduce": 2}, "backward": {"all_reduce": 2}}
    regathered = 2 if layout.regather else 0
    return {
        "forward": {"all_gather": 2, "reduce_scatter": 2},
        "backward": {"all_gather": 2 + regathered, "reduce_scatter": 2},
    }


def tensor_parallel_volume(
    batch_size: int, sequence_length: int, width: int, element_size: int, rank: int, layout: Layout
) -> Volume:
    """Return the bytes a rank sends and receives per block and micro-batch, forward and backward.

    8 B S D (t-1)/t elements (Narayanan et al. 2021, section 3.2), as many with sequence
    parallelism, and 10 if inputs are gathered again. Recomputation is not counted.
    """
    num_elements = batch_size * sequence_length * width
    sent = received = 0
    for calls in tensor_parallel_calls(layout).values():
        for op, count in calls.items():
            volume = collective_volume(op, num_elements, element_size, layout.tensor_parallel, rank)
            sent += count * volume.sent
            received += count * volume.received
    return Volume(sent, received)


def vocabulary_parallel_volume(
    batch_size: int,
    sequence_length: int,
    width: int,
    element_size: int,
    rank: int,
    layout: Layout,
    loss_element_size: int = 4,
) -> Volume:
    """Return the bytes per micro-batch of an embedding, head and loss with a cut vocabulary.

    Embedding and head make one pair, half a block; under autocast the embedding's sum has 4 bytes
    a value, though, like the loss. The loss all-reduces three numbers a token: the largest logit;
    then the sum of exponentials and the target's logit (Shoeybi et al. 2019, section 3).
    """
    block = tensor_parallel_volume(batch_size, sequence_length, width, element_size, rank, layout)
    tokens, size = batch_size * sequence_length, layout.tensor_parallel
    largest = collective_volume("all_reduce", tokens, loss_element_size, size, rank)
    sums = collective_volume("all_reduce", 2 * tokens, loss_element_size, size, rank)
    return Volume(
        block.sent // 2 + largest.sent + sums.sent,
        block.received // 2 + largest.received + sums.received,
    )


# Held


def tensor_parallel_parameters(model: ModelConfig, size: int) -> int:
    """Count what one of `size` ranks holds: a little more than 1/t of the parameters.

    Whole are the norms, the biases that are added after a sum, the learned positions, and a
    key-value head where there are fewer than ranks. Reference: Shoeybi et al. 2019, section 3.
    """
    D, is_gpt = model.width, model.family == "gpt"
    query_width = share("model.num_heads", model.num_heads, size) * model.head_width
    kv_width = kv_heads_per_rank(model, size) * model.head_width
    ffn_width = share("model.ffn_width", model.ffn_width, size)
    columns = query_width + 2 * kv_width + (1 if is_gpt else 2) * ffn_width  # llama has a gate
    rows = query_width + ffn_width

    biases = columns + 2 * D if is_gpt else 0
    block = D * (columns + rows) + biases + 2 * num_norm_parameters(model)
    vocabulary = D * share("model.vocab_size", model.vocab_size, size)
    positions = D * model.max_sequence_length if is_gpt else 0
    return (
        vocabulary * (1 if model.tied_embedding else 2)
        + positions
        + model.num_layers * block
        + num_norm_parameters(model)
    )
