"""What training costs, as formulas: parameters, FLOPs and bytes.

Each function takes the few integers it needs and cites where its formula comes from.
Counts are exact integers; FLOPs count a multiply-add as two.
"""

from dataclasses import dataclass
from typing import Literal

from minitron.config import ModelConfig

AttentionKind = Literal["fused", "materialised"]
RecomputeKind = Literal["none", "selective", "full"]


def num_parameters(model: ModelConfig) -> int:
    """Number of trainable values of the model, tied weights counted once."""
    embedding = model.vocab_size * model.width
    positions = model.max_sequence_length * model.width if model.family == "gpt" else 0
    head = 0 if model.tied_embedding else embedding
    return embedding + positions + model.num_layers * num_block_parameters(model) \
        + num_norm_parameters(model) + head


def num_block_parameters(model: ModelConfig) -> int:
    """Number of trainable values of one block: attention, feed-forward and its two norms."""
    D, F, kv_width = model.width, model.ffn_width, model.num_kv_heads * model.head_width
    attention = 2 * D * D + 2 * D * kv_width  # query and out, key and value
    matrices = 2 if model.family == "gpt" else 3  # up, down (and llama's gate)
    biases = 4 * D + F + D if model.family == "gpt" else 0
    return attention + matrices * D * F + biases + 2 * num_norm_parameters(model)


def num_norm_parameters(model: ModelConfig) -> int:
    """LayerNorm (gpt) has a weight and a bias, RMSNorm (llama) a weight."""
    return model.width * (2 if model.family == "gpt" else 1)


def forward_flops_per_token(model: ModelConfig, sequence_length: int) -> int:
    """FLOPs of the forward pass per token: matrix products only.

    Two per weight of every linear layer and of the head (embedding look-ups are free), and
    4 S D per layer for attention's QK^T and PV (Narayanan et al. 2021, appendix; their
    convention counts the full S x S square although half of it is masked).
    """
    D, F, kv_width = model.width, model.ffn_width, model.num_kv_heads * model.head_width
    matrices = 2 if model.family == "gpt" else 3
    weights = 2 * D * D + 2 * D * kv_width + matrices * D * F
    attention = 4 * sequence_length * D
    return model.num_layers * (2 * weights + attention) + 2 * D * model.vocab_size


def backward_flops_per_token(model: ModelConfig, sequence_length: int) -> int:
    """FLOPs of the backward pass per token: each product of the forward pass needs two.

    One gives the gradient of its left factor, one that of its right factor.
    """
    return 2 * forward_flops_per_token(model, sequence_length)


def training_flops_per_token(model: ModelConfig, sequence_length: int) -> int:
    """Model FLOPs of one training step per token: forward plus backward, which costs twice as much.

    Recomputation is not counted: these are model FLOPs, the numerator of MFU
    (Chowdhery et al. 2022, PaLM, appendix B), not hardware FLOPs.
    """
    return 3 * forward_flops_per_token(model, sequence_length)


def recompute_flops_per_token(
    model: ModelConfig, sequence_length: int, recompute: RecomputeKind = "full"
) -> int:
    """FLOPs per token that recomputation adds to a training step.

    selective: attention's QK^T and PV once more, 4 S D per layer. full: the forward pass of every
    block once more, without the head (Korthikanti et al. 2022, section 5 and appendix A).
    """
    if recompute == "none":
        return 0
    if recompute == "selective":
        return model.num_layers * 4 * sequence_length * model.width
    head = 2 * model.width * model.vocab_size
    return forward_flops_per_token(model, sequence_length) - head


# Bytes of weights, gradients and optimizer state: the model states


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


# Models whose shapes are published


def published_llama(
    num_layers: int, width: int, num_heads: int, num_kv_heads: int, ffn_width: int,
    vocab_size: int, max_sequence_length: int, tied_embedding: bool = False,
) -> ModelConfig:
    return ModelConfig(
        "llama", vocab_size, max_sequence_length, num_layers, width, num_heads, num_kv_heads,
        ffn_width, tied_embedding,
    )


PUBLISHED = {
    "GPT-3 175B": ModelConfig("gpt", 50257, 2048, 96, 12288, 96, 96, 4 * 12288, dropout=0.1),
    "Llama 3.2 1B": published_llama(16, 2048, 32, 8, 8192, 128256, 8192, tied_embedding=True),
    "Llama 2 7B": published_llama(32, 4096, 32, 32, 11008, 32000, 4096),
    "Llama 3.1 70B": published_llama(80, 8192, 64, 8, 28672, 128256, 8192),
    "Llama 3.1 405B": published_llama(126, 16384, 128, 8, 53248, 128256, 8192),
}
