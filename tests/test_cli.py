"""The command as it is typed: exit codes, one line for a mistake, nothing lost."""

import os
import subprocess
import sys

import pytest

import minitron as minitron_package
from minitron import cli
from minitron.config import ConfigError, command_line
from tests.tiers import exhaustive, tiered


def minitron(*words: str, cwd=None) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-m", "minitron.cli", *words],
        cwd=cwd,
        text=True,
        capture_output=True,
        timeout=300,
    )


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["trian"], "unknown command 'trian'; did you mean train?"),
        (["train", "configs/nope.toml"], "configs/nope.toml: there is no such file"),
        (["train", "--model.widht", "3"], "--model.widht, 3: did you mean --model.width?"),
        (["train", "--model.width", "x"], "--model.width: invalid literal for int()"),
        (["train", "--model.width", "130"], "model.num_heads = 4: try --model.width 136"),
        (["train", "--model.family", "bert"], "'bert' for argument '--model.family'"),
        (["train", "--model.width"], "missing value for argument '--model.width'"),
        (["train", "--data.path", "/nowhere"], "/nowhere: no train_*.bin here; `minitron data"),
        (["train", "--use", "9.9"], "exercise '9.9' does not exist"),
        (["data"], "expected one of stories, text, python, fineweb"),
        (["data", "stories", "--num-tokens", "0"], "num_tokens = 0: must be greater than 0"),
        (["data", "text"], "no path given"),
        (["data", "text", "/nowhere"], "/nowhere: there is no such file or directory"),
        (["check", "77"], "exercise '77' does not exist"),
        (["hint"], "missing"),
        (["hint", "1.1", "--level", "9"], "9"),
        (["status", "now"], "status: takes no arguments, but got now"),
        (["doctor", "--now"], "doctor: takes no arguments, but got --now"),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(words, message, tmp_path):
    with pytest.raises(ConfigError) as caught:
        cli.dispatch(words)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 300


@exhaustive
def test_a_terminal_of_plain_ascii_is_told_the_same():
    """As in a scheduler's log."""
    environment = os.environ | {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONIOENCODING": "ascii"}
    done = subprocess.run(
        [sys.executable, "-m", "minitron.train", "--model.widht", "3"],
        text=True,
        env=environment,
        capture_output=True,
        timeout=300,
    )
    assert done.stderr.startswith("minitron: unrecognized options --model.widht, 3: did you mean ")
    assert done.returncode == 2


@pytest.mark.parametrize("command", tiered(["plan", "train"]))  # `train` imports torch
def test_the_process_prints_it_and_exits_with_2(tmp_path, command):
    result = minitron(command, "nope.toml", cwd=tmp_path)
    assert result.returncode == 2
    assert result.stdout == ""
    assert result.stderr == "minitron: nope.toml: there is no such file\n"
    assert list(tmp_path.iterdir()) == []


def test_an_unexpected_fault_keeps_its_traceback(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["minitron"])

    def fault(args):
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        command_line.run(fault)


def test_help_lists_every_command_and_every_field(capsys):
    assert cli.dispatch([]) == 0
    usage = capsys.readouterr().out
    assert all(f"\n  {name}" in usage for name in cli.COMMANDS)
    with pytest.raises(SystemExit) as stop:
        cli.dispatch(["train", "--help"])
    assert stop.value.code == 0
    text = capsys.readouterr().out
    assert "--model.num-layers INT" in text and "--run-dir" in text and "--use" in text


@pytest.mark.parametrize("word", ["-h", "--help"])
@pytest.mark.parametrize("command", cli.COMMANDS)
def test_every_command_has_help(command, word, capsys):
    with pytest.raises(SystemExit) as stop:
        cli.dispatch([command, word])
    assert stop.value.code == 0
    out, err = capsys.readouterr()
    assert out.startswith(f"usage: minitron {command}") and err == ""


def test_data_then_train_then_the_report(tmp_path, monkeypatch, capsys):
    """The whole way on a tiny model: data, training, report, figure."""
    monkeypatch.chdir(tmp_path)
    assert cli.dispatch(["data", "stories", "--num-tokens", "20000"]) == 0
    (tmp_path / "tiny.toml").write_text(
        "[model]\nnum_layers = 1\nwidth = 16\nnum_heads = 1\nnum_kv_heads = 1\nffn_width = 16\n"
        "[train]\nsteps = 3\nglobal_batch_size = 2\nmicro_batch_size = 2\neval_sequences = 4\n"
        "device = 'cpu'\n"
    )
    assert cli.dispatch(["train", "tiny.toml"]) == 0
    printed = capsys.readouterr().out
    for promise in (
        "A story by your model",
        "grammatical",
        "consistent",
        "lowest possible",
        "runs/tiny",
        "minitron data python",
    ):
        assert promise in printed
    run = tmp_path / "runs" / "tiny"
    assert (run / "loss_curve.png").read_bytes().startswith(b"\x89PNG")
    assert "% of the sentences" in (run / "report.txt").read_text()


def test_text_is_trained_on_and_sampled(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.txt").write_text("the cat sat on the mat. " * 400)
    assert cli.dispatch(["data", "text", "a.txt", "--vocab-size", "270"]) == 0
    words = [
        "train",
        "--data.path",
        "data/text",
        "--data.sequence-length",
        "16",
        "--train.steps",
        "2",
        "--train.device",
        "cpu",
        "--run-dir",
        "mine",
    ]
    assert cli.dispatch(words) == 0
    assert "A text by your model" in capsys.readouterr().out
    assert (tmp_path / "mine" / "loss_curve.png").exists()


def test_the_version_is_told(capsys):
    assert cli.dispatch(["--version"]) == 0
    assert capsys.readouterr().out.startswith(f"minitron {minitron_package.__version__}, torch ")
