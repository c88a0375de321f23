"""A run as its user sees it: resumed, killed, stopped, asked for the impossible."""

import dataclasses
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import minitron.precision
from minitron import cli, train
from minitron.config import (
    Config,
    ConfigError,
    DataConfig,
    ModelConfig,
    TrainConfig,
    command_line,
)
from minitron.config.file import from_dict
from minitron.corpus.stories import write_stories
from minitron.measure.metrics import MetricsLog, read_metrics
from minitron.precision import LossScale
from minitron.pytorch.private import tensors_in
from minitron.train import Run
from minitron.train_log import require_sound
from tests.processes import started
from tests.tiers import as_exhaustive, exhaustive

MODEL = ModelConfig(
    max_sequence_length=32,
    num_layers=2,
    width=32,
    num_heads=2,
    num_kv_heads=1,
    ffn_width=48,
    dropout=0.1,
)
TRAIN = TrainConfig(
    steps=12,
    global_batch_size=6,
    micro_batch_size=4,
    warmup_steps=3,
    eval_every=5,
    eval_sequences=8,
    checkpoint_every=4,
    device="cpu",
)


@pytest.fixture
def config(stories) -> Config:
    return Config(MODEL, DataConfig(stories, sequence_length=32), TRAIN)


@pytest.fixture(scope="module")
def whole(stories, tmp_path_factory) -> Run:
    """A run of `config` to its end; tests that go on with it take a copy of its folder."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    return train.train(Config(MODEL, DataConfig(stories, sequence_length=32), TRAIN), folder)


@pytest.fixture
def copied(whole, tmp_path) -> Path:
    return shutil.copytree(whole.folder, tmp_path / "run")


def trained(folder: Path, *columns: str) -> list[tuple]:
    rows = [row for row in read_metrics(folder / "metrics.jsonl") if "loss" in row]
    return [tuple(row[column] for column in columns) for row in rows]


def weights(run: Run) -> list[torch.Tensor]:
    return [parameter.detach().clone() for parameter in run.model.parameters()]


def command(config: Config, folder: Path, *more: str) -> list[str]:
    """The same run as a command line."""
    return [
        sys.executable,
        "-m",
        "minitron.train",
        "--run-dir",
        str(folder),
        "--model.max-sequence-length",
        "32",
        "--model.num-layers",
        "2",
        "--model.width",
        "32",
        "--model.num-heads",
        "2",
        "--model.num-kv-heads",
        "1",
        "--model.ffn-width",
        "48",
        "--model.dropout",
        "0.1",
        "--data.path",
        str(config.data.path),
        "--data.sequence-length",
        "32",
        "--train.global-batch-size",
        "6",
        "--train.micro-batch-size",
        "4",
        "--train.warmup-steps",
        "3",
        "--train.eval-every",
        "0",
        "--train.eval-sequences",
        "8",
        "--train.checkpoint-every",
        "4",
        "--train.device",
        "cpu",
        *more,
    ]


def test_a_run_learns_and_leaves_what_it_promises(config, tmp_path):
    config = dataclasses.replace(config, train=dataclasses.replace(TRAIN, steps=60))
    run = train.train(config, tmp_path / "run")
    rows = read_metrics(tmp_path / "run" / "metrics.jsonl")
    losses = [row["loss"] for row in rows if "loss" in row]
    assert len(losses) == 60
    assert losses[-1] < 0.75 * losses[0]
    assert [row["step"] for row in rows if "val_loss" in row] == list(range(5, 61, 5))
    assert all(0 < row["mfu"] <= 1 for row in rows if "mfu" in row)
    assert rows[-1]["sample"]
    assert rows[-2]["tokens"] == 60 * 6 * 32
    assert json.loads((run.folder / "config.json").read_text())["model"]["vocab_size"] > 100
    assert len(list((run.folder / "checkpoints").iterdir())) == TRAIN.keep_checkpoints


@pytest.mark.parametrize(
    ("device", "precision"),
    [
        ("cpu", "fp32"),
        as_exhaustive(("cpu", "bf16-autocast")),
        pytest.param(
            "cuda",
            "bf16-autocast",
            marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
        ),
    ],
)
def test_a_resumed_run_is_the_uninterrupted_one_bit_for_bit(config, tmp_path, device, precision):
    """Dropout and a ragged last micro-batch included, so random state and position matter."""
    settings = dataclasses.replace(TRAIN, device=device, precision=precision)
    config = dataclasses.replace(config, train=settings)
    whole = train.train(config, tmp_path / "whole")

    half = dataclasses.replace(config, train=dataclasses.replace(settings, checkpoint_every=3))
    stopped = Run(half, tmp_path / "parts")
    log = MetricsLog(tmp_path / "parts" / "metrics.jsonl")
    for _ in range(7):  # as if killed after step 7, with step 6 saved
        row = stopped.train_step()
        log.write(**row | {"loss": float(row["loss"]), "grad_norm": float(row["grad_norm"])})
        if stopped.step == 6:
            stopped.save()
    torch.manual_seed(123)
    resumed = train.train(half, tmp_path / "parts", resume=True)

    columns = "step", "loss", "grad_norm", "learning_rate", "tokens"
    assert trained(tmp_path / "parts", "step") == [(step,) for step in range(1, 13)]
    assert trained(tmp_path / "parts", *columns) == trained(tmp_path / "whole", *columns)
    for a, b in zip(weights(whole), weights(resumed), strict=True):
        assert torch.equal(a, b)


class RefuseFloat64(TorchDispatchMode):
    """What Apple's GPUs do."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **kwargs or {})
        for tensor in tensors_in(args, kwargs, out):
            if tensor.dtype == torch.float64:
                raise TypeError(f"{func}: the device has no float64")
        return out


