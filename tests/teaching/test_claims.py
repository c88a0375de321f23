"""A caption says what a measurement shows; where it does not, it says so, and is not published."""

import nbformat
import pytest
from nbformat.v4 import new_output

from teaching.claims import REFUTED, claim
from tools.build_chapters import ChapterError, chapter_sources, compare, notebook_path, read_source
from tools.committed import committed_text


def test_a_claim_that_holds_is_said_as_it_is():
    assert claim(True, "Bucketed is the fastest.") == "Bucketed is the fastest."


def test_a_claim_that_does_not_hold_names_the_load_and_what_was_expected():
    said = claim(False, "Bucketed is the fastest.")
    assert said.startswith(REFUTED) and "a load of " in said
    assert said.endswith("Expected: Bucketed is the fastest.")


def test_a_notebook_with_a_refuted_caption_is_refused():
    source = chapter_sources(["ch04"])[0]
    notebook = nbformat.reads(committed_text(notebook_path(source)), as_version=4)
    cell = next(cell for cell in notebook.cells if 'draw("bucketed"' in cell.source)
    cell.outputs = [new_output("display_data", {"text/plain": claim(False, "It is faster.")})]
    with pytest.raises(ChapterError, match="claims what its measurement does not show"):
        compare(read_source(source), notebook)
