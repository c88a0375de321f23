"""`minitron prove`: what it measures, what it leaves out, and how it fails."""

import math
from unittest.mock import patch

import numpy as np
import pytest

from minitron import cli
from minitron.config import ConfigError
from minitron.proof import command
from minitron.proof.command import TECHNIQUES, Technique, why_refused
from minitron.proof.difference import TOLERANCE, Moment, largest_difference
from minitron.proof.oracle import after_backward
from tests.tiers import exhaustive

WANT = np.array([1.0, -2.0, 4.0])
unreduced = after_backward(lambda model, group: None)


def prove(capsys, *words: str) -> tuple[int, list[str]]:
    code = cli.dispatch(["prove", *words])
    return code, capsys.readouterr().out.splitlines()


def verdicts(lines: list[str]) -> dict[str, list[str]]:
    """The rows of the first table: the two differences and the verdict, by technique."""
    return {
        line[:34].strip(): [line[34:44].strip(), line[44:54].strip(), line[57:]]
        for line in lines
        if line[:34].strip() in TECHNIQUES
    }


def test_every_technique_of_the_package_has_a_row():
    named = {technique.apply for technique in TECHNIQUES.values()}
    assert len(named) == len(TECHNIQUES) == 11


@exhaustive
def test_every_technique_is_the_same_training(capsys):
    """Costs half a minute of CPU time: tests/proof/test_axes.py runs the axes in `make test`."""
    code, lines = prove(capsys)
    rows = verdicts(lines)
    assert code == 0 and list(rows) == list(TECHNIQUES)
    for sgd, adamw, verdict in rows.values():
        assert max(float(sgd), float(adamw)) <= TOLERANCE and verdict == "the same training"
    by_dtype = {
        line.split()[0]: list(map(float, line.split()[1:]))
        for line in lines
        if line.startswith("float")
    }
    assert max(by_dtype["float64"]) < 1e-10
    assert by_dtype["float32"][0] < 1e-6 and by_dtype["float32"][-1] > 1e-6


def test_a_wrong_technique_is_named_and_the_others_are_still_compared(capsys):
    def raises(model, group):
        raise ValueError("a mistake")

    few = {
        "ZeRO-1": Technique(unreduced),
        "ZeRO-2": Technique(raises),
        "ZeRO-3": TECHNIQUES["data parallelism, bucketed"],
    }
    with patch.object(command, "TECHNIQUES", few):
        code, lines = prove(capsys)
    rows = verdicts(lines)
    assert code == 1
    assert [row[2] for row in rows.values()] == 2 * ["not the same training"] + [
        "the same training"
    ]
    assert float(rows["ZeRO-1"][0]) > 1e-3 and rows["ZeRO-2"][:2] == ["-", "-"]
    assert float(rows["ZeRO-3"][0]) <= TOLERANCE
    text = "\n".join(lines)
    assert "ZeRO-1 is not the same training:\n" in text and "never reduced?" in text
    assert "ZeRO-2 is not the same training:\n" in text and "ValueError: a mistake" in text


def test_losses_of_ranks_differ_by_rounding_alone(capsys):
    with patch.multiple(command, TECHNIQUES={}, STEPS=(1, 3)):
        code, lines = prove(capsys)
    by_dtype = {
        line.split()[0]: list(map(float, line.split()[1:]))
        for line in lines
        if line.startswith("float")
    }
    assert code == 0
    assert max(by_dtype["float64"]) < 1e-14 and max(by_dtype["float32"]) < 1e-5


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_few_ranks_divide_every_axis(ranks):
    assert [why_refused(each, ranks) for each in TECHNIQUES.values()] == [""] * len(TECHNIQUES)


def test_what_ranks_cannot_divide_is_left_out_with_its_reason():
    reasons = {name: why_refused(each, 5) for name, each in TECHNIQUES.items()}
    assert "num_heads = 24 is not divisible by 5" in reasons["tensor parallelism"]
    assert "is not divisible by" in reasons["context parallelism, ring"]
    assert "num_layers = 4" in reasons["pipeline parallelism, 1F1B"]
    assert not any(reason for name, reason in reasons.items() if "ZeRO" in name or "data" in name)
    assert "\n" not in "".join(reasons.values())
    row = str(command.prove(TECHNIQUES["tensor parallelism"], 5))
    assert row.split(None, 2)[:2] == ["-", "-"]
    assert row.endswith(f"left out: {reasons['tensor parallelism']}")


@pytest.mark.parametrize(
    ("ranks", "message"),
    [
        ("0", "--ranks 0: use 2 to 64"),
        ("1", "--ranks 1: use 2 to 64"),
        ("65", "--ranks 65: use 2"),
        ("-2", "--ranks"),
        ("two", "--ranks: invalid literal for int"),
    ],
)
def test_other_numbers_of_ranks_are_refused_in_one_line(ranks, message):
    with pytest.raises(ConfigError) as caught:
        cli.dispatch(["prove", "--ranks", ranks])
    assert message in str(caught.value) and "\n" not in str(caught.value)


def test_ranks_of_torchrun_are_refused(monkeypatch):
    """Each of them would start ranks of its own, and print the tables."""
    monkeypatch.setattr(command, "is_torchrun_rank", lambda: True)
    with pytest.raises(ConfigError, match="run minitron prove --ranks 2 without torchrun"):
        cli.dispatch(["prove"])


# What is measured


@pytest.mark.parametrize(
    ("got", "difference"),
    [
        (WANT, 0.0),
        (WANT * (1 + 1e-10), 1e-10),
        (-WANT, 2.0),
        (None, math.inf),
        (WANT[:2], math.inf),
        (WANT * math.nan, math.inf),
    ],
)
def test_the_largest_difference_of_any_rank_counts(got, difference):
    def record(value):
        return [
            Moment(0, "loss", {"model": np.array(2.0)}),
            Moment(0, "gradient", {"x": value, "y": None, "zero": 0 * WANT}),
        ]

    found = largest_difference(record(WANT), [record(WANT), record(got)])
    assert found == pytest.approx(difference, rel=1e-4)
