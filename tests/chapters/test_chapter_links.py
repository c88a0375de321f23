"""Links of chapters lead to what is there, and the build's additions are in every chapter."""

import re

import pytest

from tools import build_chapters, chapter_links
from tools.chapter_links import LinkError, complete, neighbors

ROOT = chapter_links.ROOT
SOURCES = build_chapters.chapter_sources([])


@pytest.mark.parametrize("source", SOURCES, ids=lambda path: path.stem)
def test_every_relative_link_leads_to_a_file(source):
    for cell in build_chapters.read_source(source).cells:
        if cell.cell_type == "markdown":
            assert not chapter_links.LINK.search(cell.source)
            for link in re.findall(r"\]\((?!https?:)([^)\s#]+)", cell.source):
                assert (ROOT / "chapters" / link).is_file(), link


def test_a_link_to_code_names_the_line_that_defines_it():
    path, line = chapter_links.code("minitron.parallel.data.zero.Zero1").split("#L")
    text = (ROOT / "chapters" / path).read_text().splitlines()[int(line) - 1]
    assert text.startswith("class Zero1")


def test_a_link_to_a_method_an_exercise_a_chapter_and_a_package():
    path, line = chapter_links.code("minitron.measure.ledger.Ledger.__enter__").split("#L")
    assert "def __enter__" in (ROOT / "chapters" / path).read_text().splitlines()[int(line) - 1]
    path, line = chapter_links.exercise("6.2").split("#L")
    assert "# Exercise 6.2 |" in (ROOT / "chapters" / path).read_text().splitlines()[int(line) - 1]
    assert chapter_links.chapter_file("5") == "ch05_ring_all_reduce.ipynb"
    assert chapter_links.code("minitron.checkpoint") == "../minitron/checkpoint/__init__.py"
    assert chapter_links.word("micro-batch") == "../docs/words.md#micro-batch"


@pytest.mark.parametrize(
    ("resolve", "name"),
    [
        (chapter_links.code, "minitron.parallel.data.zero.Zero9"),
        (chapter_links.code, "elsewhere.zero"),
        (chapter_links.exercise, "6.9"),
        (chapter_links.chapter_file, "99"),
        (chapter_links.word, "no-such-word"),
    ],
)
def test_a_name_that_leads_nowhere_is_refused(resolve, name):
    with pytest.raises(LinkError):
        resolve(name)


def test_the_build_adds_neighbors_and_boxes():
    fold = "<details><summary>Answer</summary>\n\nFour.\n\n- Why?\n\n</details>"
    notebook = build_chapters.nbformat.v4.new_notebook(
        cells=[
            build_chapters.nbformat.v4.new_markdown_cell(f"# 5. Ring\n\nText.\n\n{fold}"),
            build_chapters.nbformat.v4.new_code_cell("print(1)"),
        ]
    )
    complete(notebook, "ch05_ring_all_reduce")
    first, _, last = (cell.source for cell in notebook.cells)
    assert first.startswith("# 5. Ring\n\n[← Chapter 4](ch04_data_parallel.ipynb) · [Exercises]")
    assert "[Chapter 6 →](ch06_zero.ipynb)" in first and last == neighbors("ch05_ring_all_reduce")
    quoted = "<details><summary>Answer</summary>\n\n> Four.\n>\n> - Why?\n\n</details>"
    assert first.endswith(quoted), "an answer is marked as a quotation on GitHub, too"
    assert "←" not in neighbors("ch01_single_gpu")
    assert "→" not in neighbors(SOURCES[-1].stem)
