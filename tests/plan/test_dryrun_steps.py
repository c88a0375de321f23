"""The dry run itself: what it leaves out is exactly like the rest, and it leaves nothing behind."""

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from minitron import cli, cost
from minitron.config import (
    Config,
    ConfigError,
    DataConfig,
    ModelConfig,
    ParallelConfig,
    TrainConfig,
)
from minitron.measure.live import CATEGORIES
from minitron.plan import dryrun
from minitron.plan.dryrun import dry_run
from minitron.plan.dryrun_command import ranks_of, read_dry_run
from minitron.plan.dryrun_table import describe, unit_of
from minitron.plan.hardware import DEVICES
from minitron.plan.stage_dedup import dry_runs
from tests.tiers import exhaustive, tiered

GPT = ModelConfig(
    "gpt", 512, 32, num_layers=4, width=64, num_heads=4, num_kv_heads=4, ffn_width=256
)
TWO, ONE = replace(GPT, num_layers=2), replace(GPT, num_layers=1)


def config(sequences=16, size=1, precision="fp32", recompute="none", model=GPT, **parallel):
    train = TrainConfig(
        global_batch_size=sequences, micro_batch_size=size, precision=precision, recompute=recompute
    )
    return Config(model, DataConfig(sequence_length=32), train, ParallelConfig(**parallel))


def whole(monkeypatch, asked: Config, num_gpus: int, rank: int) -> dryrun.DryRun:
    """The same with every micro-batch run."""
    with monkeypatch.context() as patch:
        patch.setattr(dryrun, "most_held", lambda training: 10**6)
        return dry_run(asked, num_gpus, rank)


@pytest.mark.parametrize(
    "asked, num_gpus, rank",
    tiered(
        [
            (config(53, 3, "bf16", model=ONE), 2, 1),  # 26 sequences: the last micro-batch has two
            (config(12, pp=3, schedule="zero-bubble"), 3, 1),
            (config(49, 3, model=ONE, zero=2), 2, 1),  # 24, where the first rank has 25
            (config(8, model=ONE, tp=2, sequence=True), 2, 1),
            (config(16, model=ONE, cp=2, context="ulysses", recompute="full"), 4, 2),
            (config(9, model=ONE), 1, 0),
            (config(16, recompute="full", model=TWO, zero=3), 2, 0),
            (config(16, model=ONE, cp=2, zero=2), 4, 1),
            (config(pp=4, recompute="full"), 4, 0),
            (config(pp=4), 8, 7),
            (config(20, precision="bf16-autocast", pp=2, schedule="interleaved", chunks=2), 2, 0),
            (config(20, pp=2, schedule="interleaved", chunks=2), 2, 1),
            (config(16, pp=2, schedule="zb-v", chunks=2), 2, 0),
            (config(16, pp=2, schedule="zb-v", chunks=2), 2, 1),
            (config(18, pp=2, schedule="dualpipe-v", chunks=2), 2, 0),
        ]
    ),
)
def test_the_rest_of_a_step_is_like_what_was_run(monkeypatch, asked, num_gpus, rank):
    short, long = dry_run(asked, num_gpus, rank), whole(monkeypatch, asked, num_gpus, rank)
    assert short.num_run < short.num_micro_batches == long.num_run
    assert short.peak.bytes == long.peak.bytes
    assert (short.traffic, short.flops) == (long.traffic, long.flops)


def test_gpipe_is_run_in_full():
    dry = dry_run(config(12, model=TWO, pp=2, schedule="gpipe"), 2)
    assert dry.num_run == dry.num_micro_batches == 12


@exhaustive
def test_peaks_that_differ_are_not_extrapolated(monkeypatch):
    """Too short a step: more is held the longer it is, until the pipeline is full."""
    right = dry_run(config(30, pp=4), 4)
    monkeypatch.setattr(dryrun, "most_held", lambda training: 0)
    dry = dry_run(config(30, pp=4), 4)
    assert right.num_run == 6 + 7 and dry.num_run == 2 + 3 + 4 + 5 + 6
    assert dry.peak.bytes == right.peak.bytes and dry.traffic == right.traffic


