import json

import numpy as np
import pytest
from tokenizers import Tokenizer, models

from minitron.config import ConfigError
from minitron.corpus.folder import (
    END,
    end_of_document,
    load_tokenizer,
    read_corpus_info,
    require_space,
    start_corpus,
    write_corpus_info,
    write_split,
)
from minitron.dataset import open_shard


@pytest.mark.parametrize(
    ("lengths", "shards"),
    [
        ([10], [10]),
        ([11], [6, 5]),  # never a shard of a token or two beside a full one
        ([7, 7, 7], [10, 6, 5]),
        ([35], [10, 10, 8, 7]),
        ([5] * 4, [10, 10]),
        ([], []),
    ],
)
def test_documents_are_packed_in_order_into_shards(tmp_path, lengths, shards):
    tokens = np.arange(sum(lengths), dtype=np.uint16)
    documents = np.split(tokens, np.cumsum(lengths)[:-1]) if lengths else []
    assert write_split(tmp_path, "train", documents, shard_tokens=10) == len(tokens)

    written = [open_shard(path) for path in sorted(tmp_path.glob("train_*.bin"))]
    assert [len(shard) for shard in written] == shards
    assert [token for shard in written for token in shard] == tokens.tolist()


def test_a_new_corpus_removes_the_old_one_of_its_kind(tmp_path):
    write_split(tmp_path, "train", [np.arange(30)], shard_tokens=10)
    write_corpus_info(tmp_path, "text", 300)
    (tmp_path / "notes.bin").write_bytes(b"the user's own")

    start_corpus(tmp_path, "text")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["notes.bin"]


def test_another_kind_of_corpus_is_not_overwritten(tmp_path):
    write_split(tmp_path, "train", [np.arange(30)])
    write_corpus_info(tmp_path, "fineweb", 50_257)
    with pytest.raises(ConfigError, match="holds a corpus of kind fineweb, not stories"):
        start_corpus(tmp_path, "stories")
    assert (tmp_path / "train_000.bin").exists()


def test_corpus_info_reads_back(tmp_path):
    info = write_corpus_info(tmp_path, "text", 300, train_tokens=5)
    assert info == {"kind": "text", "vocab_size": 300, "train_tokens": 5}
    assert read_corpus_info(tmp_path) == info


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "there is no such file, so the corpus is not complete"),
        ("{", "not valid JSON"),
        ("[]", "holds a list, not an object of keys; write the corpus again"),
        (json.dumps({"kind": "text"}), "vocab_size is missing or not of type int"),
        (json.dumps({"kind": "text", "vocab_size": "many"}), "vocab_size is missing or not of"),
        (json.dumps({"kind": "text", "vocab_size": True}), "vocab_size is missing or not of"),
        (json.dumps({"kind": "text", "vocab_size": 0}), "vocab_size = 0: must be from 1 to 65536"),
        (json.dumps({"kind": "text", "vocab_size": 10**40}), "vocab_size = 10.* from 1 to 65536"),
        (json.dumps({"kind": "text", "vocab_size": 10**400}), "has a number of 401 digits; write"),
        ('{"kind": ' + 5000 * "9" + "}", "has a number of 5,000 digits; write"),
        (5000 * '{"kind": ' + "1" + 5000 * "}", "nested too deeply; write the corpus again"),
        ("\ud800".encode("utf-8", "surrogatepass").decode("latin1"), "not valid JSON"),
    ],
)
def test_corpus_info_that_cannot_be_used(tmp_path, content, message):
    if content is not None:
        (tmp_path / "corpus.json").write_text(content)
    with pytest.raises(ConfigError, match=message):
        read_corpus_info(tmp_path)


def test_more_tokens_than_the_disk_holds(tmp_path):
    with pytest.raises(ConfigError, match="GB of tokens, but the disk has .* choose another"):
        require_space(tmp_path / "not" / "there", 10**18)
    require_space(tmp_path / "not" / "there", 0)


def test_a_folder_may_lack_a_tokenizer(tmp_path):
    assert load_tokenizer(tmp_path) is None


@pytest.mark.parametrize(
    ("vocabulary", "end"),
    [
        ({"a": 0, END: 1}, 1),
        ({"a": 0, "b": 1, "<|endoftext|>": 2}, 2),
        ({"a": 0}, 0),
    ],
)
def test_the_end_of_a_document_has_two_names(vocabulary, end):
    assert end_of_document(Tokenizer(models.WordLevel(vocabulary, unk_token="a"))) == end