@pytest.mark.parametrize(
    "precision", ["fp16", as_exhaustive("fp32"), as_exhaustive("bf16-autocast")]
)
def test_a_device_without_float64_trains_and_evaluates(config, tmp_path, monkeypatch, precision):
    """Nothing on a device's path may need float64: dropout, clipping, evaluation, samples."""
    monkeypatch.setattr(minitron.precision, "WITHOUT_FLOAT64", {"cpu"})
    settings = dataclasses.replace(TRAIN, precision=precision, recompute="full", steps=5)
    with RefuseFloat64():
        train.train(dataclasses.replace(config, train=settings), tmp_path / "run")
    rows = read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert [row["step"] for row in rows if "val_loss" in row] == [5]


def trained_by(words: list[str], killed_after: int | None = None) -> None:
    """`minitron train` in a process of its own, which may be killed after so many steps."""
    take_step = Run.train_step

    def step(run: Run) -> dict:
        if run.step == killed_after:
            os.kill(os.getpid(), signal.SIGKILL)
        return take_step(run)

    Run.train_step = step
    sys.argv = ["minitron", *words]
    command_line.run(cli.train)


def test_kill_9_and_resume_is_bit_identical(config, tmp_path):
    """Saved are steps 4 and 8."""
    killed = tmp_path / "killed"
    words = command(config, killed, "--train.steps", "14")[3:]
    victim = started(trained_by, words, 9, output=tmp_path / "output")
    victim.join(300)
    assert victim.exitcode == -signal.SIGKILL
    saved = sorted(path.name for path in (killed / "checkpoints").iterdir())
    assert saved == ["step_00000004", "step_00000008"]
    train.start(train.read_options(["--resume", "--run-dir", str(killed)]))
    assert_as_if_never_killed(killed, tmp_path / "whole")


def assert_as_if_never_killed(killed: Path, whole: Path) -> None:
    same = from_dict(json.loads((killed / "config.json").read_text()))
    train.train(same, whole)
    columns = "step", "loss", "grad_norm"
    assert trained(killed, *columns) == trained(whole, *columns)
    assert len(trained(killed, "step")) == same.train.steps


@exhaustive
def test_kill_9_at_any_moment_and_resume_is_bit_identical(config, tmp_path):
    steps = ["--train.steps", "300", "--train.checkpoint-every", "20"]
    killed = tmp_path / "killed"
    victim = subprocess.Popen(command(config, killed, *steps))
    checkpoints = killed / "checkpoints"
    wait_for(lambda: checkpoints.is_dir() and any(checkpoints.glob("step_????????")), victim)
    victim.kill()
    victim.wait()
    assert max(path.name for path in checkpoints.glob("step_????????")) < "step_00000300"
    resume = ["--resume", "--run-dir", str(killed)]
    subprocess.run([sys.executable, "-m", "minitron.train", *resume], check=True, timeout=300)
    assert_as_if_never_killed(killed, tmp_path / "whole")


