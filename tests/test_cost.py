"""FLOPs against PyTorch's own counter; parameter counts are tested with the model."""

import dataclasses

import pytest
import torch
import torch.nn.functional as F
from torch.utils.flop_counter import FlopCounterMode

from minitron import cost
from minitron.config import ModelConfig
from minitron.model.transformer import Transformer, materialised_attention

LLAMA = ModelConfig("llama", vocab_size=61, num_layers=3, width=48, num_heads=6, num_kv_heads=2,
                    ffn_width=80)
CONFIGS = {
    "llama, grouped queries": LLAMA,
    "llama, own head": dataclasses.replace(LLAMA, tied_embedding=False, num_kv_heads=6),
    "gpt": ModelConfig("gpt", vocab_size=61, num_layers=2, width=48, num_heads=4, num_kv_heads=4,
                       ffn_width=192),
}


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_flops_are_what_the_counter_sees(config):
    B, S = 2, 31
    model = Transformer(config)
    for block in model.blocks:
        block.attention.attention_fn = materialised_attention
    tokens = torch.zeros(B, S, dtype=torch.int64)

    with FlopCounterMode(display=False) as counter:
        logits = model(tokens)
    assert counter.get_total_flops() == B * S * cost.forward_flops_per_token(config, S)

    with FlopCounterMode(display=False) as counter:
        F.cross_entropy(logits.flatten(0, 1), tokens.flatten()).backward()
    backward = counter.get_total_flops()
    both = B * S * cost.training_flops_per_token(config, S)
    assert backward == both - B * S * cost.forward_flops_per_token(config, S)


def test_a_large_model_costs_about_six_flops_per_parameter_and_token():
    """Kaplan et al. 2020, section 2.1: C = 6 N, when the width is large against the sequence."""
    gpt3 = ModelConfig("gpt", 50257, 2048, 96, 12288, 96, 96, 4 * 12288)
    per_token = cost.training_flops_per_token(gpt3, 2048)
    assert per_token / (6 * cost.num_parameters(gpt3)) == pytest.approx(1, abs=0.04)
    assert per_token > 6 * cost.num_parameters(gpt3)


def test_attention_agrees_with_narayanan_2021():
    """Equation 3 of the paper, 96 B s l h^2 (1 + s/6h + V/16lh), includes one recomputed forward;
    without it, three quarters of the layers' terms remain, and the head is not recomputed."""
    s, L, h, V = 2048, 96, 12288, 51200
    config = ModelConfig("gpt", V, s, L, h, 96, 96, 4 * h)
    expected = 72 * L * h * h * (1 + s / (6 * h)) + 6 * V * h
    assert cost.training_flops_per_token(config, s) == pytest.approx(expected, rel=1e-12)
