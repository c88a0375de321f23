"""A checkpoint is complete or not there, and what has been damaged since is found."""

import json
import os
import shutil
from itertools import combinations
from math import prod

import pytest
import torch

from minitron import checkpoint
from minitron.comm.agreement import SINGLE_RANK
from minitron.config import ConfigError
from minitron.launch import RankError, run
from minitron.parallel.parts import Chunks, LocalShard, boxes_of

KIB = 256


def state_of(step):
    return {"weights": Chunks.full(torch.full((KIB,), float(step)))}


def save(folder, step, keep=3, group=SINGLE_RANK, state=None):
    facts = {"step": step}
    return checkpoint.save(folder, step, state or state_of(step), facts, keep, group)


def load(folder, group=SINGLE_RANK):
    """Step and weights of the newest good one."""
    path = checkpoint.newest_good(folder, group)
    weights = torch.zeros(KIB)
    checkpoint.load(path, {"weights": Chunks.full(weights)}, group)
    return checkpoint.facts_of(path)["step"], weights


def names(folder):
    return [path.name for path in checkpoint.checkpoints(folder)]


def test_the_newest_is_found_and_the_oldest_deleted(tmp_path):
    for step in (5, 10, 100, 95):
        save(tmp_path, step)
    assert names(tmp_path) == ["step_00000010", "step_00000095", "step_00000100"]
    step, weights = load(tmp_path)
    assert step == 100 and torch.equal(weights, torch.full((KIB,), 100.0))


def test_a_step_can_be_saved_again(tmp_path):
    save(tmp_path, 1)
    save(tmp_path, 1, state={"weights": Chunks.full(torch.full((KIB,), 7.0))})
    assert load(tmp_path)[1][0] == 7 and names(tmp_path) == ["step_00000001"]


@pytest.mark.parametrize("function", ["write", "complete", "describe"])
def test_a_kill_while_writing_leaves_the_last_one(tmp_path, monkeypatch, function):
    save(tmp_path, 1, keep=1)
    act = getattr(checkpoint, function)

    def killed(*args):
        if function == "complete":
            shutil.copytree(args[0], tmp_path / "as it was")
        else:
            act(*args)
        raise KeyboardInterrupt

    monkeypatch.setattr(checkpoint, function, killed)
    with pytest.raises(KeyboardInterrupt):
        save(tmp_path, 2, keep=1)
    monkeypatch.undo()
    assert load(tmp_path)[0] == 1
    save(tmp_path, 2, keep=1)  # over what the other has left
    assert load(tmp_path)[0] == 2 and names(tmp_path) == ["step_00000002"]


