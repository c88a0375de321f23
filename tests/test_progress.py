"""Whoever waits for more than 5 s is told, with a terminal or without."""

import io
import sys
import threading
from pathlib import Path

import pytest

from minitron import cli
from minitron.system import progress
from minitron.system.progress import CLOCK, Progress


@pytest.fixture(autouse=True)
def soon(monkeypatch):
    monkeypatch.setattr(progress, "FIRST_S", 0.01)


def told(capsys) -> str:
    """What standard error holds after the thread's next line."""
    text = capsys.readouterr().err
    while " so far" not in text:
        threading.Event().wait(0.01)
        text += capsys.readouterr().err
    return text


def test_lines_where_there_is_no_terminal(capsys):
    with Progress(total=3, desc="reading") as bar:
        bar.update(2)
        assert "reading: 2 of 3, 00:" in told(capsys)
    assert "\r" not in capsys.readouterr().err


def test_a_line_comes_during_one_long_step(capsys):
    with Progress(desc="learning", bar_format=CLOCK):
        assert told(capsys).startswith("learning: 00:")


def test_nothing_is_told_of_what_is_quick_nor_by_other_ranks(monkeypatch, capsys):
    with Progress(total=3, disable=True) as bar:
        bar.update(3)
        assert bar.ended.wait(0.1) is False
    monkeypatch.setattr(progress, "FIRST_S", 60.0)
    assert list(Progress([1, 2, 3], "ranks")) == [1, 2, 3]
    assert capsys.readouterr().err == ""


def test_what_is_written_between_is_not_torn(capsys):
    with Progress(total=3, desc="step") as bar:
        bar.set_postfix_str("loss 2.0")
        bar.write("step 1", file=sys.stderr)
        bar.update()
        text = told(capsys)
    assert "step 1\n" in text and "loss 2.0" in text and "\r" not in text


@pytest.fixture
def patient(monkeypatch):
    """No bar ends before its thread has told a line, however quick the work is."""
    told, close = {}, Progress.close  # bars by id, kept alive: an id is given again

    def tell(bar, **options):
        print(bar, **options)
        told[id(bar)] = bar

    def close_once_told(bar):
        while not (bar.disable or bar.ended.is_set() or id(bar) in told):
            threading.Event().wait(0.01)
        close(bar)

    monkeypatch.setattr(progress, "print", tell, raising=False)
    monkeypatch.setattr(Progress, "close", close_once_told)


def test_data_and_train_tell_how_far_they_are(patient, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in "abc":
        (tmp_path / f"{name}.txt").write_text(f"{name} quick brown fox. " * 100)
    assert cli.dispatch(["data", "text", ".", "--vocab-size", "300"]) == 0
    lines = capsys.readouterr().err.splitlines()
    assert all(" so far" in line for line in lines)
    assert {line.split(":")[0] for line in lines} == {
        "reading",
        "learning the vocabulary",
        "encoding",
    }
    words = (
        "--data.path data/text --data.sequence-length 8 --model.max-sequence-length 8 "
        "--model.num-layers 1 --model.width 16 --model.num-heads 1 --model.num-kv-heads 1 "
        "--model.ffn-width 16 --train.steps 2 --train.warmup-steps 0 --train.device cpu "
        "--train.global-batch-size 2 --train.micro-batch-size 2 --train.eval-sequences 2"
    )
    assert cli.dispatch(["train", *words.split()]) == 0
    told = capsys.readouterr().err
    assert "reading data/text: " in told and " of 2, 00:" in told and " so far" in told


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def on_terminal(monkeypatch) -> Terminal:
    """Called by the test itself: pytest puts its own standard error back after each fixture."""
    monkeypatch.setattr(progress, "TICK_S", 0.01)
    monkeypatch.setattr(sys, "stderr", Terminal())
    return sys.stderr


def test_a_terminal_gets_a_bar(monkeypatch):
    terminal = on_terminal(monkeypatch)
    with Progress(total=3, desc="step", file=sys.stderr) as bar:
        bar.update(3)
        bar.refresh()
    assert "\r" in terminal.getvalue() and "100%" in terminal.getvalue()


def test_the_clock_of_a_terminal_runs_while_nothing_is_counted(monkeypatch):
    terminal = on_terminal(monkeypatch)
    with Progress(desc="weighing", bar_format=CLOCK, file=sys.stderr) as bar:
        drawn = terminal.getvalue().count("weighing: ")
        while terminal.getvalue().count("weighing: ") < drawn + 3:
            threading.Event().wait(0.01)
    text = terminal.getvalue()
    assert not bar.thread.is_alive() and text == terminal.getvalue()


@pytest.mark.parametrize(
    "words, expected",
    [
        (
            "plan configs/gpt2-124m.toml --gpus 2 --explain",
            ["reading the config", "weighing layouts", "weighing other hardware"],
        ),
        (
            "dryrun configs/gpt2-124m.toml --gpus 2 --rank 0 --model.num-layers 1",
            ["loading PyTorch", "ranks"],
        ),
    ],
)
def test_plan_and_dryrun_show_a_bar_from_the_start(monkeypatch, words, expected):
    terminal = on_terminal(monkeypatch)
    monkeypatch.chdir(Path(__file__).parents[1])
    assert cli.dispatch(words.split()) == 0
    shown = [line.split(":")[0].strip() for line in terminal.getvalue().split("\r")]
    assert [name for name in dict.fromkeys(shown) if name in expected] == expected
