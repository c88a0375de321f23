"""Bytes of a model in training: weights, gradients, optimizer state, and activations."""

from dataclasses import dataclass
from typing import Literal

from minitron.config import ModelConfig
from minitron.cost.compute import RecomputeKind, num_parameters

AttentionKind = Literal["fused", "materialised"]


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
    """Bytes of weights, gradients and optimizer state (Rajbhandari et al. 2019, section 3.1)."""
    return num_parameters(model) * recipe.total


def model_state_table(models: dict[str, ModelConfig]) -> dict[str, dict[str, int]]:
    """Bytes of the model states, by model and by the name of the recipe."""
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
) -> int:
    """Bytes that one block saves for the backward pass (Korthikanti et al. 2022, section 4.1).

    For GPT with F = 4 D, dropout and a materialised attention this is their equation 1,
    s b h (34 + 5 a s / h), plus what it leaves out as small: the norms' float32 statistics and
    the causal mask. Weights and activations have `bytes_per_value` bytes each, a value of a
    dropout mask `mask_bytes` (in PyTorch 1 on CUDA, as many as a value on the CPU); there are
    masks if model.dropout > 0. Kernels are CUDA's: RMSNorm is one operation (PyTorch runs it as
    several on the CPU, which save more).
    """
    tokens, D = batch_size * sequence_length, model.width
    block_input = tokens * D * bytes_per_value
    if recompute == "full":
        return block_input

    keeps_repeated = attention == "materialised" and recompute == "none"  # K and V, to H heads
    kv_width = D if keeps_repeated else model.num_kv_heads * model.head_width
    hidden = 2 if model.family == "gpt" else 4  # up, GELU; gate, SiLU, up, their product
    # D: the input of each norm, of query, key and value together, of out, and of the feed-forward
    saved = 5 * D + (D + 2 * kv_width) + hidden * model.ffn_width
    statistics = 2 * norm_statistics_bytes(model)
    masks = 2 * D * mask_bytes if model.dropout > 0 else 0
    inside = 0 if recompute == "selective" else attention_bytes(
        model, batch_size, sequence_length, bytes_per_value, attention, mask_bytes
    )
    return tokens * (saved * bytes_per_value + statistics + masks) + inside


def attention_bytes(
    model: ModelConfig,
    batch_size: int,
    sequence_length: int,
    bytes_per_value: int = 2,
    attention: AttentionKind = "fused",
    mask_bytes: int = 1,
) -> int:
    """Bytes that one attention saves between its inputs and its output.

    fused: one float32 per query and head, the log of its softmax's sum (Dao 2023, section 3.1);
    dropout is drawn again. materialised: the softmax, and with dropout its mask and the dropped
    softmax, B H S S values each, and the causal mask, S S booleans.
    """
    rows = batch_size * model.num_heads * sequence_length
    if attention == "fused":
        return 4 * rows
    per_score = bytes_per_value
    if model.dropout > 0:
        per_score += mask_bytes + bytes_per_value
    return rows * sequence_length * per_score + sequence_length**2


def norm_statistics_bytes(model: ModelConfig) -> int:
    """Bytes per token: LayerNorm saves mean and 1/deviation in float32, RMSNorm the second."""
    return 8 if model.family == "gpt" else 4


def activation_bytes(
    model: ModelConfig,
    batch_size: int,
    sequence_length: int,
    bytes_per_value: int = 2,
    attention: AttentionKind = "fused",
    recompute: RecomputeKind = "none",
    mask_bytes: int = 1,
) -> int:
    """Bytes saved at the end of the forward pass: all blocks, embedding, final norm, head, loss.

    The loss is taken from float32 logits and saves V float32 log-probabilities per token. With
    recompute "full" the backward pass soon holds one block more, the one it replays:
    `activation_bytes_per_layer` of recompute "none".
    """
    tokens, D = batch_size * sequence_length, model.width
    block = activation_bytes_per_layer(
        model, batch_size, sequence_length, bytes_per_value, attention, recompute, mask_bytes
    )
    mask = D * mask_bytes if model.dropout > 0 else 0  # of the embedding
    norm_and_head = 2 * D * bytes_per_value + norm_statistics_bytes(model)
    loss = 4 * model.vocab_size
    # int64 places in the sequence; or the float32 cosine and sine that all blocks share
    per_position = 8 if model.family == "gpt" else 2 * 4 * model.head_width
    return model.num_layers * block + tokens * (mask + norm_and_head + loss) \
        + sequence_length * per_position
