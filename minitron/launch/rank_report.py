"""Where ranks are and what became of them, in words.

    ranks 0, 1 and 3 wait in all_reduce #0 (16 B, axis world), cell line 4: dist.all_reduce(x)
    rank 2 has finished

A rank that hangs is asked for its stack through its pipe, where a thread of its own answers, also
while the rank is within gloo. One that keeps Python's lock is asked by a signal, which Python's
faulthandler answers; Windows has no such signal, and there the last announced call must do.
"""

import linecache
import os
import re
import signal
import sysconfig
import time
from collections.abc import Mapping
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from types import MappingProxyType

import torch

from minitron.launch.rank_process import ASK, WHERE, Failure, Frame, strip_launcher

PACKAGE = Path(__file__).parents[1]
LEDGER = str(PACKAGE / "measure" / "ledger.py")
STANDARD_LIBRARY = Path(sysconfig.get_path("stdlib"))
SITE_PACKAGES = Path(torch.__file__).parents[1]
GENERATED = ("<frozen ", "<eval_with_key>")  # but "<stdin>" is the user's
SECONDS_FOR_STACKS = 1.0
PLURAL = {"does": "do", "has": "have", "is": "are", "was": "were", "waits": "wait"}


class RankError(RuntimeError):
    """A rank raised, died or hung, or the ranks called different collectives.

    `failures` has a `Failure` for every rank that did not return.
    """

    def __init__(self, message: str, failures: dict[int, Failure]):
        super().__init__(message)
        self.failures = failures

    def _render_traceback_(self) -> list[str]:
        # What IPython shows: where the ranks are matters, not where `run` found out.
        return [f"{type(self).__name__}: {self}"]


def report(headline: str, texts: dict[int, str], traceback: str = "") -> str:
    """Join a headline, one line for all ranks of the same text, and a traceback."""
    ranks_of: dict[str, list[int]] = {}
    for rank, text in sorted(texts.items()):
        ranks_of.setdefault(text, []).append(rank)
    lines = [f"  {say(ranks, text)}" for text, ranks in ranks_of.items()]
    if traceback:
        lines += ["", name_cells(traceback)]
    return "\n".join([headline, *lines])


def say(ranks: list[int], text: str) -> str:
    """Write "rank 2 is ..." or "ranks 0, 1 and 3 are ..."."""
    if len(ranks) == 1:
        return f"rank {ranks[0]} {text}"
    verb, _, rest = text.partition(" ")
    *others, last = map(str, ranks)
    return f"ranks {', '.join(others)} and {last} {PLURAL.get(verb, verb)} {rest}"


def describe(frames: list[Frame], call, phase: str | None = None) -> str:
    """Say where a rank is from its stack, outermost first, and the last `Call` it announced.

    `phase` is the name that it has given to what it does, such as "B1 stage 0".
    """
    if not frames:
        return f"waits in {call}" if call else "does not answer"
    where = place(frames) if phase is None else f"in {phase}, {place(frames)}"
    operation = collective(frames)
    if call is None and is_starting(frames):
        return "is starting"
    if operation is None:
        return f"is {where}" if phase else f"is at {where}"
    if call is None:
        return f"waits in {operation}, {where}"
    if operation == "wait":  # for this call or for an earlier one
        return f"waits for {call} or an earlier call, {where}"
    return f"waits in {call}, {where}"


def is_waiting(frames: list[Frame], call) -> bool:
    """Tell whether a rank waits for another, as far as can be known without its stack."""
    return call is not None if not frames else collective(frames) is not None


def is_hang(places: list[tuple[list[Frame], object]]) -> bool:
    """Tell whether a rank waits for one that does nothing, from all ranks' frames and last calls.

    One that is still starting does something, which takes long on a busy machine.
    """
    starting = [call is None and (not frames or is_starting(frames)) for frames, call in places]
    return not any(starting) and any(is_waiting(*place) for place in places)


def is_starting(frames: list[Frame]) -> bool:
    """Tell whether a rank has not come to its function yet: PyTorch or the ledger is at work."""
    return frames[0].file == LEDGER or all(_is_library(f.file) for f in frames)


def collective(frames: list[Frame]) -> str | None:
    """Name the torch.distributed function that these frames are in, "wait" for a `.wait()`."""
    for frame in frames:
        path = Path(frame.file).as_posix()
        if "torch/distributed/" in path and not path.endswith("c10d_logger.py"):
            return frame.function
        if ".wait(" in frame.source and not _is_standard(frames[-1].file):
            return "wait"  # for a Work: what waits for a thread or a process is Python's own
    return None


