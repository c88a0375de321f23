"""Activations on tensor-parallel ranks, against every row of the paper.

Those of one device are tested against the meter in tests/test_cost.py, those of a rank in
tests/cost/test_tensor.py.
"""

import csv
import dataclasses
from pathlib import Path

import pytest

from minitron import cost
from minitron.config import ConfigError, ModelConfig
from minitron.cost import Layout, activation_bytes, activation_bytes_per_layer

with open(Path(__file__).parent / "korthikanti2022_formulas.csv") as file:
    FORMULAS = {
        row["what"]: row["formula"]
        for row in csv.DictReader(line for line in file if not line.startswith("#"))
    }


@dataclasses.dataclass(frozen=True)
class Shape:
    """The paper's letters."""

    a: int
    h: int
    L: int
    s: int
    b: int
    t: int
    v: int = 51200
    B: int = 3

    @property
    def model(self) -> ModelConfig:
        return ModelConfig(
            "gpt", self.v, self.s, self.L, self.h, self.a, self.a, 4 * self.h, dropout=0.1
        )

    def printed(self, what: str) -> float:
        return eval(FORMULAS[what], dataclasses.asdict(self))


SHAPES = {  # 22B and 175B: table 3 of the paper
    "22B": Shape(a=64, h=6144, L=48, s=2048, b=4, t=8),
    "175B": Shape(a=96, h=12288, L=96, s=2048, b=1, t=8),
    "small": Shape(a=6, h=48, L=2, s=12, b=3, t=3, v=30),
}
TENSOR, SEQUENCE = (lambda t: Layout(t)), (lambda t: Layout(t, sequence_parallel=True))
ROWS = {
    "no parallelism": (lambda t: Layout(), "none"),
    "tensor": (TENSOR, "none"),
    "tensor + sequence": (SEQUENCE, "none"),
    "tensor + selective": (TENSOR, "selective"),
    "tensor + sequence + selective": (SEQUENCE, "selective"),
    "full": (TENSOR, "full"),
}


def layer_bytes(shape: Shape, layout: Layout, recompute: str = "none") -> int:
    return activation_bytes_per_layer(
        shape.model, shape.b, shape.s, attention="materialized", recompute=recompute, layout=layout
    )


def left_out(shape: Shape, layout: Layout, recompute: str = "none") -> int:
    """Two norms' statistics, 8 bytes a token each, and the causal mask, s s bytes."""
    tokens = shape.s * shape.b // (layout.tensor_parallel if layout.sequence_parallel else 1)
    statistics = 0 if recompute == "full" else 2 * 8 * tokens
    return statistics + (shape.s**2 if recompute == "none" else 0)


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("what", ROWS)
def test_every_row_of_table_2(what, shape):
    make_layout, recompute = ROWS[what]
    layout = make_layout(shape.t)
    ours = layer_bytes(shape, layout, recompute)
    printed = shape.printed(what)
    assert ours - left_out(shape, layout, recompute) == pytest.approx(printed, rel=1e-13)
    if shape.h > 1000:
        assert ours == pytest.approx(printed, rel=0.02)  # what is left out is small indeed


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_all_layers_and_what_is_outside_of_them(shape):
    layout, L = SEQUENCE(shape.t), shape.L
    layers = L * layer_bytes(shape, layout)
    assert layers - L * left_out(shape, layout) == pytest.approx(
        shape.printed("all layers"), rel=1e-13
    )

    whole = activation_bytes(shape.model, shape.b, shape.s, attention="materialized", layout=layout)
    tokens = shape.s * shape.b
    # the final norm's statistics, the rows of tokens and targets, the positions
    small = 8 * tokens // shape.t + 19 * tokens + 8 * shape.s
    assert whole - layers - small == pytest.approx(
        shape.printed("embedding dropout") + shape.printed("final norm, head and loss"), rel=1e-13
    )


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_flops_of_the_model_and_of_selective_recomputation(shape):
    tokens = shape.B * shape.s
    model_flops = tokens * cost.training_flops_per_token(shape.model, shape.s)
    assert model_flops == pytest.approx(shape.printed("model FLOPs"), rel=1e-13)
    again = tokens * cost.recompute_flops_per_token(shape.model, shape.s, "selective")
    # The paper's equation 8 adds attention's share of a whole step, forward and backward, where
    # its section 5 replays the forward pass alone.
    assert 3 * again == pytest.approx(
        shape.printed("hardware FLOPs") - shape.printed("model FLOPs"), rel=1e-9
    )


