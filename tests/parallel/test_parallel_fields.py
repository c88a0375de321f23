"""Each field of [parallel] changes a step: two to four ranks, with the field and without.

Each row of a table names a field. Ignoring it makes both steps equal, and no check holds of a step
and itself.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, fields
from math import prod

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
from tests.tiers import collected, in_tiers

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


@dataclass(frozen=True, eq=False)
class Row:
    """A field, the layout without it, what is added, and what must then hold of both steps."""

    field: str
    before: dict
    added: dict
    holds: Callable[[Step, Step], bool]

    def __str__(self) -> str:
        return f"{self.field}={self.added[self.field]}"

    @property
    def num_ranks(self) -> int:
        return 4 if "replicas" in self.after else 2

    @property
    def after(self) -> dict:
        return self.before | self.added


def more_of(op, axis):
    return lambda before, after: after.count(op, axis) > before.count(op, axis)


def fewer_of(op, axis):
    return lambda before, after: after.count(op, axis) < before.count(op, axis)


def held(category, times):
    """Before the step, about `times` as many bytes (norms are not divided)."""
    return lambda before, after: (
        after.held[category] == pytest.approx(times * before.held[category], rel=0.05)
    )


def peak(category, compare):
    return lambda before, after: compare(before.peak[category], after.peak[category])


def less(before, after):
    return after < before


def more(before, after):
    return after > before


V = {"pp": 2, "schedule": "zb-v", "chunks": 2}
ROWS = [
    Row("tp", {}, {"tp": 2}, held("parameter", 1 / 2)),
    Row("sequence", {"tp": 2}, {"sequence": True}, more_of("reduce_scatter", "tp")),
    Row("cp", {}, {"cp": 2}, more_of("send", "cp")),
    Row("context", {"cp": 2}, {"context": "all-gather"}, more_of("all_gather", "cp")),
    Row("context", {"cp": 2}, {"context": "ulysses"}, more_of("all_to_all", "cp")),
    Row("pp", {}, {"pp": 2}, held("parameter", 1 / 2)),
    Row("schedule", {"pp": 2}, {"schedule": "gpipe"}, peak("activation", more)),
    Row("schedule", {"pp": 2}, {"schedule": "zero-bubble"}, peak("temporary", more)),
    Row("schedule", {"pp": 2}, {"schedule": "interleaved", "chunks": 2}, more_of("send", "pp")),
    Row(
        "schedule",
        {"pp": 2, "schedule": "interleaved", "chunks": 2},
        {"schedule": "zb-v"},
        fewer_of("send", "pp"),
    ),
    Row("schedule", V, {"schedule": "dualpipe-v"}, peak("activation", more)),
    Row("chunks", {"pp": 2, "schedule": "zero-bubble"}, {"chunks": 2}, more_of("send", "pp")),
    Row("zero", {}, {"zero": 1}, held("optimizer state", 1 / 2)),
    Row("zero", {"zero": 1}, {"zero": 2}, more_of("reduce_scatter", "dp")),
    Row(
        "zero",
        {"zero": 2},
        {"zero": 3},
        lambda before, after: after.held["parameter"] < 0.01 * before.held["parameter"],
    ),
    Row(
        "sync_every_micro_batch",
        {"zero": 2},
        {"sync_every_micro_batch": False},
        fewer_of("reduce_scatter", "dp"),
    ),
    Row(
        "reshard_each_pass", {"zero": 3}, {"reshard_each_pass": False}, fewer_of("all_gather", "dp")
    ),
    Row(
        "overlap_gather",
        {"zero": 1},
        {"overlap_gather": True},
        lambda before, after: before.calls[-1] == ("all_gather", "dp") != after.calls[-1],
    ),
    Row("replicas", {"zero": 1}, {"replicas": 2}, held("optimizer state", 2)),
    Row(
        "sync_replicas_every_micro_batch",
        {"zero": 2, "replicas": 2},
        {"sync_replicas_every_micro_batch": True},
        more_of("all_reduce", "replicas"),
    ),
]
FIRST = {row.field: row for row in reversed(ROWS)}  # of each field, which `make test` tries


def second_steps(group, layouts: list[dict]) -> list[Step]:
    """Train in each layout, and return what this rank's second step was."""
    return [second_step_of(group, layout) for layout in layouts]


def second_step_of(group, layout: dict) -> Step:
    """Two micro-batches on each rank; six for stages, since DualPipeV with four is ZB-V."""
    data_size = group.size() // prod(layout.get(axis, 1) for axis in ("tp", "cp", "pp"))
    sequences = 6 if "pp" in layout else 2 * data_size
    tokens = torch.arange(sequences * 17).view(sequences, 17) % 512
    model = ModelConfig(
        "llama",
        512,
        16,
        4 if "chunks" in layout else 2,
        width=16,
        num_heads=2,
        num_kv_heads=2,
        ffn_width=32,
        tied_embedding=False,
    )
    train = TrainConfig(global_batch_size=sequences, micro_batch_size=1, device="cpu")
    config = Config(model, DataConfig(sequence_length=16), train, ParallelConfig(**layout))
    training = Training(config, lay_out(config.parallel, group.size(), CPU), CPU)
    own = tokens[training.data_rank :: training.data_size]
    micro_batches = training.micro_batches(own, sequences)
    training.update(micro_batches, 0.0)
    with Meter(training.model, training.optimizer) as meter, Ledger() as ledger:
        training.update(micro_batches, 0.0)
    calls = [(call.op, call.axis) for call in ledger.calls]
    return Step(meter.timeline[0].bytes, meter.peak.bytes, calls)


@pytest.fixture(scope="module")
def steps(request) -> Callable[[Row], tuple[Step, Step]]:
    """Return rank 0's second steps of a row, without its field and with it."""
    found = {}
    for num_ranks in (2, 4):
        rows = [row for row in collected(request, "row") if row.num_ranks == num_ranks]
        layouts = {str(layout): layout for row in rows for layout in (row.before, row.after)}
        if layouts:
            by_rank = run(second_steps, num_ranks, [*layouts.values()], timeout=600, watch=False)
            found |= zip(((num_ranks, layout) for layout in layouts), by_rank[0], strict=True)
    return lambda row: tuple(
        found[row.num_ranks, str(layout)] for layout in (row.before, row.after)
    )


@pytest.mark.parametrize("row", in_tiers({*FIRST.values()}, ROWS))
def test_a_field_changes_the_step(steps, row):
    without, with_it = steps(row)
    assert row.holds(without, with_it)
    assert not row.holds(without, without), "this check would hold if the field were ignored"


def test_dp_must_be_the_number_of_ranks():
    """It changes no step: without it, it is all the ranks that there are."""
    with pytest.raises(ConfigError, match="parallel.dp = 3"):
        require_ranks(Config(parallel=ParallelConfig(dp=3)), 2)


def test_every_field_is_tried():
    tried = {row.field for row in ROWS} | {"dp"}
    assert tried == {field.name for field in fields(ParallelConfig)}
