"""How long a chapter takes: its main path, walked by a reader of stated speed.

    python tools/minutes.py             what each chapter takes, and of how many cells it is made
    python tools/minutes.py --write     write the minutes into the chapters' sources and the README

The main path is a chapter without its sections headed "Further". Prose is read at 200 words a
minute (adults read non-fiction silently at 238, Brysbaert 2019; this is technical), takes time over
each line of code and of output, looks at each figure, and thinks before opening a fold. The speeds
are in `SECONDS`. The minutes are rounded up to the next 5.
"""

import argparse
import math
import re
import sys
from dataclasses import dataclass
from pathlib import Path

import nbformat
from nbformat import NotebookNode

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # run as a script, Python looks in tools/ alone

from tools.build_chapters import chapter_sources, notebook_path  # noqa: E402

MAX_CELLS, MAX_MINUTES = 75, 50
SECONDS = {
    "word": 60 / 200,
    "line of code": 2.5,
    "line of an import": 0.25,
    "line of output": 1.5,
    "line of the package's source": 2.5,
    "line of one word": 0.5,
    "figure": 25,
    "prediction": 40,
    "running every cell": 90,
}
HEADING = re.compile(r"^(#{1,6}) (.+)$", re.MULTILINE)
STATED = re.compile(r"^# \*\*(\d+) minutes", re.MULTILINE)


@dataclass
class Walk:
    """A chapter's main path."""

    cells: int
    seconds: float

    @property
    def minutes(self) -> int:
        return 5 * math.ceil(self.seconds / 60 / 5)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", help="beginnings of chapter names; none: every chapter")
    parser.add_argument("--write", action="store_true", help="write the minutes down")
    arguments = parser.parse_args()
    for source in chapter_sources(arguments.names):
        walk = walked(source)
        print(f"{source.stem:28} {walk.cells:4} cells {walk.seconds / 60:6.1f} minutes")
        if arguments.write:
            write(source, walk.minutes)
    return 0


def walked(source: Path) -> Walk:
    """Return the length of a chapter's main path, as its notebook stands."""
    notebook = nbformat.read(notebook_path(source), as_version=4)
    path = main_path(notebook)
    return Walk(len(path), SECONDS["running every cell"] + sum(map(seconds, path)))


def main_path(notebook: NotebookNode) -> list[NotebookNode]:
    """Return the cells outside of "Further" sections.

    Such a section starts with a cell that begins with its heading, and ends at the next cell that
    begins with a heading of its level or a higher one.
    """
    path, further = [], 0
    for cell in notebook.cells:
        heading = HEADING.match(cell.source) if cell.cell_type == "markdown" else None
        if heading:
            level = len(heading[1])
            if further == 0 or level <= further:
                further = level if is_further(heading[2]) else 0
        if not further:
            path.append(cell)
    return path


def is_further(title: str) -> bool:
    """Return whether a section of this title can be skipped: "Further: ...", "7. Further: ..."."""
    return re.match(r"(\d+\.\s+)?Further\b", title) is not None


def seconds(cell: NotebookNode) -> float:
    """Return how long the reader spends on one cell and its outputs."""
    if cell.cell_type == "markdown":
        return SECONDS["word"] * len(words(cell.source)) + SECONDS[
            "prediction"
        ] * cell.source.count("**Predict")
    imports = sum(line.startswith(("import ", "from ")) for line in cell.source.splitlines())
    own = len(cell.source.splitlines()) - imports
    spent = SECONDS["line of code"] * own + SECONDS["line of an import"] * imports
    for output in cell.outputs:
        data = output.get("data", {})
        if "image/png" in data:
            spent += SECONDS["figure"]
        elif "text/markdown" in data and "show_source(" in cell.source:
            lines = "".join(data["text/markdown"]).splitlines()[3:-1]  # between the fences
            spent += sum(map(seconds_of_source, lines))
        elif "text/markdown" in data:
            spent += SECONDS["word"] * len(words("".join(data["text/markdown"])))
        else:
            text = output.get("text", data.get("text/plain", ""))
            spent += SECONDS["line of output"] * len("".join(text).splitlines())
    return spent


def seconds_of_source(line: str) -> float:
    """Return how long a line of the package's source takes; a bracket or a name is seen at once."""
    kind = (
        "line of the package's source" if len(re.findall(r"\w+", line)) > 1 else "line of one word"
    )
    return SECONDS[kind]


def words(markdown: str) -> list[str]:
    """Return a text's words, without tags, addresses of links, and rules of tables."""
    text = re.sub(r"<[^>]+>|\]\([^)]*\)|\|[-| :]+\|", " ", markdown)
    return re.findall(r"[^\W_][\w'.,]*", text)


def stated(source: Path) -> int:
    """Return the minutes that a chapter's front matter states."""
    return int(STATED.search(source.read_text("utf-8"))[1])


def write(source: Path, minutes: int) -> None:
    """Write the minutes into a chapter's front matter and its row of the README."""
    text = source.read_text("utf-8")
    source.write_text(STATED.sub(f"# **{minutes} minutes", text, count=1), "utf-8")
    readme = ROOT / "README.md"
    row = re.compile(rf"^(.*chapters/{source.stem}\.ipynb.*\| )\d+( \+ \d+ \|)$", re.MULTILINE)
    readme.write_text(row.sub(rf"\g<1>{minutes}\g<2>", readme.read_text("utf-8")), "utf-8")


if __name__ == "__main__":
    sys.exit(main())
