"""The committed notebooks are their sources, executed; and the check that says so can fail.

Their cells are run by nbval, which collects chapters/*.ipynb.
"""

import base64
import copy
import symtable

import pytest

from tests.tiers import tiered
from tools import build_chapters
from tools.build_chapters import ChapterError, check_chapter, compare, read_source, require_style
from tools.committed import committed_text
from tools.imports import without_magics

SOURCES = build_chapters.chapter_sources([])
FIRST = SOURCES[0]


@pytest.fixture(scope="module")
def committed():
    text = committed_text(build_chapters.notebook_path(FIRST))
    return build_chapters.nbformat.reads(text, as_version=4)


@pytest.fixture
def notebook(committed):
    return copy.deepcopy(committed)


def first(notebook, holds):
    return next(cell for cell in notebook.cells if holds(cell))


def is_speaking(cell):
    return cell.cell_type == "code" and build_chapters.speaks(cell.source)


@pytest.mark.parametrize("source", SOURCES, ids=lambda path: path.stem)
def test_the_committed_notebook_is_its_source_executed(source):
    check_chapter(source, read=committed_text)


@pytest.mark.parametrize("source", SOURCES, ids=lambda path: path.stem)
def test_every_figure_has_an_alternative_text(source):
    text = committed_text(build_chapters.notebook_path(source))
    notebook = build_chapters.nbformat.reads(text, as_version=4)
    images = [
        output
        for cell in notebook.cells
        if cell.cell_type == "code"
        for output in cell.outputs
        if "image/png" in output.get("data", {})
    ]
    assert images
    assert all(image.metadata["image/png"]["alt"] for image in images)


@pytest.mark.parametrize("source", SOURCES, ids=lambda path: path.stem)
def test_no_cell_of_every_run_needs_one_that_is_exhaustive(source):
    assert needs_exhaustive(read_source(source)) == []


def test_a_cell_that_needs_an_exhaustive_one_is_found(notebook):
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"][:4]
    for cell, text in zip(
        cells,
        ("a = b = 0", "a = c = 1", "print(b); b = a", "def f(e):\n    return b + c"),
        strict=True,
    ):
        cell.source, cell.metadata = text, {}
    cells[1].metadata["tags"] = ["exhaustive"]
    notebook.cells = cells
    assert needs_exhaustive(notebook) == ["a", "c"]


def needs_exhaustive(notebook) -> list[str]:
    """Names that a cell reads whose last value is from a cell that `make test` leaves out."""
    last_left_out, found = {}, []  # by name
    for cell in notebook.cells:
        if cell.cell_type != "code":
            continue
        left_out = "exhaustive" in cell.metadata.get("tags", ())
        table = symtable.symtable(without_magics(cell.source), "cell", "exec")
        made = {
            symbol.get_name()
            for symbol in table.get_symbols()
            if symbol.is_assigned() or symbol.is_imported()
        }
        if not left_out:
            found += sorted(name for name in read_from(table) - made if last_left_out.get(name))
        last_left_out.update(dict.fromkeys(made, left_out))
    return found


def read_from(table: symtable.SymbolTable) -> set[str]:
    """Names of the notebook that a cell or a function in it reads."""
    own = {
        symbol.get_name()
        for symbol in table.get_symbols()
        if symbol.is_referenced() and (symbol.is_global() or table.get_type() == "module")
    }
    return own.union(*map(read_from, table.get_children()))


MOST_COLUMNS = 80
"""A wider line wraps in JupyterLab beside its sidebar, and a wrapped table cannot be read."""


@pytest.mark.parametrize("source", SOURCES, ids=lambda path: path.stem)
def test_what_a_chapter_prints_fits_its_columns(source):
    text = committed_text(build_chapters.notebook_path(source))
    assert too_wide(build_chapters.nbformat.reads(text, as_version=4)) == []


def too_wide(notebook) -> list[str]:
    """Return the printed lines over MOST_COLUMNS."""
    return [
        line
        for cell in notebook.cells
        if cell.cell_type == "code"
        for output in cell.outputs
        for line in output.get("text", "").splitlines()
        if len(line) > MOST_COLUMNS
    ]


def test_a_wide_table_is_found(notebook):
    cell = first(notebook, lambda cell: cell.cell_type == "code")
    cell.outputs = [build_chapters.nbformat.v4.new_output("stream", text=f"ab\n{81 * 'x'}\n")]
    assert too_wide(notebook) == [81 * "x"]


def test_no_figure_lies_about_that_no_chapter_makes_any_more():
    made = {
        name
        for source in SOURCES
        for name in build_chapters.figures(
            source.stem,
            build_chapters.nbformat.reads(
                committed_text(build_chapters.notebook_path(source)), as_version=4
            ),
        )
    }
    assert set(build_chapters.ASSETS.glob("*.png")) == made


def test_ids_are_the_same_every_time_and_unique():
    ids = [cell.id for cell in read_source(FIRST).cells]
    assert ids == [cell.id for cell in read_source(FIRST).cells]
    assert len(set(ids)) == len(ids)


# Each of these is done to a copy of the committed notebook, and the check must name it


def strip_everything(notebook):
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.outputs, cell.execution_count = [], None


def strip_one_output(notebook):
    first(notebook, is_speaking).outputs = []


def edit_code(notebook):
    first(notebook, is_speaking).source += "\nprint(1)"


