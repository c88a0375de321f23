"""What a command line may hold: for every field, values that no one should type, in one line."""

import dataclasses
import errno
import os
import random
import sys

import pytest

from minitron import cli, train_loop
from minitron.config import Config, ConfigError, command_line
from minitron.corpus.stories import write_stories

INTS = [
    "0",
    "-1",
    "3",
    "1000000000",
    str(2**62),
    str(2**63),
    "9" * 30,
    "9" * 5000,
    "1e3",
    "1.5",
    "true",
    "",
    "x",
]
FLOATS = ["0", "-1", "nan", "inf", "-inf", "1e308", "1e-320", "1e400", "9" * 400, "x", ""]
TEXTS = [
    "",
    "x",
    "/",
    "/dev/null",
    "a" * 300,
    "a/" * 3000,
    "..",
    "\udcff",
    "a\nb",
    "meta",
    "cuda:99",
    "privateuseone",
    "cpu:-1",
]


def ends(words: list[str], monkeypatch, capfd) -> tuple[int, str]:
    """The exit code of a command line, and what it says on standard error."""
    monkeypatch.setattr(sys, "argv", ["minitron", *words])
    with pytest.raises(SystemExit) as stop:
        cli.main()
    return stop.value.code, capfd.readouterr().err


def fields() -> list[tuple[str, dataclasses.Field]]:
    sections = vars(Config())
    return [
        (name, field) for name, section in sections.items() for field in dataclasses.fields(section)
    ]


def values(field: dataclasses.Field) -> list[str]:
    return {int: INTS, float: FLOATS, bool: []}.get(field.type, TEXTS)


@pytest.fixture(scope="module")
def stories(tmp_path_factory):
    folder = tmp_path_factory.mktemp("stories")
    write_stories(folder, 10_000)
    return folder


@pytest.fixture
def stub(monkeypatch, tmp_path, stories):
    """All but the training."""
    (tmp_path / "data").symlink_to(stories)
    monkeypatch.chdir(tmp_path)

    def trained(*args):
        raise ConfigError("trained")

    monkeypatch.setattr(train_loop, "loop", trained)


@pytest.mark.parametrize(("section", "field"), fields(), ids=lambda it: getattr(it, "name", it))
def test_any_value_of_any_field_is_one_line(section, field, stub, monkeypatch, capfd):
    """Two for each field, the same ones each time."""
    option = f"--{section}.{field.name.replace('_', '-')}"
    choices = values(field)
    for value in random.Random(option).sample(choices, min(2, len(choices))):
        words = ["train", "--data.path", "data", "--train.device", "cpu", option, value]
        code, text = ends(words, monkeypatch, capfd)
        assert code == 2, (value[:50], text)
        *before, told = text.splitlines()
        assert told.startswith("minitron: ") and len(told) < 1000, (value[:50], text)
        assert not before or told == "minitron: trained"


@pytest.mark.parametrize(
    "words",
    [
        ["plan", "CONFIG", "--gpus", "1000000000000"],
        ["dryrun", "CONFIG", "--gpus", "1000000000000"],
        [
            "plan",
            "CONFIG",
            "--gpus",
            "8",
            "--model.width",
            "1000000000",
            "--model.num-heads",
            "1000",
        ],
        [
            "dryrun",
            "CONFIG",
            "--gpus",
            "8",
            "--model.ffn-width",
            "1000000000",
            "--train.no-compile",
        ],
        ["dryrun", "CONFIG", "--gpus", "8", "--train.global-batch-size", str(2**62)],
        ["data", "stories", "--out", "o", "--num-tokens", str(10**18)],
        ["data", "text", "data", "--out", "o", "--pattern", "/etc/*"],
        ["data", "text", "data", "--out", "o", "--pattern", "**x"],
        ["data", "text", "data", "--out", "a" * 300, "--pattern", "*.json", "--vocab-size", "300"],
        ["train", "--data.path", "data", "--run-dir", "a" * 300],
        ["train", "--data.path", "data", "--run-dir", "/proc/version/x"],
        ["train", "a" * 300 + ".toml"],
        ["export", "a" * 300, "b"],
        ["export", "\udcff", "b"],
    ],
    ids=lambda words: " ".join(words)[:40],
)
def test_what_is_too_large_or_no_name_is_one_line(words, stub, monkeypatch, capfd):
    config = os.path.join(os.path.dirname(__file__), "..", "configs", "gpt2-124m.toml")
    words = [config if word == "CONFIG" else word for word in words]
    code, text = ends(words, monkeypatch, capfd)
    assert code == 2 and text.startswith("minitron: "), text
    assert text.count("\n") == 1 and len(text) < 1000


def test_more_to_validate_on_than_there_is_ends_at_once(stub, monkeypatch, capfd):
    code, text = ends(
        [
            "train",
            "--data.path",
            "data",
            "--train.device",
            "cpu",
            "--train.eval-sequences",
            "100000000",
        ],
        monkeypatch,
        capfd,
    )
    assert code == 2 and text.splitlines()[-1] == "minitron: trained", text


def test_random_pairs_of_fields_are_one_line(stub, monkeypatch, capfd):
    rng = random.Random(0)
    for _ in range(10):
        words = ["train", "--data.path", "data", "--train.device", "cpu"]
        for section, field in rng.sample([each for each in fields() if values(each[1])], 2):
            words += [f"--{section}.{field.name.replace('_', '-')}", rng.choice(values(field))]
        code, text = ends(words, monkeypatch, capfd)
        assert code == 2 and text.splitlines()[-1].startswith("minitron: "), (words, text)


# What the system refuses


@pytest.mark.parametrize(
    "number, remedy",
    [
        (errno.ENOSPC, "make room"),
        (errno.EDQUOT, "make room"),
        (errno.EROFS, "choose another path"),
        (errno.ENAMETOOLONG, "choose another path"),
    ],
)
def test_what_a_disk_refuses_is_one_line(number, remedy, monkeypatch, capfd):
    def fault(args):
        raise OSError(number, os.strerror(number), "runs/a\nb")

    monkeypatch.setattr(sys, "argv", ["minitron"])
    with pytest.raises(SystemExit) as stop:
        command_line.run(fault)
    assert stop.value.code == 2
    told = capfd.readouterr().err
    assert told == f"minitron: runs/a\\nb: {os.strerror(number)}; {remedy}\n"


def test_other_faults_of_the_system_keep_their_traceback(monkeypatch):
    def fault(args):
        raise OSError(errno.EBADF, "Bad file descriptor", "x")

    monkeypatch.setattr(sys, "argv", ["minitron"])
    with pytest.raises(OSError, match="Bad file descriptor"):
        command_line.run(fault)


def test_a_rank_whose_mistake_is_its_own_tells_it(monkeypatch, capfd):
    """After a while: if all ranks have made it, torchrun has ended this one by then."""
    waited = []
    monkeypatch.setattr(sys, "argv", ["minitron"])
    monkeypatch.setenv("LOCAL_RANK", "3")
    monkeypatch.setattr(command_line.time, "sleep", waited.append)

    def fault(args):
        raise ConfigError("train_001.bin: ends before token 11")

    with pytest.raises(SystemExit):
        command_line.run(fault)
    assert waited == [command_line.SECONDS_ALONE]
    assert capfd.readouterr().err == "minitron: train_001.bin: ends before token 11\n"