def test_every_printed_formula_is_compared():
    others = {
        "all layers",
        "embedding dropout",
        "final norm, head and loss",
        "model FLOPs",
        "hardware FLOPs",
    }
    assert set(FORMULAS) == set(ROWS) | others


# What the table does not have


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_layers_that_keep_their_whole_input_hold_4_of_34_undivided(shape):
    t, tokens = shape.t, shape.s * shape.b
    keeping = layer_bytes(shape, Layout(t, sequence_parallel=True, regather=False), "selective")
    assert keeping - 2 * 8 * tokens // t == tokens * shape.h * (30 + 4 * t) // t
    # without sequence parallelism there is nothing to gather
    assert layer_bytes(shape, Layout(t, regather=False)) == layer_bytes(shape, Layout(t))


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_full_recomputation_holds_a_blocks_input_or_this_ranks_part_of_it(shape):
    whole = 2 * shape.s * shape.b * shape.h
    assert layer_bytes(shape, TENSOR(shape.t), "full") == whole
    assert layer_bytes(shape, SEQUENCE(shape.t), "full") == whole // shape.t


def test_key_value_heads_counted_by_hand():
    """8 query heads of width 4 and 2 key-value heads on 4 ranks: 2 and 1 on each rank."""
    llama = ModelConfig("llama", 61, 64, 1, 32, 8, 2, 80)
    B, S, t = 3, 16, 4
    between = 4 * 32 * 2 + 2 * 4  # inputs of norms and layers, 1/deviation
    inside = (2 * 8 + 2 * 4 + 4 * 20) * 2  # query, input of out; key, value; feed-forward
    fused = 4 * 2  # log-sum of 2 heads
    assert activation_bytes_per_layer(llama, B, S, layout=Layout(t)) == B * S * (
        between + inside + fused
    )
    # the materialized attention repeats them for its 2 query heads
    scores = B * 2 * S * S * 2 + S * S
    assert (
        activation_bytes_per_layer(llama, B, S, attention="materialized", layout=Layout(t))
        == B * S * (between + inside + 2 * 4 * 2) + scores
    )
    # and selective recomputation keeps them as they were
    assert activation_bytes_per_layer(
        llama, B, S, recompute="selective", layout=Layout(t)
    ) == B * S * (between + inside)


@pytest.mark.parametrize(
    ("change", "layout", "message"),
    [
        ({}, Layout(5), "model.num_heads = 8 is not divisible by 5 ranks"),
        ({"ffn_width": 82}, Layout(4), "model.ffn_width = 82 .* by 4 ranks .* raise it to 84"),
        ({}, Layout(4), "model.vocab_size = 61 .* by 4 ranks .* raise it to 64"),
        ({"vocab_size": 64}, Layout(4, sequence_parallel=True), "sequence length = 18 .* to 20"),
        ({"num_kv_heads": 8}, Layout(16), "model.num_heads = 8 is not divisible by 16 ranks"),
        ({"num_heads": 12, "num_kv_heads": 4, "width": 96}, Layout(6), "num_kv_heads = 4 .* by 6"),
    ],
)
def test_sizes_that_do_not_divide_are_refused(change, layout, message):
    llama = dataclasses.replace(ModelConfig("llama", 61, 64, 1, 32, 8, 2, 80), **change)
    with pytest.raises(ConfigError, match=message):
        activation_bytes(llama, 3, 18, layout=layout)
