"""`minitron plan` as it is typed: the table, the layout in the file, one line for a mistake."""

import re
import shlex
import subprocess
import sys
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace

import pytest

from minitron import cli
from minitron.config import ConfigError, ParallelConfig
from minitron.config.file import load
from minitron.config.layout import require_ranks
from minitron.plan import command
from minitron.plan.command import (
    PlanOptions,
    compared,
    job_of,
    next_lines,
    table,
    tokens_per_step,
)
from minitron.plan.dryrun_command import read_dry_run
from minitron.plan.explain import as_it_stands
from minitron.plan.hardware import DEVICES
from minitron.plan.job import Decision
from minitron.plan.launching import flags
from minitron.plan.money import GpuHour, bill
from minitron.plan.search import Candidate, Search
from minitron.plan.search import search as search_anew
from minitron.train import read_options
from tests.tiers import as_exhaustive, tiered

CONFIGS = Path(__file__).parents[2] / "configs"
H100 = DEVICES["H100-SXM-80GB"]
LARGE = ("gpt2-124m", "llama-1b", "llama-8b", "llama-70b", "gpt3-175b")
GPT2, LLAMA_1B, LLAMA_8B, LLAMA_70B, GPT3 = (str(CONFIGS / f"{name}.toml") for name in LARGE)


search = cache(search_anew)


@pytest.fixture(autouse=True)
def one_search_for_a_job(monkeypatch):
    """The command searches a job that an earlier test has searched no second time."""
    monkeypatch.setattr(command, "search", search)


def plan(*words: str) -> int:
    return cli.dispatch(["plan", *words])


# The table


def test_the_table_of_a_small_model(capsys):
    assert (
        plan(
            GPT2,
            "--gpus",
            "4",
            "--device",
            "h100",
            "--tokens",
            "1e9",
            "--price",
            "2.5",
            "--watts",
            "500",
            "--pue",
            "1.2",
            "--top",
            "3",
        )
        == 0
    )
    text = capsys.readouterr().out
    assert text.startswith("gpt2-124m: 124 M parameters on 4 x H100-SXM-80GB, 68 of 86 GB us")
    job = job_of(load(Path(GPT2)), 4, H100)
    found = search(job)
    assert f"{found.num_layouts:,} layouts in" in text
    _, drops, rows, _ = (part.splitlines() for part in text.split("\n\n"))
    counts = [
        (int(count.replace(",", "")), reason)
        for count, _, reason in (line.strip().partition("  ") for line in drops[1:])
    ]
    assert counts == [(len(found.candidates), "fit"), *found.dropped()[:6]]
    assert len(rows) == 4 and len({len(row) for row in rows}) == 1, "columns are aligned"
    assert "1e+09 tokens, 500 W a GPU, PUE 1.2, 2.5 USD a GPU-hour" in text
    assert "The bottleneck is" not in text, "only with --explain"


def test_the_numbers_of_a_row():
    job = job_of(load(Path(LLAMA_1B)), 8, H100)
    best = next(
        each
        for each in search(job).candidates
        if each.decision.parallel.chunks > 1
        and each.decision.parallel.dp > 1
        and each.decision.parallel.tp > 1
    )
    gpu_hour = GpuHour(watts=500, pue=1.2, price=2.5)
    header, cells = table([best], 1e11, gpu_hour).splitlines()
    row = dict(zip(header.split(), cells.split(), strict=True))
    axes, total = best.decision.parallel, bill(1e11, 1024 * 4096, best.seconds, 8, gpu_hour)
    assert [row[name] for name in ("tp", "pp", "dp", "chunks", "ZeRO", "micro")] == list(
        map(
            str, (axes.tp, axes.pp, axes.dp, axes.chunks, axes.zero, best.decision.micro_batch_size)
        )
    )
    number = {
        name: float(text.rstrip("%").replace(",", ""))
        for name, text in row.items()
        if name not in ("seq", "recompute")
    }
    flops = best.estimate.model_flops / (8 * 989.4e12)
    assert number["MFU"] == pytest.approx(100 * flops / best.seconds, abs=0.06)
    assert number["GB"] == pytest.approx(best.total_bytes / 1e9, abs=0.06)
    assert number["s/step"] == pytest.approx(best.seconds, rel=1e-3)
    assert number["days"] == pytest.approx(total.days, rel=5e-3)
    assert number["GPU-hours"] == pytest.approx(8 * 24 * total.days, rel=5e-3)
    assert number["USD"] == pytest.approx(2.5 * total.gpu_hours, rel=5e-3)
    assert number["MWh"] == pytest.approx(total.gpu_hours * 500 * 1.2 / 1e6, rel=5e-3)
    shares = {part: seconds / best.seconds for part, seconds in best.estimate.parts.items()}
    assert number["bubble"] == pytest.approx(100 * shares["bubble"], abs=0.06)
    sent = shares["tp"] + shares["pp"] + shares["dp"]
    assert number["comm"] == pytest.approx(100 * sent, abs=0.06)
    assert "USD" not in table([best], 1e11, replace(gpu_hour, price=None))


