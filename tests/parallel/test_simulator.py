"""The simulator equals the papers' formulas exactly, and a clock that ticks."""

import random
from fractions import Fraction
from itertools import product

import pytest

from minitron import cost
from minitron.config import ConfigError
from minitron.parallel.pipeline.schedules import (
    Action,
    Schedule,
    breadth_first,
    gpipe,
    interleaved,
    one_forward_one_backward,
    sequential,
    zero_bubble,
)
from minitron.parallel.pipeline.simulator import simulate
from minitron.parallel.pipeline.v_schedules import dualpipe_v, zb_v
from tests.tiers import tiered

RANKS, MICRO_BATCHES = range(1, 7), (1, 2, 3, 4, 5, 6, 8, 11, 12)
TIMES = [
    (Fraction(1), Fraction(1)),
    (Fraction(1), Fraction(2)),
    (Fraction(5, 3), Fraction(3, 7)),
    (Fraction(1, 10), Fraction(7)),
]
"""Of F and B: equal, as usual, and uneven."""


def agrees(timeline, bubble):
    """Every rank is idle as long as the formula says, in whole and as both shares."""
    num_ranks = len(timeline.passes)
    total = bubble.ideal_seconds + bubble.seconds
    assert timeline.seconds == total
    assert [timeline.busy_seconds(rank) for rank in range(num_ranks)] == [
        bubble.ideal_seconds
    ] * num_ranks
    assert timeline.bubble_of_total == bubble.of_total
    assert timeline.bubble_of_ideal == bubble.of_ideal


@pytest.mark.parametrize(
    ("make", "formula"),
    [
        (sequential, cost.sequential_bubble),
        (gpipe, cost.pipeline_bubble),
        (one_forward_one_backward, cost.pipeline_bubble),
    ],
)
def test_one_stage_a_rank_for_any_number_of_micro_batches(make, formula):
    """216 cases each, with fewer micro-batches than ranks and with more."""
    for p, m, (forward, backward) in product(RANKS, MICRO_BATCHES, TIMES):
        timeline = simulate(make(p, m), {"F": forward, "B": backward})
        agrees(timeline, formula(p, m, forward, backward))


@pytest.mark.parametrize("v", tiered([2, 1, 3, 4]))
def test_interleaved_whenever_the_micro_batches_can_be_grouped(v):
    """72 cases each; a pass through one of v stages takes a v-th of the rank's time."""
    for p, groups, (forward, backward) in product(RANKS, (1, 2, 3), TIMES):
        timeline = simulate(interleaved(p, groups * p, v), {"F": forward / v, "B": backward / v})
        agrees(timeline, cost.pipeline_bubble(p, groups * p, forward, backward, v))


@pytest.mark.parametrize("v", tiered([2, 3]))
def test_gpipe_with_chunks_for_any_number_of_micro_batches_from_ranks_on(v):
    for p, m, (forward, backward) in product(RANKS, MICRO_BATCHES, TIMES):
        if m >= p:
            timeline = simulate(breadth_first(p, m, v), {"F": forward / v, "B": backward / v})
            agrees(timeline, cost.pipeline_bubble(p, m, forward, backward, v))


HALVES = [
    tuple(map(Fraction, times))
    for times in [(1, 1, 1), (2, 1, 1), (1, 2, 1), (3, 2, 1), (3, 4, "1/3"), (1, 1, "9/10")]
]
"""Of F, I and W, where W is no longer than the others."""


def test_zb_h1_from_as_many_micro_batches_as_ranks_on():
    """234 cases."""
    num_cases = 0
    for p, m, (forward, inputs, weights) in product(RANKS, MICRO_BATCHES, HALVES):
        if m >= p:
            timeline = simulate(zero_bubble(p, m), {"F": forward, "I": inputs, "W": weights})
            agrees(timeline, cost.zb_h1_bubble(p, m, forward, inputs, weights))
            num_cases += 1
    assert num_cases == 234


@pytest.mark.parametrize("v", tiered([2, 3, 4]))
def test_zb_h1_with_chunks_whenever_the_micro_batches_can_be_grouped(v):
    """126 cases each."""
    for p, groups, (forward, inputs, weights) in product(RANKS, (1, 2, 3), HALVES):
        timeline = simulate(
            zero_bubble(p, groups * p, v), {"F": forward / v, "I": inputs / v, "W": weights / v}
        )
        agrees(timeline, cost.zb_h1_bubble(p, groups * p, forward, inputs, weights, v))


