"""Parameters and FLOPs of a model; a multiply-add counts as two."""

from typing import Literal

from minitron.config import ModelConfig

RecomputeKind = Literal["none", "selective", "full"]


def num_parameters(model: ModelConfig) -> int:
    """Count the trainable values of the model, tied weights once."""
    embedding = model.vocab_size * model.width
    positions = model.max_sequence_length * model.width if model.family == "gpt" else 0
    head = 0 if model.tied_embedding else embedding
    return (
        embedding
        + positions
        + model.num_layers * num_block_parameters(model)
        + num_norm_parameters(model)
        + head
    )


def num_block_parameters(model: ModelConfig) -> int:
    """Count the trainable values of one block: attention, feed-forward and its two norms."""
    D, F, kv_width = model.width, model.ffn_width, model.num_kv_heads * model.head_width
    attention = 2 * D * D + 2 * D * kv_width  # query and out, key and value
    matrices = 2 if model.family == "gpt" else 3  # up, down (and llama's gate)
    biases = 4 * D + F + D if model.family == "gpt" else 0
    return attention + matrices * D * F + biases + 2 * num_norm_parameters(model)


def num_norm_parameters(model: ModelConfig) -> int:
    """Count a norm's parameters: LayerNorm (gpt) has weight and bias, RMSNorm (llama) a weight."""
    return model.width * (2 if model.family == "gpt" else 1)


def forward_flops_per_token(model: ModelConfig, sequence_length: int) -> int:
    """Return the FLOPs of the forward pass per token, matmuls only.

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
    """Return the FLOPs of the backward pass per token: two matmuls for each of the forward pass.

    One gives the gradient of its left factor, one that of its right factor.
    """
    return 2 * forward_flops_per_token(model, sequence_length)


def training_flops_per_token(model: ModelConfig, sequence_length: int) -> int:
    """Return the model FLOPs of one training step per token: forward, and twice that backward.

    Recomputation is not counted: these are model FLOPs, the numerator of MFU
    (Chowdhery et al. 2022, PaLM, appendix B), not hardware FLOPs.
    """
    return 3 * forward_flops_per_token(model, sequence_length)


def recompute_flops_per_token(
    model: ModelConfig, sequence_length: int, recompute: RecomputeKind = "full"
) -> int:
    """Return the FLOPs per token that recomputation adds to a training step.

    selective: attention's QK^T and PV once more, 4 S D per layer. full: the forward pass of every
    block once more, without the head (Korthikanti et al. 2022, section 5 and appendix A).
    """
    if recompute == "none":
        return 0
    if recompute == "selective":
        return model.num_layers * 4 * sequence_length * model.width
    head = 2 * model.width * model.vocab_size
    return forward_flops_per_token(model, sequence_length) - head


# Models whose shapes are published


def published_llama(
    num_layers: int,
    width: int,
    num_heads: int,
    num_kv_heads: int,
    ffn_width: int,
    vocab_size: int,
    max_sequence_length: int,
    tied_embedding: bool = False,
) -> ModelConfig:
    return ModelConfig(
        "llama",
        vocab_size,
        max_sequence_length,
        num_layers,
        width,
        num_heads,
        num_kv_heads,
        ffn_width,
        tied_embedding,
    )


PUBLISHED = {
    "GPT-3 175B": ModelConfig("gpt", 50257, 2048, 96, 12288, 96, 96, 4 * 12288, dropout=0.1),
    "Llama 3.2 1B": published_llama(16, 2048, 32, 8, 8192, 128256, 8192, tied_embedding=True),
    "Llama 2 7B": published_llama(32, 4096, 32, 32, 11008, 32000, 4096),
    "Llama 3.1 70B": published_llama(80, 8192, 64, 8, 28672, 128256, 8192),
    "Llama 3.1 405B": published_llama(126, 16384, 128, 8, 53248, 128256, 8192),
}
