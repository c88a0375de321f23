"""The closed forms of a pipeline's length against the simulator, and its stages."""

import random
from itertools import product

import pytest

from minitron.config import ParallelConfig
from minitron.cost.compute import published_llama
from minitron.parallel.pipeline.plan import split_blocks
from minitron.parallel.pipeline.schedule_check import topological_order
from minitron.parallel.pipeline.schedules import (
    breadth_first,
    gpipe,
    interleaved,
    one_forward_one_backward,
    zero_bubble,
)
from minitron.parallel.pipeline.simulator import simulate
from minitron.plan.estimate import Pass, estimate, pipeline_seconds
from minitron.plan.hardware import DEVICES
from minitron.plan.job import Decision, Job
from minitron.plan.operators import Cost
from minitron.plan.systems import MINITRON, blocks_per_rank, even_stages

H100 = DEVICES["H100-SXM-80GB"]
MODEL = published_llama(32, 4096, 32, 32, 14336, 131072, 4096)
SIZES = list(product((2, 4, 8), (1, 2, 4, 8, 16, 24)))


def play(schedule, forward, backward):
    """The simulator, with seconds of their own for each stage."""
    seconds = {
        "F": forward,
        "B": backward,
        "I": [each / 2 for each in backward],
        "W": [each / 2 for each in backward],
    }
    ends, free = {}, [0.0] * schedule.num_ranks
    for action in topological_order(schedule):
        rank = schedule.rank_of[action.stage]
        start = max([free[rank], *(ends[need] for need in schedule.needs(action))])
        ends[action] = free[rank] = start + seconds[action.kind][action.stage]
    return max(free)


def passes_of(forward, backward):
    return [
        tuple(Pass(Cost(matmul=each), 0.0, 0.0, 0.0, 0.0) for each in both)
        for both in zip(forward, backward, strict=True)
    ]


def closed_form(schedule, forward, backward, m, chunks=1):
    parallel = ParallelConfig(pp=len(forward), schedule=schedule, chunks=chunks)
    return pipeline_seconds(passes_of(forward, backward), parallel, m)[0]


@pytest.mark.parametrize(("p", "m"), SIZES)
def test_even_stages_are_as_the_simulator_says(p, m):
    forward, backward = [2.0] * p, [4.0] * p
    halves = {"F": 2.0, "B": 4.0, "I": 2.0, "W": 2.0}
    cases = [("1f1b", one_forward_one_backward), ("gpipe", gpipe)]
    if m >= p:
        cases.append(("zero-bubble", zero_bubble))
    for name, make in cases:
        simulated = simulate(make(p, m), halves).seconds
        assert simulated == play(make(p, m), forward, backward)
        assert closed_form(name, forward, backward, m) == pytest.approx(simulated)
    if m % p == 0:
        chunk = {"F": 1.0, "B": 2.0}
        simulated = simulate(interleaved(p, m, 2), chunk).seconds
        assert closed_form("interleaved", forward, backward, m, 2) == pytest.approx(simulated)
        chunk |= {"I": 1.0, "W": 1.0}
        for name, make in (("gpipe", breadth_first), ("zero-bubble", zero_bubble)):
            simulated = simulate(make(p, m, 2), chunk).seconds
            assert closed_form(name, forward, backward, m, 2) == pytest.approx(simulated)


@pytest.mark.parametrize(("p", "m"), SIZES)
def test_a_heavier_last_stage_is_as_the_simulator_says(p, m):
    """The head: in every schedule."""
    forward, backward = [2.0] * (p - 1) + [3.1], [4.0] * (p - 1) + [6.2]
    cases = [("1f1b", one_forward_one_backward), ("gpipe", gpipe)]
    if m >= p:
        cases.append(("zero-bubble", zero_bubble))
    for name, make in cases:
        assert closed_form(name, forward, backward, m) == pytest.approx(
            play(make(p, m), forward, backward)
        ), name
    if m % p == 0:
        chunks = ([1.0] * (2 * p - 1) + [2.1], [2.0] * (2 * p - 1) + [4.2])
        assert closed_form("interleaved", forward, backward, m, 2) == pytest.approx(
            play(interleaved(p, m, 2), *chunks)
        )


