"""Bytes of a model in training: weights, gradients, optimizer state, and activations."""

from dataclasses import dataclass
from typing import Literal

from minitron.config import ModelConfig
from minitron.cost.compute import RecomputeKind, num_parameters
from minitron.cost.tensor import (
    ONE_DEVICE,
    Layout,
    kv_heads_per_rank,
    share,
    tokens_between_layers,
)

AttentionKind = Literal["fused", "materialized"]


@dataclass(frozen=True)
class Recipe:
    """Bytes that each parameter costs in training with Adam, by what holds them."""

    parameter: int
    """The weight that forward and backward compute with."""
    gradient: int
    """Its gradient, with the float32 accumulator where there is one beside it."""
    master: int
    """A float32 copy of the weight, which the optimizer updates."""
    optimizer_state: int
    """Adam's mean of the gradient and of its square, float32."""

    @property
    def total(self) -> int:
        return self.parameter + self.gradient + self.master + self.optimizer_state


RECIPES = {
    "fp32": Recipe(parameter=4, gradient=4, master=0, optimizer_state=8),  # 16
    "bf16": Recipe(parameter=2, gradient=2, master=4, optimizer_state=8),  # 16
    "bf16, fp32 gradient": Recipe(parameter=2, gradient=4, master=4, optimizer_state=8),  # 18
    "bf16, both gradients": Recipe(parameter=2, gradient=2 + 4, master=4, optimizer_state=8),  # 20
}


def model_state_bytes(model: ModelConfig, recipe: Recipe) -> int:
    """Return the bytes of weights, gradients and optimizer state (Rajbhandari et al. 2019, 3.1)."""
    return num_parameters(model) * recipe.total


def model_state_table(models: dict[str, ModelConfig]) -> dict[str, dict[str, int]]:
    """Return the bytes of the model states, by model and by the name of the recipe."""
    return {
        name: {recipe: model_state_bytes(model, RECIPES[recipe]) for recipe in RECIPES}
        for name, model in models.items()
    }


# Bytes of activations: what autograd saves in the forward pass for the backward pass


def activation_bytes_per_layer(
    model: ModelConfig,
    batch_size: int,
    sequence_length: int,
    bytes_per_value: int = 2,
    attention: AttentionKind = "fused",
    recompute: RecomputeKind = "none",
    mask_bytes: int = 1,
    layout: Layout = ONE_DEVICE,
) -> int:
    """Return the bytes that one block saves for the backward pass, per rank of the layout.

    For GPT with F = 4 D, dropout and a materialized attention this is table 2 of Korthikanti et
    al. 2022: s b h (34 + 5 a s / h) on one device, s b h (10 + 24/t + 5 a s / (h t)) on t
    tensor-parallel ranks, s b h (34/t + 5 a s / (h t)) with sequence parallelism (30/t + 4 for
    34/t if the layers do not gather their inputs again); with recompute "full" 2 s b h, and 2 s b
    h / t of it on each rank with sequence parallelism. In addition comes what the paper leaves out
    as small: the norms' float32 statistics and the causal mask.

    Weights and activations have `bytes_per_value` bytes each, a value of a dropout mask
    `mask_bytes` (in PyTorch 1 on CUDA, as many as a value on the CPU); there are masks if
    model.dropout > 0. Kernels are CUDA's: RMSNorm is one operation (PyTorch runs it as several on
    the CPU, which save more). Raises ConfigError for sizes that are not divisible by the ranks.
    """
    tokens, D, size = batch_size * sequence_length, model.width, layout.tensor_parallel
    tokens_between = tokens_between_layers(batch_size, sequence_length, layout)
    if recompute == "full":
        return tokens_between * D * bytes_per_value

    # Between the cut layers: the input of each norm, and of query, key and value together, and
    # of the feed-forward
    statistics = 2 * norm_statistics_bytes(model)
    masks = 2 * D * mask_bytes if model.dropout > 0 else 0
    between = tokens_between * (2 * D * bytes_per_value + statistics + masks)
    tokens_read = tokens_between if layout.regather else tokens
    read = tokens_read * 2 * D * bytes_per_value

    # Inside: query, and the input of out; key and value; what the feed-forward makes
    heads = share("model.num_heads", model.num_heads, size)
    keeps_repeated = attention == "materialized" and recompute == "none"  # K and V, to H heads
    kv_heads = heads if keeps_repeated else kv_heads_per_rank(model, size)
    hidden = 2 if model.family == "gpt" else 4  # up, GELU; gate, SiLU, up, their product
    ffn_width = share("model.ffn_width", model.ffn_width, size)
    inside = 2 * (heads + kv_heads) * model.head_width + hidden * ffn_width
    scores = (
        0
        if recompute == "selective"
        else attention_bytes(
            model, batch_size, sequence_length, bytes_per_value, attention, mask_bytes, layout
        )
    )
    return between + read + tokens * inside * bytes_per_value + scores


