"""What an answer keeps where the meter cannot see it: in NumPy arrays, bytes, lists of floats.

Tensors are the meter's. Everything else is found by following references: from the variables of
the answer's functions that are running, from the globals of its file, or from an object of its own.
"""

import gc
import sys
from array import array
from collections import deque
from collections.abc import Iterator
from types import BuiltinFunctionType, CodeType, FrameType, FunctionType, ModuleType

import numpy
from torch import Tensor

VALUES = (bytes, bytearray, str, int, float, complex, array)
CONTAINERS = (list, tuple, dict, set, frozenset, deque)
CLOSED = (type, ModuleType, FrameType, CodeType, BuiltinFunctionType)
"""Where references lead away from what an answer keeps."""


def python_bytes(*roots: object) -> int:
    """Bytes of arrays, bytes, numbers and containers that can be reached from `roots`."""
    total = 0
    for held in reachable(*roots):
        if isinstance(held, numpy.ndarray):
            total += held.nbytes if held.base is None else 0
        elif isinstance(held, VALUES + CONTAINERS):
            total += sys.getsizeof(held)
    return total


def reachable(*roots: object) -> Iterator[object]:
    """All that can be reached from `roots`, each once."""
    seen, left = {}, list(roots)
    while left:
        held = left.pop()
        if id(held) not in seen and not isinstance(held, CLOSED):
            seen[id(held)] = held  # alive, so that its number is not given to another
            yield held
            left += _references(held)


def variables(file: str) -> list:
    """What the functions of `file` that are running have in their variables and globals."""
    frame, found = sys._getframe(1), []
    while frame is not None:
        if frame.f_code.co_filename == file:
            variables = frame.f_locals
            found += [*variables.values(), *frame.f_globals.values()]
            if type(variables) is dict and variables is not frame.f_globals:
                variables.clear()  # up to Python 3.12 a copy, which would keep them all alive
        frame = frame.f_back
    return found


def _is_packages(held: object) -> bool:
    """Whether it is the package's or a grader's own: a meter, say, reached through a hook."""
    return type(held).__module__.startswith(("minitron.", "teaching."))


def _references(held: object) -> list:
    if isinstance(held, VALUES) or _is_packages(held):
        return []
    if isinstance(held, numpy.ndarray):
        return [held.base]
    if isinstance(held, Tensor):
        return list(vars(held).values())  # what was hung on it; its values are the meter's
    if isinstance(held, FunctionType):  # not its globals, which are a whole module
        return [held.__closure__, held.__defaults__, held.__dict__]
    return gc.get_referents(held)
