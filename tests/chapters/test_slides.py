"""A deck says nothing that its chapter has not computed, and needs nothing but itself."""

import json
import math
import re

import pytest

from tools import build_slides
from tools.build_chapters import ROOT
from tools.build_slides import (
    SlideError,
    first_remote_resource,
    inline_images,
    insert_outputs,
    insert_sources,
    read_notebook,
)

DECKS = sorted(build_slides.SLIDES.glob("*.md"))
# Numbers that somebody must have computed or read: 0.78, 6,834, 847; not 16, 2 or 1/B.
NUMBER = re.compile(r"(?<![\w.])(?:\d{1,3}(?:,\d{3})+|\d+\.\d+(?:e\+\d+)?|\d{3,})(?![\w.]*\d)")


def slides_of(deck):
    """The deck's slides as Markdown, without the front matter."""
    return re.split(r"^---$", deck.read_text(), flags=re.MULTILINE)[2:]


@pytest.mark.parametrize("deck", DECKS, ids=lambda path: path.stem)
def test_every_number_of_a_deck_stands_in_its_notebook(deck):
    notebook = read_notebook(ROOT / "chapters" / f"{deck.stem}.ipynb")
    for cell in notebook["cells"]:
        for output in cell.get("outputs", []):
            output.get("data", {}).pop("image/png", None)
    known = set(NUMBER.findall(re.sub(r'\\n|\\"', " ", json.dumps(notebook["cells"]))))

    text = re.sub(r"!\[w:\d+", "", "".join(slides_of(deck)))
    quoted = NUMBER.findall(text)
    assert len(quoted) > 10
    assert [number for number in quoted if number not in known] == []


@pytest.mark.parametrize("deck", DECKS, ids=lambda path: path.stem)
def test_every_slide_has_a_title_a_note_with_minutes_and_one_exhibit(deck):
    slides = slides_of(deck)
    assert 10 <= len(slides) <= 15
    for slide in slides:
        title = re.search(r"^# (.+)$", slide, re.MULTILINE)
        assert title, slide
        shown = re.sub(r"<!--.*?-->", "", slide, flags=re.DOTALL)
        shown = insert_sources(shown)
        code = re.findall(r"^```python\n(.*?)^```$", shown, re.DOTALL | re.MULTILINE)
        assert len(code) + len(re.findall(r"^!\[", shown, re.MULTILINE)) <= 1, title[1]
        assert all(len(block.splitlines()) <= 12 for block in code), title[1]
        notes = re.findall(r"<!--(.*?)-->", slide, re.DOTALL)
        assert any(re.search(r"\d+ minutes", note) for note in notes), title[1]


WIDTH, HEIGHT = 1082, 612  # pixels: of a line in its box; of what a slide shows, title included
FONTS = {None: (27, 37.8), "wide": (22, 30.8)}
"""Pixels of the letters and of a line, by a slide's class in theme.css."""


def room_taken(slide, notebook):
    """Pixels: the longest line of code or output, and the height if the slide has no figure."""
    shown = re.sub(r"<!--.*?-->", "", slide, flags=re.DOTALL)
    shown = insert_outputs(insert_sources(shown), notebook)
    blocks = re.findall(r"^```\w*\n(.*?)^```$", shown, re.DOTALL | re.MULTILINE)
    lines = [line for block in blocks for line in block.splitlines()]
    title = re.search(r"^# (.+)$", shown, re.MULTILINE)[1]
    is_of = re.search(r"<!-- _class: (wide) -->", slide)
    letter, line_height = FONTS[is_of and is_of[1]]
    width = 0.602 * letter * max(map(len, lines), default=0)
    height = 20 + 48 * math.ceil(len(title) / 50) + 52 * len(blocks) + line_height * len(lines)
    return width, 0 if "![" in shown or not blocks else height


@pytest.mark.parametrize("deck", DECKS, ids=lambda path: path.stem)
def test_no_code_or_output_leaves_its_box_or_the_slide(deck):
    notebook = read_notebook(ROOT / "chapters" / f"{deck.stem}.ipynb")
    for slide in slides_of(deck):
        width, height = room_taken(slide, notebook)
        assert width <= WIDTH and height <= HEIGHT, (width, height, slide)


