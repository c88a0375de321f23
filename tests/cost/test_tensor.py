"""Volumes, parameters and activations of tensor parallelism against ranks that do it."""

from collections import Counter
from fractions import Fraction

import pytest
import torch

from minitron import cost
from minitron.config import ConfigError, ModelConfig
from minitron.cost import Layout
from minitron.cost.tensor import kv_heads_per_rank
from minitron.launch import run
from minitron.measure.ledger import Ledger
from minitron.measure.meter import Meter
from minitron.model.recompute import RECOMPUTE_POLICIES
from minitron.model.transformer import Transformer, fused_attention, materialized_attention
from minitron.parallel.tensor.layers import apply_tensor_parallel
from minitron.parallel.tensor.sequence import apply_sequence_parallel
from tests.tiers import tiered

TENSOR = Layout(8)
SEQUENCE = Layout(8, sequence_parallel=True)
KEEPING = Layout(8, sequence_parallel=True, regather=False)


# Volumes


@pytest.mark.parametrize("t", [1, 2, 3, 8, 16])
@pytest.mark.parametrize(
    ("sequence", "regather", "elements"),
    [
        (False, True, 8),
        (True, False, 8),
        (True, True, 10),
    ],
)
def test_a_block_sends_8_or_10_times_its_activations(t, sequence, regather, elements):
    """8 b s h (t-1)/t: Narayanan et al. 2021, section 3.2."""
    b, s, h = 2, 48, 30
    expected = elements * b * s * h * Fraction(t - 1, t) * 2
    for rank in range(t):
        layout = Layout(t, sequence, regather)
        assert cost.tensor_parallel_volume(b, s, h, 2, rank, layout) == (expected, expected)


def test_collectives_of_a_block_counted_by_hand():
    assert cost.tensor_parallel_calls(TENSOR) == {
        "forward": {"all_reduce": 2},
        "backward": {"all_reduce": 2},
    }
    assert cost.tensor_parallel_calls(KEEPING) == {
        "forward": {"all_gather": 2, "reduce_scatter": 2},
        "backward": {"all_gather": 2, "reduce_scatter": 2},
    }
    assert cost.tensor_parallel_calls(SEQUENCE)["backward"] == {
        "all_gather": 4,
        "reduce_scatter": 2,
    }


def test_embedding_head_and_loss_by_hand():
    # 4 ranks send 2 * 3/4 of what an all-reduce sums: 2 tensors, and 3 float32 a token
    b, s, h = 1, 16, 10
    expected = 2 * 3 * (2 * b * s * h * 2 + 3 * b * s * 4) // 4
    for layout in (Layout(4), Layout(4, sequence_parallel=True, regather=False)):
        assert cost.vocabulary_parallel_volume(b, s, h, 2, 0, layout) == (expected, expected)
    in_float64 = cost.vocabulary_parallel_volume(b, s, h, 2, 0, Layout(4), loss_element_size=8)
    assert in_float64.sent == expected + 2 * 3 * 3 * b * s * 4 // 4


# Parameters

GPT = ModelConfig("gpt", 60, 24, 2, 48, 6, 6, 96, dropout=0.1)
LLAMA = ModelConfig("llama", 60, 24, 2, 48, 6, 2, 72, tied_embedding=False)
FOUR_HEADS = ModelConfig("llama", 60, 24, 2, 48, 4, 2, 72)


@pytest.mark.parametrize("model", cost.PUBLISHED.values(), ids=cost.PUBLISHED)
def test_one_rank_holds_every_parameter(model):
    assert cost.tensor_parallel_parameters(model, 1) == cost.num_parameters(model)


def test_what_8_ranks_hold_counted_by_hand():
    """Llama 3.1 70B: 8 key-value heads, one a rank; whole are two norms a block, and the last."""
    model = cost.PUBLISHED["Llama 3.1 70B"]
    whole = (2 * 80 + 1) * 8192
    held = cost.tensor_parallel_parameters(model, 8)
    assert 8 * (held - whole) + whole == cost.num_parameters(model)
    # On 16 ranks each key-value head is on two
    heads = 80 * 2 * 8192 * 128
    held = cost.tensor_parallel_parameters(model, 16)
    assert 16 * (held - whole - heads) + whole + 8 * heads == cost.num_parameters(model)


