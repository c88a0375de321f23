"""A data-parallel run as its user sees it: the same training, resumed on other ranks, stopped."""

import contextlib
import dataclasses
import gc
import json
import shutil
import signal
import subprocess
import sys
import warnings
import weakref
from functools import partial
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn

from minitron import launch, train
from minitron.comm.agreement import SINGLE_RANK, exit_on_all_ranks
from minitron.config import (
    Config,
    ConfigError,
    DataConfig,
    ModelConfig,
    ParallelConfig,
    TrainConfig,
)
from minitron.launch import RankError, run
from minitron.measure.ledger import Ledger
from minitron.measure.meter import Meter
from minitron.measure.metrics import read_metrics
from minitron.run import Run
from minitron.running.starting import require_a_gpu_each
from tests.tiers import exhaustive, tiered
from tests.train.test_train import command, trained, wait_for

MODEL = ModelConfig(
    max_sequence_length=32, num_layers=2, width=32, num_heads=2, num_kv_heads=1, ffn_width=48
)
TRAIN = TrainConfig(
    steps=6,
    global_batch_size=10,
    micro_batch_size=2,
    warmup_steps=3,
    eval_every=5,
    eval_sequences=6,
    checkpoint_every=3,
    device="cpu",
)


@pytest.fixture
def config(stories) -> Config:
    return Config(MODEL, DataConfig(stories, sequence_length=32), TRAIN)


def train_on_ranks(group, config: Config, folder: Path, resume: bool = False) -> int:
    return train.train(config, folder, resume, group).step


def torchrun(num_ranks: int, *words: str) -> list[str]:
    return [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        str(num_ranks),
        *words,
    ]


@pytest.fixture(scope="module")
def alone(stories, tmp_path_factory) -> Path:
    """The folder of a run in one process."""
    folder = tmp_path_factory.mktemp("alone")
    train.train(Config(MODEL, DataConfig(stories, sequence_length=32), TRAIN), folder)
    return folder


@pytest.mark.parametrize(
    "num_ranks, parallel",
    tiered(
        [
            (3, {"zero": 2}),
            (3, {}),
            (4, {"zero": 3}),
            (2, {}),
            (4, {}),
            (2, {"zero": 1}),
            (3, {"zero": 3, "sync_every_micro_batch": False}),
        ]
    ),
    ids=str,
)
def test_any_number_of_ranks_trains_what_one_process_trains(
    config, alone, tmp_path, num_ranks, parallel
):
    """10 sequences in micro-batches of 2: on 3 and 4 ranks neither divides.

    float32: sums in another order differ in the last bits, and AdamW carries that on.
    """
    cut = dataclasses.replace(config, parallel=ParallelConfig(**parallel))
    run(train_on_ranks, num_ranks, cut, tmp_path, timeout=300)
    columns = "step", "loss", "grad_norm", "tokens"
    for one, many in zip(trained(alone, *columns), trained(tmp_path, *columns), strict=True):
        assert many == pytest.approx(one, rel=1e-5)
    val_one, val_many = (
        [row["val_loss"] for row in read_metrics(folder / "metrics.jsonl") if "val_loss" in row]
        for folder in (alone, tmp_path)
    )
    assert val_many == pytest.approx(val_one, rel=1e-5)


@pytest.mark.parametrize("before, after", tiered([(3, 1), (0, 0), (2, 0)]))
def test_a_run_resumes_on_other_ranks_and_at_another_stage(config, tmp_path, before, after):
    """2 steps on 2 ranks, 2 on 3, 2 on one process: the losses of a run that never moved."""
    config = dataclasses.replace(
        config, train=dataclasses.replace(TRAIN, checkpoint_every=2, keep_checkpoints=3)
    )
    train.train(config, tmp_path / "whole")
    folder = tmp_path / "moved"
    first, second = (
        dataclasses.replace(config, parallel=ParallelConfig(zero=stage))
        for stage in (before, after)
    )
    run(train_on_ranks, 2, first, folder)
    kill_after(folder, 2)
    run(train_on_ranks, 3, second, folder, True)
    kill_after(folder, 4)
    train.train(config, folder, resume=True)
    columns = "step", "loss", "grad_norm"
    for moved, whole in zip(
        trained(folder, *columns), trained(tmp_path / "whole", *columns), strict=True
    ):
        assert moved == pytest.approx(whole, rel=1e-5)