def test_tokens_and_watts_by_default(capsys):
    """The config's own run, 1900 steps of 2^19 tokens, and the datasheet's watts."""
    assert plan(GPT2, "--gpus", "2", "--top", "1") == 0
    assert f"{1900 * 2**19:.3g} tokens, 700 W a GPU, PUE 1.1\n" in capsys.readouterr().out


@pytest.mark.parametrize(("num_gpus", "has_stage_3"), [("1", False), ("8", True)])
def test_what_the_seconds_of_zero_3_rest_on_is_told(num_gpus, has_stage_3, capsys):
    """Where such a layout is shown: alone, a GPU divides nothing."""
    assert plan(GPT2, "--gpus", num_gpus, "--top", "1000") == 0
    text = capsys.readouterr().out
    header, *rows = (line.split() for line in text.split("\n\n")[2].splitlines())
    assert has_stage_3 == ("3" in {row[header.index("ZeRO")] for row in rows})
    told = re.findall(r"^ZeRO-3: .* DeepSpeed took up to (\d\.\d) times as long", text, re.M)
    assert told == (["3.8"] if has_stage_3 else [])


# What to type next


@pytest.mark.parametrize(
    ("name", "num_gpus"),
    tiered(
        [
            ("gpt2-124m", 8),
            ("llama-1b", 8),
            ("gpt2-124m", 1024),
            ("llama-8b", 8),
            ("llama-8b", 24),
        ],
        keep=2,
    ),
)
def test_a_layout_is_trained_by_the_options_that_are_printed(name, num_gpus):
    path = CONFIGS / f"{name}.toml"
    config = load(path)
    job = job_of(config, num_gpus, H100)
    candidates = search(job).candidates
    spread = candidates[:: max(1, len(candidates) // 12)]
    assert len({each.decision.parallel.tp for each in spread}) > 1
    for each in spread:
        options = read_options([str(path), *flags(config, each.decision).split()])
        require_ranks(options, num_gpus)
        assert as_it_stands(options, job) == each


def test_options_that_the_config_has_are_not_repeated():
    config = load(CONFIGS / "llama-70b.toml")
    job = job_of(config, 64, H100)
    standing = as_it_stands(config, job)
    assert flags(config, standing.decision) == ""
    fixed = replace(config, parallel=replace(config.parallel, dp=8))
    assert flags(fixed, standing.decision) == "--parallel.dp 2"
    compiled = load(CONFIGS / "llama-1b.toml")
    wide = replace(standing.decision.parallel, tp=2, pp=1, dp=0)
    assert (
        flags(compiled, replace(standing.decision, parallel=wide))
        == "--parallel.tp 2 --parallel.sequence --train.micro-batch-size 1 --train.no-compile"
    )


RENDEZVOUS = "--rdzv-backend c10d --rdzv-endpoint $HEAD:29500 "


@pytest.mark.parametrize(
    ("words", "launcher"),
    tiered(
        [
            (
                [
                    LLAMA_1B,
                    "--gpus",
                    "8",
                    "--parallel.dp",
                    "4",
                    "--parallel.pp",
                    "2",
                    "--train.no-compile",
                ],
                "torchrun --nproc-per-node 8 -m minitron.train",
            ),
            (
                [
                    str(CONFIGS / "stories.toml"),
                    "--gpus",
                    "1",
                    "--model.vocab-size",
                    "512",
                    "--explain",
                ],
                "minitron train",
            ),
            (
                [GPT2, "--gpus", "16", "--model.num-layers", "10", "--data.path", "my data"],
                f"torchrun --nnodes 2 {RENDEZVOUS}--nproc-per-node 8 -m minitron.train",
            ),
            ([GPT2, "--gpus", "1"], "minitron train"),
            ([GPT2, "--gpus", "6"], "torchrun --nproc-per-node 6 -m minitron.train"),
            (
                [GPT2, "--gpus", "8", "--train.precision", "fp8", "--train.steps", "7"],
                "torchrun --nproc-per-node 8 -m minitron.train",
            ),
        ],
        keep=3,
    ),
)
def test_it_ends_with_two_lines_that_can_be_typed(words, launcher, capsys):
    """What else was asked for on the command line is in them too."""
    assert plan(*words, "--top", "1") == 0
    last = capsys.readouterr().out.splitlines()[-2:]
    train, dry = (line.partition(": ")[2] for line in last)
    assert last[0] == f"The best: {train}" and last[1] == f"What its ranks hold: {dry}"
    assert train.startswith(f"{launcher} {words[0]}") and dry.startswith("minitron dryrun ")

    num_gpus = int(words[2])
    options = read_options(shlex.split(train.removeprefix(launcher)))
    held = read_dry_run(shlex.split(dry.removeprefix("minitron dryrun")))
    assert (held.gpus, held.device) == (num_gpus, "H100-SXM-80GB")
    asked = read_options([words[0], *(word for word in words[3:] if word != "--explain")])
    assert (options.model, options.data) == (asked.model, asked.data)
    for name in ("model", "data", "train", "parallel"):
        assert getattr(held, name) == getattr(options, name)
    for name in ("steps", "precision", "global_batch_size"):
        assert getattr(options.train, name) == getattr(asked.train, name)
    job = job_of(asked, num_gpus, H100)
    assert as_it_stands(options, job) == search(job).trusted


@pytest.mark.parametrize(
    ("num_gpus", "tp", "nodes"),
    [(12, 1, (2, 6)), (12, 4, (3, 4)), (24, 8, (3, 8)), (32, 16, (4, 8)), (7, 1, (1, 7))],
)
def test_each_node_starts_as_many_ranks_and_whole_groups(num_gpus, tp, nodes):
    """Nodes of 8 do not divide 12; a group of tp ranks stays in a node, or fills some."""
    job = job_of(load(Path(LLAMA_8B)), num_gpus, H100)
    parallel = replace(load(Path(LLAMA_8B)).parallel, tp=tp, dp=num_gpus // tp)
    line = next_lines(
        PlanOptions(file=Path(LLAMA_8B)), Candidate(job, Decision(parallel, "none", 1))
    )
    num_nodes = re.search(r"--nnodes (\d+)", line)
    assert int(num_nodes[1] if num_nodes else 1) == nodes[0]
    assert f"--nproc-per-node {nodes[1]} " in line


# ZeRO-3, whose estimates are not confirmed


def of_stages(*stages: int) -> Search:
    """What a search would find on 8 GPUs, of these stages of ZeRO in this order."""
    job = job_of(load(Path(LLAMA_1B)), 8, H100)
    return Search(
        job,
        [Candidate(job, Decision(ParallelConfig(dp=8, zero=stage), "full", 1)) for stage in stages],
    )


@pytest.mark.parametrize("stages, first", [((3, 1), 1), ((3, 2, 1), 2), ((1, 3), 1), ((3,), 3)])
def test_the_first_choice_is_one_whose_estimate_is_trusted(stages, first):
    assert of_stages(*stages).trusted.decision.parallel.zero == first


def set_seconds(monkeypatch, by_stage):
    """Let a layout's estimate be that of its stage of ZeRO."""
    monkeypatch.setattr(
        Candidate, "seconds", property(lambda self: by_stage[self.decision.parallel.zero])
    )


def test_the_table_begins_with_it_and_says_why(capsys, monkeypatch):
    found = of_stages(3, 1, 2)
    set_seconds(monkeypatch, {0: 1.3, 1: 1.0, 2: 1.1, 3: 0.9})
    monkeypatch.setattr(command, "search", lambda job: found)
    assert plan(LLAMA_1B, "--gpus", "8", "--explain") == 0
    text = capsys.readouterr().out
    rows = text[text.index("ZeRO") :].splitlines()[1:4]
    assert [row.split()[5] for row in rows] == ["1", "3", "2"]
    assert (
        "So the fastest layout without ZeRO-3 is listed first, although the fastest "
        "estimate is 10.0% lower" in text
    )
    assert "--parallel.zero 3" not in text


# The layout in the file


def test_a_layout_that_stands_is_compared_with_the_best(capsys):
    assert plan(LLAMA_1B, "--gpus", "8") == 0
    line = re.search(r"as it stands: (.*)", capsys.readouterr().out)[1]
    job = job_of(load(Path(LLAMA_1B)), 8, H100)
    standing, found = as_it_stands(load(Path(LLAMA_1B)), job), search(job)
    assert line.startswith(
        f"{standing}: {standing.seconds:.4g} s a step, "
        f"{standing.seconds / found.trusted.seconds:.2f} times that of the best"
    )
    faster = sum(
        found.trusts(each) and each.seconds < standing.seconds for each in found.candidates
    )
    assert line.endswith(f"; {faster:,} layouts are faster")


def test_one_layout_is_faster_and_two_are():
    job = job_of(load(Path(GPT2)), 2, H100)
    found = search(job)
    speeds = sorted(
        {each.seconds: each for each in found.candidates if found.trusts(each)}.values(),
        key=lambda each: each.seconds,
    )
    assert compared(speeds[0], Search(job, speeds[:1])).endswith(": no layout is faster")
    assert compared(speeds[1], Search(job, speeds[:2])).endswith("; 1 layout is faster")
    assert compared(speeds[2], Search(job, speeds[:3])).endswith("; 2 layouts are faster")


def test_a_layout_with_zero_3_is_compared_with_those_without(monkeypatch):
    found = of_stages(3, 1)
    set_seconds(monkeypatch, {1: 1.0, 3: 0.9})
    text = compared(found.candidates[0], found)
    assert text.endswith(": no layout without ZeRO-3 is faster")


@pytest.mark.parametrize("gain, is_said", [(0, False), (0.1, True)])
def test_a_gain_of_nothing_is_no_reason(gain, is_said, monkeypatch):
    found = of_stages(3, 1)
    set_seconds(monkeypatch, {1: 1.0, 3: 1 - gain})
    assert ("is listed first" in command.of_stage_3(found)) == is_said


def test_a_layout_that_cannot_run_is_explained_and_the_search_goes_on(capsys):
    assert plan(LLAMA_70B, "--gpus", "24", "--train.global-batch-size", "24", "--top", "1") == 0
    text = capsys.readouterr().out
    assert re.search(
        r"as it stands: cannot run on 24 GPUs: parallel.tp = 8 and parallel.pp = 4, "
        r"but there are 24 ranks.*would do\nThe best: ",
        text,
    )


def test_a_layout_that_does_not_fit_is_told(capsys):
    assert plan(LLAMA_1B, "--gpus", "8", "--train.micro-batch-size", "32", "--top", "1") == 0
    assert re.search(
        r"as it stands: .*micro-batches of 32: does not fit, \d+\.\d GB where \d+ GB are usable\n",
        capsys.readouterr().out,
    )


def test_explain_and_other_gpus(capsys):
    assert (
        plan(
            GPT2,
            "--gpus",
            "4",
            "--device",
            "a100-sxm-80",
            "--gpus-per-node",
            "2",
            "--train.global-batch-size",
            "32",
            "--top",
            "1",
            "--explain",
        )
        == 0
    )
    text = capsys.readouterr().out
    assert "4 x A100-SXM-80GB" in text and "The bottleneck is" in text
    assert "tp           1 is best" in text
    assert job_of(load(Path(GPT2)), 8, H100, gpus_per_node=4).gpus_per_node == 4


def test_calibrate_plans_for_what_is_measured(capsys, monkeypatch):
    """Nobody has measured its watts."""
    measured = replace(H100, name="this machine", bf16_flops=1e12, watts=0)
    module = SimpleNamespace(calibrate=lambda: measured)
    monkeypatch.setitem(sys.modules, "minitron.plan.calibrate", module)
    assert plan(GPT2, "--gpus", "2", "--calibrate", "--top", "1") == 0
    text = capsys.readouterr().out
    assert "2 x this machine" in text and "MWh" not in text and "W a GPU" not in text
    assert text.endswith(" --gpus 2\n"), "nobody else knows that device"
    job = job_of(load(Path(GPT2)), 2, measured)
    assert f"  {search(job).candidates[0].seconds:.4g}  " in text


# Mistakes


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "name a TOML file first"),
        (["--gpus", "8"], "name a TOML file first"),
        (["configs/nope.toml", "--gpus", "8"], "configs/nope.toml: there is no such file"),
        ([GPT2], "say how many GPUs there are, as in --gpus 512"),
        ([GPT2, "--gpus", "0"], "--gpus 0: must be 1 or more"),
        ([GPT2, "--gpus", "1000000000000"], "--gpus 1000000000000: must be 1,000,000 or less"),
        ([GPT2, "--gpus", "-8"], "--gpus -8: must be 1 or more"),
        ([GPT2, "--gpus", "many"], "--gpus"),
        ([GPT2, "--gpus", "8", "--top", "0"], "--top 0: must be 1 or more"),
        ([GPT2, "--gpus", "8", "--gpus-per-node", "0"], "--gpus-per-node 0: must be 1 or more"),
        ([GPT2, "--gpus", "8", "--device", "h1000"], "'h1000'"),
        (
            [GPT2, "--gpus", "8", "--device", "h100", "--calibrate"],
            "h100 with --calibrate.*leave one",
        ),
        ([GPT2, "--gpus", "8", "--tokens", "0"], "--tokens 0"),
        ([GPT2, "--gpus", "8", "--tokens", "inf"], "--tokens inf: must be a number greater than 0"),
        ([GPT2, "--gpus", "8", "--tokens", "nan"], "--tokens nan: must be a number greater than 0"),
        ([GPT2, "--gpus", "8", "--price", "inf"], "--price inf: must be a number"),
        ([GPT2, "--gpus", "8", "--watts", "0"], "--watts 0.0: must be greater than 0"),
        ([GPT2, "--gpus", "8", "--pue", "0.5"], "--pue 0.5"),
        ([GPT2, "--gpus", "8", "--price", "-1"], "--price -1"),
        (
            [LLAMA_8B, "--gpus", "7", "--parallel.tp", "8"],
            r"7 ranks: plan for a multiple of 8; with 7 ranks --parallel.tp 1 \(dp 7\) or ",
        ),
        (
            [LLAMA_8B, "--gpus", "7", "--parallel.dp", "8"],
            "but there are 7 ranks: plan for 8; with 7",
        ),
        (
            [LLAMA_8B, "--gpus", "6", "--parallel.tp", "3"],
            "model.num_heads = 32 is not divisible by 3",
        ),
        ([GPT2, "--gpus", "8", "--parallel.tp", "2"], "train.compile with parallel.tp = 2"),
        ([GPT2, "--gpus", "8", "--model.num-heads", "7"], "= 7: try --model.num-heads 12$"),
        ([LLAMA_8B, "--gpus", "8", "--model.num-heads", "30"], "= 30: try --model.num-heads 32$"),
        ([GPT2, "--gpus", "13", "--train.global-batch-size", "1"], "for 13 GPUs can be trained"),
        as_exhaustive(
            ([GPT3, "--gpus", "7", "--device", "h100"], "56 GPUs or .* GB each would do")
        ),
        (
            [str(CONFIGS / "stories.toml"), "--gpus", "1", "--data.path", "/nowhere"],
            "/nowhere/.*--model.vocab-size",
        ),
    ],
)
def test_a_mistake_is_one_line(words, message, capfd):
    with pytest.raises(ConfigError) as caught:
        plan(*words)
    assert re.search(message, str(caught.value))
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 400
    assert capfd.readouterr().out == "", "nothing is printed before"


