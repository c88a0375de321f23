"""Every two choices together: the same training.

The size of each axis is a choice, and so is the optimizer: gradients are compared with either.
`make test-all` has each choice together with every layout of up to four ranks and with 2 x 2 x 2;
`tools/grid.py` tries all combinations on up to 8 ranks.
"""

import sys
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from itertools import combinations
from unittest.mock import patch

import numpy as np
import pytest

from minitron.config import ConfigError
from minitron.config.layout import require_ranks
from minitron.launch import run
from minitron.parallel.data.zero import Zero1
from minitron.parallel.grid import Grid
from minitron.parallel.pipeline.stages import PipelineParallel
from minitron.proof.difference import Moment, first_difference
from tests.tiers import as_exhaustive, in_tiers
from tools import grid
from tools.grid import (
    Case,
    all_cases,
    config_of,
    differences,
    in_batches,
    layouts_of,
    train_all,
    try_each,
    why_refused,
)

EVERY_LAYOUT = [layout for size in range(1, 9) for layout in layouts_of(size)]
SMALL_LAYOUTS = [layout for size in (1, 2, 3, 4) for layout in layouts_of(size)] + [(2, 2, 2)]


Trial = tuple[Case, str]  # the second is the optimizer's name


def choices_of(trial: Trial) -> tuple:
    case, optimizer = trial
    return *case, optimizer


def with_layout(trial: Trial) -> tuple:
    """Its choices; the layout, all of (dp, tp, pp), counts as one."""
    case, optimizer = trial
    return case[:3], *case[3:], optimizer


def cover(trials: list[Trial], values_of: Callable[[Trial], tuple]) -> list[Trial]:
    """A few in which every two values are together that are so in any of `trials`.

    Greedy: the next has most of the pairs that are missing, for its price. A set of pairs is an
    integer with a bit for each, which is quick to intersect.
    """
    numbers: dict = {}
    sets = {
        trial: sum(
            1 << numbers.setdefault(pair, len(numbers))
            for pair in combinations(enumerate(values_of(trial)), 2)
        )
        for trial in trials
    }
    price = {trial: (trial[0].num_ranks * trial[0].num_micro_batches) ** 0.25 for trial in trials}
    missing, chosen = (1 << len(numbers)) - 1, []
    while missing:
        chosen.append(
            max(trials, key=lambda trial: (sets[trial] & missing).bit_count() / price[trial])
        )
        missing &= ~sets[chosen[-1]]
    return chosen


@cache
def small_trials() -> list[Trial]:
    return [
        (case, optimizer)
        for case in all_cases(SMALL_LAYOUTS)
        if why_refused(case) is None
        for optimizer in grid.BOTH
    ]


@cache
def smaller_trials() -> list[Trial]:
    """Those on few ranks: two on an axis, or three stages, of which one has neither end."""
    return [
        (case, optimizer)
        for case, optimizer in small_trials()
        if case.num_ranks <= 4 and max(case.dp, case.tp) < 3 and case.pp < 4
    ]


# Not as this module is imported: the ranks of a mutant import it too
@cache
def pairs() -> list[Trial]:
    return cover(smaller_trials(), choices_of)


@cache
def covering() -> list[Trial]:
    return cover(small_trials(), with_layout)


ALL_AXES: Trial = Case(2, 2, 2, "llama", "zero3 once a step", True, "full", "1f1b", "one"), "SGD"


def batches(trials: list[Trial]) -> list[tuple[list[Case], str]]:
    return [
        (batch, optimizer)
        for optimizer in grid.BOTH
        for batch in in_batches(
            sorted(
                (case for case, name in trials if name == optimizer),
                key=lambda case: case.num_ranks,
            )
        )
    ]


@pytest.mark.parametrize(
    "tried, offered, values_of",
    [(pairs, smaller_trials, choices_of), (covering, small_trials, with_layout)],
    ids=["pairs", "pairs with each layout"],
)
def test_every_pair_that_is_offered_is_tried(tried, offered, values_of):
    """By counting, as `cover` does not: of any two columns, the values that occur together."""

    def together(trials):
        rows = list(map(values_of, trials))
        return {
            (i, j): {(row[i], row[j]) for row in rows}
            for i, j in combinations(range(len(rows[0])), 2)
        }

    assert together(tried()) == together(offered())
    assert len(tried()) == len(set(tried())) < len(offered()) / 20


def test_every_stage_of_zero_is_tried_on_every_layout():
    zero_and_layout = {(case[:3], grid.DATA[case.data].get("zero", 0)) for case, _ in covering()}
    assert len(zero_and_layout) == 4 * len(SMALL_LAYOUTS)