@exhaustive
@pytest.mark.parametrize(("precision", "zero"), [("bf16", 0), ("fp16", 1), ("fp8", 3)])
def test_low_precision_resumes_bit_for_bit(config, tmp_path, precision, zero):
    """Masters and the loss's scale are in the checkpoint: rounded weights would part at once."""
    config = dataclasses.replace(
        config,
        train=dataclasses.replace(TRAIN, precision=precision),
        parallel=ParallelConfig(zero=zero),
    )
    assert_resumes_bit_for_bit(config, tmp_path)


def assert_resumes_bit_for_bit(config: Config, tmp_path: Path) -> None:
    """A run on 2 ranks that is killed after step 3 and resumed has the rows of one that is not."""
    run(train_on_ranks, 2, config, tmp_path / "whole")
    short = tmp_path / "short"
    run(train_on_ranks, 2, config, short)
    kill_after(short, 3)
    run(train_on_ranks, 2, config, short, True)
    columns = "step", "loss", "grad_norm"
    assert trained(short, *columns) == trained(tmp_path / "whole", *columns)


def kill_after(folder: Path, step: int) -> None:
    """Leave a run as if it had been killed after `step`."""
    for path in (folder / "checkpoints").glob("step_????????"):
        if path.name > f"step_{step:08d}":
            shutil.rmtree(path)


@exhaustive
def test_dropout_resumes_bit_for_bit_on_the_same_ranks(config, tmp_path):
    config = dataclasses.replace(config, model=dataclasses.replace(MODEL, dropout=0.2))
    assert_resumes_bit_for_bit(config, tmp_path)


@exhaustive
def test_ranks_that_were_killed_before_their_first_checkpoint_start_over(config, tmp_path, alone):
    run(train_on_ranks, 2, config, tmp_path)
    shutil.rmtree(tmp_path / "checkpoints")
    assert run(train_on_ranks, 2, config, tmp_path, True) == [6, 6]
    assert trained(tmp_path, "step") == trained(alone, "step")


def warnings_of(group, config: Config, folder: Path) -> list[str]:
    """What a compiled model warns of; nothing is compiled, for that takes a minute."""
    with (
        patch.object(torch, "compile", partial(torch.compile, backend="eager")),
        warnings.catch_warnings(record=True) as caught,
    ):
        warnings.simplefilter("always")
        train.train(config, folder, group=group)
    return [str(each.message) for each in caught if "torch.compile" in str(each.message)]


@exhaustive
def test_ranks_do_not_warn_of_the_ledger_s_hook_on_a_compiled_model(config, tmp_path):
    config = dataclasses.replace(config, train=dataclasses.replace(TRAIN, compile=True, steps=1))
    assert run(warnings_of, 2, config, tmp_path) == [[], []]


def next_numbers(group, config: Config, folder: Path, step: int) -> list[float]:
    """What dropout would draw next, in a run that begins (`step` 0) or goes on after `step`."""
    started = Run(config, folder, group)
    if step > 0:
        kill_after(folder, step)
        started.restore()
        assert started.step == step
    return torch.rand(8).tolist()


