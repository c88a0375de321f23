"""A decoder-only Transformer of the GPT and of the Llama family.

The model runs on one device and knows nothing of ranks. It offers seams that a parallelism fills
from outside: its `nn.Linear` and `nn.Embedding` layers by name, `attention_fn`, `positions_of`,
which says where in a sequence its tokens stand, `blocks`, and `run_blocks`, which calls them
between `embed` and `predict`.

Shapes, here and in the whole package, are what this rank holds:

    B micro-batch   S sequence   D width   F feed-forward width   V vocabulary
    H heads         G key-value heads      K head width (D = H K) L layers

Read in this order: Transformer, Block, Attention, the two feed-forwards, attention functions.
Reference: Radford et al. 2019 (GPT-2, section 2.3); Touvron et al. 2023 (Llama, section 2.2);
Ainslie et al. 2023 (grouped-query attention, section 2.2).
"""

import hashlib
import math
from collections.abc import Callable, Iterator
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from minitron.config import ModelConfig


class Transformer(nn.Module):
    """Token ids (B, S) in, logits (B, S, V) out; `initialize` fills the weights."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.config = config
        self.token_embedding = nn.Embedding(config.vocab_size, config.width)
        if config.family == "gpt":
            self.position_embedding = nn.Embedding(config.max_sequence_length, config.width)
        self.dropout = nn.Dropout(config.dropout)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.num_layers))
        self.run_blocks: Callable = run_in_order
        self.positions_of: Callable = consecutive_positions
        self.final_norm = make_norm(config)
        self.head = nn.Linear(config.width, config.vocab_size, bias=False)
        if config.tied_embedding:
            self.head.weight = self.token_embedding.weight

    def forward(self, tokens: Tensor, positions: Tensor | None = None) -> Tensor:
        """Compute the logits (B, S, V) of the token that follows each of `tokens` (B, S).

        `positions` (S,) are the tokens' places in their sequence, unless given `positions_of` them.
        """
        if positions is None:
            positions = self.positions_of(tokens)

        x = self.embed(tokens, positions)
        x = self.run_blocks(self.blocks, x, self.rotation(positions, x.dtype))
        return self.predict(x)

    def embed(self, tokens: Tensor, positions: Tensor) -> Tensor:
        """Return the first block's input (B, S, D)."""
        x = self.token_embedding(tokens)
        if self.config.family == "gpt":
            x = x + self.position_embedding(positions)
        return self.dropout(x)

    def rotation(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor] | None:
        """Return what all blocks read beside x: Llama's rotary table."""
        return None if self.config.family == "gpt" else rotary_table(positions, self.config, dtype)

    def predict(self, x: Tensor) -> Tensor:
        """Return the logits (B, S, V) of the last block's output (B, S, D)."""
        return self.head(self.final_norm(x))


def consecutive_positions(tokens: Tensor) -> Tensor:
    """Return the places (S,) of tokens (B, S) that are a whole sequence: 0 to S-1."""
    return torch.arange(tokens.shape[1], device=tokens.device)


def run_in_order(
    blocks: nn.ModuleList, x: Tensor, rotation: tuple[Tensor, Tensor] | None
) -> Tensor:
    """Send x (B, S, D) through the blocks, one after the other."""
    for block in blocks:
        x = block(x, rotation)
    return x


class Block(nn.Module):
    """One layer: each branch normalizes its input and adds its output to it."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.attention_norm = make_norm(config)
        self.attention = Attention(config)
        self.mlp_norm = make_norm(config)
        self.mlp = FeedForward(config) if config.family == "gpt" else GatedFeedForward(config)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor, rotation: tuple[Tensor, Tensor] | None) -> Tensor:
        x = x + self.dropout(self.attention(self.attention_norm(x), rotation))
        return x + self.dropout(self.mlp(self.mlp_norm(x)))  # (B, S, D)


class Attention(nn.Module):
    """Causal self-attention; G < H key-value heads serve H/G query heads each."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        bias = config.family == "gpt"
        kv_width = config.num_kv_heads * config.head_width
        self.head_width = config.head_width
        self.dropout = config.dropout
        self.query = nn.Linear(config.width, config.width, bias=bias)
        self.key = nn.Linear(config.width, kv_width, bias=bias)
        self.value = nn.Linear(config.width, kv_width, bias=bias)
        self.out = nn.Linear(config.width, config.width, bias=bias)
        self.attention_fn: Callable = fused_attention

    def forward(self, x: Tensor, rotation: tuple[Tensor, Tensor] | None) -> Tensor:
        # -1 heads, not H: a rank that holds some of the heads runs the same line
        heads = (-1, self.head_width)
        query = self.query(x).unflatten(-1, heads).transpose(1, 2)  # (B, H, S, K)
        key = self.key(x).unflatten(-1, heads).transpose(1, 2)  # (B, G, S, K)
        value = self.value(x).unflatten(-1, heads).transpose(1, 2)  # (B, G, S, K)
        if rotation is not None:
            query, key = rotate(query, *rotation), rotate(key, *rotation)

        mixed = self.attention_fn(query, key, value, self.dropout if self.training else 0.0)
        return self.out(mixed.transpose(1, 2).flatten(2))  # (B, S, D)


