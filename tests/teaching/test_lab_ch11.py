"""Chapter 11's measurements: layouts, picks among measured layouts, goodput, slow ranks."""

import math
from dataclasses import replace

import pytest
import torch

from minitron import cost
from minitron.launch import run
from minitron.plan.hardware import DEVICES
from minitron.plan.job import Job
from teaching.lab import ch11 as lab
from teaching.lab import reliability, trees
from tests.tiers import exhaustive

JOB = Job(cost.PUBLISHED["Llama 3.2 1B"], 8, DEVICES["H100-SXM-80GB"], 8192, 64)
BATCH = torch.randint(36, (lab.B, lab.S + 1), generator=torch.Generator().manual_seed(0))


def test_every_layout_uses_all_gpus():
    found = list(lab.all_layouts(JOB))
    assert len(found) == len(set(found)) > 20
    for layout in found:
        axes = layout.parallel
        assert axes.dp * axes.tp * axes.pp == 8 and (axes.pp == 1 or axes.zero < 2)
    assert 0 < sum(lab.fits(JOB, layout) for layout in found) < len(found)


def test_ledger_and_formula_agree_on_every_axis():
    calls, held = zip(*run(lab.ledger_of_a_step, 8, BATCH, watch=False), strict=True)
    for rank in range(8):
        for axis in lab.AXES:
            sent = sum(
                call.sent for call in calls[rank] if call.axis == axis and lab.is_large(call)
            )
            assert sent == lab.formula(axis, rank, held[rank]) > 0
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


def test_the_best_interval_is_best():
    C, M = 60.0, 11_000.0
    best = reliability.best_interval(C, M)
    assert best == math.sqrt(2 * C * M)
    there = reliability.goodput(best, C, 600, M)
    assert all(reliability.goodput(factor * best, C, 600, M) < there for factor in (0.5, 0.9, 1.1))


def test_a_run_without_failures_loses_only_its_saves():
    assert reliability.simulated_goodput(1000, 100, 10, 50, 1e12) == pytest.approx(1 / 1.1)


@pytest.mark.parametrize("interval", [600, 1150, 2000])
def test_simulated_goodput_is_near_the_formula(interval):
    simulated = reliability.simulated_goodput(5e7, interval, 60, 600, 11_000, seed=1)
    assert simulated == pytest.approx(reliability.goodput(interval, 60, 600, 11_000), rel=0.02)


def test_the_slowest_of_many_is_slower():
    slowest = [reliability.slowest_of(n, 0.02) for n in (1, 8, 1024)]
    assert slowest == sorted(slowest) and slowest[0] == pytest.approx(1, abs=0.01)
    assert slowest[2] == pytest.approx(1 + 0.02 * 3.2, abs=0.005)


def test_all_wait_for_a_straggler():
    took = run(reliability.step_with_straggler, 3, 0.01, 1, 0.05, 2, watch=False)
    steps, waits = zip(*took, strict=True)
    assert min(steps) >= 0.055, "sleeps cannot be shorter"
    assert waits[1] == min(waits), "the straggler itself waits least"
