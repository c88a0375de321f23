"""Build the notebooks that learners open from the chapters' sources, and execute what changed.

    python tools/build_chapters.py              every chapter
    python tools/build_chapters.py ch01         the chapters whose name starts so
    python tools/build_chapters.py --execute    execute them all the same, to measure anew
    python tools/build_chapters.py --check      write nothing, compare with what is there

A notebook keeps the hash of its code cells and of what they import (chapter_hash.py). Where both
are as they were, its outputs stay and the text around them is replaced.

A source is chapters/source/chNN_*.py in jupytext's py:percent form. A code cell tagged
"figure-NAME" also has its image written to slides/assets/chNN_NAME.png, for the slides and the
README. Executing twice changes nothing but measured numbers: cell ids come from the chapter's name
and the cell's position, and no time, version or path of the machine is kept.
"""

import argparse
import ast
import base64
import copy
import hashlib
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

# An extra that nbformat's jsonschema can do without: its grammars take longer than all the rest.
sys.modules.setdefault("rfc3987_syntax", None)

import jupytext  # noqa: E402
import nbformat  # noqa: E402
from nbformat import NotebookNode  # noqa: E402

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # run as a script, Python looks in tools/ alone

from teaching.claims import REFUTED  # noqa: E402
from tools import chapter_links  # noqa: E402
from tools.chapter_hash import (  # noqa: E402
    execution_hashes,
    hash_of_cells,
    hash_of_imports,
)
from tools.chapter_links import LinkError  # noqa: E402
from tools.imports import parse_cell  # noqa: E402

SOURCES = ROOT / "chapters" / "source"
ASSETS = ROOT / "slides" / "assets"

MAX_CELL_LINES = 15
SPEAKING_CALLS = {"print", "show", "show_source", "show_text", "check", "display"}
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
    modes.add_argument("--execute", action="store_true", help="execute whatever has changed or not")
    modes.add_argument("--check", action="store_true", help="compare only, write nothing")
    arguments = parser.parse_args()

    for source in chapter_sources(arguments.names):
        try:
            if arguments.check:
                check_chapter(source)
                done = "agrees"
            else:
                done = build_chapter(source, arguments.execute)
        except (ChapterError, LinkError) as error:
            print(f"{source.relative_to(ROOT)}: {error}", file=sys.stderr)
            return 1
        print(f"{notebook_path(source).relative_to(ROOT)}: {done}")
        if arguments.check and is_stale(source):
            print(f"stale: {source.stem}: what it imports has changed since it was executed")
    return 0


def chapter_sources(names: list[str]) -> list[Path]:
    """Sources whose file name starts with one of `names`, or all of them."""
    sources = sorted(SOURCES.glob("ch*.py"))
    chosen = [path for path in sources if not names or path.stem.startswith(tuple(names))]
    if not chosen:
        sys.exit(
            f"no chapter is named {' or '.join(names)}; there are "
            + ", ".join(path.stem for path in sources)
        )
    return chosen


def notebook_path(source: Path) -> Path:
    return source.parent.parent / f"{source.stem}.ipynb"


def build_chapter(source: Path, anew: bool = False) -> str:
    """Write one source's notebook and its tagged figures; return what was done, in a phrase.

    It is executed in a fresh kernel where its outputs may have changed, or where asked to (`anew`).
    """
    path, notebook = notebook_path(source), read_source(source)
    require_style(notebook)
    expected, hashes = copy.deepcopy(notebook), execution_hashes(notebook)
    reason = "as asked" if anew else keep_outputs(notebook, path, hashes)
    if reason:
        execute(notebook, cwd=path.parent)
    notebook.metadata = _metadata(hashes)
    compare(expected, notebook)

    for figure, image in figures(source.stem, notebook).items():
        figure.parent.mkdir(parents=True, exist_ok=True)
        figure.write_bytes(image)
    nbformat.write(notebook, path)
    return f"executed: {reason}" if reason else "not executed, text renewed"