class FeedForward(nn.Module):
    """GPT's two matrices with GELU (its tanh form, as GPT-2 was trained) between them."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.up = nn.Linear(config.width, config.ffn_width)
        self.down = nn.Linear(config.ffn_width, config.width)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x), approximate="tanh"))


class GatedFeedForward(nn.Module):
    """Llama's SwiGLU: one projection gates the other (Shazeer 2020, section 2)."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.gate = nn.Linear(config.width, config.ffn_width, bias=False)
        self.up = nn.Linear(config.width, config.ffn_width, bias=False)
        self.down = nn.Linear(config.ffn_width, config.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


def make_norm(config: ModelConfig) -> nn.Module:
    cls = nn.LayerNorm if config.family == "gpt" else nn.RMSNorm
    return cls(config.width, eps=config.norm_eps)


# Attention functions: (B, H, S, K), (B, G, S, K), (B, G, S, K), probability -> (B, H, S, K)


def fused_attention(query: Tensor, key: Tensor, value: Tensor, dropout: float) -> Tensor:
    """Attend causally through PyTorch's fused kernel, which never stores the S x S matrix."""
    grouped = query.shape[1] != key.shape[1]
    return F.scaled_dot_product_attention(
        query, key, value, dropout_p=dropout, is_causal=True, enable_gqa=grouped
    )


def materialized_attention(query: Tensor, key: Tensor, value: Tensor, dropout: float) -> Tensor:
    """Attend causally with the S x S matrix in memory: slower, and every step is visible."""
    group = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(group, 1), value.repeat_interleave(group, 1)

    scores = query @ key.transpose(-2, -1) / math.sqrt(query.shape[-1])  # (B, H, S, S)
    future = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
    probabilities = scores.masked_fill(future, -math.inf).softmax(-1)
    return F.dropout(probabilities, dropout) @ value  # (B, H, S, K)


# Rotary positions (Su et al. 2021, section 3.4.2), in the half-split layout of Llama's weights


def rotary_table(
    positions: Tensor, config: ModelConfig, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Return cosine and sine (S, K) of each position's angles.

    Computed in float32 or better: bfloat16 does not have every position beyond 256.
    """
    precise = torch.promote_types(dtype, torch.float32)
    half = torch.arange(0, config.head_width, 2, dtype=precise, device=positions.device)
    frequencies = config.rope_theta ** (-half / config.head_width)  # (K/2,)
    if config.rope_scaling > 1:
        frequencies = scale_rope_frequencies(frequencies, config.rope_scaling)
    angles = positions.to(precise)[:, None] * frequencies  # (S, K/2)
    angles = torch.cat([angles, angles], dim=-1)  # (S, K)
    return angles.cos(), angles.sin()


def scale_rope_frequencies(frequencies: Tensor, factor: float) -> Tensor:
    """Divide by `factor` the frequencies (K/2,) that turn less than once in 8192 tokens.

    Those that turn four times or more stay; between the two it fades in. So Llama 3.1 reads longer
    texts than it was first trained on (`apply_scaling` in Meta's llama-models).
    """
    turns = 8192 * frequencies / (2 * math.pi)
    kept = ((turns - 1) / (4 - 1)).clamp(0, 1)
    return frequencies * (kept + (1 - kept) / factor)


def rotate(x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    """Turn each pair (x[i], x[i + K/2]) of x (B, H, S, K) by its position's angle."""
    first, second = x.chunk(2, dim=-1)
    turned = torch.cat([-second, first], dim=-1)
    return (x * cosine + turned * sine).type_as(x)


# Initialization


def initialize(model: nn.Module, seed: int) -> None:
    """Fill every weight from its global name, so that no later cut or device changes it."""
    fill(model, partial(initial_value, seed=seed, num_layers=model.config.num_layers))


@torch.no_grad()
def fill(model: nn.Module, value: Callable[[str, torch.Size], Tensor]) -> None:
    """Set every parameter to `value(name, shape)`; one value is held at a time."""
    for name, parameter in global_parameters(model):
        parameter.copy_(value(name, parameter.shape))


def global_parameters(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield each parameter with its name in the full model, also for a part of it."""
    for name, parameter in model.named_parameters():
        yield global_name(model, name), parameter


def global_name(model: nn.Module, name: str) -> str:
    """Return a parameter's name in the full model: a tied head is the token embedding."""
    is_tied = name == "head.weight" and model.config.tied_embedding
    return "token_embedding.weight" if is_tied else name


def materialize(model: nn.Module, device: torch.device, in_memory: bool = True) -> None:
    """Put new parameters on `device` in the place of those on the meta device: NaN until filled.

    Without `in_memory` each is a single NaN, seen in the parameter's shape.
    """
    made: dict[nn.Parameter, nn.Parameter] = {}
    for module in model.modules():
        for name, old in list(module.named_parameters(recurse=False)):
            if old.is_meta:
                if old not in made:  # a tied one stays one
                    value = old.new_full((), torch.nan, device=device).expand(old.shape)
                    value = value.contiguous() if in_memory else value
                    made[old] = nn.Parameter(value, old.requires_grad)
                setattr(module, name, made[old])


def initial_value(name: str, shape: torch.Size, seed: int, num_layers: int) -> Tensor:
    """Return the full float32 initial value of the parameter called `name`.

    Normal with deviation 0.02, and 0.02 / sqrt(2 L) for the matrices that write to the residual
    stream (Radford et al. 2019, section 2.3); norms are ones, biases zeros.
    """
    if len(shape) == 1:
        return torch.zeros(shape) if name.endswith("bias") else torch.ones(shape)
    writes_residual = name.endswith(("attention.out.weight", "mlp.down.weight"))
    deviation = 0.02 / math.sqrt(2 * num_layers) if writes_residual else 0.02

    digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "big") >> 1)
    return torch.randn(shape, generator=generator) * deviation
