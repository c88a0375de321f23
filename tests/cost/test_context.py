"""Volumes of context parallelism, in the units of the papers; ranks are compared elsewhere."""

from fractions import Fraction

import pytest

from minitron.config import ConfigError, ModelConfig
from minitron.cost.context import ContextKind, context_parallel_volume

B, S, D = 2, 96, 48
FULL = ModelConfig("llama", 64, S, 2, D, 24, 24, 64)
GROUPED = ModelConfig("llama", 64, S, 2, D, 24, 12, 64)


def units(model: ModelConfig, size: int, kind: ContextKind) -> Fraction:
    """Elements sent per block, forward and backward, in units of B S D."""
    sent, received = context_parallel_volume(model, B, S, size, kind, 1, 1)
    assert sent == received
    return Fraction(sent, B * S * D)


@pytest.mark.parametrize("N", [1, 2, 3, 4, 12])
@pytest.mark.parametrize("model", [FULL, GROUPED], ids=["full heads", "grouped"])
def test_a_ring_sends_keys_and_values_twice_and_their_gradients_once(N, model):
    grouped = Fraction(model.num_kv_heads, model.num_heads)
    for kind in ("ring", "all-gather"):
        assert units(model, N, kind) == 6 * grouped * Fraction(N - 1, N)


@pytest.mark.parametrize("N", [1, 2, 3, 4, 12])
def test_ulysses_sends_8_over_n_as_table_2_says(N):
    """Fang & Zhao 2024: 8/N in all, of which a rank keeps 1/N."""
    assert units(FULL, N, "ulysses") == Fraction(8, N) * Fraction(N - 1, N)
    assert units(GROUPED, N, "ulysses") == Fraction(6, N) * Fraction(N - 1, N)


def test_gradients_may_have_more_bytes():
    two, four = (context_parallel_volume(FULL, B, S, 2, "ring", 2, size).sent for size in (2, 4))
    assert Fraction(four, two) == Fraction(8, 6)


def test_llama_3_8b_at_131_072_tokens():
    """16 ranks: 15 messages of keys and values in 16 bits, twice, and of gradients in 32."""
    model = ModelConfig("llama", 128_256, 131_072, 32, 4096, 32, 8, 14_336, tied_embedding=False)
    ring = context_parallel_volume(model, 1, 131_072, 16, "ring")
    assert ring.sent == 15 * 2 * (131_072 // 16) * 1024 * 8


@pytest.mark.parametrize(
    "kind, message",
    [
        (
            "ring",
            "sequence length = 96 is not divisible by 5 ranks of context parallelism: raise it "
            "to 100",
        ),
        ("ulysses", "model.num_kv_heads = 12 is not divisible by 16 ranks of context parallelism"),
    ],
)
def test_what_ranks_do_not_divide_is_refused(kind, message):
    with pytest.raises(ConfigError, match=message):
        context_parallel_volume(GROUPED, B, S, 5 if kind == "ring" else 16, kind)
