import os

import pytest
import torch

from minitron import checkpoint
from minitron.config import ConfigError


def test_the_newest_is_found_and_the_oldest_deleted(tmp_path):
    for step in (5, 10, 100, 95):
        checkpoint.save(tmp_path, step, {"step": step, "weights": torch.ones(3)}, keep=3)
    assert [p.name for p in checkpoint.checkpoints(tmp_path)] == [
        "step_00000010.pt", "step_00000095.pt", "step_00000100.pt"]
    assert checkpoint.load_latest(tmp_path)["step"] == 100


def test_a_kill_while_writing_leaves_the_last_one(tmp_path, monkeypatch):
    checkpoint.save(tmp_path, 1, {"step": 1}, keep=1)

    def killed(state, file):
        file.write(b"half a check")
        raise KeyboardInterrupt

    monkeypatch.setattr(torch, "save", killed)
    with pytest.raises(KeyboardInterrupt):
        checkpoint.save(tmp_path, 2, {"step": 2}, keep=1)
    assert checkpoint.load_latest(tmp_path) == {"step": 1}


def test_a_damaged_file_is_named_with_the_remedy(tmp_path):
    checkpoint.save(tmp_path, 1, {"step": 1}, keep=2)
    path = checkpoint.save(tmp_path, 2, {"step": 2, "weights": torch.ones(1000)}, keep=2)
    os.truncate(path, 900)
    with pytest.raises(ConfigError, match="step_00000002.pt: damaged.*resume from step_00000001"):
        checkpoint.load_latest(tmp_path)


def test_nothing_to_resume_is_told(tmp_path):
    with pytest.raises(ConfigError, match="holds no checkpoint to resume from"):
        checkpoint.load_latest(tmp_path)
