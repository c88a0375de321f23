"""The exercises of chapter 6: their examples, the package under the graders, and live bytes."""

import sys
from functools import partial

import cloudpickle
import pytest
import torch
import torch.distributed as dist
from torch import nn

from minitron.comm.collectives import all_gather_single, reduce_scatter_single
from minitron.launch import run
from minitron.parallel import flat
from teaching.exercises import ROOT, load
from teaching.graders.ch06_toy import Held, ShardWire, cut, storage_bytes
from teaching.graders.ch06_zero import right_ranges
from teaching.graders.ranks import on_ranks
from tests.exercises.common import Chapter
from tests.exercises.grading import Grading
from tests.tiers import exhaustive

CHAPTER = Chapter("ch06_zero")


class TestGrading(Grading):
    chapter = CHAPTER


def solution(exercise_id):
    exercise = CHAPTER.exercises[exercise_id]
    (answer,) = load(exercise, ROOT / exercise.solution_file).values()
    cloudpickle.register_pickle_by_value(sys.modules["exercises.ch06_zero"])
    return answer


class Dot(nn.Module):
    """Vectors by name, each multiplied by a factor: None is a vector that is not used."""

    def __init__(self, **weights):
        super().__init__()
        for name, values in weights.items():
            self.register_parameter(name, nn.Parameter(torch.tensor(values)))

    def forward(self, *factors):
        used = zip(self.parameters(), factors, strict=True)
        return sum((p * torch.tensor(x)).sum() for p, x in used if x is not None)


def test_the_ranges_examples_are_true():
    owned_ranges = solution("6.1")
    assert owned_ranges([3, 4], 2, 0) == [range(3), range(1)]
    assert owned_ranges([3, 4], 2, 1) == [range(0), range(1, 4)]


def test_the_examples_on_two_ranks_are_true():
    Optimizer, Gradients, Unit = map(solution, ("6.2", "6.3", "6.4"))

    def examples(group):
        rank = group.rank()
        model = Dot(w=[1.0, 2.0, 3.0])
        sharded = Optimizer(model, group, partial(torch.optim.SGD, lr=1.0))
        model([[6.0, 0.0, 0.0], [0.0, 0.0, 8.0]][rank]).backward()
        step = sharded.step(2.5).item(), model.w.tolist()

        model = Dot(a=[0.0], b=[0.0, 0.0])
        sharded = Gradients(model, group, 1000)
        for _ in range(2):
            model([[6.0], None][rank], [[2.0, 4.0], [4.0, 8.0]][rank]).backward()
            sharded.finish()
        handed_over = [shard.tolist() for shard in sharded.shards]

        model = Dot(w=[1.0, 2.0, 3.0])
        unit = Unit(model, group)
        shard, held = unit.shard.tolist(), storage_bytes(model)
        model([[1.0, 2.0, 3.0], [3.0, 2.0, 1.0]][rank]).backward()
        return step, handed_over, (shard, held, unit.shard.grad.tolist())

    step = pytest.approx(5.0), [-0.5, 2.0, 1.0]
    assert run(examples, 2) == [
        (step, [[6.0, 12.0]], ([1.0, 2.0], 0, [2.0, 2.0])),
        (step, [[6.0, 0.0]], ([3.0, 0.0], 0, [2.0, 0.0])),
    ]


def test_the_packages_ranges_pass_the_grader():
    verdict = CHAPTER.grade("owned_ranges", flat.owned_ranges)
    assert verdict.state == "passed", verdict


def test_right_ranges_share_out_every_element_once():
    for num_ranks in (1, 2, 3, 5):
        for number, size in enumerate(sizes := [4, 0, 7, 1]):
            owned = [
                i for rank in range(num_ranks) for i in right_ranges(sizes, num_ranks, rank)[number]
            ]
            assert owned == list(range(size))


def test_shards_are_cut_with_zeros_behind():
    pieces = cut([torch.tensor([[1.0, 2.0]]), torch.tensor(3.0)], 2)
    assert [piece.tolist() for piece in pieces] == [[1.0, 2.0], [3.0, 0.0]]


# What the graders rest on


def test_held_counts_what_lives_at_the_size_it_has():
    outside = torch.ones(100)
    with Held() as held:
        made = outside + 1
        view, also_outside = made[:10], outside[:10]
        assert held.now() == held.peak == 400
        made.untyped_storage().resize_(0)
        assert (held.now(), held.peak) == (0, 400)
        made.untyped_storage().resize_(400)
        outside.add_(1)
        del made
        assert held.now() == 400
        del view
        assert held.now() == 0
    assert also_outside.sum() == 20


def test_held_sees_what_autograd_alone_refers_to():
    with Held() as held:
        weight = nn.Parameter(torch.ones(10, 10))
        y = (torch.ones(1, 10, requires_grad=True) @ weight.t()).sum()
        weight.data = torch.empty(0)
        assert held.now() >= 400
        del y
        assert held.now() == 0


def trial_of_arrival(group, call):
    with ShardWire(allowed={"reduce_scatter", "all_gather"}) as wire:
        output, work = call(group)
        before = output.tolist()
        work.wait()
        work.wait()
        return before, output.tolist(), [name for name, _ in wire.events]


@pytest.mark.parametrize(
    ("names", "right"),
    [
        (("reduce_scatter_single", "reduce_scatter"), [[4.0], [6.0]]),
        (("all_gather_single", "all_gather"), [[1.0, 3.0], [1.0, 3.0]]),
    ],
)
def test_shards_arrive_when_they_are_waited_for(names, right):
    name, op = names

    def call(group):
        mine = torch.tensor([1.0, 2.0]) + 2 * group.rank()
        if name == "all_gather_single":
            output = torch.zeros(2)
            return output, all_gather_single(output, mine[:1], group, async_op=True)
        output = torch.zeros(1)
        return output, reduce_scatter_single(output, mine, group, async_op=True)

    ((zero, one),) = on_ranks(trial_of_arrival, call, sizes=(2,)).values()
    for rank, seen in enumerate((zero, one)):
        before, after, events = seen
        assert not any(before) and after == right[rank]
        assert events[:2] == [op, "wait"]


def test_lists_of_tensors_arrive_too():
    def call(group):
        outputs = [torch.zeros(1), torch.zeros(1)]
        work = dist.all_gather(outputs, torch.ones(1), group=group, async_op=True)
        return outputs[1], work

    seen = on_ranks(trial_of_arrival, call, sizes=(2,))[2]
    assert [(before, after) for before, after, _ in seen] == [([0.0], [1.0])] * 2


def unit_that_keeps(when):
    Unit = solution("6.4")

    class Keeps(Unit):
        def __init__(self, module, group):
            if when == "after __init__":
                self.kept = [p.detach().clone() for p in module.parameters()]
            super().__init__(module, group)

        def collect(self, parameter):
            if when == "at the peak of backward":
                self.kept = [torch.zeros_like(p) for p in self.parameters]
            super().collect(parameter)

    return Keeps


@exhaustive  # graded mistakes of 6.4 hold too much, too
@pytest.mark.parametrize("when", ["at the peak of backward", "after __init__"])
def test_bytes_that_a_unit_hides_are_found(when):
    verdict = CHAPTER.grade("ShardedUnit", unit_that_keeps(when))
    assert verdict.state == "failed" and f"{when} " in verdict.seen
