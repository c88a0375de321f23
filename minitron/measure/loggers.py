"""Where the rows of a run go: metrics.jsonl, and if asked TensorBoard and Weights & Biases.

Neither of these is needed, nor installed with this package.

Read in this order: open_log, SharedLog, TensorBoardLog, WandbLog.
"""

import os
import sys
from importlib import import_module
from numbers import Real
from pathlib import Path
from types import ModuleType

import torch

from minitron.config import ConfigError, LogConfig
from minitron.measure.metrics import REMEDY, MetricsLog
from minitron.system import disk
from minitron.system.files import read_text


def open_log(config: LogConfig, folder: Path, rank: int, step: int, settings: dict) -> MetricsLog:
    """Open the log of a rank in a run at `step`: that of rank 0, others if asked, else none.

    What was written of later steps is forgotten. `settings` are the run's, in plain values. Raises
    ConfigError if what is asked for is not installed.
    """
    if rank > 0 and not config.all_ranks:
        return MetricsLog(Path(os.devnull))
    others: list[TensorBoardLog | WandbLog] = []
    if rank == 0 and config.tensorboard:
        others.append(TensorBoardLog(folder / "tensorboard", step))
    if rank == 0 and config.wandb:
        others.append(WandbLog(config.wandb, folder, settings))
    name = "metrics.jsonl" if rank == 0 else f"metrics_rank{rank}.jsonl"
    log = SharedLog(folder / name, *others)
    log.forget_after(step)
    return log


class SharedLog(MetricsLog):
    """A log whose rows go to `others` as well."""

    def __init__(self, path: Path, *others):
        super().__init__(path)
        self.others = others

    def write(self, **row) -> None:
        super().write(**row)
        with disk.writing(self.path.parent, REMEDY):
            for other in self.others:
                other.write(row)

    def close(self) -> None:
        """Close all; what another log could not write at its end, metrics.jsonl has."""
        super().close()
        for other in self.others:
            try:
                with disk.writing(self.path.parent, "make room"):
                    other.close()
            except ConfigError as error:
                print(f"minitron: {error}", file=sys.stderr)


class TensorBoardLog:
    """Curves of every number of the rows, in `folder`; `tensorboard --logdir runs` shows them.

    `step` is that of a run that is resumed: what was written of later ones is hidden.
    """

    def __init__(self, folder: Path, step: int = 0):
        module = imported("torch.utils.tensorboard", "log.tensorboard", "tensorboard")
        self.writer = module.SummaryWriter(str(folder), purge_step=step + 1)

    def write(self, row: dict) -> None:
        for name, value in numbers(row).items():
            self.writer.add_scalar(name, value, row["step"])
        if "sample" in row:
            self.writer.add_text("sample", row["sample"], row["step"])

    def close(self) -> None:
        self.writer.close()


class WandbLog:
    """The same at Weights & Biases, in a project; `WANDB_MODE=offline` keeps it on the disk.

    A resumed run goes on with the same curves: its id is kept in `folder`.
    """

    def __init__(self, project: str, folder: Path, settings: dict):
        wandb = imported("wandb", "log.wandb", "wandb")
        folder.mkdir(parents=True, exist_ok=True)
        saved = folder / "wandb_id"
        self.run = wandb.init(
            project=project,
            dir=str(folder),
            name=folder.name,
            config=settings,
            id=read_text(saved, most_bytes=1000) if saved.exists() else None,
            resume="allow",
        )
        disk.replace(saved, self.run.id.encode())
        # Not wandb's own count, which cannot go back to the step of a checkpoint.
        self.run.define_metric("*", step_metric="step")

    def write(self, row: dict) -> None:
        self.run.log({"step": row["step"], **numbers(row)})

    def close(self) -> None:
        self.run.finish()


def numbers(row: dict) -> dict[str, float]:
    """Return the numbers of a row but its step."""
    return {
        name: value for name, value in row.items() if name != "step" and isinstance(value, Real)
    }


def imported(module: str, field: str, package: str) -> ModuleType:
    """Import an optional module; raises ConfigError if its package is not installed."""
    try:
        return import_module(module)
    except ImportError:
        raise ConfigError(
            f"{field}: the package {package} is not installed",
            f"pip install {package}, or leave it out",
        ) from None


def peak_memory(device: torch.device) -> dict[str, int]:
    """Return, for a row, the peak bytes of tensors on a GPU so far; nothing for a CPU."""
    if device.type != "cuda":
        return {}
    return {"peak_memory": torch.cuda.max_memory_allocated(device)}
