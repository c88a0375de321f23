"""Whoever waits for more than 5 s is told, with a terminal or without."""

import io
import sys
import threading

import pytest

from minitron import progress
from minitron.progress import CLOCK, Progress


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


def test_a_terminal_gets_a_bar(monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setattr(sys, "stderr", Terminal())
    with Progress(total=3, desc="step", file=sys.stderr) as bar:
        bar.update(3)
        bar.refresh()
    assert "\r" in sys.stderr.getvalue() and "100%" in sys.stderr.getvalue()
