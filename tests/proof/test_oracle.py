"""The oracle passes what is the same training, and says of everything else what it is."""

from functools import partial

import numpy as np
import pytest
import torch
import torch.distributed as dist

from minitron.comm.agreement import SINGLE_RANK
from minitron.proof.difference import Moment, explain, first_difference
from minitron.proof.oracle import (
    AfterBackward,
    after_backward,
    assert_same_training,
    sample_batches,
    small_gpt,
    small_llama,
    trainings,
)
from tests.tiers import tiered


def average(model, group):
    """Written for this test: the oracle is judged by itself."""
    for p in model.parameters():
        if p.requires_grad:
            p.grad = torch.zeros_like(p) if p.grad is None else p.grad
            dist.all_reduce(p.grad, group=group)
            p.grad /= group.size()


def total(model, group):
    average(model, group)
    for p in model.parameters():
        if p.requires_grad:
            p.grad *= group.size()


def everywhere(model, group):
    """No communication at all: every rank reads the whole batch."""
    dist.barrier(group)
    parallel = after_backward(lambda model, group: None)(model, group)
    parallel.data_part = 0, 1
    return parallel


class ShardedOptimizer(AfterBackward):
    """Each rank updates every N-th parameter, and the others receive it."""

    def __init__(self, model, group, skip_decay=False):
        super().__init__(model, group, average)
        after_backward(average)(model, group)  # its broadcast
        self.skip_decay = skip_decay
        self.all = [p for p in model.parameters() if p.requires_grad]

    def make_optimizer(self, factory):
        self.own = factory(self.all[self.group.rank() :: self.group.size()])
        if self.skip_decay:
            self.own.param_groups[0]["weight_decay"] = 0.0
        return self

    def zero_grad(self):
        self.model.zero_grad()

    def step(self):
        self.own.step()
        for index, p in enumerate(self.all):
            source = index % self.group.size()
            dist.broadcast(p.detach(), group_src=source, group=self.group)


@pytest.mark.parametrize(
    ("apply", "model"),
    tiered(
        [
            (after_backward(average), small_llama),
            (ShardedOptimizer, small_gpt),
            (after_backward(average), small_gpt),
            (everywhere, small_llama),
        ],
        keep=2,
    ),
    ids=["average llama", "sharded optimizer", "average gpt", "everywhere"],
)
def test_the_same_training_passes(apply, model):
    random_state = torch.get_rng_state()
    assert_same_training(apply, 3, model, num_micro_batches=2)
    assert torch.equal(torch.get_rng_state(), random_state)


def test_a_sum_is_named_with_its_factor_and_adamw_hides_it():
    with pytest.raises(AssertionError) as info:
        assert_same_training(after_backward(total), 3)
    first, where, hidden = str(info.value).splitlines()
    assert first == (
        "token_embedding.weight: gradient 3.0x too large on all ranks: summed instead of averaged?"
    )
    assert where == "(step 0; 33 of 35 differ) with SGD on 3 ranks"
    assert hidden.endswith("AdamW divides a gradient's scale away.")


def test_an_optimizer_of_its_own_is_judged():
    with pytest.raises(
        AssertionError,
        match="after the update the parameter is .* though the gradients agree(.|\n)*AdamW",
    ):
        assert_same_training(partial(ShardedOptimizer, skip_decay=True), 2)


def test_uneven_parts_and_losses_are_judged():
    def mean_of_a_loss_forgotten(model, group):
        parallel = after_backward(average)(model, group)
        parallel.mean = lambda loss: loss
        return parallel

    with pytest.raises(
        AssertionError,
        match="model: loss differs between ranks, together they are right: never reduced",
    ):
        assert_same_training(mean_of_a_loss_forgotten, 2)


def test_what_is_no_parallel_model_is_refused():
    with pytest.raises(AssertionError, match="apply returned a NoneType: derive it from OneDevice"):
        trainings(SINGLE_RANK, lambda model, group: None, small_gpt, sample_batches((2,)), 1)


# The words, without ranks

WANT = np.array([1.0, -2.0, 3.0])


@pytest.mark.parametrize(
    ("kind", "got", "words"),
    [
        ("gradient", [4 * WANT] * 4, "x: gradient 4.0x too large on all ranks: summed instead of"),
        ("gradient", [WANT / 4] * 4, "x: gradient 4.0x too small on all ranks: divided twice?"),
        ("gradient", [2 * WANT] * 4, "x: gradient 2.0x too large on all ranks"),
        ("gradient", [WANT, WANT, WANT, WANT * 3], "right on rank 0, 1, 2 alone: has every rank"),
        ("gradient", [WANT + 1, WANT - 1] * 2, "differs between ranks, together they are right"),
        ("gradient", [WANT + 1, WANT + 2] * 2, "right on none: sent before it was complete"),
        ("gradient", [WANT, None, WANT, WANT], "x: gradient missing (None) on rank 1 alone"),
        ("gradient", [4 * WANT, None, WANT, None], "x: gradient missing (None) on rank 1, 3 alone"),
        ("gradient", [0 * WANT] * 4, "x: gradient zero on all ranks: overwritten, or left out"),
        (
            "gradient",
            [WANT[::-1]] * 4,
            "x: gradient not proportional to that of one process on all",
        ),
        ("gradient", [WANT * (1 + 1e-8)] * 4, "off by 1e-08 of its largest value on all ranks: fl"),
        ("gradient", [WANT[:2]] * 4, "x: gradient of shape (2,) on all ranks, not (3,)"),
        ("kept", [4 * WANT] * 4, "the backward pass made the parameter itself 4.0x too large"),
        ("initial", [WANT, WANT + 1], "x: initial weights differ on rank 1 alone: no broadcast"),
        ("updated", [WANT + 1, WANT], "after the update the parameter is not proportional"),
    ],
)
def test_the_words(kind, got, words):
    assert words in explain(kind, "x", got, WANT, largest=3.0)


def test_the_first_difference_is_told_and_rounding_is_none():
    def record(kept, gradient):
        return [
            Moment(0, "loss", {"model": np.array(2.0)}),
            Moment(1, "kept", {"x": kept}),
            Moment(1, "gradient", {"x": gradient, "key.bias": WANT * 1e-18, "y": None}),
        ]

    one = record(WANT, WANT)
    rounded = record(WANT, WANT * (1 + 1e-13))
    rounded[-1].values["key.bias"] = -WANT * 1e-18
    assert first_difference(one, [one, rounded]) is None

    found = first_difference(one, [one, record(WANT, WANT * 2)])
    assert found.endswith("(step 1; 1 of 3 differ)")
    assert first_difference(one, [record(WANT, WANT * float("nan"))]) is not None
    assert "y: gradient on all ranks, one process has none" in first_difference(
        one, [[*one[:2], Moment(1, "gradient", one[-1].values | {"y": 0 * WANT})]]
    )
