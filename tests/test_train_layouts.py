"""A run whose layers are cut: the same training in any layout, also after a move to another."""

import dataclasses

import pytest

from minitron import train
from minitron.comm.launch import RankError, run
from minitron.config import Config, ConfigError, DataConfig, ModelConfig, ParallelConfig
from minitron.measure.metrics import read_metrics
from tests.test_train import trained
from tests.test_train_ranks import TRAIN, kill_after, train_on_ranks

LLAMA = ModelConfig("llama", 720, 32, 2, 32, 4, 1, 48)
GPT = ModelConfig("gpt", 720, 32, 2, 36, 6, 6, 48)
COLUMNS = "step", "loss", "grad_norm"


def config_of(model: ModelConfig, stories, **parallel) -> Config:
    return Config(model, DataConfig(stories, sequence_length=32), TRAIN, ParallelConfig(**parallel))


def describe(value) -> str:
    return value.family if isinstance(value, ModelConfig) else str(value)


@pytest.mark.parametrize("model, num_ranks, parallel", [
    (GPT, 3, {"tp": 3}),
    (LLAMA, 4, {"tp": 2, "sequence": True, "zero": 1}),
    (GPT, 4, {"tp": 2, "sequence": True, "zero": 3}),
    (LLAMA, 4, {"tp": 4, "sequence": True}),
], ids=describe)
def test_a_cut_model_trains_what_one_process_trains(stories, tmp_path, model, num_ranks, parallel):
    """Losses, norms before clipping and validation losses, and the same sampled text."""
    train.train(config_of(model, stories), tmp_path / "one")
    run(train_on_ranks, num_ranks, config_of(model, stories, **parallel), tmp_path / "many")
    one, many = (trained(tmp_path / name, *COLUMNS) for name in ("one", "many"))
    for expected, found in zip(one, many, strict=True):
        assert found == pytest.approx(expected, rel=2e-5)

    evaluations = [[row for row in read_metrics(tmp_path / name / "metrics.jsonl")
                    if "val_loss" in row] for name in ("one", "many")]
    for expected, found in zip(*evaluations, strict=True):
        assert found["val_loss"] == pytest.approx(expected["val_loss"], rel=2e-5)
        assert found["sample"] == expected["sample"]


def test_a_run_moves_between_layouts(stories, tmp_path):
    """2 steps cut over 2 x 2 ranks, 2 sharded over 3, 2 cut over 2, 2 in one process."""
    config = config_of(LLAMA, stories)
    config = dataclasses.replace(config, train=dataclasses.replace(
        TRAIN, steps=8, checkpoint_every=2, keep_checkpoints=4))
    train.train(config, tmp_path / "whole")
    folder = tmp_path / "moved"
    layouts = [(4, {"tp": 2, "zero": 2, "sequence": True}), (3, {"zero": 3}), (2, {"tp": 2})]
    for number, (num_ranks, parallel) in enumerate(layouts):
        cut = dataclasses.replace(config, parallel=ParallelConfig(**parallel))
        run(train_on_ranks, num_ranks, cut, folder, number > 0)
        kill_after(folder, 2 * (number + 1))
    train.train(config, folder, resume=True)
    for moved, whole in zip(trained(folder, *COLUMNS), trained(tmp_path / "whole", *COLUMNS),
                            strict=True):
        assert moved == pytest.approx(whole, rel=2e-5)


def test_dropout_resumes_bit_for_bit_in_the_same_layout(stories, tmp_path):
    model = dataclasses.replace(LLAMA, dropout=0.2)
    config = config_of(model, stories, tp=2, sequence=True)
    run(train_on_ranks, 2, config, tmp_path / "whole")
    short = tmp_path / "short"
    run(train_on_ranks, 2, config, short)
    kill_after(short, 3)
    run(train_on_ranks, 2, config, short, True)
    assert trained(short, *COLUMNS) == trained(tmp_path / "whole", *COLUMNS)


@pytest.mark.parametrize("model, num_ranks, parallel, mistake", [
    (LLAMA, 2, {"tp": 3}, "parallel.tp = 3, but there are 2 ranks"),
    (LLAMA, 2, {"tp": 2, "dp": 2}, "--nproc-per-node 4"),
    (dataclasses.replace(LLAMA, vocab_size=721), 2, {"tp": 2}, "model.vocab_size = 721"),
    (dataclasses.replace(LLAMA, ffn_width=49), 2, {"tp": 2}, "model.ffn_width = 49"),
    (GPT, 4, {"tp": 4}, "model.num_heads = 6 does not divide by 4 ranks"),
], ids=describe)
def test_a_layout_that_cannot_work_is_one_line(
    stories, tmp_path, model, num_ranks, parallel, mistake
):
    with pytest.raises(RankError, match=mistake):
        run(train_on_ranks, num_ranks, config_of(model, stories, **parallel), tmp_path / "run")


def test_what_the_config_alone_can_tell(stories):
    with pytest.raises(ConfigError, match="parallel.sequence with parallel.tp = 1"):
        ParallelConfig(sequence=True)
    with pytest.raises(ConfigError, match="32 does not divide by parallel.tp = 3.*use 33"):
        config_of(GPT, stories, tp=3, sequence=True)
