"""Records of a GPU for the chapters' figures: the newest one, where it is from, and predictions.

`benchmarks/gpu.py` writes the records. Predictions are the planner's, for the recorded device's
datasheet, or an H100's where nothing is recorded.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from matplotlib.figure import Figure

from minitron.config import ConfigError
from minitron.measure.record import Record, Row, load
from minitron.plan.calibrate import known_device
from minitron.plan.hardware import DEVICES, Device
from teaching.exercises import ROOT

FOLDER = ROOT / "benchmarks" / "results" / "gpu"
H100 = DEVICES["H100-SXM-80GB"]
NOTHING = (
    "This has not been recorded on a GPU yet (`make gpu` does it): you see the prediction "
    "alone, for an H100."
)


@dataclass(frozen=True)
class Shown:
    """One sentence that says where the numbers are from, a figure, and its alternative text."""

    sentence: str
    figure: Figure
    alt: str


def newest(part: str, folder: Path) -> Record | None:
    """Return the latest record of a part, of any device alone; None if there is none.

    Of several from one day it is that of the device whose name comes last.
    """
    found = []
    for path in folder.glob(f"*/{part}.json"):
        try:
            record = load(path)
        except ConfigError:
            continue  # somebody's file of that name
        if record.conditions.num_devices == 1:
            found.append(record)
    return max(
        found, key=lambda record: (record.conditions.date, record.conditions.device), default=None
    )


def origin(record: Record | None) -> str:
    """Say in one sentence when and where a record was made, or that there is none."""
    if record is None:
        return NOTHING
    return f"Recorded on {record.conditions}, by `{record.conditions.command}`."


def device_of(record: Record | None) -> Device:
    """Return the datasheet of the device that a record is of; without one, an H100's."""
    known = None if record is None else known_device(record.conditions.device)
    return known or H100


def rows_of(record: Record | None, keep: Callable[[Row], bool] = lambda row: True) -> list[Row]:
    return [] if record is None else [row for row in record.rows if keep(row)]


def low_middle_high(row: Row, work: float) -> tuple[float, float, float]:
    """Return `work` per second in the slowest, the median and the fastest round."""
    return tuple(work / row[name] for name in ("seconds_most", "seconds", "seconds_least"))
