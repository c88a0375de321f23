"""What training costs, as formulas: parameters and FLOPs.

Each function takes the few integers it needs and cites where its formula comes from.
Counts are exact integers; FLOPs count a multiply-add as two.
"""

from minitron.config import ModelConfig


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


def training_flops_per_token(model: ModelConfig, sequence_length: int) -> int:
    """Model FLOPs of one training step per token: forward plus backward, which costs twice as much.

    Recomputation is not counted: these are model FLOPs, the numerator of MFU
    (Chowdhery et al. 2022, PaLM, appendix B), not hardware FLOPs.
    """
    return 3 * forward_flops_per_token(model, sequence_length)
