"""A chapter is executed where its cells, or what they import, changed, and nowhere else."""

import re
import shutil
import subprocess
import sys

import nbformat
import pytest

from tools import build_chapters, chapter, chapter_hash, committed, imports
from tools.build_chapters import ChapterError, build_chapter, check_chapter, is_stale, notebook_path

SOURCE = """\
# %% [markdown]
# # Small
#
# Old text.

# %% tags=["output-answer"]
import small.named
from small.direct import answer
from small.shows import show_source

print(answer())

# %%
show_source(answer)
"""
PACKAGE = {
    "__init__.py": "",
    "direct.py": '''\
def answer():
    """Say it."""
    from small.far import value  # inside a function

    return value


def other():
    """Say another."""
''',
    "far.py": "# A comment.\nfrom small.tables import VALUES\n\nvalue = 6 * VALUES\n",
    "tables/__init__.py": "VALUES = 7\n",
    "tables/values.csv": "7\n",
    "named.py": "value = 1\n",
    "apart.py": "value = 1\n",
    "shows.py": "import inspect\n\n\ndef show_source(it):\n    print(inspect.getsource(it))\n",
}


@pytest.fixture
def source(tmp_path, monkeypatch):
    """A chapter that prints an answer of a package of its own, built."""
    for name, text in PACKAGE.items():
        path = tmp_path / "small" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(chapter_hash, "ROOT", tmp_path)
    monkeypatch.setattr(imports, "PACKAGES", ("small",))
    monkeypatch.setattr(chapter_hash, "WITH_TABLES", ("small",))

    source = tmp_path / "chapters" / "source" / "ch99_small.py"
    source.parent.mkdir(parents=True)
    source.write_text(SOURCE)
    forget()
    yield source
    forget()


def forget() -> None:
    """Let the next build see files as they are now: a command reads each once."""
    for cached in (
        imports.import_graph,
        chapter_hash._read,
        chapter_hash._program,
        chapter_hash._definitions,
    ):
        cached.cache_clear()


@pytest.fixture
def executed(monkeypatch):
    """The cells of each execution; it does not start a kernel, and numbers its executions."""
    runs = []

    def execute(notebook, cwd):
        runs.append([cell.source for cell in notebook.cells if cell.cell_type == "code"])
        for count, cell in enumerate(build_chapters._code(notebook), 1):
            text = f"run {len(runs)}\n"
            cell.outputs = [nbformat.v4.new_output("stream", name="stdout", text=text)]
            cell.execution_count = count

    monkeypatch.setattr(build_chapters, "execute", execute)
    return runs


def rebuild(source) -> str:
    forget()
    done = build_chapter(source)
    check_chapter(source)
    return done


def edit(path, old: str, new: str) -> None:
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))


def printed(source) -> list[str]:
    notebook = nbformat.read(notebook_path(source), as_version=4)
    return [cell.outputs[0].text for cell in build_chapters._code(notebook)]


def test_the_kernel_prints_and_an_edit_of_prose_keeps_what_it_printed(source):
    folder = str(source.parents[2])
    edit(source, "from small", f"import sys\n\nsys.path.insert(0, {folder!r})\nfrom small")
    edit(source, "import small.named\n", "")
    assert rebuild(source) == "executed: there was no notebook"
    before = printed(source)
    assert before[0] == "42\n" and "def answer" in before[1]

    edit(source, "Old text", "New text")
    assert rebuild(source) == "not executed, text renewed"
    assert printed(source) == before
    notebook = notebook_path(source).read_text()
    assert "New text." in notebook and "Old text." not in notebook


def test_an_unchanged_chapter_is_not_executed_and_not_changed(source, executed):
    rebuild(source)
    before = notebook_path(source).read_bytes()
    assert rebuild(source) == "not executed, text renewed"
    assert notebook_path(source).read_bytes() == before and len(executed) == 1


def test_prose_a_tag_and_a_new_text_cell_are_renewed_around_the_outputs(source, executed):
    rebuild(source)
    edit(source, "Old text.\n", "New text.\n\n# %% [markdown]\n# More.\n")
    edit(source, "output-answer", "output-other")
    rebuild(source)
    assert printed(source) == ["run 1\n", "run 1\n"]
    notebook = notebook_path(source).read_text()
    assert "New text." in notebook and "More." in notebook and "output-other" in notebook


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("print(answer())", "print(answer() + 1)"),
        ("# %%\nshow_source(answer)\n", ""),
        ("# %%\nshow_s", "# %%\nprint(1)\n\n# %%\nshow_s"),
    ],
    ids=["changed", "removed", "added"],
)
def test_changed_cells_are_executed(source, executed, old, new):
    rebuild(source)
    edit(source, old, new)
    with pytest.raises(ChapterError, match="executed from other cells"):
        check_chapter(source)
    assert rebuild(source) == "executed: its cells changed"
    assert len(executed) == 2 and set(printed(source)) == {"run 2\n"}


@pytest.mark.parametrize(
    ("name", "old", "new"),
    [
        ("direct.py", "return value", "return -value"),
        ("named.py", "1", "2"),
        ("far.py", "6 *", "5 *"),  # imported inside a function, two steps away
        ("tables/__init__.py", "7", "8"),
        ("tables/values.csv", "7", "8"),
        ("__init__.py", "", "import small.apart\n"),  # imported with any module of its package
        ("direct.py", "Say it.", "Say it now."),  # a docstring that is printed
        ("direct.py", "# inside a function", "# in a function"),
    ],
)
def test_a_changed_dependency_is_executed(source, executed, name, old, new):
    rebuild(source)
    assert not is_stale(source)
    edit(source.parents[2] / "small" / name, old, new)
    forget()
    check_chapter(source)  # the tests of a package's commit stay green
    assert is_stale(source)
    assert rebuild(source) == "executed: what it imports changed"
    assert len(executed) == 2 and not is_stale(source)


