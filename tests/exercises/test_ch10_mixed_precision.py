"""The exercises of chapter 10: their examples, the package under the graders, and the judges."""

import math
import sys
from functools import partial

import cloudpickle
import pytest
import torch
from torch import nn

from minitron.launch import run
from minitron.model import float8
from teaching.exercises import ROOT, load
from teaching.graders import (
    Mistake,
    ch10_agreement,
    ch10_float8,
    ch10_scaler,
    ch10_underflow,
)
from tests.exercises.common import Chapter
from tests.exercises.grading import Grading
from tests.exercises.mutants.ch10_mixed_precision import FURTHER
from tests.tiers import exhaustive, tiered

CHAPTER = Chapter("ch10_mixed_precision")
NAN = math.nan


class TestGrading(Grading):
    chapter = CHAPTER


def solution(exercise_id):
    exercise = CHAPTER.exercises[exercise_id]
    answers = load(exercise, ROOT / exercise.solution_file).values()
    cloudpickle.register_pickle_by_value(sys.modules["exercises.ch10_mixed_precision"])
    return list(answers)


def test_the_underflows_examples_are_true():
    flushed_share, smallest_scale = solution("10.1")
    gradients = {"w": torch.tensor([2.0**-30, 2.0**-24, 0.0]), "b": torch.tensor([1.0, -1.0])}
    assert [flushed_share(gradients, scale) for scale in (1.0, 64.0)] == [1 / 4, 0.0]
    assert [smallest_scale(gradients, most) for most in (0.25, 0.1)] == [1.0, 64.0]
    gradients["b"][0] = 2000.0
    assert smallest_scale(gradients, 0.1) is None


def test_the_scalers_example_is_true():
    (LossScaler,) = solution("10.2")
    w = nn.Parameter(torch.ones(1))
    scaler = LossScaler(torch.optim.SGD([w], lr=0.1), 1.0, initial=8.0, interval=2)
    values = []
    for gradient in (1.0, 1.0, NAN, 1.0, 1.0):
        scaler.scaled((w * gradient).sum()).backward()
        scaler.step()
        values.append(scaler.value)
    assert values == [8, 16, 8, 8, 16]


def test_the_masters_example_is_true():
    (MasterStep,) = solution("10.3")

    def train(masters: bool):
        model = nn.Linear(1, 1, bias=False, dtype=torch.bfloat16)
        model.weight.data.fill_(1.0)
        sgd = partial(torch.optim.SGD, lr=1.0)
        stepper = MasterStep(model, sgd) if masters else sgd(model.parameters())
        weights = []
        for _ in range(4):
            model.weight.grad = torch.full_like(model.weight, 2.0**-10)
            stepper.step()
            weights.append(model.weight.item())
        return weights

    assert train(masters=False) == [1.0] * 4
    assert train(masters=True)[0] == 1.0 and train(masters=True)[3] == 1 - 2.0**-8


def test_the_examples_on_two_ranks_are_true():
    (step_together,), (quantize, quantize_shard) = solution("10.4"), solution("10.5")

    def example(group):
        rank, done = group.rank(), []
        for grads in ([24.0, 32.0], [24.0, NAN]):
            shard = torch.tensor([10.0])
            shard.grad = torch.tensor([grads[rank]])
            sgd = torch.optim.SGD([shard], lr=1.0)
            done.append((step_together([shard], sgd, 8.0, 2.5, group), shard.item()))
        shard = torch.tensor([[-896.0, 2.0], [4.0, 0.0]][rank])
        values, scale = quantize_shard(shard, torch.float8_e4m3fn, group)
        return (*done, values.tolist(), scale.item())

    stays = 4.0, 10.0  # half the scale, and the weight
    assert run(example, 2) == [
        ((8.0, pytest.approx(8.5)), (4.0, 10.0), [-448.0, 1.0], 2.0),
        ((8.0, pytest.approx(8.0)), stays, [2.0, 0.0], 2.0),
    ]
    values, scale = quantize(torch.tensor([-896.0, 2.0, 0.0]), torch.float8_e4m3fn)
    assert (values.tolist(), scale.item()) == ([-448.0, 1.0, 0.0], 2.0)


@exhaustive
def test_the_package_passes():
    verdict = CHAPTER.grade("quantize", float8.quantize)
    assert verdict.state == "passed", verdict


def test_calling_the_package_is_no_answer():
    def quantize(x, dtype):
        return float8.quantize(x, dtype)

    verdict = CHAPTER.grade("quantize", quantize)
    assert verdict.state == "failed" and "is called" in verdict.seen


@pytest.mark.parametrize(
    ("name", "answer", "says"),
    tiered(
        (
            (name, answer, says)
            for name, answers in FURTHER.items()
            for answer, says in answers.items()
        ),
        keep=1,
    ),
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_further_mistakes_are_recognized(name, answer, says):
    verdict = CHAPTER.grade(name, answer)
    assert verdict.state == "failed" and says in f"{verdict.seen}\n{verdict.likely}"


# What the graders rest on


def test_the_thresholds_are_those_of_the_conversion():
    edges = [ch10_underflow.HALF_SMALLEST, ch10_underflow.ABOVE]
    assert torch.tensor(edges).half().tolist() == [0.0, 2.0**-24]
    assert torch.tensor([65519.9, ch10_underflow.TOO_LARGE]).half().tolist() == [65504.0, math.inf]


@pytest.mark.parametrize("scale", [2.0**k for k in range(0, 40, 3)])
def test_the_judge_of_shares_agrees_with_the_conversion(scale):
    values = ch10_underflow.joined(ch10_underflow.many()).float()
    flushed = ((values * scale).half() == 0).float().mean().item()
    right = ch10_underflow.right_share(ch10_underflow.many(), scale)
    assert right == pytest.approx(flushed) and (right > 0) == (scale < 2.0**24)


def test_the_script_grows_skips_and_grows_again():
    for _, settings in ch10_scaler.CASES:
        events = ch10_scaler.history(settings, len(ch10_scaler.STEPS))
        assert events.count("grown") >= 3 and events.count("skipped") == 4
        later = {"fine", "grown"} if settings.interval > 1 else {"grown"}
        assert later <= set(events[events.index("skipped") :])


def test_the_norm_exceeds_its_limit_now_and_then_on_all_ranks_together():
    for num_ranks in (1, 2, 3, 4):
        exceeded = set()
        for number, step in enumerate(ch10_agreement.STEPS):
            shards = [ch10_agreement.make_shards(rank) for rank in range(num_ranks)]
            for rank, mine in enumerate(shards):
                ch10_agreement.give(mine, rank, num_ranks, number, 1.0)
            norm = math.hypot(*map(ch10_agreement._norm, shards))
            overflow = any(kind[-3:] in ("inf", "nan") for kind in step.kinds(num_ranks))
            assert math.isfinite(norm) != overflow
            exceeded.add(norm > ch10_agreement.MAX_NORM)
        assert exceeded == {True, False}


@pytest.mark.parametrize("dtype", [ch10_float8.E4M3, ch10_float8.E5M2])
def test_the_judge_of_values_takes_the_nearest_and_no_other(dtype):
    x = torch.tensor([1.0, 1.03, 0.6, torch.finfo(dtype).max])
    values = x.to(dtype)
    for bits in (0, 1):
        other = values.clone()
        other.view(torch.uint8)[1] += bits  # the next number
        answer = ch10_float8.Answer(other.float(), torch.tensor(1.0), dtype)
        if bits:
            with pytest.raises(Mistake, match="the nearest in"):
                ch10_float8._expect_values(answer, x, dtype)
        else:
            ch10_float8._expect_values(answer, x, dtype)
