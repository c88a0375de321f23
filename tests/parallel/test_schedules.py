"""Schedules as the papers draw them, action by action."""

import pytest

from minitron.config import ConfigError
from minitron.parallel.pipeline.schedules import (
    Action,
    breadth_first,
    gpipe,
    interleaved,
    one_forward_one_backward,
    sequential,
    zero_bubble,
)


def lines(schedule):
    """What each rank does, as one string; an apostrophe for its second stage, two for its third."""
    p = schedule.num_ranks
    return [
        " ".join(f"{action}" + "'" * (action.stage // p) for action in actions)
        for actions in schedule.actions
    ]


def test_sequential_and_gpipe_do_the_same_on_every_rank():
    assert lines(sequential(2, 3)) == 2 * ["F0 B0 F1 B1 F2 B2"]
    assert lines(gpipe(2, 3)) == 2 * ["F0 F1 F2 B0 B1 B2"]


def test_1f1b_as_drawn():
    """Narayanan et al. 2021, figure 4 above."""
    assert lines(one_forward_one_backward(4, 8)) == [
        "F0 F1 F2 F3 B0 F4 B1 F5 B2 F6 B3 F7 B4 B5 B6 B7",
        "F0 F1 F2 B0 F3 B1 F4 B2 F5 B3 F6 B4 F7 B5 B6 B7",
        "F0 F1 B0 F2 B1 F3 B2 F4 B3 F5 B4 F6 B5 F7 B6 B7",
        "F0 B0 F1 B1 F2 B2 F3 B3 F4 B4 F5 B5 F6 B6 F7 B7",
    ]


def test_1f1b_with_fewer_micro_batches_than_ranks_is_all_warm_up_first():
    assert lines(one_forward_one_backward(4, 2)) == [
        "F0 F1 B0 B1",
        "F0 F1 B0 B1",
        "F0 F1 B0 B1",
        "F0 B0 F1 B1",
    ]


def test_interleaved_as_drawn():
    """Narayanan et al. 2021, figure 4 below: 4 ranks, 8 micro-batches, 2 chunks a rank."""
    assert lines(interleaved(4, 8, 2)) == [
        "F0 F1 F2 F3 F0' F1' F2' F3' F4 F5 F6 B0' F7 B1' F4' B2' F5' B3' F6' B0 F7' B1 "
        "B2 B3 B4' B5' B6' B7' B4 B5 B6 B7",
        "F0 F1 F2 F3 F0' F1' F2' F3' F4 B0' F5 B1' F6 B2' F7 B3' F4' B0 F5' B1 F6' B2 F7' B3 "
        "B4' B5' B6' B7' B4 B5 B6 B7",
        "F0 F1 F2 F3 F0' F1' F2' B0' F3' B1' F4 B2' F5 B3' F6 B0 F7 B1 F4' B2 F5' B3 F6' B4' "
        "F7' B5' B6' B7' B4 B5 B6 B7",
        "F0 F1 F2 F3 F0' B0' F1' B1' F2' B2' F3' B3' F4 B0 F5 B1 F6 B2 F7 B3 F4' B4' F5' B5' "
        "F6' B6' F7' B7' B4 B5 B6 B7",
    ]


def test_interleaved_of_one_chunk_is_1f1b_with_a_longer_warm_up():
    assert lines(interleaved(2, 4, 1)) == ["F0 F1 F2 B0 F3 B1 B2 B3", "F0 B0 F1 B1 F2 B2 F3 B3"]


def test_interleaved_takes_its_stages_round_the_ranks():
    schedule = interleaved(3, 3, 2)
    assert [schedule.stages_of(rank) for rank in range(3)] == [[0, 3], [1, 4], [2, 5]]
    assert schedule.rank_of == {0: 0, 1: 1, 2: 2, 3: 0, 4: 1, 5: 2}
    assert (schedule.num_ranks, schedule.num_stages) == (3, 6)


def test_interleaved_refuses_what_it_cannot_group():
    with pytest.raises(ConfigError) as error:
        interleaved(4, 6, 2)
    assert str(error.value) == (
        "6 micro-batches are not divisible by 4 ranks: 2 chunks need groups of 4; use 8"
    )


def test_zb_h1_puts_the_weights_off_by_as_many_micro_batches_as_the_rank_says():
    """ZB-H1 of Qi et al. 2023, section 2.2, whose B is I here."""
    assert lines(zero_bubble(4, 5)) == [
        "F0 F1 F2 F3 I0 W0 F4 I1 W1 I2 W2 I3 W3 I4 W4",
        "F0 F1 F2 I0 F3 I1 W0 F4 I2 W1 I3 W2 I4 W3 W4",
        "F0 F1 I0 F2 I1 F3 I2 W0 F4 I3 W1 I4 W2 W3 W4",
        "F0 I0 F1 I1 F2 I2 F3 I3 W0 F4 I4 W1 W2 W3 W4",
    ]


def test_breadth_first_goes_through_one_stage_after_the_other():
    assert lines(breadth_first(2, 2, 2)) == 2 * ["F0 F1 F0' F1' B0' B1' B0 B1"]


def test_zb_h1_with_chunks_defers_by_as_many_passes_as_the_rank_says():
    schedule = zero_bubble(2, 2, 2)
    assert lines(schedule) == [
        "F0 F1 F0' F1' I0' W0' I1' W1' I0 W0 I1 W1",
        "F0 F1 F0' I0' F1' I1' W0' I0 W1' I1 W0 W1",
    ]
    with pytest.raises(ConfigError, match="^3 micro-batches are not divisible by 2 ranks: 2 "):
        zero_bubble(2, 3, 2)


@pytest.mark.parametrize("make", [sequential, gpipe, one_forward_one_backward, zero_bubble])
def test_one_rank_needs_nobody(make):
    assert [action.micro_batch for action in make(1, 3).actions[0] if action.kind == "F"] == [
        0,
        1,
        2,
    ]
    assert make(1, 3).num_stages == 1


def test_what_an_action_needs():
    schedule, halves = one_forward_one_backward(3, 2), zero_bubble(3, 2)
    first, middle, last = 0, 1, 2
    assert schedule.needs(Action("F", 1, first)) == []
    assert schedule.needs(Action("F", 1, middle)) == [Action("F", 1, first)]
    assert schedule.needs(Action("B", 1, last)) == [Action("F", 1, last)]
    assert schedule.needs(Action("B", 1, middle)) == [Action("F", 1, middle), Action("B", 1, last)]
    assert halves.needs(Action("I", 0, middle)) == [Action("F", 0, middle), Action("I", 0, last)]
    assert halves.needs(Action("W", 0, middle)) == [Action("I", 0, middle)], "and nobody else"
