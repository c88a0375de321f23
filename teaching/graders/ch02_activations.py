"""Grader of 2.2: the formulas against what the meter finds after a real block's forward pass."""

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn

from minitron.config import ModelConfig
from minitron.measure.meter import Meter, Snapshot
from minitron.model.transformer import Block, fused_attention
from teaching.graders import asked, expect

DTYPES = {2: torch.bfloat16, 4: torch.float32, 8: torch.float64}
SHAPES = [  # B, S, H, D, F, bytes per value: no two parts have the same size
    (2, 29, 5, 35, 116, 4),
    (3, 37, 3, 24, 58, 2),
    (1, 11, 1, 13, 17, 8),
]


def grade_2_2(materialized_block_bytes: Callable, fused_block_bytes: Callable) -> None:
    """Compare both formulas with real blocks, without and with dropout."""
    functions = [(materialized_block_bytes, masked_attention, "in memory"),
                 (fused_block_bytes, fused_without_mask, "in a fused kernel")]
    for function, attention_fn, where in functions:
        for dropout in (0.0, 0.1):
            for B, S, H, D, ffn, size in SHAPES:
                config = ModelConfig(
                    family="gpt", vocab_size=1, num_layers=1, width=D, num_heads=H, num_kv_heads=H,
                    ffn_width=ffn, max_sequence_length=S, dropout=dropout)
                with asked(f"the bytes that a block saves, attention {where}, dropout {dropout}, "
                           f"B {B}, S {S}, H {H}, D {D}, F {ffn}, {size} bytes per value: "
                           "against the meter after a real block's forward pass"):
                    right, small = _measure(config, B, S, size, attention_fn)
                    seen = function(config, B, S, size)
                    published = B * S * (34 * D + 5 * H * S)
                    faults = {published - right: "that is B S D (34 + 5 H S / D): right for F = "
                                                 "4 D, 2 bytes, dropout and a matrix in memory",
                              small: "norms' means and deviations, the future's mask and the "
                                     "kernel's one number per token and head are left out"}
                    faults |= _faults(config, B, S, size, attention_fn is masked_attention)
                    _expect_bytes(seen, right, size, faults)


# A block as it runs on a GPU, where dropout keeps a mask of 1 byte per value


class MaskedDropout(nn.Module):
    """Dropout that keeps a boolean mask; on the CPU PyTorch's own keeps one as wide as x."""

    def __init__(self, probability: float):
        super().__init__()
        self.probability = probability

    def forward(self, x: Tensor) -> Tensor:
        return torch.native_dropout(x, self.probability, True)[0] if self.probability else x


def masked_attention(query: Tensor, key: Tensor, value: Tensor, dropout: float) -> Tensor:
    """`materialized_attention` with that dropout."""
    scores = query @ key.transpose(-2, -1) / math.sqrt(query.shape[-1])
    future = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
    probabilities = scores.masked_fill(future, -math.inf).softmax(-1)
    return MaskedDropout(dropout)(probabilities) @ value


def fused_without_mask(query: Tensor, key: Tensor, value: Tensor, dropout: float) -> Tensor:
    """`fused_attention` without dropout: a GPU's kernel saves no mask, the CPU's has no dropout."""
    return fused_attention(query, key, value, 0.0)


def _measure(
    config: ModelConfig, batch_size: int, sequence_length: int, size: int, attention_fn: Callable
) -> tuple[int, int]:
    """Bytes that a real block has saved after forward: what counts, and what is left out."""
    block = Block(config).to(DTYPES[size])
    block.attention.attention_fn = attention_fn
    block.dropout = MaskedDropout(config.dropout)
    shape = (batch_size, sequence_length, config.width)
    with Meter(block) as meter:
        x = torch.zeros(shape, dtype=DTYPES[size], requires_grad=True)
        out = block(x, None)
        saved = [t for t in held_now(meter).tensors if t.category == "activation"]
        del out

    per_token = (batch_size, sequence_length, 1)
    per_head = (batch_size, config.num_heads, sequence_length)
    left_out = (per_token, per_head, (sequence_length, sequence_length))
    small = sum(t.bytes for t in saved if t.shape in left_out)
    return sum(t.bytes for t in saved) - small, small


