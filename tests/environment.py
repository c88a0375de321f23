"""The environment of a process that a test starts."""

import os
from pathlib import Path


def finding(*folders: Path | str, **variables: str) -> dict[str, str]:
    """Return this environment, in which Python looks for modules in `folders` first.

    What it finds elsewhere already stays: packages may have been put on PYTHONPATH.
    """
    path = [*map(str, folders), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(path), **variables}
