"""What a cell has put out is read before the next heading."""

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook, new_output

from tools import build_chapters
from tools.committed import committed_text

CHAPTERS = ["ch07", "ch08", "ch09"]
"""The chapters that keep the rule."""


def unread(notebook: nbformat.NotebookNode) -> list[str]:
    """Return the first lines of cells whose output is followed by a heading; `check` may be."""
    pairs = zip(notebook.cells, notebook.cells[1:], strict=False)
    return [
        cell.source.splitlines()[0]
        for cell, after in pairs
        if cell.cell_type == "code"
        and cell.outputs
        and not cell.source.startswith("check(")
        and after.cell_type == "markdown"
        and after.source.lstrip().startswith("#")
    ]


@pytest.mark.parametrize(
    "source", build_chapters.chapter_sources(CHAPTERS), ids=lambda path: path.stem
)
def test_no_output_is_followed_by_a_heading(source):
    text = committed_text(build_chapters.notebook_path(source))
    assert unread(nbformat.reads(text, as_version=4)) == []


@pytest.mark.parametrize(
    ("code", "has_output", "text", "found"),
    [
        ("print(1)", True, "## 2. Next", ["print(1)"]),
        ("print(1)\nprint(2)", True, "### A part", ["print(1)"]),
        ("print(1)", True, "It prints 1.\n\n## 2. Next", []),
        ("x = 1", False, "## 2. Next", []),
        ('check("1.1")', True, "## Further reading", []),
    ],
)
def test_an_output_that_nobody_reads_is_found(code, has_output, text, found):
    outputs = [new_output("stream", text="1\n")] if has_output else []
    cells = [new_code_cell(code, outputs=outputs), new_markdown_cell(text)]
    assert unread(new_notebook(cells=cells)) == found
