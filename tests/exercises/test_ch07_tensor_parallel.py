"""The exercises of chapter 7: their examples, the package under the graders, and the graders."""

import math
import shutil
import sys
from functools import partial

import cloudpickle
import pytest
import torch
from torch import nn

from minitron.comm import differentiable
from minitron.config import ModelConfig
from minitron.launch import run
from minitron.model.transformer import Attention
from minitron.parallel.tensor import layers
from minitron.proof.oracle import assert_same_training, small_llama
from teaching.exercises import ROOT, load
from teaching.graders import Mistake
from teaching.graders.ch07_attention import LAYERS, own_gradients, right_gradients
from teaching.graders.ch07_heads import KV_HEADS
from teaching.graders.ch07_toy import expect_close
from teaching.graders.ch07_vocabulary import CASES, Shapes
from teaching.use import use
from tests.exercises.common import Chapter
from tests.exercises.grading import Grading
from tests.tiers import exhaustive

NAME = "ch07_tensor_parallel"
CHAPTER = Chapter(NAME)


class TestGrading(Grading):
    chapter = CHAPTER
    few = 4, 1  # on 4, bytes are counted


def solution(exercise_id):
    exercise = CHAPTER.exercises[exercise_id]
    functions = load(exercise, ROOT / exercise.solution_file)
    cloudpickle.register_pickle_by_value(sys.modules[f"exercises.{NAME}"])
    return list(functions.values())


def passed(Function, x, grad, group):
    """y, and the gradient of x."""
    x = torch.tensor(x, requires_grad=True)
    y = Function.apply(x, group)
    y.backward(torch.tensor(grad))
    return y.tolist(), x.grad.tolist()


def test_the_examples_of_layers_and_of_the_loss_are_true():
    Replicate, AllReduce, (RowParallelLinear,), (cross_entropy,) = (
        *solution("7.1"),
        solution("7.2"),
        solution("7.3"),
    )

    def examples(group):
        rank = group.rank()
        f = passed(Replicate, [1.0, 2.0], [[1.0, 0.0], [4.0, 5.0]][rank], group)
        g = passed(AllReduce, [[1.0, 2.0], [10.0, 20.0]][rank], [3.0, 4.0], group)

        linear = nn.Linear(2, 1)
        linear.weight.data, linear.bias.data = torch.tensor([[2.0, 5.0]]), torch.tensor([10.0])
        layer = RowParallelLinear(linear, group)
        out = layer(torch.tensor([[3.0], [4.0]][rank]))
        out.sum().backward()
        row = layer.weight.tolist(), out.tolist(), layer.bias.grad.tolist()

        logits = torch.tensor([[[[0.0]]], [[[math.log(3)]]]][rank], requires_grad=True)
        loss = cross_entropy(logits, torch.tensor([[1]]), group)
        loss.backward()
        return f, g, row, (loss.item(), logits.grad.item())

    zero, one = run(examples, 2)
    assert zero[:2] == one[:2] == (([1.0, 2.0], [5.0, 5.0]), ([11.0, 22.0], [3.0, 4.0]))
    assert [zero[2], one[2]] == [([[2.0]], [36.0], [1.0]), ([[5.0]], [36.0], [1.0])]
    loss = pytest.approx(math.log(4 / 3))
    assert [zero[3], one[3]] == [(loss, pytest.approx(1 / 4)), (loss, pytest.approx(3 / 4 - 1))]


def test_the_examples_of_heads_are_true():
    (SplitAttention,) = solution("7.4")

    def heads(group, H, G):
        attention = Attention(ModelConfig("llama", 1, 1, 1, 2 * H, H, G, 1))
        split = SplitAttention(attention, group)
        for layer in (attention.key, attention.value):
            first = torch.tensor([[1.0, 2.0], [5.0, 5.0]][group.rank() % 2])
            layer.weight.grad = torch.zeros_like(layer.weight)
            layer.weight.grad[0, :2] = first
        split.finish()
        return split.query_heads, split.kv_heads, attention.key.weight.grad[0, :2].tolist()

    assert run(heads, 2, 2, 1) == [
        (range(0, 1), range(1), [6.0, 7.0]),
        (range(1, 2), range(1), [6.0, 7.0]),
    ]
    assert run(heads, 4, 4, 2)[2] == (range(2, 3), range(1, 2), [6.0, 7.0])


@exhaustive
@pytest.mark.parametrize(
    ("module", "name"),
    [
        (layers, "vocabulary_parallel_cross_entropy"),
        (differentiable, "AllReduce"),
    ],
)
def test_the_packages_own_pass_the_graders(module, name):
    verdict = CHAPTER.grade(name, getattr(module, name))
    assert verdict.state == "passed", verdict


