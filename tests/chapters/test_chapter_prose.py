"""What prose claims is vouched for: its numbers by outputs, code or citations; its names exist."""

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook, new_output

from tools import build_chapters, chapter_prose
from tools.chapter_prose import exists, unknown_names, unvouched_numbers
from tools.committed import committed_text

SOURCES = build_chapters.chapter_sources([])


def committed(source):
    return nbformat.reads(committed_text(build_chapters.notebook_path(source)), as_version=4)


@pytest.mark.parametrize("source", SOURCES, ids=lambda path: path.stem)
def test_every_number_in_prose_is_vouched_for(source):
    assert unvouched_numbers(committed(source)) == []


@pytest.mark.parametrize("source", SOURCES, ids=lambda path: path.stem)
def test_every_name_in_prose_exists(source):
    assert unknown_names(committed(source)) == []


def test_chapter_2_says_of_the_allocator_what_the_shown_record_says():
    [source] = build_chapters.chapter_sources(["ch02"])
    notebook = committed(source)
    prose = "\n".join(cell.source for cell in notebook.cells if cell.cell_type == "markdown")
    printed = "".join(
        output.get("text", "")
        for cell in notebook.cells
        if cell.cell_type == "code"
        for output in cell.outputs
    )
    untested = "not test whether free segments are returned" in " ".join(printed.split())
    assert untested == ("The first tested nothing" in " ".join(prose.split()))


def chapter(prose: str, code: str = "x = 1", output: str = "", tags=("nbval-check-output",)):
    """A chapter of one paragraph and one cell that has printed `output`."""
    cell = new_code_cell(code, outputs=[new_output("stream", text=output)])
    cell.metadata["tags"] = list(tags)
    return new_notebook(cells=[new_markdown_cell(prose), cell])


@pytest.mark.parametrize(
    ("prose", "output"),
    [
        ("It takes 16.5 GB.", "16.5 GB"),
        ("It takes 16 GB.", "16.4 GB"),  # rounded
        ("It takes 16.4 GB.", "16,400,000,000 B"),  # in another unit
        ("It is 41 % of the peak.", "0.412 of the peak"),
        ("All 3,072 GPUs.", "3072 GPUs"),
        ("The error is 1e-12.", "1e-12"),
        ("Each of the 4 ranks holds 8 blocks.", ""),  # small counts
        ("It has 1,024 of them.", ""),  # a power of two
        ("Chapter 17 says so, as does section 14.2.", ""),
        ("With 419 interruptions (Dubey et al. 2024, section 3.3).", ""),
        ("They found 419 ([Llama 3](https://arxiv.org/abs/2407.21783)).", ""),
        ("## 13. A heading\n\n**45 minutes.**", ""),
    ],
)
def test_a_number_with_something_behind_it_passes(prose, output):
    assert unvouched_numbers(chapter(prose, output=output)) == []


@pytest.mark.parametrize(
    ("prose", "output", "number"),
    [
        ("It takes 17 GB.", "16.4 GB", "17"),
        ("It takes 16.5 GB.", "16.4 GB", "16.5"),
        ("It takes 6 GB.", "16.4 GB", "6"),  # small, but with a unit
        ("It is 43 % of the peak.", "0.412 of the peak", "43"),
        ("All 3,073 GPUs.", "3072 GPUs", "3,073"),
        ("It has 1,023 of them.", "", "1,023"),
        ("Cited (Dubey et al. 2024).\n\nNot cited: 419.", "", "419"),
    ],
)
def test_a_number_with_nothing_behind_it_is_named(prose, output, number):
    [problem] = unvouched_numbers(chapter(prose, output=output))
    assert problem.startswith(f"cell 0: {number} in ")


def test_an_output_that_may_change_vouches_for_nothing():
    assert unvouched_numbers(chapter("It took 214 ms.", output="214 ms", tags=()))
    assert not unvouched_numbers(chapter("It took 214 ms.", output="214 ms"))


def test_the_chapter_s_code_vouches_for_a_number():
    assert not unvouched_numbers(chapter("With 12,288 columns.", code="width = 12288"))
    assert not unvouched_numbers(chapter("With 12,288 columns.", code="width = 12_288"))
    assert unvouched_numbers(chapter("With 12,289 columns.", code="width = 12288"))


@pytest.mark.parametrize(
    "name",
    [
        "apply_zero1",
        "minitron.parallel.data.zero",
        "torch.compile",
        "F.cross_entropy",
        "nn.Linear",
        "loss.detach()",
        "parallel/data/zero.py",
        "make test",
        "minitron plan --gpus 8",
        "train.steps",
        "--train.recompute full",
        "torchrun --nproc-per-node 2",
        "PYTORCH_ALLOC_CONF",
        "nvidia-smi",
        "no_sync",
        "len",
        "python -m teaching.lab.large_plans",
    ],
)
def test_a_name_that_exists(name):
    assert exists(name)


@pytest.mark.parametrize(
    "name",
    [
        "apply_zero9",
        "minitron.parallel.data.nothing",
        "torch.compile_it",
        "F.cross_entropies",
        "make teas",
        "minitron plan --gpuz 8",
        "train.stepz",
        "torchrun --nproc-per-mode 2",
        "python -m teaching.lab.larger_plans",
        "python teaching.lab.large_plans",
    ],
)
def test_a_name_that_does_not(name):
    assert not exists(name)
    assert unknown_names(chapter(f"Call `{name}` now.")) == [f"cell 0: `{name}`"]


def test_a_name_of_the_chapter_s_own_or_of_cited_code():
    assert unknown_names(chapter("Call `my_own` now.", code="def my_own(): pass")) == []
    assert unknown_names(chapter("It was `their_way` (their/repository#12).")) == []
    assert unknown_names(chapter("See `their_way`.\n\nAnother (their/repository#12).")) != []


def test_the_tool_lists_and_fails(monkeypatch, capsys):
    monkeypatch.setattr(chapter_prose.sys, "argv", ["chapter_prose.py", "ch01"])
    monkeypatch.setattr(chapter_prose, "unvouched_numbers", lambda _: ["cell 0: 17"])
    assert chapter_prose.main() == 1
    assert "ch01_single_gpu: cell 0: 17" in capsys.readouterr().out
