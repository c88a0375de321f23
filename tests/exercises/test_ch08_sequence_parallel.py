"""The exercises of chapter 8: their examples, and the package's own answers to them."""

import sys

import cloudpickle
import pytest
import torch
from torch import nn

from minitron import cost
from minitron.comm import differentiable
from minitron.config import ModelConfig
from minitron.launch import run
from teaching.exercises import ROOT, load
from teaching.graders.ch08_gradients import FAMILIES, FROZEN, alone, whole_names
from teaching.graders.ch08_saved import METHODS, PUBLISHED, published
from tests.exercises.common import Chapter
from tests.exercises.grading import Grading
from tests.tiers import exhaustive

CHAPTER = Chapter("ch08_sequence_parallel")


class TestGrading(Grading):
    chapter = CHAPTER


def solution(exercise_id):
    exercise = CHAPTER.exercises[exercise_id]
    answers = load(exercise, ROOT / exercise.solution_file).values()
    cloudpickle.register_pickle_by_value(sys.modules["exercises.ch08_sequence_parallel"])
    return list(answers)


def column(*values):
    return torch.tensor([[value] for value in values])


def test_the_pairs_examples_are_true():
    AllGather, ReduceScatter = solution("8.1")

    def examples(group):
        rank = group.rank()
        x_shard = [column(1.0, 3.0), column(2.0, 4.0)][rank].requires_grad_()
        x = AllGather.apply(x_shard, group, 1)
        x.backward(torch.tensor([[[1.0, 1.0], [1.0, 1.0]], [[0.0, 10.0], [20.0, 0.0]]][rank]))

        x_partial = (torch.tensor([[1.0, 2.0], [3.0, 4.0]]) * [1, 10][rank]).requires_grad_()
        part = ReduceScatter.apply(x_partial, group, 1)
        part.backward([column(1.0, 2.0), column(3.0, 4.0)][rank])
        return x.tolist(), x_shard.grad.tolist(), part.tolist(), x_partial.grad.tolist()

    x, grad = [[1.0, 2.0], [3.0, 4.0]], [[1.0, 3.0], [2.0, 4.0]]
    assert run(examples, 2) == [
        (x, [[1.0], [21.0]], [[11.0], [33.0]], grad),
        (x, [[11.0], [1.0]], [[22.0], [44.0]], grad),
    ]


class EndOfModel(nn.Module):
    def __init__(self, rank):
        super().__init__()
        self.final_norm, self.head = nn.RMSNorm(2), nn.Linear(2, 1, bias=False)
        self.final_norm.weight.grad = torch.tensor([[1.0, 2.0], [10.0, 20.0]][rank])
        self.head.weight.grad = torch.tensor([[[3.0, 4.0]], [[5.0, 6.0]]][rank])


def test_the_gradients_example_is_true():
    (sum_partial_gradients,) = solution("8.2")

    def example(group):
        model = EndOfModel(group.rank())
        sum_partial_gradients(model, group)
        return [p.grad.tolist() for p in model.parameters()]

    assert run(example, 2) == [[[11.0, 22.0], [[3.0, 4.0]]], [[11.0, 22.0], [[5.0, 6.0]]]]


def test_the_bytes_example_is_true():
    (saved_bytes,) = solution("8.3")
    assert saved_bytes(1, 2, 4, 2, 2, False, False) == 196
    assert saved_bytes(1, 2, 4, 2, 2, True, False) == 156
    assert saved_bytes(1, 2, 4, 2, 2, True, True) == 136


def test_the_linears_example_is_true():
    (GatheredLinear,) = solution("8.4")

    def example(group):
        x_shard = torch.full((1, 1, 1), [3.0, 4.0][group.rank()], requires_grad=True)
        weight_shard = torch.full((1, 1), [2.0, 5.0][group.rank()], requires_grad=True)
        y_shard = GatheredLinear.apply(x_shard, weight_shard, group)
        y_shard.sum().backward()
        return y_shard.tolist(), x_shard.grad.tolist(), weight_shard.grad.tolist()

    assert run(example, 2) == [
        ([[[6.0], [8.0]]], [[[7.0]]], [[7.0]]),
        ([[[15.0], [20.0]]], [[[7.0]]], [[7.0]]),
    ]


@exhaustive
@pytest.mark.parametrize("name", ["AllGather", "ReduceScatter"])
def test_the_packages_pair_passes_the_grader(name):
    verdict = CHAPTER.grade(name, getattr(differentiable, name))
    assert verdict.state == "passed", verdict


@pytest.mark.parametrize("family", FAMILIES)
def test_every_incomplete_gradient_can_be_told_from_zero(family):
    names = whole_names(family, 2) - {FROZEN}
    gradients = alone(family)
    assert {name.rpartition(".")[0] for name in names} >= {"final_norm", "blocks.1.mlp_norm"}
    assert all(gradients[name].abs().max() > 1e-6 for name in names)
    assert gradients[FROZEN] is None


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_published_bytes_are_the_packages(name):
    sizes, inside = PUBLISHED[name]
    B, S, D, H = sizes.batch_size, sizes.sequence_length, sizes.width, sizes.num_heads
    model = ModelConfig("gpt", 51200, S, 1, D, H, H, ffn_width=4 * D, dropout=0.1)
    for sequence_parallel, selective in METHODS:
        ours = cost.activation_bytes_per_layer(
            model,
            B,
            S,
            attention="materialized",
            recompute="selective" if selective else "none",
            layout=cost.Layout(8, sequence_parallel),
        )
        right = published(sizes, 8, sequence_parallel, selective, inside)
        small = ours - right  # two norms' statistics, and the mask of the future
        assert small == 16 * B * S // (8 if sequence_parallel else 1) + (not selective) * S**2