def attention_bytes(
    model: ModelConfig,
    batch_size: int,
    sequence_length: int,
    bytes_per_value: int = 2,
    attention: AttentionKind = "fused",
    mask_bytes: int = 1,
    layout: Layout = ONE_DEVICE,
) -> int:
    """Return the bytes that attention saves between its inputs and its output, per rank: H/t heads.

    fused: one float32 per query and head, the log of its softmax's sum (Dao 2023, section 3.1);
    dropout is drawn again. materialized: the softmax, and with dropout its mask and the dropped
    softmax, B H S S values each, and the causal mask, S S booleans.
    """
    heads = share("model.num_heads", model.num_heads, layout.tensor_parallel)
    rows = batch_size * heads * sequence_length
    if attention == "fused":
        return 4 * rows
    per_score = bytes_per_value
    if model.dropout > 0:
        per_score += mask_bytes + bytes_per_value
    return rows * sequence_length * per_score + sequence_length**2


def norm_statistics_bytes(model: ModelConfig) -> int:
    """Return float32 bytes per token: LayerNorm saves mean and 1/deviation, RMSNorm the second."""
    return 8 if model.family == "gpt" else 4


def activation_bytes(
    model: ModelConfig,
    batch_size: int,
    sequence_length: int,
    bytes_per_value: int = 2,
    attention: AttentionKind = "fused",
    recompute: RecomputeKind = "none",
    mask_bytes: int = 1,
    layout: Layout = ONE_DEVICE,
) -> int:
    """Return the bytes saved by the forward pass: all blocks, embedding, final norm, head, loss.

    The loss is taken from float32 logits and saves V float32 log-probabilities per token; where
    the vocabulary is cut, this rank's V/t of the softmax. With recompute "full" the backward pass
    soon holds one block more, the one it recomputes: `activation_bytes_per_layer` of recompute
    "none".
    """
    tokens, D, size = batch_size * sequence_length, model.width, layout.tensor_parallel
    block = activation_bytes_per_layer(
        model,
        batch_size,
        sequence_length,
        bytes_per_value,
        attention,
        recompute,
        mask_bytes,
        layout,
    )
    tokens_between = tokens_between_layers(batch_size, sequence_length, layout)
    tokens_read = tokens_between if layout.regather else tokens  # by the head
    mask = D * mask_bytes if model.dropout > 0 else 0  # of the embedding
    norm = D * bytes_per_value + norm_statistics_bytes(model)
    loss = 4 * share("model.vocab_size", model.vocab_size, size)
    # Each token's int64 row in this rank's vocabulary and whether it has one, of inputs and of
    # targets; and whether the target counts
    rows = 2 * (8 + 1) + 1 if size > 1 else 0
    # int64 places in the sequence; or the float32 cosine and sine that all blocks share
    per_position = 8 if model.family == "gpt" else 2 * 4 * model.head_width
    return (
        model.num_layers * block
        + tokens_between * (mask + norm)
        + tokens_read * D * bytes_per_value
        + tokens * (loss + rows)
        + sequence_length * per_position
    )
