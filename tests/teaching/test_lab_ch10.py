"""Chapter 10's measurements: what is trained, counted and summed is what the cells say."""

import math

import pytest
import torch

from minitron.comm.agreement import SINGLE_RANK
from minitron.comm.collectives import all_reduce_doubling, all_reduce_ring
from minitron.launch import run
from minitron.precision import PRECISIONS
from teaching.lab import ch10 as lab
from tests.tiers import exhaustive

BF16 = torch.bfloat16


@pytest.fixture(scope="module")
def batches(tmp_path_factory):
    return lab.story_batches(tmp_path_factory.mktemp("stories"))


def test_batches_are_the_same_each_time(batches, tmp_path):
    assert len(batches) == lab.NUM_STEPS + 1
    assert batches[0].shape == (lab.B, lab.S + 1)
    assert torch.equal(batches[7], lab.story_batches(tmp_path)[7])


def test_gradients_add_up_and_a_factor_scales_them(batches):
    model = lab.story_model()
    loss = lab.add_gradients(model, batches[0])
    once = [weight.grad.clone() for weight in model.parameters()]
    assert lab.add_gradients(model, batches[0], 3 / (lab.B * lab.S)) == pytest.approx(loss)
    for weight, grad in zip(model.parameters(), once, strict=True):
        torch.testing.assert_close(weight.grad, 4 * grad)


def test_a_model_learns(batches):
    losses = lab.train(lab.story_model(), batches[:30])
    assert len(losses) == 30 and losses[-1] < losses[0] - 0.5


def test_updates_below_half_a_step_are_lost():
    ones = torch.ones(10)
    assert lab.lost_updates(ones, BF16, 2**-9) == 1
    assert lab.lost_updates(ones, BF16, 2**-7) == 0
    assert lab.lost_updates(ones, torch.float16, 2**-9) == 0


def test_accumulating_in_float32_is_closer(batches):
    exact, coarse = (
        lab.accumulated(dtype, torch.cat(batches[:2])) for dtype in (torch.float32, BF16)
    )
    assert list(exact) == [1, 2, 4, 8]
    error = (coarse[8] - exact[8]).norm() / exact[8].norm()
    assert 1e-4 < error < 1e-2


def test_gradients_of_outputs_and_weights(batches):
    model = lab.story_model()
    found = lab.gradients(model, batches[0], 1.0)
    assert found["weights"].numel() == sum(weight.numel() for weight in model.parameters())
    assert found["outputs"].numel() > lab.B * lab.S * lab.SHAPE.vocab_size
    twice = lab.gradients(model, batches[0], 2.0)
    torch.testing.assert_close(twice["outputs"], 2 * found["outputs"])


def test_matrices_are_those_of_every_linear_layer(batches):
    found = lab.matrices(lab.story_model(shape=lab.IN_BLOCKS), batches[0])
    plain = lab.story_model(shape=lab.IN_BLOCKS)
    lab.add_gradients(plain, batches[0])
    layers = [layer for layer in plain.modules() if isinstance(layer, torch.nn.Linear)]
    assert {len(matrices) for matrices in found.values()} == {len(layers)} == {15}
    for kind in ("inputs", "gradients of outputs"):
        assert {len(matrix) for matrix in found[kind]} == {lab.B * lab.S}

    def norms(matrices):
        return sorted(matrix.norm().item() for matrix in matrices)

    assert norms(found["weights"]) == norms(layer.weight for layer in layers)
    grads = found["gradients of weights"][1:]  # the head's is the first, and its weight is tied
    own = [layer.weight.grad for layer in layers if layer is not plain.head]
    assert norms(grads) == pytest.approx(norms(own), rel=1e-5)
    for grad, transposed in zip(
        found["gradients of outputs"], found["the same, transposed"], strict=True
    ):
        assert torch.equal(grad.T, transposed)


def test_rounding_has_an_error_and_a_change_in_length():
    x = torch.tensor([[3.0, 4.0], [0.0, 0.0]])
    found = lab.rounding([x, 2 * x], lambda x: 0.9 * x)
    assert found == pytest.approx({"error": 0.1, "length": -0.1})
    across = torch.tensor([[-4.0, 3.0], [0.0, 0.0]])  # as long as x, at a right angle to it
    found = lab.rounding([x], lambda x: x + across)
    assert found == pytest.approx({"error": 1.0, "length": 0.0}, abs=1e-6)


def test_what_reaches_the_optimizer_is_measured_after_all_actions(batches):
    def halve(weights, scale):
        for weight in weights:
            weight.grad /= scale * 2

    losses, norm = lab.train_clipped((halve,), lab.adamw, 1e-3, batches[:2])
    model = lab.story_model()
    lab.add_gradients(model, batches[0])
    first = torch.cat([weight.grad.flatten() for weight in model.parameters()]).norm() / 2
    assert len(losses) == 2 and norm >= 0.999 * first


@pytest.mark.parametrize(
    ("all_reduce", "alone"), [(all_reduce_ring, lab.in_ring), (all_reduce_doubling, lab.in_tree)]
)
def test_one_process_adds_in_the_order_of_real_ranks(all_reduce, alone):
    parts = torch.stack([lab.gradient_of(rank) for rank in range(4)])
    for summed in run(lab.summed_by, 4, all_reduce):
        assert torch.equal(summed, alone(parts))
    assert lab.relative_error(parts.double().sum(0), parts) == 0


def test_one_rounding_has_the_error_that_is_stated():
    x = torch.randn(200_000, generator=torch.Generator().manual_seed(1))
    error = ((x.to(BF16).float() - x) / x).square().mean().sqrt().item()
    assert error == pytest.approx(lab.ROUNDING, rel=0.03)


@exhaustive
def test_recipes_are_the_table_s(batches):
    exact = lab.first_gradients(SINGLE_RANK, lab.config_of("fp32"), batches[0])
    rounded = lab.first_gradients(SINGLE_RANK, lab.config_of("fp16"), batches[0])
    for name, grad in exact.items():
        assert rounded[name].dtype == torch.float32
        assert 0 < (rounded[name] - grad).norm() / grad.norm() < 0.01
    held = lab.held_by("bf16", batches[0][:1])
    assert held["gradient"] == held["parameter"]
    assert held["optimizer state"] == pytest.approx(
        held["parameter"] / 2 * (PRECISIONS["bf16"].cost.total - 4), rel=1e-3
    )
    losses = lab.train_recipe("bf16", batches[:30])
    assert math.isfinite(losses[-1]) and losses[-1] < losses[0] - 0.5
