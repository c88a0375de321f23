"""Who trains in a run's folder: one process, until it ends, however it does."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from minitron.config import Config, ConfigError, DataConfig
from minitron.launch import run
from minitron.measure.metrics import read_metrics
from minitron.running import folder as run_folder
from minitron.running.folder import RunLock
from tests.tiers import exhaustive
from tests.train.test_train import MODEL, TRAIN, command, trained, wait_for


@pytest.fixture
def config(stories) -> Config:
    return Config(MODEL, DataConfig(stories, sequence_length=32), TRAIN)


def claim_in_turn(group, folder: Path) -> str:
    """Rank 0 takes the folder, then rank 1 is refused; rank 0 lets go, then rank 1 takes it."""
    claim = RunLock(folder)
    if group.rank() == 0:
        claim.take()
    group.barrier().wait()
    told = ""
    if group.rank() == 1:
        try:
            claim.take(is_restart=True)  # no waiting either for one on this host, who lives
        except ConfigError as error:
            told = str(error)
    group.barrier().wait()
    if group.rank() == 0:
        told = str(os.getpid())
        claim.close()
    group.barrier().wait()
    if group.rank() == 1:
        claim.take()
    return told


def test_a_second_process_is_refused_and_told_of_the_first(tmp_path):
    pid, told = run(claim_in_turn, 2, tmp_path / "new" / "run")
    assert re.search(
        rf"run: process {pid} on \S+ \(since 20\d\d-.*\) is training in it; end that "
        "one first, or choose another --run-dir$",
        told,
    )


HOLD = """
import sys
from pathlib import Path
from minitron.running.folder import Claim

claim = Claim(Path(sys.argv[1]))
claim.take()
print("held", flush=True)
sys.stdin.read()
"""


@exhaustive
def test_a_dead_process_holds_nothing(tmp_path):
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert holder.stdout.readline() == "held\n"
        with pytest.raises(ConfigError, match=f"process {holder.pid} on"):
            RunLock(tmp_path).take()
    finally:
        holder.kill()
        holder.communicate()
    claim = RunLock(tmp_path)
    claim.take()
    claim.close()


class Locks:
    """fcntl of a file system that answers `refusals`, one after the other, then lends the lock."""

    LOCK_EX, LOCK_NB = 1, 2

    def __init__(self, *refusals: int):
        self.refusals = list(refusals)

    def lockf(self, *args) -> None:
        if self.refusals:
            number = self.refusals.pop(0)
            raise OSError(number, os.strerror(number))


def test_a_restart_waits_for_the_lease_of_a_node_that_has_died(tmp_path, monkeypatch):
    (tmp_path / "run.lock").write_text('{"host": "gone", "pid": 7, "since": "today"}')
    monkeypatch.setattr(run_folder.time, "sleep", lambda seconds: None)
    monkeypatch.setattr(run_folder, "fcntl", Locks(*[run_folder.errno.EAGAIN] * 3))
    with pytest.raises(ConfigError, match=r"process 7 on gone \(since today\) is training in it"):
        RunLock(tmp_path).take()
    claim = RunLock(tmp_path)
    claim.take(is_restart=True)
    assert claim.owner()[1].startswith(f"process {os.getpid()} on ")
    claim.close()


def test_a_file_system_without_locks_is_told(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(run_folder, "fcntl", Locks(run_folder.errno.ENOLCK))
    RunLock(tmp_path).take()
    [line] = capsys.readouterr().err.splitlines()
    assert "run.lock: cannot be locked (No locks available); make sure that no other" in line


def test_a_lock_that_is_a_link_is_not_followed(tmp_path):
    (tmp_path / "precious").write_text("mine")
    (tmp_path / "run.lock").symlink_to("precious")
    with pytest.raises(OSError, match=r"symbolic links: .*run.lock"):
        RunLock(tmp_path).take()
    assert (tmp_path / "precious").read_text() == "mine"


@exhaustive
def test_two_processes_in_one_folder_lose_nothing(config, tmp_path):
    folder = tmp_path / "run"
    first = subprocess.Popen(
        command(config, folder, "--train.steps", "100000", "--train.checkpoint-every", "3"),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    log = folder / "metrics.jsonl"
    wait_for(lambda: log.exists() and len(read_metrics(log)) >= 5, first)
    second = subprocess.run(
        [*command(config, folder)[:5], "--resume"], capture_output=True, text=True, timeout=120
    )
    first.send_signal(signal.SIGINT)
    first.communicate(timeout=120)
    assert second.returncode == 2
    [line] = second.stderr.splitlines()
    assert line.startswith(f"minitron: {folder}: process {first.pid} on ")
    steps = trained(folder, "step")
    assert steps == [(step,) for step in range(1, len(steps) + 1)]
