"""Which environment `make` uses: the active one if it has everything, else .venv."""

import importlib.metadata
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tools import environment

ROOT = environment.ROOT


@pytest.mark.parametrize(
    ("version", "requirement", "enough"),
    [
        ("2.13.0+cpu", "torch>=2.9", True),
        ("2.9", "torch>=2.9.0", True),
        ("2.8.1", "torch>=2.9", False),
        ("2", "tyro>=1.0,<2", False),
        ("1.0.17", "tyro>=1.0,<2", True),
        ("0.12.0", "nbval>=0.11,<0.12", False),
        (None, "numpy>=1.26", False),
    ],
)
def test_versions_are_compared_as_numbers(version, requirement, enough):
    assert environment.satisfies(version, requirement) is enough


def test_the_reason_names_what_is_required_and_what_is_there(monkeypatch, capsys):
    real = importlib.metadata.version
    monkeypatch.setattr(
        importlib.metadata, "version", lambda name: "2.8.0" if name == "torch" else real(name)
    )
    assert environment.main() == 1
    out, err = capsys.readouterr()
    assert out == "" and "needs torch>=2.11, has 2.8.0" in err


def test_another_clone_s_package_is_not_enough(monkeypatch, tmp_path):
    monkeypatch.setattr(environment, "version_of", lambda name: "")
    monkeypatch.setattr(environment, "satisfies", lambda *_: True)
    (tmp_path / "pyproject.toml").write_text((ROOT / "pyproject.toml").read_text())
    monkeypatch.setattr(environment, "ROOT", tmp_path)
    assert "not installed from this folder" in environment.missing()


def make_would(target: str, folder: Path = ROOT, **variables: Path) -> str:
    """What `make` would run in this folder, where no environment is active but in `variables`."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if name not in ("VIRTUAL_ENV", "CONDA_PREFIX", "MAKEFLAGS", "MAKELEVEL")
    }
    done = subprocess.run(
        ["make", "--dry-run", target],
        cwd=folder,
        capture_output=True,
        text=True,
        check=True,
        env={**kept, **{name: str(value) for name, value in variables.items()}},
    )
    return done.stdout


def make_uses(**variables: Path) -> str:
    """The interpreter in what `make` would run for `make exercises`."""
    return make_would("exercises", **variables).splitlines()[-1].split("/python ")[0]


@pytest.mark.skipif(not shutil.which("make"), reason="needs make")
def test_a_first_setup_says_what_takes_minutes(tmp_path):
    for name in ("Makefile", "requirements.txt", "pyproject.toml"):
        shutil.copy(ROOT / name, tmp_path)
    told = make_would("setup", tmp_path)
    assert "setup 2 of 3: PyTorch" in told and "Minutes" in told
    assert not (tmp_path / ".venv").exists()


@pytest.mark.skipif(not shutil.which("make"), reason="needs make")
def test_jupyterlab_does_not_ask_about_its_news():
    assert f'JUPYTER_CONFIG_PATH="{ROOT}/tools/jupyter' in make_would("lab")
    settings = ROOT / "tools" / "jupyter" / "labconfig" / "default_setting_overrides.json"
    plugin = json.loads(settings.read_text())["@jupyterlab/apputils-extension:notification"]
    assert plugin["fetchNews"] == "false"


@pytest.mark.parametrize("path", ["my-model/", "runs/", "data/"])
def test_git_ignores_what_a_reader_makes(path):
    if not shutil.which("git") or not (ROOT / ".git").exists():
        pytest.skip("not a checkout of git")
    ignored = subprocess.run(["git", "check-ignore", path], cwd=ROOT, capture_output=True)
    assert ignored.returncode == 0


@pytest.mark.skipif(not shutil.which("make"), reason="needs make")
@pytest.mark.parametrize("variable", ["VIRTUAL_ENV", "CONDA_PREFIX"])
def test_make_takes_the_active_environment_only_if_it_has_everything(variable, tmp_path):
    assert make_uses() == ".venv/bin"
    assert make_uses(**{variable: tmp_path}) == ".venv/bin", "a folder without Python"

    programs = tmp_path / "bin"
    programs.mkdir()
    python = programs / "python"
    python.write_text("#!/bin/sh\necho 'needs torch' >&2; exit 1\n")
    python.chmod(0o755)
    assert make_uses(**{variable: tmp_path}) == ".venv/bin"
    python.write_text(f"#!/bin/sh\necho '{programs}'\n")
    assert make_uses(**{variable: tmp_path}) == str(programs)


def test_a_real_environment_gets_its_folder_or_a_reason():
    done = subprocess.run(
        [sys.executable, ROOT / "tools" / "environment.py"], capture_output=True, text=True
    )
    if done.returncode == 0:
        assert done.stdout.strip() == str(Path(sys.prefix) / "bin") and not done.stderr
    else:
        assert done.stdout == "" and done.stderr.startswith("make uses .venv, not the active")
