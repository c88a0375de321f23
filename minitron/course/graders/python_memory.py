"""What an answer keeps where the meter cannot see it: in NumPy arrays, bytes, lists of floats.

Tensors are the meter's. Everything else is found by following references: from the variables of
the answer's functions that are running, from the globals of its file, or from an object of its own.
"""

import gc
import sys
from array import array
from collections import deque
from types import BuiltinFunctionType, CodeType, FrameType, FunctionType, ModuleType

import numpy
from torch import Tensor

VALUES = (bytes, bytearray, str, int, float, complex, array)
CONTAINERS = (list, tuple, dict, set, frozenset, deque)
CLOSED = (type, ModuleType, FrameType, CodeType, BuiltinFunctionType)
"""Where references lead away from what an answer keeps."""


def python_bytes(*roots: object) -> int:
    """Bytes of arrays, bytes, numbers and containers that can be reached from `roots`."""
    total, seen, left = 0, set(), list(roots)
    while left:
        held = left.pop()
        if id(held) in seen or isinstance(held, CLOSED) or _is_packages(held):
            continue
        seen.add(id(held))
        if isinstance(held, numpy.ndarray):
            total += held.nbytes if held.base is None else 0
            left.append(held.base)
        elif isinstance(held, VALUES):
            total += sys.getsizeof(held)
        else:
            total += sys.getsizeof(held) if isinstance(held, CONTAINERS) else 0
            left += _references(held)
    return total


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
    return type(held).__module__.startswith("minitron.")


def _references(held: object) -> list:
    if isinstance(held, Tensor):
        return list(vars(held).values())  # what was hung on it; its values are the meter's
    if isinstance(held, FunctionType):  # not its globals, which are a whole module
        return [held.__closure__, held.__defaults__, held.__dict__]
    return gc.get_referents(held)
