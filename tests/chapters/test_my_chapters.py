"""A learner's own copies of the chapters: no outputs, brought up to date, no edit ever lost."""

import shutil
import subprocess
from pathlib import Path

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook, new_output

from tools.my_chapters import RECORD, refresh

ROOT = Path(__file__).resolve().parents[2]
NAME = "ch01_small.ipynb"


def write(folder: Path, code: str) -> None:
    """Write the course's chapter, executed."""
    folder.mkdir(exist_ok=True)
    cell = new_code_cell(
        code,
        execution_count=1,
        outputs=[new_output("stream", text="42\n")],
        metadata={"jupyter": {"outputs_hidden": True}, "tags": ["output-x"]},
    )
    cells = [new_markdown_cell("# 1. Small"), cell]
    nbformat.write(new_notebook(cells=cells), folder / NAME)


def edit(path: Path, code: str) -> None:
    notebook = nbformat.read(path, as_version=4)
    notebook.cells[1].source = code
    nbformat.write(notebook, path)


def code_of(path: Path) -> str:
    return nbformat.read(path, as_version=4).cells[1].source


@pytest.fixture
def folders(tmp_path):
    chapters, mine = tmp_path / "chapters", tmp_path / "my_chapters"
    write(chapters, "print(42)")
    assert refresh(chapters, mine) == []
    return chapters, mine


def test_a_copy_has_no_outputs(folders):
    cell = nbformat.read(folders[1] / NAME, as_version=4).cells[1]
    assert cell.source == "print(42)" and cell.outputs == [] and cell.execution_count is None
    assert cell.metadata == {"tags": ["output-x"]}  # so the learner's own output is not folded


def test_what_was_run_stays_while_the_course_stays(folders):
    chapters, mine = folders
    shutil.copy(chapters / NAME, mine / NAME)  # as the learner ran it
    before = (mine / NAME).read_bytes()
    assert refresh(chapters, mine) == []
    assert (mine / NAME).read_bytes() == before


def test_a_changed_chapter_replaces_an_unedited_copy(folders):
    chapters, mine = folders
    write(chapters, "print(6 * 7)")
    assert refresh(chapters, mine) == []
    assert code_of(mine / NAME) == "print(6 * 7)"
    assert len(list(mine.glob("*.ipynb"))) == 1


def test_an_edit_stays_in_place_while_the_course_stays(folders):
    chapters, mine = folders
    edit(mine / NAME, "print('mine')")
    assert refresh(chapters, mine) == []
    assert code_of(mine / NAME) == "print('mine')"


def test_an_edit_is_kept_beside_a_changed_chapter(folders):
    chapters, mine = folders
    for number, code in ((1, "print('mine')"), (2, "print('mine again')")):
        edit(mine / NAME, code)
        write(chapters, f"print({number})")
        said = refresh(chapters, mine)
        assert said == [
            f"{NAME} has changed in the course; yours is kept as ch01_small.mine-{number}.ipynb"
        ]
        assert code_of(mine / f"ch01_small.mine-{number}.ipynb") == code
        assert code_of(mine / NAME) == f"print({number})"


@pytest.mark.parametrize("text", ["", "not a notebook", "[1]"])
def test_a_damaged_copy_is_kept_and_replaced(folders, text):
    chapters, mine = folders
    (mine / NAME).write_text(text)
    write(chapters, "print(1)")
    assert len(refresh(chapters, mine)) == 1
    assert (mine / "ch01_small.mine-1.ipynb").read_text() == text
    assert code_of(mine / NAME) == "print(1)"


def test_a_damaged_copy_without_a_record_is_kept(folders):
    chapters, mine = folders
    (mine / RECORD).unlink()
    (mine / NAME).write_text("half of what I wro")
    refresh(chapters, mine)
    assert (mine / "ch01_small.mine-1.ipynb").read_text() == "half of what I wro"


@pytest.mark.parametrize("text", ["", "[1]"])
def test_without_its_record_an_edit_is_kept_too(folders, text):
    chapters, mine = folders
    edit(mine / NAME, "print('mine')")
    (mine / RECORD).write_text(text)
    refresh(chapters, mine)
    assert code_of(mine / "ch01_small.mine-1.ipynb") == "print('mine')"


def test_git_ignores_the_copies():
    if not shutil.which("git") or not (ROOT / ".git").exists():
        pytest.skip("not a checkout of git")
    ignored = subprocess.run(
        ["git", "check-ignore", "my_chapters/x.ipynb"], cwd=ROOT, capture_output=True
    )
    assert ignored.returncode == 0
