"""What a rank may send to its parent: a few kinds of objects, and nothing that runs.

Ranks may run untrusted code, a learner's or a stranger's, and a pickle can build any object there
is. So the parent reads with an allow-list.
"""

import io
import pickle
from collections.abc import Iterator
from pathlib import Path

import torch

from minitron.launch.rank_process import LENGTH_BYTES, Failure, Frame, Returned, Started
from minitron.measure.ledger import Call

MOST_BYTES = 2**20  # read at once, so that one busy rank does not hide the others


class _Reader(pickle.Unpickler):
    def find_class(self, module: str, name: str):
        for kind in (Call, Started, Returned, Failure, Frame):
            if (module, name) == (kind.__module__, kind.__qualname__):
                return kind
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        raise pickle.UnpicklingError(f"a rank sent a {module}.{name}")


def read_message(data: bytes):
    """Read what a rank has sent. Raises UnpicklingError for anything that is no message."""
    return _Reader(io.BytesIO(data)).load()


def read_bytes(data: bytes) -> bytes:
    """Read a pickle of bytes. Raises UnpicklingError for one of anything else."""
    value = read_message(data)
    if type(value) is not bytes:
        raise pickle.UnpicklingError(f"a rank sent a {type(value).__name__}, not bytes")
    return value


class Announcements:
    """The file in which a rank announces its calls, as the parent reads it: again and again."""

    def __init__(self, path: Path):
        path.touch()
        self._file, self._unread = open(path, "rb", buffering=0), b""

    def read(self) -> Iterator[Call | str | None]:
        """Read what has been added and is complete: calls, and names of phases."""
        self._unread += self._file.read(MOST_BYTES)
        while len(self._unread) >= LENGTH_BYTES:
            end = LENGTH_BYTES + int.from_bytes(self._unread[:LENGTH_BYTES])
            if len(self._unread) < end:
                break
            data, self._unread = self._unread[LENGTH_BYTES:end], self._unread[end:]
            yield read_message(data)

    def close(self) -> None:
        self._file.close()
