"""Rows reach TensorBoard and Weights & Biases, through modules that stand in for theirs."""

import dataclasses
import sys
from types import SimpleNamespace

import pytest

from minitron import train
from minitron.config import Config, ConfigError, DataConfig, LogConfig
from minitron.measure.loggers import SharedLog, TensorBoardLog, WandbLog
from minitron.measure.metrics import read_metrics
from minitron.running.folder import holds_run
from tests.train.test_train_ranks import MODEL, TRAIN


class FakeWriter:
    """torch.utils.tensorboard.SummaryWriter, which keeps what it is told."""

    def __init__(self, log_dir: str, purge_step: int):
        self.log_dir, self.purge_step = log_dir, purge_step
        self.scalars, self.texts, self.is_closed = [], [], False

    def add_scalar(self, name: str, value: float, step: int) -> None:
        self.scalars.append((name, value, step))

    def add_text(self, name: str, text: str, step: int) -> None:
        self.texts.append((name, text, step))

    def close(self) -> None:
        self.is_closed = True


class FakeWandb:
    """wandb, with one run."""

    def __init__(self):
        self.rows, self.id, self.is_finished, self.axes = [], "abc123", False, []

    def init(self, **options) -> "FakeWandb":
        self.options = options
        return self

    def define_metric(self, name: str, step_metric: str) -> None:
        self.axes.append((name, step_metric))

    def log(self, row: dict) -> None:
        self.rows.append(row)

    def finish(self) -> None:
        self.is_finished = True


@pytest.fixture
def writers(monkeypatch) -> list[FakeWriter]:
    made: list[FakeWriter] = []

    def make(*args, **options):
        made.append(FakeWriter(*args, **options))
        return made[-1]

    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", SimpleNamespace(SummaryWriter=make))
    return made


@pytest.fixture
def wandb(monkeypatch) -> FakeWandb:
    fake = FakeWandb()
    monkeypatch.setitem(sys.modules, "wandb", fake)
    return fake


def test_a_row_goes_everywhere(tmp_path, writers, wandb):
    log = SharedLog(
        tmp_path / "metrics.jsonl",
        TensorBoardLog(tmp_path / "curves", step=4),
        WandbLog("stories", tmp_path, {"seed": 0}),
    )
    log.write(step=5, loss=2.5, mfu=None)
    log.write(step=5, val_loss=2.25, sample="Once")
    log.close()

    assert read_metrics(tmp_path / "metrics.jsonl") == [
        {"step": 5, "loss": 2.5, "mfu": None},
        {"step": 5, "val_loss": 2.25, "sample": "Once"},
    ]
    [writer] = writers
    assert (writer.log_dir, writer.purge_step) == (str(tmp_path / "curves"), 5)
    assert writer.scalars == [("loss", 2.5, 5), ("val_loss", 2.25, 5)]
    assert writer.texts == [("sample", "Once", 5)] and writer.is_closed
    assert wandb.rows == [{"step": 5, "loss": 2.5}, {"step": 5, "val_loss": 2.25}]
    assert wandb.axes == [("*", "step")] and wandb.is_finished
    assert wandb.options["project"] == "stories" and wandb.options["config"] == {"seed": 0}


def test_a_resumed_run_goes_on_with_its_curves(stories, tmp_path, writers, wandb):
    settings = dataclasses.replace(TRAIN, steps=2, eval_every=0)
    log = LogConfig(tensorboard=True, wandb="stories")
    config = Config(MODEL, DataConfig(stories, 32), settings, log=log)
    train.train(config, tmp_path / "run")
    assert wandb.options["id"] is None
    longer = dataclasses.replace(
        config, train=dataclasses.replace(settings, steps=3, continuation="constant")
    )
    train.train(longer, tmp_path / "run", resume=True)

    assert wandb.options["id"] == "abc123" and wandb.options["resume"] == "allow"
    assert wandb.options["config"]["model"]["num_layers"] == MODEL.num_layers
    assert [row["step"] for row in wandb.rows if "loss" in row] == [1, 2, 3]
    assert [writer.purge_step for writer in writers] == [1, 3]
    assert [step for name, _, step in writers[1].scalars if name == "loss"] == [3]
    assert all(writer.is_closed for writer in writers)


@pytest.mark.parametrize(
    "module, log, mistake",
    [
        (
            "torch.utils.tensorboard",
            LogConfig(tensorboard=True),
            "log.tensorboard: the package tensorboard is not installed; pip install tensorboard, or",  # noqa: E501
        ),
        (
            "wandb",
            LogConfig(wandb="stories"),
            "log.wandb: the package wandb is not installed; pip install wandb, or leave it out",
        ),
    ],
    ids=["tensorboard", "wandb"],
)
def test_what_is_not_installed_is_one_line(stories, tmp_path, monkeypatch, module, log, mistake):
    monkeypatch.setitem(sys.modules, module, None)  # an import of it fails
    config = Config(MODEL, DataConfig(stories, 32), TRAIN, log=log)
    with pytest.raises(ConfigError, match=mistake):
        train.train(config, tmp_path / "run")
    assert not holds_run(tmp_path / "run")
