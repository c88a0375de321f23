"""A trace names what each technique does, on every rank that is asked, and costs nothing else."""

import dataclasses
import gzip
import json
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from minitron import train
from minitron.comm.collectives import all_reduce
from minitron.comm.mesh import make_mesh
from minitron.config import Config, ConfigError, DataConfig, LogConfig, ParallelConfig
from minitron.launch import run
from minitron.measure.trace import WARM_UP, open_trace
from minitron.pytorch.spans import span
from tests.tiers import exhaustive, tiered
from tests.train.test_train_ranks import MODEL, TRAIN, train_on_ranks

STEPS = 2
TRACED = LogConfig(trace_steps=STEPS)
SHORT = dataclasses.replace(TRAIN, steps=WARM_UP + STEPS, eval_every=0, checkpoint_every=0)


def config_of(stories: Path, train=SHORT, log=TRACED, **parallel) -> Config:
    data = DataConfig(stories, sequence_length=32)
    return Config(MODEL, data, train, ParallelConfig(**parallel), log)


def names_in(path: Path) -> list[str]:
    with gzip.open(path) as file:
        return [event["name"] for event in json.load(file)["traceEvents"] if "name" in event]


@pytest.mark.parametrize(
    "parallel, expected",
    tiered(
        [
            (
                {"zero": 3},
                [
                    "ZeRO-3 gather blocks.1",
                    "ZeRO-3 gather root",
                    "ZeRO-3 reduce blocks.0",
                    "data parallel all_gather",
                    "data parallel reduce_scatter",
                    "recompute",
                    "micro-batch 3",
                    "forward",
                    "backward",
                    "Optimizer.step#AdamW.step",
                ],
            ),
            (
                {"tp": 2, "sequence": True},
                [
                    "tensor parallel all_gather",
                    "tensor parallel reduce_scatter",
                    "tensor parallel all_reduce",
                ],
            ),
        ]
    ),
    ids=str,
)
def test_a_trace_names_what_a_technique_does(stories, tmp_path, parallel, expected):
    settings = dataclasses.replace(SHORT, recompute="full")
    run(train_on_ranks, 2, config_of(stories, settings, **parallel), tmp_path)
    assert [path.name for path in (tmp_path / "traces").iterdir()] == ["rank0.json.gz"]
    names = names_in(tmp_path / "traces" / "rank0.json.gz")
    assert not {name for name in expected if name not in names}
    assert len({name for name in names if name.startswith("ProfilerStep")}) == STEPS


@exhaustive
def test_every_rank_traces_and_logs_if_asked(stories, tmp_path):
    log = LogConfig(all_ranks=True, trace_steps=STEPS)
    run(train_on_ranks, 2, config_of(stories, log=log, pp=2, zero=1), tmp_path)
    for rank in (0, 1):
        names = names_in(tmp_path / "traces" / f"rank{rank}.json.gz")
        for pass_ in ("F0", "B1"):
            assert f"pipeline {pass_} stage {rank}" in names
            assert f"pipeline {pass_} stage {1 - rank}" not in names
        assert {"pipeline broadcast", "ZeRO reduce bucket 0", "ZeRO gather weights"} <= set(names)
    rows = [
        (tmp_path / f"{name}.jsonl").read_text().splitlines()
        for name in ("metrics", "metrics_rank1")
    ]
    assert len(rows[0]) == len(rows[1]) == SHORT.steps + 1


def test_a_traced_run_trains_what_another_trains(stories, tmp_path):
    losses = []
    for name, log in (("plain", LogConfig()), ("traced", TRACED)):
        train.train(config_of(stories, log=log), tmp_path / name)
        rows = map(json.loads, (tmp_path / name / "metrics.jsonl").read_text().splitlines())
        losses.append([row["loss"] for row in rows if "loss" in row])
    assert losses[0] == losses[1]
    assert not (tmp_path / "plain" / "traces").exists()


def test_a_run_that_is_too_short_is_told(stories, tmp_path):
    config = config_of(stories, dataclasses.replace(SHORT, steps=WARM_UP + STEPS - 1))
    with pytest.raises(
        ConfigError,
        match="log.trace_steps = 2, after 5 steps of warm-up, with "
        "train.steps = 6: raise the last to 7",
    ):
        train.train(config, tmp_path / "run")


def test_a_run_resumed_near_its_end_ends_without_a_trace(tmp_path):
    config = Config(train=SHORT, log=TRACED)
    cpu = torch.device("cpu")
    assert open_trace(config, tmp_path, rank=0, step=0, device=cpu).profiler is not None
    assert open_trace(config, tmp_path, rank=0, step=1, device=cpu).profiler is None


def test_no_range_is_made_while_no_profiler_runs():
    assert span("a", 1) is span("b", 2)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as recorded:
        with span("a", 1):
            pass
    assert [event.name for event in recorded.events()] == ["a 1"]


def ranges_of(group) -> list[str]:
    mesh = make_mesh("cpu", dp=1, tp=2)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as recorded:
        for each in (mesh.group("tp"), group, dist.new_group([0, 1])):
            all_reduce(torch.ones(1), each)
    return sorted({event.name for event in recorded.events() if " all_reduce" in event.name})


def test_a_range_is_named_after_the_axis():
    expected = ["all ranks all_reduce", "some ranks all_reduce", "tensor parallel all_reduce"]
    assert run(ranges_of, 2) == [expected, expected]
