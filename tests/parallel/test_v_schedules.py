"""Schedules in the shape of a V: as drawn, and as PyTorch has them, action by action."""

from itertools import pairwise

import pytest
from torch.distributed.pipelining import schedules as pytorch

from minitron.config import ConfigError
from minitron.parallel.pipeline.schedules import Action, one_forward_one_backward
from minitron.parallel.pipeline.v_schedules import dualpipe_v, zb_v

KINDS = {"FORWARD": "F", "FULL_BACKWARD": "B", "BACKWARD_INPUT": "I", "BACKWARD_WEIGHT": "W"}


def lines(schedule):
    """What each rank does, as one string; an apostrophe for its second stage, on the way up."""
    p = schedule.num_ranks
    return [
        " ".join(f"{action}" + "'" * (action.stage // p) for action in actions)
        for actions in schedule.actions
    ]


def test_zb_v_as_drawn():
    """Two ranks: the last one turns round at once, the first one ends with a W of its first."""
    assert lines(zb_v(2, 4)) == [
        "F0 F1 F2 F0' I0' W0' F1' I1' W1' F3 I0 W0 F2' I2' W2' I1 W1 F3' I3' W3' I2 W2 I3 W3",
        "F0 F0' F1 F1' I0' W0' F2 I0 W0 F2' I1' W1' F3 I1 W1 F3' I2' W2' I2 I3' I3 W2 W3' W3",
    ]


def test_dualpipe_v_as_drawn_and_which_passes_are_a_pair():
    schedule = dualpipe_v(2, 4)
    assert lines(schedule) == [
        "F0 F1 F2 F0' I0' W0' F1' F3 B1' F2' B0 B2' F3' B1 B3' I2 W2 I3 W3",
        "F0 F0' F1 F1' F2 B0' F2' B0 F3 B1' F3' B1 B2' B2 I3' I3 W3' W3",
    ]
    assert sorted(map(str, schedule.overlapped)) == 2 * ["F2"] + 4 * ["F3"]
    assert Action("F", 2, 1) not in schedule.overlapped, "the last rank's first pair"
    for actions in schedule.actions:
        for one, other in pairwise(actions):
            assert one not in schedule.overlapped or other.kind == "B"
            assert other.stage != one.stage or one not in schedule.overlapped
    assert not zb_v(2, 4).overlapped and not one_forward_one_backward(2, 4).overlapped


def test_the_stages_lie_in_a_v():
    for make in (zb_v, dualpipe_v):
        schedule = make(3, 6)
        assert [schedule.stages_of(rank) for rank in range(3)] == [[0, 5], [1, 4], [2, 3]]


def test_dualpipe_v_refuses_fewer_micro_batches_than_stages():
    with pytest.raises(ConfigError) as error:
        dualpipe_v(4, 7)
    assert str(error.value) == (
        "7 micro-batches do not fill DualPipeV on 4 ranks: it needs 2 for each rank; use 8 or more"
    )


def theirs(schedule_class, p, m):
    """PyTorch's lists, and the forward passes that it overlaps with a backward pass."""
    lists, overlapped = [], set()
    for rank in range(p):
        schedule = object.__new__(schedule_class)  # its constructor wants a process group
        schedule.rank, schedule.pp_group_size, schedule.num_stages = rank, p, 2 * p
        schedule._n_microbatches = m
        actions = []
        for each in filter(None, schedule._calculate_single_rank_operations(rank)):
            parts = [
                Action(KINDS[part.computation_type.name], part.microbatch_index, part.stage_index)
                for part in each.sub_actions or (each,)
            ]
            overlapped.update(parts[: len(parts) - 1])
            actions += parts
        lists.append(tuple(actions))
    return tuple(lists), overlapped


@pytest.mark.parametrize("p", [1, 2, 3, 4, 5, 6])
def test_pytorch_has_the_same_lists(p):
    """Run on PyTorch 2.13; both classes have been there since 2.9."""
    for m in range(1, 20):
        assert (zb_v(p, m).actions, set()) == theirs(pytorch.ScheduleZBVZeroBubble, p, m)
    for m in range(2 * p, 20):
        schedule = dualpipe_v(p, m)
        assert (schedule.actions, schedule.overlapped) == theirs(pytorch.ScheduleDualPipeV, p, m)
