"""A run whose layers are cut: the same training in any layout, also after a move to another."""

import dataclasses
from functools import cache
from pathlib import Path

import pytest
import torch

from minitron import train
from minitron.comm.agreement import SINGLE_RANK
from minitron.config import Config, ConfigError, DataConfig, ModelConfig, ParallelConfig
from minitron.launch import RankError, run
from minitron.measure.ledger import Ledger
from minitron.measure.metrics import read_metrics
from tests.tiers import exhaustive, tiered
from tests.train.test_train import trained
from tests.train.test_train_ranks import TRAIN, kill_after, train_on_ranks

LLAMA = ModelConfig("llama", 720, 32, 2, 32, 4, 1, 48)
GPT = ModelConfig("gpt", 720, 32, 2, 36, 6, 6, 48)
DEEP = dataclasses.replace(GPT, num_layers=4)
COLUMNS = "step", "loss", "grad_norm"


def config_of(model: ModelConfig, stories, **parallel) -> Config:
    return Config(model, DataConfig(stories, sequence_length=32), TRAIN, ParallelConfig(**parallel))


def describe(value) -> str:
    return value.family if isinstance(value, ModelConfig) else str(value)


@pytest.fixture(scope="module")
def trained_alone(stories, tmp_path_factory):
    """A function that trains a model in one process, once, and returns the run's folder."""

    @cache
    def folder_of(model: ModelConfig) -> Path:
        folder = tmp_path_factory.mktemp("alone")
        train.train(config_of(model, stories), folder)
        return folder

    return folder_of


@pytest.mark.parametrize(
    "model, num_ranks, parallel",
    tiered(
        [
            (LLAMA, 4, {"pp": 2, "tp": 2, "sequence": True, "schedule": "zero-bubble"}),
            (LLAMA, 4, {"cp": 2, "context": "all-gather", "tp": 2, "sequence": True, "zero": 3}),
            (GPT, 4, {"cp": 2, "context": "ulysses", "pp": 2, "zero": 1, "overlap_gather": True}),
            (DEEP, 4, {"pp": 2, "schedule": "dualpipe-v", "chunks": 2, "tp": 2, "sequence": True}),
            (GPT, 3, {"tp": 3}),
            (LLAMA, 4, {"tp": 2, "sequence": True, "zero": 1}),
            (GPT, 4, {"tp": 2, "sequence": True, "zero": 3}),
            (LLAMA, 4, {"tp": 4, "sequence": True}),
            (GPT, 2, {"pp": 2, "schedule": "zero-bubble"}),
            (LLAMA, 4, {"pp": 2, "tp": 2, "sequence": True}),
            (GPT, 4, {"pp": 2, "zero": 1}),
            (GPT, 4, {"pp": 2, "zero": 1, "overlap_gather": True}),
            (LLAMA, 4, {"tp": 2, "zero": 1, "overlap_gather": True}),
            (DEEP, 2, {"pp": 2, "schedule": "zb-v", "chunks": 2}),
            (LLAMA, 2, {"cp": 2}),
            (GPT, 4, {"cp": 2, "context": "ulysses", "pp": 2, "zero": 1}),
        ]
    ),
    ids=describe,
)
def test_a_cut_model_trains_what_one_process_trains(
    stories, trained_alone, tmp_path, model, num_ranks, parallel
):
    """Losses, norms before clipping and validation losses, and the same sampled text."""
    folders = trained_alone(model), tmp_path
    run(train_on_ranks, num_ranks, config_of(model, stories, **parallel), tmp_path, timeout=300)
    one, many = (trained(folder, *COLUMNS) for folder in folders)
    for expected, found in zip(one, many, strict=True):
        assert found == pytest.approx(expected, rel=2e-5)

    evaluations = [
        [row for row in read_metrics(folder / "metrics.jsonl") if "val_loss" in row]
        for folder in folders
    ]
    for expected, found in zip(*evaluations, strict=True):
        assert found["val_loss"] == pytest.approx(expected["val_loss"], rel=2e-5)
        assert found["sample"] == expected["sample"]


