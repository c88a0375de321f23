"""Names for stretches of a step: a profiler's trace shows them (see `measure.trace`), and
listeners are notified of those that are a phase of the step.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext

from torch.autograd.profiler import record_function
from torch.distributed import ProcessGroup

from minitron.pytorch.private import is_profiling

TECHNIQUES = {
    "dp": "data parallel",
    "tp": "tensor parallel",
    "pp": "pipeline",
    "replicas": "replicas",
    "cp": "context parallel",
    "ep": "expert parallel",
}
NOTHING = nullcontext()


def span(*words, phase: str | None = None) -> AbstractContextManager:
    """Name what runs inside "word word ..."; costs next to nothing without a listener.

    A process group is named after the technique that its axis is for. With `phase` the block is a
    phase of the step by that name, such as an action of a pipeline.
    """
    if phase is not None and LISTENERS.entered:
        return tell_listeners(phase, span(*words))
    if not is_profiling():
        return NOTHING
    return record_function(" ".join(map(name, words)))


def name(word) -> str:
    if not isinstance(word, ProcessGroup):
        return str(word)
    if word.group_desc == "default_pg":
        return "all ranks"
    return TECHNIQUES.get(word.group_desc.removeprefix("mesh_"), "some ranks")


# Listeners

Listener = Callable[[str], AbstractContextManager]


class Listeners(threading.local):
    """What each thread's phases enter; a thread begins without any."""

    def __init__(self):
        self.entered: list[Listener] = []


LISTENERS = Listeners()


@contextmanager
def listening(listener: Listener) -> Iterator[None]:
    """Enter `listener(phase)` around each phase that this thread begins inside the block."""
    LISTENERS.entered.append(listener)
    try:
        yield
    finally:
        LISTENERS.entered.remove(listener)


@contextmanager
def tell_listeners(phase: str, named: AbstractContextManager) -> Iterator[None]:
    with ExitStack() as stack:
        stack.enter_context(named)
        for listener in LISTENERS.entered:
            stack.enter_context(listener(phase))
        yield
