"""Hints in three levels: what to look at, the algorithm in words, nearly the code.

They lie beside the solutions, `solutions/ch01_single_gpu.hints.toml`, a list of three for each
exercise id. How many were shown is kept in .minitron/hints.json.
"""

import tomllib
from pathlib import Path

from minitron.config import require
from teaching import records
from teaching.exercises import ROOT, Exercise, Text, find

NUM_LEVELS = 3


def hint(exercise_id: str, level: int | None = None, root: Path = ROOT) -> Text:
    """The next hint for an exercise, or the one of `level` 1 to 3.

    Raises ConfigError for an unknown exercise or level.
    """
    exercise = find(exercise_id, root)
    shown = _read_shown(root)
    if level is None:
        level = min(shown.get(exercise.id, 0) + 1, NUM_LEVELS)
    require(1 <= level <= NUM_LEVELS, f"hint level {level}: must be from 1 to {NUM_LEVELS}")

    shown[exercise.id] = max(level, shown.get(exercise.id, 0))
    records.write("hints", shown, root)

    if level < NUM_LEVELS:
        more = f"minitron hint {exercise.id} --level {level + 1} says more"
    else:
        more = f"that was the last one; minitron solution {exercise.id} --give-up shows an answer"
    text = read_hints(exercise, root)[level - 1].strip()
    return Text(f"Exercise {exercise}: hint {level} of {NUM_LEVELS}\n\n{text}\n\n({more})")


def run_hint(exercise_id: str, level: int | None = None, root: Path = ROOT) -> int:
    """`minitron hint 1.2 [--level N]`: print the hint; exit code 0."""
    print(hint(exercise_id, level, root))
    return 0


def read_hints(exercise: Exercise, root: Path = ROOT) -> list[str]:
    """The exercise's hints, from the faintest to nearly the code."""
    path = root / "solutions" / f"{exercise.chapter}.hints.toml"
    return tomllib.loads(path.read_text(encoding="utf-8"))[exercise.id]


def _read_shown(root: Path) -> dict[str, int]:
    return records.read("hints", _is_level, root)


def _is_level(value) -> bool:
    return type(value) is int and 1 <= value <= NUM_LEVELS