@pytest.mark.parametrize("deck", DECKS, ids=lambda path: path.stem)
def test_code_is_large_and_an_output_alone_is_a_table(deck):
    """Code has 20 points; two or three printed lines need something to look at beside them."""
    notebook = read_notebook(ROOT / "chapters" / f"{deck.stem}.ipynb")
    for slide in slides_of(deck):
        shown = insert_outputs(
            insert_sources(re.sub(r"<!--.*?-->", "", slide, flags=re.DOTALL)), notebook
        )
        has_code = "```python" in shown
        assert not (has_code and ("_class: wide" in slide or "<style" in slide)), slide
        printed = re.findall(r"^```text\n(.*?)^```$", shown, re.DOTALL | re.MULTILINE)
        if printed and not has_code and "![" not in shown and "\n|" not in shown:
            assert "".join(printed).count("\n") >= 5, slide


@pytest.mark.parametrize("deck", DECKS, ids=lambda path: path.stem)
def test_every_figure_of_a_deck_exists_and_is_inlined(deck):
    markdown = deck.read_text()
    inlined = inline_images(markdown, deck.parent)
    num_figures = len(re.findall(r"^!\[", markdown, re.MULTILINE))
    assert inlined.count("](data:image/png;base64,") == num_figures >= 5
    assert ".png)" not in inlined


def test_a_missing_drawing_is_one_line():
    with pytest.raises(SystemExit, match=r"there is no drawing teaching.slides:none"):
        inline_images("![w:100 none](teaching.slides:none)", build_slides.SLIDES)


def test_a_missing_figure_is_one_line():
    with pytest.raises(SystemExit, match=r"slides/assets/none.png is missing"):
        inline_images("![w:100 none](assets/none.png)", build_slides.SLIDES)


FRONT = "---\nmarp: true\n---\n# One\n\n---\n# Two\n\n"


def notebook_of(*outputs):
    cell = {"metadata": {"tags": ["output-trap"]}, "outputs": list(outputs)}
    return {"cells": [{"metadata": {}}, cell]}


def test_an_output_is_shown_as_it_was_printed():
    notebook = notebook_of({"output_type": "stream", "text": ["a  1\n", "b  2\n"]})
    assert insert_outputs("x\n\n@output trap\n", notebook) == "x\n\n```text\na  1\nb  2\n```\n"


@pytest.mark.parametrize(
    ("notebook", "message"),
    [
        (notebook_of(), "slide 2: the chapter's cell 1, tagged output-trap, has printed nothing"),
        (notebook_of({"output_type": "stream", "text": [" \n"]}), "has printed nothing"),
        (notebook_of({"output_type": "display_data", "data": {}}), "has printed nothing"),
        (notebook_of({"output_type": "error", "ename": "KeyError"}), "failed with KeyError"),
        ({"cells": []}, "slide 2: the chapter has no cell tagged output-trap"),
    ],
    ids=["cleared", "blank", "a figure alone", "an error", "no cell"],
)
def test_an_output_that_is_not_there_names_slide_and_cell(notebook, message):
    with pytest.raises(SlideError, match=message):
        insert_outputs(f"{FRONT}@output trap\n", notebook)