def cut_short(file):
    os.truncate(file, file.stat().st_size // 2)


def flip_a_bit(file):
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


@pytest.mark.parametrize("harm", [cut_short, flip_a_bit, os.unlink])
@pytest.mark.parametrize("file", ["rank_00000.safetensors", "tensors.json", "manifest.json"])
def test_what_is_damaged_is_told_and_the_one_before_taken(tmp_path, capsys, harm, file):
    save(tmp_path, 1)
    harm(save(tmp_path, 2) / file)
    step, weights = load(tmp_path)
    assert step == 1 and weights[0] == 1
    told = capsys.readouterr().err
    assert "step_00000002: damaged (" in told and told.count("\n") == 1
    checkpoint.set_aside(tmp_path, tmp_path / "step_00000001")
    assert names(tmp_path) == ["step_00000001"]  # so that the next ones are not taken for older
    assert (tmp_path / "step_00000002.damaged").is_dir()


def test_every_bit_of_a_manifest_counts(tmp_path):
    """What it says of the run as well: a position read wrong would repeat samples."""
    path = save(tmp_path, 1)
    manifest = json.loads((path / "manifest.json").read_text())
    manifest["facts"]["step"] = 2
    (path / "manifest.json").write_text(json.dumps(manifest))
    assert checkpoint.damage(path) == "manifest.json has changed since it was written"


def test_nothing_to_resume_is_told(tmp_path):
    with pytest.raises(ConfigError, match="holds no checkpoint; check that"):
        checkpoint.newest_good(tmp_path)
    cut_short(save(tmp_path, 1) / "rank_00000.safetensors")
    with pytest.raises(ConfigError, match="no checkpoint in it is intact on all nodes"):
        checkpoint.newest_good(tmp_path)
    assert names(tmp_path) == ["step_00000001"]  # it may be the node's fault


def save_two_and_load(group, folder):
    for step in (1, 2):
        state = {f"weights.{group.rank()}": Chunks.full(torch.full((KIB,), float(step)))}
        save(folder, step, group=group, state=state)
    if group.rank() == 0:
        flip_a_bit(folder / "step_00000002" / "rank_00001.safetensors")
    torch.distributed.barrier(group)
    return checkpoint.damage(folder / "step_00000002", group.rank(), 2), checkpoint.newest_good(
        folder, group
    ).name


def test_what_one_rank_finds_damaged_none_takes(tmp_path):
    (seen_by_0, first), (seen_by_1, second) = run(save_two_and_load, 2, tmp_path)
    assert seen_by_0 is None and "rank_00001.safetensors has" in seen_by_1
    assert first == second == "step_00000001"


def test_what_fails_in_the_background_is_told_later(tmp_path, monkeypatch):
    saver = checkpoint.Saver(tmp_path, 3, SINGLE_RANK, in_background=True)
    weights = torch.ones(KIB)
    saver.save(1, {"weights": Chunks.full(weights)}, {"step": 1})
    weights.zero_()  # training goes on
    saver.wait()
    assert load(tmp_path)[1][0] == 1

    def full(*args):
        raise OSError(28, os.strerror(28))

    monkeypatch.setattr(checkpoint, "write", full)
    saver.save(2, state_of(2), {"step": 2})
    with pytest.raises(ConfigError, match="step_00000002: cannot be written"):
        saver.save(3, state_of(3), {"step": 3})
    saver.save(4, state_of(4), {"step": 4})
    with pytest.raises(ConfigError, match="step_00000004: cannot be written"):
        saver.wait()
    assert names(tmp_path) == ["step_00000001"]


# A full disk


def fill_disk(group, folder, where):
    """Save a first checkpoint, and a second whose last rank finds no room."""
    save(folder, 1, group=group)
    if group.rank() == group.size() - 1:
        original = getattr(checkpoint, where)

        def full(*args):
            original(*args)
            raise OSError(28, os.strerror(28))

        setattr(checkpoint, where, full)
    try:
        save(folder, 2, group=group)
    except ConfigError as error:
        return str(error)


def test_a_full_disk_leaves_the_old_one_and_is_told_on_every_rank(tmp_path):
    for told in run(fill_disk, 3, tmp_path, "describe"):
        assert "cannot be written (No space left on device)" in told
        assert "continue with --resume" in told and "\n" not in told
    assert load(tmp_path)[0] == 1
    assert not list(tmp_path.glob("*.tmp"))


@pytest.mark.parametrize("number, remedy", [(28, "make room"), (30, "give the run write access")])
def test_a_first_checkpoint_that_cannot_be_written_promises_none(
    tmp_path, monkeypatch, number, remedy
):
    def fails(*args):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(checkpoint, "write", fails)
    with pytest.raises(ConfigError, match=f"no earlier checkpoint: {remedy}.*, and start again"):
        save(tmp_path, 1)
    monkeypatch.undo()
    save(tmp_path, 1)
    monkeypatch.setattr(checkpoint, "write", fails)
    with pytest.raises(ConfigError, match=f"are intact: {remedy}.*, and continue with --resume"):
        save(tmp_path, 2)


def test_what_cannot_be_set_aside_is_one_line(tmp_path, monkeypatch):
    good = save(tmp_path, 1)
    save(tmp_path, 2)

    def read_only(*args):
        raise OSError(30, os.strerror(30))

    monkeypatch.setattr(type(tmp_path), "rename", read_only)
    with pytest.raises(ConfigError, match=r"cannot be set aside \(Read-only file system\)"):
        checkpoint.set_aside(tmp_path, good)


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="a device of Linux")
def test_a_full_device_is_told(tmp_path, monkeypatch):
    """The kernel's own error, from within torch.distributed.checkpoint."""
    save(tmp_path, 1)
    make_empty = checkpoint.make_empty

    def on_full_device(folder):
        make_empty(folder)
        (folder / "rank_00000.safetensors").symlink_to("/dev/full")

    monkeypatch.setattr(checkpoint, "make_empty", on_full_device)
    with pytest.raises(ConfigError, match=r"step_00000002: cannot be written \(No space left"):
        save(tmp_path, 2, state={"weights": Chunks.full(torch.ones(1_000_000))})
    assert load(tmp_path)[0] == 1


# Boxes


@pytest.mark.parametrize("shape", [(7,), (3, 4), (1, 5), (4, 1), (2, 3, 4), (2, 2, 2, 2), ()])
def test_a_range_is_cut_into_boxes_in_its_order(shape):
    full = torch.arange(prod(shape)).view(shape)
    for start, stop in combinations(range(prod(shape) + 1), 2):
        boxes = list(boxes_of(shape, range(start, stop)))
        found = []
        for offset, sizes in boxes:
            box = full[tuple(slice(a, a + n) for a, n in zip(offset, sizes, strict=True))]
            found += box.flatten().tolist()
        assert found == list(range(start, stop))
        assert len(boxes) <= max(1, 2 * len(shape) - 1)


def test_a_part_of_a_block_knows_its_place():
    """The middle of the right half of a 4 x 6 matrix, as ZeRO's rank 1 of 3 has it."""
    full = torch.arange(24.0).view(4, 6)
    block = full[:, 3:]
    part = LocalShard((4, 6), (4, 3), (0, 3), range(4, 8), block.flatten()[4:8])
    boxes = part.boxes(part.values)
    assert boxes.shape == (4, 6) and set(boxes.at) == {(1, 4), (2, 3)}
    for (row, column), box in boxes.at.items():
        rows, columns = box.shape
        assert torch.equal(box, full[row : row + rows, column : column + columns])


def write_with_a_gap(group, folder):
    """Two ranks that both think that they have the first half."""
    half = torch.ones(KIB // 2)
    boxes = Chunks((KIB,), torch.float32, {(0,): half} if group.rank() == 0 else {(64,): half})
    save(folder, 1, group=group, state={"weights": boxes})


def test_a_plan_that_does_not_cover_a_tensor_is_refused(tmp_path):
    with pytest.raises(RankError, match=r"cannot be written \(.*global plan"):
        run(write_with_a_gap, 2, tmp_path)
