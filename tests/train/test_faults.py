"""What goes wrong in a long run: ranks that die, stand still or compute what is no number."""

import dataclasses
import json
import math
import os
import random
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest
import torch

from minitron import checkpoint, train
from minitron.config import (
    Config,
    ConfigError,
    DataConfig,
    ModelConfig,
    ParallelConfig,
    TrainConfig,
)
from minitron.config.file import from_dict
from minitron.launch import RankError, run
from minitron.launch.watchdog import Watchdog
from minitron.measure.metrics import read_metrics
from minitron.run import Run
from tests.environment import finding
from tests.processes import started
from tests.tiers import exhaustive, tiered
from tests.train.test_train import command, trained, wait_for
from tests.train.test_train_ranks import kill_after, torchrun

MODEL = ModelConfig("llama", 0, 32, 2, 32, 4, 2, 48)
TRAIN = TrainConfig(
    steps=12,
    global_batch_size=4,
    micro_batch_size=2,
    warmup_steps=3,
    eval_every=5,
    eval_sequences=4,
    checkpoint_every=1,
    device="cpu",
)
COLUMNS = "step", "loss", "grad_norm"


@pytest.fixture
def config(stories) -> Config:
    return Config(MODEL, DataConfig(stories, sequence_length=32), TRAIN, ParallelConfig(zero=1))


def with_train(config: Config, **fields) -> Config:
    return dataclasses.replace(config, train=dataclasses.replace(config.train, **fields))


def weights_after(group, config: Config, folder: Path, kill_after: float | None = None) -> dict:
    """Train, or go on; the last rank dies after `kill_after` seconds, if it is still there."""
    if kill_after is not None and group.rank() == group.size() - 1:
        killer = threading.Timer(kill_after, os.kill, (os.getpid(), signal.SIGKILL))
        killer.daemon = True
        killer.start()
    finished = train.train(config, folder, group=group, restart=True)
    return finished.parallel.full_parameters()


@exhaustive
@pytest.mark.parametrize("in_background", [False, True], ids=["at once", "in the background"])
def test_killed_at_random_moments_a_run_ends_where_an_undisturbed_one_does(
    config, tmp_path, in_background
):
    """10 deaths each: while it is built, while it computes, saves, reads and evaluates."""
    config = with_train(config, async_checkpoint=in_background, keep_checkpoints=12)
    start = time.monotonic()
    expected = run(weights_after, 2, config, tmp_path / "whole", timeout=300)[0]
    seconds = time.monotonic() - start  # a first guess: it is slower than those to come

    folder, moments, deaths = tmp_path / "killed", random.Random(int(in_background)), 0
    for _ in range(100):
        if deaths == 10:
            break
        start = time.monotonic()
        try:
            run(weights_after, 2, config, folder, moments.uniform(0, seconds), timeout=300)
            seconds = time.monotonic() - start
            kill_after(folder, 3)  # it was through: let it do most of it again
        except RankError as error:
            assert "was killed by SIGKILL" in str(error)
            deaths += 1
    assert deaths == 10
    found = run(weights_after, 2, config, folder, timeout=300)[0]
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert trained(folder, *COLUMNS) == trained(tmp_path / "whole", *COLUMNS)


