"""Save a run at any layout, and find it again at any other.

A checkpoint is a folder, `step_00000200`, written by torch.distributed.checkpoint: each rank writes
what it keeps, of copies one rank does, and reads what it needs, whoever has written it. The folder
has a temporary name until it is complete. `manifest.json` in it has every file's length and
checksum, so that a file cut short, or with a bit turned over, is found before anything is read.

With many nodes, the folder must be one that all of them see.

Read in this order: Saver, save, newest_good, set_aside, load; then checkpoint_plans, which say who
writes and reads what.
"""

import hashlib
import json
import os
import shutil
import sys
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.api import CheckpointException

from minitron.checkpoint_plans import LoadPlanner, SavePlanner
from minitron.comm.agreement import Group, gathered, rank_and_size, second_group
from minitron.config import ConfigError
from minitron.parallel.parts import Boxes

MANIFEST = "manifest.json"


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

    def save(self, step: int, state: dict[str, Boxes], facts: dict) -> None:
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


def save(
    folder: Path, step: int, state: dict[str, Boxes], facts: dict, keep: int, group: Group = None
) -> Path:
    """Write the checkpoint of `step`, then delete all but the newest `keep`; all ranks call it.

    `state` is what this rank keeps, `facts` what JSON can hold, of rank 0. Raises ConfigError on
    every rank if one cannot write; what was there before stays.
    """
    rank, _ = rank_and_size(group)
    path = folder / f"step_{step:08d}"
    temporary = path.with_suffix(".tmp")
    try:
        on_rank_0(lambda: make_empty(temporary), group)
        write(temporary, state, group)
        checksums = agreed(lambda: {file.name: describe(file) for file in
                                    sorted(temporary.glob(f"__{rank}_*"))}, group)
        on_rank_0(lambda: complete(temporary, path, checksums, facts, keep), group)
    except (CheckpointException, OSError) as error:
        if rank == 0:
            shutil.rmtree(temporary, ignore_errors=True)
        raise ConfigError(f"{path}: cannot be written ({reason(error)}); the checkpoints before "
                          "are intact: make room, and continue with --resume") from error
    return path


def write(folder: Path, state: dict[str, Boxes], group: Group) -> None:
    # A background thread has no current GPU but number 0: copy one tensor after the other.
    writer = FileSystemWriter(folder, per_thread_copy_ahead=0)
    with quietly():
        dcp.save(state, storage_writer=writer, planner=SavePlanner(), process_group=group,
                 no_dist=group is None)


