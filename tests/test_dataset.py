import os

import numpy as np
import pytest
import torch

from minitron.config import ConfigError
from minitron.dataset import HEADER_BYTES, MAGIC, TokenDataset, open_shard, write_shard


@pytest.fixture
def folder(tmp_path):
    """Shards of 4, 2 and 3 samples at S = 5; every token is different, so samples are too."""
    start = 0
    for index, count in enumerate((5 * 4 + 1, 5 * 2 + 4, 5 * 3 + 1)):
        write_shard(tmp_path / f"train_{index:03d}.bin", np.arange(start, start + count))
        start += count
    return tmp_path


# --- Shards ---------------------------------------------------------------------------------------


def test_a_shard_reads_back_and_has_the_public_layout(tmp_path):
    path = tmp_path / "train_000.bin"
    write_shard(path, np.array([0, 1, 65_535]))

    tokens = open_shard(path)
    assert tokens.tolist() == [0, 1, 65_535]
    assert tokens.dtype == np.uint16
    assert isinstance(tokens, np.memmap)

    data = path.read_bytes()
    assert data[:12] == b"".join(n.to_bytes(4, "little") for n in (20240520, 1, 3))
    assert data[12:1024] == bytes(1012)
    assert data[1024:] == b"\x00\x00\x01\x00\xff\xff"
    assert [file.name for file in tmp_path.iterdir()] == ["train_000.bin"]


@pytest.mark.parametrize("tokens", [[65_536], [-1], [], [[1, 2]]])
def test_what_is_not_a_row_of_uint16_is_not_written(tmp_path, tokens):
    with pytest.raises(AssertionError):
        write_shard(tmp_path / "train_000.bin", np.array(tokens, dtype=np.int64))
    assert list(tmp_path.iterdir()) == []


def test_a_failed_write_leaves_the_old_shard(tmp_path, monkeypatch):
    path = tmp_path / "train_000.bin"
    write_shard(path, np.array([1, 2, 3]))
    monkeypatch.setattr("os.replace", lambda *_: (_ for _ in ()).throw(OSError("disk full")))
    with pytest.raises(OSError, match="disk full"):
        write_shard(path, np.array([4, 5, 6, 7]))
    assert open_shard(path).tolist() == [1, 2, 3]


def damaged(path, at: int, value: int):
    data = bytearray(path.read_bytes())
    data[at : at + 4] = value.to_bytes(4, "little")
    path.write_bytes(data)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda p: p.write_bytes(p.read_bytes()[:100]), "ends at byte 100, inside the 1024-byte"),
        (lambda p: p.write_bytes(b""), "ends at byte 0, inside the 1024-byte"),
        (lambda p: damaged(p, 0, 7), f"byte 0 holds 7, a shard starts with {MAGIC}"),
        (lambda p: damaged(p, 4, 2), "byte 4 holds version 2, this reader knows version 1"),
        (lambda p: damaged(p, 8, 9), "promises 9 tokens, .* end at byte 1042, .* at byte 1044"),
        (lambda p: p.write_bytes(p.read_bytes()[:-1]), "end at byte 1044, .* ends at byte 1043"),
        (lambda p: p.write_bytes(p.read_bytes() + b"x"), "at byte 1044, .* ends at byte 1045"),
    ],
)
def test_a_damaged_shard_is_named_with_the_byte(tmp_path, damage, message):
    path = tmp_path / "train_000.bin"
    write_shard(path, np.arange(10))
    damage(path)
    with pytest.raises(ConfigError, match=message) as caught:
        open_shard(path)
    assert str(path) in str(caught.value)


def test_a_shard_without_tokens_is_refused(tmp_path):
    path = tmp_path / "train_000.bin"
    write_shard(path, np.arange(1))
    damaged(path, 8, 0)
    path.write_bytes(path.read_bytes()[:HEADER_BYTES])
    with pytest.raises(ConfigError, match="promises 0 tokens"):
        open_shard(path)


# --- Samples and their order ----------------------------------------------------------------------


def test_samples_overlap_by_one_token_and_stay_inside_their_shard(folder):
    dataset = TokenDataset(folder, "train", sequence_length=5)
    assert dataset.num_samples == 4 + 2 + 3
    starts = [0, 5, 10, 15, 21, 26, 35, 40, 45]  # 34 is left over at the second shard's end
    expected = torch.tensor([list(range(start, start + 6)) for start in starts])
    batch = dataset.batch(0, 9)
    assert batch.dtype == torch.int64
    assert torch.equal(batch, expected)


