"""The end of a command: every layout reports once, and a finished run at once."""

import contextlib
import io
import json
import random
import subprocess
from pathlib import Path
from unittest.mock import patch

import pytest
from PIL import Image

from minitron import cli
from minitron.corpus.stories import detokenize, grammatical_share
from minitron.corpus.story_grammar import LINES, VARIABLES, sample_story
from minitron.launch import run
from minitron.measure.metrics import read_metrics
from minitron.run import Run
from teaching import report
from tests.tiers import exhaustive
from tests.train.test_train_ranks import torchrun

TINY = """
[model]
max_sequence_length = 16
num_layers = 4
width = 16
num_heads = 4
num_kv_heads = 2
ffn_width = 16
vocab_size = 720
[data]
path = "{data}"
sequence_length = 16
[train]
steps = 2
global_batch_size = 8
micro_batch_size = 2
eval_sequences = 4
device = "cpu"
"""
ON_2 = [
    "",
    "--parallel.zero 1",
    "--parallel.zero 2",
    "--parallel.zero 3",
    "--parallel.tp 2",
    "--parallel.tp 2 --parallel.sequence --model.family gpt --model.num-kv-heads 4",
    "--parallel.pp 2 --parallel.schedule gpipe --model.family gpt --model.num-kv-heads 4",
    "--parallel.pp 2",
    "--parallel.pp 2 --parallel.schedule zero-bubble",
    "--parallel.pp 2 --parallel.schedule interleaved --parallel.chunks 2",
]
ON_4 = [
    "--parallel.tp 2 --parallel.sequence --parallel.zero 3",
    "--parallel.tp 2 --parallel.pp 2",
    "--parallel.pp 2 --parallel.zero 1",
    "--parallel.tp 4 --model.num-kv-heads 1",
    "--parallel.pp 2 --parallel.zero 2 --parallel.no-sync-every-micro-batch",
    "--parallel.tp 2 --parallel.zero 2 --train.precision bf16",
    "--parallel.pp 2 --parallel.schedule interleaved --parallel.chunks 2",
    "--parallel.zero 1 --train.precision fp16",
]


@pytest.fixture
def config(stories, tmp_path) -> Path:
    file = tmp_path / "tiny.toml"
    file.write_text(TINY.format(data=stories))
    return file


def to_the_end(group, config: Path, layouts: list[str]) -> list[tuple[int, str]]:
    """The exit code and the output of the command on this rank, for each layout."""
    ended = []
    for number, layout in enumerate(layouts):
        output = io.StringIO()
        with (
            patch("minitron.train.torchrun_group", lambda: contextlib.nullcontext(group)),
            patch.multiple(report, NUM_STORIES=3, STORY_TOKENS=6),
            contextlib.redirect_stdout(output),
        ):
            folder = config.parent / f"{group.size()}-{number}"
            code = cli.dispatch(["train", str(config), "--run-dir", str(folder), *layout.split()])
        ended.append((code, output.getvalue()))
    return ended


@exhaustive
@pytest.mark.parametrize("num_ranks, layouts", [(2, ON_2), (4, ON_4)])
def test_every_layout_comes_to_the_end_and_reports_once(config, num_ranks, layouts):
    first, *others = run(to_the_end, num_ranks, config, layouts, timeout=300)
    for number, (layout, (code, output)) in enumerate(zip(layouts, first, strict=True)):
        folder = config.parent / f"{num_ranks}-{number}"
        assert code == 0, layout
        for promise in ("A story by your model", "validation loss", "2 steps", str(folder)):
            assert output.count(promise) >= 1, layout
        assert (folder / "loss_curve.png").read_bytes().startswith(b"\x89PNG")
        assert (folder / "report.txt").read_text().strip() in output
    for ended in others:
        assert ended == [(0, "")] * len(layouts)