def test_the_package_trains_with_our_solutions(tmp_path):
    for folder in ("solutions", "exercises"):
        (tmp_path / folder).mkdir()
        shutil.copy(ROOT / "solutions" / f"{NAME}.py", tmp_path / folder)

    def apply(model, group):
        swapped = use("7.1", "7.3", root=tmp_path)
        swapped.__enter__()
        assert differentiable.AllReduce.__module__ == f"exercises.{NAME}"
        loss = layers.vocabulary_parallel_cross_entropy
        assert loss.__module__ == f"exercises.{NAME}"
        parallel = layers.apply_tensor_parallel(model, group)
        parallel.swapped = swapped  # while it lives, the package runs the solutions
        return parallel

    sizes = dict(vocab_size=12, width=12, num_heads=2, num_kv_heads=1, ffn_width=6)
    assert_same_training(apply, 2, partial(small_llama, **sizes), vocabulary=12)


def right_split(**methods):
    """A right answer to 7.4 with some other methods."""
    return type("Split", (CHAPTER.right_answers["SplitAttention"][0],), methods)


@exhaustive  # graded mistakes of 7.4 are of this kind
def test_heads_that_do_not_divide_must_be_refused():
    unchecked = right_split(check=lambda self, H, G, N: None)
    verdict = CHAPTER.grade("SplitAttention", unchecked)
    assert verdict.seen.endswith("is raised") and "ValueError" in verdict.likely

    def one_number(self, H, G, N):
        if H % N or max(G, N) % min(G, N):
            raise ValueError(f"{N} ranks are too many")

    verdict = CHAPTER.grade("SplitAttention", right_split(check=one_number))
    assert "must contain both numbers" in verdict.likely


@exhaustive  # a graded mistake of 7.2 is of this kind
def test_whole_weights_behind_a_view_are_found():
    def part(self, weight, heads):
        return weight[heads.start * self.K : heads.stop * self.K]

    verdict = CHAPTER.grade("SplitAttention", right_split(part=part))
    assert "a view keeps the full weight alive" in verdict.likely


@exhaustive
def test_a_whole_layer_that_is_kept_is_found():
    class Keeps(CHAPTER.right_answers["RowParallelLinear"][0]):
        def __init__(self, linear, group):
            super().__init__(linear, group)
            self.kept = [linear]

    verdict = CHAPTER.grade("RowParallelLinear", Keeps)
    assert "do not keep linear" in verdict.likely


def test_a_call_of_the_packages_layer_is_refused():
    class Asks(CHAPTER.right_answers["RowParallelLinear"][0]):
        def forward(self, x):
            self.exchange = layers.AllReduceExchange(self.group)
            return layers.RowParallelLinear.forward(self, x)

    verdict = CHAPTER.grade("RowParallelLinear", Asks)
    assert "RowParallelLinear of minitron is called" in verdict.seen


def test_a_method_that_is_missing_is_named():
    class Forward(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, group):
            return x

    verdict = CHAPTER.grade("Replicate", Forward)
    assert verdict.seen == "Replicate has no backward"


# What the graders rest on


def test_the_parts_of_a_shared_heads_gradient_add_up():
    for size, groups in KV_HEADS.items():
        for G in groups:
            copies = max(1, size // G)
            for name in LAYERS:
                own = [own_gradients(rank, size, G, 0)[name] for rank in range(size)]
                step = copies if name in ("key", "value") else 1
                sums = [sum(own[first : first + step]) for first in range(0, size, step)]
                whole = torch.cat(sums, dim=1 if name == "out" else 0)
                torch.testing.assert_close(whole, right_gradients(G, 0)[name])


def test_some_key_value_heads_are_shared_by_some_ranks_and_not_by_all():
    assert any(1 < G < size for size, groups in KV_HEADS.items() for G in groups)


def test_the_logits_of_one_case_overflow_without_the_largest():
    logits, _ = CASES[1].data(3)
    assert logits.dtype == torch.float32 and logits.exp().isinf().any()
    assert not CASES[0].data(3)[0].exp().isinf().any()


@pytest.mark.parametrize("size", [2, 3, 4])
def test_every_rank_has_targets_in_the_first_case(size):
    logits, targets = CASES[0].data(size)
    owners = targets // (logits.shape[-1] // size)
    assert set(range(size)) <= set(owners.flatten().tolist())


def test_shapes_are_seen_forward_and_backward():
    x = torch.ones(2, 3, requires_grad=True)
    with Shapes() as made:
        x.t().contiguous().sum().backward()
    assert made.shapes >= {(3, 2), (), (2, 3)}


def test_the_first_wrong_entry_is_told():
    right = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    wrong = right + torch.tensor([[0.0, 0.0], [math.nan, 1.0]])
    with pytest.raises(Mistake, match=r"y is wrong\. rank 0: right; rank 1: \[1, 0\] is nan, "):
        expect_close("y", [right, wrong], [right, right], [], "")
    with pytest.raises(Mistake, match=r"rank 0: shape \(2,\), not \(2, 2\); rank 1: None"):
        expect_close("y", [right[0], None], [right, right], [], "")
    expect_close("y", [right], [right], [], "")
