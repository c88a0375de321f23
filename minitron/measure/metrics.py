"""The log of a run: one JSON object a line, appended as it happens."""

import json
import math
from pathlib import Path


class MetricsLog:
    """Rows in `metrics.jsonl`; each has a "step", the number of steps done, skipped ones too.

    A number that is not finite is written as null: JSON has neither infinity nor NaN.
    """

    def __init__(self, path: Path):
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        self.file = path.open("a")

    def write(self, **row) -> None:
        known = {key: None if isinstance(value, float) and not math.isfinite(value) else value
                 for key, value in row.items()}
        self.file.write(json.dumps(known, allow_nan=False) + "\n")
        self.file.flush()

    def forget_after(self, step: int) -> None:
        """Drop the rows of steps that a resumed run is about to repeat."""
        self.file.close()
        kept = [row for row in read_metrics(self.path) if row["step"] <= step]
        temporary = self.path.with_suffix(".tmp")
        temporary.write_text("".join(json.dumps(row) + "\n" for row in kept))
        temporary.replace(self.path)
        self.file = self.path.open("a")

    def close(self) -> None:
        self.file.close()


def read_metrics(path: Path) -> list[dict]:
    """All complete rows of a log; a last line cut off by a kill is left out."""
    rows = []
    for line in path.read_text().splitlines():
        try:
            rows.append(json.loads(line))
        except json.JSONDecodeError:
            break
    return rows
