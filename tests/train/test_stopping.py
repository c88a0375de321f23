"""Signals that ask a run to stop: who sends them, how often, and what is saved."""

import contextlib
import json
import os
import signal
import subprocess
import time
from pathlib import Path

import psutil
import pytest
import torch

from minitron import checkpoint, train
from minitron.comm.agreement import ALONE
from minitron.config import Config, DataConfig, TrainConfig
from minitron.config.file import from_dict
from minitron.launch import run
from minitron.launch.process import STOP_SIGNALS, Interruption
from minitron.measure.metrics import read_metrics
from minitron.run import Run
from minitron.running import stopping
from minitron.running.stopping import Stop
from tests.tiers import exhaustive
from tests.train.test_train import MODEL, command, trained, wait_for
from tests.train.test_train_ranks import torchrun, train_on_ranks

TRAIN = TrainConfig(steps=12, global_batch_size=6, micro_batch_size=4, warmup_steps=3,
                    eval_every=4, eval_sequences=8, checkpoint_every=4, device="cpu")


@pytest.fixture
def config(stories) -> Config:
    return Config(MODEL, DataConfig(stories, sequence_length=32), TRAIN)


@pytest.fixture
def handlers():
    """What the tests below install is taken back."""
    before = {number: signal.getsignal(number) for number in STOP_SIGNALS}
    for number in STOP_SIGNALS:  # nohup ignores one of them
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    yield {number: signal.getsignal(number) for number in STOP_SIGNALS}
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("names", [
    "SIGTERM SIGTERM SIGTERM", "SIGTERM SIGHUP SIGTERM", "SIGINT SIGTERM SIGHUP", "SIGHUP SIGTERM",
])
def test_repeats_change_nothing(handlers, names):
    first, *others = [signal.Signals[name] for name in names.split()]
    with Interruption() as interruption:
        signal.raise_signal(first)
        for number in others:
            signal.raise_signal(number)
        assert interruption.signal == first
    assert signal.getsignal(signal.SIGTERM) == handlers[signal.SIGTERM]


@pytest.mark.parametrize("first", [signal.SIGINT, signal.SIGTERM])
def test_a_second_ctrl_c_ends_a_loop_that_hangs(handlers, first):
    with Interruption():
        signal.raise_signal(first)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)


def test_a_rank_of_torchrun_leaves_that_to_torchrun(handlers):
    """A whole group that gets SIGINT: torchrun passes it on to ranks that have it already."""
    with Interruption(launcher=True) as interruption:
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)
        assert interruption.signal == signal.SIGINT


def test_a_late_copy_does_not_kill_what_is_about_to_exit(handlers):
    with Interruption(until_exit=True):
        signal.raise_signal(signal.SIGTERM)
    assert {signal.getsignal(number) for number in STOP_SIGNALS} == {signal.SIG_IGN}


def test_a_run_that_was_not_stopped_ends_as_usual(handlers):
    before = [signal.getsignal(number) for number in STOP_SIGNALS]
    with Interruption(until_exit=True):
        pass
    assert [signal.getsignal(number) for number in STOP_SIGNALS] == before


def test_nohup_is_respected(handlers):
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    with Interruption() as interruption:
        signal.raise_signal(signal.SIGHUP)
        assert interruption.signal is None


def test_a_signal_that_comes_while_the_ranks_agree_counts_at_the_next_step(monkeypatch):
    stop = Stop(ALONE)

    def agree(number, group):
        stop.interruption.signal = signal.SIGTERM
        return number

    monkeypatch.setattr(stopping, "largest", agree)
    assert stop.agreed() is stop.signal is None
    assert stop.agreed() == stop.signal == signal.SIGTERM


def interrupt_at(monkeypatch, step: int) -> list[str]:
    """Signal the run after `step`; returns in which order it saves and evaluates."""
    events, take_step, save, evaluate = [], Run.train_step, Run.save, Run.evaluate

    def interrupted(run: Run) -> dict:
        row = take_step(run)
        if run.step == step:
            signal.raise_signal(signal.SIGTERM)
        return row

    monkeypatch.setattr(Run, "train_step", interrupted)
    monkeypatch.setattr(Run, "save", lambda run: (events.append("save"), save(run)))
    monkeypatch.setattr(Run, "evaluate", lambda run: (events.append("evaluate"), evaluate(run))[1])
    return events


@pytest.mark.parametrize("step, expected", [(3, ["save"]), (4, ["save", "evaluate"])])
def test_a_stopped_run_saves_before_all_else(config, tmp_path, monkeypatch, step, expected):
    """Whoever stops it kills it after a while, which a long evaluation may take."""
    events = interrupt_at(monkeypatch, step)
    run = train.train(config, tmp_path / "run")
    assert (events, run.step, run.stop.signal) == (expected, step, signal.SIGTERM)


# A whole job

SLOW_TO_SAVE = """
import time
from minitron import checkpoint, cli
from minitron.config import command_line

write = checkpoint.write

def slowly(*args):
    time.sleep(2)
    write(*args)

checkpoint.write = slowly
command_line.run(cli.train)
"""


def stop_all(process: subprocess.Popen, number: signal.Signals, pauses: list[float]) -> None:
    """Signal torchrun and its ranks together, as systemd, Slurm and a spot node's shutdown do."""
    groups = {os.getpgid(child.pid)
              for child in psutil.Process(process.pid).children(recursive=True)}
    for pause in pauses:
        time.sleep(pause)
        for group in {process.pid} | groups:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(group, number)


@exhaustive
@pytest.mark.parametrize("number, pauses", [
    (signal.SIGTERM, [0]), (signal.SIGTERM, [0, 0.05, 0.3, 1.0]), (signal.SIGINT, [0]),
], ids=["SIGTERM", "SIGTERM again and again", "SIGINT"])
def test_a_signal_to_torchrun_and_its_ranks_together_saves(config, tmp_path, number, pauses):
    script = tmp_path / "slow_to_save.py"
    script.write_text(SLOW_TO_SAVE)
    whole, folder = tmp_path / "whole", tmp_path / "stopped"
    more = "--train.steps", "60", "--train.checkpoint-every", "0", "--train.eval-sequences", "600"

    def job(folder: Path, *again: str) -> list[str]:
        words = command(config, folder, *more, *again)
        return torchrun(2, str(script), *words[words.index("minitron.train") + 1:])

    environment = os.environ | {"PYTHONPATH": str(Path(train.__file__).parents[1])}
    process = subprocess.Popen(job(folder), stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                               text=True, start_new_session=True, env=environment)
    log = folder / "metrics.jsonl"
    try:
        wait_for(lambda: log.exists() and len(read_metrics(log)) >= 3, process)
        stop_all(process, number, pauses)
        output, errors = process.communicate(timeout=120)
    finally:
        process.kill()
    last = trained(folder, "step")[-1][0]
    assert output.count(f"Stopped by {number.name} at step {last}; saved.") == 1, errors
    assert last < 60 and (folder / "checkpoints" / f"step_{last:08d}").exists()

    if len(pauses) > 1:
        same = from_dict(json.loads((folder / "config.json").read_text()))
        for each, resume in ((folder, True), (whole, False)):
            run(train_on_ranks, 2, same, each, resume, timeout=120)
        assert trained(folder, "step", "loss") == trained(whole, "step", "loss")
        ends = [each / "checkpoints" / "step_00000060" for each in (folder, whole)]
        for name in checkpoint.saved_tensors(ends[0]):
            assert torch.equal(*(checkpoint.read_tensor(end, name) for end in ends)), name
