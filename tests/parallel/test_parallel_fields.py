"""Each field of [parallel] changes a step: two to four ranks, with the field and without.

A row names a field, the layout without it, what is added, and what must then hold of a rank's
second step. Ignoring the field makes both steps equal, and no check holds of a step and itself.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, fields

import pytest
import torch

from minitron.config import (
    Config,
    ConfigError,
    DataConfig,
    ModelConfig,
    ParallelConfig,
    TrainConfig,
)
from minitron.config.layout import require_ranks
from minitron.launch import run
from minitron.measure.ledger import Ledger
from minitron.measure.meter import Meter
from minitron.parallelize import lay_out
from minitron.running.training import Training

CPU = torch.device("cpu")


@dataclass(frozen=True)
class Step:
    """A step of one rank: what it held before, the most that it held, and what it called."""

    held: dict[str, int]
    peak: dict[str, int]
    calls: list[tuple[str, str]]
    """Op and axis of each, in order."""

    def count(self, op: str, axis: str) -> int:
        return Counter(self.calls)[op, axis]


def row(field, before, added, holds):
    return pytest.param(field, before, added, holds, id=f"{field}={added[field]}")


def more_of(op, axis):
    return lambda before, after: after.count(op, axis) > before.count(op, axis)


def fewer_of(op, axis):
    return lambda before, after: after.count(op, axis) < before.count(op, axis)


def held(category, times):
    """Before the step, about `times` as many bytes (norms are not divided)."""
    return lambda before, after: after.held[category] == pytest.approx(
        times * before.held[category], rel=0.05)


def peak(category, compare):
    return lambda before, after: compare(before.peak[category], after.peak[category])


def less(before, after):
    return after < before


def more(before, after):
    return after > before


V = {"pp": 2, "schedule": "zb-v", "chunks": 2}
ROWS = {
    2: [
        row("tp", {}, {"tp": 2}, held("parameter", 1 / 2)),
        row("sequence", {"tp": 2}, {"sequence": True}, more_of("reduce_scatter", "tp")),
        row("cp", {}, {"cp": 2}, more_of("send", "cp")),
        row("context", {"cp": 2}, {"context": "all-gather"}, more_of("all_gather", "cp")),
        row("context", {"cp": 2}, {"context": "ulysses"}, more_of("all_to_all", "cp")),
        row("pp", {}, {"pp": 2}, held("parameter", 1 / 2)),
        row("schedule", {"pp": 2}, {"schedule": "gpipe"}, peak("activation", more)),
        row("schedule", {"pp": 2}, {"schedule": "zero-bubble"}, peak("temporary", more)),
        row("schedule", {"pp": 2}, {"schedule": "interleaved", "chunks": 2}, more_of("send", "pp")),
        row("schedule", {"pp": 2, "schedule": "interleaved", "chunks": 2}, {"schedule": "zb-v"},
            fewer_of("send", "pp")),
        row("schedule", V, {"schedule": "dualpipe-v"}, peak("activation", more)),
        row("chunks", {"pp": 2, "schedule": "zero-bubble"}, {"chunks": 2}, more_of("send", "pp")),
        row("zero", {}, {"zero": 1}, held("optimizer state", 1 / 2)),
        row("zero", {"zero": 1}, {"zero": 2}, more_of("reduce_scatter", "dp")),
        row("zero", {"zero": 2}, {"zero": 3},
            lambda before, after: after.held["parameter"] < 0.01 * before.held["parameter"]),
        row("sync_every_micro_batch", {"zero": 2}, {"sync_every_micro_batch": False},
            fewer_of("reduce_scatter", "dp")),
        row("reshard_each_pass", {"zero": 3}, {"reshard_each_pass": False},
            fewer_of("all_gather", "dp")),
        row("overlap_gather", {"zero": 1}, {"overlap_gather": True},
            lambda before, after: before.calls[-1] == ("all_gather", "dp") != after.calls[-1]),
    ],
    4: [
        row("replicas", {"zero": 1}, {"replicas": 2}, held("optimizer state", 2)),
        row("sync_replicas_every_micro_batch", {"zero": 2, "replicas": 2},
            {"sync_replicas_every_micro_batch": True}, more_of("all_reduce", "replicas")),
    ],
}


def second_steps(group, layouts: list[dict]) -> list[Step]:
    """Train in each layout, and return what this rank's second step was."""
    sequences = max(6, 2 * group.size())  # DualPipeV differs from ZB-V from 5 micro-batches on
    tokens = torch.arange(sequences * 17).view(sequences, 17) % 512
    model = ModelConfig("llama", 512, 16, num_layers=4, width=16, num_heads=2, num_kv_heads=2,
                        ffn_width=32, tied_embedding=False)
    train = TrainConfig(global_batch_size=len(tokens), micro_batch_size=1, device="cpu")
    steps = []
    for layout in layouts:
        config = Config(model, DataConfig(sequence_length=16), train, ParallelConfig(**layout))
        training = Training(config, lay_out(config.parallel, group.size(), CPU), CPU)
        own = tokens[training.data_rank :: training.data_size]
        micro_batches = training.micro_batches(own, len(tokens))
        training.update(micro_batches, 0.0)
        with Meter(training.model, training.optimizer) as meter, Ledger() as ledger:
            training.update(micro_batches, 0.0)
        calls = [(call.op, call.axis) for call in ledger.calls]
        steps.append(Step(meter.timeline[0].bytes, meter.peak.bytes, calls))
    return steps


@pytest.fixture(scope="module")
def second_step() -> Callable[[int, dict], Step]:
    """Return rank 0's second step on so many ranks in a layout, which is trained once."""
    layouts = {num_ranks: [] for num_ranks in ROWS}
    for num_ranks, cases in ROWS.items():
        for _, before, added, _ in (case.values for case in cases):
            both = before, before | added
            layouts[num_ranks] += [layout for layout in both if layout not in layouts[num_ranks]]
    steps = {num_ranks: run(second_steps, num_ranks, each, timeout=600, watch=False)[0]
             for num_ranks, each in layouts.items()}
    return lambda num_ranks, layout: steps[num_ranks][layouts[num_ranks].index(layout)]


@pytest.mark.parametrize(("field", "before", "added", "holds"), ROWS[2] + ROWS[4])
def test_a_field_changes_the_step(second_step, field, before, added, holds):
    num_ranks = 4 if "replicas" in before | added else 2
    without, with_it = second_step(num_ranks, before), second_step(num_ranks, before | added)
    assert holds(without, with_it)
    assert not holds(without, without), "this check would hold if the field were ignored"


def test_dp_must_be_the_number_of_ranks():
    """It changes no step: without it, it is all the ranks that there are."""
    with pytest.raises(ConfigError, match="parallel.dp = 3"):
        require_ranks(Config(parallel=ParallelConfig(dp=3)), 2)


def test_every_field_is_tried():
    tried = {case.values[0] for cases in ROWS.values() for case in cases} | {"dp"}
    assert tried == {field.name for field in fields(ParallelConfig)}
