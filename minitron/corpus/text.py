"""Any text as tokens: a byte-level BPE is trained on the files, then writes their shards.

Byte-pair encoding starts from the 256 bytes, so every text can be written and read back exactly,
and merges the most frequent pair of neighbors until the vocabulary is full (Sennrich et al.
2016; on bytes: Radford et al. 2019, GPT-2). The tokenizers library does the work.
"""

import re
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from minitron.config import ConfigError, require
from minitron.corpus.folder import (
    END,
    SHARD_TOKENS,
    start_corpus,
    without_markup,
    write_corpus_info,
    write_split,
)
from minitron.launch.process import memory_bytes
from minitron.system.progress import CLOCK, Progress

LONGEST_WORD = 1000
LONG_WORD = re.compile(rf"\S{{{LONGEST_WORD}}}|\s{{{LONGEST_WORD}}}")
BYTES_PER_BYTE = 40  # that the tokenizers library makes of a text while it encodes it
SMALLEST_VOCABULARY = 256 + 1  # every byte, and <end>
LARGEST_VOCABULARY = 65_535


def write_text(
    paths: list[Path],
    folder: Path,
    vocab_size: int = 4096,
    val_share: float = 0.05,
    pattern: str = "*.txt",
    shard_tokens: int = SHARD_TOKENS,
) -> dict:
    """Turn text files, and the files matching `pattern` in directories, into a data folder.

    A file that is named twice, or is also in a directory that is named, is read once. Every
    1/val_share-th file validates, the others train. Where that would be less than half of
    `val_share` of the text, or more than twice as much, the end of each file validates instead.
    Returns what `corpus.json` says. Raises ConfigError for a path that is missing, a file that is
    not UTF-8, no text at all, or a vocabulary that bytes or uint16 do not allow.
    """
    require_vocabulary(vocab_size)
    files = _once(_find_files([Path(path) for path in paths], pattern))
    require_room(files)
    documents = [text for text in Progress(map(_read, files), "reading", len(files)) if text]
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
    require_vocabulary(vocab_size)
    library = library or Path(sysconfig.get_path("stdlib"))
    left_out = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}
    paths = [
        path
        for path in sorted(library.rglob("*.py"))
        if left_out.isdisjoint(path.relative_to(library).parts)
    ]
    documents, size = [], 0
    for path in _once(paths):
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
    require_vocabulary(vocab_size)
    require(0 < val_share < 1, f"val_share = {val_share}: must be between 0 and 1")

    start_corpus(folder, kind)
    train, val = _split(documents, val_share)
    tokenizer = train_tokenizer(train, vocab_size)
    with Progress(total=sum(map(len, train + val)), desc="encoding", unit_scale=True) as bar:
        train_tokens = write_split(folder, "train", _encode(tokenizer, train, bar), shard_tokens)
        val_tokens = write_split(folder, "val", _encode(tokenizer, val, bar), shard_tokens)
    tokenizer.save(str(folder / "tokenizer.json"))
    return write_corpus_info(
        folder,
        kind,
        tokenizer.get_vocab_size(),
        train_tokens=train_tokens,
        val_tokens=val_tokens,
        documents=len(documents),
        characters=sum(map(len, documents)),
    )


def require_vocabulary(vocab_size: int) -> None:
    require(
        SMALLEST_VOCABULARY <= vocab_size <= LARGEST_VOCABULARY,
        f"vocab_size = {vocab_size}: must be from {SMALLEST_VOCABULARY} (every byte and {END}) "
        f"to {LARGEST_VOCABULARY} (a token is stored as uint16)",
    )


def train_tokenizer(documents: list[str], vocab_size: int) -> Tokenizer:
    """Train a byte-level BPE of at most `vocab_size` tokens; fewer if the text has fewer pairs."""
    tokenizer = Tokenizer(models.BPE())
    words = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.pre_tokenizer = words
    if any(LONG_WORD.search(document) for document in documents):
        # Learning takes time that grows with the square of a word, such as 200,000 letters "a"
        parts = pre_tokenizers.Split(Regex(f".{{{LONGEST_WORD}}}"), "isolated")
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([words, parts])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),  # also the bytes not seen in training
        show_progress=False,
    )
    with Progress(desc="learning the vocabulary", bar_format=CLOCK):
        tokenizer.train_from_iterator(documents, trainer, length=len(documents))
    tokenizer.pre_tokenizer = words
    return without_markup(tokenizer)


def _encode(tokenizer: Tokenizer, documents: list[str], bar: Progress) -> Iterator[np.ndarray]:
    end = tokenizer.token_to_id(END)
    for document in documents:
        yield np.array([*tokenizer.encode(document).ids, end], dtype=np.uint16)
        bar.update(len(document))


def _split(documents: list[str], val_share: float) -> tuple[list[str], list[str]]:
    every = min(len(documents), max(2, round(1 / val_share)))
    val = documents[every - 1 :: every]
    train = [text for index, text in enumerate(documents) if index % every != every - 1]
    share = sum(map(len, val)) / sum(map(len, documents))
    if train and val_share / 2 <= share <= 2 * val_share:
        return train, val

    cuts = [round(len(text) * (1 - val_share)) for text in documents]
    train = [text[:cut] for text, cut in zip(documents, cuts, strict=True) if cut > 0]
    val = [text[cut:] for text, cut in zip(documents, cuts, strict=True) if cut < len(text)]
    require(
        bool(train and val),
        f"{sum(map(len, documents))} characters are too few to train and to validate",
    )
    return train, val


def require_room(files: list[Path]) -> None:
    """Raise ConfigError if memory cannot hold the text, and the tokens of its largest file."""
    sizes = [path.stat().st_size for path in files]
    needed, there = sum(sizes) + BYTES_PER_BYTE * max(sizes), memory_bytes(torch.device("cpu"))
    require(
        needed <= there,
        f"{files[sizes.index(max(sizes))]}: encoding {sum(sizes) / 1e9:,.1f} "
        f"GB of text, {max(sizes) / 1e9:,.1f} GB of it in this file, takes {needed / 1e9:,.0f} "
        f"GB of memory, but this machine has {there / 1e9:,.0f} GB",
        "split it into smaller files, or leave some out",
    )


def _find_files(paths: list[Path], pattern: str) -> list[Path]:
    files = []
    for path in paths:
        require(path.exists(), f"{path}: there is no such file or directory")
        if path.is_file():
            files.append(path)
            continue
        try:
            found = sorted(file for file in path.rglob(pattern) if file.is_file())
        except (ValueError, NotImplementedError) as error:  # such as /etc/* and **x
            raise ConfigError(f"--pattern {pattern}: {error}", "use one such as *.txt") from None
        require(
            len(found) > 0, f"{path}: no file matches {pattern} in it or below", "try --pattern"
        )
        files += found
    return files


def _once(files: list[Path]) -> list[Path]:
    """Leave out what an earlier path leads to: a text must not both train and validate."""
    first: dict[Path, Path] = {}
    for file in files:
        first.setdefault(file.resolve(), file)
    return list(first.values())


def _read(path: Path) -> str:
    try:
        return path.read_bytes().decode("utf-8")
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror})", "leave it out") from None
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"{path}: byte {error.start} is not UTF-8", "convert the file, or leave it out"
        ) from None
