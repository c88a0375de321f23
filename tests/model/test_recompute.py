"""Recomputation is the same training, bit for bit, and holds only what it says."""

import dataclasses
import weakref
from contextlib import nullcontext
from functools import partial
from itertools import product

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

from minitron.config import ConfigError, ModelConfig
from minitron.measure.meter import Meter
from minitron.model import recompute as module
from minitron.model.recompute import (
    apply_full_recompute,
    apply_segmented_recompute,
    apply_selective_recompute,
    even_segments,
    recompute,
    segments_for_budget,
    sqrt_segments,
)
from minitron.model.transformer import Transformer, initialize, materialized_attention
from tests.tiers import as_exhaustive

GPT = ModelConfig("gpt", 97, 16, 3, 24, 3, 3, 56, dropout=0.1)
LLAMA = ModelConfig("llama", 97, 16, 3, 24, 6, 2, 56, tied_embedding=False, dropout=0.1)


def apply_nested(model):
    apply_selective_recompute(model)
    apply_segmented_recompute(model, [2, 1])


POLICIES = {
    "full": apply_full_recompute,
    "selective": apply_selective_recompute,
    "segmented": partial(apply_segmented_recompute, segment_lengths=[2, 1]),
    "some blocks": partial(apply_segmented_recompute, segment_lengths=[1, 1]),
    "nested": apply_nested,
}


def train(
    config, policy=None, precision=torch.float32, attention=None, inside=False, frozen=(), num=2
):
    """Gradients by name of `num` accumulated passes, and the random state after them."""
    model = Transformer(config)
    initialize(model, seed=0)
    if precision is torch.float64:
        model.double()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not name.startswith(tuple(frozen)))
    for block in model.blocks:
        block.attention.attention_fn = attention or block.attention.attention_fn
    (policy or (lambda model: None))(model)

    torch.manual_seed(0)
    autocast = torch.autocast("cpu", torch.bfloat16, enabled=precision is torch.bfloat16)
    for _ in range(num):
        tokens = torch.randint(0, 97, (2, 17))
        with autocast:
            logits = model(tokens[:, :-1]).flatten(0, 1)
            loss = F.cross_entropy(logits, tokens[:, 1:].flatten())
            if inside:
                loss.backward()
        if not inside:
            loss.backward()
    grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return grads, torch.get_rng_state()


def same(one, other) -> bool:
    (grads, state), (others, other_state) = one, other
    assert grads
    return (
        grads.keys() == others.keys()
        and all(torch.equal(grads[name], others[name]) for name in grads)
        and torch.equal(state, other_state)
    )


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("precision", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("config", [GPT, LLAMA], ids=["gpt", "llama"])
def test_gradients_and_random_state_are_those_of_the_plain_run(config, precision, policy):
    for attention in (None, materialized_attention):
        plain = train(config, None, precision, attention)
        assert same(train(config, POLICIES[policy], precision, attention), plain)


@pytest.mark.parametrize("policy", POLICIES)
def test_a_backward_pass_inside_autocast_is_the_same_too(policy):
    """There, weights that were cast in the forward pass are found in autocast's cache."""
    plain = train(GPT, None, torch.bfloat16, inside=True)
    assert same(train(GPT, POLICIES[policy], torch.bfloat16, inside=True), plain)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("frozen", [["token", "position", "head"], ["blocks.1"], ["blocks.0.mlp"]])
def test_frozen_parameters(frozen, policy):
    """With frozen embeddings the first block's input requires no gradient; its weights do."""
    plain = train(GPT, None, frozen=frozen)
    assert "blocks.2.mlp.up.weight" in plain[0]
    assert same(train(GPT, POLICIES[policy], frozen=frozen), plain)


# Each essential line, taken out, must show


@pytest.mark.parametrize("policy", POLICIES)
def test_without_the_random_state_the_gradients_are_wrong(policy, monkeypatch):
    plain = train(GPT)
    monkeypatch.setattr(module, "set_random_states", lambda device, states: None)
    assert not same(train(GPT, POLICIES[policy]), plain)


def test_without_going_back_to_the_present_random_state_the_next_step_is_wrong(monkeypatch):
    plain = train(GPT, num=1)
    real, calls = module.set_random_states, []

    def only_the_first_of_two(device, states):
        calls.append(states)
        if len(calls) % 2:
            real(device, states)

    monkeypatch.setattr(module, "set_random_states", only_the_first_of_two)
    grads, state = train(GPT, apply_full_recompute, num=1)
    assert all(torch.equal(grads[name], grad) for name, grad in plain[0].items())
    assert not torch.equal(state, plain[1])


def test_without_autocast_the_replay_is_wrong(monkeypatch):
    config = dataclasses.replace(GPT, dropout=0.0)
    plain = train(config, None, torch.bfloat16)
    real = module.ForwardContext.__init__

    def forgetful(self, device):
        real(self, device)
        self.autocasts = []

    monkeypatch.setattr(module.ForwardContext, "__init__", forgetful)
    try:
        assert not same(train(config, apply_full_recompute, torch.bfloat16), plain)
    except RuntimeError as error:
        assert "dtype" in str(error)  # float32 tensors met a bfloat16 gradient


def test_without_the_anchor_nothing_is_saved_for_inputs_that_need_no_gradient(monkeypatch):
    x, weight = torch.ones(3), torch.ones(3, requires_grad=True)
    recompute(lambda x: x * weight, x).sum().backward()
    assert torch.equal(weight.grad, x)

    real = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *size, requires_grad=False: real(*size))
    with pytest.raises(AttributeError):
        recompute(lambda x: x * weight, x).sum().backward()


