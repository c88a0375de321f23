"""A data folder: shards, `tokenizer.json` and `corpus.json`, whatever the corpus.

`corpus.json` says what the shards hold: the kind of corpus, its vocabulary size, and what is
known about it (for stories, the lowest loss that is possible).
"""

import json
import os
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from minitron.config import ConfigError, require
from minitron.dataset import write_shard
from minitron.system.files import read_json, reason, require_regular

if TYPE_CHECKING:
    from tokenizers import Tokenizer

SHARD_TOKENS = 100_000_000
LARGEST_VOCABULARY = 2**16  # a token is stored as uint16
END = "<end>"
"""Stands between two documents, in every tokenizer that is made here."""


def start_corpus(folder: Path, kind: str) -> None:
    """Make `folder` ready for a corpus of this kind: old shards of the same kind are removed.

    Raises ConfigError if another kind of corpus lives there.
    """
    folder.mkdir(parents=True, exist_ok=True)
    if (folder / "corpus.json").exists():
        present = read_corpus_info(folder)["kind"]
        require(
            present == kind,
            f"{folder} holds a corpus of kind {present}, not {kind}",
            "choose another folder",
        )
    # First what makes the folder a corpus: one that is interrupted must not look complete.
    (folder / "corpus.json").unlink(missing_ok=True)
    # A longer run's train_007.bin would be read along with the new shards.
    for split in ("train", "val"):
        for path in folder.glob(f"{split}_*.bin"):
            path.unlink()


def require_space(folder: Path, num_bytes: int) -> None:
    """Raise ConfigError if the disk of `folder`, which need not be there yet, has not so much."""
    above = (folder.absolute(), *folder.absolute().parents)
    free = shutil.disk_usage(next(path for path in above if path.is_dir())).free
    require(
        num_bytes <= free,
        f"{folder}: {num_bytes / 1e9:,.1f} GB of tokens, but the disk has "
        f"{free / 1e9:,.1f} GB left",
        "write fewer, or choose another folder",
    )


def write_split(
    folder: Path, split: str, documents: Iterable[np.ndarray], shard_tokens: int = SHARD_TOKENS
) -> int:
    """Pack documents, arrays of tokens, into shards `{split}_000.bin`, ...; return their tokens.

    No shard is longer than `shard_tokens`; none is short while others are full.
    """
    pending, num_pending, num_shards = [], 0, 0
    for document in documents:
        pending.append(document)
        num_pending += len(document)
        # Up to two shards wait, so that the last one is never a few tokens, less than a sample.
        while num_pending >= 2 * shard_tokens:
            tokens = np.concatenate(pending)
            write_shard(folder / f"{split}_{num_shards:03d}.bin", tokens[:shard_tokens])
            pending, num_pending = [tokens[shard_tokens:]], num_pending - shard_tokens
            num_shards += 1

    rest = np.concatenate(pending) if pending else np.empty(0)
    parts = np.array_split(rest, -(-len(rest) // shard_tokens)) if len(rest) else []
    for index, tokens in enumerate(parts, start=num_shards):
        write_shard(folder / f"{split}_{index:03d}.bin", tokens)
    return num_shards * shard_tokens + len(rest)


def write_corpus_info(folder: Path, kind: str, vocab_size: int, **facts) -> dict:
    """Write `corpus.json`, the last file of a corpus, and return what it says."""
    info = {"kind": kind, "vocab_size": vocab_size, **facts}
    temporary = folder / "corpus.json.tmp"
    temporary.write_text(json.dumps(info, indent=2) + "\n")
    os.replace(temporary, folder / "corpus.json")
    return info


def read_corpus_info(folder: Path) -> dict:
    """Read `corpus.json`: `kind`, `vocab_size` and the corpus's own facts.

    Raises ConfigError if it is missing or does not say both.
    """
    path = Path(folder) / "corpus.json"
    require(
        path.exists(),
        f"{path}: there is no such file, so the corpus is not complete",
        "write it with `minitron data`",
    )
    try:
        info = read_json(path)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: {reason(error)}", "write the corpus again") from None
    for key, expected in (("kind", str), ("vocab_size", int)):
        require(
            isinstance(info, dict) and type(info.get(key)) is expected,
            f"{path}: {key} is missing or not of type {expected.__name__}",
            "write the corpus again",
        )
    require(
        1 <= info["vocab_size"] <= LARGEST_VOCABULARY,
        f"{path}: vocab_size = {info['vocab_size']}: must be from 1 to {LARGEST_VOCABULARY}, as a "
        "token is stored as uint16",
        "write the corpus again",
    )
    return info


def load_tokenizer(folder: Path, remedy: str = "write the corpus again") -> "Tokenizer | None":
    """Load `tokenizer.json`; None if the folder has none (training needs none, text does).

    Decode with `skip_special_tokens=False` to see where a document ends. Raises ConfigError for a
    file that holds no tokenizer; `remedy` says what to do then.
    """
    path = Path(folder) / "tokenizer.json"
    if not path.exists():
        return None
    from tokenizers import Tokenizer  # here: a dry run needs a folder's facts, and no tokenizer

    try:
        require_regular(path)
        return without_markup(Tokenizer.from_file(str(path)))
    except Exception as error:  # the library raises no narrower one
        raise ConfigError(f"{path}: not a tokenizer ({error})", remedy) from None


def without_markup(tokenizer: "Tokenizer") -> "Tokenizer":
    """Let a tokenizer read `<end>`, or the name of another special token, as ordinary text.

    A document may contain such a name, and does not end there. The setting is not saved in
    `tokenizer.json`: each tokenizer that is made or loaded needs it.
    """
    tokenizer.encode_special_tokens = True
    return tokenizer


def end_of_document(tokenizer: "Tokenizer") -> int:
    """Return the token that stands between documents: ours, or GPT-2's."""
    known = [tokenizer.token_to_id(name) for name in (END, "<|endoftext|>")]
    return next((token for token in known if token is not None), 0)
