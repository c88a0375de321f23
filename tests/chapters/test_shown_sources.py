"""What a chapter shows of the package's source is what the package has, and where it has it."""

import ast
import inspect
from unittest.mock import patch

import pytest

from teaching.lab import show_source
from tools import build_chapters
from tools.committed import committed_text

SOURCES = build_chapters.chapter_sources([])


def shown_sources(source) -> list[tuple[str, str, str]]:
    """Each object whose source a cell shows: its name, what would be shown now, and what is."""
    text = committed_text(build_chapters.notebook_path(source))
    imported, found = {}, []
    for cell in build_chapters.nbformat.reads(text, as_version=4).cells:
        if cell.cell_type != "code":
            continue
        names, now = [], []
        for node in ast.walk(ast.parse(plain_python(cell.source))):
            if isinstance(node, ast.Import | ast.ImportFrom):
                exec(ast.unparse(node), imported)
            elif isinstance(node, ast.Call) and ast.unparse(node.func) == "show_source":
                part = {key.arg: ast.literal_eval(key.value) for key in node.keywords}
                names += map(ast.unparse, node.args)
                now += displayed(*(eval(ast.unparse(a), imported) for a in node.args), **part)
        if names:
            shown = [
                output.data["text/markdown"]
                for output in cell.outputs
                if "text/markdown" in output.get("data", {})
            ]
            found += zip(names, now, shown, strict=True)
    return found


def displayed(*objects, **part) -> list[str]:
    """Return what `show_source` displays of objects, as Markdown."""
    with patch("IPython.display.display") as display:
        show_source(*objects, **part)
    return [call.args[0].data for call in display.call_args_list]


def plain_python(source: str) -> str:
    return "\n".join(line for line in source.split("\n") if not line.startswith(("%", "!")))


@pytest.mark.parametrize("source", SOURCES, ids=lambda path: path.stem)
def test_a_source_is_that_of_the_package(source):
    stale = [name for name, now, shown in shown_sources(source) if now != shown]
    assert not stale, f"changed since {source.stem} was built: {', '.join(stale)}"


def test_every_chapter_shows_some():
    assert sum(len(shown_sources(source)) for source in SOURCES) > 30


def test_a_source_has_its_file_and_line_above():
    [shown] = displayed(show_source)
    first = inspect.getsourcelines(show_source)[1]
    link = f"[teaching/lab/__init__.py, line {first}](../teaching/lab/__init__.py#L{first})"
    assert shown.startswith(f"{link}\n\n```python\ndef show_source(")
