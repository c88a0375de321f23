"""What `make quick` runs is there and has something of everything."""

import re

from teaching.exercises import known
from tests.conftest import BEGIN_WITH, ROOT
from tests.proof import test_axes

AXES = {"data", "ZeRO-1", "ZeRO-2", "ZeRO-3", "tensor", "sequence", "pipeline"}


def recipe() -> str:
    """The lines of the Makefile under `quick`."""
    _, text = (ROOT / "Makefile").read_text().split("\nquick: lint ")
    return text.split("\n\n")[0]


def test_it_has_lint_every_layer_every_axis_and_a_chapter():
    for path in ("tests/architecture", "tests/proof", "chapters/ch07_tensor_parallel.ipynb"):
        assert path in recipe() and (ROOT / path).exists()
    assert set(test_axes.AXES) == AXES
    assert test_axes.test_it_is_the_same_training
    assert test_axes.test_context_parallelism_is_the_same_training
    assert test_axes.test_hybrid_sharding_is_the_same_training


def test_it_has_the_first_exercise_of_each_chapter():
    """Of names such as test_our_solution_passes[8.1, Gather and scatter], by `-k`."""
    assert re.search(r'-k "\(\.1 and our_solution_passes\) or not exercises"', recipe())
    chosen = [exercise for exercise in known().values() if ".1" in str(exercise)]
    assert [each.id for each in chosen] == [f"{chapter}.1" for chapter in range(1, 13)]


def test_the_folders_to_begin_with_are_there():
    assert all((ROOT / name).is_dir() for name in BEGIN_WITH)


def test_no_two_files_of_tests_have_one_name():
    """Else pytest imports the first alone, and the tests of the other do not run."""
    names = [path.name for path in (ROOT / "tests").rglob("test_*.py")]
    assert len(names) == len(set(names))
