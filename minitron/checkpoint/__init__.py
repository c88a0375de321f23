"""Save a run at any layout, and find it again at any other.

A checkpoint is a folder, `step_00000200`, planned by torch.distributed.checkpoint: each rank writes
what it keeps, of copies one rank does, and reads what it needs, whichever rank wrote it. The folder
has a temporary name until it is complete. `manifest.json` in it has every file's length and
checksum, so that a file cut short, or with a bit turned over, is found before anything is read.
The checksums tell that files are as they were written, not by whom: so all of them are JSON and
safetensors, which cannot execute anything, and are read without trust.

With many nodes, the folder must be one that all of them see.

Read in this order: Saver, save, newest_good, set_aside, load; then plans.py, which decides who
writes and reads what, and storage.py and manifest.py, which do it.
"""

import os
import re
import shutil
import sys
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from errno import EDQUOT, ENOSPC
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

from minitron.checkpoint.manifest import (
    describe,
    has_manifest,
    read_manifest,
    step_of,
    write_manifest,
)
from minitron.checkpoint.plans import LoadPlanner, SavePlanner
from minitron.checkpoint.storage import TABLE, Reader, Writer, read_table
from minitron.comm.agreement import (
    SINGLE_RANK,
    Group,
    all_gather_objects,
    all_gather_or_raise,
    on_rank_0,
    second_group,
)
from minitron.config import ConfigError, require
from minitron.parallel.parts import Chunks
from minitron.system import files
from minitron.system.files import file_in


class Saver:
    """Writes the checkpoints of a run; all ranks call it.

    In the background, a step waits for a copy in the host's memory alone, and training goes on
    while that is written. What goes wrong meanwhile is raised by the next `save`, or by `wait`.
    """

    def __init__(self, folder: Path, keep: int, group: Group, in_background: bool = False):
        self.folder, self.keep, self.group = folder, keep, group
        self.thread = ThreadPoolExecutor(max_workers=1) if in_background else None
        self.pending: Future | None = None
        if in_background:
            self.group = second_group(group)

    def save(self, step: int, state: dict[str, Chunks], facts: dict) -> None:
        """Write the checkpoint of `step`, as `save` does."""
        self.wait()
        if self.thread is None:
            save(self.folder, step, state, facts, self.keep, self.group)
            return
        state = {name: boxes.copy() for name, boxes in state.items()}
        arguments = self.folder, step, state, facts, self.keep, self.group
        self.pending = self.thread.submit(save, *arguments)

    def wait(self) -> None:
        """Return when all is written."""
        if self.pending is not None:
            pending, self.pending = self.pending, None
            pending.result()

    def newest(self) -> str:
        """Say, for a run that fails, where it can continue; waits for what is being written."""
        self.wait()
        found = checkpoints(self.folder)
        if found:
            return f"the newest checkpoint is {found[-1]}"
        return "no checkpoint had been written yet, so with --resume the run starts over"


def save(
    folder: Path,
    step: int,
    state: dict[str, Chunks],
    facts: dict,
    keep: int,
    group: Group = SINGLE_RANK,
) -> Path:
    """Write the checkpoint of `step`, then delete all but the newest `keep`; all ranks call it.

    `state` is what this rank keeps, `facts` what JSON can hold, of rank 0. Raises ConfigError on
    every rank if one cannot write; what was there before stays.
    """
    rank = group.rank()
    path = folder / f"step_{step:08d}"
    temporary = path.with_suffix(".tmp")
    try:
        on_rank_0(lambda: make_empty(temporary), group)
        write(temporary, state, group)
        checksums = all_gather_or_raise(
            lambda: {file.name: describe(file) for file in temporary.glob(f"rank_{rank:05d}.*")},
            group,
        )
        on_rank_0(lambda: complete(temporary, path, checksums, facts, keep), group)
    except (CheckpointException, OSError) as error:
        if rank == 0:
            shutil.rmtree(temporary, ignore_errors=True)
        raise ConfigError(
            f"{path}: cannot be written ({reason(error)}); {remedy(folder, error)}"
        ) from error
    return path


def remedy(folder: Path, error: Exception) -> str:
    """Say what to do when a checkpoint cannot be written."""
    is_full = reason(error) in [os.strerror(number) for number in (ENOSPC, EDQUOT)]
    act = "make room" if is_full else f"give the run write access to {folder}"
    if checkpoints(folder):
        return f"earlier checkpoints are intact: {act}, and continue with --resume"
    return f"there is no earlier checkpoint: {act}, and start again"


def write(folder: Path, state: dict[str, Chunks], group: Group) -> None:
    with quietly():
        dcp.save(
            state,
            storage_writer=Writer(folder),
            planner=SavePlanner(),
            process_group=group,
            no_dist=group.size() == 1,
        )