ENDLESS = "--train.steps", "100000", "--train.checkpoint-every", "0"


def test_a_signal_saves_first_and_tells_how_to_go_on(config, tmp_path):
    words = command(config, tmp_path / "run", *ENDLESS)[3:]
    process = started(trained_by, words, output=tmp_path / "output")
    log = tmp_path / "run" / "metrics.jsonl"
    wait_for(lambda: log.exists() and len(read_metrics(log)) >= 3, process)
    os.kill(process.pid, signal.SIGTERM)
    process.join(300)
    output = (tmp_path / "output").read_text()
    assert_stopped_by(signal.SIGTERM, tmp_path / "run", process.exitcode, output)


@exhaustive
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_to_a_command_saves_first(config, tmp_path, number):
    folder = tmp_path / "run"
    process = subprocess.Popen(command(config, folder, *ENDLESS), stdout=subprocess.PIPE, text=True)
    log = folder / "metrics.jsonl"
    wait_for(lambda: log.exists() and len(read_metrics(log)) >= 3, process)
    process.send_signal(number)
    output, _ = process.communicate(timeout=300)
    assert_stopped_by(number, folder, process.returncode, output)


def assert_stopped_by(number: signal.Signals, folder: Path, code: int, output: str) -> None:
    assert code == 128 + number
    last = trained(folder, "step")[-1][0]
    assert f"Stopped by {number.name} at step {last}; saved." in output
    assert f"minitron train --resume --run-dir {folder}" in output
    assert (folder / "checkpoints" / f"step_{last:08d}").exists()


@exhaustive
def test_a_signal_is_heard_after_every_step_however_rarely_the_run_logs(
    config, tmp_path, monkeypatch
):
    take_step = Run.train_step

    def interrupted(run: Run) -> dict:
        row = take_step(run)
        if run.step == 3:
            signal.raise_signal(signal.SIGTERM)
        return row

    monkeypatch.setattr(Run, "train_step", interrupted)
    rarely = dataclasses.replace(TRAIN, log_every=1000, eval_every=0, checkpoint_every=0)
    run = train.train(dataclasses.replace(config, train=rarely), tmp_path / "run")
    assert (run.step, run.stop.signal) == (3, signal.SIGTERM)
    assert (tmp_path / "run" / "checkpoints" / "step_00000003").exists()


def wait_for(condition: Callable[[], bool], process: subprocess.Popen | BaseProcess) -> None:
    end = time.monotonic() + 90
    while not condition():
        code = process.exitcode if isinstance(process, BaseProcess) else process.poll()
        assert code is None, "the run ended before it was interrupted"
        assert time.monotonic() < end, "the run has not started"
        time.sleep(0.02)


def test_the_second_run_does_not_touch_the_first(config, copied):
    before = (copied / "metrics.jsonl").read_bytes()
    with pytest.raises(ConfigError, match="already holds a run; add --resume"):
        train.train(config, copied)
    assert (copied / "metrics.jsonl").read_bytes() == before
    (copied / "metrics.jsonl").unlink()  # its checkpoints would be deleted as the oldest
    with pytest.raises(ConfigError, match="already holds a run; add --resume"):
        train.train(config, copied)


