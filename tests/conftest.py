from pathlib import Path

import pytest

from minitron.corpus.stories import write_stories


@pytest.fixture(scope="session")
def stories(tmp_path_factory) -> Path:
    """A small corpus of stories."""
    folder = tmp_path_factory.mktemp("data") / "stories"
    write_stories(folder, num_tokens=30_000)
    return folder
