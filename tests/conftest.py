"""What all tests share. It imports nothing of the project, or any change would reach all tests."""

import os
import sys
from pathlib import Path

# Before torch is imported, and for kernels and commands that tests start: each worker has a core
# for itself, and threads that wait for one another on a busy core take many times as long.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest

ROOT = Path(__file__).parents[1]
PRELOADED = ("teaching.graders.", "minitron.parallel.", "minitron.step", "tests.train.sparing")
LONGEST = (  # files, the longest first
    "tests/exercises/test_ch08_sequence_parallel.py",
    "tests/exercises/test_ch06_zero.py",
    "tests/exercises/test_ch02_memory.py",
    "tests/exercises/test_ch04_data_parallel.py",
    "tests/exercises/test_ch10_mixed_precision.py",
    "tests/exercises/test_ch07_tensor_parallel.py",
    "tests/exercises/test_ch12_before_you_launch.py",
    "tests/exercises/test_ch11_all_axes.py",
    "tests/exercises/test_ch09_pipeline_parallel.py",
    "tests/train/test_faults.py",
    "tests/test_grid.py",
    "chapters/ch12_before_you_launch.ipynb",
    "tests/plan/test_dryrun_steps.py",
    "tests/train/test_train_ranks.py",
    "tests/train/test_train_layouts.py",
    "tests/parallel/test_context_grid.py",
    "tests/train/test_precision_training.py",
    "tests/test_benchmarks.py",
    "tests/train/test_train.py",
    "tests/train/test_stopping.py",
    "tests/launch/test_launch.py",
    "tests/train/test_use.py",
    "tests/teaching/test_check.py",
    "tests/plan/test_planned_memory.py",
    "tests/plan/test_search.py",
    "tests/test_cli.py",
    "tests/parallel/test_fsdp.py",
    "chapters/ch11_all_axes.ipynb",
    "chapters/ch04_data_parallel.ipynb",
    "chapters/ch01_single_gpu.ipynb",
    "chapters/ch09_pipeline_parallel.ipynb",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with the longest files, so that no core idles at the end of `make test`."""
    order = {ROOT / name: number for number, name in enumerate(LONGEST)}
    items.sort(key=lambda item: order.get(item.path, len(LONGEST)))


@pytest.fixture(scope="session", autouse=True)
def warm_server() -> None:
    """Start the server of ranks, where a collected test imports it, with what its ranks will need.

    Ranks import what is missing themselves: this saves seconds and decides no result.
    """
    launch = sys.modules.get("minitron.launch")
    if launch is not None:
        needed = sorted(name for name in sys.modules if name.startswith(PRELOADED))
        sys.modules["minitron.launch.starting"].context_of(launch.start_method(), tuple(needed))
