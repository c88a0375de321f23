"""Signals that ask a run to stop: who sends them, how often, and what is saved."""

import contextlib
import dataclasses
import itertools
import json
import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
import torch

from minitron import checkpoint, train, train_log, train_loop
from minitron import run as run_module
from minitron.comm.agreement import SINGLE_RANK
from minitron.config import Config, DataConfig, ParallelConfig, TrainConfig
from minitron.config.file import from_dict
from minitron.launch import run
from minitron.launch.process import STOP_SIGNALS, StopSignals
from minitron.launch.watchdog import Watchdog
from minitron.measure.metrics import read_metrics
from minitron.measure.trace import Trace
from minitron.run import Run
from minitron.running import stopping
from minitron.running.stopping import Stop
from tests.environment import finding
from tests.tiers import exhaustive, tiered
from tests.train.test_train import MODEL, command, trained, wait_for
from tests.train.test_train_ranks import torchrun, train_on_ranks

TRAIN = TrainConfig(
    steps=12,
    global_batch_size=6,
    micro_batch_size=4,
    warmup_steps=3,
    eval_every=4,
    eval_sequences=8,
    checkpoint_every=4,
    device="cpu",
)


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


@pytest.mark.parametrize(
    "names",
    [
        "SIGTERM SIGTERM SIGTERM",
        "SIGTERM SIGHUP SIGTERM",
        "SIGINT SIGTERM SIGHUP",
        "SIGHUP SIGTERM",
    ],
)
def test_repeats_change_nothing(handlers, names):
    first, *others = [signal.Signals[name] for name in names.split()]
    with StopSignals() as interruption:
        signal.raise_signal(first)
        for number in others:
            signal.raise_signal(number)
        assert interruption.signal == first
    assert signal.getsignal(signal.SIGTERM) == handlers[signal.SIGTERM]


@pytest.mark.parametrize("first", [signal.SIGINT, signal.SIGTERM])
def test_a_second_ctrl_c_ends_a_loop_that_hangs(handlers, first):
    with StopSignals():
        signal.raise_signal(first)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)


def test_a_rank_of_torchrun_leaves_that_to_torchrun(handlers):
    """A whole group that gets SIGINT: torchrun passes it on to ranks that have it already."""
    with StopSignals(launcher=True) as interruption:
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)
        assert interruption.signal == signal.SIGINT


def test_a_late_copy_does_not_kill_what_is_about_to_exit(handlers):
    with StopSignals(until_exit=True):
        signal.raise_signal(signal.SIGTERM)
    assert {signal.getsignal(number) for number in STOP_SIGNALS} == {signal.SIG_IGN}


def test_a_run_that_was_not_stopped_ends_as_usual(handlers):
    before = [signal.getsignal(number) for number in STOP_SIGNALS]
    with StopSignals(until_exit=True):
        pass
    assert [signal.getsignal(number) for number in STOP_SIGNALS] == before


def test_nohup_is_respected(handlers):
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    with StopSignals() as interruption:
        signal.raise_signal(signal.SIGHUP)
        assert interruption.signal is None


def test_a_signal_that_comes_while_the_ranks_agree_counts_at_the_next_step(monkeypatch):
    stop = Stop(SINGLE_RANK)

    def agree(number, group):
        stop.interruption.signal = signal.SIGTERM
        return number

    monkeypatch.setattr(stopping, "all_reduce_max_int", agree)
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
    monkeypatch.setattr(
        Run, "evaluate", lambda run, go_on: (events.append("evaluate"), evaluate(run, go_on))[1]
    )
    return events


@pytest.mark.parametrize(
    "step, expected",
    [
        (3, ["save"]),
        (4, ["save"]),
        (7, ["save", "evaluate", "save"]),
    ],
)
def test_a_stopped_run_saves_and_does_nothing_else(config, tmp_path, monkeypatch, step, expected):
    """Whoever stops it kills it after a while, which a long evaluation may take."""
    events = interrupt_at(monkeypatch, step)
    run = train.train(config, tmp_path / "run")
    assert (events, run.step, run.stop.signal) == (expected, step, signal.SIGTERM)


def test_a_step_that_saves_and_evaluates_saves_first(config, tmp_path, monkeypatch):
    """Or an evaluation that is killed costs every step since the checkpoint before, each time."""
    events = interrupt_at(monkeypatch, step=-1)
    train.train(config, tmp_path / "run")
    assert events == ["save", "evaluate"] * 3


# An evaluation is done in pieces


def in_pieces(config: Config) -> Config:
    """Evaluate at steps 4, 8 and 12, each time in 4 pieces of the 2 micro-batches of a step."""
    return dataclasses.replace(config, train=dataclasses.replace(TRAIN, eval_sequences=32))


def count_pieces(run: Run, act: Callable[[int], None]) -> None:
    """Call `act` with the number of each piece of validation data that is evaluated."""
    sum_losses, pieces = run.parallel.sum_losses, itertools.count(1)

    def counted(*args):
        loss = sum_losses(*args)
        act(next(pieces))
        return loss

    run.parallel.sum_losses = counted


def val_losses(folder: Path) -> list[tuple[int, float]]:
    return [
        (row["step"], row["val_loss"])
        for row in read_metrics(folder / "metrics.jsonl")
        if "val_loss" in row
    ]


def signal_in_piece(monkeypatch, number: int, rank: int = 0) -> list[int]:
    """Send this rank, if it is `rank`, SIGTERM in a piece; returns the pieces as they are done."""
    begin, done = train_loop.begin, []

    def act(piece: int) -> None:
        done.append(piece)
        if piece == number:
            signal.raise_signal(signal.SIGTERM)

    def begun(*args) -> Run:
        run = begin(*args)
        count_pieces(run, act if run.rank == rank else done.append)
        return run

    monkeypatch.setattr(train_loop, "begin", begun)
    return done


