"""Execute the chapters' sources into the notebooks that learners open.

    python tools/build_chapters.py              every chapter
    python tools/build_chapters.py ch01         the chapters whose name starts so
    python tools/build_chapters.py --text       execute nothing, renew prose and links alone
    python tools/build_chapters.py --check      execute nothing, compare with what is committed

A source is chapters/source/chNN_*.py in jupytext's py:percent form. A code cell tagged
"figure-NAME" also has its image written to slides/assets/chNN_NAME.png, for the slides and the
README. Building twice changes nothing but measured numbers: cell ids come from the chapter's name
and the cell's position, and no time, version or path of the machine is kept.
"""

import argparse
import ast
import base64
import hashlib
import re
import sys
from collections.abc import Callable
from pathlib import Path

import jupytext
import nbformat
from nbformat import NotebookNode

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # run as a script, Python looks in tools/ alone

from tools import chapter_links  # noqa: E402
from tools.chapter_links import LinkError  # noqa: E402

SOURCES = ROOT / "chapters" / "source"
ASSETS = ROOT / "slides" / "assets"

MAX_CELL_LINES = 15
SPEAKING_CALLS = {"print", "show", "check", "display"}
METADATA = {
    "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
    "language_info": {"file_extension": ".py", "mimetype": "text/x-python", "name": "python"},
}


