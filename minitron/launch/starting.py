"""What must not disturb ranks as they start and end: Ctrl-C, and the script of the parent."""

import signal
import sys
import threading
import types
from collections.abc import Iterator
from contextlib import contextmanager


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