@exhaustive
def test_dropout_never_draws_its_first_masks_again_after_a_change_of_layout(config, tmp_path):
    """2 ranks, then one: in the old layout the state is restored, in the new one seeded anew."""
    config = dataclasses.replace(config, model=dataclasses.replace(MODEL, dropout=0.2))
    run(train_on_ranks, 2, config, tmp_path)
    numbers = [run(next_numbers, 2, config, tmp_path, step)[0] for step in (6, 0)]
    numbers += [next_numbers(SINGLE_RANK, config, tmp_path, step) for step in (6, 3, 0)]
    assert next_numbers(SINGLE_RANK, config, tmp_path, 3) == numbers[3]
    drawn = {tuple(each) for each in numbers}  # at step 0 rank 0 has the same part on 1 and 2 ranks
    assert len(drawn) == 4 and numbers[1] == numbers[4]


@exhaustive
def test_torchrun_trains_and_a_signal_saves_first(config, tmp_path):
    folder = tmp_path / "run"
    words = command(config, folder, "--train.steps", "100000", "--train.checkpoint-every", "0")[1:]
    process = subprocess.Popen(torchrun(2, *words), stdout=subprocess.PIPE, text=True)
    log = folder / "metrics.jsonl"
    wait_for(lambda: log.exists() and len(read_metrics(log)) >= 3, process)
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=300)
    last = trained(folder, "step")[-1][0]
    assert [row["step"] for row in read_metrics(log) if "loss" in row] == list(range(1, last + 1))
    assert output.count(f"Stopped by SIGTERM at step {last}; saved.") == 1
    assert (folder / "checkpoints" / f"step_{last:08d}").exists()


@exhaustive
def test_torchrun_tells_a_mistake_once(config, tmp_path):
    words = command(config, tmp_path / "run", "--train.global-batch-size", "1")[1:]
    done = subprocess.run(torchrun(2, *words), capture_output=True, text=True, timeout=300)
    assert done.stderr.count("minitron: train.global_batch_size = 1 leaves some of 2 ranks") == 1
    assert str(Path(train.__file__)) not in done.stderr  # no traceback of ours
    assert "exitcode  : 2" in done.stderr and "terminate called" not in done.stderr
    assert not (tmp_path / "run").exists()


def test_a_mistake_leaves_no_group_behind(monkeypatch):
    """What would be freed at the interpreter's end alone aborts there, one time out of four."""
    torchrun_says = {
        "RANK": "0",
        "LOCAL_RANK": "0",
        "WORLD_SIZE": "1",
        "MASTER_PORT": "0",
        "MASTER_ADDR": "127.0.0.1",
    }
    for name, value in torchrun_says.items():
        monkeypatch.setenv(name, value)
    seen = []

    def leave():
        with launch._joined_group() as group, exit_on_all_ranks(group):
            seen.append(weakref.ref(group))
            raise ConfigError("all ranks leave")

    gc.disable()
    try:
        with (
            patch.object(dist.ProcessGroup, "rank", lambda _: 1),
            contextlib.suppress(SystemExit),
        ):  # as all ranks but 0 leave
            leave()
        assert seen[0]() is None
    finally:
        gc.enable()


@exhaustive
def test_a_folder_that_cannot_be_is_told_once(config, tmp_path):
    (tmp_path / "file").write_text("")
    words = command(config, tmp_path / "file" / "run")[1:]
    done = subprocess.run(torchrun(2, *words), capture_output=True, text=True, timeout=300)
    assert done.stderr.count("minitron: ") == 1 and "Not a directory" in done.stderr
    assert str(Path(train.__file__)) not in done.stderr


def train_where_a_rank_has_no_data(group, config: Config, folder: Path) -> str:
    if group.rank() == 1:
        config = dataclasses.replace(config, data=DataConfig(folder / "nowhere", 32))
    try:
        train.train(config, folder, group=group)
    except (ConfigError, SystemExit) as error:
        return str(error)


def test_a_rank_without_data_ends_all_before_they_wait_for_it(config, tmp_path):
    config = dataclasses.replace(config, parallel=ParallelConfig(tp=2))  # a group for each axis
    told, quiet = run(train_where_a_rank_has_no_data, 2, config, tmp_path)
    assert "nowhere" in told and told.endswith("(on rank 1)")
    assert quiet == "2"


