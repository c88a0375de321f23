"""What maintainers have committed, whatever a learner has since done to the working files."""

import os
import shutil
import subprocess
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]
READ_WORKING_FILES = "MINITRON_READ_WORKING_FILES"
"""The environment variable with which a maintainer checks what is not staged yet."""


def committed_text(path: Path) -> str:
    """The text of a file in git's index: a learner fills in exercises and re-runs notebooks.

    Without git, or for a file that git does not know, the working file's.
    """
    text = text_in_git(path)
    return path.read_text() if text is None else text


def text_in_git(path: Path) -> str | None:
    """The text of a file in git's index (as committed, or staged since), None if git has none.

    With READ_WORKING_FILES in the environment, the working file's.
    """
    if os.environ.get(READ_WORKING_FILES):
        return path.read_text() if path.is_file() else None
    git = shutil.which("git") and subprocess.run(
        ["git", "show", f":./{path.relative_to(REPOSITORY).as_posix()}"],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        encoding="utf-8",
    )
    return git.stdout if git and git.returncode == 0 else None