def test_without_keeping_what_a_replay_saved_it_runs_for_every_tensor(monkeypatch):
    def forgetful(self, number):
        self.run()
        return self.kept[number]

    monkeypatch.setattr(module.RecomputedCall, "fetch", forgetful)
    counted, calls = count_calls(lambda x: x.sin().exp())
    recompute(counted, torch.ones(3, requires_grad=True)).sum().backward()
    assert len(calls) == 3


# One call


def count_calls(function):
    calls = []

    def counted(*tensors):
        calls.append(len(tensors))
        return function(*tensors)

    return counted, calls


def test_the_function_runs_once_forward_and_once_backward():
    counted, calls = count_calls(lambda a, b: (a * b).sin() * b.exp())
    a, b = torch.randn(5, requires_grad=True), torch.randn(5)
    result = recompute(counted, a, b)
    assert len(calls) == 1
    result.sum().backward()
    assert len(calls) == 2
    expected = torch.cos(a * b) * b * b.exp()
    torch.testing.assert_close(a.grad, expected)


def test_a_second_walk_through_the_graph_replays_again():
    x = torch.randn(5, dtype=torch.float64, requires_grad=True)
    counted, calls = count_calls(lambda x: x.sin().exp())
    result = recompute(counted, x).sum()
    result.backward(retain_graph=True)
    first = x.grad.clone()
    result.backward()
    assert torch.equal(x.grad, 2 * first)
    assert len(calls) == 3


def test_first_and_second_derivatives():
    x = torch.randn(5, dtype=torch.float64, requires_grad=True)
    function = partial(recompute, lambda x: x.sin().exp() * x)
    assert torch.autograd.gradcheck(function, x)
    assert torch.autograd.gradgradcheck(function, x)


def test_without_gradients_nothing_is_replayed_or_kept():
    counted, calls = count_calls(torch.sin)
    with torch.no_grad():
        result = recompute(counted, torch.ones(3, requires_grad=True))
    assert result.grad_fn is None and len(calls) == 1


def test_an_input_changed_in_place_is_noticed():
    x = torch.ones(3, requires_grad=True) * 2
    result = recompute(torch.sin, x)
    x.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        result.sum().backward()