@contextmanager
def quietly() -> Iterator[None]:
    """Without warnings of what is meant: one process alone, ranks with other tensors."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is .*")
        warnings.filterwarnings("ignore", "Detected mismatched keys")  # torch before 2.13
        yield


def make_empty(folder: Path) -> None:
    """Begin a checkpoint, and remove what others have left that were killed."""
    for left in folder.parent.glob("step_*.tmp"):
        shutil.rmtree(left, ignore_errors=True)
    folder.mkdir(parents=True)


def complete(
    temporary: Path, path: Path, checksums: list[dict], facts: dict, keep: int
) -> None:
    """Add the manifest, give the folder its name, and let go of the oldest ones."""
    files = {name: entry for of_rank in checksums for name, entry in of_rank.items()}
    files[".metadata"] = describe(temporary / ".metadata")
    content = {"files": files, "facts": facts}
    manifest = temporary / MANIFEST
    with manifest.open("w") as file:
        json.dump({"sha256": digest(content)} | content, file, indent=1)
        file.flush()
        os.fsync(file.fileno())

    if path.exists():  # the same step once more
        move(path, path.with_suffix(".old"))
    temporary.rename(path)
    shutil.rmtree(path.with_suffix(".old"), ignore_errors=True)
    with suppress(OSError):  # not every file system can
        descriptor = os.open(path.parent, os.O_RDONLY)
        os.fsync(descriptor)  # or the new name may be lost with the power
        os.close(descriptor)
    for old in checkpoints(path.parent)[:-keep]:
        shutil.rmtree(old, ignore_errors=True)


def move(path: Path, target: Path) -> None:
    """Give a folder another name, which one from earlier may have."""
    shutil.rmtree(target, ignore_errors=True)
    path.rename(target)


def checkpoints(folder: Path) -> list[Path]:
    """The complete checkpoints in `folder`, oldest first."""
    return sorted(path for path in folder.glob("step_*") if path.name[5:].isdigit())


def describe(file: Path) -> dict:
    with file.open("rb") as content:
        sha256 = hashlib.file_digest(content, "sha256").hexdigest()
    return {"bytes": file.stat().st_size, "sha256": sha256}


def digest(content: dict) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def newest_good(folder: Path, group: Group = None) -> Path:
    """The newest checkpoint in `folder` whose files are as they were written; all ranks call it.

    Damaged ones are told. Raises ConfigError if there is no good one; nothing is changed.
    """
    rank, size = rank_and_size(group)
    found = gathered(checkpoints(folder), group)[0]
    for path in reversed(found):
        faults = gathered(damage(path, rank, size), group)
        fault = next((fault for fault in faults if fault is not None), None)
        if fault is None:
            return path
        if rank == 0:
            print(f"{path}: damaged ({fault}); looking for an older one", file=sys.stderr)
    why = "no checkpoint in it is intact on all nodes" if found else "holds no checkpoint"
    raise ConfigError(f"{folder}: {why} to resume from; if the folder is the right one, and all "
                      f"nodes see it, delete {folder.parent} and start again without --resume")


def set_aside(folder: Path, good: Path, group: Group = None) -> None:
    """Rename what is newer than `good` to `step_00000200.damaged`: all ranks call it.

    Else it would be taken for newer than what the run writes from now on.
    """
    newer = [path for path in checkpoints(folder) if path > good]
    on_rank_0(lambda: [move(path, path.with_suffix(".damaged")) for path in newer], group)


def damage(path: Path, rank: int = 0, size: int = 1) -> str | None:
    """What is wrong with the files of which this rank checks every `size`-th, None if nothing."""
    try:
        manifest = json.loads((path / MANIFEST).read_text())
        stated = manifest.pop("sha256")
        if stated != digest(manifest):
            return f"{MANIFEST} is not what was written"
        for name, expected in sorted(manifest["files"].items())[rank::size]:
            num_bytes = (path / name).stat().st_size
            if num_bytes != expected["bytes"]:
                return f"{name} has {num_bytes:,} bytes, not {expected['bytes']:,}"
            if describe(path / name) != expected:
                return f"{name} has {num_bytes:,} bytes, but not those that were written"
    except (OSError, ValueError, KeyError) as error:
        return reason(error)
    return None


def facts_of(path: Path) -> dict:
    """What `save` was given beside the state."""
    return json.loads((path / MANIFEST).read_text())["facts"]


def saved_tensors(path: Path) -> dict[str, tuple[torch.Size, torch.dtype]]:
    """Shape and dtype of every tensor in a checkpoint, by name."""
    metadata = FileSystemReader(path).read_metadata()
    return {name: (tensor.size, tensor.properties.dtype)
            for name, tensor in metadata.state_dict_metadata.items()}


def load(path: Path, state: dict[str, Boxes], group: Group = None) -> None:
    """Fill the tensors in `state`, whose names and shapes are in the checkpoint; all ranks call."""
    try:
        with quietly():
            dcp.load(state, storage_reader=FileSystemReader(path), planner=LoadPlanner(),
                     process_group=group, no_dist=group is None)
    except CheckpointException as error:
        raise ConfigError(f"{path}: cannot be read ({reason(error)}), though its checksums are "
                          "right: does every node see the folder?") from error


def read_tensor(path: Path, name: str) -> torch.Tensor:
    """One whole tensor of a checkpoint, by its name in it."""
    shape, dtype = saved_tensors(path)[name]
    tensor = torch.empty(shape, dtype=dtype)
    load(path, {name: Boxes.whole(tensor)})
    return tensor


# What ranks do together fails together


def agreed(act: Callable, group: Group) -> list:
    """What `act` returns on each rank; raises OSError on all if it does on one."""
    try:
        outcome = act()
    except OSError as error:
        outcome = error
    outcomes = gathered(outcome, group)
    for each in outcomes:
        if isinstance(each, OSError):
            raise each
    return outcomes


def on_rank_0(act: Callable, group: Group) -> None:
    rank, _ = rank_and_size(group)
    agreed(act if rank == 0 else lambda: None, group)


def reason(error: Exception) -> str:
    """One line; of what has failed on some ranks, the first."""
    if isinstance(error, CheckpointException):
        error = next(iter(error.failures.values()))[0]
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return str(error).split("\n")[0] or type(error).__name__