def test_zb_h1_does_not_reach_its_formula_with_fewer_micro_batches_or_a_long_w():
    """Only m - 1 passes of W can fill what was idle; and one that is too long holds up the next."""
    for p, m, (forward, inputs, weights) in product(RANKS, MICRO_BATCHES, HALVES):
        if m < p:
            seconds = {"F": forward, "I": inputs, "W": weights}
            idle = simulate(zero_bubble(p, m), seconds).seconds - m * sum(seconds.values())
            assert idle == (p - 1) * (forward + inputs) - (m - 1) * weights
            assert idle > cost.zb_h1_bubble(p, m, forward, inputs, weights).seconds
    late = simulate(zero_bubble(4, 8), {"F": 1, "I": 1, "W": 3})
    assert late.seconds > 8 * 5 + cost.zb_h1_bubble(4, 8, 1, 1, 3).seconds


def test_a_v_waits_for_its_first_micro_batch_alone():
    """48 cases; and in ZB-V every rank is busy from its first pass to its last: a zero bubble."""
    for p, m, each in product(RANKS, (12, 13, 15, 24), (Fraction(1), Fraction(2, 3))):
        seconds = {"F": each / 2, "I": each / 2, "W": each / 2, "B": each}
        for make in (zb_v, dualpipe_v):
            timeline = simulate(make(p, m), seconds)
            agrees(timeline, cost.v_bubble(p, m, each))
        for rank, passes in enumerate(simulate(zb_v(p, m), seconds).passes):
            assert passes[-1].end - passes[0].start == timeline.busy_seconds(rank)


def test_zb_v_does_not_reach_its_formula_with_uneven_passes_or_few_micro_batches():
    late = simulate(zb_v(4, 8), {"F": 2, "I": 1, "W": 1})
    assert late.seconds > 2 * 8 * 4 + 3 * 2
    few = simulate(zb_v(4, 3), {"F": 1, "I": 1, "W": 1})
    assert few.seconds > cost.v_bubble(4, 3, 2).seconds + 3 * 6


# Against a clock that ticks

GENERATED = (
    [
        make(p, m)
        for make in (sequential, gpipe, one_forward_one_backward, zero_bubble)
        for p, m in [(1, 2), (2, 3), (3, 2), (4, 6)]
    ]
    + [
        make(p, m, v)
        for make in (interleaved, breadth_first, zero_bubble)
        for p, m, v in [(1, 2, 2), (2, 4, 3), (4, 8, 2)]
    ]
    + [make(p, m) for make in (zb_v, dualpipe_v) for p, m in [(1, 2), (2, 5), (4, 8)]]
)


def tick(schedule, seconds, transfer):
    """Start and end of every action, found by asking all ranks, each second, what they can do."""
    ends, passes = {}, [[] for _ in schedule.actions]
    left, now = sum(map(len, schedule.actions)), 0
    while left:
        for rank, actions in enumerate(schedule.actions):
            own = passes[rank]
            if len(own) == len(actions) or (own and own[-1][2] > now):
                continue
            action = actions[len(own)]
            holder = schedule.rank_of
            arrived = [
                need in ends and ends[need] + (transfer if holder[need.stage] != rank else 0) <= now
                for need in schedule.needs(action)
            ]
            if all(arrived):
                ends[action] = now + seconds[action.kind]
                own.append((action, now, ends[action]))
                left -= 1
        now += 1
    return tuple(map(tuple, passes))


@pytest.mark.parametrize("schedule", GENERATED, ids=lambda s: f"{s.name} {s.num_ranks}")
def test_it_sees_what_a_ticking_clock_sees(schedule):
    draw = random.Random(1)
    for _ in range(3):
        seconds = {kind: draw.randint(1, 5) for kind in "FBIW"}
        transfer = draw.randint(0, 3)
        timeline = simulate(schedule, seconds, transfer)
        assert timeline.passes == tick(schedule, seconds, transfer)


# By hand


def test_two_ranks_by_hand():
    timeline = simulate(gpipe(2, 2), {"F": 1, "B": 2}, transfer_seconds=0.5)
    spans = [
        [(str(each.action), each.start, each.end) for each in rank] for rank in timeline.passes
    ]
    assert spans == [
        [("F0", 0, 1), ("F1", 1, 2), ("B0", 6, 8), ("B1", 8, 10)],
        [("F0", 1.5, 2.5), ("F1", 2.5, 3.5), ("B0", 3.5, 5.5), ("B1", 5.5, 7.5)],
    ]
    assert timeline.seconds == 10 and timeline.busy_seconds(0) == 6
    assert timeline.bubble_of_total == pytest.approx(8 / 20)
    assert timeline.bubble_of_ideal == pytest.approx(8 / 12)


def test_a_message_takes_no_time_within_a_rank():
    seconds = {"F": 1, "B": 1}
    assert simulate(interleaved(1, 2, 3), seconds, 100).seconds == 12
    assert simulate(sequential(3, 1), seconds, 100).seconds == 6 + 4 * 100


def test_what_cannot_run_cannot_be_simulated():
    circle = Schedule("mine", 1, ((Action("B", 0, 0), Action("F", 0, 0)),))
    with pytest.raises(ConfigError, match="stage 0 runs B0 before F0, which it needs"):
        simulate(circle, {"F": 1, "B": 1})
