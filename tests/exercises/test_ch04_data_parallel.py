"""The exercises of chapter 4: their examples, the oracle, and what their graders rest on."""

import os
import shutil
import sys

import cloudpickle
import pytest
import torch
import torch.distributed as dist
from torch import nn

from minitron.launch import run
from minitron.parallel.data.buckets import assign_buckets
from minitron.parallel.data.ddp import average_gradients
from minitron.proof.oracle import after_backward, assert_same_training
from teaching.exercises import ROOT, load
from teaching.graders import Mistake
from teaching.graders.ch04_data_parallel import right_buckets
from teaching.graders.ch04_toy import alone, expect_gradients
from teaching.graders.ranks import Wire, factor, on_ranks, per_rank, source_file
from tests.exercises import common
from tests.exercises.common import Chapter
from tests.exercises.grading import Grading
from tests.tiers import exhaustive, tiered

CHAPTER = Chapter("ch04_data_parallel")
NAMES = {
    "4.1": "average_gradients",
    "4.2": "assign_buckets",
    "4.3": "HookedDataParallel",
    "4.4": "BucketedDataParallel",
}


class TestGrading(Grading):
    chapter = CHAPTER


def solution(exercise_id):
    exercise = CHAPTER.exercises[exercise_id]
    return load(exercise, ROOT / exercise.solution_file)[NAMES[exercise_id]]


def weights(*lengths):
    """A model that is nothing but vectors w0, w1, ..."""
    model = nn.Module()
    for index, length in enumerate(lengths):
        model.register_parameter(f"w{index}", nn.Parameter(torch.zeros(length)))
    return model


def backward(model, *gradients):
    """Let backward() arrive at these gradients; None is a weight that is not used."""
    used = [
        (p, torch.tensor(g))
        for p, g in zip(model.parameters(), gradients, strict=True)
        if g is not None
    ]
    sum((p * g).sum() for p, g in used).backward()


def grads(model):
    return [p.grad.tolist() for p in model.parameters()]


def test_the_examples_in_the_docstrings_are_true():
    average, hooked, bucketed = map(solution, ("4.1", "4.3", "4.4"))

    def examples(group):
        rank = group.rank()
        one, unused, two, three = weights(2), weights(2), weights(2), weights(1, 2)

        backward(one, [[1.0, 2.0], [3.0, 6.0]][rank])
        average(one, group)
        if rank == 0:
            backward(unused, [1.0, 2.0])
        average(unused, group)

        parallel = hooked(two, group)
        backward(two, [[1.0, 2.0], [3.0, 6.0]][rank])
        parallel.finish()

        parallel = bucketed(three, group)
        backward(three, [[6.0], None][rank], [[2.0, 4.0], [4.0, 8.0]][rank])
        parallel.finish()
        return [grads(model) for model in (one, unused, two, three)]

    right = [[[2.0, 4.0]], [[0.5, 1.0]], [[2.0, 4.0]], [[3.0], [3.0, 6.0]]]
    assert run(by_value(examples), 2) == [right, right]

    assign = solution("4.2")
    assert assign([40, 10, 20, 30], 50) == [[3, 2], [1, 0]]
    assert assign([40, 10, 20, 30], 45) == [[3], [2, 1], [0]]


def by_value(function):
    """The solutions' module is known to this process alone."""
    cloudpickle.register_pickle_by_value(sys.modules["exercises.ch04_data_parallel"])
    return function


@exhaustive
def test_the_answers_train_as_one_process_does():
    average, hooked, bucketed = map(by_value, map(solution, ("4.1", "4.3", "4.4")))

    def small_buckets(model, group):
        return bucketed(model, group, 2000)

    for apply in (after_backward(average), hooked, small_buckets):
        assert_same_training(apply, 3, num_micro_batches=2)


@pytest.mark.parametrize("function", tiered([assign_buckets, average_gradients]))
def test_the_packages_functions_pass_the_graders(function):
    verdict = CHAPTER.grade(function.__name__, function)
    assert verdict.state == "passed", verdict


def test_the_graders_buckets_are_the_packages():
    generator = torch.Generator().manual_seed(0)
    for bucket_bytes in range(1, 60, 3):
        sizes = torch.randint(0, 40, (12,), generator=generator).tolist()
        assert right_buckets(sizes, bucket_bytes) == assign_buckets(sizes, bucket_bytes)


def test_zeros_are_not_blamed_on_the_divisor():
    right = alone(2)[0]
    zeros = {name: None if grad is None else 0 * grad for name, grad in right.mean.items()}
    with pytest.raises(Mistake) as caught:
        expect_gradients([zeros, zeros], right)
    assert "ranks 0, 1: zeros" in caught.value.seen
    assert "every rank sent zeros" in caught.value.likely


