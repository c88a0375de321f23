"""Grade one exercise in this process, and write the verdict to its standard output.

    python -m teaching.judge EXERCISE_ID ROOT CPU_SECONDS

Started by `teaching.check`. The learner's code runs in processes that this one starts: they
do not have its standard output, and what they print goes to standard error.
"""

import dataclasses
import json
import os
import sys
from multiprocessing import forkserver
from pathlib import Path

from minitron.pytorch import SLOW_TO_IMPORT
from teaching.exercises import find


def main(exercise_id: str, root: str, limit: str) -> None:
    """Print one line of JSON."""
    with os.fdopen(os.dup(1), "w") as verdicts:
        os.dup2(2, 1)
        exercise = find(exercise_id, Path(root))
        if sys.platform != "win32":  # it imports PyTorch while this process does
            forkserver.set_forkserver_preload(
                [
                    SLOW_TO_IMPORT,
                    f"teaching.graders.{exercise.chapter}",
                    *filter(None, [exercise.replaces]),
                ]
            )
            forkserver.ensure_running()

        import torch

        from teaching.graders import grade_file

        torch.set_num_threads(1)
        verdict = grade_file(exercise, Path(root, exercise.file), float(limit))
        json.dump(dataclasses.asdict(verdict), verdicts)


if __name__ == "__main__":
    main(*sys.argv[1:])
