"""The exercises of chapter 11: their examples, the package under the graders, and the judges."""

import sys
from itertools import product
from math import prod

import cloudpickle
import pytest
import torch
import torch.distributed as dist

from minitron.comm.mesh import make_mesh
from minitron.config import ModelConfig
from minitron.cost import num_parameters
from minitron.launch import RankError, run
from minitron.launch.rank_process import Failure
from minitron.parallel.flat import owned_ranges
from teaching.exercises import ROOT, load
from teaching.graders import (
    Mistake,
    ch11_capstone,
    ch11_groups,
    ch11_layouts,
    ch11_reshard,
)
from teaching.graders.ch11_places import GRIDS
from tests.exercises.common import Chapter
from tests.exercises.grading import Grading
from tests.exercises.mutants.ch11_all_axes import FURTHER
from tests.tiers import tiered

CHAPTER = Chapter("ch11_all_axes")


class TestGrading(Grading):
    chapter = CHAPTER


def solution(exercise_id):
    exercise = CHAPTER.exercises[exercise_id]
    answers = load(exercise, ROOT / exercise.solution_file).values()
    cloudpickle.register_pickle_by_value(sys.modules["exercises.ch11_all_axes"])
    return list(answers)


def test_the_examples_of_places_and_groups_are_true():
    place_of, rank_at = solution("11.1")
    groups_along, axes_of, _ = solution("11.2")
    axes = {"pp": 2, "dp": 3, "tp": 2}
    assert place_of(9, axes) == {"pp": 1, "dp": 1, "tp": 1}
    assert rank_at({"tp": 1, "dp": 1, "pp": 1}, axes) == 9
    axes = {"pp": 2, "dp": 1, "tp": 2}
    assert groups_along("tp", axes) == [[0, 1], [2, 3]]
    assert groups_along("pp", axes) == [[0, 2], [1, 3]]
    assert groups_along("dp", axes) == [[0], [1], [2], [3]]
    assert axes_of("matrix", 0, False) == {"dp"}


def test_the_example_of_the_norm_is_true():
    *_, gradient_norm = solution("11.2")

    def example(group):
        mesh = make_mesh("cpu", pp=1, dp=1, tp=2)
        groups = {axis: mesh.group(axis) for axis in mesh.axes}
        cut = torch.tensor([[3.0, 4.0][group.rank()]])
        gradients = {"matrix": cut, "norm": torch.tensor([5.0])}
        return float(gradient_norm(gradients, {"matrix"}, 0, groups))

    assert run(example, 2) == [pytest.approx(50**0.5)] * 2 == [pytest.approx(7.07, abs=0.01)] * 2


def test_the_examples_of_layouts_and_pieces_are_true():
    (layouts,), (pieces,) = solution("11.3"), solution("11.4")
    model = ModelConfig(num_heads=4, num_kv_heads=4, num_layers=2)

    def needed(dp, tp, pp, zero):
        return 1 if tp * pp == 4 else 10

    assert layouts(model, 8, 4, 8, 5, needed) == [
        (2, 2, 2, 0),
        (2, 2, 2, 1),
        (2, 4, 1, 0),
        (2, 4, 1, 1),
        (2, 4, 1, 2),
        (2, 4, 1, 3),
    ]
    assert pieces(7, 2, 3) == [
        [(0, range(3), range(3))],
        [(0, range(3, 4), range(1)), (1, range(2), range(1, 3))],
        [(1, range(2, 3), range(1))],
    ]