class ChapterError(Exception):
    """A chapter breaks a rule of this file; the message says where."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", help="beginnings of chapter names; none: every chapter")
    modes = parser.add_mutually_exclusive_group()
    modes.add_argument("--text", action="store_true",
                       help="renew Markdown cells and links; keep code cells and their outputs")
    modes.add_argument("--check", action="store_true", help="compare only, execute nothing")
    arguments = parser.parse_args()

    for source in chapter_sources(arguments.names):
        try:
            if arguments.check:
                check_chapter(source)
            elif arguments.text:
                renew_text(source)
            else:
                build_chapter(source)
        except (ChapterError, LinkError) as error:
            print(f"{source.relative_to(ROOT)}: {error}", file=sys.stderr)
            return 1
        print(f"{notebook_path(source).relative_to(ROOT)}: {'agrees' if arguments.check else 'ok'}")
    return 0


def chapter_sources(names: list[str]) -> list[Path]:
    """Sources whose file name starts with one of `names`, or all of them."""
    sources = sorted(SOURCES.glob("ch*.py"))
    chosen = [path for path in sources if not names or path.stem.startswith(tuple(names))]
    if not chosen:
        sys.exit(f"no chapter is named {' or '.join(names)}; there are "
                 + ", ".join(path.stem for path in sources))
    return chosen


def notebook_path(source: Path) -> Path:
    return source.parent.parent / f"{source.stem}.ipynb"


def build_chapter(source: Path) -> None:
    """Execute one source in a fresh kernel; write its notebook and its tagged figures."""
    notebook = read_source(source)
    require_style(notebook)
    execute(notebook, cwd=notebook_path(source).parent)
    compare(read_source(source), notebook)

    for path, image in figures(source.stem, notebook).items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(image)
    nbformat.write(notebook, notebook_path(source))


def renew_text(source: Path) -> None:
    """Write a chapter's notebook anew from its source, with the outputs that it has.

    Raise ChapterError if a code cell was edited, added, moved or removed: that needs execution.
    """
    path = notebook_path(source)
    built = nbformat.read(path, as_version=4)
    notebook = read_source(source)
    require_style(notebook)

    old = [cell for cell in built.cells if cell.cell_type == "code"]
    new = [cell for cell in notebook.cells if cell.cell_type == "code"]
    if [cell.source for cell in old] != [cell.source for cell in new]:
        raise ChapterError("its code cells changed: build it without --text")
    for cell, executed in zip(new, old, strict=True):
        cell.outputs, cell.execution_count = executed.outputs, executed.execution_count
    nbformat.write(notebook, path)


def check_chapter(source: Path, read: Callable[[Path], str] = Path.read_text) -> None:
    """Raise ChapterError unless the notebook, as `read` finds it, is the one `source` makes."""
    path = notebook_path(source)
    if not path.is_file():
        raise ChapterError("there is no notebook yet: build it")
    notebook = nbformat.reads(read(path), as_version=4)
    expected = read_source(source)
    require_style(expected)
    compare(expected, notebook)
    for path, image in figures(source.stem, notebook).items():
        if not path.is_file() or path.read_bytes() != image:
            raise ChapterError(f"{path.name} is not the notebook's figure: build again")


def read_source(source: Path) -> NotebookNode:
    """Parse a source into a notebook without outputs; resolve its links, fix ids and metadata."""
    notebook = jupytext.read(source)
    chapter_links.complete(notebook, source.stem)
    for position, cell in enumerate(notebook.cells):
        name = f"{source.stem}/{position}"
        cell.id = hashlib.sha256(name.encode()).hexdigest()[:12]
        tags = cell.metadata.get("tags")
        cell.metadata = NotebookNode(tags=tags) if tags else NotebookNode()
    notebook.metadata = nbformat.from_dict(METADATA)
    notebook.nbformat, notebook.nbformat_minor = 4, 5
    return notebook


def execute(notebook: NotebookNode, cwd: Path) -> None:
    """Run every cell in one kernel and keep its outputs."""
    from nbclient import NotebookClient

    client = NotebookClient(
        notebook, timeout=120, kernel_name="python3", record_timing=False, coalesce_streams=True,
        resources={"metadata": {"path": str(cwd)}},
    )
    client.execute()
    notebook.metadata = nbformat.from_dict(METADATA)


def require_style(notebook: NotebookNode) -> None:
    """Raise ChapterError for a long code cell, a second H1 or a heading that skips a level."""
    level = 0
    for position, cell in enumerate(notebook.cells):
        if cell.cell_type == "code":
            lines = len(cell.source.splitlines())
            if lines > MAX_CELL_LINES:
                raise ChapterError(
                    f"cell {position} has {lines} lines, at most {MAX_CELL_LINES}: "
                    + cell.source.splitlines()[0]
                )
            continue
        for marks, title in re.findall(r"^(#{1,6}) (.+)$", cell.source, re.MULTILINE):
            if len(marks) > level + 1 or (len(marks) == 1) != (level == 0):
                raise ChapterError(
                    f"cell {position}: heading {title!r} is level {len(marks)} after {level}; "
                    "one H1 comes first, and no level is skipped"
                )
            level = len(marks)


def compare(expected: NotebookNode, notebook: NotebookNode) -> None:
    """Raise ChapterError at the first difference of prose, code, ids, tags or metadata.

    Also for a cell that was not executed in order, lost its outputs, failed, or names a path of
    the machine it ran on.
    """
    if notebook.metadata != expected.metadata:
        raise ChapterError(f"the notebook's metadata is {notebook.metadata}, not as built")
    if len(notebook.cells) != len(expected.cells):
        raise ChapterError(
            f"the notebook has {len(notebook.cells)} cells, its source {len(expected.cells)}"
        )
    executed = 0
    for position, (cell, wanted) in enumerate(zip(notebook.cells, expected.cells, strict=True)):
        for key in ("cell_type", "source", "id", "metadata"):
            if cell[key] != wanted[key]:
                raise ChapterError(f"cell {position}: {key} differs from the source: build again")
        if cell.cell_type == "code":
            executed += 1
            _require_executed(cell, position, executed)


def _require_executed(cell: NotebookNode, position: int, count: int) -> None:
    if cell.execution_count != count:
        raise ChapterError(
            f"cell {position}: execution count {cell.execution_count}, not {count}: build again"
        )
    if speaks(cell.source) and not cell.outputs:
        raise ChapterError(f"cell {position} prints or shows, yet has no output: build again")
    for output in cell.outputs:
        if output.output_type == "error":
            raise ChapterError(f"cell {position} failed: {output.ename}: {output.evalue}")
        for place in (str(ROOT), str(Path.home())):
            if place in str(output):
                raise ChapterError(f"cell {position}: its output names {place}")


def speaks(source: str) -> bool:
    """Whether a cell prints or shows something itself, outside the functions it defines."""
    pending: list[ast.AST] = [ast.parse(re.sub(r"^[%!].*$", "pass", source, flags=re.MULTILINE))]
    while pending:
        node = pending.pop()
        if isinstance(node, ast.FunctionDef | ast.ClassDef | ast.Lambda):
            continue
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") in SPEAKING_CALLS:
            return True
        pending += ast.iter_child_nodes(node)
    return False


def figures(chapter: str, notebook: NotebookNode) -> dict[Path, bytes]:
    """Path and PNG of every code cell tagged "figure-NAME"."""
    found = {}
    for position, cell in enumerate(notebook.cells):
        for tag in cell.metadata.get("tags", []):
            if tag.startswith("figure-"):
                images = [o.data["image/png"] for o in cell.outputs
                          if "image/png" in o.get("data", {})]
                if len(images) != 1:
                    raise ChapterError(f"cell {position}: {tag} needs one image, has {len(images)}")
                name = f"{chapter.split('_')[0]}_{tag.removeprefix('figure-')}.png"
                found[ASSETS / name] = base64.b64decode(images[0])
    return found


if __name__ == "__main__":
    sys.exit(main())
