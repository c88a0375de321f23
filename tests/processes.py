"""Processes of a test's own, forked rather than started (importing torch takes seconds)."""

import os
import sys
import time
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from pathlib import Path

import psutil

from minitron.launch import start_method
from minitron.launch.starting import context_of, without_main


def started(function: Callable, *args, output: Path) -> BaseProcess:
    """Call a module's function in a process that is forked from the server of ranks.

    What it prints goes to the file `output`.
    """
    with without_main():
        context = context_of(start_method())
        process = context.Process(target=_call, args=(output, function, *args))
        process.start()
    return process


def _call(output: Path, function: Callable, *args) -> None:
    with open(output, "wb", buffering=0) as file:
        for stream in (1, 2):
            os.dup2(file.fileno(), stream)
    sys.stdout = sys.stderr = open(1, "w", buffering=1, closefd=False)
    function(*args)


def descendants(pid: int, at_least: int) -> list[psutil.Process]:
    """Return all processes below one; fails if they stay fewer than `at_least`.

    One look at /proc, while other tests start and end processes, has missed some before.
    """
    for _ in range(100):
        found = psutil.Process(pid).children(recursive=True)
        if len(found) >= at_least:
            return found
        time.sleep(0.1)
    raise AssertionError(f"of {at_least} processes {len(found)} were seen: {found}")
