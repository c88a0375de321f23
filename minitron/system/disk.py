"""Atomic writes, and the disk's errors as one line each."""

import errno
import json
import os
import re
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from minitron.system.errors import ConfigError

NO_ROOM = {getattr(errno, name) for name in ("ENOSPC", "EDQUOT", "EFBIG") if hasattr(errno, name)}
NO_WRITES = NO_ROOM | {errno.EROFS}
REFUSALS = NO_WRITES | {
    getattr(errno, name)
    for name in (
        "EIO",
        "ESTALE",
        "EACCES",
        "EPERM",
        "ENAMETOOLONG",
        "ENOTDIR",
        "EISDIR",
        "EEXIST",
        "ELOOP",
    )
    if hasattr(errno, name)
}
"""Errors that are the user's to mend: no room, no permission, no such place."""


def refusal(error: BaseException) -> int | None:
    """Return the error's number if a disk has refused something, None if it is another fault.

    Libraries in Rust, such as tokenizers and safetensors, put the number into their message. An
    error of permission that names no file is not of a disk.
    """
    number = getattr(error, "errno", None)
    code = re.search(r"\(os error (\d+)\)", str(error))
    if number is None and code is not None:
        number = int(code[1])
    is_named = getattr(error, "filename", None) is not None
    return number if number in (REFUSALS if is_named else NO_WRITES | {errno.EIO}) else None


@contextmanager
def writing(path: Path, remedy: str = "make room, or choose another folder") -> Iterator[None]:
    """Raise ConfigError, naming the file, if there is no room for what is written within.

    `path` is named where the error names no file, as it does when the disk is full. Other refusals
    name the file, which may be one that is read: the command line tells of them.
    """
    try:
        yield
    except ConfigError:
        raise
    except Exception as error:
        number, name = refusal(error), getattr(error, "filename", None)
        if number is None or (name is not None and number not in NO_WRITES):
            raise
        raise ConfigError(
            f"{name or path}: cannot be written ({os.strerror(number)}); {remedy}"
        ) from error


def open_itself(path: str | Path, flags: int) -> int:
    """Open as os.open does, but no link and no pipe: a run's folder may come from a stranger.

    A link would lead out of it, and a pipe would block. Raises ConfigError for a pipe.
    """
    for name in ("O_NOFOLLOW", "O_CLOEXEC", "O_NONBLOCK"):
        flags |= getattr(os, name, 0)
    try:
        file = os.open(path, flags, 0o666)
        if not stat.S_ISFIFO(os.fstat(file).st_mode):
            return file
        os.close(file)
    except OSError as error:
        if error.errno != errno.ENXIO:  # of a pipe without a reader
            raise
    raise ConfigError(f"{path}: is a pipe, not a file", "remove it, or choose another --run-dir")


def replace(path: Path, content: bytes) -> None:
    """Write a file so that a crash, or a full disk, leaves the old content or the new one."""
    temporary = path.with_name(path.name + ".tmp")
    temporary.unlink(missing_ok=True)  # of an earlier life
    try:
        with temporary.open("xb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def write_json(path: Path, table: dict) -> None:
    """Write `table` as `replace` does."""
    replace(path, (json.dumps(table, indent=1) + "\n").encode())
