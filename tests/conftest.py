import os
from pathlib import Path

# Before torch is imported, and for kernels and commands that tests start: each worker has a core
# for itself, and threads that wait for one another on a busy core take many times as long.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest

from minitron.corpus.stories import write_stories
from minitron.launch import start_method
from minitron.launch.starting import context_of
from teaching.exercises import known

GRADERS = {f"teaching.graders.{exercise.chapter}" for exercise in known().values()}
PACKAGE = {exercise.replaces for exercise in known().values() if exercise.replaces}


@pytest.fixture(scope="session", autouse=True)
def warm_server() -> None:
    """Let ranks and benches find the graders imported, as they do in a learner's check."""
    context_of(start_method(), also=tuple(sorted(GRADERS | PACKAGE)))


@pytest.fixture(scope="session")
def stories(tmp_path_factory) -> Path:
    """A small corpus of stories."""
    folder = tmp_path_factory.mktemp("data") / "stories"
    write_stories(folder, num_tokens=30_000)
    return folder
