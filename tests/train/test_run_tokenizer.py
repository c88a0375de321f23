"""A run's tokenizer is the one it began with, whatever its corpus's folder holds later."""

import dataclasses
import json
import shutil
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from minitron import checkpoint, cli, train
from minitron.checkpoint.manifest import read_manifest, write_manifest
from minitron.config import Config, ConfigError, DataConfig
from minitron.corpus.folder import load_tokenizer
from minitron.corpus.text import write_text
from minitron.run import Run
from teaching import report
from tests.train.test_train import MODEL, TRAIN

CATS = "the cat sat on the mat. "
DOGS = "my dog digs holes all day! "
SHORT = dataclasses.replace(TRAIN, steps=2, warmup_steps=1, eval_every=0, eval_sequences=2)


def write_corpus(folder: Path, text: str) -> None:
    source = folder.parent / "source.txt"
    source.write_text(text * 400)
    write_text([source], folder, vocab_size=270)


@pytest.fixture(scope="module")
def original(tmp_path_factory) -> Path:
    """The corpus `data`, about cats, and a run on it."""
    place = tmp_path_factory.mktemp("original")
    write_corpus(place / "data", CATS)
    train.train(Config(MODEL, DataConfig(place / "data", 32), SHORT), place / "run")
    return place


@pytest.fixture
def place(original, tmp_path) -> Path:
    """A copy, in which the run's corpus is the copied one."""
    place = tmp_path / "place"
    shutil.copytree(original, place)
    facts = saved_facts(place)
    facts["config"]["data"]["path"] = str(place / "data")
    save_facts(place, facts)
    return place


def saved_facts(place: Path) -> dict:
    return checkpoint.facts_of(checkpoint.newest_good(place / "run" / "checkpoints"))


def save_facts(place: Path, facts: dict) -> None:
    path = checkpoint.newest_good(place / "run" / "checkpoints")
    write_manifest(path, read_manifest(path)["files"], facts)


def config(place: Path, **changes) -> Config:
    return Config(MODEL, DataConfig(place / "data", 32), dataclasses.replace(SHORT, **changes))


def resume(place: Path, steps: int) -> Run:
    longer = config(place, steps=steps, continuation="stretch")
    return train.train(longer, place / "run", resume=True)


def exported(place: Path) -> dict:
    """The vocabulary of an export of the run; {} if it has none."""
    folder = place / "exported"
    shutil.rmtree(folder, ignore_errors=True)
    assert cli.dispatch(["export", str(place / "run"), str(folder)]) == 0
    tokenizer = load_tokenizer(folder)
    return tokenizer.get_vocab() if tokenizer else {}


def vocabulary(folder: Path) -> dict:
    return load_tokenizer(folder).get_vocab()


def test_a_run_keeps_its_tokenizer_for_its_export(place):
    before = vocabulary(place / "data")
    assert vocabulary(place / "run") == before
    write_corpus(place / "data", DOGS)
    assert vocabulary(place / "data") != before
    assert exported(place) == before
    shutil.rmtree(place / "data")
    assert exported(place) == before


def test_a_corpus_that_is_replaced_during_a_run_changes_no_sample_and_no_report(tmp_path):
    write_corpus(tmp_path / "data", CATS)
    run = train.train(config(tmp_path), tmp_path / "run")
    told = run.sample(2, 12), report.new_report(run), report.next_steps(run)
    write_corpus(tmp_path / "data", DOGS)
    (tmp_path / "data" / "corpus.json").write_text('{"kind": "stories", "vocab_size": 300}')
    assert (run.sample(2, 12), report.new_report(run), report.next_steps(run)) == told


def test_a_resumed_run_keeps_it_too(place):
    """Also where the corpus has the same tokens, but gives them other names."""
    before = (place / "run" / "tokenizer.json").read_bytes()
    write_corpus(place / "other", DOGS)
    shutil.copy(place / "other" / "tokenizer.json", place / "data")
    run = resume(place, steps=3)
    assert run.tokenizer.get_vocab() == Tokenizer.from_buffer(before).get_vocab()
    assert (place / "run" / "tokenizer.json").read_bytes() == before


def test_a_run_that_failed_before_leaves_no_tokenizer_to_the_next(tmp_path):
    write_corpus(tmp_path / "data", CATS)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "tokenizer.json").write_text("of another corpus")
    train.train(config(tmp_path), tmp_path / "run")
    assert vocabulary(tmp_path / "run") == vocabulary(tmp_path / "data")

    shutil.rmtree(tmp_path / "run" / "checkpoints")
    (tmp_path / "run" / "metrics.jsonl").unlink()
    (tmp_path / "data" / "tokenizer.json").unlink()
    run = train.train(config(tmp_path), tmp_path / "run")
    assert run.tokenizer is None and not (tmp_path / "run" / "tokenizer.json").exists()
    assert exported(tmp_path) == {}


# Runs that were made before runs kept a tokenizer


def forget(place: Path) -> str:
    """Make the run one of those; returns the fingerprint of its tokens."""
    (place / "run" / "tokenizer.json").unlink(missing_ok=True)
    return saved_facts(place)["fingerprint"]


@pytest.mark.parametrize("length", [128, 64])
def test_an_old_run_has_that_of_its_corpus(place, length):
    known = forget(place)
    assert len(known) == 128
    save_facts(place, saved_facts(place) | {"fingerprint": known[:length]})
    assert exported(place) == vocabulary(place / "data")
    resume(place, steps=3)
    assert vocabulary(place / "run") == vocabulary(place / "data")


def test_an_old_run_on_tokens_that_are_gone_is_refused(place):
    known = forget(place)
    shutil.copy(place / "data" / "tokenizer.json", place / "old.json")
    before = vocabulary(place / "data")
    write_corpus(place / "data", DOGS)
    with pytest.raises(
        ConfigError,
        match=f"run: has no tokenizer.json, .* {known[-12:]}, but .*"
        r"now holds tokens with checksum \w{12}; copy .* into .*run, or move",
    ):
        exported(place)
    assert not (place / "exported").exists()
    for shard in (place / "data").glob("*.bin"):
        shard.unlink()
    with pytest.raises(ConfigError, match="now holds no readable tokens; copy"):
        exported(place)

    shutil.copy(place / "old.json", place / "run" / "tokenizer.json")  # as the message says
    assert exported(place) == before
    forget(place)
    (place / "data" / "tokenizer.json").unlink()
    assert exported(place) == {}


def test_a_damaged_tokenizer_is_one_line(place):
    (place / "run" / "tokenizer.json").write_text(json.dumps({"version": "1.0"}))
    with pytest.raises(ConfigError, match="run/tokenizer.json: not a tokenizer .*; replace it"):
        exported(place)
    with pytest.raises(ConfigError, match="run/tokenizer.json: not a tokenizer .*; replace it"):
        resume(place, steps=3)