def place(frames: list[Frame]) -> str:
    """Show the innermost line that the user wrote, such as "cell line 4: x = f(x)"."""
    not_library = [frame for frame in frames if not _is_library(frame.file)]
    written = [frame for frame in not_library if PACKAGE not in Path(frame.file).parents]
    frame = (written or not_library or frames)[-1]
    file = "cell" if is_cell(frame.file) else Path(frame.file).name
    return f"{file} line {frame.line}: {frame.source}".removesuffix(": ")


def is_cell(file: str) -> bool:
    """Tell whether the source is known to Python without being a file that could change."""
    entry = linecache.cache.get(file)
    return entry is not None and len(entry) == 4 and entry[1] is None


def name_cells(traceback: str) -> str:
    """Write "Cell, line 4" in place of the file names that Jupyter invents."""

    def name(match: re.Match) -> str:
        return "Cell" if is_cell(match[1]) else match[0]

    return re.sub(r'File "([^"\n]+)"(?=, line \d)', name, traceback)


def killed(exit_code: int | None) -> Failure:
    """Describe a process that ended before its outcome was known."""
    if exit_code is not None and exit_code < 0:
        names = {number.value: number.name for number in signal.Signals}
        return Failure(f"was killed by {names.get(-exit_code, f'signal {-exit_code}')}")
    return Failure(f"exited with code {exit_code} before it returned")


def read_stacks(
    files: dict[int, Path], pipes: Mapping[int, Connection] = MappingProxyType({})
) -> dict[int, list[Frame]]:
    """Ask processes, given as {pid: file of its faulthandler}, for their stacks.

    Those that do not answer through their pipes are asked by a signal. That is the second choice:
    the thread that answers reads the frames of a main thread that may be changing them.
    """
    before = {pid: file.stat().st_size for pid, file in files.items()}

    def silent_after(seconds: float) -> list[int]:
        deadline = time.monotonic() + seconds
        while True:
            time.sleep(0.02)  # also lets the last one finish writing
            silent = [pid for pid, file in files.items() if file.stat().st_size == before[pid]]
            if not silent or time.monotonic() > deadline:
                return silent

    for pipe in pipes.values():
        with suppress(OSError):  # it has ended meanwhile
            pipe.send_bytes(WHERE)
    for pid in silent_after(SECONDS_FOR_STACKS if pipes else 0.0) if ASK is not None else ():
        with suppress(ProcessLookupError):
            os.kill(pid, ASK)
    silent_after(SECONDS_FOR_STACKS)
    return {pid: parse_stack(file.read_text()[before[pid] :]) for pid, file in files.items()}


def parse_stack(text: str) -> list[Frame]:
    """Read the main thread's frames, outermost first, from what faulthandler wrote.

    Empty if they are not there: of more than 100 threads it leaves out the oldest.
    """
    if text.endswith("\n...\n"):
        return []
    linecache.checkcache()
    _, _, main_thread = text.rpartition("(most recent call first):\n")
    found = re.findall(r'  File "(.*)", line (\d+) in (.*)', main_thread)
    frames = [
        Frame(file, int(line), function, linecache.getline(file, int(line)).strip())
        for file, line, function in reversed(found)
    ]
    return strip_launcher(frames)


def _is_standard(file: str) -> bool:
    parents = Path(file).parents
    return STANDARD_LIBRARY in parents and SITE_PACKAGES not in parents


def _is_library(file: str) -> bool:
    parents = Path(file).parents
    of_others = STANDARD_LIBRARY in parents or SITE_PACKAGES in parents
    return file.startswith(GENERATED) or (of_others and PACKAGE not in parents)


class Prints:
    """What ranks print to their files, shown line by line and in rank order.

    Rank 0 is heard as it speaks, rank 1 once rank 0 has finished, and so on.
    """

    def __init__(self, files: list[Path]):
        for file in files:
            file.touch()
        self._files = [open(file, encoding="utf-8", errors="replace") for file in files]
        self._unfinished_line = [""] * len(files)

    def show(self, finished: list[bool]) -> None:
        """Show what may be shown now; `finished` tells which ranks will print no more."""
        for rank, is_last in enumerate(finished):
            self._show(rank, is_last)
            if not is_last:
                break

    def close(self) -> None:
        """Show the rest of all ranks."""
        self.show([True] * len(self._files))
        for file in self._files:
            file.close()

    def _show(self, rank: int, is_last: bool) -> None:
        *lines, rest = (self._unfinished_line[rank] + self._files[rank].read()).split("\n")
        if is_last and rest:
            lines, rest = [*lines, rest], ""
        self._unfinished_line[rank] = rest
        for line in lines:
            print(f"[rank {rank}] {line.rsplit(chr(13), 1)[-1]}")  # a progress bar's last state
