"""How ranks start, and what must not disturb it: Ctrl-C, and the script of the parent."""

import multiprocessing
import os
import signal
import sys
import threading
import types
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import forkserver
from multiprocessing.context import BaseContext

from minitron.pytorch import SLOW_TO_IMPORT

PRELOADED = [
    "torch",
    "torch.distributed",
    SLOW_TO_IMPORT,
    "cloudpickle",
    "minitron.launch.rank_process",
]
"""What the server imports, once for all ranks. The launcher itself is most of what an empty rank
would compute."""
LIBRARIES = ("torch", "numpy", "matplotlib", "safetensors", "tokenizers")
"""Of these it also imports what the caller has imported by then: a rank would need half a second
for matplotlib alone."""


def context_of(method: str, also: tuple[str, ...] = ()) -> BaseContext:
    """Return the way to start processes by `method`, with a server that runs if one is needed.

    A server that starts now imports the modules `also`, too.
    """
    context = multiprocessing.get_context(method)
    if method == "forkserver":
        context.set_forkserver_preload([*PRELOADED, *_public_modules_of(LIBRARIES), *also])
        with _same_modules():
            forkserver.ensure_running()
    return context


def _public_modules_of(libraries: tuple[str, ...]) -> list[str]:
    parts = {name: name.split(".") for name in sys.modules}
    return [
        name
        for name, (library, *inner) in parts.items()
        if library in libraries and not any(part.startswith("_") for part in inner)
    ]


@contextmanager
def _same_modules() -> Iterator[None]:
    """Let a Python that starts here find the modules that this one finds.

    Up to Python 3.12 the server looks into the current folder first: another clone may be there.
    """
    own = {"PYTHONPATH": os.pathsep.join(sys.path), "PYTHONSAFEPATH": "1"}
    before = {name: os.environ.get(name) for name in own}
    os.environ.update(own)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


@contextmanager
def ignore_interrupts() -> Iterator[None]:
    """Start processes that Ctrl-C does not reach: it is sent to all of a terminal or kernel."""
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    # those that are started here inherit the mask
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextmanager
def interrupted_later() -> Iterator[None]:
    """Finish first: a second Ctrl-C must not keep the first from ending the ranks."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    came = []
    before = signal.signal(signal.SIGINT, lambda *_: came.append(True))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
    if came:
        signal.raise_signal(signal.SIGINT)


@contextmanager
def without_main() -> Iterator[None]:
    """Hide the parent's script: multiprocessing would run it again in every rank."""
    main, sys.modules["__main__"] = sys.modules["__main__"], types.ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main
