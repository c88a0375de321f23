"""The main path of each chapter is short enough, and its minutes are what a walk takes."""

import re

import pytest
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook, new_output

from tools import build_chapters, minutes
from tools.minutes import MAX_CELLS, MAX_MINUTES, SECONDS, main_path, seconds, stated, walked

SOURCES = build_chapters.chapter_sources([])


@pytest.mark.parametrize("source", SOURCES, ids=lambda path: path.stem)
def test_the_main_path_can_be_walked(source):
    walk = walked(source)
    assert walk.cells <= MAX_CELLS and walk.minutes <= MAX_MINUTES, walk


@pytest.mark.parametrize("source", SOURCES, ids=lambda path: path.stem)
def test_the_stated_minutes_are_those_of_the_walk(source):
    readme = (minutes.ROOT / "README.md").read_text()
    row = re.search(rf"chapters/{source.stem}\.ipynb.*\| (\d+) \+ \d+ \|$", readme, re.MULTILINE)
    assert stated(source) == walked(source).minutes == int(row[1]), "tools/minutes.py --write"


@pytest.mark.parametrize("source", SOURCES, ids=lambda path: path.stem)
def test_a_title_has_its_chapter_s_number(source):
    title = next(line for line in source.read_text().splitlines() if line.startswith("# # "))
    assert title.startswith(f"# # {int(source.stem[2:4])}. "), title


def notebook(*texts: str):
    return new_notebook(cells=[new_markdown_cell(text) for text in texts])


@pytest.mark.parametrize(
    ("texts", "kept"),
    [
        (["# 1. A", "## Further: depth", "more", "## 2. On"], [0, 3]),
        (["# 1. A", "## 7. Further: depth", "### A part of it", "# B"], [0, 3]),
        (["# 1. A", "## 2. B", "### Further: depth", "more", "### C"], [0, 1, 4]),
        (["# 1. A", "### Further: depth", "## 3. On", "text"], [0, 2, 3]),
        (["# 1. A", "## Further: one", "## Further: two", "more"], [0]),
        (["# 1. A", "## Furthermore", "text"], [0, 1, 2]),
    ],
)
def test_sections_marked_further_are_off_the_main_path(texts, kept):
    assert [cell.source for cell in main_path(notebook(*texts))] == [texts[i] for i in kept]


def test_prose_and_predictions_take_time():
    text = notebook("one two [three](https://a.b/c) <b>four</b>\n\n**Predict.** five").cells[0]
    assert seconds(text) == pytest.approx(6 * SECONDS["word"] + SECONDS["prediction"])


def test_code_outputs_sources_and_figures_take_time():
    code = new_code_cell("import x\na = 1\nprint(a)", outputs=[new_output("stream", text="1\n2\n")])
    expected = SECONDS["line of an import"] + 2 * SECONDS["line of code"]
    assert seconds(code) == pytest.approx(expected + 2 * SECONDS["line of output"])

    shown = "[a.py, line 1](../a.py#L1)\n\n```python\ndef f(x):\n    pass\n```"
    code = new_code_cell(
        "show_source(f)",
        outputs=[
            new_output("display_data", {"text/markdown": shown, "text/plain": "<Markdown object>"})
        ],
    )
    expected = SECONDS["line of code"] + SECONDS["line of the package's source"]
    expected += SECONDS["line of one word"]
    assert seconds(code) == pytest.approx(expected)

    code.outputs = [new_output("display_data", {"image/png": "", "text/plain": "a b c"})]
    assert seconds(code) == pytest.approx(SECONDS["line of code"] + SECONDS["figure"])


def test_minutes_are_rounded_up_to_five():
    assert minutes.Walk(1, 40 * 60).minutes == 40
    assert minutes.Walk(1, 40 * 60 + 1).minutes == 45


def test_minutes_are_written_into_the_source_and_the_readme(tmp_path, monkeypatch):
    source = tmp_path / "ch01_small.py"
    source.write_text("# # 1. Small\n#\n# **45 minutes. No GPU.**\n# text of 45 minutes\n")
    (tmp_path / "README.md").write_text("| [1 Small](chapters/ch01_small.ipynb) | 45 + 75 |\n")
    monkeypatch.setattr(minutes, "ROOT", tmp_path)
    minutes.write(source, 30)
    assert stated(source) == 30 and "text of 45" in source.read_text()
    assert (tmp_path / "README.md").read_text().endswith("| 30 + 75 |\n")
