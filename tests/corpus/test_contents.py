"""All tokens of a run are known: other data are told, and a token beyond the vocabulary."""

import dataclasses
import os

import numpy as np
import pytest

from minitron import train
from minitron.config import (
    Config,
    ConfigError,
    DataConfig,
    ModelConfig,
    ParallelConfig,
    TrainConfig,
)
from minitron.corpus import contents
from minitron.corpus.contents import fingerprint, read_contents, require_tokens
from minitron.corpus.folder import write_corpus_info
from minitron.dataset import HEADER_BYTES, TokenDataset, write_shard
from minitron.launch import run
from tests.tiers import tiered

MODEL = ModelConfig(
    max_sequence_length=8, num_layers=2, width=8, num_heads=2, num_kv_heads=2, ffn_width=8
)
TRAIN = TrainConfig(
    steps=2,
    global_batch_size=2,
    micro_batch_size=2,
    eval_sequences=2,
    device="cpu",
    hang_timeout=60,
)


@pytest.fixture
def folder(tmp_path):
    """Two shards to train on and one to validate, of tokens 0 to 99."""
    folder = tmp_path / "data"
    folder.mkdir()
    tokens = np.arange(6000) % 100
    write_shard(folder / "train_000.bin", tokens)
    write_shard(folder / "train_001.bin", tokens[::-1])
    write_shard(folder / "val_000.bin", tokens[:5000])
    write_corpus_info(folder, "text", 100)
    return folder


def config_of(folder, **parallel) -> Config:
    return Config(MODEL, DataConfig(folder, 8), TRAIN, ParallelConfig(**parallel))


def change(path, position: int, token: int) -> None:
    with path.open("r+b") as file:
        file.seek(HEADER_BYTES + 2 * position)
        file.write(token.to_bytes(2, "little"))


@pytest.mark.parametrize(
    ("shard", "position"),
    [
        ("train_000.bin", 0),
        ("train_000.bin", 5999),
        ("train_001.bin", 4096),
        ("val_000.bin", 4999),
    ],
)
def test_any_other_token_is_told_at_resumption(folder, tmp_path, shard, position):
    config = config_of(folder)
    train.train(config, tmp_path / "run")
    change(folder / shard, position, 42)
    longer = dataclasses.replace(config, train=dataclasses.replace(TRAIN, steps=4))
    with pytest.raises(ConfigError, match="data: does not hold the tokens .*run was trained on"):
        train.train(longer, tmp_path / "run", resume=True)


def test_a_checkpoint_from_before_knows_first_tokens_alone(folder):
    dataset = TokenDataset(folder, "train", 8)
    whole = fingerprint(dataset, read_contents(folder))
    assert whole.startswith(dataset.fingerprint()) and len(whole) == 2 * len(dataset.fingerprint())


@pytest.mark.parametrize(("shard", "position"), [("train_001.bin", 5998), ("val_000.bin", 17)])
def test_the_first_token_beyond_the_vocabulary_is_named(folder, shard, position):
    change(folder / shard, position, 300)
    found = read_contents(folder)
    with pytest.raises(ConfigError) as caught:
        require_tokens(folder, found, 100)
    assert f"{shard}: token {position:,} is 300, but the vocabulary has 100" in str(caught.value)
    assert str(caught.value).endswith("set model.vocab_size to 301 or more")
    require_tokens(folder, found, 301)


def outcome(group, config: Config, folder) -> str:
    try:
        train.train(config, folder, group=group)
    except (ConfigError, SystemExit) as error:
        return str(error)
    return "trained"


@pytest.mark.parametrize("parallel", tiered([{"tp": 2}, {}, {"pp": 2}]), ids=str)
def test_every_layout_says_the_same(folder, tmp_path, parallel):
    """tp would have trained on it: rows outside of every rank's part are zeros."""
    change(folder / "train_000.bin", 5000, 100)
    first, second = run(outcome, 2, config_of(folder, **parallel), tmp_path / "run", timeout=90)
    assert "train_000.bin: token 5,000 is 100, but the vocabulary has 100 tokens" in first
    assert second == "2"  # its exit code: rank 0 has told it


def test_what_is_known_is_not_read_again(folder, monkeypatch):
    before = read_contents(folder)
    read = []
    monkeypatch.setattr(
        contents,
        "read_shard",
        lambda path, bar: read.append(path.name) or contents.Contents("0", 1),
    )
    assert read_contents(folder) == before and read == []
    change(folder / "train_001.bin", 3, 7)
    os.utime(folder / "train_001.bin", ns=(0, 0))
    read_contents(folder)
    assert read == ["train_001.bin"]


@pytest.fixture(autouse=True)
def at_once(monkeypatch):
    monkeypatch.setattr(contents, "SETTLED_NS", 0)


def test_a_file_that_has_just_been_written_is_not_remembered(folder, monkeypatch):
    monkeypatch.setattr(contents, "SETTLED_NS", 10**12)
    read_contents(folder)
    assert contents.remembered(folder, sorted(folder.glob("*.bin"))) == {}


@pytest.mark.parametrize(
    "text",
    [
        "[]",
        "{",
        "[" * 5000,
        '{"train_000.bin": 3}',
        '{"train_000.bin": {"stamp": 1}}',
        "9" * 5000,
        "\xff",
    ],
)
def test_a_damaged_memory_is_ignored(folder, text):
    before = read_contents(folder)
    (folder / "contents.json").write_text(text, encoding="latin1")
    assert read_contents(folder) == before


def test_a_folder_that_cannot_be_written_is_read_each_time(folder, monkeypatch):
    monkeypatch.setattr(os, "replace", lambda *_: (_ for _ in ()).throw(OSError(30, "read-only")))
    assert read_contents(folder) == read_contents(folder)
    assert not list(folder.glob("contents*"))


def test_a_shard_replaced_while_it_was_read_is_read_anew(folder, monkeypatch):
    """By its stamp from before: that of afterwards would vouch for tokens that were not read."""
    read, original = [], contents.read_shard

    def slowly(path, bar):
        read.append(path.name)
        found = original(path, bar)
        if read == ["train_000.bin"]:
            write_shard(path, np.arange(6000) % 50)
        return found

    monkeypatch.setattr(contents, "read_shard", slowly)
    before = read_contents(folder)
    assert before["train_000.bin"].largest == 99
    del read[:]
    read.append("again")
    assert read_contents(folder)["train_000.bin"].largest == 49
    assert read == ["again", "train_000.bin"]


def shared(group, folder) -> tuple:
    read, original = [], contents.read_shard
    contents.read_shard = lambda path, bar: read.append(path.name) or original(path, bar)
    found = read_contents(folder, group)
    return read, found


def test_ranks_share_the_work(folder):
    (first, found), (second, same) = run(shared, 2, folder, timeout=60)
    assert sorted(first + second) == ["train_000.bin", "train_001.bin", "val_000.bin"]
    assert found == same == read_contents(folder)


def on_own_node(group, folders) -> str:
    try:
        read_contents(folders[group.rank()], group)
    except ConfigError as error:
        return str(error)
    return ""


def test_nodes_with_other_shards_are_told(folder, tmp_path):
    other = tmp_path / "other"
    other.mkdir()
    write_shard(other / "train_000.bin", np.arange(50))
    told = run(on_own_node, 2, [folder, other], timeout=60)
    assert all("different shards" in each for each in told)