def test_a_function_that_does_something_else_the_second_time_is_noticed():
    calls = []

    def changing(x):
        calls.append(x)
        return x.sin().exp() if len(calls) == 1 else x.sin()

    with pytest.raises(AssertionError, match="saved 1 tensors, the forward pass 2"):
        recompute(changing, torch.ones(3, requires_grad=True)).sum().backward()


def test_several_results_and_several_inputs():
    def function(x, y):
        return x * y, (x + y).exp()

    pairs = [torch.randn(4, requires_grad=True) for _ in range(2)]
    first, second = recompute(function, *pairs)
    grads = torch.autograd.grad((first * second).sum(), pairs)
    first, second = function(*pairs)
    plain = torch.autograd.grad((first * second).sum(), pairs)
    assert all(torch.equal(a, b) for a, b in zip(grads, plain, strict=True))


def test_a_replay_stops_at_the_last_tensor_that_is_needed():
    """A product that comes last has saved its inputs before it runs: its FLOPs are not spent."""
    weight = torch.randn(8, 8, requires_grad=True)
    x = torch.randn(4, 8, requires_grad=True)
    with FlopCounterMode(display=False) as counter:
        recompute(lambda x: (x @ weight).sin() @ weight, x).sum().backward()
    product = 2 * 4 * 8 * 8
    assert counter.get_total_flops() == (2 + 4 + 1) * product  # forward, backward, replay


class Hoarder(torch.autograd.Function):
    """A node that holds something of its own, as long as it lives."""

    held = []

    @staticmethod
    def forward(ctx, x):
        ctx.treasure = nn.Identity()
        Hoarder.held.append(weakref.ref(ctx.treasure))
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        return grad * 2


def test_the_graph_of_a_replay_is_gone_when_the_replay_is_over(monkeypatch):
    monkeypatch.setattr(Hoarder, "held", [])
    alive = []

    def function(x):
        y = Hoarder.apply(x).sin()
        y.register_hook(lambda grad: alive.append([ref() is not None for ref in Hoarder.held]))
        return y.sin()

    recompute(function, torch.ones(3, requires_grad=True)).sum().backward()
    assert alive == [[True, False]]  # the node of the forward pass, the one of the replay


# What is held

WIDE = ModelConfig("gpt", 11, 32, 8, 32, 2, 2, 128)
BOUNDARY = 2 * 32 * 32 * 4  # B S D float32


def held(policy=None, attention=None, device="cpu"):
    """Activation bytes at the end of the forward pass, the peak, and the calls of each block."""
    model = Transformer(WIDE)
    for block in model.blocks:
        block.attention.attention_fn = attention or block.attention.attention_fn
    (policy or (lambda model: None))(model)
    calls = [0] * len(model.blocks)
    for index, block in enumerate(model.blocks):

        def count(*_, index=index):
            calls[index] += 1

        block.register_forward_pre_hook(count)

    tokens = torch.zeros(2, 32, dtype=torch.int64)
    with Meter(model) as meter:
        logits = model(tokens)
        end = meter.now()["activation"]
        logits.sum().backward()
    return end, meter.peak.total, calls


@pytest.mark.parametrize(
    "lengths, mode",
    [
        ([1] * 8, nullcontext),
        ([3, 3, 2], nullcontext),
        ([5, 1], FakeTensorMode),
        *map(
            as_exhaustive,
            [
                ([8], nullcontext),
                ([3, 3, 2], FakeTensorMode),
                ([1] * 8, FakeTensorMode),
                ([8], FakeTensorMode),
                ([5, 1], nullcontext),
            ],
        ),
    ],
    ids=str,
)
def test_only_the_inputs_of_segments_are_held(lengths, mode):
    with mode():
        plain, plain_peak, _ = held()
        # all segments and no tail, against one block less in the segments
        end, peak, calls = held(partial(apply_segmented_recompute, segment_lengths=lengths))
        everything = held(partial(apply_segmented_recompute, segment_lengths=[8]))[0]
    num_plain = 8 - sum(lengths)
    block = (plain - (everything - BOUNDARY)) // 8
    assert end == everything + (len(lengths) - 1) * BOUNDARY + num_plain * block
    assert calls == [2] * sum(lengths) + [1] * num_plain
    assert peak < plain_peak or lengths == [8]


