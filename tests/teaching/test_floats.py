"""What a format holds is counted from its bits, and agrees with the formula and with torch."""

import math

import pytest
import torch

from teaching.floats import (
    FORMATS,
    exponents,
    flushed,
    layout_of,
    overflown,
    overflows,
    representable,
    rounded,
    say,
)

SHORT = {"bf16": torch.int16, "fp16": torch.int16, "e4m3": torch.uint8, "e5m2": torch.uint8}


def every_number(name):
    """All finite numbers of a short format, from all its bit patterns."""
    info = torch.iinfo(SHORT[name])
    patterns = torch.arange(info.min, info.max + 1).to(SHORT[name])
    values = patterns.view(FORMATS[name]).double()
    return values[values.isfinite()].unique() + 0.0


@pytest.mark.parametrize(
    ("name", "exponent", "mantissa", "lowest", "normal", "largest"),
    [
        ("fp32", 8, 23, 2.0**-149, 2.0**-126, (2 - 2.0**-23) * 2.0**127),
        ("bf16", 8, 7, 2.0**-133, 2.0**-126, (2 - 2.0**-7) * 2.0**127),
        ("fp16", 5, 10, 2.0**-24, 2.0**-14, 65504),
        ("e4m3", 4, 3, 2.0**-9, 2.0**-6, 448),
        ("e5m2", 5, 2, 2.0**-16, 2.0**-14, 57344),
    ],
)
def test_the_layouts_are_those_of_the_papers(name, exponent, mantissa, lowest, normal, largest):
    layout = layout_of(FORMATS[name])
    assert (layout.exponent, layout.mantissa) == (exponent, mantissa)
    assert layout.smallest_subnormal == lowest
    assert (layout.smallest_normal, layout.largest) == (normal, largest)


@pytest.mark.parametrize("name", SHORT)
def test_bit_patterns_and_formula_agree_on_every_number(name):
    layout, positive = layout_of(FORMATS[name]), every_number(name)
    positive = positive[positive > 0]
    assert positive[0] == layout.smallest_subnormal and positive[-1] == layout.largest
    assert len(positive) == positive.unique().numel()

    for value, following in zip(positive.tolist(), positive[1:].tolist(), strict=False):
        assert following - value == layout.spacing(value) == layout.spacing(-value)


@pytest.mark.parametrize("name", SHORT)
@pytest.mark.parametrize(
    ("low", "high"),
    [
        (-math.inf, math.inf),
        (0, 1),
        (-1, 0),
        (-3.3, 0.7),
        (0.3, 2.9),
        (-2.9, -0.3),
        (250, 1000),
        (1.001, 1.002),
        (1e6, 2e6),
    ],
)
def test_no_number_of_a_piece_is_left_out(name, low, high):
    every = every_number(name)
    expected = every[(low <= every) & (every <= high)]
    torch.testing.assert_close(representable(FORMATS[name], low, high), expected, rtol=0, atol=0)


def test_a_piece_of_fp32_is_found_without_looking_at_the_rest():
    found = representable(torch.float32, 2.0**24 - 2, 2.0**24 + 4).tolist()
    assert found == [2**24 - 2, 2**24 - 1, 2**24, 2**24 + 2, 2**24 + 4]
    with pytest.raises(ValueError, match="1,065,353,217 numbers between 0 and 1, more than"):
        representable(torch.float32, 0, 1)


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("spacing", [2.0**-30, 0.01, 0.25, 0.3, 5.0])
def test_from_the_finest_magnitude_on_numbers_keep_their_distance(name, spacing):
    layout = layout_of(FORMATS[name])
    edge = layout.finest(spacing)
    assert layout.spacing(edge) >= spacing
    assert edge == 0 or layout.spacing(edge * (1 - 1e-12)) < spacing


def test_zero_is_a_number_of_a_fine_line_if_even_subnormals_are_apart():
    assert layout_of(FORMATS["e4m3"]).finest(2.0**-9) == 0
    assert layout_of(FORMATS["e4m3"]).finest(2.0**-8) > 0


@pytest.mark.parametrize("name", FORMATS)
def test_a_value_becomes_its_nearest_number(name):
    layout = layout_of(FORMATS[name])
    above = 1 + layout.spacing(1)
    assert rounded(FORMATS[name], 1 + 0.4 * layout.spacing(1)) == 1
    assert rounded(FORMATS[name], 1 + 0.6 * layout.spacing(1)) == above
    assert rounded(FORMATS[name], 10 * layout.largest) == layout.largest
    assert rounded(FORMATS[name], -10 * layout.largest) == -layout.largest


@pytest.mark.parametrize("name", ["bf16", "fp16", "e5m2"])
def test_what_rounds_beyond_the_largest_number_is_infinite_in_torch(name):
    dtype, layout = FORMATS[name], layout_of(FORMATS[name])
    for steps in (0, 0.25, 0.49, 0.5, 0.51, 1, 2):
        value = layout.largest + steps * layout.spacing(layout.largest)
        becomes = torch.tensor([value, -value]).to(dtype).float().isinf().tolist()
        assert [overflows(dtype, value), overflows(dtype, -value)] == becomes, steps


def test_e4m3_spends_one_pattern_on_nan_and_so_ends_at_an_even_number():
    dtype = FORMATS["e4m3"]
    assert [overflows(dtype, value) for value in (448, 464, 465, 480)] == [False, False, True, True]
    assert rounded(dtype, 464) == 448


def test_values_are_counted_by_their_power_of_two_and_zeros_apart():
    tensor = torch.tensor([[0.0, 1.0, 1.99], [2.0, -0.25, -0.0], [-3.0, 2.0**-149, 3e38]])
    assert exponents(tensor) == ({-149: 1, -2: 1, 0: 2, 1: 2, 127: 1}, 2)
    assert exponents(torch.zeros(3)) == ({}, 3)
    with pytest.raises(ValueError, match="2 of 4 values are not finite"):
        exponents(torch.tensor([1.0, math.inf, math.nan, 0.0]))


def test_a_power_of_two_shifts_every_count():
    torch.manual_seed(0)
    tensor = torch.randn(1000) * torch.logspace(-12, 2, 1000)
    counts, zeros = exponents(tensor)
    assert sum(counts.values()) + zeros == 1000
    assert exponents(tensor * 2.0**16) == ({e + 16: n for e, n in counts.items()}, zeros)


def test_zeros_and_infinities_are_shares_of_what_was_not_zero():
    tensor = torch.tensor([0.0, 0.0, 2.0**-26, 1.5 * 2.0**-25, 1.0, 1e5])
    assert flushed(tensor, torch.float16) == overflown(tensor, torch.float16) == 0.25
    assert flushed(tensor, torch.bfloat16) == overflown(tensor, torch.bfloat16) == 0
    assert flushed(torch.zeros(2), torch.float16) == overflown(torch.zeros(2), torch.float16) == 0


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (2.0**24, "16,777,216"),
        (0.001, "0.001"),
        (1 + 2.0**-23, "1.00000012"),
        (-0.5, "-0.5"),
        (1e-7, "1e-07"),
        (0.0, "0"),
        (3e38, "3e+38"),
    ],
)
def test_numbers_are_said_exactly_enough(value, said):
    assert say(value) == said