def test_the_process_prints_it_and_exits_with_2():
    words = ["plan", LLAMA_8B, "--gpus", "7", "--parallel.tp", "8"]
    result = subprocess.run(
        [sys.executable, "-m", "minitron.cli", *words], text=True, capture_output=True, timeout=120
    )
    assert result.returncode == 2 and result.stdout == ""
    assert re.fullmatch(r"minitron: parallel\.tp = 8, but there are 7 ranks.*\n", result.stderr)


def test_help_names_every_option(capsys):
    with pytest.raises(SystemExit) as stop:
        plan("--help")
    assert stop.value.code == 0
    text = capsys.readouterr().out
    for name in (
        "gpus",
        "device",
        "tokens",
        "price",
        "watts",
        "pue",
        "top",
        "explain",
        "calibrate",
        "parallel.tp",
        "model.num-layers",
    ):
        assert f"--{name}" in text


@pytest.mark.parametrize("name", tiered(["llama-1b", "llama-8b", "gpt2-124m"]))
def test_configs_are_not_far_from_the_best_on_a_node(name):
    config = load(CONFIGS / f"{name}.toml")
    job = job_of(config, 8, H100)
    standing = as_it_stands(config, job)
    assert standing.fits
    assert standing.seconds <= 1.35 * search(job).candidates[0].seconds
    assert tokens_per_step(job) == config.train.global_batch_size * config.data.sequence_length