def test_runs_are_numbered(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    file = Path("configs/tiny.toml")
    assert train.default_folder(file, resume=False) == Path("runs/tiny")
    assert train.default_folder(file, resume=True) == Path("runs/tiny")
    for name in ("tiny", "tiny-2"):
        (tmp_path / "runs" / name).mkdir(parents=True)
        (tmp_path / "runs" / name / "metrics.jsonl").write_text("{}\n")
    assert train.default_folder(file, resume=False) == Path("runs/tiny-3")
    assert train.default_folder(file, resume=True) == Path("runs/tiny-2")


def test_resuming_as_another_model_is_refused(config, copied):
    wider = dataclasses.replace(config, model=dataclasses.replace(MODEL, width=64))
    with pytest.raises(ConfigError, match=r"model.width = 64, but .* was trained with 32"):
        train.train(wider, copied, resume=True)
    decayed = dataclasses.replace(config, train=dataclasses.replace(TRAIN, weight_decay=0.5))
    with pytest.raises(ConfigError, match=r"train.weight_decay = 0.5, but .* with 0.1"):
        train.train(decayed, copied, resume=True)
    shorter = dataclasses.replace(config, train=dataclasses.replace(TRAIN, steps=5))
    with pytest.raises(ConfigError, match=r"train.steps = 5, but .* is at step 12"):
        train.train(shorter, copied, resume=True)
    longer = dataclasses.replace(
        config, train=dataclasses.replace(TRAIN, steps=14, continuation="constant")
    )
    assert train.train(longer, copied, resume=True).step == 14


def test_resuming_on_other_tokens_is_refused(config, copied, tmp_path):
    for seed in (0, 1):
        write_stories(tmp_path / "data", num_tokens=5_000, seed=seed)
        own = dataclasses.replace(config, data=DataConfig(tmp_path / "data", 32))
        if seed == 0:
            train.train(own, tmp_path / "first")
    with pytest.raises(ConfigError, match="does not hold the tokens that"):
        train.train(own, tmp_path / "first", resume=True)
    shutil.copytree(config.data.path, tmp_path / "copy")  # the same tokens elsewhere will do
    moved = dataclasses.replace(config, data=DataConfig(tmp_path / "copy", 32))
    assert train.train(moved, copied, resume=True).step == 12


def test_a_diverged_run_stops_and_keeps_its_checkpoints(config, tmp_path, monkeypatch):
    take_step = Run.train_step

    def diverge(run: Run) -> dict:
        if run.step == 5:
            run.model.blocks[1].mlp.up.register_forward_hook(lambda *args: args[-1] * math.nan)
        return take_step(run)

    monkeypatch.setattr(Run, "train_step", diverge)
    with pytest.raises(
        ConfigError,
        match=(
            "step 6: the loss is nan. First non-finite value: the output of blocks.1.mlp.up, on "
            r"rank 0 .samples 30 to 35.. The run stopped .* the newest checkpoint is "
            ".*step_00000004; inspect these"
        ),
    ):
        train.train(config, tmp_path / "run")
    assert [p.name for p in (tmp_path / "run" / "checkpoints").iterdir()] == ["step_00000004"]


@pytest.mark.parametrize(
    "step, kept",
    [
        (1, "no checkpoint had been written yet, so with --resume the run starts over"),
        (4, "the newest checkpoint is .*step_00000004"),
    ],
)
def test_what_is_said_of_checkpoints_is_there(config, tmp_path, monkeypatch, step, kept):
    """By a run whose numbers are lost: in a step, as it saves, and as it evaluates."""
    settings = dataclasses.replace(TRAIN, async_checkpoint=True, log_every=1)
    run = Run(dataclasses.replace(config, train=settings), tmp_path)
    for _ in range(step):
        run.train_step()
    if step == 4:
        run.save()
    with pytest.raises(ConfigError, match=f"validation loss .* diverged; {kept}"):
        require_sound(run, math.nan)
    monkeypatch.setattr(run, "loss_scale", LossScale(1e-30))
    with pytest.raises(ConfigError, match=f"loss scale .* overflows; {kept}"):
        require_sound(run)
    monkeypatch.undo()
    with torch.no_grad():
        run.model.blocks[1].mlp.up.weight[3, 5] = math.nan
    with pytest.raises(ConfigError, match=f"The run stopped .* weights; {kept}"):
        run.train_step()
    with pytest.raises(ConfigError, match=f"step {step}: weights .* not saved; {kept}"):
        run.save()


def test_a_run_killed_before_its_first_checkpoint_starts_over(config, tmp_path, capsys):
    """With the rows and the weights of one that was never killed."""
    unsaved = dataclasses.replace(config, train=dataclasses.replace(TRAIN, checkpoint_every=0))
    train.train(unsaved, tmp_path / "whole")
    folder = shutil.copytree(tmp_path / "whole", tmp_path / "killed")
    shutil.rmtree(folder / "checkpoints")  # as if it had not come so far
    capsys.readouterr()

    train.train(unsaved, folder, resume=True)
    told = "the run ended before its first checkpoint, so it starts over at step 1"
    assert capsys.readouterr().err.count(f"{folder}: {told}\n") == 1
    columns = "step", "loss", "grad_norm"
    assert trained(folder, *columns) == trained(tmp_path / "whole", *columns)
    train.train(unsaved, folder, resume=True)
    assert told not in capsys.readouterr().err


def test_a_folder_in_which_no_run_has_begun_is_not_resumed(config, tmp_path):
    (tmp_path / "run").mkdir()
    with pytest.raises(ConfigError, match="no run to resume; check --run-dir, or start one"):
        train.train(config, tmp_path / "run", resume=True)


def test_a_run_that_failed_before_its_first_step_leaves_its_folder_free(config, tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "metrics.jsonl").touch()
    assert train.train(config, tmp_path / "run").step == 12


def test_a_vocabulary_too_small_for_the_data_is_refused(config, tmp_path):
    small = dataclasses.replace(config, model=dataclasses.replace(MODEL, vocab_size=10))
    with pytest.raises(ConfigError, match=r"model.vocab_size = 10 is smaller than the \d+ tokens"):
        train.train(small, tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("device", ["cuda:77", "gpu", "meta:x"])
def test_a_device_that_is_not_there_is_refused(config, tmp_path, device):
    elsewhere = dataclasses.replace(config, train=dataclasses.replace(TRAIN, device=device))
    with pytest.raises(ConfigError, match=f"train.device = {device}: cannot be used"):
        train.train(elsewhere, tmp_path / "run")


@exhaustive
@pytest.mark.parametrize("policy", ["full", "selective", "sqrt"])
def test_recomputation_trains_bit_identically(config, tmp_path, policy):
    train.train(config, tmp_path / "plain")
    again = dataclasses.replace(config, train=dataclasses.replace(TRAIN, recompute=policy))
    train.train(again, tmp_path / "again")
    columns = "step", "loss", "grad_norm"
    assert trained(tmp_path / "again", *columns) == trained(tmp_path / "plain", *columns)


def test_bf16_trains_nearly_the_same(config, whole, tmp_path):
    """bf16 keeps 8 bits: each rounding errs by up to 2^-9, and a loss comes after a few of them."""
    rough = dataclasses.replace(config, train=dataclasses.replace(TRAIN, precision="bf16-autocast"))
    train.train(rough, tmp_path)
    assert {p.dtype for p in whole.model.parameters()} == {torch.float32}
    for (a,), (b,) in zip(trained(whole.folder, "loss"), trained(tmp_path, "loss"), strict=True):
        assert a != b
        assert a == pytest.approx(b, rel=2**-6)


def test_a_folder_without_tokenizer_trains_without_samples(config, tmp_path):
    write_stories(tmp_path / "bare", num_tokens=5_000)
    (tmp_path / "bare" / "tokenizer.json").unlink()
    bare = dataclasses.replace(config, data=DataConfig(tmp_path / "bare", 32))
    run = train.train(bare, tmp_path / "run")
    assert run.sample(1, 5) == []


def test_the_options_of_a_file_are_overridden_and_a_saved_run_speaks_for_itself(
    config, copied, tmp_path
):
    file = tmp_path / "tiny.toml"
    file.write_text("[train]\nsteps = 7\nseed = 3\n")
    options = train.read_options([str(file), "--train.steps", "9", "--model.num-layers", "1"])
    assert (options.train.steps, options.train.seed, options.model.num_layers) == (9, 3, 1)
    assert options.file == file

    options = train.read_options(["--resume", "--run-dir", str(copied)])
    assert options.model == dataclasses.replace(MODEL, vocab_size=options.model.vocab_size)
    assert (options.data, options.train) == (config.data, config.train)
    assert train.read_options(["--resume", f"--run-dir={copied}"]).model == options.model
    with pytest.raises(ConfigError, match="there is no run to resume"):
        train.read_options(["--resume", "--run-dir", str(tmp_path / "nothing")])
    with pytest.raises(ConfigError, match="tiny.toml: the TOML file must come first"):
        train.read_options(["--train.steps", "9", str(file)])
    (copied / "config.json").write_text("{")
    with pytest.raises(ConfigError, match="config.json: damaged"):
        train.read_options(["--resume", "--run-dir", str(copied)])