@exhaustive
@pytest.mark.parametrize(
    "precision, parallel",
    [
        ("bf16", {"cp": 2}),
        ("bf16", {"cp": 2, "zero": 3, "context": "all-gather"}),
        ("bf16-autocast", {"cp": 2, "zero": 1}),
        ("bf16-autocast", {"cp": 2, "context": "ulysses"}),
        ("fp16", {"cp": 2, "zero": 2}),
        ("fp8", {"cp": 2}),
    ],
    ids=describe,
)
def test_a_divided_sequence_trains_in_low_precision(stories, tmp_path, precision, parallel):
    """Ulysses has two key-value heads to divide."""
    config = config_of(dataclasses.replace(LLAMA, num_kv_heads=2), stories)
    config = dataclasses.replace(
        config, train=dataclasses.replace(TRAIN, precision=precision, eval_every=0)
    )
    train.train(config, tmp_path / "one")
    cut = dataclasses.replace(config, parallel=ParallelConfig(**parallel))
    run(train_on_ranks, 2, cut, tmp_path / "many")
    one, many = (trained(tmp_path / name, *COLUMNS) for name in ("one", "many"))
    for expected, found in zip(one, many, strict=True):
        assert found == pytest.approx(expected, rel=2e-2)


def train_in_float64(group, config, folder, resume=False) -> None:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        train.train(config, folder, resume, group)
    finally:
        torch.set_default_dtype(before)


@exhaustive
def test_a_run_moves_between_layouts_to_12_digits(stories, tmp_path):
    """dp 2 x tp 2, 4 stages, one process, stage 3 on 3 ranks, then dp 2 x cp 2; in float64."""
    config = config_of(dataclasses.replace(LLAMA, num_layers=4), stories)
    config = dataclasses.replace(
        config, train=dataclasses.replace(TRAIN, steps=10, checkpoint_every=2, keep_checkpoints=5)
    )
    train_in_float64(SINGLE_RANK, config, tmp_path / "whole")
    folder = tmp_path / "moved"
    layouts = [
        (4, {"tp": 2, "zero": 1, "sequence": True}),
        (4, {"pp": 4}),
        (1, {}),
        (3, {"zero": 3}),
        (4, {"cp": 2, "zero": 2}),
    ]
    for number, (num_ranks, parallel) in enumerate(layouts):
        cut = dataclasses.replace(config, parallel=ParallelConfig(**parallel))
        if num_ranks == 1:
            train_in_float64(SINGLE_RANK, cut, folder, True)
        else:
            run(train_in_float64, num_ranks, cut, folder, number > 0)
        kill_after(folder, 2 * (number + 1))
    for moved, whole in zip(
        trained(folder, *COLUMNS), trained(tmp_path / "whole", *COLUMNS), strict=True
    ):
        assert moved == pytest.approx(whole, rel=1e-12)


def train_and_look(group, config, folder) -> tuple[set, dict]:
    """The collectives of a step along tp, and the parameters that every rank holds whole."""
    with Ledger() as ledger:
        finished = train.train(config, folder, group=group)
    ops = {call.op for call in ledger.calls if call.axis == "tp" and call.phase == "forward"}
    return ops, {
        name: p.detach()
        for name, p in finished.model.named_parameters()
        if finished.parallel.layers["tensor"].placements[name].count == 1
    }


@exhaustive  # of the tests of every field, `sequence` has the cheap one
def test_sequence_is_what_the_config_says(stories, tmp_path):
    for sequence, op in ((False, "all_reduce"), (True, "reduce_scatter")):
        config = config_of(LLAMA, stories, tp=2, sequence=sequence)
        (ops, _), _ = run(train_and_look, 2, config, tmp_path / op)
        assert op in ops and ("reduce_scatter" in ops) == sequence


def gathers_late(group, config, folder) -> bool:
    return train.train(config, folder, group=group).parallel.data.overlap_gather


@exhaustive
@pytest.mark.parametrize("zero", [1, 2])
def test_weights_are_gathered_when_the_config_says(stories, tmp_path, zero):
    for late in (False, True):
        config = config_of(LLAMA, stories, zero=zero, overlap_gather=late)
        assert run(gathers_late, 2, config, tmp_path / str(late)) == [late, late]