def test_key_value_heads_of_a_rank():
    assert [kv_heads_per_rank(LLAMA, size) for size in (1, 2, 4, 6)] == [2, 1, 1, 1]
    with pytest.raises(ConfigError, match="model.num_kv_heads = 2 is not divisible by 3 ranks"):
        kv_heads_per_rank(LLAMA, 3)


# Ranks that do it

B, S = 2, 24
ATTENTIONS = {"fused": fused_attention, "materialized": materialized_attention}
CASES = [  # the CPU has no fused attention with dropout
    (GPT, "materialized", "none"),
    (GPT, "materialized", "selective"),
    (GPT, "materialized", "full"),
    (LLAMA, "fused", "none"),
    (LLAMA, "materialized", "none"),  # which repeats its key-value heads
]


def layouts(size: int) -> list[Layout]:
    return [Layout(size), Layout(size, True), Layout(size, True, regather=False)]


def cases(size: int) -> list[tuple]:
    """Model, attention, recomputation, layout; 2 key-value heads cannot be on 3 ranks."""
    return [
        (*case, layout)
        for case in CASES
        for layout in layouts(size)
        if size % case[0].num_kv_heads == 0 or case[0].num_kv_heads % size == 0
    ]


def one_step(group, config: ModelConfig, attention: str, recompute: str, layout: Layout) -> dict:
    """What this rank holds, saves in the forward pass, sends, and calls in which phase."""
    model = Transformer(config)
    for block in model.blocks:
        block.attention.attention_fn = ATTENTIONS[attention]
    if layout.sequence_parallel:
        parallel = apply_sequence_parallel(model, group, regather=layout.regather)
    else:
        parallel = apply_tensor_parallel(model, group)
    RECOMPUTE_POLICIES[recompute](model)

    tokens = torch.zeros(B, S, dtype=torch.int64)
    with Ledger() as ledger:
        with Meter(model) as meter:
            loss = parallel.summed_loss(model(tokens), tokens)
            saved = meter.now()["activation"]
        loss.backward()
    return {
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "activations": saved,
        "calls": Counter((call.phase, call.op) for call in ledger.calls),
        "sent": ledger.bytes_sent(),
    }


def formulas(config: ModelConfig, attention: str, recompute: str, layout: Layout) -> dict:
    """The same, of float32 on a CPU, where a value of a mask has 4 bytes."""
    L, D, size = config.num_layers, config.width, layout.tensor_parallel
    saved = cost.activation_bytes(config, B, S, 4, attention, recompute, 4, layout)
    if config.family == "llama":  # the CPU's RMSNorm saves its normalized input too
        saved += (2 * L + 1) * D * 4 * B * S // (size if layout.sequence_parallel else 1)
    calls = Counter({("forward", "all_reduce"): 2})  # of the loss
    for phase, ops in cost.tensor_parallel_calls(layout).items():
        calls += Counter({(phase, op): L * count + count // 2 for op, count in ops.items()})
    block = cost.tensor_parallel_volume(B, S, D, 4, 0, layout).sent
    ends = cost.vocabulary_parallel_volume(B, S, D, 4, 0, layout).sent
    return {
        "parameters": cost.tensor_parallel_parameters(config, size),
        "activations": saved,
        "calls": calls,
        "sent": L * block + ends,
    }


@pytest.mark.parametrize("size", tiered([3, 2]))
def test_ranks_hold_and_send_what_the_formulas_say_to_the_byte(size):
    every_rank = run(lambda group: [one_step(group, *case) for case in cases(size)], size)
    for measured in every_rank:
        for case, seen in zip(cases(size), measured, strict=True):
            expected = formulas(*case)
            if case[2] == "full":  # a replay calls its collectives once more
                seen, expected = (
                    {key: values[key] for key in ("parameters", "activations")}
                    for values in (seen, expected)
                )
            assert seen == expected, case


def test_key_value_heads_on_two_ranks_each():
    case = (FOUR_HEADS, "fused", "none", Layout(4))
    assert run(one_step, 4, *case) == 4 * [formulas(*case)]