def test_selective_recompute_drops_the_square_matrix():
    plain, plain_peak, _ = held(attention=materialized_attention)
    selective, peak, calls = held(apply_selective_recompute, materialized_attention)
    square = 2 * 2 * 32 * 32  # B H S S values
    # with dropout off: softmax's output in float32, and the mask that fills the future
    assert plain - selective >= 8 * 4 * square
    assert peak < plain_peak
    assert calls == [1] * 8


def test_a_replay_inside_a_replay_holds_no_more():
    """The inner call's inputs are tensors of the outer one, and dropped with them."""
    outer = held(apply_full_recompute, materialized_attention)[0]

    def both(model):
        apply_selective_recompute(model)
        apply_full_recompute(model)

    assert held(both, materialized_attention)[0] == outer


def test_parameters_keep_their_names():
    model = Transformer(GPT)
    names = [name for name, _ in model.named_parameters()]
    apply_nested(model)
    assert [name for name, _ in model.named_parameters()] == names


@pytest.mark.parametrize("lengths", [[0, 3], [2, 2], [-1], [4]], ids=str)
def test_segments_that_do_not_fit_the_model_are_refused(lengths):
    with pytest.raises(ConfigError, match=f"{sum(lengths)}.*3 blocks"):
        apply_segmented_recompute(Transformer(GPT), lengths)


# Choosing segments


def peak_of(lengths, activation_bytes, boundary):
    start, peaks = 0, []
    for index, length in enumerate(lengths):
        peaks.append(index * boundary + sum(activation_bytes[start : start + length]))
        start += length
    return max([*peaks, len(lengths) * boundary + sum(activation_bytes[start:])])


def all_plans(num_blocks):
    """Every way to cut the first blocks into segments."""
    plans = [[]]
    for plan in plans:
        plans += [[*plan, n] for n in range(1, num_blocks - sum(plan) + 1)]
    return plans


@pytest.mark.parametrize("sizes", [[10] * 6, [3, 9, 4, 4, 8, 5], [20, 4, 4, 4, 4, 30], [7]])
def test_no_plan_within_the_budget_replays_fewer_blocks(sizes):
    plans = all_plans(len(sizes))
    for boundary, budget in product((1, 3), range(1, sum(sizes) + 5)):
        fitting = [plan for plan in plans if peak_of(plan, sizes, boundary) <= budget]
        if fitting:
            plan = segments_for_budget(sizes, boundary, budget)
            assert peak_of(plan, sizes, boundary) <= budget
            assert sum(plan) == min(map(sum, fitting))
        else:
            least = min(peak_of(plan, sizes, boundary) for plan in plans)
            with pytest.raises(ConfigError, match=f" {budget} bytes.* {least} at least"):
                segments_for_budget(sizes, boundary, budget)


def test_the_budget_is_what_the_meter_sees():
    """Between the plain run and full recomputation, held bytes keep to the chosen budget."""
    everything = held(partial(apply_segmented_recompute, segment_lengths=[8]))[0]
    rest = everything - BOUNDARY  # final norm and head
    block = (held()[0] - rest) // 8
    for budget in (8 * block, 5 * block, 3 * block, 2 * block):
        lengths = segments_for_budget([block] * 8, BOUNDARY, budget)
        end = held(partial(apply_segmented_recompute, segment_lengths=lengths))[0]
        assert end - rest <= budget
    assert segments_for_budget([block] * 8, BOUNDARY, 8 * block) == []


def test_even_and_sqrt_segments():
    assert even_segments(10, 3) == [4, 3, 3]
    assert even_segments(4, 4) == [1, 1, 1, 1]
    assert [sqrt_segments(n) for n in (1, 2, 9, 12)] == [[1], [2], [3, 3, 3], [4, 4, 4]]
    assert all(sum(sqrt_segments(n)) == n for n in range(1, 130))
