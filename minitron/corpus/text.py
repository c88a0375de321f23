"""Any text as tokens: a byte-level BPE is trained on the files, then writes their shards.

Byte-pair encoding starts from the 256 bytes, so every text can be written and read back exactly,
and merges the most frequent pair of neighbours until the vocabulary is full (Sennrich et al.
2016; on bytes: Radford et al. 2019, GPT-2). The tokenizers library does the work.
"""

import sysconfig
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from minitron.config import ConfigError, require
from minitron.corpus.folder import (
    END,
    SHARD_TOKENS,
    start_corpus,
    write_corpus_info,
    write_split,
)

SMALLEST_VOCABULARY = 256 + 1  # every byte, and <end>
LARGEST_VOCABULARY = 65_535  # a token is stored as uint16


def write_text(
    paths: list[Path],
    folder: Path,
    vocab_size: int = 4096,
    val_share: float = 0.05,
    pattern: str = "*.txt",
    shard_tokens: int = SHARD_TOKENS,
) -> dict:
    """Turn text files, and the files matching `pattern` in directories, into a data folder.

    Every 1/val_share-th file validates, the others train; a single file is cut in two instead.
    Returns what `corpus.json` says. Raises ConfigError for a path that is missing, a file that is
    not UTF-8, no text at all, or a vocabulary that bytes or uint16 do not allow.
    """
    files = _find_files([Path(path) for path in paths], pattern)
    documents = [text for text in map(_read, files) if text]
    require(len(documents) > 0, f"{', '.join(map(str, paths))}: {len(files)} files, all empty")
    return write_documents(documents, Path(folder), "text", vocab_size, val_share, shard_tokens)


def write_python(
    folder: Path,
    vocab_size: int = 4096,
    val_share: float = 0.05,
    max_bytes: int = 5_000_000,
    library: Path | None = None,
) -> dict:
    """Turn the running Python's standard library into a data folder: real text, already here.

    Reads *.py in the order of their paths, tests and installed packages left out, up to
    `max_bytes`. Another Python version has other sources, so other tokens.
    """
    library = library or Path(sysconfig.get_path("stdlib"))
    left_out = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}
    documents, size = [], 0
    for path in sorted(library.rglob("*.py")):
        if not left_out.isdisjoint(path.relative_to(library).parts):
            continue
        size += path.stat().st_size
        if size > max_bytes:
            break
        documents.append(_read(path))
    documents = [text for text in documents if text]
    require(len(documents) > 0, f"{library}: no *.py here; this Python came without its sources")
    return write_documents(documents, Path(folder), "python", vocab_size, val_share)


def write_documents(
    documents: list[str],
    folder: Path,
    kind: str,
    vocab_size: int,
    val_share: float,
    shard_tokens: int = SHARD_TOKENS,
) -> dict:
    """Train a tokenizer on documents and write them, `<end>` after each, as a data folder."""
    require(
        SMALLEST_VOCABULARY <= vocab_size <= LARGEST_VOCABULARY,
        f"vocab_size = {vocab_size}: must be from {SMALLEST_VOCABULARY} (every byte and {END}) "
        f"to {LARGEST_VOCABULARY} (a token is stored as uint16)",
    )
    require(0 < val_share < 1, f"val_share = {val_share}: must be between 0 and 1")

    start_corpus(folder, kind)
    train, val = _split(documents, val_share)
    tokenizer = train_tokenizer(train, vocab_size)
    train_tokens = write_split(folder, "train", _encode(tokenizer, train), shard_tokens)
    val_tokens = write_split(folder, "val", _encode(tokenizer, val), shard_tokens)
    tokenizer.save(str(folder / "tokenizer.json"))
    return write_corpus_info(
        folder, kind, tokenizer.get_vocab_size(),
        train_tokens=train_tokens, val_tokens=val_tokens,
        documents=len(documents), characters=sum(map(len, documents)),
    )


def train_tokenizer(documents: list[str], vocab_size: int) -> Tokenizer:
    """Train a byte-level BPE of at most `vocab_size` tokens; fewer if the text has fewer pairs."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),  # also the bytes not seen in training
        show_progress=False,
    )
    tokenizer.train_from_iterator(documents, trainer, length=len(documents))
    return tokenizer


def _encode(tokenizer: Tokenizer, documents: list[str]) -> Iterator[np.ndarray]:
    end = tokenizer.token_to_id(END)
    for document in documents:
        yield np.array([*tokenizer.encode(document).ids, end], dtype=np.uint16)


def _split(documents: list[str], val_share: float) -> tuple[list[str], list[str]]:
    if len(documents) == 1:
        text = documents[0]
        cut = round(len(text) * (1 - val_share))
        require(0 < cut < len(text), f"{len(text)} characters are too few to train and to validate")
        return [text[:cut]], [text[cut:]]

    every = min(len(documents), max(2, round(1 / val_share)))
    val = documents[every - 1 :: every]
    train = [text for index, text in enumerate(documents) if index % every != every - 1]
    return train, val


def _find_files(paths: list[Path], pattern: str) -> list[Path]:
    files = []
    for path in paths:
        require(path.exists(), f"{path}: there is no such file or directory")
        if path.is_file():
            files.append(path)
            continue
        found = sorted(file for file in path.rglob(pattern) if file.is_file())
        require(len(found) > 0, f"{path}: no file matches {pattern} in it or below; try --pattern")
        files += found
    return files


def _read(path: Path) -> str:
    data = path.read_bytes()
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"{path}: byte {error.start} is not UTF-8: convert the file, or leave it out"
        ) from None
