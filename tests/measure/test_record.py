"""Records of measurements: what is written is read back, and what is no record is refused."""

import dataclasses
import json
import math

import pytest
import torch

from minitron.config import ConfigError
from minitron.measure.record import (
    Conditions,
    Record,
    Target,
    conditions_here,
    driver_version,
    load,
    save,
)

CONDITIONS = Conditions(
    device="NVIDIA H100 80GB HBM3",
    kind="cuda",
    num_devices=1,
    memory_bytes=85_520_809_984,
    driver="580.1",
    versions={"python": "3.12.3", "torch": "2.11.0"},
    command="python gpu.py",
    date="2026-11-25",
)
RECORD = Record(
    part="mfu",
    conditions=CONDITIONS,
    tiny=False,
    seconds=12.5,
    rows=[{"case": "a", "seconds": 0.1, "losses": [1.0, 2.0], "compiled": True, "mfu": None}],
    targets=[Target("speed", 1.02, 1.0, is_least=True)],
    notes=["nothing was left out"],
)


def test_a_record_is_read_back_as_it_was_written(tmp_path):
    path = tmp_path / "h100" / "mfu.json"
    save(RECORD, path)
    assert load(path) == RECORD
    assert RECORD.row("a")["losses"] == [1.0, 2.0] and RECORD.row("b") is None


def test_what_is_not_finite_becomes_nothing(tmp_path):
    rows = [{"case": "a", "seconds": math.inf, "losses": [1.0, math.nan]}]
    save(dataclasses.replace(RECORD, rows=rows), tmp_path / "mfu.json")
    assert load(tmp_path / "mfu.json").rows == [
        {"case": "a", "seconds": None, "losses": [1.0, None]}
    ]


@pytest.mark.parametrize(
    ("value", "is_least", "passed"),
    [
        (1.0, True, True),
        (0.99, True, False),
        (1.0, False, True),
        (1.01, False, False),
    ],
)
def test_a_target_is_the_least_or_the_most(value, is_least, passed):
    target = Target("speed", value, 1.0, is_least)
    assert target.passed is passed
    assert str(target).startswith("pass" if passed else "MISS")


def test_the_conditions_of_this_machine():
    here = conditions_here(torch.device("cpu"), num_devices=2)
    assert here.kind == "cpu" and here.device and here.memory_bytes > 2**30
    assert here.versions["torch"] == torch.__version__ and here.driver is None
    assert str(here).startswith(f"2 x {here.device}, torch ")


def test_a_driver_that_does_not_answer_has_no_version(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert driver_version() is None
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\necho 580.159.04\necho 580.159.04\n")
    program.chmod(0o755)
    assert driver_version() == "580.159.04"


def without(table: dict, key: str) -> dict:
    return {name: value for name, value in table.items() if name != key}


@pytest.mark.parametrize(
    "damage",
    [
        lambda table: {**table, "format": "something else"},
        lambda table: without(table, "format"),
        lambda table: without(table, "rows"),
        lambda table: without(table, "conditions"),
        lambda table: {**table, "rows": [{"seconds": 1}]},
        lambda table: {**table, "rows": [["case"]]},
        lambda table: {**table, "rows": 7},
        lambda table: {**table, "seconds": "long"},
        lambda table: {**table, "targets": [{"name": "speed"}]},
        lambda table: {**table, "conditions": {**table["conditions"], "memory_bytes": "80 GB"}},
        lambda table: {**table, "conditions": {**table["conditions"], "more": 1}},
    ],
    ids=range(11),
)
def test_what_is_no_record_is_refused_in_one_line(tmp_path, damage):
    path = tmp_path / "mfu.json"
    save(RECORD, path)
    path.write_text(json.dumps(damage(json.loads(path.read_text()))))
    with pytest.raises(ConfigError, match="not a record of measurements") as raised:
        load(path)
    assert str(path) in str(raised.value) and "\n" not in str(raised.value)


@pytest.mark.parametrize("text", ["", "{", "[]", "7", '{"format": {"a": 1}}', "\x00"])
def test_a_file_of_anything_else_is_refused(tmp_path, text):
    path = tmp_path / "mfu.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match="not a record of measurements"):
        load(path)
