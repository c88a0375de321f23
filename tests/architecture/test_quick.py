"""What `make quick` runs is there and has something of everything; `make test` has an order."""

import re
import subprocess
import sys

import pytest

from teaching.exercises import known
from tests.conftest import LONGEST, ROOT

AXES = "data", "ZeRO 1", "ZeRO 2", "ZeRO 3", "tensor", "sequence", "pipeline"


@pytest.fixture(scope="module")
def collected() -> list[str]:
    """The tests that `make quick` runs: pytest itself refuses a line that names none."""
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "@tests/quick.txt"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.splitlines()


def test_it_has_something_of_everything(collected):
    oracle = "tests/proof/test_axes.py::"
    for axis in AXES:
        assert f"{oracle}test_it_is_the_same_training[{axis}]" in collected
    assert f"{oracle}test_hybrid_sharding_is_the_same_training" in collected

    solved = [re.search(r"::test_our_solution_passes\[(\d+)\.", test) for test in collected]
    chapters = {int(exercise.id.split(".")[0]) for exercise in known().values()}
    assert {int(match[1]) for match in solved if match} == chapters

    assert any(re.match(r"chapters/ch\d+_.*\.ipynb::", test) for test in collected)
    for file in (ROOT / "tests" / "architecture").glob("test_*.py"):
        assert any(test.startswith(f"tests/architecture/{file.name}::") for test in collected)


def test_it_lints_and_reads_the_list():
    _, recipe = (ROOT / "Makefile").read_text().split("\nquick: lint ")
    assert "@tests/quick.txt" in recipe.split("\n\n")[0]


def test_the_files_to_begin_with_are_there():
    assert [name for name in LONGEST if not (ROOT / name).is_file()] == []


def test_no_two_files_of_tests_have_one_name():
    """Else pytest imports the first alone, and the tests of the other do not run."""
    names = [path.name for path in (ROOT / "tests").rglob("test_*.py")]
    assert len(names) == len(set(names))
