"""The log of a run: one JSON object a line, appended as it happens."""

import json
import math
import sys
from io import FileIO
from pathlib import Path

from minitron.system import disk

CRASH_LEFT = b"\0"  # a block of them, where data had not reached the disk
REMEDY = "make room, and continue with --resume; checkpoints already written are intact"


class MetricsLog:
    """Rows in `metrics.jsonl`; each has a "step", the number of steps done, skipped ones too.

    A number that is not finite is written as null: JSON has neither infinity nor NaN.
    """

    def __init__(self, path: Path):
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        self.file = open_to_append(path)

    def write(self, **row) -> None:
        """Append a row; raises ConfigError if the disk refuses it."""
        known = {
            key: None if isinstance(value, float) and not math.isfinite(value) else value
            for key, value in row.items()
        }
        line = json.dumps(known, allow_nan=False).encode() + b"\n"
        with disk.writing(self.path, REMEDY):
            append(self.file, line)

    def forget_after(self, step: int) -> None:
        """Drop the rows of steps that a resumed run is about to repeat.

        Lines that are no rows, as a crash or a bad disk may leave them, are moved to a file beside
        the log.
        """
        content = self.path.read_bytes()
        rows = [(line, parse(line)) for line in lines_of(content)]
        damaged = [line for line, row in rows if row is None]
        if damaged:
            aside = self.path.with_name(self.path.name + ".damaged")
            with open_to_append(aside) as file:
                append(file, b"".join(line + b"\n" for line in damaged))
            print(
                f"{self.path}: {len(damaged)} of {len(rows)} lines cannot be read; they are now "
                f"in {aside}",
                file=sys.stderr,
            )

        kept = b"".join(
            line + b"\n" for line, row in rows if row is not None and row["step"] <= step
        )
        if kept != content:
            self.file.close()
            disk.replace(self.path, kept)
            self.file = open_to_append(self.path)

    def close(self) -> None:
        self.file.close()


def read_metrics(path: Path) -> list[dict]:
    """Read all rows of a log; skips lines that are none, such as one cut off by a kill."""
    rows = map(parse, lines_of(path.read_bytes()))
    return [row for row in rows if row is not None]


def lines_of(content: bytes) -> list[bytes]:
    lines = (line.strip(CRASH_LEFT) for line in content.splitlines())
    return [line for line in lines if line]


def parse(line: bytes) -> dict | None:
    """Return the row in a line, None if there is none."""
    try:
        row = json.loads(line.decode())
    except (ValueError, RecursionError):
        return None
    is_row = isinstance(row, dict) and type(row.get("step")) is int
    return row if is_row else None


def open_to_append(path: Path) -> FileIO:
    """Open a file without a buffer: what has been written is there."""
    return open(path, "ab", buffering=0, opener=disk.open_itself)


def append(file: FileIO, content: bytes) -> None:
    while content:  # a disk that is nearly full takes a part, and refuses the rest
        content = content[file.write(content) :]
