"""Give the learner chapters of their own to run and edit: my_chapters/, without outputs.

    python tools/my_chapters.py

The chapters in chapters/ are executed, so their stored answers would spoil the predictions, and
running them there would change files that git tracks. Git ignores my_chapters/. Calling this again
brings a chapter up to date, and never at the cost of an edit: a chapter that was edited and has
since changed in the course is kept under another name beside the new one.
"""

import hashlib
import json
import sys
from pathlib import Path

import nbformat
from nbformat import NotebookNode

ROOT = Path(__file__).resolve().parent.parent
RECORD = ".as_copied.json"
"""In my_chapters/: for each file, the fingerprint of the text that was copied."""


def main() -> int:
    for line in refresh(ROOT / "chapters", ROOT / "my_chapters"):
        print(line)
    return 0


def refresh(chapters: Path, mine: Path) -> list[str]:
    """Copy what is new or has changed from `chapters` to `mine`; return what there is to say."""
    mine.mkdir(exist_ok=True)
    record, said = read_record(mine / RECORD), []
    for path in sorted(chapters.glob("ch*.ipynb")):
        notebook = without_outputs(nbformat.read(path, as_version=4))
        now, copy = fingerprint(notebook), mine / path.name
        if copy.exists():
            found, copied = fingerprint_of(copy), record.get(path.name)
            if now in (found, copied):
                continue  # up to date, or the learner's edits of this very text
            if found is None or found != copied:
                kept = unused_name(copy)
                copy.rename(kept)
                said.append(f"{path.name} has changed in the course; yours is kept as {kept.name}")
        nbformat.write(notebook, copy)
        record[path.name] = now
        (mine / RECORD).write_text(json.dumps(record, indent=1))
    return said


def without_outputs(notebook: NotebookNode) -> NotebookNode:
    """Empty a notebook's outputs and execution counts, in place, and return it.

    And show the learner's own outputs, of which chapters/ folds those that answer a prediction.
    """
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.outputs, cell.execution_count = [], None
            cell.metadata.pop("jupyter", None)
    return notebook


def fingerprint(notebook: NotebookNode) -> str:
    """Return a hash of the cells' kinds and texts: running a notebook does not change it."""
    text = json.dumps([(cell.cell_type, cell.source) for cell in notebook.cells])
    return hashlib.sha256(text.encode()).hexdigest()


def fingerprint_of(path: Path) -> str | None:
    """Return the fingerprint of a file; None where it is no longer a notebook."""
    try:
        return fingerprint(nbformat.read(path, as_version=4))
    except (ValueError, AttributeError, nbformat.ValidationError, nbformat.reader.NotJSONError):
        return None


def read_record(path: Path) -> dict[str, str]:
    """Return what was copied before; nothing where the record is missing or damaged."""
    try:
        record = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError):
        return {}
    return record if isinstance(record, dict) else {}


def unused_name(copy: Path) -> Path:
    """Return ch01_x.mine-1.ipynb, or the first number after it that is free."""
    number = 1
    while (kept := copy.with_name(f"{copy.stem}.mine-{number}.ipynb")).exists():
        number += 1
    return kept


if __name__ == "__main__":
    sys.exit(main())
