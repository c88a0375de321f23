"""The proof of a schedule: it accepts what runs, and says in one line why the rest cannot."""

from itertools import product

import pytest

from minitron.config import ConfigError
from minitron.parallel.pipeline.schedule_check import check, peak_activations, topological_order
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
from minitron.parallel.pipeline.v_schedules import dualpipe_v, zb_v

ONE_STAGE = (sequential, gpipe, one_forward_one_backward, zero_bubble)


def written(num_micro_batches, *ranks):
    """A schedule from one string per rank: "F0 B0", of stage = rank, or "F0/2" of stage 2."""

    def action(word, rank):
        name, _, stage = word.partition("/")
        return Action(name[0], int(name[1:]), int(stage or rank))

    return Schedule(
        "my own",
        num_micro_batches,
        tuple(
            tuple(action(word, rank) for word in words.split()) for rank, words in enumerate(ranks)
        ),
    )


def generated(num_ranks, num_micro_batches):
    """Every schedule of the package."""
    p, m = num_ranks, num_micro_batches
    chunks = (1, 2, 3, 4) if m % p == 0 else ()
    duals = [dualpipe_v(p, m)] if m >= 2 * p else []
    return (
        [*(make(p, m) for make in (*ONE_STAGE, zb_v)), *duals]
        + [breadth_first(p, m, v) for v in (2, 3)]
        + [make(p, m, v) for make in (interleaved, zero_bubble) for v in chunks]
    )


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4, 5, 8])
def test_every_schedule_of_the_package_is_valid(num_ranks):
    for m in [*range(1, 13), 16]:
        for schedule in generated(num_ranks, m):
            check(schedule)
            stages = {stage for rank in range(num_ranks) for stage in schedule.stages_of(rank)}
            assert stages == set(range(schedule.num_stages))


# Broken ones

BROKEN = {
    "a forward pass is missing": (
        written(2, "F0 F1 B0 B1", "F0 B0 B1"),
        "stage 1 never runs F1: every stage needs every micro-batch",
    ),
    "a backward pass is missing": (
        written(2, "F0 F1 B0", "F0 B0 F1 B1"),
        "stage 0 never runs B1: its weights would miss a gradient",
    ),
    "forward twice": (written(1, "F0 F0 B0", "F0 B0"), "stage 0 runs F0 2 times: once is enough"),
    "backward twice": (written(1, "F0 B0", "F0 B0 B0"), "stage 1 runs B0 2 times: once is enough"),
    "three times": (written(1, "F0 I0 W0 W0 W0"), "stage 0 runs W0 3 times: once is enough"),
    "inputs without weights": (
        written(2, "F0 I0 W0 F1 I1"),
        "stage 0 runs I1 without W1: its weights would miss a gradient",
    ),
    "weights without inputs": (
        written(1, "F0 B0", "F0 W0"),
        "stage 1 runs W0 without I0, which it needs",
    ),
    "whole and half": (
        written(1, "F0 B0 W0"),
        "stage 0 runs B0 and a half of it again: B is I and W",
    ),
    "whole and both halves": (
        written(1, "F0 B0 I0 W0"),
        "stage 0 runs B0 and a half of it again: B is I and W",
    ),
    "a stage that nobody has": (
        written(1, "F0 B0", "F0/2 B0/2"),
        "stage 1 never runs F0: every stage needs every micro-batch",
    ),
    "a stage on two ranks": (
        written(2, "F0 F1 B0 B1/1", "F0 B0 F1"),
        "stage 1 is on rank 0 and on rank 1: one rank must hold it and run all of its actions",
    ),
    "a copy of a stage for every micro-batch": (
        written(2, "F0/0 B0/0", "F1/0 B1/0"),
        "stage 0 is on rank 0 and on rank 1: one rank must hold it and run all of its actions",
    ),
    "a micro-batch that does not exist": (
        written(2, "F1 F2 B1 B2"),
        "stage 0 runs F2, but there are only 2 micro-batches, numbered from 0",
    ),
    "a micro-batch before the first": (
        Schedule("", 1, ((Action("F", -1, 0), Action("B", -1, 0)),)),
        "stage 0 runs F-1, but there are only 1 micro-batches, numbered from 0",
    ),
    "a stage before the first": (
        written(1, "F0 F0/-1 B0 B0/-1"),
        "rank 0 runs F0 of stage -1: stages are numbered from 0",
    ),
    "a rank without work": (
        written(1, "F0 B0", ""),
        "rank 1 runs nothing: give it a stage, or use fewer ranks",
    ),
    "no micro-batches": (gpipe(2, 0), "a schedule of 0 micro-batches: there must be 1 or more"),
    "a small letter": (written(1, "F0 b0"), "rank 0 runs 'b': a pass is F, B, I or W"),
    "a plain tuple": (
        Schedule("", 1, ((("F", 0, 0), ("B", 0, 0)),)),
        "rank 0 runs ('F', 0, 0): write Action(kind, micro_batch, stage)",
    ),
    "backward before forward": (
        written(2, "F0 B0 B1 F1", "F0 B0 F1 B1"),
        "stage 0 runs B1 before F1, which it needs: a deadlock",
    ),
    "weights before inputs": (
        written(1, "F0 I0 W0", "F0 W0 I0"),
        "stage 1 runs W0 before I0, which it needs: a deadlock",
    ),
    "the second stage of a rank before its first": (
        written(1, "F0/1 F0/0 B0/1 B0/0"),
        "stage 1 runs F0 before F0 of stage 0, which it needs: a deadlock",
    ),
    "a circle of two stages": (
        written(2, "F0 B0 F1 B1", "F0 F1 B0 B1"),
        "stage 0 waits for B0 from stage 1, which stage 1 runs after F1; "
        "stage 1 waits for F1 from stage 0, which stage 0 runs after B0: a deadlock",
    ),
    "a circle of two, and a third that waits for them": (
        written(2, "F0 B0 F1 B1", "F0 F1 B0 B1", "F0 F1 B0 B1"),
        "stage 0 waits for B0 from stage 1, which stage 1 runs after F1; "
        "stage 1 waits for F1 from stage 0, which stage 0 runs after B0: a deadlock",
    ),
    "a circle at the end of the pipeline alone": (
        written(2, "F0 F1 B0 B1", "F0 B0 F1 B1", "F0 F1 B0 B1"),
        "stage 1 waits for B0 from stage 2, which stage 2 runs after F1; "
        "stage 2 waits for F1 from stage 1, which stage 1 runs after B0: a deadlock",
    ),
    "a circle of three stages": (
        written(1, "F0/0 B0/0 F0/3 B0/3", "F0/1 B0/1", "F0/2 B0/2"),
        "stage 0 waits for B0 from stage 1, which stage 1 runs after B0; "
        "stage 1 waits for B0 from stage 2, which stage 2 runs after B0; "
        "stage 2 waits for B0 from stage 3, which stage 3 runs after B0 of stage 0, on the same "
        "rank: a deadlock",
    ),
}