@contextmanager
def quietly() -> Iterator[None]:
    """Suppress warnings about what is intended: one process alone, ranks with different tensors."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is .*")
        warnings.filterwarnings("ignore", "Detected mismatched keys")  # torch before 2.13
        yield


def make_empty(folder: Path) -> None:
    """Begin a checkpoint, and remove what others have left that were killed."""
    for left in folder.parent.glob("step_*.tmp"):
        shutil.rmtree(left, ignore_errors=True)
    folder.mkdir(parents=True)


def complete(temporary: Path, path: Path, checksums: list[dict], facts: dict, keep: int) -> None:
    """Add the manifest, give the folder its name, and let go of the oldest ones."""
    written = {name: entry for of_rank in checksums for name, entry in of_rank.items()}
    written[TABLE] = describe(temporary / TABLE)
    write_manifest(temporary, written, facts)

    if path.exists():  # the same step once more
        move(path, path.with_suffix(".old"))
    temporary.rename(path)
    shutil.rmtree(path.with_suffix(".old"), ignore_errors=True)
    with suppress(OSError):  # not every file system can
        descriptor = os.open(path.parent, os.O_RDONLY)
        os.fsync(descriptor)  # or the new name may be lost with the power
        os.close(descriptor)
    # What is only called newer must not take the place of one that is.
    counted = [
        other
        for other in checkpoints(path.parent)
        if step_of(other) <= step_of(path) or has_manifest(other)
    ]
    for old in counted[:-keep]:
        if old != path:
            shutil.rmtree(old, ignore_errors=True)


def move(path: Path, target: Path) -> None:
    """Give a folder another name, which one from earlier may have."""
    shutil.rmtree(target, ignore_errors=True)
    path.rename(target)


def checkpoints(folder: Path) -> list[Path]:
    """Return the complete checkpoints in `folder`, oldest first."""
    found = [path for path in folder.glob("step_*") if re.fullmatch("step_[0-9]{8,}", path.name)]
    return sorted(found, key=step_of)


def newest_good(folder: Path, group: Group = SINGLE_RANK) -> Path:
    """Return the newest checkpoint in `folder` whose files are intact; every rank must call it.

    Damaged ones are reported. Raises ConfigError if there is no good one; nothing is changed.
    """
    rank, size = group.rank(), group.size()
    found = all_gather_objects(checkpoints(folder), group)[0]
    for path in reversed(found):
        faults = all_gather_objects(damage(path, rank, size), group)
        fault = next((fault for fault in faults if fault is not None), None)
        if fault is None:
            return path
        if rank == 0:
            print(f"{path}: damaged ({fault}); looking for an older one", file=sys.stderr)
    require(
        bool(found),
        f"{folder}: holds no checkpoint",
        "check that the folder is the right one, and that all nodes see it",
    )
    raise ConfigError(
        f"{folder}: no checkpoint in it is intact on all nodes ({found[-1].name}: "
        f"{fault}); nothing was changed. Copy the folder and examine the files "
        "named above",
        "meanwhile start a run in another --run-dir",
    )


def set_aside(folder: Path, good: Path, group: Group = SINGLE_RANK) -> None:
    """Rename what is newer than `good` to `step_00000200.damaged`: all ranks call it.

    Else it would be taken for newer than what the run writes from now on. Raises ConfigError if
    the folder cannot be written to.
    """
    newer = [path for path in checkpoints(folder) if step_of(path) > step_of(good)]
    try:
        on_rank_0(lambda: [path.rename(free_name(path, ".damaged")) for path in newer], group)
    except OSError as error:
        raise ConfigError(
            f"{folder}: damaged checkpoints cannot be set aside ({reason(error)})",
            "give the run write access",
        ) from error


def free_name(path: Path, suffix: str) -> Path:
    """Return a name that is not taken yet: `.damaged`, `.damaged2`, ..."""
    names = (path.with_suffix(f"{suffix}{number or ''}") for number in (0, *range(2, 10**6)))
    return next(name for name in names if not os.path.lexists(name))


def damage(path: Path, rank: int = 0, size: int = 1) -> str | None:
    """Say what is wrong with this rank's share of the files (every `size`-th), None if nothing."""
    try:
        written = read_manifest(path)["files"]
        for name, expected in sorted(written.items())[rank::size]:
            file = file_in(path, name)
            num_bytes = file.stat().st_size
            if num_bytes != expected["bytes"]:
                return f"{name} has {num_bytes:,} bytes, not {expected['bytes']:,}"
            if describe(file) != expected:
                return f"{name} has {num_bytes:,} bytes as written, but a different checksum"
        if rank == 0:
            read_table(path)
    except (OSError, ValueError) as error:
        return reason(error)
    return None


def facts_of(path: Path) -> dict:
    """Return the facts that `save` was given beside the state."""
    return checked(read_manifest, path)["facts"]


def saved_tensors(path: Path) -> dict[str, tuple[torch.Size, torch.dtype]]:
    """Return the shape and dtype of every tensor in a checkpoint, by name."""
    table = checked(read_table, path).state_dict_metadata
    return {name: (tensor.size, tensor.properties.dtype) for name, tensor in table.items()}


def checked(read: Callable, path: Path):
    """Return what `read` finds in a checkpoint; raises ConfigError if it is damaged."""
    try:
        return read(path)
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{path}: cannot be read ({reason(error)})",
            "resume from, or export, a checkpoint that is intact",
        ) from None


def load(path: Path, state: dict[str, Chunks], group: Group = SINGLE_RANK) -> None:
    """Fill the tensors in `state`, whose names and shapes are in the checkpoint; all ranks call."""
    try:
        with quietly():
            dcp.load(
                state,
                storage_reader=Reader(path),
                planner=LoadPlanner(),
                process_group=group,
                no_dist=group.size() == 1,
            )
    except CheckpointException as error:
        raise ConfigError(
            f"{path}: cannot be read ({reason(error)}), though its checksums are "
            "right: is it this run's, and does every node see the folder?"
        ) from error


def read_tensor(path: Path, name: str) -> torch.Tensor:
    """Read one full tensor of a checkpoint, by its name in it."""
    saved = saved_tensors(path)
    require(name in saved, f"{path}: holds no {name}: does it belong to another model?")
    shape, dtype = saved[name]
    tensor = torch.empty(shape, dtype=dtype)
    load(path, {name: Chunks.full(tensor)})
    return tensor


def reason(error: Exception) -> str:
    """Return one line: the first of the errors on the ranks that failed."""
    if isinstance(error, CheckpointException):
        error = next(iter(error.failures.values()))[0]
    return files.reason(error)
