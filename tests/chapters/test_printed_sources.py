"""What a chapter shows of the package's source is what the package has."""

import ast
import inspect

import pytest

from tools import build_chapters
from tools.committed import committed_text

SOURCES = build_chapters.chapter_sources([])


def printed_sources(source) -> list[tuple[str, str, str]]:
    """Each object whose source a cell prints: its name, its source now, and what the cell shows."""
    text = committed_text(build_chapters.notebook_path(source))
    imported, found = {}, []
    for cell in build_chapters.nbformat.reads(text, as_version=4).cells:
        if cell.cell_type != "code":
            continue
        for node in ast.walk(ast.parse(plain_python(cell.source))):
            if isinstance(node, ast.Import | ast.ImportFrom):
                exec(ast.unparse(node), imported)
            elif isinstance(node, ast.Call) and ast.unparse(node.func) == "inspect.getsource":
                name = ast.unparse(node.args[0])
                shown = "".join(output.get("text", "") for output in cell.outputs)
                found.append((name, inspect.getsource(eval(name, imported)), shown))
    return found


def plain_python(source: str) -> str:
    return "\n".join(line for line in source.split("\n") if not line.startswith(("%", "!")))


@pytest.mark.parametrize("source", SOURCES, ids=lambda path: path.stem)
def test_a_printed_source_is_that_of_the_package(source):
    stale = [name for name, now, shown in printed_sources(source) if now.strip("\n") not in shown]
    assert not stale, f"changed since {source.stem} was built: {', '.join(stale)}"


def test_every_chapter_prints_some():
    assert sum(len(printed_sources(source)) for source in SOURCES) > 30
