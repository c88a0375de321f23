"""Which tokens a rank reads: shards of tokens on disk, and an order over their samples.

A shard is 256 int32 of header (magic, version, count, zeros), then `count` uint16 tokens, all
little-endian: the format of the public pre-tokenized FineWeb shards, so small and large runs
read the same files. Tokens stay on disk.

A run counts the samples it has consumed, over all ranks and epochs. That one number, the
position, says what comes next, so it is all that a checkpoint has to remember.
"""

import hashlib
import os
import weakref
from pathlib import Path

import numpy as np
import torch

from minitron.config import ConfigError, require
from minitron.system.files import require_regular

MAGIC = 20240520
VERSION = 1
HEADER_BYTES = 256 * 4
TOKEN_BYTES = 2


def write_shard(path: Path, tokens: np.ndarray) -> None:
    """Write `tokens`, integers from 0 to 65,535, as one shard; a reader never sees half a file."""
    tokens = np.asarray(tokens)
    assert tokens.ndim == 1 and tokens.size > 0
    assert 0 <= tokens.min() and tokens.max() <= 65_535, "a token is stored as uint16"

    header = np.zeros(256, dtype="<i4")
    header[:3] = MAGIC, VERSION, tokens.size

    temporary = path.with_name(path.name + ".tmp")
    with open(temporary, "wb") as file:
        file.write(header.tobytes())
        file.write(tokens.astype("<u2").tobytes())
    os.replace(temporary, path)


def count_tokens(path: Path) -> int:
    """Count the tokens of a shard.

    Raises ConfigError, naming the byte, if the header or the file's size is not what it must be.
    """
    try:
        require_regular(path)  # a pipe would block
    except ValueError as error:
        raise ConfigError(f"{path}: {error}", "write the corpus again") from None
    size = path.stat().st_size
    require(
        size >= HEADER_BYTES,
        f"{path}: ends at byte {size}, inside the {HEADER_BYTES}-byte header",
        "write it again",
    )
    magic, version, count = (int(value) for value in np.fromfile(path, dtype="<i4", count=3))
    require(
        magic == MAGIC,
        f"{path}: byte 0 holds {magic}, a shard starts with {MAGIC}: this is another kind of file",
    )
    require(
        version == VERSION,
        f"{path}: byte 4 holds version {version}, this reader knows version {VERSION}",
        "write it again",
    )
    expected = HEADER_BYTES + TOKEN_BYTES * count
    require(
        size == expected,
        f"{path}: byte 8 promises {count} tokens, so the file must end at byte {expected}, "
        f"but it ends at byte {size}",
        "write it again",
    )
    require(count > 0, f"{path}: byte 8 promises {count} tokens: a shard holds at least 1")
    return count


def open_shard(path: Path) -> np.memmap:
    """Map the tokens of a shard, (count,) uint16, read-only; raises what `count_tokens` does."""
    shape = (count_tokens(path),)
    return np.memmap(path, dtype="<u2", mode="r", offset=HEADER_BYTES, shape=shape)


class Shard:
    """The tokens of a file, read where they are asked for.

    Not mapped: of a mapped file that is cut while a run reads it, the first lost token is a SIGBUS.
    """

    def __init__(self, path: Path):
        self.path, self.count = path, count_tokens(path)
        self.file = path.open("rb")
        weakref.finalize(self, self.file.close)

    def __len__(self) -> int:
        return self.count

    def __reduce__(self):
        return type(self), (self.path,)  # another process opens the file itself

    def read(self, start: int, stop: int) -> np.ndarray:
        """Read tokens `start` to `stop`, uint16; raises ConfigError if the file ends before."""
        num_bytes = TOKEN_BYTES * (stop - start)
        self.file.seek(HEADER_BYTES + TOKEN_BYTES * start)
        data = self.file.read(num_bytes)
        require(
            len(data) == num_bytes,
            f"{self.path}: had {self.count:,} tokens when the run began, and ends before token "
            f"{stop:,} now",
            "write it again, then continue the run with --resume",
        )
        return np.frombuffer(data, dtype="<u2")


class TokenDataset:
    """Samples of S+1 tokens from the shards `{split}_*.bin` of a folder, in a seeded order.

    Sample i of a shard is its tokens i S ... i S + S: the last one is the first of the next
    sample, because it is only a target here and only an input there. What is left at a shard's
    end is not used. `seed` None reads in the order of the files.

    Raises ConfigError if there is no shard, or a shard is shorter than S+1 tokens.
    """

    def __init__(self, folder: Path, split: str, sequence_length: int, seed: int | None = None):
        self.sequence_length = sequence_length
        self.seed = seed
        self.shards = _open_shards(Path(folder), split, sequence_length)

        samples = [(len(shard) - 1) // sequence_length for shard in self.shards]
        self.first_sample = np.cumsum([0, *samples])  # of each shard; the last is the total
        self.num_samples = int(self.first_sample[-1])
        self._epoch, self._order = None, None

    def batch(self, position: int, batch_size: int, rank: int = 0, size: int = 1) -> torch.Tensor:
        """Read this rank's samples of the batch that starts at `position`, (batch_size/size, S+1).

        Rank r of `size` takes positions r, r + size, r + 2 size, ... of the batch: together the
        ranks read what one process would, whatever their number. Where the batch does not divide,
        the first ranks read one sample more. int64.

        Raises ConfigError if a rank would have nothing to read.
        """
        require(
            batch_size >= size,
            f"a batch of {batch_size} sequences leaves some of {size} ranks without one",
            f"raise it to {size}, or start fewer ranks",
        )
        positions = range(position + rank, position + batch_size, size)
        samples = [self._sample(self._sample_at(p)) for p in positions]
        return torch.from_numpy(np.stack(samples).astype(np.int64))

    def fingerprint(self) -> str:
        """Return a checksum of shard lengths and first tokens; `corpus.contents` reads all."""
        digest = hashlib.sha256()
        for shard in self.shards:
            first = shard.read(0, min(len(shard), 4096))
            digest.update(f"{len(shard)} ".encode() + first.tobytes())
        return digest.hexdigest()

    def _sample_at(self, position: int) -> int:
        epoch, place = divmod(position, self.num_samples)
        if self.seed is None:
            return place
        if epoch != self._epoch:
            generator = np.random.default_rng([self.seed, epoch])
            self._epoch, self._order = epoch, generator.permutation(self.num_samples)
        return int(self._order[place])

    def _sample(self, index: int) -> np.ndarray:
        shard = int(np.searchsorted(self.first_sample, index, side="right")) - 1
        start = (index - int(self.first_sample[shard])) * self.sequence_length
        return self.shards[shard].read(start, start + self.sequence_length + 1)


def _open_shards(folder: Path, split: str, sequence_length: int) -> list[Shard]:
    paths = sorted(folder.glob(f"{split}_*.bin"))
    require(
        len(paths) > 0,
        f"{folder}: no {split}_*.bin here; `minitron data stories` writes data/stories, "
        "`minitron data --help` lists the other corpora",
    )
    shards = [Shard(path) for path in paths]
    for shard in shards:
        require(
            len(shard) >= sequence_length + 1,
            f"{shard.path}: {len(shard)} tokens, but one sample of data.sequence_length = "
            f"{sequence_length} takes {sequence_length + 1}",
            "lower it, or write more tokens",
        )
    return shards