@exhaustive
def test_torchrun_starts_a_dead_rank_again_and_the_run_goes_on(config, tmp_path):
    whole, folder = tmp_path / "whole", tmp_path / "killed"
    job = torchrun(
        2,
        "--max-restarts",
        "2",
        *command(config, folder, "--parallel.zero", "1", "--train.steps", "150")[1:],
    )
    process = subprocess.Popen(job, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        wait_for(lambda: checkpoint.checkpoints(folder / "checkpoints"), process)
        ranks_of(process)[-1].kill()
        _, errors = process.communicate(timeout=300)
    finally:
        process.terminate()  # torchrun then ends its ranks
        process.wait(60)
    assert process.returncode == 0, errors
    assert "failed (exitcode: -9)" in errors
    whole_config = from_dict(json.loads((folder / "config.json").read_text()))
    run(weights_after, 2, whole_config, whole, timeout=300)
    assert trained(folder, *COLUMNS) == trained(whole, *COLUMNS)


def ranks_of(torchrun: subprocess.Popen) -> list[psutil.Process]:
    return [
        child
        for child in psutil.Process(torchrun.pid).children(recursive=True)
        if "minitron.train" in " ".join(child.cmdline())
    ]


def train_and_die(group, config: Config, folder: Path, after: int) -> None:
    """Train; the last rank dies after so many steps."""
    take_step = Run.train_step

    def step(run: Run) -> dict:
        if run.step == after and run.rank == group.size() - 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return take_step(run)

    Run.train_step = step
    train.train(config, folder, group=group)


def resume(group, config: Config, folder: Path) -> None:
    train.train(config, folder, resume=True, group=group)


@exhaustive
def test_eight_ranks_on_all_axes_die_and_go_on_cut_otherwise(stories, tmp_path):
    """dp 2 x tp 2 x pp 2 with ZeRO-1 and sequence parallelism, then dp 2 x tp 4."""
    one, many = tmp_path / "one", tmp_path / "many"
    settings = TrainConfig(
        steps=30,
        global_batch_size=8,
        micro_batch_size=2,
        checkpoint_every=2,
        eval_every=0,
        eval_sequences=8,
        device="cpu",
    )
    alone = Config(
        dataclasses.replace(MODEL, vocab_size=720),
        DataConfig(stories, sequence_length=32),
        settings,
    )
    train.train(alone, one)

    cut = dataclasses.replace(alone, parallel=ParallelConfig(tp=2, pp=2, zero=1, sequence=True))
    with pytest.raises(RankError, match="rank 7 was killed by SIGKILL"):
        run(train_and_die, 8, cut, many, 7, timeout=300)
    assert 0 < int(checkpoint.newest_good(many / "checkpoints").name[5:]) <= 6

    otherwise = dataclasses.replace(alone, parallel=ParallelConfig(tp=4, zero=1, sequence=True))
    run(resume, 8, otherwise, many, timeout=300)
    parallel = json.loads((many / "config.json").read_text())["parallel"]
    assert (parallel["tp"], parallel["pp"], parallel["zero"]) == (4, 1, 1)
    for found, expected in zip(trained(many, *COLUMNS), trained(one, *COLUMNS), strict=True):
        assert found == pytest.approx(expected, rel=1e-4)  # float32, summed in other orders


def test_a_restart_needs_to_know_its_folder(config, tmp_path, monkeypatch):
    with pytest.raises(ConfigError, match="--restart needs to know .*: name its folder with"):
        train.start(train.TrainOptions(**vars(config), restart=True))
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", "3")
    with pytest.raises(ConfigError, match="torchrun --max-restarts 3 needs to know"):
        train.start(train.TrainOptions(**vars(config)))


@exhaustive
def test_restart_begins_what_has_no_checkpoint_and_goes_on_with_what_has(config, tmp_path):
    alone = with_train(
        dataclasses.replace(config, parallel=ParallelConfig()), continuation="constant"
    )
    for steps in (4, 8):
        finished = train.train(with_train(alone, steps=steps), tmp_path, restart=True)
        assert finished.step == steps
    assert trained(tmp_path, "step") == [(step,) for step in range(1, 9)]


# A rank that stands still

SLEEPER = """
import sys, time
from minitron import cli
from minitron.config import command_line
from minitron.run import Run

take_step = Run.train_step

def sleep(run):
    if run.step == 3 and run.rank == 1:
        time.sleep(1000)
    return take_step(run)

Run.train_step = sleep
command_line.run(cli.train)
"""


@exhaustive
def test_a_rank_that_stands_still_is_named_and_the_job_ends(config, tmp_path):
    script = tmp_path / "sleeper.py"
    script.write_text(SLEEPER)
    words = command(config, tmp_path / "run", "--train.hang-timeout", "10")
    words = [str(script), *words[words.index("minitron.train") + 1 :]]
    package = str(Path(train.__file__).parents[1])
    done = subprocess.run(
        torchrun(2, *words), capture_output=True, text=True, timeout=150, env=finding(package)
    )
    assert done.returncode == 1
    assert "no step has ended for 10 s (train.hang_timeout):" in done.stderr
    line = SLEEPER.splitlines().index("        time.sleep(1000)") + 1
    assert f"rank 1 is at sleeper.py line {line}: time.sleep(1000)" in done.stderr
    assert "rank 0 waits in" in done.stderr
    assert [
        row["step"] for row in read_metrics(tmp_path / "run" / "metrics.jsonl") if "loss" in row
    ][:3] == [1, 2, 3]


DEAF = """
import sys, time
from pathlib import Path
from minitron.launch.watchdog import Watchdog

class First:
    def rank(self): return 0
    def size(self): return 2

with Watchdog(Path(sys.argv[1]), First(), timeout=1):
    print("inside", flush=True)
    time.sleep(100)
"""


@exhaustive
def test_a_watchdog_that_cannot_write_ends_the_rank_all_the_same(tmp_path):
    (tmp_path / "hang").write_text("a file where the folder should be")
    package = str(Path(train.__file__).parents[1])
    command = [sys.executable, "-c", DEAF, str(tmp_path / "hang" / "below")]
    done = subprocess.run(
        command, timeout=300, capture_output=True, text=True, env=finding(package)
    )
    assert (done.returncode, done.stdout) == (1, "inside\n")


class First:
    """The first of two ranks."""

    def rank(self) -> int:
        return 0

    def size(self) -> int:
        return 2


def left_behind(folder: Path) -> None:
    """What a rank does while its report is being written."""
    with Watchdog(folder, First(), timeout=1):
        while not (folder / "rank0.txt").exists():
            time.sleep(0.01)
        raise RuntimeError("connection closed by peer")


def test_a_report_that_has_begun_is_finished_although_another_rank_has_left(tmp_path):
    output = tmp_path / "output"
    process = started(left_behind, tmp_path / "hang", output=output)
    process.join(300)
    assert process.exitcode == 1
    assert "no step has ended for 1 s (train.hang_timeout):" in output.read_text()
    assert "rank 1 does not answer" in output.read_text()


# Numbers that are none


def test_what_is_being_saved_when_a_run_diverges_is_saved(config, tmp_path, monkeypatch):
    write, take_step = checkpoint.write, Run.train_step

    def slowly(*args):
        time.sleep(0.5)
        write(*args)

    def diverge(run: Run) -> dict:
        if run.step == 4:
            run.model.blocks[0].mlp.up.register_forward_hook(lambda *args: args[-1] * math.nan)
        return take_step(run)

    monkeypatch.setattr(checkpoint, "write", slowly)
    monkeypatch.setattr(Run, "train_step", diverge)
    config = dataclasses.replace(config, parallel=ParallelConfig())
    config = with_train(config, async_checkpoint=True, checkpoint_every=4)
    with pytest.raises(ConfigError, match="step 5: the loss is nan"):
        train.train(config, tmp_path)
    assert checkpoint.newest_good(tmp_path / "checkpoints").name == "step_00000004"


def diverge(group, config: Config, folder: Path, path: str, rank: int) -> str:
    """Let a module of one rank return NaN in step 3; what the user reads."""
    run_ = Run(config, folder, group)
    for _ in range(2):
        run_.train_step()
    before = run_.parallel.full_parameters()
    modules = dict(run_.model.named_modules())
    if group.rank() == rank and path in modules:
        modules[path].register_forward_hook(lambda *args: args[-1] * math.nan)
    try:
        run_.train_step()
    except ConfigError as error:
        after = run_.parallel.full_parameters()
        assert all(torch.equal(after[name], before[name]) for name in before)
        return str(error)


@pytest.mark.parametrize(
    "parallel, path, rank",
    tiered(
        [
            ({"zero": 3}, "blocks.0.attention.query", 0),
            ({"pp": 2, "schedule": "interleaved", "chunks": 2}, "blocks.1.mlp.down", 1),
            ({"zero": 1}, "blocks.1.mlp.down", 1),
            ({"tp": 2}, "blocks.1.mlp.up", 1),
            ({"pp": 2}, "blocks.2.attention.out", 1),
        ],
        keep=2,
    ),
    ids=str,
)
def test_the_first_module_with_a_nan_is_named_on_every_rank(config, tmp_path, parallel, path, rank):
    model = dataclasses.replace(config.model, num_layers=4)
    config = dataclasses.replace(config, model=model, parallel=ParallelConfig(**parallel))
    for told in run(diverge, 2, config, tmp_path, path, rank):
        assert told.startswith("step 3: the loss is nan. First non-finite value: ")
        assert f"the output of {path}, on rank {rank} (samples 8 to 11)" in told