@pytest.mark.parametrize(
    "recompute, family",
    tiered(
        [
            ("none", "gpt"),
            ("full", "gpt"),
            ("none", "llama"),
        ]
    ),
)
def test_flops_are_those_of_the_formula(recompute, family):
    """But a fused attention's backward pass makes the scores once more, and a replay ends when all
    is there that it was made for: before the block's last product."""
    model = TWO if family == "gpt" else replace(TWO, family="llama", num_kv_heads=2)
    S, D, F = 32, model.width, model.ffn_width
    each = cost.training_flops_per_token(model, S) + model.num_layers * 2 * S * D
    if recompute == "full":
        each += cost.recompute_flops_per_token(model, S) - model.num_layers * 2 * D * F
    assert dry_run(config(3, recompute=recompute, model=model), 1).flops == 3 * S * each


def test_ranks_share_the_flops():
    alone = dry_run(config(1, model=TWO), 1).flops
    cut = config(1, model=TWO, tp=2, pp=2)
    assert sum(dry_run(cut, 4, rank).flops for rank in range(4)) == alone
    assert dry_run(config(2, model=TWO), 2).flops == alone


class Counted(dryrun.Flops):
    """Count the operators of all steps too."""

    num_operators = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        Counted.num_operators += 1
        return super().__torch_dispatch__(func, types, args, kwargs)


@exhaustive
def test_more_gpus_and_larger_batches_cost_nothing(monkeypatch):
    """On the first stage, which has most on its way. Of 2 and of 5,000 data-parallel ranks each
    does the same, and the wire has its (N-1)/N; of 14 and of 400 micro-batches as many are run."""
    monkeypatch.setattr(dryrun, "Flops", Counted)
    dry_runs, counts = [], []
    for dp, num_micro_batches in ((2, 14), (5_000, 14), (2, 400)):
        Counted.num_operators = 0
        dry_runs.append(dry_run(config(dp * num_micro_batches, pp=4), 4 * dp))
        counts.append(Counted.num_operators)
    few, many, long = dry_runs
    assert (few.peak.bytes, few.flops) == (many.peak.bytes, many.flops)
    assert few.peak.bytes == long.peak.bytes and 14 * long.flops == 400 * few.flops
    # 4 are held: 4 + 2 fill the pipeline, and one more shows that the peak is the same
    assert [(dry.num_micro_batches, dry.num_run) for dry in dry_runs] == [
        (14, 6 + 7),
        (14, 6 + 7),
        (400, 6 + 7),
    ]
    assert counts[0] > 1000 and counts[0] == counts[1] == counts[2]
    few, many = (dry.bytes_sent["all_reduce", "dp"] for dry in (few, many))
    assert many == pytest.approx(2 * few * (1 - 1 / 5_000), rel=1e-3)


