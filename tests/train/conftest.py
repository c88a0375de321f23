"""What tests of training share: a small corpus, and settings that spare them seconds."""

from pathlib import Path

import pytest

from minitron.corpus.stories import write_stories
from tests.train import sparing  # noqa: F401


@pytest.fixture(scope="session")
def stories(tmp_path_factory) -> Path:
    """A small corpus of stories."""
    folder = tmp_path_factory.mktemp("data") / "stories"
    write_stories(folder, num_tokens=30_000)
    return folder
