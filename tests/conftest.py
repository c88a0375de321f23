"""What all tests share. It imports nothing of the project, or any change would reach all tests."""

import itertools
import os
import sys
import tempfile
from pathlib import Path

# Before torch is imported, and for kernels and commands that tests start: each worker has a core
# for itself, and threads that wait for one another on a busy core take many times as long.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import nbval.kernel
import pytest
from jupyter_client import KernelManager

ROOT = Path(__file__).parents[1]
PRELOADED = (
    "teaching.graders.",
    "minitron.parallel.",
    "minitron.proof.",
    "minitron.step",
    "tests.train.sparing",
)
BEGIN_WITH = "chapters", "tests/train", "tests/plan", "tests/parallel"  # files that take longest

# A notebook's kernel is told five free TCP ports and binds them a second later. Ranks of another
# worker's test may have taken one by then, so it gets sockets in the file system instead.
SOCKETS, NUMBERS = tempfile.TemporaryDirectory(prefix="kernels-"), itertools.count()


def manager_of_kernel(**options) -> KernelManager:
    return KernelManager(transport="ipc", ip=f"{SOCKETS.name}/{next(NUMBERS)}", **options)


if sys.platform != "win32":
    nbval.kernel.KernelManager = manager_of_kernel


@pytest.hookimpl(tryfirst=True)  # before -m looks at markers
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with the longest files, so that no core idles at the end of `make test`.

    A notebook's cells that are tagged as exhaustive are so marked: they run in `make test-all`.
    """
    for item in items:
        if "exhaustive" in getattr(getattr(item, "cell", None), "metadata", {}).get("tags", ()):
            item.add_marker("exhaustive")
    folders = {ROOT / name: number for number, name in enumerate(BEGIN_WITH)}
    items.sort(key=lambda item: folders.get(item.path.parent, len(folders)))


@pytest.fixture(scope="session", autouse=True)
def warm_server() -> None:
    """Start the server of ranks, where a collected test imports it, with what its ranks will need.

    Ranks import what is missing themselves: this saves seconds and decides no result.
    """
    launch = sys.modules.get("minitron.launch")
    if launch is not None:
        needed = ["pytest", *sorted(name for name in sys.modules if name.startswith(PRELOADED))]
        sys.modules["minitron.launch.starting"].context_of(launch.start_method(), tuple(needed))
