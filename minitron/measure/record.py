"""Records of measurements: what was measured, where, with which versions, by which command.

A record is one JSON file, so a figure can be drawn from it long after the machine was returned.
Reading one executes nothing: a file that is no record raises ConfigError.

Read in this order: Record, Conditions, conditions_here, save, load.
"""

import math
import platform
import shutil
import subprocess
import sys
from dataclasses import asdict, dataclass
from datetime import date
from pathlib import Path
from types import UnionType
from typing import get_origin, get_type_hints

import psutil
import torch

from minitron.config import ConfigError
from minitron.system import disk
from minitron.system.files import read_json, reason

Value = float | int | str | bool | None | list
"""What a row may hold: a number, a text, nothing, or a list of numbers and texts."""
Row = dict[str, Value]
FORMAT = "minitron record 1"


@dataclass(frozen=True)
class Conditions:
    """Where and how something was measured."""

    device: str
    """As the driver names it: "NVIDIA H100 80GB HBM3"; for a CPU, the processor."""
    kind: str
    """"cuda" or "cpu"."""
    num_devices: int
    """That took part, one a rank."""
    memory_bytes: int
    """Of one device."""
    driver: str | None
    versions: dict[str, str]
    """Of "python", "torch" and, where they are there, "cuda", "cudnn", "nccl"."""
    command: str
    date: str
    """Day of the measurement, as in 2026-11-25."""

    def __str__(self) -> str:
        several = f"{self.num_devices} x " if self.num_devices > 1 else ""
        return f"{several}{self.device}, torch {self.versions['torch']}, {self.date}"


@dataclass(frozen=True)
class Target:
    """A number that a measurement has to reach."""

    name: str
    value: float
    limit: float
    is_least: bool
    """Whether `limit` is the least that is good; else it is the most."""

    @property
    def passed(self) -> bool:
        return self.value >= self.limit if self.is_least else self.value <= self.limit

    def __str__(self) -> str:
        bound = "at least" if self.is_least else "at most"
        verdict = "pass" if self.passed else "MISS"
        return f"{verdict}  {self.name}: {self.value:.4g}, {bound} {self.limit:g}"


@dataclass(frozen=True)
class Record:
    """What one part of the measurements found."""

    part: str
    conditions: Conditions
    tiny: bool
    """Whether the sizes were those of a test, whose speeds mean nothing."""
    seconds: float
    """That the part took."""
    rows: list[Row]
    """One a measured case; its "case" names it."""
    targets: list[Target]
    notes: list[str]
    """What was left out, and why."""

    def row(self, case: str) -> Row | None:
        """Return the row of this case; None if it was not measured."""
        return next((row for row in self.rows if row["case"] == case), None)


def conditions_here(device: torch.device, num_devices: int = 1) -> Conditions:
    """Describe this machine, these versions and this command."""
    versions = {"python": platform.python_version(), "torch": torch.__version__}
    name, memory, driver = processor_name(), psutil.virtual_memory().total, None
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        name, memory, driver = properties.name, properties.total_memory, driver_version()
        versions["cuda"] = str(torch.version.cuda)
        versions["cudnn"] = str(torch.backends.cudnn.version())
        if torch.distributed.is_nccl_available():
            versions["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
    command = " ".join(["python", *sys.argv])
    return Conditions(
        name, device.type, num_devices, memory, driver, versions, command, date.today().isoformat()
    )


def processor_name() -> str:
    """Name the processor: as Linux does, else by its architecture."""
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text(errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def driver_version() -> str | None:
    """Ask nvidia-smi for the driver's version; None where it does not answer."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return None
    command = [program, "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return answer.stdout.split("\n")[0].strip() or None


# Files


def save(record: Record, path: Path) -> None:
    """Write a record; the file holds the old one or the new one, never half of it."""
    table = {"format": FORMAT, **asdict(record)}
    path.parent.mkdir(parents=True, exist_ok=True)
    with disk.writing(path):
        disk.write_json(path, finite(table))


def load(path: Path) -> Record:
    """Read a record; raises ConfigError if the file holds none, and OSError if there is no file."""
    try:
        return record_of(read_json(path))
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ConfigError(
            f"{path}: not a record of measurements ({reason(error)})",
            "remove it, and measure again",
        ) from None


def record_of(table: dict) -> Record:
    """Make the record that a file's object describes; raises ValueError, TypeError or KeyError."""
    if table["format"] != FORMAT:
        raise ValueError(f"its format is {table['format']!r:.40}, not {FORMAT!r}")
    conditions = checked(Conditions, table["conditions"])
    targets = [checked(Target, target) for target in table["targets"]]
    for row in table["rows"]:
        if not isinstance(row, dict) or not isinstance(row.get("case"), str):
            raise ValueError("a row does not name its case")
    rest = {name: table[name] for name in ("part", "tiny", "seconds", "rows", "notes")}
    return checked(Record, {**rest, "conditions": conditions, "targets": targets})


def checked(kind: type, values: dict):
    """Make a `kind` of exactly these fields; raises TypeError for a value of another type."""
    for name, hint in get_type_hints(kind).items():
        expected = int | float if hint is float else get_origin(hint) or hint
        if expected is UnionType:
            expected = hint
        if not isinstance(values[name], expected):
            raise TypeError(f"{name} is a {type(values[name]).__name__}")
    return kind(**values)


def finite(value):
    """Put None where a number is not finite: JSON has neither infinity nor NaN."""
    match value:
        case float():
            return value if math.isfinite(value) else None
        case dict():
            return {key: finite(each) for key, each in value.items()}
        case list() | tuple():
            return [finite(each) for each in value]
    return value
