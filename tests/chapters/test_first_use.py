"""A chapter links the glossary where it first uses one of its terms."""

import re

import pytest
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook

from tools import build_chapters
from tools.chapter_links import ROOT

CHAPTERS = ["ch04", "ch05", "ch06"]
"""Chapters whose first uses are linked: add one when it is."""
SOURCES = [source for source in build_chapters.chapter_sources([]) if source.stem[:4] in CHAPTERS]

TERMS = {
    "rank": r"ranks?",
    "axis": r"axis|axes",
    "collective": r"collectives?",
    "all-reduce": r"all-reduces?",
    "all-gather": r"all-gathers?",
    "reduce-scatter": r"reduce-scatters?",
    "bucket": r"buckets?",
    "global-batch": r"global batch",
    "micro-batch": r"micro-batch(?:es)?",
    "shard": r"shard(?:s|ed|ing)?",
    "partial-sum": r"partial sums?",
    "zero": r"(?-i:ZeRO(?:-\d)?)",
    "activation": r"activations?",
    "training-state": r"training state",
    "optimizer-state": r"optimizer state",
    "master-weights": r"master weights?",
    "recompute": r"recomputation",
    "mfu": r"MFU",
    "oracle": r"oracle",
    "ledger": r"ledger",
    "meter": r"meter",
    "skyline": r"skyline",
    "fake-tensor": r"fake tensors?",
    "dry-run": r"dry runs?",
}
"""Anchors of docs/words.md and what a term looks like in prose.

Left out are words with a plain meaning too, such as group, step, block, stage, and segment: a
chapter links these where it first means the term.
"""
NOT_PROSE = re.compile(
    r"^#+ [^\n]*$"  # a heading
    r"|```.*?```|`[^`]*`|\$[^$]*\$|<[^>]*>"
    r"|(?<!\])\([^()]*\bet al\.[^()]*\)"  # a citation
    r"|\[\*(?!\*)[^\]]*\*\]|(?<!\*)\*[A-Z][^*]*\*(?!\*)",  # a paper's title
    re.MULTILINE | re.DOTALL,
)


def unlinked_first_uses(notebook) -> list[str]:
    """Return what a chapter's prose says before it links the glossary, or without."""
    prose = "\n\n".join(cell.source for cell in notebook.cells if cell.cell_type == "markdown")
    prose = NOT_PROSE.sub(" ", prose)
    unlinked = []
    for anchor, term in TERMS.items():
        use = re.search(rf"(?<![\w/#-])(?:{term})(?![\w-])", prose, re.IGNORECASE)
        if use:
            link = re.match(r"[^\[\]]*\]\([^)]*words\.md#([\w-]+)\)", prose[use.end() :])
            if not link or link[1] != anchor:
                around = prose[max(0, use.start() - 30) : use.end() + 20]
                unlinked.append(f"{anchor}: ...{' '.join(around.split())}...")
    return unlinked


@pytest.mark.parametrize("source", SOURCES, ids=lambda path: path.stem)
def test_the_first_use_of_a_term_links_the_glossary(source):
    assert unlinked_first_uses(build_chapters.read_source(source)) == []


def test_every_term_is_in_the_glossary_as_it_is_written_there():
    words = (ROOT / "docs" / "words.md").read_text("utf-8")
    for anchor, term in TERMS.items():
        assert re.search(rf'<a id="{anchor}"></a>(?:{term})\b', words), anchor


def test_every_chapter_named_exists():
    assert len(SOURCES) == len(CHAPTERS)


@pytest.mark.parametrize(
    ("prose", "unlinked"),
    [
        ("Two [ranks](../docs/words.md#rank) meet. A rank waits.", 0),
        ("Two **[ranks](../docs/words.md#rank)** meet.", 0),
        ("Two [**ranks**](../docs/words.md#rank) meet.", 0),
        ("Two ranks meet. A [rank](../docs/words.md#rank) waits.", 1),
        ("Two ranks meet.", 1),
        ("Two [ranks](../docs/words.md#group) meet.", 1),
        ("Two [ranks](https://example.org) meet.", 1),
        ("Print `rank`, $rank$, and the ranking.", 0),
        ("# The rank\n\nFranks sing.", 0),
        ("Ranks meet.", 1),
        ("# A heading\n\nTwo ranks meet.", 1),
        ("An [all-reduce](../docs/words.md#all-reduce) of a non-all-reduce thing.", 0),
    ],
)
def test_what_counts_as_a_first_use(prose, unlinked):
    notebook = new_notebook(cells=[new_code_cell("rank = 1"), new_markdown_cell(prose)])
    assert len(unlinked_first_uses(notebook)) == unlinked, unlinked_first_uses(notebook)
