"""What does not fit is refused before it is built: and only what is sure."""

import dataclasses

import pytest
import torch

from minitron.comm.mesh import OneRankMesh
from minitron.config import (
    Config,
    ConfigError,
    DataConfig,
    ModelConfig,
    ParallelConfig,
    TrainConfig,
)
from minitron.config.layout import divisors, layouts_that_fit, require_ranks
from minitron.launch.process import memory_bytes, pick_device
from minitron.measure.meter import Meter
from minitron.model.transformer import Transformer
from minitron.run import Run, Training
from minitron.running.memory import least_activations, least_bytes, require_memory
from tests.tiers import diagonal_of

CPU = torch.device("cpu")
MODEL = ModelConfig("llama", 720, num_layers=4, width=64, num_heads=4, num_kv_heads=2, ffn_width=96)
LARGE = {"micro_batch_size": 10**7, "global_batch_size": 10**7}


@pytest.mark.parametrize(
    ("section", "changes", "message"),
    [
        ("model", {"vocab_size": 10**9}, "the training state would take .* lower model.width"),
        ("model", {"ffn_width": 10**9}, "the training state"),
        ("model", {"width": 10**9, "num_heads": 2, "num_kv_heads": 2}, "the training state"),
        ("train", {"global_batch_size": 10**9}, "the samples of a step .* train.global_batch_size"),
        ("train", {"global_batch_size": 2**62}, "the samples of a step"),
        ("train", LARGE, "a micro-batch's activations"),
        ("train", {**LARGE, "recompute": "sqrt"}, "a micro-batch's activations"),
        ("train", {**LARGE, "recompute": "full"}, "a micro-batch's activations"),
    ],
)
def test_what_memory_cannot_hold_is_refused_at_once(section, changes, message):
    config = Config(MODEL, train=TrainConfig())
    config = dataclasses.replace(
        config, **{section: dataclasses.replace(getattr(config, section), **changes)}
    )
    with pytest.raises(ConfigError, match=message):
        require_memory(config, 1, 24e9, "cpu")


def test_evaluation_counts():
    with pytest.raises(ConfigError, match="samples of an evaluation .* lower train.eval_sequences"):
        require_memory(Config(MODEL), 1, 24e9, "cpu", num_eval_sequences=10**9)


@pytest.mark.parametrize(
    "recompute, precision",
    diagonal_of(["none", "selective", "full", "sqrt"], ["fp32", "bf16-autocast", "bf16"]),
)
def test_nothing_is_counted_that_is_not_there(recompute, precision):
    """Each number is at most what the meter finds in a step."""
    train = TrainConfig(
        global_batch_size=4, micro_batch_size=2, recompute=recompute, precision=precision
    )
    config = Config(MODEL, DataConfig(sequence_length=64), train)
    training = Training(config, OneRankMesh(), CPU)
    pairs = training.micro_batches(torch.zeros(4, 65, dtype=torch.int64), 4)
    training.update(pairs, 0.0)
    with Meter(training.model, training.optimizer) as meter:
        training.update(pairs, 0.0)
    least = least_bytes(config, 1)
    assert 0 < least["a micro-batch's activations"] <= meter.peak.total
    state = meter.peak.bytes
    assert least["the training state"] <= sum(state.values())


def test_every_rank_of_a_layout_is_asked_for_its_part():
    whole = least_bytes(Config(MODEL), 1)
    for parallel in (ParallelConfig(tp=2), ParallelConfig(pp=2), ParallelConfig(zero=3)):
        part = least_bytes(Config(MODEL, parallel=parallel), 2)
        assert part["the training state"] < 0.8 * whole["the training state"]


def test_a_run_asks_before_it_builds(tmp_path, monkeypatch):
    from minitron.corpus.stories import write_stories

    write_stories(tmp_path / "data", 20_000)
    monkeypatch.setattr(Transformer, "__init__", lambda *_: pytest.fail("it was built"))
    config = Config(
        dataclasses.replace(MODEL, ffn_width=10**9),
        DataConfig(tmp_path / "data"),
        TrainConfig(device="cpu"),
    )
    with pytest.raises(ConfigError, match="the training state would take .* cpu has"):
        Run(config, tmp_path / "run")


def test_this_machine_has_memory():
    assert 1e8 < memory_bytes(CPU) < 1e15


@pytest.mark.parametrize("name", ["meta", "privateuseone", "hpu", "vulkan", "nonsense", "cpu:-1"])
def test_a_device_that_does_not_compute_is_refused(name):
    with pytest.raises(ConfigError, match=f"train.device = {name}: cannot be used .*; try cpu"):
        pick_device(name)


# Remedies are looked for in no time, too


def test_divisors():
    for number in range(1, 200):
        assert divisors(number) == [each for each in range(1, number + 1) if number % each == 0]
    assert len(divisors(10**12)) == 169


def test_a_remedy_for_a_batch_of_a_billion_is_found_at_once():
    parallel = ParallelConfig(pp=4, schedule="interleaved", chunks=1 + 1)
    model = dataclasses.replace(MODEL, num_layers=8)
    train = TrainConfig(global_batch_size=10**9, micro_batch_size=10**8 + 1)
    with pytest.raises(ConfigError, match="train.micro_batch_size to "):
        require_ranks(Config(model, train=train, parallel=parallel), 4)
    assert layouts_that_fit(Config(MODEL), 1) == [(1, 1, 1)]


def test_a_divided_sequence_is_a_shorter_one_and_its_ranks_share_the_state():
    whole = Config(MODEL, parallel=ParallelConfig(zero=3))
    cut = dataclasses.replace(whole, parallel=ParallelConfig(zero=3, cp=4))
    plain, divided = least_bytes(whole, 4), least_bytes(cut, 4)
    assert divided["the training state"] == plain["the training state"]  # over 4 ranks in both
    assert least_activations(cut, 8) == pytest.approx(least_activations(whole, 8) / 4, rel=1e-3)
