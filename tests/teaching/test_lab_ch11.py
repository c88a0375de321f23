"""Chapter 11's measurements: layouts, picks among measured layouts, goodput, slow ranks."""

import math
from dataclasses import replace

import pytest
import torch

from minitron import cost
from minitron.launch import run
from minitron.parallel.pipeline.schedules import one_forward_one_backward
from minitron.parallel.pipeline.simulator import simulate
from minitron.plan.estimate import estimate
from minitron.plan.hardware import DEVICES
from minitron.plan.job import Job
from teaching.figures_grid import Piece
from teaching.lab import ch11 as lab
from teaching.lab import reliability, stragglers, trees
from tests.tiers import exhaustive, tiered

JOB = Job(cost.PUBLISHED["Llama 3.2 1B"], 8, DEVICES["H100-SXM-80GB"], 8192, 64)
BATCH = torch.randint(36, (lab.B, lab.S + 1), generator=torch.Generator().manual_seed(0))


def test_every_layout_uses_all_gpus():
    found = list(lab.all_layouts(JOB))
    assert len(found) == len(set(found)) > 20
    for layout in found:
        axes = layout.parallel
        assert axes.dp * axes.tp * axes.pp == 8 and (axes.pp == 1 or axes.zero < 2)
    assert 0 < sum(lab.fits(JOB, layout) for layout in found) < len(found)


def test_a_step_computes_or_waits():
    step = estimate(JOB, next(lab.all_layouts(JOB)))
    waiting = sum(step.parts[part] for part in ("tp", "pp", "dp", "bubble"))
    assert lab.time_of(step).endswith(f"computing, {waiting:.1f} waiting")


def test_by_its_number_in_the_world_a_rank_reads_other_samples():
    class Group:
        def rank(self):
            return 5

        def size(self):
            return 8

    class Parallel:
        data_part = 0, 2

    wrong, right = Parallel(), Parallel()
    lab.samples_by_world_rank(wrong, Group())
    assert wrong.data_part == (5, 8) and right.data_part == (0, 2)


def test_ledger_and_formula_agree_on_every_axis():
    calls, held = zip(*run(lab.ledger_of_a_step, 8, BATCH, watch=False), strict=True)
    for rank in range(8):
        for axis in lab.AXES:
            sent = sum(
                call.sent for call in calls[rank] if call.axis == axis and lab.is_large(call)
            )
            assert sent == lab.formula(axis, rank, held[rank]) > 0
    measured, predicted, rest = lab.bytes_by_axis(calls, held)
    assert measured == predicted and list(measured)[:2] == ["tp, stage 0", "tp, stage 1"]
    assert 0 < rest < 0.02
    lanes = lab.axis_lanes(calls, ranks=(0, 4))
    assert list(lanes)[:2] == ["rank 0, tp", "rank 0, dp"] and len(lanes) == 6
    assert all(block.end >= block.start >= 0 for blocks in lanes.values() for block in blocks)


@exhaustive  # three trainings, 8 ranks twice
def test_what_is_clipped_by_a_part_of_the_norm_differs():
    layout = replace(lab.CUBE, zero=0, sequence=False)
    [alone] = run(lab.trained, 1, replace(layout, tp=1, pp=1), lab.unchanged, [BATCH])
    right = run(lab.trained, 8, layout, lab.unchanged, [BATCH], watch=False)
    wrong = run(lab.trained, 8, layout, lab.clip_over(), [BATCH], watch=False)
    assert lab.difference(alone[2], [each[2] for each in right]) == "the same gradients"
    assert "gradient" in lab.difference(alone[2], [each[2] for each in wrong])
    assert right[0][1][0] == pytest.approx(alone[1][0]) != wrong[0][1][0]


# Checkpoints


def test_what_ranks_write_and_read_is_every_element_once():
    written = lab.written_by_ranges((6, 4), (range(0, 5), range(5, 17), range(17, 24)))
    assert written[0] == Piece(0, (0, 0), (1, 4)) and len(written) == 7
    needed = lab.read_by(written, range(6), range(2))
    assert needed[:2] == [Piece(0, (0, 0), (1, 2)), Piece(0, (1, 0), (1, 1))]
    assert sum(math.prod(piece.sizes) for piece in needed) == 12
    assert needed + lab.read_by(written, range(6), range(2, 4)) != written


# Trees


def test_the_tree_is_never_faster_than_the_best():
    judged = trees.against_search(JOB)
    assert judged.ratio >= 1 and judged.tree.job is JOB
    assert judged.ratio == judged.tree.seconds / judged.best.seconds


def test_picks_are_made_among_measured_layouts():
    groups = trees.measured_layouts()
    assert [group.num_gpus for group in groups] == [8, 16, 32, 64]
    for group in groups:
        assert min(group.ratio(row) for row in group.rows) == 1 == group.ratio(group.best)
        assert group.estimated() in group.fitting and group.fewest_cuts() in group.fitting
        assert len(group.fitting) < len(group.rows)
        axes = group.fewest_cuts().decisions[0].parallel
        assert all(
            row.decisions[0].parallel.tp * row.decisions[0].parallel.pp >= axes.tp * axes.pp
            for row in group.fitting
        )


