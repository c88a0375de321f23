"""Start an exercise again: its stub comes back, its neighbors stay, the old file is kept."""

import ast
import re
from pathlib import Path

from teaching.exercises import DEFINITIONS, ROOT, Exercise, Text, read_stub, select


def reset(exercise_id: str, root: Path = ROOT) -> Text:
    """Restore one exercise's functions ("1.2"), or a whole chapter's file ("1").

    The file as it was is kept under .minitron/backups/. Returns a sentence that says where.
    Raises ConfigError for an unknown id.
    """
    exercises = select([exercise_id], root)
    path = root / exercises[0].file
    stub = read_stub(exercises[0], root)
    whole_chapter = exercises[0].id != str(exercise_id)
    if not path.is_file():
        path.write_text(stub, encoding="utf-8")
        return Text(f"{exercises[0].file} was missing; it is restored, with its stubs")

    backup = _back_up(path, root)
    text = path.read_text(encoding="utf-8", errors="replace")
    path.write_text(stub if whole_chapter else _restored(text, stub, exercises[0]), "utf-8")
    what = f"chapter {exercise_id}" if whole_chapter else f"exercise {exercises[0]}"
    return Text(f"{what} is a stub again; your old file is {backup.relative_to(root)}")


def run_reset(exercise_id: str, root: Path = ROOT) -> int:
    """`minitron reset 1.2`: print what `reset` did and return the exit code."""
    print(reset(exercise_id, root))
    return 0


def _back_up(path: Path, root: Path) -> Path:
    folder = root / ".minitron" / "backups"
    folder.mkdir(parents=True, exist_ok=True)
    number = 1 + len(list(folder.glob(f"{path.stem}.*.py")))
    backup = folder / f"{path.stem}.{number}.py"
    backup.write_bytes(path.read_bytes())
    return backup


def _restored(text: str, stub: str, exercise: Exercise) -> str:
    lines, stub_lines = text.split("\n"), stub.split("\n")
    for name in exercise.names:
        handed_out = stub_lines[_span(stub, name)]
        place = _span("\n".join(lines), name)
        if place is None:
            lines += ["", *handed_out, ""]
        else:
            lines[place] = handed_out
    return "\n".join(lines)


def _span(text: str, name: str) -> slice | None:
    """The lines of the last top-level definition of `name`, its decorators included."""
    try:
        nodes = [n for n in ast.parse(text).body if isinstance(n, DEFINITIONS) and n.name == name]
    except (SyntaxError, ValueError):
        return _span_by_eye(text, name)
    if not nodes:
        return None
    first = min([nodes[-1].lineno, *(d.lineno for d in nodes[-1].decorator_list)])
    return slice(first - 1, nodes[-1].end_lineno)


def _span_by_eye(text: str, name: str) -> slice | None:
    # The file does not parse: the definition ends before the next line that starts a statement
    # or an exercise at the left margin; a closing bracket there still belongs to it.
    lines = text.split("\n")
    starts = [
        n for n, line in enumerate(lines) if re.match(rf"(async def|def|class) {name}\b", line)
    ]
    if not starts:
        return None
    stop = starts[-1] + 1
    while stop < len(lines) and not re.match(r"[\w@]|# Exercise", lines[stop]):
        stop += 1
    while not lines[stop - 1].strip():
        stop -= 1
    return slice(starts[-1], stop)
