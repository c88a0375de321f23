"""Grade one exercise in this process, and leave the verdict as a file.

    python -m minitron.course.graders EXERCISE_ID ROOT FOLDER TIMEOUT_SECONDS

Started by `minitron.course.check`. Only FOLDER/verdict.json counts: an exit code would not do,
for the learner's code may end the process itself. FOLDER/stack.txt says where it was stuck.
"""

import contextlib
import dataclasses
import faulthandler
import json
import os
import sys
from pathlib import Path

import torch

from minitron.course.exercises import find
from minitron.course.graders import grade_file, grader_of


def main(exercise_id: str, root: str, folder: str, timeout: str) -> None:
    torch.set_num_threads(1)
    exercise = find(exercise_id, Path(root))
    prepare = getattr(grader_of(exercise), "prepare", None)
    if prepare:
        prepare()  # before the clock starts, as the imports above and in grader_of

    # A thread outside the interpreter watches the clock: it works while Python code loops, and
    # also when the process that started this one is gone.
    with open(Path(folder, "stack.txt"), "w") as stack:
        faulthandler.enable(stack)
        faulthandler.dump_traceback_later(float(timeout), exit=True, file=stack)
        verdict = grade_file(exercise, Path(root, exercise.file))
        faulthandler.cancel_dump_traceback_later()

    with contextlib.suppress(Exception):  # the learner may have closed it
        sys.stdout.flush()
    partial = Path(folder, "partial.json")
    partial.write_text(json.dumps(dataclasses.asdict(verdict)))
    partial.rename(Path(folder, "verdict.json"))
    os._exit(0)  # threads that the learner left running cannot hold it up


if __name__ == "__main__":
    main(*sys.argv[1:])