@pytest.mark.parametrize(
    ("name", "answer", "says"),
    tiered(
        (name, answer, says)
        for name, answers in FURTHER.items()
        for answer, says in answers.items()
    ),
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_further_mistakes_are_recognized(name, answer, says):
    verdict = CHAPTER.grade(name, answer)
    assert verdict.state == "failed" and says in f"{verdict.seen}\n{verdict.likely}"


# What the graders rest on


def groups_of_mesh(group):
    found = {}
    for number, axes in enumerate(ch11_groups.MESHES):
        mesh = make_mesh("cpu", **axes)
        for axis in axes:
            found[number, axis] = dist.get_process_group_ranks(mesh.group(axis))
    return found


def test_the_judge_of_groups_agrees_with_the_mesh():
    for rank, found in enumerate(run(groups_of_mesh, ch11_groups.NUM_RANKS)):
        for (number, axis), members in found.items():
            groups = ch11_groups.right_groups(axis, ch11_groups.MESHES[number])
            assert members in groups and rank in members


@pytest.mark.parametrize("axes", GRIDS, ids=str)
def test_every_rank_is_in_one_group_of_each_axis(axes):
    for axis, size in axes.items():
        groups = ch11_groups.right_groups(axis, axes)
        assert sorted(sum(groups, [])) == list(range(prod(axes.values())))
        assert {len(group) for group in groups} == {size}


def test_each_axis_of_an_event_has_its_reason():
    for event, zero, sequence in product(ch11_groups.EVENTS, (0, 1), (False, True)):
        right = ch11_groups.right_axes(event, zero, sequence)
        for axis in ("pp", "dp", "tp"):
            reasons = ch11_groups.TOO_FEW if axis in right else ch11_groups.TOO_MANY
            assert reasons[axis, event]


@pytest.mark.parametrize("zero", [0, 1])
def test_every_fault_of_a_norm_is_told_from_the_right_one(zero):
    axes = ch11_groups.MESHES[0]
    right = ch11_groups.right_norm(axes)
    values = [right, *ch11_groups.faults(axes, zero).values()]
    assert all(abs(a / b - 1) > 1e-3 for n, a in enumerate(values) for b in values[:n])


def test_some_ranks_have_no_gradient():
    axes = ch11_groups.MESHES[1]
    assert not ch11_groups.gradients_at({"pp": 1, "dp": 0, "tp": 0}, axes, 0)
    axes = ch11_groups.MESHES[0]
    assert "bias" not in ch11_groups.gradients_at({"pp": 0, "dp": 1, "tp": 0}, axes, 1)


def test_each_condition_of_a_layout_decides_in_some_case():
    decides = set()
    for case in ch11_layouts.cases():
        sizes = [n for n in range(1, case.num_gpus + 1) if case.num_gpus % n == 0]
        for layout in product(sizes, sizes, sizes, range(4)):
            holds = list(ch11_layouts.conditions(case, layout).values())
            if holds.count(False) == 1:
                decides.add(holds.index(False))
    assert decides == set(range(8))  # the ninth is the range of zero


def test_some_case_of_layouts_has_no_answer_and_one_has_many():
    num_found = [len(ch11_layouts.right_layouts(case)) for case in ch11_layouts.cases()]
    assert min(num_found) == 0 and max(num_found) > 20 and num_found[-1] > 0


@pytest.mark.parametrize("num_ranks", [1, 3, 4])
def test_the_judge_of_pieces_cuts_as_the_package_does(num_ranks):
    for num_elements in (1, 7, 12):
        shards = [owned_ranges([num_elements], num_ranks, rank)[0] for rank in range(num_ranks)]
        assert [list(own) for own in shards] == [
            list(own) for own in ch11_reshard.shards(num_elements, num_ranks)
        ]


def test_the_stories_of_the_capstone_are_the_same_every_time():
    tokens = ch11_capstone.tokens.__wrapped__()
    assert torch.equal(tokens, ch11_capstone.tokens())
    assert int(tokens.max()) < ch11_capstone.MODEL.vocab_size


def test_a_rank_whose_losses_are_not_those_of_one_process_is_named():
    losses = ch11_capstone.losses_of_one_process()
    assert len(losses) == ch11_capstone.STEPS
    seen = [ch11_capstone.Seen({}, list(losses)) for _ in range(3)]
    ch11_capstone._expect_same_losses(seen)
    seen[1].losses[-1] += 0.1
    with pytest.raises(Mistake, match=f"rank 1: the losses are .*{seen[1].losses[-1]:.3f}; one"):
        ch11_capstone._expect_same_losses(seen)


@pytest.mark.parametrize(
    ("failures", "says"),
    [
        (
            {3: Failure("raised ValueError: 3 is odd", "ValueError")},
            "the package does not train this layout: raised ValueError: 3 is odd",
        ),
        ({3: Failure("waits in recv #2")}, "8 ranks share the cores"),
    ],
)
def test_a_rank_that_raises_is_not_called_slow(monkeypatch, failures, says):
    def fail(*_, **__):
        raise RankError("rank 3 has failed", failures)

    monkeypatch.setattr(ch11_capstone, "run", fail)
    (layout,) = solution("11.5")
    with pytest.raises(Mistake) as mistake:
        ch11_capstone.grade_11_5(layout)
    assert says in mistake.value.likely


def test_the_capstone_says_the_models_size():
    (layout,) = solution("11.5")
    assert f"{num_parameters(ch11_capstone.MODEL):,} parameters" in layout.__doc__
    assert f"{ch11_capstone.LIMIT:,} bytes" in layout.__doc__
    words = [f"trains {ch11_capstone.STEPS} steps", f"{ch11_capstone.BATCH} sequences of"]
    assert all(text in layout.__doc__ for text in words)