def test_an_epoch_reads_every_sample_once_and_epochs_differ(folder):
    dataset = TokenDataset(folder, "train", sequence_length=5, seed=3)
    epochs = [dataset.batch(9 * epoch, 9)[:, 0].tolist() for epoch in range(3)]
    for epoch in epochs:
        assert sorted(epoch) == [0, 5, 10, 15, 21, 26, 35, 40, 45]
    assert epochs[0] != epochs[1] != epochs[2]


def test_the_seed_decides_the_order(folder):
    first, again, other = (TokenDataset(folder, "train", 5, seed).batch(0, 9) for seed in (3, 3, 4))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


@pytest.mark.parametrize("seed", [None, 0])
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_the_ranks_together_read_what_one_process_reads(folder, size, seed):
    for position in (0, 12, 24, 100):  # batches of 12 from 9 samples: each crosses an epoch
        whole = TokenDataset(folder, "train", 5, seed).batch(position, 12)
        parts = [
            TokenDataset(folder, "train", 5, seed).batch(position, 12, rank, size)
            for rank in range(size)
        ]
        assert all(part.shape == (12 // size, 6) for part in parts)
        assert torch.equal(torch.stack(parts, dim=1).reshape(12, 6), whole)


def test_the_position_is_the_whole_resume_state(folder):
    dataset = TokenDataset(folder, "train", 5, seed=1)
    uninterrupted = torch.cat([dataset.batch(position, 4) for position in range(0, 40, 4)])
    resumed = TokenDataset(folder, "train", 5, seed=1)
    # Other batch size, other number of ranks, in the middle of an epoch: the same samples.
    rest = torch.stack([resumed.batch(16, 24, rank, 2) for rank in range(2)], dim=1)
    assert torch.equal(rest.reshape(24, 6), uninterrupted[16:])


def test_only_the_split_asked_for_is_read(folder):
    write_shard(folder / "val_000.bin", np.full(6, 7))
    (folder / "train_003.bin.tmp").write_bytes(b"half a file")
    assert TokenDataset(folder, "val", 5).num_samples == 1
    assert TokenDataset(folder, "train", 5).num_samples == 9


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 8])
def test_the_union_of_what_ranks_read_is_the_batch_of_one_process(folder, size):
    dataset = TokenDataset(folder, "train", 5, seed=3)
    for position in (0, 8, 16):  # 9 samples: the second batch crosses into the next epoch
        whole = dataset.batch(position, 8)
        parts = [dataset.batch(position, 8, rank, size) for rank in range(size)]
        assert sum(len(part) for part in parts) == 8
        for rank, part in enumerate(parts):
            assert torch.equal(part, whole[rank::size])


def test_a_shard_that_is_cut_while_it_is_read_is_told(folder):
    """Not a SIGBUS, which a mapped file would be, and not fewer tokens."""
    dataset = TokenDataset(folder, "train", 5)
    path = folder / "train_001.bin"
    os.truncate(path, path.stat().st_size - 10)
    assert dataset.batch(0, 4).shape == (4, 6)
    with pytest.raises(ConfigError, match=r"train_001.bin: had 14 tokens .* before token 11 now"):
        dataset.batch(4, 2)


def test_a_shard_that_is_replaced_while_it_is_read_is_read_to_its_end(folder):
    dataset = TokenDataset(folder, "train", 5)
    before = dataset.batch(0, 9)
    write_shard(folder / "train_001.bin", np.arange(3))
    assert torch.equal(dataset.batch(0, 9), before)


# --- What a user can get wrong --------------------------------------------------------------------


def test_no_shards(tmp_path):
    with pytest.raises(ConfigError, match=r"no train_\*.bin here; `minitron data stories`"):
        TokenDataset(tmp_path / "nowhere", "train", 5)


def test_a_shard_shorter_than_a_sample(folder):
    with pytest.raises(ConfigError, match=r"train_001.bin: 14 tokens, .* = 14 takes 15"):
        TokenDataset(folder, "train", 14)


def test_more_ranks_than_samples(folder):
    dataset = TokenDataset(folder, "train", 5)
    with pytest.raises(ConfigError, match="batch of 2 .* some of 3 ranks .* raise it to 3"):
        dataset.batch(0, 2, rank=0, size=3)