def edit_prose(notebook):
    notebook.cells[0].source += "!"


def renumber(notebook):
    first(notebook, is_speaking).execution_count += 1


def drop_a_tag(notebook):
    first(notebook, lambda cell: "tags" in cell.metadata).metadata.pop("tags")


def change_an_id(notebook):
    notebook.cells[3].id = "0123456789ab"


def add_widgets(notebook):
    notebook.metadata["widgets"] = {"application/vnd.jupyter.widget-state+json": {}}


def drop_its_hashes(notebook):
    notebook.metadata.pop("minitron")


def hash_other_cells(notebook):
    notebook.metadata["minitron"]["cells"] = 64 * "0"


def add_timing(notebook):
    notebook.cells[1].metadata["execution"] = {"iopub.execute_input": "2025-01-01T00:00:00Z"}


def add_a_cell(notebook):
    notebook.cells.append(copy.deepcopy(notebook.cells[0]))


def leave_an_error(notebook):
    error = {"output_type": "error", "ename": "ValueError", "evalue": "no", "traceback": []}
    first(notebook, is_speaking).outputs.append(build_chapters.nbformat.from_dict(error))


def name_a_path(notebook):
    text = {"output_type": "stream", "name": "stdout", "text": f"{build_chapters.ROOT}/x\n"}
    first(notebook, is_speaking).outputs.append(build_chapters.nbformat.from_dict(text))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (strip_everything, "execution count None"),
        (strip_one_output, "prints or shows, yet has no output"),
        (edit_code, "source differs"),
        (edit_prose, "cell 0: source differs"),
        (renumber, "execution count"),
        (drop_a_tag, "metadata differs"),
        (change_an_id, "cell 3: id differs"),
        (add_widgets, "metadata is"),
        (drop_its_hashes, "executed from other cells"),
        (hash_other_cells, "executed from other cells"),
        (add_timing, "cell 1: metadata differs"),
        (add_a_cell, "cells, its source"),
        (leave_an_error, "failed: ValueError"),
        (name_a_path, "its output names"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_the_check_names_a_damaged_notebook(notebook, damage, message):
    compare(read_source(FIRST), notebook)  # undamaged it passes
    damage(notebook)
    with pytest.raises(ChapterError, match=message):
        compare(read_source(FIRST), notebook)


def test_a_tagged_figure_is_the_one_among_the_slides(notebook, tmp_path, monkeypatch):
    figures = build_chapters.figures(FIRST.stem, notebook)
    assert figures
    for path, image in figures.items():
        assert path.read_bytes() == image

    monkeypatch.setattr(build_chapters, "ASSETS", tmp_path)  # where none of them is
    with pytest.raises(ChapterError, match="is not the notebook's figure"):
        check_chapter(FIRST, read=committed_text)


def test_a_figure_tag_needs_an_image(notebook):
    cell = first(notebook, lambda cell: "figure-" in str(cell.metadata.get("tags")))
    cell.outputs = [output for output in cell.outputs if "image/png" not in output.get("data", {})]
    with pytest.raises(ChapterError, match="needs one image, has 0"):
        build_chapters.figures(FIRST.stem, notebook)


@pytest.mark.parametrize(
    ("cells", "message"),
    [
        ("# %% [markdown]\n# ## No title", "level 2 after 0"),
        ("# %% [markdown]\n# # A\n#\n# # B", "level 1 after 1"),
        ("# %% [markdown]\n# # A\n#\n# ### B", "level 3 after 1"),
        ("# %% [markdown]\n# # A\n\n# %%\n" + "a = 1\n" * 16, "has 16 lines, at most 15"),
    ],
)
def test_the_style_of_a_source_is_checked(tmp_path, cells, message):
    source = tmp_path / "ch99.py"
    source.write_text(cells)
    with pytest.raises(ChapterError, match=message):
        require_style(read_source(source))


@pytest.mark.parametrize("times", tiered([1, 2]))
def test_a_chapter_is_executed_with_fixed_metadata(times, tmp_path, monkeypatch):
    folder = tmp_path / "chapters" / "source"
    folder.mkdir(parents=True)
    source = folder / "ch99_small.py"
    source.write_text(
        "# %% [markdown]\n# # Small\n\n# %%\nfrom teaching.figures import curves, show\n\n"
        '# %% tags=["figure-line"]\nprint(6 * 7)\n'
        "show(curves([0, 1], {'a': [1, 2]}, 'x', 'y'), alt='A line.')\n"
    )
    monkeypatch.setattr(build_chapters, "ASSETS", tmp_path / "assets")
    build_chapters.build_chapter(source)
    written = build_chapters.notebook_path(source).read_text()
    check_chapter(source)

    assert '"42\\n"' in written and "iopub" not in written and '"version"' not in written
    image = (tmp_path / "assets" / "ch99_line.png").read_bytes()
    assert base64.b64encode(image).decode()[:60] in written

    if times == 2:
        build_chapters.build_chapter(source, anew=True)
        assert build_chapters.notebook_path(source).read_text() == written


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("print(1)", True),
        ("for i in range(3):\n    print(i)", True),
        ("def f():\n    print(1)", False),
        ("x = len('print(1)')", False),
        ("%load_ext autoreload\ncheck('1.1')", True),
    ],
)
def test_which_cells_must_have_an_output(source, expected):
    assert build_chapters.speaks(source) == expected
