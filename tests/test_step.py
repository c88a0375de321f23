import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from minitron.config import ModelConfig, TrainConfig
from minitron.model.transformer import Transformer, initialize
from minitron.precision import low_precision
from minitron.step import (
    IGNORED,
    accumulate_gradients,
    learning_rate,
    make_optimizer,
    train_step,
)

CONFIG = ModelConfig(
    vocab_size=31,
    max_sequence_length=16,
    num_layers=2,
    width=16,
    num_heads=2,
    num_kv_heads=1,
    ffn_width=24,
)


def make_model() -> Transformer:
    model = Transformer(CONFIG).double()
    initialize(model, seed=0)
    return model


def make_batch(rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    tokens = torch.randint(0, 31, (rows, 13), generator=torch.Generator().manual_seed(rows))
    return tokens[:, :-1], tokens[:, 1:].clone()


def test_accumulation_is_the_big_batch_whatever_the_cut():
    """7 rows cut 3 + 3 + 1, with very different numbers of counted tokens."""
    inputs, targets = make_batch(7)
    targets[0:3, 2:] = IGNORED
    targets[4, :] = IGNORED

    whole, cut = make_model(), make_model()
    expected = F.cross_entropy(whole(inputs).flatten(0, 1), targets.flatten(), ignore_index=IGNORED)
    expected.backward()
    parts = list(zip(inputs.split(3), targets.split(3), strict=True))
    loss = accumulate_gradients(cut, parts)

    assert loss.item() == pytest.approx(expected.item(), rel=1e-12)
    for (name, a), b in zip(whole.named_parameters(), cut.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-12, atol=1e-14, msg=name)

    naive = make_model()  # the mean of means is another gradient: the test can tell
    for part_inputs, part_targets in parts:
        loss = F.cross_entropy(
            naive(part_inputs).flatten(0, 1), part_targets.flatten(), ignore_index=IGNORED
        )
        (loss / len(parts)).backward()
    assert not torch.allclose(whole.head.weight.grad, naive.head.weight.grad, rtol=0.1)


def test_nothing_to_predict_is_no_gradient():
    inputs, targets = make_batch(2)
    model = make_model()
    loss = accumulate_gradients(model, [(inputs, torch.full_like(targets, IGNORED))])
    assert loss.item() == 0
    assert all(p.grad.abs().max() == 0 for p in model.parameters())


def test_learning_rate_at_every_corner():
    def rates(**changes):
        arguments = {"peak": 1.0, "minimum": 0.1, "warmup_steps": 4, "total_steps": 11} | changes
        return [learning_rate(step, **arguments) for step in range(arguments["total_steps"])]

    assert rates()[:4] == pytest.approx([0.25, 0.5, 0.75, 1.0])
    assert rates()[4] == pytest.approx(1.0)
    assert rates()[7] == pytest.approx(0.55)  # half way down, the mean of both ends
    assert rates()[10] == pytest.approx(0.1)
    assert rates() == sorted(rates()[:4]) + sorted(rates()[4:], reverse=True)
    assert rates(warmup_steps=0)[0] == pytest.approx(1.0)
    assert learning_rate(99, 1.0, 0.1, 4, 11) == pytest.approx(0.1)
    assert rates(warmup_steps=11)[-1] == pytest.approx(1.0)
    assert learning_rate(11, 1.0, 0.1, 11, 11) == pytest.approx(0.1)


@pytest.mark.parametrize("warmup_steps, total_steps", [(4, 5), (0, 1), (4, 6), (0, 2), (4, 11)])
def test_the_last_step_after_the_warm_up_has_the_minimum(warmup_steps, total_steps):
    """Even if it is the only one."""
    assert learning_rate(total_steps - 1, 1.0, 0.1, warmup_steps, total_steps) == 0.1


def test_the_optimizer_decays_matrices_only():
    model = make_model()
    decaying, plain = make_optimizer(model, TrainConfig(), torch.device("cpu")).param_groups
    assert {p.dim() for p in decaying["params"]} == {2} and decaying["weight_decay"] == 0.1
    assert {p.dim() for p in plain["params"]} == {1} and plain["weight_decay"] == 0.0
    assert len(decaying["params"]) + len(plain["params"]) == len(list(model.parameters()))


@pytest.mark.parametrize("clip_norm", [0.0, 1e-3, 1e9])
def test_a_step_clips_and_moves_as_sgd_by_hand_would(clip_norm):
    model, by_hand = make_model(), make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=123.0)
    batch = make_batch(3)
    before = nn.utils.parameters_to_vector(by_hand.parameters())
    loss, norm = train_step(model, optimizer, [batch], rate=0.5, clip_norm=clip_norm)

    accumulate_gradients(by_hand, [batch])
    gradient = torch.cat([p.grad.flatten() for p in by_hand.parameters()])
    assert norm.item() == pytest.approx(gradient.norm().item(), rel=1e-12)
    assert loss.item() == pytest.approx(math.log(31), abs=0.1)
    if clip_norm:  # clip_grad_norm_ adds 1e-6 to the norm it divides by
        gradient = gradient * min(1.0, clip_norm / (gradient.norm().item() + 1e-6))
    torch.testing.assert_close(
        nn.utils.parameters_to_vector(model.parameters()),
        before - 0.5 * gradient,
        rtol=1e-10,
        atol=1e-14,
    )


def test_gradients_of_the_last_step_are_forgotten():
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    norms = [train_step(model, optimizer, [make_batch(3)], 0.0, 0.0)[1] for _ in range(2)]
    assert norms[0] == norms[1]


def test_low_precision_computes_in_bfloat16_and_returns_float32():
    model = make_model().float()
    seen = []
    model.head.register_forward_hook(lambda module, inputs, output: seen.append(output.dtype))
    inputs, targets = make_batch(4)
    forward = low_precision(model, torch.device("cpu"))
    assert forward(inputs).dtype is torch.float32
    assert seen == [torch.bfloat16]

    loss = accumulate_gradients(forward, [(inputs, targets)])
    exact = accumulate_gradients(make_model(), [(inputs, targets)])
    assert {p.grad.dtype for p in model.parameters()} == {torch.float32}
    # bfloat16 keeps 8 bits: relative rounding 2^-9 per operation, a few of them in a row
    assert loss.item() == pytest.approx(exact.item(), rel=8 * 2**-9)