@pytest.mark.parametrize(
    ("name", "old", "new"),
    [
        ("apart.py", "1", "2"),  # not imported
        ("far.py", "A comment", "Another comment"),
        ("far.py", "\n\n", "\n\n\n\n"),
        ("direct.py", "Say another", "Say one more"),  # the docstring of what is not printed
    ],
)
def test_what_cannot_change_an_output_executes_nothing(source, executed, name, old, new):
    rebuild(source)
    edit(source.parents[2] / "small" / name, old, new)
    assert rebuild(source) == "not executed, text renewed"
    assert len(executed) == 1


def clear(notebook):
    for cell in build_chapters._code(notebook):
        cell.outputs, cell.execution_count = [], None


def run_in_jupyterlab(notebook):
    notebook.metadata["language_info"]["version"] = "3.13.0"
    for cell in build_chapters._code(notebook):
        cell.outputs[0].text = "mine\n"


PREDICTIONS = """\
# %% [markdown]
# # Small
#
# **Predict.** How many?

# %% [markdown]
# A hint.

# %%
measured = 42

# %%
print(measured)

# %% [markdown]
# Forty-two.

# %%
print(43)

# %% [markdown]
# **Predict.** Why?
#
# <details><summary>Answer</summary>
# Because.
# </details>

# %%
print(44)
"""


def test_the_output_that_answers_a_prediction_is_folded(tmp_path):
    (path := tmp_path / "ch01_small.py").write_text(PREDICTIONS)
    folded = [
        cell.source
        for cell in build_chapters.read_source(path).cells
        if cell.metadata.get("jupyter") == {"outputs_hidden": True}
    ]
    assert folded == ["measured = 42", "print(measured)"]


@pytest.mark.parametrize("handle", [clear, run_in_jupyterlab])
def test_a_notebook_that_somebody_ran_or_cleared_is_executed(source, executed, handle):
    rebuild(source)
    notebook = nbformat.read(notebook_path(source), as_version=4)
    handle(notebook)
    nbformat.write(notebook, notebook_path(source))
    assert rebuild(source) == "executed: its notebook was run or cleared by hand"
    assert printed(source) == ["run 2\n", "run 2\n"]


def test_a_notebook_of_conflicts_is_made_anew(source, executed):
    notebook_path(source).write_text("<<<<<<< ours\n")
    assert rebuild(source) == "executed: there was no notebook"


def test_one_who_asks_measures_anew(source, executed):
    rebuild(source)
    forget()
    assert build_chapter(source, anew=True) == "executed: as asked"
    assert len(executed) == 2


def test_a_blank_line_or_a_hash_inside_a_string_is_code(source, executed):
    far = source.parents[2] / "small" / "far.py"
    far.write_text('value, text = 6, """a # b\n\nc"""\nclass Shape:\n    def of(self): ...\n')
    rebuild(source)
    for old, new in (("a # b", "a # d"), ("\n\nc", "\nc"), ("def of", "def off")):
        edit(far, old, new)
        assert rebuild(source) == "executed: what it imports changed"


def test_the_hash_of_a_real_chapter_reaches_what_its_cells_use():
    forget()
    names = chapter_hash.reached(["minitron.parallel.data.zero", "teaching.lab.recorded"])
    assert {
        "minitron",
        "minitron.parallel",
        "minitron.parallel.flat",
        "minitron.comm.collectives",
        "teaching.lab",
        "teaching.lab.gpu_records",
    } <= names
    assert "minitron.cli" not in names
    for module, folder in chapter_hash.READS.items():
        path = chapter_hash.ROOT.joinpath(*module.split(".")).with_suffix(".py")
        assert all(f'"{part}"' in path.read_text() for part in folder.split("/"))


@pytest.mark.parametrize("arguments", [["99"], ["abc"], [""], [], ["0"], ["-1"], ["6.1"]])
def test_a_chapter_that_is_not_there_is_one_line(arguments, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["chapter.py", *arguments])
    assert chapter.main() == 2
    number = "".join(arguments)
    assert capsys.readouterr() == (
        "",
        f"there is no chapter {number!r}, there are 1 to 12: make chapter CH=6\n",
    )


def test_a_chapter_is_found_by_its_number():
    assert chapter.find_chapter("6") == chapter.find_chapter("06") == "ch06_zero"


def test_every_check_that_is_made_for_each_chapter_can_be_chosen_by_its_name():
    files = [
        file
        for check in chapter.CHECKS
        for file in (
            [chapter.ROOT / check] if check.endswith(".py") else (chapter.ROOT / check).iterdir()
        )
        if file.suffix == ".py" and file.name != "test_chapter_build.py"
    ]
    marks = [
        line
        for file in files
        for line in file.read_text().splitlines()
        if re.match(r'@pytest.mark.parametrize\("(source|deck)", [A-Z]+', line)
    ]
    assert len(marks) > 12
    assert all(mark.endswith("ids=lambda path: path.stem)") for mark in marks)


@pytest.mark.skipif(not shutil.which("git"), reason="needs git")
def test_one_chapter_s_checks_read_the_files_as_they_lie_here(tmp_path, monkeypatch):
    monkeypatch.setattr(committed, "REPOSITORY", tmp_path)
    path = tmp_path / "ch99.ipynb"
    path.write_text("staged")
    for words in (["init", "--quiet"], ["add", path.name]):
        subprocess.run(["git", *words], cwd=tmp_path, check=True)
    path.write_text("built since")
    assert committed.committed_text(path) == "staged"
    monkeypatch.setenv(committed.READ_WORKING_FILES, "1")
    assert committed.committed_text(path) == "built since"
