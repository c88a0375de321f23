"""Progress that is seen everywhere: a bar on a terminal, a line now and then in a file.

The bar's clock runs every second, even while nothing is counted. In a file, what takes less than
5 s prints no line. The next ones come after 10, 20, 40 s, then every minute; also during one step
that takes longer than that.
"""

import math
import sys
import threading

from tqdm import tqdm

FIRST_S, LONGEST_S = 5.0, 60.0  # between two lines
TICK_S = 1.0  # between two readings of the bar's clock
LINE = "{desc}: {n_fmt} of {total_fmt}, {elapsed} so far, {remaining} left{postfix}"
CLOCK = "{desc}: {elapsed} so far"
"""The format of what cannot be counted."""


class Progress(tqdm):
    """tqdm's bar on standard error; lines if that is no terminal. A thread keeps either current."""

    thread: threading.Thread | None = None

    def __init__(self, *args, **options):
        self.is_terminal, self.ended = sys.stderr.isatty(), threading.Event()
        if not self.is_terminal:  # never drawn by tqdm
            options = {"bar_format": LINE, **options, "delay": math.inf}
        super().__init__(*args, **{"leave": False, "dynamic_ncols": True, **options})
        if not self.disable:
            tell = self.tick if self.is_terminal else self.tell
            self.thread = threading.Thread(target=tell, daemon=True)
            self.thread.start()

    def tick(self) -> None:
        while not self.ended.wait(TICK_S):  # tqdm itself draws only when something is counted
            self.refresh()

    def tell(self) -> None:
        seconds = FIRST_S
        while not self.ended.wait(seconds):
            print(self, file=sys.stderr, flush=True)
            seconds = min(2 * seconds, LONGEST_S)

    def display(self, *args, **options) -> None:
        if self.is_terminal:
            super().display(*args, **options)

    def clear(self, *args, **options) -> None:
        if self.is_terminal:
            super().clear(*args, **options)

    def close(self) -> None:
        self.ended.set()
        if self.is_terminal and self.thread is not None:
            self.thread.join()  # or it may draw once more what is closed
        super().close()