def test_the_rule_of_thumb_holds_where_it_was_measured():
    """What the chapter says: within 6 %, and the estimator within 7 % below its memory limit."""
    for group in trees.measured_layouts():
        assert group.ratio(group.fewest_cuts()) < 1.06
        assert group.ratio(group.estimated()) < 1.07
    assert (
        max(group.ratio(group.estimated(fitting=False)) for group in trees.measured_layouts()) > 2.5
    )


# Goodput and stragglers


def test_youngs_interval_is_best_to_first_order():
    C, M = 60.0, 11_000.0
    best = reliability.young_interval(C, M)
    assert best == math.sqrt(2 * C * M)
    there = reliability.goodput(best, C, 600, M)
    assert all(reliability.goodput(factor * best, C, 600, M) < there for factor in (0.5, 0.9, 1.1))


@pytest.mark.parametrize(("hours", "minutes"), [(24, 117), (6, 57), (0.25, 9.1)])
def test_dalys_interval_is_that_of_his_figures(hours, minutes):
    """Daly 2006, figures 3 to 5: a save takes 5 minutes."""
    found = reliability.daly_interval(5 * 60, hours * 3600) / 60
    assert found == pytest.approx(minutes, rel=0.006)


@pytest.mark.parametrize("M", [200, 11_000])
def test_dalys_interval_is_best_where_failures_strike_at_any_time(M):
    def useful(interval):
        return reliability.expected_goodput(interval, 60, 600, M)

    best = reliability.daly_interval(60, M)
    there = useful(best)
    assert there >= useful(reliability.young_interval(60, M))
    assert all(useful(factor * best) < there for factor in (0.8, 0.9, 1.1, 1.25))
    assert reliability.daly_interval(60, 20) == 20, "a save takes longer than 2 M"


def test_a_restart_that_is_as_fast_as_asked_for_gives_the_goodput():
    C, M = 10.0, 11_000.0
    R = reliability.restart_for(0.9, C, M)
    assert reliability.goodput(reliability.young_interval(C, M), C, R, M) == pytest.approx(0.9)


def test_a_run_without_failures_loses_only_its_saves():
    assert reliability.simulated_goodput(1000, 100, 10, 50, 1e12) == pytest.approx(1 / 1.1)


@pytest.mark.parametrize("interval", [600, 1150, 2000])
def test_simulated_goodput_is_near_the_formula(interval):
    times = interval, 60, 600, 11_000
    simulated = reliability.simulated_goodput(5e7, *times, seed=1)
    assert simulated == pytest.approx(reliability.goodput(*times), rel=0.02)
    assert simulated == pytest.approx(reliability.expected_goodput(*times), rel=0.01)


def test_the_slowest_of_many_is_slower():
    slowest = [reliability.slowest_of(n, 0.02) for n in (1, 8, 1024)]
    assert slowest == sorted(slowest) and slowest[0] == pytest.approx(1, abs=0.01)
    assert slowest[2] == pytest.approx(1 + 0.02 * 3.2, abs=0.005)


ALWAYS, TURNS = stragglers.is_always_rank_1, stragglers.is_in_turn


def test_a_rank_that_is_always_slow_costs_the_same_along_every_axis():
    for axis in stragglers.LAYOUTS:
        assert stragglers.predicted_extra(axis, stragglers.is_never) == 0
        assert stragglers.predicted_extra(axis, ALWAYS) == pytest.approx(8 * stragglers.NAP)


def test_ranks_that_are_slow_in_turn_cost_most_where_they_meet_most_often():
    extra = {axis: stragglers.predicted_extra(axis, TURNS) for axis in stragglers.LAYOUTS}
    naps = {axis: seconds / stragglers.NAP for axis, seconds in extra.items()}
    assert naps == pytest.approx({"tp": 8, "pp": 4, "dp": 2})


def test_stages_of_one_speed_take_as_long_as_the_simulator_says():
    schedule, seconds = one_forward_one_backward(4, 8), {"F": 1, "B": 2}
    played = stragglers.seconds_of_schedule(schedule, lambda action: seconds[action.kind])
    assert played == simulate(schedule, seconds).seconds


@pytest.mark.parametrize("axis", tiered(["dp", "pp", "tp"]))
def test_all_wait_for_a_straggler(axis):
    [slow] = stragglers.measured_steps(axis, [ALWAYS], 1)
    naps = stragglers.predicted_extra(axis, ALWAYS)
    assert all(step.seconds > naps for step in slow), "sleeps cannot be shorter"
    waits = [step.waited for step in slow]
    assert waits[1] == min(waits), "the straggler itself waits least"
    assert min(waits[0], *waits[2:]) > naps / 2
