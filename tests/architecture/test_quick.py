"""What `make quick` runs is there and has something of everything; `make test` has an order."""

from teaching.exercises import known
from tests.conftest import LONGEST, ROOT
from tests.proof import test_axes

LINES = (ROOT / "tests" / "quick.txt").read_text().splitlines()
AXES = {"data", "ZeRO-1", "ZeRO-2", "ZeRO-3", "tensor", "sequence", "pipeline"}
SOLVED = {exercise: f"tests/exercises/test_{exercise.chapter}.py::TestGrading"
                    f"::test_our_solution_passes[{exercise}]" for exercise in known().values()}


def test_it_has_every_layer_and_every_axis():
    assert {"tests/architecture", "tests/proof/test_axes.py"} <= set(LINES)
    assert set(test_axes.AXES) == AXES
    assert test_axes.test_it_is_the_same_training
    assert test_axes.test_context_parallelism_is_the_same_training
    assert test_axes.test_hybrid_sharding_is_the_same_training


def test_it_has_an_exercise_of_each_chapter():
    chosen = {exercise.chapter for exercise, line in SOLVED.items() if line in LINES}
    assert chosen == {exercise.chapter for exercise in known().values()}


def test_it_has_a_chapter_and_nothing_that_is_gone():
    assert any(line.startswith("chapters/ch") for line in LINES)
    for line in LINES:
        assert line in SOLVED.values() if "::" in line else (ROOT / line).exists(), line


def test_it_lints_and_reads_the_list():
    _, recipe = (ROOT / "Makefile").read_text().split("\nquick: lint ")
    assert "@tests/quick.txt" in recipe.split("\n\n")[0]


def test_the_files_to_begin_with_are_there():
    assert [name for name in LONGEST if not (ROOT / name).is_file()] == []


def test_no_two_files_of_tests_have_one_name():
    """Else pytest imports the first alone, and the tests of the other do not run."""
    names = [path.name for path in (ROOT / "tests").rglob("test_*.py")]
    assert len(names) == len(set(names))