@pytest.mark.parametrize(
    "layout", in_tiers({(1, 1, 1), (2, 1, 1), (1, 2, 1), (1, 1, 3), (2, 2, 2)}, EVERY_LAYOUT)
)
def test_what_is_refused_is_refused_for_its_reason_and_all_else_is_accepted(layout):
    for case in all_cases([layout]):
        reason = why_refused(case)
        try:
            require_ranks(config_of(case), case.num_ranks)
        except ConfigError as error:
            assert reason is not None and reason in str(error) and "\n" not in str(error), case
        else:
            assert reason is None, case


def pytest_generate_tests(metafunc):
    if "batch" in metafunc.fixturenames:
        cases = [*batches([*pairs(), ALL_AXES]), *map(as_exhaustive, batches(covering()))]
        metafunc.parametrize(
            "batch, optimizer",
            cases,
            ids=lambda value: value if isinstance(value, str) else f"{value[0].num_ranks}-ranks",
        )


def test_the_training_is_that_of_one_process(batch, optimizer):
    found = zip(map(str, batch), try_each(batch, (optimizer,)), strict=True)
    assert not {case: wrong for case, wrong in found if wrong}


# Mutations: what is seen by trying axes together alone

placement = Grid.placement


def one_copy(self, name):
    return replace(placement(self, name), copies=1)


IN_STAGES = Case(2, 1, 2, "gpt", "zero1", False, "none", "1f1b", "one")
CUT = Case(1, 2, 2, "llama", "bucketed", True, "none", "1f1b", "one")
MUTANTS = [
    (IN_STAGES, Grid, "placement", one_copy),  # a tied embedding counts twice in the norm
    (IN_STAGES, PipelineParallel, "sum_partial_gradients", lambda *_: None),
    (IN_STAGES, Zero1, "start_gather", lambda *_: None),
    (CUT, Grid, "placement", one_copy),  # so does a norm's weight
]


def train_mutants(group):
    """By SGD, which hides no gradient's scale."""
    records = []
    for case, owner, name, wrong in MUTANTS:
        with patch.object(owner, name, wrong):
            records += train_all(group, [case], ("SGD",))
    return records + train_all(group, [IN_STAGES], ("SGD",))


def test_the_grid_sees_what_is_broken():
    by_rank = run(train_mutants, 4, timeout=60, watch=False)
    for index, (case, _, name, _) in enumerate(MUTANTS):
        assert differences(case, [records[index] for records in by_rank]), name
    assert not differences(IN_STAGES, [records[-1] for records in by_rank])


def test_the_grid_sees_one_bit():
    """After an update on one rank alone, too little for the oracle's tolerance."""

    def records(value):
        return {
            "SGD": [
                Moment(0, kind, {"weight": np.array([1.0, value])})
                for kind in ("gradient", "updated")
            ]
        }

    one, next_one = records(1.0), records(np.nextafter(1.0, 2.0))
    assert first_difference(one["SGD"], [next_one["SGD"]]) is None
    assert grid.apart([one, one]) == grid.apart([next_one]) == []
    assert grid.apart([one, one, next_one]) == [
        "SGD: weight has other bits on another rank after step 0"
    ]


# The command


def test_shards_are_disjoint_and_together_everything():
    cases = list(range(100))
    shards = [cases[grid.shard(f"{index}/7")] for index in range(1, 8)]
    assert sorted(sum(shards, [])) == cases
    for words in ("0/7", "8/7", "7", "a/b"):
        with pytest.raises(ValueError):
            grid.shard(words)


def test_one_case_that_fails_leaves_the_others_their_results():
    good = Case(1, 1, 1, "gpt", "bucketed", False, "none", "1f1b", "one")
    first, (failed,), last = try_each([good, good._replace(sequence=True), good])
    assert first == last == [] and "parallel.sequence with parallel.tp = 1" in failed


def test_the_command_tells_of_each_case_and_fails_if_one_differs(capsys, monkeypatch):
    def grid_main(*words) -> tuple[int, list[str]]:
        monkeypatch.setattr(sys, "argv", ["grid.py", *words])
        return grid.main(), capsys.readouterr().out.splitlines()

    monkeypatch.setattr(grid, "try_each", lambda cases: [[] for _ in cases])
    code, lines = grid_main("--shard", "1/2000")
    assert code == 0 and len(lines) == 10 and all(" ok " in line for line in lines)
    assert grid_main("--shard", "1/2000", "--start", "8") == (0, lines[7:])

    monkeypatch.setattr(
        grid,
        "try_each",
        lambda cases: [["SGD: one\ntwo"] if case.family == "llama" else [] for case in cases],
    )
    code, lines = grid_main("--shard", "1/2400")
    assert code == 1
    assert lines[lines.index("    SGD: one") - 1].split()[1] == "FAILED"

    code, lines = grid_main("--count")
    assert code == 0 and lines[0].startswith("18816 cases, each with SGD and AdamW.")
    assert 18816 + sum(int(line.split()[0]) for line in lines[1:]) == len(all_cases(EVERY_LAYOUT))