@pytest.mark.parametrize(("p", "m"), SIZES)
def test_uneven_stages_of_1f1b_are_close_to_the_simulator(p, m):
    """Layers that do not divide, lighter or heavier ends, messages that count as work."""
    draw = random.Random(100 * p + m)
    for _ in range(10):
        more = draw.randint(0, p)
        forward = [
            draw.choice((2, 3)) + (rank >= more) + 0.1 * (rank < p - 1)
            for rank in [p] * more + [0] * (p - more)
        ]
        forward[0] *= draw.uniform(0.5, 1)
        forward[-1] *= draw.uniform(0.5, 1.8)
        backward = [2 * each for each in forward]
        simulated = play(one_forward_one_backward(p, m), forward, backward)
        form = closed_form("1f1b", forward, backward, m)
        assert form == pytest.approx(simulated, rel=0.05)


@pytest.mark.parametrize(("p", "m"), SIZES)
@pytest.mark.parametrize("ends", [(0.5, 0.7), (1, 0.4), (0.3, 1), (1.5, 1)])
def test_uneven_ends_of_1f1b_are_as_the_simulator_says(p, m, ends):
    forward = [2.0] * p
    forward[0] *= ends[0]
    forward[-1] *= ends[1]
    backward = [2 * each for each in forward]
    simulated = play(one_forward_one_backward(p, m), forward, backward)
    assert closed_form("1f1b", forward, backward, m) == pytest.approx(simulated)


def test_uneven_stages_of_an_interleaved_schedule_are_close():
    draw = random.Random(0)
    for p, m in ((2, 4), (4, 8), (4, 16), (8, 16)):
        forward = [draw.uniform(2, 3) for _ in range(p)]
        halves = [forward[stage % p] / 2 for stage in range(2 * p)]
        simulated = play(interleaved(p, m, 2), halves, [2 * each for each in halves])
        form = closed_form("interleaved", forward, [2 * each for each in forward], m, 2)
        assert form == pytest.approx(simulated, rel=0.1)


def test_the_rank_that_sets_the_pace_is_the_slowest():
    forward, backward = [1.0, 1.0, 3.0, 1.0], [2.0, 2.0, 6.0, 2.0]
    ranks = passes_of(forward, backward)
    assert pipeline_seconds(ranks, ParallelConfig(pp=4), 32)[1] is ranks[2]


def test_the_bubble_is_the_papers():
    model = published_llama(32, 4096, 32, 32, 14336, 128, 4096)  # next to no head
    for chunks in (1, 2, 4):
        parallel = ParallelConfig(
            dp=1, pp=8, chunks=chunks, schedule="interleaved" if chunks > 1 else "1f1b"
        )
        step = estimate(Job(model, 8, H100, 4096, 16), Decision(parallel))
        work = step.seconds - sum(step.parts[name] for name in ("bubble", "optimizer", "dp"))
        assert step.parts["bubble"] / work == pytest.approx(7 / 16 / chunks, rel=0.01)


# Stages


def test_stages_are_as_large_as_those_that_the_pipeline_divides():
    draw = random.Random(1)
    for _ in range(100):
        num_stages = draw.randint(2, 12)
        num_blocks = draw.randint(num_stages, 40)
        first, last = draw.choice((0.0, 0.4, 2.2)), draw.choice((0.0, 0.4, 2.2))
        stages = even_stages(num_blocks, num_stages, first, last)
        real = [len(each) for each in split_blocks([1.0] * num_blocks, num_stages, first, last)]

        def largest(counts, first=first, last=last):
            return max([counts[0] + first, *counts[1:-1], counts[-1] + last])

        assert sum(stages) == num_blocks and min(stages) >= 1
        assert largest(stages) == pytest.approx(largest(real))


@pytest.mark.parametrize(("layers", "pp", "chunks"), [(80, 64, 1), (32, 8, 2), (5, 4, 1)])
def test_every_rank_has_a_block(layers, pp, chunks):
    model = published_llama(layers, 4096, 32, 32, 14336, 131072, 4096)
    schedule = "interleaved" if chunks > 1 else "1f1b"
    counts = blocks_per_rank(
        model, ParallelConfig(pp=pp, chunks=chunks, schedule=schedule), MINITRON
    )
    assert len(counts) == pp and sum(counts) == layers and min(counts) >= chunks
