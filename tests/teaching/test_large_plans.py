"""The record of large searches and dry runs: what it returns is what is computed."""

import ast
import json
from dataclasses import replace

import pytest
import torch

from minitron import cost
from minitron.config import ModelConfig
from minitron.plan.dryrun import dry_run
from minitron.plan.hardware import DEVICES
from minitron.plan.job import Job
from minitron.plan.search import search
from teaching.exercises import ROOT
from teaching.lab import ch12
from teaching.lab import large_plans as plans
from tests.tiers import exhaustive, tiered

A100 = DEVICES["A100-SXM-80GB"]
JOB = Job(cost.PUBLISHED["Llama 3.2 1B"], 2, A100, 8192, 8)
TINY = Job(ModelConfig("gpt", 512, 32, 2, 64, 4, 4, 256), 4, A100, 32, 16)
LAYOUT = plans.cut(2, tp=2, recompute="full", micro_batch=2)


@pytest.fixture(scope="module")
def rows():
    """A row of a small search and one of a dry run."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plans, "TENSORS", [(TINY, LAYOUT, 0)])
        return {
            plans.search_key(JOB): plans.search_row(JOB),
            plans.dry_run_key(TINY, LAYOUT, 0): plans.dry_run_row(TINY, LAYOUT, 0),
        }


@pytest.fixture
def record(rows, tmp_path, monkeypatch):
    """A record with these rows; nothing may be computed."""
    monkeypatch.setattr(plans, "TENSORS", [(TINY, LAYOUT, 0)])
    (tmp_path / "large.json").write_text(json.dumps(rows))
    monkeypatch.setattr(plans, "FILE", tmp_path / "large.json")
    plans._record.cache_clear()
    with monkeypatch.context() as patch:
        patch.setattr(plans, "search", None)
        patch.setattr(plans, "dry_run", None)
        yield
    plans._record.cache_clear()


@pytest.fixture(scope="module")
def found():
    return search(JOB)


def test_a_recorded_search_is_the_search(found, record):
    read = plans.chosen(JOB)
    assert read.best == found.candidates[0]
    assert read.best.seconds == found.candidates[0].seconds
    assert read.with_twice["FLOP/s"].seconds < read.best.seconds
    assert read.with_twice["memory"].seconds <= read.best.seconds


def test_a_recorded_dry_run_is_the_dry_run(record):
    read = plans.counted(TINY, LAYOUT, 0)
    now = dry_run(plans.config_of(TINY, LAYOUT), 4, 0)
    assert replace(read, seconds=0) == replace(now, seconds=0)
    assert read.peak.total == now.peak.total


@pytest.mark.parametrize(
    "job, layout, rank",
    tiered(
        [
            (replace(TINY, global_batch_size=8), LAYOUT, 0),
            (TINY, plans.cut(2, tp=2), 0),
            (TINY, LAYOUT, 1),
        ]
    ),
)
def test_another_job_layout_or_rank_is_computed(record, job, layout, rank):
    with pytest.raises(TypeError, match="not callable"):
        plans.counted(job, layout, rank)


def test_a_run_has_what_its_layout_says():
    config = plans.config_of(TINY, LAYOUT)
    assert (config.train.micro_batch_size, config.train.recompute) == (2, "full")
    assert config.data.sequence_length == 32 and config.parallel == LAYOUT.parallel


def test_the_committed_record_has_every_job():
    assert plans._record().keys() == plans.rows().keys()
    for job in plans.SEARCHES:
        assert plans.chosen(job).best.fits


def test_chapter_12_asks_for_what_the_record_has():
    """A job that differs in one field is computed in the chapter, for a minute or more."""
    [source] = (ROOT / "chapters" / "source").glob("ch12_*.py")
    given = {"A100", "gpt3", "S", "job", "LAYOUTS", "plain"}
    cells = {
        "replace": replace,
        "cost": cost,
        "DEVICES": DEVICES,
        "Job": Job,
        "lab": ch12,
    }
    for node in ast.parse(source.read_text()).body:
        names = {
            name.id
            for name in ast.walk(node)
            if isinstance(name, ast.Name) and isinstance(name.ctx, ast.Store)
        }
        if isinstance(node, ast.Assign) and names & given:
            exec(compile(ast.Module([node], []), source.name, "exec"), cells)
    assert (cells["job"], cells["plain"]) == plans.PUBLISHED["GPT-3 175B"]
    assert "in plans.PUBLISHED.items()" in source.read_text()  # the other jobs, from the record


@exhaustive
@pytest.mark.parametrize("key", plans.rows())
def test_the_committed_record_is_what_is_computed_today(key):
    def without_seconds(row):
        return {name: value for name, value in row.items() if name != "seconds"}

    made = json.loads(json.dumps(plans.rows()[key]()))
    recorded = plans._record()[key]
    if f"torch=={torch.__version__.split('+')[0]}" in (ROOT / "requirements.txt").read_text():
        assert without_seconds(made) == without_seconds(recorded)
    elif key.startswith("dry run"):  # operators of other versions hold other temporaries
        peaks = [sum(row["peak"]["bytes"].values()) for row in (made, recorded)]
        assert peaks[0] == pytest.approx(peaks[1], rel=0.02)
