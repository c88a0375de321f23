"""An install without the repository has no exercises, and says in one line where they are."""

import os
import shutil
import subprocess
import sys

import pytest

from teaching.exercises import ROOT
from tests.tiers import tiered


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """Both packages and nothing else, as pip puts them into site-packages."""
    folder = tmp_path_factory.mktemp("site-packages")
    for package in ("minitron", "teaching"):
        shutil.copytree(
            ROOT / package, folder / package, ignore=shutil.ignore_patterns("__pycache__")
        )
    return folder


@pytest.mark.parametrize(
    "words",
    tiered(
        [
            ["check", "1.2"],
            ["status"],
            ["check"],
            ["hint", "1.2"],
            ["reset", "1.2"],
            ["solution", "1.2"],
            ["solution", "1.2", "--give-up"],
        ],
        keep=1,
    ),
    ids=" ".join,
)
def test_it_says_where_the_exercises_are(words, installed, tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "minitron.cli", *words],
        cwd=tmp_path,
        text=True,
        timeout=120,
        capture_output=True,
        env=os.environ | {"PYTHONPATH": str(installed)},
    )
    assert done.returncode == 2, done
    assert done.stdout == "" and done.stderr.count("\n") == 1
    assert str(installed) in done.stderr and "clone" in done.stderr
