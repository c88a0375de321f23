"""What a disk refuses, told in one line; and files that are replaced whole or not at all."""

import errno
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from minitron.config import ConfigError

REFUSALS = {getattr(errno, name) for name in (
    "ENOSPC", "EDQUOT", "EROFS", "EFBIG", "EIO", "ESTALE", "EACCES", "EPERM", "ENAMETOOLONG",
    "ENOTDIR", "EISDIR", "EEXIST", "ELOOP",
) if hasattr(errno, name)}
"""Errors that are the user's to mend: no room, no permission, no such place."""


def refusal(error: BaseException) -> str | None:
    """Why the disk has refused what `error` tells of, in words; None if that is another fault.

    Libraries in Rust, such as tokenizers and safetensors, put the number into their message.
    """
    number = getattr(error, "errno", None)
    told = re.search(r"\(os error (\d+)\)", str(error))
    if number is None and told is not None:
        number = int(told[1])
    return os.strerror(number) if number in REFUSALS else None


@contextmanager
def writing(path: Path, remedy: str = "make room, or choose another folder") -> Iterator[None]:
    """Raise ConfigError, naming the file, if the disk refuses what is written within.

    `path` is named where the error itself names no file, as when the disk is full.
    """
    try:
        yield
    except ConfigError:
        raise
    except Exception as error:
        reason = refusal(error)
        if reason is None:
            raise
        where = getattr(error, "filename", None) or path
        raise ConfigError(f"{where}: cannot be written ({reason}); {remedy}") from error


def open_itself(path: str | Path, flags: int) -> int:
    """os.open, but no link: a run's folder may come from a stranger, and links lead out of it."""
    return os.open(path, flags | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_CLOEXEC", 0), 0o666)


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
