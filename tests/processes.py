"""Processes of a test's own, without the seconds in which a new Python would import torch."""

import os
import sys
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from pathlib import Path

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
