"""The folder of a run: whether it holds one, which is next, who trains in it now, its tokenizer.

Read in this order: Claim, require_place, default_folder, start_over; then keep_tokenizer and
tokenizer_of_run.
"""

import errno
import json
import os
import socket
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None

import psutil

from minitron.checkpoint import checkpoints
from minitron.config import Config, ConfigError, require
from minitron.corpus.contents import fingerprint, read_contents
from minitron.corpus.folder import load_tokenizer
from minitron.dataset import TokenDataset
from minitron.system.disk import open_itself, replace, write_json, writing

if TYPE_CHECKING:
    from tokenizers import Tokenizer

ORIGIN = "started_from.json"
SECONDS_TO_RETAKE = 120
"""For a restarted run: a file server may hold a dead node's lock for as long as its lease."""


class RunLock:
    """A lock on a run's folder: a second process that would train in it is refused.

    It is a POSIX lock on the file `run.lock`, which ends with the process that holds it, however
    it dies, and which NFS and other shared file systems pass on between nodes. Not seen are
    processes on another node where locks are local (mount options `nolock`, `local_lock`,
    `localflock`), or where the file system has none, which is reported. Windows has none.
    """

    def __init__(self, folder: Path):
        self.path = folder / "run.lock"
        self.file: int | None = None

    def take(self, is_restart: bool = False) -> None:
        """Hold the folder, which is made if need be; raises ConfigError if another process does.

        A restarted run waits a while for a lock of another node, which may have died.
        """
        if self.file is not None or fcntl is None:
            return
        with writing(self.path):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self.file = open_itself(self.path, os.O_RDWR | os.O_CREAT)
        end = time.monotonic() + (SECONDS_TO_RETAKE if is_restart else 0)
        while not self.try_lock():
            is_here, owner = self.owner()
            if time.monotonic() >= end or is_here:
                self.close()
                raise ConfigError(
                    f"{self.path.parent}: {owner} is training in it",
                    "end that one first, or choose another --run-dir",
                )
            time.sleep(1)

    def try_lock(self) -> bool:
        """Take the lock and write this process's name into it; False if another one has it."""
        try:
            fcntl.lockf(self.file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in (errno.EAGAIN, errno.EACCES):
                return False
            print(
                f"{self.path}: cannot be locked ({error.strerror}); make sure that no other "
                "process trains in this folder",
                file=sys.stderr,
            )
        name = {
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "since": time.strftime("%Y-%m-%d %H:%M:%S"),
        }
        with writing(self.path):
            os.ftruncate(self.file, 0)
            os.pwrite(self.file, json.dumps(name).encode() + b"\n", 0)
        return True

    def owner(self) -> tuple[bool, str]:
        """Return whether the process that holds the lock is on this host, and what to call it."""
        try:
            name = json.loads(os.pread(self.file, 4096, 0))
            host, pid, since = str(name["host"]), int(name["pid"]), str(name["since"])
            is_here = host == socket.gethostname() and pid != os.getpid() and psutil.pid_exists(pid)
        except (ValueError, KeyError, TypeError, RecursionError, OverflowError):
            return False, "another process"
        return is_here, f"process {pid} on {host} (since {since})"

    def close(self) -> None:
        """Let others have the folder; the file stays: to remove it is to race with who opens it."""
        if self.file is not None:
            os.close(self.file)
            self.file = None


def holds_run(folder: Path) -> bool:
    """Return whether a run has got somewhere there; one that failed before leaves it free."""
    log = folder / "metrics.jsonl"
    has_rows = log.exists() and log.stat().st_size > 0
    return has_rows or bool(checkpoints(folder / "checkpoints"))


def has_begun(folder: Path) -> bool:
    """Return whether a run has come to its first step there, saved or not."""
    return (folder / "config.json").exists()


def default_folder(file: Path | None, resume: bool) -> Path:
    """Choose runs/NAME, runs/NAME-2, ...: the newest to resume, else the first free one."""
    name = file.stem if file else "train"
    folders = [Path("runs") / name]
    while holds_run(folders[-1]):
        folders.append(Path("runs") / f"{name}-{len(folders) + 1}")
    return folders[-2] if resume and folders[1:] else folders[-1]


def require_place(folder: Path, resume: bool, restart: bool) -> None:
    """Raise ConfigError if a new run would meet an old one, or an old one is not there.

    One that was killed before its first checkpoint is there: it has written its config.json.
    """
    require(
        not resume or has_begun(folder) or checkpoints(folder / "checkpoints"),
        f"{folder}: there is no run to resume",
        "check --run-dir, or start one without --resume",
    )
    require(
        resume or restart or not holds_run(folder),
        f"{folder}: already holds a run",
        "add --resume to continue it, or choose another --run-dir",
    )


def keep_origin(folder: Path, weights: Path | None) -> None:
    """Write down the folder of weights that a run starts from; None removes an older note."""
    path = folder / ORIGIN
    if weights is None:
        path.unlink(missing_ok=True)
    else:
        write_json(path, {"weights": str(weights)})


def start_over(folder: Path, weights: Path | None) -> None:
    """Say that a run that is resumed has no checkpoint, and so begins again.

    Raises ConfigError if it had started from weights, which were not given again.
    """
    require(
        weights is not None or not (folder / ORIGIN).exists(),
        f"{folder}: the run started from --weights, and ended before its first checkpoint",
        "repeat its first command with --restart in place of --resume",
    )
    print(
        f"{folder}: the run ended before its first checkpoint, so it starts over at step 1",
        file=sys.stderr,
    )


# Its tokenizer: that of the corpus as the run began, since another corpus may be written there


def keep_tokenizer(folder: Path, tokenizer: "Tokenizer | None") -> None:
    """Write the tokenizer of a run that begins; None removes what one that failed has left."""
    path = folder / "tokenizer.json"
    if tokenizer is None:
        path.unlink(missing_ok=True)
    else:
        replace(path, tokenizer.to_str().encode())


def kept_tokenizer(folder: Path) -> "Tokenizer | None":
    """Load the tokenizer that a run has kept; None if it had none, or began before runs kept it."""
    return load_tokenizer(folder, "replace it with the one of the corpus it was trained on")


def tokenizer_of_run(folder: Path, config: Config, trained_on: str) -> "Tokenizer | None":
    """Load the tokenizer of a run: the one it has kept, else that of its corpus, if there is one.

    Raises ConfigError if the run has kept none and its corpus no longer holds the tokens whose
    fingerprint is `trained_on`: its tokenizer may be another one as well.
    """
    kept, corpus = kept_tokenizer(folder), config.data.path
    tokenizer = kept or load_tokenizer(corpus)
    if kept is None and tokenizer is not None:
        found = tokens_now(config)[: len(trained_on)]  # an old run's is the first half
        now = f"tokens with checksum {found[-12:]}" if found else "no readable tokens"
        require(
            found == trained_on,
            f"{folder}: has no tokenizer.json, and {corpus}/tokenizer.json may not fit: the run "
            f"trained on tokens with checksum {trained_on[-12:]}, but {corpus} now holds {now}",
            f"copy the old corpus's tokenizer.json into {folder}, or move {corpus}/tokenizer.json "
            "away to export no tokenizer",
        )
    return tokenizer


def tokens_now(config: Config) -> str:
    """Return the fingerprint of the tokens of a run's corpus as it is now; "" if there are none."""
    try:
        dataset = TokenDataset(config.data.path, "train", config.data.sequence_length)
        return fingerprint(dataset, read_contents(config.data.path))
    except ConfigError:
        return ""
