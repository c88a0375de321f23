"""Block-scaled formats against values computed by hand and against tables of what they can hold."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from minitron.model.block_scaled import (
    BlockScaledMatmuls,
    apply_block_scaling,
    quantize_mxfp8,
    quantize_nvfp4,
    round_to_e2m1,
)

FORMATS = [
    pytest.param(quantize_mxfp8, 32, id="mxfp8"),
    pytest.param(quantize_nvfp4, 16, id="nvfp4"),
]
E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
E4M3 = sorted(
    {(1 + m / 8) * 2.0**e for e in range(-6, 9) for m in range(8)} - {480.0}
    | {m * 2.0**-9 for m in range(8)}
)
"""Its nonnegative numbers: 8 in each of 15 powers of two, but for the last code, which is NaN, and
zero with 7 subnormal ones."""


def block(*first: float, size: int) -> torch.Tensor:
    """A block that begins with `first` and ends with zeros."""
    return F.pad(torch.tensor(first), (0, size - len(first)))


def test_the_table_of_e4m3_has_its_127_numbers():
    assert len(E4M3) == 127 and E4M3[-1] == 448


# MXFP8, algorithm 1 of Rouhani et al. 2023: scale 2^(floor(log2 max) - 8)


@pytest.mark.parametrize(
    ("largest", "power"),
    [
        (1.0, -8),
        (1.99, -8),
        (2.0, -7),
        (448.0, 0),
        (511.0, 0),
        (512.0, 1),
        (3e38, 119),
        (1e-38, -127),  # it would be 2^-135
    ],
)
def test_the_scale_of_an_mxfp8_block_is_a_power_of_two(largest, power):
    scaled = quantize_mxfp8(block(largest, size=32))
    assert scaled.block_scales.dtype == torch.float8_e8m0fnu
    assert scaled.block_scales.tolist() == [2.0**power]
    assert scaled.block_scales.view(torch.uint8).item() == power + 127
    assert scaled.tensor_scale == 1


@pytest.mark.parametrize(
    ("largest", "power"),
    [
        (256.0, 0),
        (448.0, 0),
        (448.5, 1),
        (511.0, 1),
        (512.0, 1),
        (1.75, -8),
        (1.76, -7),
    ],
)
def test_a_scale_that_is_rounded_up_cuts_nothing_off(largest, power):
    scaled = quantize_mxfp8(block(largest, size=32), round_scale_up=True)
    assert scaled.block_scales.tolist() == [2.0**power]
    assert scaled.dequantize()[0] == pytest.approx(largest, rel=2**-4)
    if power > quantize_mxfp8(block(largest, size=32)).block_scales.float().log2().item():
        assert quantize_mxfp8(block(largest, size=32)).values[0] == 448


def test_an_mxfp8_block_by_hand():
    # The largest is 10, between 8 and 16: scale 2^(3 - 8) = 1/32. Times 32 they are 320, -32, 3.2
    # and 0.032; e4m3 has 320, -32, steps of 1/4 around 3.2, and steps of 2^-9 around 0.032 (16.4).
    scaled = quantize_mxfp8(block(10.0, -1.0, 0.1, 0.001, size=32))
    assert scaled.values.dtype == torch.float8_e4m3fn
    assert scaled.values[:4].tolist() == [320.0, -32.0, 3.25, 16 * 2.0**-9]
    assert scaled.dequantize()[:4].tolist() == [10.0, -1.0, 3.25 / 32, 2.0**-10]


def test_mxfp8_saturates_between_448_and_512():
    scaled = quantize_mxfp8(block(15.9, -14.5, 14.0, size=32))  # times 32: 508.8, -464, 448
    assert scaled.values[:3].tolist() == [448.0, -448.0, 448.0]
    assert scaled.dequantize()[:3].tolist() == [14.0, -14.0, 14.0]


@pytest.mark.parametrize("power", [-118, -20, 0, 100])
def test_every_number_of_e4m3_survives_mxfp8(power):
    numbers = torch.tensor(E4M3[1:], dtype=torch.float64) * 2.0**power
    rows = torch.full((len(numbers), 32), 256 * 2.0**power)  # which fixes the scale at 2^power
    rows[:, 5] = numbers
    rows[:, 6] = -numbers
    assert torch.equal(quantize_mxfp8(rows).dequantize(), rows)


# NVFP4: blocks to 6, their scales to 448


@pytest.mark.parametrize(
    ("number", "rounded"),
    [
        (0.24, 0.0),
        (0.25, 0.0),
        (0.26, 0.5),
        (0.75, 1.0),
        (1.25, 1.0),
        (1.75, 2.0),
        (2.49, 2.0),
        (2.5, 2.0),
        (2.51, 3.0),
        (3.5, 4.0),
        (4.9, 4.0),
        (5.0, 4.0),
        (5.1, 6.0),
        (6.0, 6.0),
        (7.0, 6.0),
        (1e30, 6.0),
        (math.inf, 6.0),
    ],
)
def test_e2m1_rounds_to_the_nearest_and_ties_to_even(number, rounded):
    assert round_to_e2m1(torch.tensor([number, -number])).tolist() == [rounded, -rounded]


def test_e2m1_is_what_a_table_of_its_numbers_says():
    x = torch.linspace(-7, 7, 10_007)  # no ties among them but 0
    table = torch.tensor(sorted({sign * number for number in E2M1 for sign in (1, -1)}))
    nearest = table[(x[:, None] - table).abs().argmin(1)]
    assert torch.equal(round_to_e2m1(x), nearest)


def test_two_nvfp4_blocks_by_hand():
    # The tensor's largest is 2688 = 6 x 448: tensor scale 1. The first block's scale is 448. The
    # second's largest is 20: 20 / 6 = 3.33, in e4m3 (steps of 1/4) 3.25. Over 3.25 its values are
    # 6.15, 3.08, -0.92 and 0.15: 6, 3, -1 and 0.
    x = torch.cat([block(2688.0, -1000.0, size=16), block(20.0, 10.0, -3.0, 0.5, size=16)])
    scaled = quantize_nvfp4(x)
    assert scaled.tensor_scale == 1
    assert scaled.block_scales.dtype == torch.float8_e4m3fn
    assert scaled.block_scales.tolist() == [448.0, 3.25]
    assert scaled.values[:2].tolist() == [6.0, -2.0]
    assert scaled.values[16:20].tolist() == [6.0, 3.0, -1.0, 0.0]
    assert scaled.dequantize()[16:20].tolist() == [19.5, 9.75, -3.25, 0.0]


def test_the_tensor_scale_puts_the_largest_block_scale_at_448():
    x = torch.randn(8, 64, generator=torch.Generator().manual_seed(0)) * 1e-6
    scaled = quantize_nvfp4(x)
    assert scaled.tensor_scale.item() == pytest.approx(x.abs().max().item() / (6 * 448))
    assert scaled.block_scales.float().max() == 448


@pytest.mark.parametrize("block_scale", E4M3[1:])
def test_every_number_of_e2m1_survives_nvfp4(block_scale):
    numbers = torch.tensor([*E2M1, *(-number for number in E2M1)]) * block_scale
    x = torch.cat([block(2688.0, size=16), numbers])  # which fixes the tensor scale at 1
    assert torch.equal(quantize_nvfp4(x).dequantize(), x)


def test_a_block_too_small_for_its_scale_becomes_zeros():
    x = torch.cat([block(2688.0, size=16), block(6 * 2.0**-10, size=16)])  # half of e4m3's smallest
    scaled = quantize_nvfp4(x)
    assert scaled.block_scales.tolist() == [448.0, 0.0]
    assert scaled.dequantize().tolist() == [2688.0, *[0.0] * 31]


# Both


@pytest.mark.parametrize(("quantize", "size"), FORMATS)
def test_zeros_stay_zeros(quantize, size):
    x = torch.zeros(3, 2 * size)
    assert torch.equal(quantize(x).dequantize(), x)
    x[1, 0] = 1.0
    assert torch.equal(quantize(x).dequantize(), x)


@pytest.mark.parametrize(("quantize", "size"), FORMATS)
def test_rounding_again_changes_nothing(quantize, size):
    x = torch.randn(16, 4 * size, generator=torch.Generator().manual_seed(1)).exp()
    first = quantize(x)
    again = quantize(first.dequantize())
    assert torch.equal(again.values.float(), first.values.float())
    assert torch.equal(again.block_scales.float(), first.block_scales.float())
    torch.testing.assert_close(again.tensor_scale, first.tensor_scale)


@pytest.mark.parametrize(
    ("quantize", "size", "outlier"),
    [
        pytest.param(quantize_mxfp8, 32, 1e6, id="mxfp8"),
        pytest.param(quantize_nvfp4, 16, 1e3, id="nvfp4"),  # 1e6 would spoil all: scales round to 0
    ],
)
def test_an_outlier_spoils_only_its_own_block(quantize, size, outlier):
    x = torch.randn(4 * size, generator=torch.Generator().manual_seed(2))
    x[0] = outlier
    error = (quantize(x).dequantize() - x).view(4, size)[:, 1:].norm(dim=1)
    norm = x.view(4, size)[:, 1:].norm(dim=1)
    assert (error[0] / norm[0]) > 4 * (error[1:] / norm[1:]).max()


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize(("quantize", "size"), FORMATS)
def test_an_overflow_is_not_hidden(quantize, size, bad):
    x = torch.ones(2 * size)
    x[1] = bad
    held = quantize(x).dequantize()
    assert held[:size].isnan().all()
    if quantize is quantize_mxfp8:
        assert torch.equal(held[size:], x[size:])


@pytest.mark.parametrize("length", [0, 1, 8, 40])
@pytest.mark.parametrize(("quantize", "size"), FORMATS)
def test_a_ragged_last_block_is_refused_in_one_line(quantize, size, length):
    with pytest.raises(ValueError, match="multiple of the block size") as refused:
        quantize(torch.ones(3, length))
    message = str(refused.value)
    assert str(length) in message and str(size) in message and "\n" not in message


@pytest.mark.parametrize(("quantize", "size"), FORMATS)
def test_blocks_run_along_the_last_dimension_in_any_layout(quantize, size):
    x = torch.randn(2 * size, 2 * size, generator=torch.Generator().manual_seed(3)).T
    rows = torch.stack([quantize(row).dequantize() for row in x.contiguous()])
    if quantize is quantize_mxfp8:  # NVFP4's tensor scale is that of all rows
        assert torch.equal(quantize(x).dequantize(), rows)
    assert torch.equal(quantize(x).dequantize(), quantize(x.contiguous()).dequantize())


# Layers


@pytest.mark.parametrize(("quantize", "size"), FORMATS)
def test_the_three_matmuls_of_a_layer_round_along_what_they_sum_over(quantize, size):
    generator = torch.Generator().manual_seed(4)
    x, weight, grad = (
        torch.randn(shape, generator=generator)
        for shape in ((size, 2 * size), (3 * size, 2 * size), (size, 3 * size))
    )
    matmuls = BlockScaledMatmuls(quantize)

    def held(tensor, dim):
        return quantize(tensor.transpose(dim, -1)).dequantize().transpose(dim, -1)

    torch.testing.assert_close(matmuls.linear(x, weight, None), held(x, 1) @ held(weight, 1).T)
    torch.testing.assert_close(matmuls.grad_input(grad, weight), held(grad, 1) @ held(weight, 0))
    torch.testing.assert_close(matmuls.grad_weight(grad, x), held(grad, 0).T @ held(x, 0))
    total = torch.ones_like(x)
    matmuls.add_grad_input(total, grad, weight)
    torch.testing.assert_close(total, 1 + held(grad, 1) @ held(weight, 0))


@pytest.mark.parametrize(("quantize", "size"), FORMATS)
def test_a_layer_trains_through_rounded_operands(quantize, size):
    layer = nn.Linear(2 * size, size)
    exact = nn.Linear(2 * size, size)
    exact.load_state_dict(layer.state_dict())
    apply_block_scaling(layer, quantize)
    x = torch.randn(1, size, 2 * size, generator=torch.Generator().manual_seed(5))
    for each in (layer, exact):
        each(x).square().sum().backward()
    assert torch.equal(layer(x), BlockScaledMatmuls(quantize).linear(x, layer.weight, layer.bias))
    error = (layer.weight.grad - exact.weight.grad).norm() / exact.weight.grad.norm()
    assert 0.001 < error < 0.3


def test_eight_bits_are_several_times_as_exact_as_four():
    x = torch.randn(64, 256, generator=torch.Generator().manual_seed(6))
    errors = [
        ((quantize(x).dequantize() - x).norm() / x.norm()).item()
        for quantize in (quantize_mxfp8, quantize_nvfp4)
    ]
    assert errors[0] == pytest.approx(0.03, rel=0.3) and errors[1] == pytest.approx(0.095, rel=0.3)