def test_use_reaches_the_package_inside_a_rank(tmp_path):
    shutil.copytree(ROOT / "solutions", tmp_path / "solutions")
    (tmp_path / "exercises").mkdir()
    name = CHAPTER.exercises["4.3"].file
    shutil.copy(ROOT / CHAPTER.exercises["4.3"].solution_file, tmp_path / name)

    def whose(group, root):
        from minitron.parallel.data.ddp import apply_hooked_data_parallel
        from teaching.use import use

        with use("4.3", root=root):
            model = weights(2)
            parallel = apply_hooked_data_parallel(model, group)
            backward(model, [2.0 * group.rank(), 4.0])
            parallel.finish()
        return type(parallel).__module__, grads(model)

    for module, gradients in run(whose, 2, tmp_path):
        assert (module, gradients) == ("exercises.ch04_data_parallel", [[1.0, 4.0]])


# What every chapter's graders of many ranks rest on


def trial_of_calls(group, answer):
    x = torch.full((3,), 1.0 + group.rank())
    with Wire(allowed={"all_reduce", "send", "recv"}) as wire:
        seen = answer(x, group, wire)
    return seen, [call.op for call in wire.calls], [name for name, _ in wire.events]


def test_what_is_sent_arrives_when_it_is_waited_for():
    def answer(x, group, wire):
        work = dist.all_reduce(x, group=group, async_op=True)
        wire.note("before")
        before = x.tolist()
        work.wait()
        return before, x.tolist()

    ((zero, one),) = on_ranks(trial_of_calls, answer, sizes=(2,)).values()
    events = ["all_reduce", "before", "wait"]
    assert zero == (([1.0] * 3, [3.0] * 3), ["all_reduce"], events)
    assert one == (([2.0] * 3, [3.0] * 3), ["all_reduce"], events)


def test_a_message_arrives_when_it_is_waited_for():
    def answer(x, group, wire):
        other = 1 - group.rank()
        into = torch.zeros(3)
        works = [
            dist.isend(x, group=group, group_dst=other),
            dist.irecv(into, group=group, group_src=other),
        ]
        before = into.tolist()
        for work in works:
            work.wait()
        return before, into.tolist()

    ((zero, one),) = on_ranks(trial_of_calls, answer, sizes=(2,)).values()
    assert zero[0] == ([0.0] * 3, [2.0] * 3) and one[0] == ([0.0] * 3, [1.0] * 3)
    assert sorted(zero[1]) == ["recv", "send"]


def mistake_of(answer, **options):
    with pytest.raises(Mistake) as caught:
        on_ranks(trial_of_calls, answer, **options)
    return caught.value


def test_an_error_shows_the_answers_own_lines_and_its_rank():
    def answer(x, group, wire):
        if group.rank() == 1:
            raise KeyError("mine")
        dist.all_reduce(x, group=group)

    mistake = mistake_of(answer, sizes=(1, 2))
    assert "2 ranks, rank 1:" in mistake.seen and "KeyError: 'mine'" in mistake.seen
    assert 'raise KeyError("mine")' in mistake.seen and "in _on_rank" not in mistake.seen
    assert "your code raised KeyError" in mistake.likely


def test_a_rank_that_dies_is_told_apart_from_a_hang():
    def answer(x, group, wire):
        if group.rank() == 1:
            os._exit(3)
        dist.all_reduce(x, group=group)

    mistake = mistake_of(answer, sizes=(2,))
    assert "rank 1 exited with code 3" in mistake.seen and "os._exit" in mistake.likely


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (
            lambda x, group: dist.broadcast(x, group=group, group_src=0),
            "broadcast is called; use only all_reduce and recv and send",
        ),
        (lambda x, group: dist.all_reduce(x), "all_reduce is called without group=group"),
    ],
)
def test_other_calls_and_other_groups_are_refused(call, says):
    def answer(x, group, wire):
        call(x, group)

    assert says in mistake_of(answer, sizes=(2, 1)).seen


def test_ranks_that_do_not_match_and_ranks_that_hang_are_named():
    def other_sizes(x, group, wire):
        dist.all_reduce(x[group.rank() :].clone(), group=group)

    mistake = mistake_of(other_sizes, sizes=(2,), stuck="because")
    assert "12 B" in mistake.seen and "8 B" in mistake.seen and mistake.likely == "because"

    def rank_0_alone(x, group, wire):
        if group.rank() == 0:
            dist.all_reduce(x, group=group)

    mistake = mistake_of(rank_0_alone, sizes=(2,), timeout=1.0)
    assert "rank 0 waits in all_reduce #0" in mistake.seen and "1 has finished" in mistake.seen
    assert "the same calls in the same order" in mistake.likely


def test_words():
    assert per_rank(["a", "b", "a"]) == "ranks 0, 2: a; rank 1: b"
    assert per_rank({1: "two\nlines", 3: "c"}) == "rank 1:\ntwo\nlines\nrank 3: c"
    x = torch.tensor([1.0, -2.0])
    assert factor(3 * x, x) == pytest.approx(3.0) and factor(x + 1, x) is None
    assert source_file(Chapter) == source_file(Chapter.grade) == common.__file__