def keep_outputs(notebook: NotebookNode, path: Path, hashes: dict[str, str]) -> str | None:
    """Take the outputs of the notebook at `path`; return why not, where they may have changed."""
    try:
        built = nbformat.read(path, as_version=4)
    except (FileNotFoundError, nbformat.reader.NotJSONError):
        return "there was no notebook"
    old, new = _code(built), _code(notebook)
    known = built.metadata.get("minitron", {})
    if known.get("cells") != hashes["cells"] or [c.source for c in old] != [c.source for c in new]:
        return "its cells changed"
    if known.get("imports") != hashes["imports"]:
        return "what it imports changed"
    counts = [cell.execution_count for cell in old]
    if built.metadata != _metadata(hashes) or counts != list(range(1, len(old) + 1)):
        return "its notebook was run or cleared by hand"
    for cell, executed in zip(new, old, strict=True):
        cell.outputs, cell.execution_count = executed.outputs, executed.execution_count
    return None


def _code(notebook: NotebookNode) -> list[NotebookNode]:
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def _metadata(hashes: dict[str, str]) -> NotebookNode:
    return nbformat.from_dict({**METADATA, "minitron": hashes})


def is_stale(source: Path) -> bool:
    """Return whether what a chapter imports has changed since its notebook was executed."""
    built = nbformat.read(notebook_path(source), as_version=4)
    return built.metadata["minitron"]["imports"] != hash_of_imports(built)


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
    for cell in after_predictions(notebook):
        cell.metadata.jupyter = NotebookNode(outputs_hidden=True)
    notebook.metadata = nbformat.from_dict(METADATA)
    notebook.nbformat, notebook.nbformat_minor = 4, 5
    return notebook


def after_predictions(notebook: NotebookNode) -> Iterator[NotebookNode]:
    """The code cells after a "Predict", up to the next text: JupyterLab folds their outputs."""
    waits = answers = False
    for cell in notebook.cells:
        if cell.cell_type == "code":
            waits, answers = False, waits or answers
            if answers:
                yield cell
            continue
        answers = False
        if "**Predict" in cell.source:  # a prompt with its answer below it needs no cell
            waits = "</details>" not in cell.source.rpartition("**Predict")[2]


def execute(notebook: NotebookNode, cwd: Path) -> None:
    """Run every cell in one kernel and keep its outputs."""
    from nbclient import NotebookClient

    client = NotebookClient(
        notebook,
        timeout=120,
        kernel_name="python3",
        record_timing=False,
        coalesce_streams=True,
        resources={"metadata": {"path": str(cwd)}},
    )
    client.execute()


def require_style(notebook: NotebookNode) -> None:
    """Raise ChapterError for a long code cell, a second H1 or a heading that skips a level."""
    level = 0
    for position, cell in enumerate(notebook.cells):
        if cell.cell_type == "code":
            lines = lines_without_imports(cell.source)
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


def lines_without_imports(source: str) -> int:
    """Count a cell's lines, those of its imports left out: they are read once, if at all."""
    imports = [
        node for node in parse_cell(source).body if isinstance(node, ast.Import | ast.ImportFrom)
    ]
    return len(source.splitlines()) - sum(node.end_lineno - node.lineno + 1 for node in imports)


def compare(expected: NotebookNode, notebook: NotebookNode) -> None:
    """Raise ChapterError at the first difference of prose, code, ids, tags or metadata.

    Also for a cell that was not executed in order, lost its outputs, failed, or names a path of
    the machine it ran on.
    """
    metadata = dict(notebook.metadata)
    hashes = metadata.pop("minitron", {})
    if metadata != expected.metadata:
        raise ChapterError(f"the notebook's metadata is {metadata}, not as built")
    if hashes.get("cells") != hash_of_cells(expected) or "imports" not in hashes:
        raise ChapterError("the notebook was executed from other cells: build again")
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
        if REFUTED in str(output):
            raise ChapterError(
                f"cell {position}: a caption claims what its measurement does not "
                "show: build again on an idle machine, or claim less"
            )
        for place in (str(ROOT), str(Path.home())):
            if place in str(output):
                raise ChapterError(f"cell {position}: its output names {place}")


def speaks(source: str) -> bool:
    """Whether a cell prints or shows something itself, outside the functions it defines."""
    pending: list[ast.AST] = [parse_cell(source)]
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
                images = [
                    o.data["image/png"] for o in cell.outputs if "image/png" in o.get("data", {})
                ]
                if len(images) != 1:
                    raise ChapterError(f"cell {position}: {tag} needs one image, has {len(images)}")
                name = f"{chapter.split('_')[0]}_{tag.removeprefix('figure-')}.png"
                found[ASSETS / name] = base64.b64decode(images[0])
    return found


if __name__ == "__main__":
    sys.exit(main())