@pytest.mark.parametrize(("schedule", "line"), BROKEN.values(), ids=BROKEN)
def test_a_broken_schedule_is_told_in_one_line_what_is_wrong(schedule, line):
    with pytest.raises(ConfigError) as error:
        check(schedule)
    assert str(error.value) == line


def test_an_order_of_something_incomplete_names_what_nobody_runs():
    with pytest.raises(ConfigError) as error:
        list(topological_order(written(1, "F0 B0", "F0/2 B0/2")))
    assert str(error.value) == "stage 0 waits for B0 from stage 1, which no rank runs"


# What it says of a valid one


def test_the_order_is_one_in_which_a_single_process_could_run_everything():
    for p, m in product((1, 2, 3, 4), (1, 3, 4, 8)):
        for schedule in generated(p, m):
            done = []
            for action in topological_order(schedule):
                assert set(schedule.needs(action)) <= set(done)
                done.append(action)
            for rank, actions in enumerate(schedule.actions):
                own = [action for action in done if schedule.rank_of[action.stage] == rank]
                assert tuple(own) == actions


@pytest.mark.parametrize(
    ("schedule", "peaks"),
    [
        (sequential(3, 5), [1, 1, 1]),
        (gpipe(3, 5), [5, 5, 5]),
        (one_forward_one_backward(3, 5), [3, 2, 1]),
        (zero_bubble(3, 5), [3, 3, 3]),
        (interleaved(4, 8, 2), [11, 9, 7, 5]),
        (zb_v(4, 8), [8, 8, 8, 8]),
        (dualpipe_v(4, 8), [9, 9, 9, 9]),
        (written(2, "F0 I0 F1 I1 W0 W1"), [2]),  # I alone frees nothing: W still needs the input
    ],
)
def test_activations_are_held_from_f_until_the_weights_have_their_gradient(schedule, peaks):
    assert peak_activations(schedule) == peaks
