"""Grader of 1.3: counts against a real model's weights and matrix products."""

from collections.abc import Callable
from functools import cache
from itertools import product

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from minitron.config import ModelConfig
from minitron.model.transformer import Transformer, materialized_attention
from teaching.graders import asked, expect


def grade_1_3(num_parameters: Callable, training_flops_per_token: Callable) -> None:
    """Compare both counts with a real model's, for five models and two sequence lengths."""
    # primes and their small multiples, so that no two parts have the same size
    sizes = dict(vocab_size=101, max_sequence_length=53, num_layers=3, width=44, ffn_width=118)
    models = {
        "llama, tied": dict(family="llama", num_heads=2, num_kv_heads=2, tied_embedding=True),
        "llama, untied": dict(family="llama", num_heads=2, num_kv_heads=2, tied_embedding=False),
        "llama, 11 heads on 1 KV head":
            dict(family="llama", num_heads=11, num_kv_heads=1, tied_embedding=True),
        "gpt, tied": dict(family="gpt", num_heads=4, num_kv_heads=4, tied_embedding=True),
        "gpt, untied": dict(family="gpt", num_heads=4, num_kv_heads=4, tied_embedding=False),
    }
    configs = {name: ModelConfig(**sizes, **fields) for name, fields in models.items()}
    for name, config in configs.items():
        with asked(f"num_parameters({name}: {_sizes(config)}), against a real model's weights"):
            _expect_count(num_parameters(config), _real_parameters(config), "parameters",
                          _parameter_faults(config))
    for (name, config), sequence_length in product(configs.items(), (29, 53)):
        with asked(f"training_flops_per_token({name}: {_sizes(config)}, {sequence_length}), "
                   "against a real model's matmuls"):
            _expect_count(training_flops_per_token(config, sequence_length),
                          _real_flops(config, sequence_length), "FLOPs per token",
                          _flops_faults(config, sequence_length))


def _sizes(config: ModelConfig) -> str:
    return f"V {config.vocab_size}, D {config.width}, F {config.ffn_width}, " \
           f"L {config.num_layers}, {config.max_sequence_length} positions at most"


def _meta_model(config: ModelConfig) -> Transformer:
    with torch.device("meta"):  # shapes only: nothing is stored or computed
        return Transformer(config)


@cache
def _real_parameters(config: ModelConfig) -> int:
    return sum(parameter.numel() for parameter in _meta_model(config).parameters())


@cache
def _real_flops(config: ModelConfig, sequence_length: int) -> int:
    model = _meta_model(config)
    tokens = torch.zeros(2, sequence_length, dtype=torch.int64, device="meta")
    for block in model.blocks:
        block.attention.attention_fn = materialized_attention  # its products are in the open
    with FlopCounterMode(display=False) as counter:
        model(tokens).sum().backward()
    return counter.get_total_flops() // tokens.numel()


def _expect_count(seen: int, right: int, unit: str, faults: dict[int, str]) -> None:
    expect(isinstance(seen, int), seen=f"{seen!r}, of type {type(seen).__name__}",
           likely="counts are exact integers: use // or no division at all, not /")
    difference = seen - right
    likely = faults.get(difference, "print the name and shape of every weight and compare: for "
                        "name, p in Transformer(config).named_parameters(): print(name, p.shape)")
    if 3 * seen == right:
        likely = "that is only the forward pass: the backward pass costs twice as much on top"
    elif 2 * seen == right:
        likely = "a multiply-add counts as 2 FLOPs"
    expect(difference == 0, seen=f"{seen:,} {unit}, not {right:,} (difference {difference:+,})",
           likely=likely)


def _parameter_faults(config: ModelConfig) -> dict[int, str]:
    """What a difference from the right count means; the sign tells missing from superfluous."""
    D, ffn, L, gpt = config.width, config.ffn_width, config.num_layers, config.family == "gpt"
    kv_width = config.num_kv_heads * config.head_width
    head, positions = config.vocab_size * D, config.max_sequence_length * D
    norm = 2 * D if gpt else D
    faults = {
        head: "the difference is V x D: a tied head is the embedding's weight, and counts once",
        -head: "the difference is V x D: an untied head has its own weight",
        positions: "the difference is a position table: llama's rotary positions are not stored",
        -positions: "the difference is gpt's table of learned positions",
        -norm: "the difference is one norm: the final one, after the blocks",
        -(2 * L + 1) * norm: "the difference is the norms: 2 in each block, and the final one",
        -L * D * ffn: "the difference is one feed-forward matrix per block: llama has three, gate, "
                      "up and down",
        L * D * ffn: "the difference is one feed-forward matrix per block: gpt has two, up and "
                     "down",
    }
    if gpt:
        faults[-(5 * D + ffn) * L] = "the difference is the biases of the blocks' linear layers"
        faults[-(2 * L + 1) * D] = "gpt's norms have a weight and a bias, D values each"
    if kv_width < D:
        faults[2 * L * D * (D - kv_width)] = \
            "grouped queries: key and value map D to G K, narrower than the query"
    return faults


def _flops_faults(config: ModelConfig, sequence_length: int) -> dict[int, str]:
    """What a difference from the right FLOPs means, forward and backward together."""
    D, L = config.width, config.num_layers
    attention = 3 * 4 * L * sequence_length * D
    head = 6 * config.vocab_size * D
    kv_width = config.num_kv_heads * config.head_width
    linear = sum(m.weight.numel() for m in _meta_model(config).modules()
                 if isinstance(m, nn.Linear))
    everything = 6 * (_real_parameters(config) - linear)
    faults = {
        everything - attention: "that is 6 per parameter: lookups and norms are not matmuls, and "
                                "attention's two matmuls have no parameters",
        everything: "lookups, norms and biases are counted, but they are not matmuls",
        -attention: "attention's two matmuls are missing, 2 S D each per layer and token",
        -attention // 2: "half of attention is missing: it has two matmuls of 2 S D each, and the "
                         "causal mask is ignored",
        head: "the difference is V x D: an embedding lookup is not a matmul, the head is one",
        -head: "the difference is V x D: the head is a matmul, tied or not",
        -L * 6 * D * config.ffn_width:
            "the difference is one feed-forward matrix per block: llama has three, gate, up and "
            "down",
    }
    if kv_width < D:
        faults[-attention * (D - kv_width) // D] = \
            "grouped queries share keys and values; all H query heads still attend"
        faults[6 * 2 * L * D * (D - kv_width)] = \
            "grouped queries: key and value map D to G K, narrower than the query"
    return faults
