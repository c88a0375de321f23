"""Save a run to disk and find it again.

A checkpoint is one file, `step_00000200.pt`. It is written under a temporary name, flushed to the
disk and then renamed, so a file under the final name is complete whatever killed the process.
"""

import os
from pathlib import Path

import torch

from minitron.config import ConfigError


def save(folder: Path, step: int, state: dict, keep: int) -> Path:
    """Write `state` as the checkpoint of `step`, then delete all but the newest `keep`."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"step_{step:08d}.pt"
    temporary = path.with_suffix(".tmp")
    with temporary.open("wb") as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)
    for old in checkpoints(folder)[:-keep]:
        old.unlink()
    return path


def load_latest(folder: Path) -> dict:
    """Read the newest checkpoint in `folder` onto the CPU.

    Raises ConfigError, naming the file and the remedy, if there is none or it cannot be read.
    """
    found = checkpoints(folder)
    if not found:
        raise ConfigError(
            f"{folder}: holds no checkpoint to resume from; delete {folder.parent} and start again "
            "without --resume"
        )
    try:
        return torch.load(found[-1], map_location="cpu", weights_only=True)
    except Exception as error:
        older = f"delete it to resume from {found[-2].name}" if found[1:] else "start a new run"
        reason = str(error).split("\n")[0] or type(error).__name__
        raise ConfigError(f"{found[-1]}: damaged checkpoint ({reason}); {older}") from None


def checkpoints(folder: Path) -> list[Path]:
    """The complete checkpoints in `folder`, oldest first."""
    return sorted(folder.glob("step_*.pt"))
