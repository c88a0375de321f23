"""Progress that is seen everywhere: a bar on a terminal, a line now and then in a file.

What takes less than 5 s prints no line. The next ones come after 10, 20, 40 s, then every minute;
also during one step that takes longer than that.
"""

import math
import sys
import threading

from tqdm import tqdm

FIRST_S, LONGEST_S = 5.0, 60.0  # between two lines
LINE = "{desc}: {n_fmt} of {total_fmt}, {elapsed} so far, {remaining} left{postfix}"
CLOCK = "{desc}: {elapsed} so far"
"""The format of what cannot be counted."""


class Progress(tqdm):
    """tqdm's bar on standard error; lines, from a thread, if that is no terminal."""

    def __init__(self, *args, **options):
        self.is_terminal, self.ended = sys.stderr.isatty(), threading.Event()
        if not self.is_terminal:  # never drawn by tqdm
            options = {"bar_format": LINE, **options, "delay": math.inf}
        super().__init__(*args, **{"leave": False, "dynamic_ncols": True, **options})
        if not self.is_terminal and not self.disable:
            threading.Thread(target=self.tell, daemon=True).start()

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
        super().close()
