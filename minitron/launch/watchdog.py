"""A run that stands still says which rank it waits for, and ends by itself.

Each rank has a thread that looks how long ago the rank has last shown a sign of life. If that is
too long ago, it writes where its main thread is into a file, and one rank reads what all have
written: who is in a collective waits, who is elsewhere keeps the others waiting, who has written
nothing cannot. Then every rank leaves, so that torchrun ends the job, or starts it again. On GPUs
collectives return at once: there, ranks that wait stand where the host waits for the device.
"""

import os
import sys
import threading
import time
import traceback
from contextlib import suppress
from pathlib import Path

from minitron.comm.agreement import Group
from minitron.launch.rank_process import Frame
from minitron.launch.rank_report import describe, report

SECONDS_TO_ANSWER = 3.0


class Watchdog:
    """Within it, the ranks leave with exit code 1 if `beat` is not called for `timeout` seconds.

    What takes longer than a step must be in pieces, with a `beat` after each.

    `folder` is one that all ranks see. With a timeout of 0, or without a group, nothing is watched.
    """

    def __init__(self, folder: Path, group: Group, timeout: float):
        self.rank, self.size = group.rank(), group.size()
        self.folder, self.timeout = folder, timeout
        self.main_thread = threading.get_ident()
        self.ended, self.is_telling = threading.Event(), False
        self.thread = None
        if group.size() > 1 and timeout > 0:
            self.thread = threading.Thread(target=self.watch, name="watchdog", daemon=True)

    def __enter__(self) -> "Watchdog":
        self.beat()
        if self.thread is not None:
            with suppress(OSError):
                self.file(self.rank).unlink()  # of an earlier life
            self.thread.start()
        return self

    def __exit__(self, *exception) -> None:
        self.ended.set()
        if self.is_telling:  # another rank has left, and what waited for it has raised here
            self.thread.join()

    def beat(self) -> None:
        """Tell that this rank goes on."""
        self.last = time.monotonic()

    def file(self, rank: int) -> Path:
        return self.folder / f"rank{rank}.txt"

    def watch(self) -> None:
        while not self.ended.wait(min(1.0, self.timeout / 4)):
            if time.monotonic() - self.last > self.timeout:
                self.is_telling = True
                # the main thread would not hear of an exception, and the folder may hang as well
                at_last = threading.Timer(3 * SECONDS_TO_ANSWER, os._exit, (1,))
                at_last.daemon = True
                at_last.start()
                try:
                    self.tell()
                finally:
                    os._exit(1)

    def tell(self) -> None:
        """Write where this rank is; the first rank that can tells it of all."""
        self.folder.mkdir(parents=True, exist_ok=True)
        temporary = self.file(self.rank).with_suffix(".tmp")
        temporary.write_text(describe(self.frames(), None))
        temporary.replace(self.file(self.rank))
        time.sleep(SECONDS_TO_ANSWER)
        texts = {
            rank: self.file(rank).read_text() if self.file(rank).exists() else "does not answer"
            for rank in range(self.size)
        }
        first = min(rank for rank, text in texts.items() if text != "does not answer")
        if self.rank != first:
            time.sleep(SECONDS_TO_ANSWER)  # leaving ends the job: let the first report
        else:
            headline = f"minitron: no step has ended for {self.timeout:g} s (train.hang_timeout):"
            print(f"\n{report(headline, texts)}", file=sys.stderr, flush=True)

    def frames(self) -> list[Frame]:
        """Return the main thread's stack, outermost first."""
        stack = traceback.extract_stack(sys._current_frames()[self.main_thread])
        return [Frame(line.filename, line.lineno, line.name, line.line or "") for line in stack]