def test_ranks_that_are_not_there_are_refused(config, tmp_path):
    asked = dataclasses.replace(config, parallel=ParallelConfig(dp=4))
    with pytest.raises(ConfigError, match=r"dp = 4, but there is 1 rank: start it with torchrun"):
        train.train(asked, tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_the_saved_config_speaks_for_itself(config, tmp_path):
    short = dataclasses.replace(config, train=dataclasses.replace(TRAIN, steps=1, warmup_steps=1))
    run(train_on_ranks, 2, short, tmp_path / "run")
    saved = json.loads((tmp_path / "run" / "config.json").read_text())
    assert saved["parallel"]["dp"] == 0  # any ranks may continue it


def test_every_rank_needs_a_validation_sequence(config, tmp_path):
    asked = dataclasses.replace(config, train=dataclasses.replace(TRAIN, eval_sequences=2))
    with pytest.raises(
        RankError,
        match="ConfigError: 2 validation sequences for 3 data-parallel "
        "ranks: each needs one; raise train.eval_sequences to 3",
    ):
        run(train_on_ranks, 3, asked, tmp_path / "run")


# What a run of stage 3 holds, and when gradients travel


def build_and_restore(group, config: Config, folder: Path):
    """The most bytes held while a run is built and while it is restored, and its weights."""
    peaks = []
    with Meter(nn.Linear(1, 1)) as meter:  # of no interest: it counts whatever is made
        run = Run(config, folder, group)
    peaks.append(meter.peak.total)
    initial = run.parallel.full_parameters()
    run.save()
    dist.barrier(group)
    with Meter(nn.Linear(1, 1)) as meter:
        run.restore()
    peaks.append(meter.peak.total)
    return peaks, initial


def test_stage_3_never_holds_the_whole_model(config, tmp_path):
    layers = dataclasses.replace(MODEL, num_layers=12)
    config = dataclasses.replace(config, model=layers, parallel=ParallelConfig(zero=3))
    alone = Run(config, tmp_path / "one").model
    whole = sum(parameter.nbytes for parameter in alone.parameters())
    for (built, restored), weights in run(build_and_restore, 2, config, tmp_path / "run"):
        assert whole / 2 < built < 0.75 * whole  # its shard, and one unit
        assert restored < 0.25 * whole
        assert list(weights) == [name for name, _ in alone.named_parameters()]
        assert all(torch.equal(weights[name], p) for name, p in alone.named_parameters())


def reductions(group, config: Config, folder: Path) -> int:
    run = Run(config, folder, group)
    with Ledger() as ledger:
        run.train_step()
    return sum(call.op == "reduce_scatter" for call in ledger.calls)


@exhaustive
@pytest.mark.parametrize("stage", [2, 3])
def test_gradients_travel_after_each_micro_batch_or_once_a_step(config, tmp_path, stage):
    """5 sequences in micro-batches of 2: three for each rank."""
    each, once = (
        run(
            reductions,
            2,
            dataclasses.replace(
                config, parallel=ParallelConfig(zero=stage, sync_every_micro_batch=sync)
            ),
            tmp_path / "run",
        )
        for sync in (True, False)
    )
    assert once[0] > 0 and each == [3 * number for number in once]


def test_ranks_do_not_share_a_gpu():
    def share(group):
        with patch.object(torch.cuda, "device_count", lambda: 1):
            require_a_gpu_each(torch.device("cuda"), group)

    with pytest.raises(
        RankError,
        match="ConfigError: 2 ranks, but this machine has 1 GPU: start "
        "torchrun with --nproc-per-node 1, or set train.device",
    ):
        run(share, 2)
    require_a_gpu_each(torch.device("cuda"), SINGLE_RANK)
    run(require_a_gpu_each_on_cpu, 2)


def require_a_gpu_each_on_cpu(group):
    require_a_gpu_each(torch.device("cpu"), group)
