"""What an answer keeps where the meter cannot see it: in NumPy arrays, bytes, lists of floats.

Tensors are the meter's. Everything else that Python allocates, `tracemalloc` knows, with the lines
that asked for it, so that what a grader or the meter keeps for itself is told apart.
"""

import tracemalloc
from collections.abc import Callable
from pathlib import Path

import minitron
from minitron.course.graders.ranks import source_file

PACKAGE = str(Path(minitron.__file__).parent)
NUM_FRAMES = 12
"""How deep a library may be in its own functions when it allocates what the answer asked for."""


class PythonMemory:
    """Count the bytes that `answer`'s file has allocated in the block, and that are still alive."""

    def __init__(self, answer: Callable):
        self.file = source_file(answer)

    def __enter__(self):
        tracemalloc.start(NUM_FRAMES)
        return self

    def __exit__(self, *error) -> None:
        tracemalloc.stop()

    def now(self) -> int:
        """Bytes that are alive."""
        return sum(trace.size for trace in tracemalloc.take_snapshot().traces
                   if self._is_answers(trace.traceback))

    def _is_answers(self, traceback) -> bool:
        """Whether the answer, and not the package under it, called the library that allocated."""
        for frame in reversed(traceback):  # the innermost is the last
            if frame.filename == self.file:
                return True
            if frame.filename.startswith(PACKAGE):
                return False
        return False
