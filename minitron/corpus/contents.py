"""What the shards of a folder hold: a hash of every byte, and the largest token.

A run continues bit for bit only on the same tokens, and a token beyond the vocabulary must not be
trained on. To know both, all tokens are read: about 1.5 GB a second on one core, once. What was
found is remembered beside the shards, in contents.json, for as long as a file keeps its size, its
times and its inode. The ranks of a run share the work. A folder that cannot be written is read by
each run.

Read in this order: read_contents, fingerprint, require_tokens; read_shard, remembered, remember.
"""

import hashlib
import json
import os
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from minitron.comm.agreement import SINGLE_RANK, Group, all_gather_objects, raise_on_all_ranks
from minitron.config import ConfigError, require
from minitron.dataset import HEADER_BYTES, TokenDataset, count_tokens, open_shard
from minitron.system.files import read_json
from minitron.system.progress import Progress

CHUNK_BYTES = 1 << 22
SETTLED_NS = 2 * 10**9  # a younger file may change once more in the same tick of its clock


@dataclass(frozen=True)
class Contents:
    """What a shard holds."""

    sha256: str
    """Of the file."""
    largest: int
    """Of its tokens."""


def read_contents(folder: Path, group: Group = SINGLE_RANK) -> dict[str, Contents]:
    """Return the contents of every shard, by its name; every rank must call it.

    Each rank reads its share of the shards: where nodes have copies of the folder, they are taken
    to be alike if they hold files of the same names and sizes. Raises ConfigError on all ranks if
    one cannot read, or finds other files.
    """
    rank, size = group.rank(), group.size()
    with raise_on_all_ranks(group):
        paths = [*sorted(folder.glob("train_*.bin")), *sorted(folder.glob("val_*.bin"))]
        require(
            bool(paths),
            f"{folder}: no train_*.bin here; `minitron data stories` writes "
            "data/stories, `minitron data --help` lists the other corpora",
        )
        found = remembered(folder, paths)
        missing = [path for path in paths[rank::size] if path.name not in found]
        stamps = {path.name: stamp(path) for path in missing}  # before they are read
        num_bytes = sum(path.stat().st_size for path in missing)
        with Progress(
            total=num_bytes, desc=f"reading {folder}", unit="B", unit_scale=True, disable=rank != 0
        ) as bar:
            found |= {path.name: read_shard(path, bar) for path in missing}
        sizes = {path.name: path.stat().st_size for path in paths}
    merged: dict[str, Contents] = {}
    for other, (present, theirs, read) in enumerate(
        all_gather_objects((sizes, found, stamps), group)
    ):
        same = present == sizes and all(
            merged.get(name, each) == each for name, each in theirs.items()
        )
        require(
            same,
            f"{folder}: rank {other} finds different shards there from the ranks before it",
            "copy the same folder to every node",
        )
        merged |= theirs
        stamps |= read
    if rank == 0 and stamps:
        remember(folder, stamps, merged)
    return {name: merged[name] for name in sizes}


def fingerprint(dataset: TokenDataset, contents: dict[str, Contents]) -> str:
    """Return a checksum of all tokens of a run, validation included.

    It begins with the dataset's own, of first tokens alone, which is all that old runs have saved.
    """
    lines = [f"{name.split('_')[0]} {each.sha256}\n" for name, each in contents.items()]
    return dataset.fingerprint() + hashlib.sha256("".join(lines).encode()).hexdigest()


def require_tokens(folder: Path, contents: dict[str, Contents], vocab_size: int) -> None:
    """Raise ConfigError, naming the first, if a token is not in the model's vocabulary."""
    for name, each in contents.items():
        if each.largest < vocab_size:
            continue
        tokens = open_shard(folder / name)
        position = int(np.argmax(tokens >= vocab_size))
        largest = max(each.largest for each in contents.values())
        raise ConfigError(
            f"{folder / name}: token {position:,} is {tokens[position]}, but the vocabulary has "
            f"{vocab_size} tokens, 0 to {vocab_size - 1}",
            f"write the corpus again, or set model.vocab_size to {largest + 1} or more",
        )


def read_shard(path: Path, bar: Progress) -> Contents:
    """Read a whole shard; raises what `count_tokens` does before."""
    count_tokens(path)
    digest, largest = hashlib.sha256(), 0
    with path.open("rb") as file:
        digest.update(file.read(HEADER_BYTES))
        while chunk := file.read(CHUNK_BYTES):
            digest.update(chunk)
            tokens = np.frombuffer(chunk, dtype="<u2", count=len(chunk) // 2)
            largest = max(largest, int(tokens.max(initial=0)))
            bar.update(len(chunk))
    return Contents(digest.hexdigest(), largest)


# What is remembered


def stamp(path: Path) -> list[int]:
    """Return a stamp that changes if the file is written, replaced or copied."""
    status = path.stat()
    return [status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino]


def remembered(folder: Path, paths: list[Path]) -> dict[str, Contents]:
    """Return what contents.json knows of these files as they are now; nothing if it is damaged."""
    try:
        saved = read_json(folder / "contents.json")
        entries = {path: saved.get(path.name, {}) for path in paths}
        return {
            path.name: Contents(str(entry["sha256"]), int(entry["largest"]))
            for path, entry in entries.items()
            if entry and entry["stamp"] == stamp(path)
        }
    except (ConfigError, OSError, AttributeError, KeyError, TypeError, ValueError):
        return {}


def remember(folder: Path, stamps: dict[str, list[int]], contents: dict[str, Contents]) -> None:
    """Add to contents.json, if the folder can be written, what has been read of settled files.

    `stamps` were taken before the reading: a file that has changed meanwhile has another one now.
    """
    settled = time.time_ns() - SETTLED_NS
    entries = {
        name: {"stamp": stamp, **asdict(contents[name])}
        for name, stamp in stamps.items()
        if stamp[2] < settled
    }
    temporary = folder / f"contents.json.{os.getpid()}.tmp"
    try:
        known = read_json(folder / "contents.json")
    except (OSError, ValueError):
        known = {}
    try:
        temporary.write_text(json.dumps(known | entries, indent=2) + "\n")
        os.replace(temporary, folder / "contents.json")
    except OSError:
        temporary.unlink(missing_ok=True)
