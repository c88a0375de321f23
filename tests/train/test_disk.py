"""A disk that is full, read-only or failing: one line, exit code 2, nothing lost."""

import dataclasses
import errno
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import patch

import pytest

from minitron import cli, train
from minitron.config import Config, ConfigError, DataConfig, LogConfig, command_line
from minitron.dataset import HEADER_BYTES, TokenDataset
from minitron.launch import run
from minitron.measure import loggers, metrics
from minitron.measure.metrics import read_metrics
from minitron.run import Run
from minitron.system import disk
from tests.tiers import exhaustive, tiered
from tests.train.test_train import MODEL, TRAIN, command

resource = pytest.importorskip("resource", reason="Windows limits no file's size")


@pytest.fixture
def config(stories) -> Config:
    return Config(MODEL, DataConfig(stories, sequence_length=32), TRAIN)


@contextmanager
def files_up_to(num_bytes: int) -> Iterator[None]:
    """Let this process write no longer file: more is refused, as by a full disk.

    Python would cut off the bytecode of what is imported meanwhile, and never be able to import it
    again.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    before, sys.dont_write_bytecode = sys.dont_write_bytecode, True
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        sys.dont_write_bytecode = before


def with_files_up_to(num_bytes: int, *words: str, **options) -> subprocess.CompletedProcess:
    """Run a command that can write no longer file."""

    def limit():
        resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, num_bytes))

    environment = os.environ | {"PYTHONDONTWRITEBYTECODE": "1"}  # see files_up_to
    return subprocess.run(
        words,
        preexec_fn=limit,
        capture_output=True,
        text=True,
        timeout=300,
        env=environment,
        **options,
    )


def the_line(done: subprocess.CompletedProcess) -> str:
    """What is told; no traceback, exit code 2."""
    assert done.returncode == 2, done.stderr
    told = [line for line in done.stderr.splitlines() if line.startswith("minitron: ")]
    assert "Traceback" not in done.stderr and len(told) == 1, done.stderr
    return told[0]


def the_line_of(words: list[str], num_bytes: int, capsys, monkeypatch) -> str:
    """The same of a command in this process, which can write no file longer than `num_bytes`."""
    monkeypatch.setattr(sys, "argv", ["minitron", *words])
    monkeypatch.setattr(sys, "stdout", sys.stdout)  # what the command puts there is taken back
    with files_up_to(num_bytes), pytest.raises(SystemExit) as ended:
        command_line.run(cli.dispatch)
    told = [line for line in capsys.readouterr().err.splitlines() if line.startswith("minitron: ")]
    assert ended.value.code == 2 and len(told) == 1
    return told[0]


UNSAVED = "--train.steps", "300", "--train.checkpoint-every", "0"


def test_a_log_that_cannot_grow_ends_the_run_in_one_line(config, tmp_path, capsys, monkeypatch):
    _, _, _, *words = command(config, tmp_path / "run", *UNSAVED)
    told = the_line_of(["train", *words], 5_000, capsys, monkeypatch)
    assert_the_log_is_full(told, tmp_path / "run")


@exhaustive
def test_a_process_whose_log_cannot_grow_ends_in_one_line(config, tmp_path):
    words = command(config, tmp_path / "run", *UNSAVED)
    assert_the_log_is_full(the_line(with_files_up_to(5_000, *words)), tmp_path / "run")


def assert_the_log_is_full(told: str, folder: Path) -> None:
    assert told == (
        f"minitron: {folder / 'metrics.jsonl'}: cannot be written (File too large); "
        "make room, and continue with --resume; checkpoints already written are intact"
    )
    steps = [row["step"] for row in read_metrics(folder / "metrics.jsonl")]
    assert steps == list(range(1, len(steps) + 1)) and len(steps) > 5


def test_a_new_run_that_cannot_write_is_one_line(config, tmp_path, capsys, monkeypatch):
    folder = tmp_path / "run"
    _, _, _, *words = command(config, folder)
    told = the_line_of(["train", *words], 8, capsys, monkeypatch)  # torch itself needs 4
    assert told == (
        f"minitron: {folder}: cannot be written (File too large); make room, or choose "
        "another folder"
    )
    assert sorted(path.name for path in folder.iterdir()) == ["metrics.jsonl", "run.lock"]


@pytest.mark.parametrize("num_bytes", tiered([100_000, 0]))
def test_data_that_does_not_fit_is_one_line(tmp_path, num_bytes, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words = ["data", "stories", "--num-tokens", "200000"]
    told = the_line_of(words, num_bytes, capsys, monkeypatch)
    assert told == (
        "minitron: data/stories: cannot be written (File too large); make room, or "
        "choose another folder with --out"
    )


def test_an_output_that_is_full_is_one_line():
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "minitron.cli", "--version"],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            timeout=300,
        )
    assert the_line(done) == "minitron: the output: No space left on device; make room"


def no_space(*args) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def train_with_a_full_log(group, config: Config, folder: Path) -> str:
    """The log of rank 0 is refused from its fourth row on; what each rank raises."""
    append = metrics.append

    def refuse(file, content):
        is_full = group.rank() == 0 and b'"step": 4' in content
        (no_space if is_full else append)(file, content)

    metrics.append = refuse
    try:
        train.train(config, folder, group=group)
    except ConfigError as error:
        return str(error)
    finally:
        metrics.append = append


def test_a_full_disk_under_one_rank_ends_all_alike(config, tmp_path):
    first, second = run(train_with_a_full_log, 2, config, tmp_path)
    assert first.startswith(f"{tmp_path / 'metrics.jsonl'}: cannot be written (No space left on")
    assert second == f"{first} (on rank 0)"
    assert (tmp_path / "checkpoints" / "step_00000004").is_dir()


def train_until_a_shard_is_cut(group, config: Config, folder: Path, cut: int) -> str:
    """From its third step on this shard ends early for one rank; what each rank raises, and when.

    The files are the same for both, but what each reads next is not.
    """
    batch, steps, train_step = TokenDataset.batch, [], Run.train_step

    def read(dataset, position, *others):
        if group.rank() == cut and position >= 2 * config.train.global_batch_size:
            raise ConfigError("train_000.bin: ends before token 7")
        return batch(dataset, position, *others)

    with (
        patch.object(TokenDataset, "batch", read),
        patch.object(Run, "train_step", lambda run: (steps.append(0), train_step(run))[1]),
    ):
        try:
            train.train(config, folder, group=group)
        except ConfigError as error:
            return f"{error} after {len(steps)} steps"
    return "trained"


@pytest.mark.parametrize("cut", [0, 1])
def test_a_shard_that_one_rank_finds_cut_ends_all_after_the_same_step(config, tmp_path, cut):
    told = run(train_until_a_shard_is_cut, 2, config, tmp_path, cut, timeout=120)
    expected = "train_000.bin: ends before token 7"
    assert told[cut] == f"{expected} after 2 steps"
    assert told[1 - cut] == f"{expected} (on rank {cut}) after 2 steps"


def test_a_file_that_is_cut_between_two_steps_ends_the_run_in_one_line(
    config, tmp_path, monkeypatch
):
    shutil.copytree(config.data.path, tmp_path / "data")
    [shard] = (tmp_path / "data").glob("train_*.bin")
    take_step = Run.train_step

    def and_cut(run: Run) -> dict:
        row = take_step(run)
        if run.step == 2:
            os.truncate(shard, HEADER_BYTES + 2)
        return row

    monkeypatch.setattr(Run, "train_step", and_cut)
    own = dataclasses.replace(config, data=dataclasses.replace(config.data, path=tmp_path / "data"))
    with pytest.raises(ConfigError, match=f"{shard}: had .* tokens when the run began, and ends"):
        train.train(own, tmp_path / "run")


@pytest.mark.parametrize("name", ["metrics.jsonl", "run.lock"])
@pytest.mark.parametrize("is_read", [False, True], ids=["nobody reads it", "somebody reads it"])
def test_a_pipe_in_place_of_what_a_run_writes_is_one_line(config, tmp_path, name, is_read):
    os.mkfifo(tmp_path / name)
    reader = os.open(tmp_path / name, os.O_RDONLY | os.O_NONBLOCK) if is_read else None
    with pytest.raises(ConfigError, match=f"{name}: .*not a (regular )?file"):
        train.train(config, tmp_path)
    if is_read:
        os.close(reader)


def test_a_resume_on_a_full_disk_leaves_what_is_there(config, tmp_path, monkeypatch):
    train.train(config, tmp_path)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir() if path.is_file()}
    monkeypatch.setattr(disk.os, "fsync", no_space)
    with pytest.raises(ConfigError, match="cannot be written .No space left on device"):
        train.train(config, tmp_path, resume=True)
    del before["run.lock"]
    assert all((tmp_path / name).read_bytes() == content for name, content in before.items())


def test_a_trace_that_cannot_be_written_is_one_line(config, tmp_path):
    (tmp_path / "traces").mkdir()
    (tmp_path / "traces" / "rank0.json.gz").symlink_to("/dev/full")
    asked = dataclasses.replace(config, log=LogConfig(trace_steps=1))
    with pytest.raises(ConfigError, match=r"rank0.json.gz: cannot be written \(No space left"):
        train.train(asked, tmp_path)


def test_a_curve_that_tensorboard_cannot_write_is_one_line(config, tmp_path, monkeypatch):
    class Full:
        def __init__(self, folder: Path, step: int):
            self.write = self.close = no_space

    monkeypatch.setattr(loggers, "TensorBoardLog", Full)
    asked = dataclasses.replace(config, log=LogConfig(tensorboard=True))
    with pytest.raises(ConfigError, match=r"cannot be written \(No space left on device\); make"):
        train.train(asked, tmp_path)


@pytest.mark.parametrize(
    "error, told",
    [
        (OSError(errno.ENOSPC, "x"), "the output: No space left on device; make room"),
        (OSError(errno.EROFS, "x", "a/b"), "a/b: Read-only file system; choose another path"),
        (OSError(errno.ENAMETOOLONG, "x", "a/b"), "a/b: File name too long; choose another path"),
        (PermissionError(errno.EACCES, "x", "a/b"), "a/b: Permission denied; choose another path"),
        (
            Exception("x (os error 28)"),
            "the output: No space left on device; make room",
        ),  # from Rust
        (Exception("x (os error 2)"), None),
        (PermissionError(errno.EACCES, "a port"), None),
        (FileNotFoundError(errno.ENOENT, "x", "a/b"), None),
        (ConnectionResetError(errno.ECONNRESET, "x"), None),
        (ValueError("x"), None),
    ],
    ids=str,
)
def test_what_a_disk_refuses_is_one_line_and_another_fault_is_not(error, told, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["minitron"])
    monkeypatch.setattr(sys, "stdout", sys.stdout)

    def fail(args):
        raise error

    with pytest.raises(type(error) if told is None else SystemExit) as ended:
        command_line.run(fail)
    if told is not None:
        assert (ended.value.code, capsys.readouterr().err) == (2, f"minitron: {told}\n")


def test_what_cannot_be_read_is_not_said_to_be_written(tmp_path):
    with pytest.raises(PermissionError), disk.writing(tmp_path):
        raise PermissionError(errno.EACCES, "x", "secret.txt")


def test_a_file_is_replaced_whole_and_never_through_a_link(tmp_path, monkeypatch):
    path, other = tmp_path / "config.json", tmp_path / "other"
    other.write_text("mine")
    path.symlink_to(other)
    path.with_name("config.json.tmp").symlink_to(other)
    disk.replace(path, b"new")
    assert (path.read_text(), other.read_text()) == ("new", "mine")
    monkeypatch.setattr(disk.os, "fsync", no_space)
    with pytest.raises(OSError):
        disk.replace(path, b"newer")
    assert path.read_text() == "new"