@pytest.mark.parametrize("piece, step", tiered([(2, 4), (4, 4), (10, 12)]), ids=str)
def test_an_evaluation_that_is_stopped_is_done_again(config, tmp_path, piece, step):
    config, folder = in_pieces(config), tmp_path / "stopped"
    with pytest.MonkeyPatch.context() as monkeypatch:
        done = signal_in_piece(monkeypatch, piece)
        run = train.train(config, folder)
    assert (run.step, run.stop.signal, done[-1]) == (step, signal.SIGTERM, piece)
    assert [saved for saved, _ in val_losses(folder)] == list(range(4, step, 4))
    assert (folder / "checkpoints" / f"step_{step:08d}").exists()

    assert train.train(config, folder, resume=True).step == 12
    train.train(config, tmp_path / "whole")
    assert val_losses(folder) == val_losses(tmp_path / "whole")
    assert trained(folder, "step", "loss") == trained(tmp_path / "whole", "step", "loss")


def test_an_evaluation_at_a_step_that_was_not_saved_is_saved_when_it_is_stopped(
    config, tmp_path, monkeypatch
):
    config = in_pieces(config)
    config = dataclasses.replace(
        config, train=dataclasses.replace(config.train, checkpoint_every=0)
    )
    signal_in_piece(monkeypatch, 2)
    assert train.train(config, tmp_path).step == 4
    assert checkpoint.newest_good(tmp_path / "checkpoints").name == "step_00000004"


def stopped_and_resumed(group, config: Config, stopped: Path, whole: Path) -> tuple:
    """Rank 1 is signaled. What the run says of that; then it is resumed, and one is undisturbed."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        done = signal_in_piece(monkeypatch, 2, rank=1)
        run = train.train(config, stopped, group=group)
    train.train(config, stopped, resume=True, group=group)
    train.train(config, whole, group=group)
    return run.step, run.stop.signal, done


@pytest.mark.parametrize("parallel", tiered([{"zero": 3}, {"pp": 2}, {"tp": 2}]), ids=str)
def test_ranks_of_which_one_is_signaled_stop_after_the_same_piece(config, tmp_path, parallel):
    config = in_pieces(config)
    config = dataclasses.replace(
        config,
        model=dataclasses.replace(MODEL, dropout=0.0, num_kv_heads=2),
        train=dataclasses.replace(config.train, steps=8),
        parallel=ParallelConfig(**parallel),
    )
    stopped, whole = tmp_path / "stopped", tmp_path / "whole"
    for found in run(stopped_and_resumed, 2, config, stopped, whole, timeout=300):
        assert found == (4, signal.SIGTERM, [1, 2])
    assert val_losses(stopped) == val_losses(whole)
    assert trained(stopped, "step", "loss") == trained(whole, "step", "loss")


def test_the_watchdog_sees_a_beat_between_any_two_pieces(config, tmp_path, monkeypatch):
    """And between any two tokens of the sample, and between a step and a trace's export."""
    beat, begin, generate = Watchdog.beat, train_loop.begin, run_module.generate
    events = []

    def begun(*args) -> Run:
        run = begin(*args)
        count_pieces(run, lambda piece: events.append("long"))
        return run

    def generated(model, *args, **options):
        model.register_forward_hook(lambda *args: events.append("long"))
        return generate(model, *args, **options)

    monkeypatch.setattr(Watchdog, "beat", lambda dog: (events.append("beat"), beat(dog)))
    monkeypatch.setattr(train_loop, "begin", begun)
    monkeypatch.setattr(run_module, "generate", generated)
    monkeypatch.setattr(Trace, "step", lambda trace: events.append("long"))
    for name, act in (("save", Run.save), ("train_step", Run.train_step)):
        monkeypatch.setattr(Run, name, lambda run, act=act: (events.append("long"), act(run))[1])
    train.train(in_pieces(config), tmp_path)
    assert events.count("long") == 12 * 2 + 3 * (1 + 4 + train_log.SAMPLE_TOKENS)
    assert ("long", "long") not in itertools.pairwise(events)


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
    groups = {
        os.getpgid(child.pid) for child in psutil.Process(process.pid).children(recursive=True)
    }
    for pause in pauses:
        time.sleep(pause)
        for group in {process.pid} | groups:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(group, number)


@exhaustive
@pytest.mark.parametrize(
    "number, pauses",
    [
        (signal.SIGTERM, [0]),
        (signal.SIGTERM, [0, 0.05, 0.3, 1.0]),
        (signal.SIGINT, [0]),
    ],
    ids=["SIGTERM", "SIGTERM again and again", "SIGINT"],
)
def test_a_signal_to_torchrun_and_its_ranks_together_saves(config, tmp_path, number, pauses):
    script = tmp_path / "slow_to_save.py"
    script.write_text(SLOW_TO_SAVE)
    whole, folder = tmp_path / "whole", tmp_path / "stopped"
    more = "--train.steps", "60", "--train.checkpoint-every", "0", "--train.eval-sequences", "600"

    def job(folder: Path, *again: str) -> list[str]:
        words = command(config, folder, *more, *again)
        return torchrun(2, str(script), *words[words.index("minitron.train") + 1 :])

    environment = finding(Path(train.__file__).parents[1])
    process = subprocess.Popen(
        job(folder),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env=environment,
    )
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
