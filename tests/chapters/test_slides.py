"""A deck says nothing that its chapter has not computed, and needs nothing but itself."""

import json
import re

import pytest

from tools import build_slides
from tools.build_chapters import ROOT
from tools.build_slides import (
    first_remote_resource,
    inline_images,
    insert_outputs,
    insert_sources,
)

DECKS = sorted(build_slides.SLIDES.glob("*.md"))
# Numbers that somebody must have computed or read: 0.78, 6,834, 847; not 16, 2 or 1/B.
NUMBER = re.compile(r"(?<![\w.])(?:\d{1,3}(?:,\d{3})+|\d+\.\d+(?:e\+\d+)?|\d{3,})(?![\w.]*\d)")


def slides_of(deck):
    """The deck's slides as Markdown, without the front matter."""
    return re.split(r"^---$", deck.read_text(), flags=re.MULTILINE)[2:]


@pytest.mark.parametrize("deck", DECKS, ids=lambda path: path.stem)
def test_every_number_of_a_deck_stands_in_its_notebook(deck):
    notebook = json.loads((ROOT / "chapters" / f"{deck.stem}.ipynb").read_text())
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


@pytest.mark.parametrize("deck", DECKS, ids=lambda path: path.stem)
def test_every_figure_of_a_deck_exists_and_is_inlined(deck):
    markdown = deck.read_text()
    inlined = inline_images(markdown, deck.parent)
    assert inlined.count("](data:image/png;base64,") == markdown.count(".png)") > 0
    assert ".png)" not in inlined


def test_a_missing_figure_is_one_line():
    with pytest.raises(SystemExit, match=r"slides/assets/none.png is missing"):
        inline_images("![w:100 none](assets/none.png)", build_slides.SLIDES)


def test_an_output_is_shown_as_it_was_printed():
    cell = {"metadata": {"tags": ["output-trap"]}, "outputs": [{"text": ["a  1\n", "b  2\n"]}]}
    notebook = {"cells": [{"metadata": {}}, cell]}
    assert insert_outputs("x\n\n@output trap\n", notebook) == "x\n\n```text\na  1\nb  2\n```\n"
    with pytest.raises(SystemExit, match="no cell tagged output-other"):
        insert_outputs("@output other", notebook)


@pytest.mark.parametrize("deck", DECKS, ids=lambda path: path.stem)
def test_every_output_of_a_deck_is_in_its_notebook(deck):
    notebook = json.loads((ROOT / "chapters" / f"{deck.stem}.ipynb").read_text())
    assert "@output" not in insert_outputs(deck.read_text(), notebook)


def test_a_function_is_shown_as_it_is_without_its_docstring():
    shown = insert_sources("a\n\n@source minitron.step:learning_rate\n\nb\n")
    assert shown.startswith("a\n\n```python\ndef learning_rate(\n")
    assert "if step < warmup_steps:" in shown and '"""' not in shown
    assert shown.endswith("```\n\nb\n")


@pytest.mark.parametrize(("html", "loads"), [
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
])
def test_what_counts_as_loaded_from_the_network(html, loads):
    assert (first_remote_resource(html) is not None) == loads