@exhaustive
def test_a_trillion_parameters():
    """The last stage of the 1T model of Narayanan et al. 2021, table 1, on 3,072 GPUs."""
    model = ModelConfig("gpt", 51200, 2048, 128, 25600, 160, 160, 4 * 25600)
    train = TrainConfig(
        global_batch_size=3072, micro_batch_size=1, precision="bf16-fp32-grads", recompute="full"
    )
    asked = Config(model, DataConfig(sequence_length=2048), train, ParallelConfig(tp=8, pp=64))
    dry = dry_run(asked, 3072, rank=3071)
    assert dry.place == {"pp": 63, "dp": 5, "tp": 7}
    assert (dry.num_micro_batches, dry.num_run) == (512, 7)
    both = replace(model, num_layers=2), replace(model, num_layers=1)
    two, one = (cost.tensor_parallel_parameters(each, 8) for each in both)
    held = 2 * (two - one) + (51200 // 8 + 2) * 25600  # two blocks, a head and a norm
    assert dry.peak.bytes["parameter"] == 2 * held
    assert dry.peak.bytes["gradient"] == 4 * held
    assert dry.peak.bytes["optimizer state"] == pytest.approx(12 * held, rel=1e-6)


def test_rms_norm_keeps_what_it_does_on_a_gpu():
    """Its input and a number for each row, as the formula says; a CPU keeps it in float32 too."""
    model = replace(GPT, family="llama", num_kv_heads=2)

    def held(num_layers: int, kernels: str) -> int:
        asked = config(2, precision="bf16", model=replace(model, num_layers=num_layers))
        return dry_run(asked, 1, kernels=kernels).peak.bytes["activation"]

    block = held(2, "gpu") - held(1, "gpu")
    assert block == cost.activation_bytes_per_layer(model, 1, 32, 2, "fused")
    more = 2 * 32 * 64 * (4 + 4 - 2)  # of two norms: twice in float32, not once in bfloat16
    assert held(2, "cpu") - held(1, "cpu") == block + more


def test_dropout_in_attention_keeps_no_square():
    """As in a GPU's kernel; the masks of the other dropouts are there."""
    long = replace(TWO, max_sequence_length=1024)
    peaks = []
    for dropout in (0.0, 0.1):
        asked = replace(
            config(1, model=replace(long, dropout=dropout)), data=DataConfig(sequence_length=1024)
        )
        peaks.append(dry_run(asked, 1).peak)
    masks = (2 * 2 + 1) * 1024 * 64  # a byte for each number that passes a dropout
    square = 4 * 1024 * 1024 * 4
    grown = peaks[1].total - peaks[0].total
    assert masks <= grown < masks * 5 + square / 4


def test_it_leaves_nothing_behind():
    state = torch.get_rng_state()
    for asked, num_gpus in ((config(4, model=TWO, pp=2), 4), (config(2, model=ONE), 1)):
        dry_run(asked, num_gpus)
    with pytest.raises(ConfigError, match="is not divisible"):
        dry_run(config(tp=3), 3)
    assert not dist.is_initialized()
    assert torch.equal(state, torch.get_rng_state())
    assert torch.get_default_dtype() == torch.float32
    assert type(torch.ones(1)) is torch.Tensor


def test_a_process_with_a_group_is_told(monkeypatch):
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    with pytest.raises(ConfigError, match="has a process group already"):
        dry_run(config(), 2)


# The command


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "small.toml"
    path.write_text(
        '[model]\nfamily = "gpt"\nvocab_size = 512\nmax_sequence_length = 32\nnum_layers = 4\n'
        "width = 64\nffn_width = 256\n[data]\nsequence_length = 32\n"
        "[train]\nglobal_batch_size = 24\nmicro_batch_size = 1\ncompile = true\n"
    )
    return str(path)


def test_the_command_shows_first_middle_and_last(file, capsys):
    words = [file, "--gpus", "8", "--parallel.pp", "4", "--train.no-compile"]
    words += ["--train.global-batch-size", "4"]
    assert cli.dispatch(["dryrun", *words, "--device", "a100"]) == 0
    out = capsys.readouterr().out
    dry = dry_run(config(4, pp=4), 8)
    assert f"{dry.peak.total / 1e6:,.2f}" in out
    assert [line.split()[:2] for line in out.splitlines() if line.lstrip()[:1].isdigit()][:3] == [
        ["0", "0"],
        ["4", "2"],
        ["6", "3"],
    ]
    assert "small: 235 k parameters on 8 GPUs, dp 2, pp 4, tp 1, ZeRO-0" in out
    assert "Fits on A100" in out


def test_which_ranks(file):
    words = [file, "--gpus", "12", "--parallel.tp", "2", "--parallel.pp", "3", "--train.no-compile"]
    assert ranks_of(read_dry_run(words)) == [0, 4, 8]
    assert ranks_of(read_dry_run([*words, "--every-stage"])) == [0, 4, 8]
    assert ranks_of(read_dry_run([*words, "--rank", "7"])) == [7]
    words[6] = "4"
    words[2] = "16"
    assert ranks_of(read_dry_run(words)) == [0, 8, 12]
    assert ranks_of(read_dry_run([*words, "--every-stage"])) == [0, 4, 8, 12]


@pytest.mark.parametrize(
    ("changes", "num_equal"),
    tiered(
        [
            ({"schedule": "1f1b", "m": 1}, 1),
            ({"schedule": "zero-bubble"}, 0),
            ({"schedule": "gpipe"}, 1),
            ({"schedule": "1f1b"}, 0),
            ({"schedule": "interleaved", "chunks": 2}, 0),
        ],
        keep=1,
    ),
    ids=str,
)
def test_equal_stages_are_run_once_and_are_equal(changes, num_equal):
    """As if each had been run: bytes by category, messages, FLOPs."""
    m = changes.pop("m", 8)
    parallel = ParallelConfig(pp=4, **changes)
    model = ModelConfig("gpt", 64, 32, num_layers=8, width=64, ffn_width=256)
    whole = Config(
        model,
        DataConfig(sequence_length=32),
        TrainConfig(global_batch_size=2 * m, micro_batch_size=1),
        parallel,
    )
    found = list(dry_runs(whole, 8, range(0, 8, 2)))
    assert sum(run.seconds == 0 for run in found) == num_equal
    for run in found:
        if run.seconds == 0:
            alone = dry_run(whole, 8, run.rank)
            assert run.peak.bytes == alone.peak.bytes and run.traffic.keys() == alone.traffic.keys()
            for key, traffic in alone.traffic.items():  # the norm's ring of 4 ranks has 1 number
                assert run.traffic[key] == pytest.approx(traffic, abs=8 * (key[1] == "pp"))
            assert (run.flops, run.place, run.num_run) == (alone.flops, alone.place, alone.num_run)
    text = describe(found)
    assert ("equal to a rank above: 1." in text) == (num_equal == 1)


@pytest.mark.parametrize(
    "words, message",
    [
        (
            ["--gpus", "7", "--parallel.tp", "8", "--train.no-compile"],
            "7 ranks: plan for a multiple of 8; with 7 ranks --parallel.tp 1 (dp 7) would do",
        ),
        (["--gpus", "6", "--parallel.tp", "3", "--train.no-compile"], "is not divisible by 3"),
        (
            ["--gpus", "4", "--parallel.dp", "2"],
            "parallel.dp = 2, but there are 4 ranks: plan for 2",
        ),
        ([], "say how many GPUs there are, as in --gpus 1024"),
        (["--gpus", "0"], "--gpus 0: must be 1 or more"),
        (["--gpus", "4", "--rank", "4"], "--rank 4 of 4 GPUs: use 0 to 3"),
        (["--gpus", "4", "--rank", "-1"], "--rank -1 of 4 GPUs: use 0 to 3"),
        (["--gpus", "4", "--rank", "1", "--every-stage"], "leave one of them out"),
        (["--gpus", "4", "--device", "z80"], "device 'z80' is unknown"),
        (["--gpus", "4", "--model.vocab-size", "0", "--data.path", "/nowhere"], "/nowhere"),
    ],
)
def test_a_mistake_is_one_line(file, words, message, capfd):
    with pytest.raises(ConfigError) as caught:
        cli.dispatch(["dryrun", file, *words])
    assert message in str(caught.value) and "\n" not in str(caught.value)
    assert capfd.readouterr().out == "", "nothing is printed before"


def test_no_file_is_told():
    with pytest.raises(ConfigError, match="name a TOML file first"):
        cli.dispatch(["dryrun", "--gpus", "4"])


# The table


@pytest.fixture(scope="module")
def dry() -> dryrun.DryRun:
    return dry_run(config(2), 1)


def test_a_rank_that_does_not_fit_is_told(dry):
    small = replace(DEVICES["A100-SXM-80GB"], memory_bytes=dry.peak.total - 1)
    assert "Does not fit on A100-SXM-80GB: rank 0 holds" in describe([dry], small)
    assert "Fits on" in describe([dry], replace(small, memory_bytes=dry.peak.total))


def test_the_largest_tensors_are_those_that_hold_most(dry):
    assert sum(tensor.bytes for tensor in dry.peak.tensors) == dry.peak.total
    assert set(dry.peak.bytes) == set(CATEGORIES)
    assert "blocks.*.mlp" in describe([dry]) and "blocks.0" not in describe([dry])


def test_units():
    assert unit_of([3, 2e9]) == ("GB", 1e9)
    assert unit_of([0]) == ("kB", 1e3)
    assert unit_of([5e15], "FLOP") == ("TFLOP", 1e12)