@exhaustive
def test_dropout_keeps_alike_what_every_rank_holds(stories, tmp_path):
    """The residual stream is dropped alike on both ranks, their heads are not."""
    config = config_of(dataclasses.replace(LLAMA, dropout=0.3), stories, tp=2)
    (_, first), (_, second) = run(train_and_look, 2, config, tmp_path / "run")
    # norms, and the keys and values of the only key-value head
    assert first.keys() == second.keys() and len(first) == 5 + 4
    assert all(torch.equal(first[name], second[name]) for name in first)


@exhaustive
def test_dropout_resumes_bit_for_bit_in_the_same_layout(stories, tmp_path):
    model = dataclasses.replace(LLAMA, dropout=0.2)
    config = config_of(model, stories, tp=2, sequence=True)
    run(train_on_ranks, 2, config, tmp_path / "whole")
    short = tmp_path / "short"
    run(train_on_ranks, 2, config, short)
    kill_after(short, 3)
    run(train_on_ranks, 2, config, short, True)
    assert trained(short, *COLUMNS) == trained(tmp_path / "whole", *COLUMNS)


@pytest.mark.parametrize(
    "model, num_ranks, parallel, mistake",
    [
        (LLAMA, 2, {"tp": 3}, "parallel.tp = 3, but there are 2 ranks"),
        (LLAMA, 2, {"tp": 2, "dp": 2}, "--nproc-per-node 4"),
        (dataclasses.replace(LLAMA, vocab_size=721), 2, {"tp": 2}, "model.vocab_size = 721"),
        (dataclasses.replace(LLAMA, ffn_width=49), 2, {"tp": 2}, "model.ffn_width = 49"),
        (GPT, 4, {"tp": 4}, "model.num_heads = 6 is not divisible by 4 ranks"),
        (GPT, 2, {"pp": 2, "tp": 2}, "parallel.tp = 2 and parallel.pp = 2, but there are 2 ranks"),
        (
            DEEP,
            2,
            {"pp": 2, "schedule": "interleaved", "chunks": 2},
            "5 micro-batches .* are not divisible by",
        ),
        (
            DEEP,
            4,
            {"pp": 2, "dp": 2, "schedule": "dualpipe-v", "chunks": 2},
            "3 micro-batches .* but dualpipe-v needs 4 or more on parallel.pp = 2",
        ),
    ],
    ids=describe,
)
def test_a_layout_that_cannot_work_is_one_line(
    stories, tmp_path, model, num_ranks, parallel, mistake
):
    with pytest.raises(RankError, match=mistake):
        run(train_on_ranks, num_ranks, config_of(model, stories, **parallel), tmp_path / "run")


def test_what_the_config_alone_can_tell(stories):
    with pytest.raises(ConfigError, match="parallel.sequence with parallel.tp = 1"):
        ParallelConfig(sequence=True)
    with pytest.raises(ConfigError, match="32 is not divisible by parallel.tp = 3.*use 33"):
        config_of(GPT, stories, tp=3, sequence=True)
    with pytest.raises(ConfigError, match="num_layers = 2 does not fill .* = 3 stages"):
        config_of(GPT, stories, pp=3)
    with pytest.raises(ConfigError, match="reshard_each_pass = False with parallel.zero = 2"):
        ParallelConfig(zero=2, reshard_each_pass=False)
    with pytest.raises(ConfigError, match="schedule = gpipe and chunks = 1 with parallel.pp = 1"):
        ParallelConfig(schedule="gpipe")
    with pytest.raises(
        ConfigError, match="chunks = 2 with parallel.schedule = 1f1b: set parallel.chunks to 1"
    ):
        ParallelConfig(pp=2, chunks=2)
    with pytest.raises(ConfigError, match="chunks = 1 with parallel.schedule = interleaved"):
        ParallelConfig(pp=2, schedule="interleaved")
    with pytest.raises(
        ConfigError, match="chunks = 3 with parallel.schedule = zb-v: set parallel.chunks to 2"
    ):
        ParallelConfig(pp=2, schedule="zb-v", chunks=3)
