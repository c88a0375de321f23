"""Chapter 9's measurements measure what they say."""

import pytest
import torch

from minitron import cost
from minitron.launch import run
from minitron.parallel.grid import Grid
from minitron.parallel.pipeline.schedules import Schedule, gpipe, one_forward_one_backward
from minitron.parallel.pipeline.simulator import simulate
from minitron.parallel.pipeline.stages import apply_pipeline_parallel
from teaching.lab import ch09 as lab


def cut(model, group, make_schedule=one_forward_one_backward):
    return Grid(model, pipeline=apply_pipeline_parallel(model, group, make_schedule))


def exchange(group):
    """Rank 0 sends; rank 1 receives; what lies beyond the ends is None."""
    rank, tensor = group.rank(), torch.arange(3.0)
    if rank == 0:
        torch.distributed.send(tensor, group=group, group_dst=1)
    got = lab.receive_from(rank - 1, group, torch.empty(3))
    beyond = lab.receive_from(group.size(), group, tensor)
    return (None if got is None else got.tolist()), beyond


def test_a_rank_receives_from_its_neighbor_and_nothing_beyond_the_ends():
    assert run(exchange, 2) == [(None, None), ([0.0, 1.0, 2.0], None)]


def test_the_spread_of_repeats():
    assert lab.spread([30.2, 10.4, 20.0]) == "20 (10-30)"


def test_a_verdict_is_the_message_in_short_lines():
    def fail():
        raise AssertionError("word " * 40)

    assert lab.verdict(lambda: None) == "runs"
    lines = lab.verdict(fail).splitlines()
    assert len(lines) > 2 and all(len(line) <= 76 for line in lines)


def test_the_tiny_model_learns_and_the_oracle_agrees():
    losses = lab.losses_of(cut, "AdamW")
    assert len(losses) == 30 and losses[-1] < losses[0] / 3
    assert lab.oracle(cut, 2) == "the same training"


def test_the_oracle_names_a_wrong_scale():
    def doubled(model, group):
        parallel = cut(model, group)
        real = parallel.pipeline.run
        parallel.pipeline.run = lambda parts, loss, divisor: real(parts, loss, divisor / 2)
        return parallel

    assert lab.oracle(doubled, 2) != "the same training"


def test_an_emulated_stage_takes_its_time_and_keeps_the_schedules_order():
    steps = lab.emulated_steps(one_forward_one_backward, 2, 2, stage_ms=8, num_steps=2)
    predicted = simulate(one_forward_one_backward(2, 2), {"F": 8, "B": 16})
    assert len(steps) == 2
    for step in steps:
        assert step.seconds >= predicted.seconds * 0.99
        order = [[each.action for each in lane] for lane in step.passes]
        assert order == [[each.action for each in lane] for lane in predicted.passes]
    longer = lab.mean_durations(steps[0])
    assert longer["F"] >= 8 and longer["B"] >= 16


def test_mean_durations_are_by_kind():
    timeline = simulate(gpipe(2, 2), {"F": 1, "B": 3})
    assert lab.mean_durations(timeline) == {"F": 1, "B": 3}


@pytest.mark.parametrize("make_schedule, held", [(gpipe, 3), (one_forward_one_backward, 2)])
def test_the_first_rank_holds_what_its_schedule_says(make_schedule, held):
    found = lab.metered(make_schedule, 2, 3)
    block = cost.activation_bytes_per_layer(lab.SHAPE, 1, 32, bytes_per_value=4)
    assert found[0].peak_activation_bytes / (4 * block) == pytest.approx(held, rel=0.1)
    assert [each.messages_sent for each in found] == [3, 3]
    assert found[0].bytes_sent == 3 * 32 * 64 * 4


def test_repeats_are_timed_each_and_gradients_joined():
    def play(group, schedule):
        with lab.Ledger() as ledger:
            for action in schedule.actions[group.rank()]:
                with ledger.phase(f"{action} stage {group.rank()}"):
                    torch.zeros(1)
        return torch.full((1,), float(group.rank())), ledger.spans

    timelines, grads = lab.play_repeatedly(play, gpipe(2, 2), num_repeats=2)
    assert len(timelines) == 2 and grads.tolist() == [0.0, 1.0]
    assert isinstance(gpipe(2, 2), Schedule)