@exhaustive
def test_torchrun_reports_as_one_process_does(config, tmp_path):
    words = ["-m", "minitron.train", str(config), "--run-dir", str(tmp_path / "run")]
    done = subprocess.run(
        torchrun(2, *words, "--parallel.tp", "2"), capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("A story by your model") == 1
    assert done.stdout.count("loss curve ") == 1
    assert (tmp_path / "run" / "loss_curve.png").exists()


def dispatched(capsys, config: Path, *words: str) -> str:
    folder = str(config.parent / "run")
    assert cli.dispatch(["train", str(config), "--run-dir", folder, *words]) == 0
    return capsys.readouterr().out


def test_a_finished_run_that_is_resumed_tells_what_it_has(config, capsys, monkeypatch):
    monkeypatch.setattr(report, "NUM_STORIES", 3)
    first = dispatched(capsys, config)
    with patch.object(Run, "sample") as sample:
        again = dispatched(capsys, config, "--resume")
    sample.assert_not_called()
    folder = config.parent / "run"
    assert again == (
        f"{folder}: all 2 steps are done; --train.steps 4 --train.continuation "
        f"restart would add as many. The report:\n{first}"
    )

    (folder / "report.txt").unlink()  # as if it had been killed before
    assert "A story by your model" in dispatched(capsys, config, "--resume")
    longer = dispatched(
        capsys, config, "--resume", "--train.steps", "4", "--train.continuation", "restart"
    )
    assert "trained for          4 steps" in longer and "are done" not in longer


def test_the_loss_curve_says_which_run_it_shows(config, capsys):
    dispatched(capsys, config, "--train.steps", "3", "--train.eval-every", "2")
    facts = json.loads(Image.open(config.parent / "run" / "loss_curve.png").text["Comment"])
    assert facts["evaluated"] == [2, 3]
    assert facts["train"]["steps"] == 3 and facts["model"]["num_layers"] == 4


def test_what_stories_are_compared_with_is_what_the_checker_says():
    """Of the corpus, and of stories whose sentences are from as many others, in the right order."""
    rng = random.Random(0)
    corpus = [sample_story(rng) for _ in range(100)]
    ignoring = [
        [word for line in LINES for word in in_words(rng.choice(line), rng)] for _ in range(100)
    ]
    shares = [grammatical_share(*map(detokenize, stories)) for stories in (corpus, ignoring)]
    assert shares == [(1.0, 1.0), (1.0, 0.0)]
    assert report.COMPARISON == (
        "the corpus scores 100 % and 100 %; sentences that ignore the earlier ones, 100 % and 0 %"
    )


def test_a_report_says_whether_its_shares_are_good(config, capsys, monkeypatch):
    monkeypatch.setattr(report, "NUM_STORIES", 3)
    lines = [line for line in dispatched(capsys, config).splitlines() if line]
    start = next(n for n, line in enumerate(lines) if line.startswith("grammatical "))
    assert lines[start].endswith("each judged by itself")
    assert lines[start + 2 : start + 4] == [
        f"for comparison       {report.COMPARISON}",
        f"typical              {report.TYPICAL}",
    ]


def in_words(template: list[str], rng: random.Random) -> list[str]:
    """A sentence with names and things of its own."""
    slots = {}
    for candidates in VARIABLES.values():
        slots |= rng.choice(candidates)
    return [slots.get(word, word) for word in template]


@exhaustive  # tests/measure/test_metrics reads such a log
def test_a_report_makes_do_with_a_damaged_log(config, capsys, monkeypatch):
    monkeypatch.setattr(report, "NUM_STORIES", 3)
    dispatched(capsys, config)
    folder = config.parent / "run"
    rows = read_metrics(folder / "metrics.jsonl")
    lines = (folder / "metrics.jsonl").read_bytes().splitlines(keepends=True)
    assert "val_loss" in rows[-1] and rows[-2]["step"] == 2
    for kept in ([lines[0], b"\xff\n", lines[2]], [b"\xff\n"], []):
        (folder / "metrics.jsonl").write_bytes(b"".join(kept))
        (folder / "report.txt").unlink()
        assert "A story by your model" in dispatched(capsys, config, "--resume")