def held_now(meter: Meter) -> Snapshot:
    """All that is alive at this moment: made the peak by one more tensor, which is left out."""
    size = meter.peak.total
    marker = torch.empty(size, dtype=torch.uint8)
    tensors = [t for t in meter.peak.tensors if t.shape != marker.shape]
    return Snapshot(meter.now(), meter.peak.phase, tensors)


# What a difference means


def _expect_bytes(seen: int, right: int, size: int, faults: dict[int, str]) -> None:
    expect(isinstance(seen, int), seen=f"{seen!r}, of type {type(seen).__name__}",
           likely="bytes are exact integers: use // or no division at all, not /")
    likely = faults.get(seen - right, "let the meter list them: `for t in meter.peak.tensors: "
                        "print(t.name, t.shape, t.bytes, t.category)`")
    if seen * size == right:
        likely = "that is the number of values: multiply by bytes_per_value"
    expect(seen == right, seen=f"{seen:,} bytes, not {right:,} (difference {seen - right:+,})",
           likely=likely)


def _faults(
    model: ModelConfig, batch_size: int, sequence_length: int, size: int, materialized: bool
) -> dict[int, str]:
    """What a difference from the right bytes means; the sign tells missing from superfluous."""
    wide = batch_size * sequence_length * model.width
    inner = batch_size * sequence_length * model.ffn_width
    square = batch_size * model.num_heads * sequence_length**2
    faults = {
        8 * wide * size - 2 * inner * size: "the feed-forward is F = ffn_width wide, not 4 D",
        2 * wide * size: "two tensors of B S D too many: the query, key and value layers read "
                         "one and the same input, and a sum saves nothing",
        wide * size: "one tensor of B S D too many: the block's output is the next block's to save",
        -wide * size: "one tensor of B S D is missing: both norms' inputs, their outputs (which "
                      "the linear layers read), query, key, value, and the input of out",
        -2 * wide * size: "two tensors of B S D are missing: a norm needs its input, and the "
                          "linear layers after it theirs",
        -inner * size: "one of the tensors of width F is missing: gelu needs its input, and "
                       "down needs gelu's output",
        square: "a mask of S x S too many: is there one?",
        square * size: "one S x S tensor too many: softmax needs its output, not its input, and "
                       "without dropout its output is what the matmul with the values reads",
    }
    if not materialized:
        faults |= {
            (size + 1) * square + square * size: "the fused kernel stores nothing of S x S",
            square * size: "the fused kernel stores nothing of S x S",
            square: "the fused kernel regenerates its mask from a seed: no S x S mask is saved",
            -wide * size: "one tensor of B S D is missing: the kernel saves query, key, value and "
                          "its output, the input of `out`",
            -4 * wide * size: "attention saves query, key, value and output",
        }
    faults |= _mask_faults(model.dropout, wide, square if materialized else 0, size)
    return faults


def _mask_faults(dropout: float, wide: int, square: int, size: int) -> dict[int, str]:
    masks = square + 2 * wide
    if dropout == 0:
        return {masks: "those are dropout's masks: without dropout there are none",
                masks + square * size: "those are dropout's masks and output: without dropout "
                                       "there are none"}
    faults = {
        -masks: "dropout's masks are missing: 1 byte for each value it acts on",
        -2 * wide: "the masks of the two branches' outputs are missing, 1 byte per value",
        -wide: "one branch's mask is missing: attention's output and the feed-forward's",
        (size - 1) * masks: "a mask has 1 byte per value, not bytes_per_value",
    }
    if square:
        faults |= {
            -square: "the mask of the probabilities is missing, 1 byte per value",
            -square * size: "with dropout, the matmul with the values reads the probabilities "
                            "after dropout: a second S x S tensor",
            -masks - square * size: "with dropout: a mask of 1 byte per value in three places, "
                                    "and the probabilities after it, a second S x S tensor",
        }
    return faults
