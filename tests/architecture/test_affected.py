"""`make affected` selects what a change can reach; tests/conftest.py reaches nothing by itself."""

import subprocess
import sys

import pytest

from tools import affected


@pytest.fixture(scope="module")
def graph():
    return affected.edges()


@pytest.mark.parametrize(
    "changed, reached, spared",
    [
        ("minitron/corpus/text.py", "tests/corpus/test_text.py", "tests/plan/test_search.py"),
        ("minitron/plan/search.py", "tests/plan/test_search.py", "tests/corpus/test_text.py"),
        ("minitron/plan/hardware.csv", "tests/plan/test_hardware.py", "tests/comm/test_mesh.py"),
        (
            "minitron/parallel/data/fsdp.py",
            "tests/train/test_train_ranks.py",
            "tests/plan/test_money.py",
        ),
        (
            "teaching/graders/ch06_step.py",
            "tests/exercises/test_ch06_zero.py",
            "tests/exercises/test_ch05_ring_all_reduce.py",
        ),
        (
            "teaching/graders/ch06_step.py",
            "tests/teaching/test_cheats.py",
            "tests/train/test_faults.py",
        ),
        (
            "solutions/ch06_zero.hints.toml",
            "tests/exercises/test_ch06_zero.py",
            "tests/exercises/test_ch01_single_gpu.py",
        ),
        (
            "tests/exercises/mutants/ch06_zero.py",
            "tests/exercises/test_ch06_zero.py",
            "tests/exercises/test_ch07_tensor_parallel.py",
        ),
        (
            "chapters/source/ch06_zero.py",
            "chapters/ch06_zero.ipynb",
            "chapters/ch07_tensor_parallel.ipynb",
        ),
        (
            "chapters/source/ch06_zero.py",
            "tests/chapters/test_chapters.py",
            "tests/plan/test_money.py",
        ),
        ("tests/train/conftest.py", "tests/train/test_train.py", "tests/plan/test_search.py"),
        ("README.md", "tests/architecture/test_readme.py", "tests/plan/test_search.py"),
    ],
)
def test_a_change_reaches_its_tests_and_spares_others(graph, changed, reached, spared):
    found = affected.affected({changed}, graph)
    assert reached in found
    assert spared not in found


def test_a_change_of_what_is_installed_reaches_everything(graph):
    found = affected.affected({"pyproject.toml"}, graph)
    assert found == affected.affected({"tests/conftest.py", "requirements.txt"}, graph)
    assert {"tests/plan/test_money.py", "chapters/ch01_single_gpu.ipynb"} <= set(found)


def test_the_shared_conftest_imports_nothing_of_the_project(graph):
    assert affected.reached("tests/conftest.py", graph) == {"tests/conftest.py"}


def test_every_kind_of_change_is_seen(tmp_path, monkeypatch):
    monkeypatch.setattr(affected, "ROOT", tmp_path)
    for name in ("edited", "staged", "removed", "same"):
        (tmp_path / name).write_text(f"the first text of {name}\n")
    affected.git("init", "-q")
    affected.git("add", ".")
    affected.git("-c", "user.name=a", "-c", "user.email=a@b", "commit", "-qm", "first")
    (tmp_path / "edited").write_text("another\n")
    (tmp_path / "staged").write_text("another\n")
    affected.git("add", "staged")
    (tmp_path / "removed").rename(tmp_path / "new")
    assert affected.default_base() == "HEAD"
    assert set(affected.changed_files("HEAD")) == {"edited", "staged", "removed", "new"}


def test_a_commit_that_is_not_there_is_one_line():
    done = subprocess.run(
        [sys.executable, "tools/affected.py", "--since", "nowhere"],
        cwd=affected.ROOT,
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("affected: ") and done.stderr.count("\n") == 1
    assert "nowhere" in done.stderr
