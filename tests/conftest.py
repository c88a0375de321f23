from pathlib import Path

import pytest
import torch

from minitron.corpus.stories import write_stories
from minitron.launch import start_method
from minitron.launch.starting import context_of
from teaching.exercises import known

GRADERS = {f"teaching.graders.{exercise.chapter}" for exercise in known().values()}
PACKAGE = {exercise.replaces for exercise in known().values() if exercise.replaces}


@pytest.fixture(scope="session", autouse=True)
def one_thread_and_a_warm_server() -> None:
    """A worker has a core for itself; its ranks and benches find the graders imported.

    So does a learner's `minitron check`: the process that grades, and the server that it starts.
    """
    torch.set_num_threads(1)
    context_of(start_method(), also=tuple(sorted(GRADERS | PACKAGE)))


@pytest.fixture(scope="session")
def stories(tmp_path_factory) -> Path:
    """A small corpus of stories."""
    folder = tmp_path_factory.mktemp("data") / "stories"
    write_stories(folder, num_tokens=30_000)
    return folder