def test_a_deck_is_built_from_the_committed_notebook_not_from_a_cleared_one(
    tmp_path, monkeypatch, capsys
):
    (tmp_path / "chapters").mkdir()
    (tmp_path / "slides").mkdir()
    path, deck = tmp_path / "chapters" / "ch99.ipynb", tmp_path / "slides" / "ch99.md"
    committed = json.dumps(notebook_of({"output_type": "stream", "text": "a  1\n"}))
    path.write_text(json.dumps(notebook_of()))  # as JupyterLab saves it amid "Run All"
    deck.write_text(f"{FRONT}@output trap\n")
    built = []
    for name in ("ROOT", "BUILD"):
        monkeypatch.setattr(build_slides, name, tmp_path)

    def marp(source, browser, *arguments):
        built.append(source)
        arguments[-1].write_text("")

    monkeypatch.setattr(build_slides, "marp", marp)
    monkeypatch.setattr(build_slides, "text_in_git", lambda _: committed)
    build_slides.build_deck(deck, "chromium", images=False)
    assert "```text\na  1\n```" in built[0]
    assert "chapters/ch99.ipynb: the committed version is used" in capsys.readouterr().err

    monkeypatch.setattr(build_slides, "text_in_git", lambda _: None)
    with pytest.raises(SystemExit) as end:
        build_slides.build_deck(deck, "chromium", images=False)
    assert str(end.value) == (
        "slides/ch99.md: slide 2: the chapter's cell 1, tagged output-trap, "
        "has printed nothing: run `make chapters`"
    )
    assert "not in git, so the working file is used" in capsys.readouterr().err

    path.write_text("")
    with pytest.raises(SystemExit, match="ch99.md: chapters/ch99.ipynb is no notebook"):
        build_slides.build_deck(deck, "chromium", images=False)


@pytest.mark.parametrize("deck", DECKS, ids=lambda path: path.stem)
def test_every_output_of_a_deck_is_in_its_notebook(deck):
    notebook = read_notebook(ROOT / "chapters" / f"{deck.stem}.ipynb")
    assert "@output" not in insert_outputs(deck.read_text(), notebook)


def test_a_function_is_shown_without_its_docstring_and_types():
    shown = insert_sources("a\n\n@source minitron.step:learning_rate\n\nb\n")
    names = "step, peak, minimum, warmup_steps, total_steps"
    assert shown.startswith(f"a\n\n```python\ndef learning_rate({names}):\n")
    assert "if step < warmup_steps:" in shown and '"""' not in shown
    assert shown.endswith("```\n\nb\n")


def with_long_lines(first, second):
    # A comment that is longer than a slide is wide goes on in the next line, as here it must.
    return first.something.very_long(second).and_more(first, second)


def test_code_is_broken_to_the_columns_of_a_slide():
    shown = insert_sources("@source tests.chapters.test_slides:with_long_lines")
    assert max(map(len, shown.splitlines())) <= build_slides.CODE_COLUMNS
    assert "wide goes on in the\n    # next line, as here it must.\n    return" in shown
    assert ".and_more(\n        first, second\n    )" in shown


def documented(a: int, *rest: str, b: float = 0.5, **options: int) -> int:
    """Return a."""
    return a


def test_every_kind_of_parameter_is_named():
    shown = insert_sources("@source tests.chapters.test_slides:documented")
    assert shown == "```python\ndef documented(a, *rest, b, **options):\n    return a\n```"


def bare_function():
    first = 1
    return first


def test_a_function_without_a_docstring_keeps_its_first_line():
    shown = insert_sources("@source tests.chapters.test_slides:bare_function")
    assert shown == "```python\ndef bare_function():\n    first = 1\n    return first\n```"


@pytest.mark.parametrize("name", ["minitron.step:train_stepp", "minitron.stepp:train_step"])
def test_a_function_that_is_gone_names_its_slide(name):
    with pytest.raises(SlideError, match=f"slide 2: no source of {name}"):
        insert_sources(f"{FRONT}@source {name}\n")


@pytest.mark.parametrize(
    ("html", "loads"),
    [
        ('<a href="https://arxiv.org/abs/1812.06162">paper</a>', False),
        ('<img src="data:image/png;base64,aaaa">', False),
        ("<!-- see https://example.org -->", False),
        ('<svg xmlns="http://www.w3.org/2000/svg"></svg>', False),
        ('<img alt="x" src="https://example.org/x.png">', True),
        ('<script src="http://example.org/x.js"></script>', True),
        ('<link rel="stylesheet" href="https://example.org/x.css">', True),
        ("<style>@import 'https://example.org/x.css';</style>", True),
        ("<style>a { background: url(https://example.org/x.png) }</style>", True),
        ("<style>@font-face { src: url('http://example.org/x.woff') }</style>", True),
    ],
)
def test_what_counts_as_loaded_from_the_network(html, loads):
    assert (first_remote_resource(html) is not None) == loads
