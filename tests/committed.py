"""What maintainers have committed, whatever a learner has since done to the working files."""

import shutil
import subprocess
from pathlib import Path

REPOSITORY = Path(__file__).parents[1]


def committed_text(path: Path) -> str:
    """The text of a file in git's index: a learner fills in exercises and re-runs notebooks.

    Without git, or for a file that git does not know, the working file's.
    """
    git = shutil.which("git") and subprocess.run(
        ["git", "show", f":{path.relative_to(REPOSITORY).as_posix()}"], cwd=REPOSITORY,
        capture_output=True, text=True,
    )
    return git.stdout if git and git.returncode == 0 else path.read_text()
