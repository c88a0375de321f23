"""What the graders measure with, which an answer must leave as it is."""

import builtins
import sys
from types import ModuleType

import torch
import torch.distributed
import torch.nn.functional

from minitron.pytorch.private import c10d_module


def find_instruments() -> list[ModuleType]:
    own = ("minitron.measure", "minitron.pytorch", "teaching", "minitron.launch.rank_process")
    return [torch, torch.nn.functional, torch.autograd, torch.distributed,
            c10d_module, builtins,
            *(module for name, module in list(sys.modules.items()) if name.startswith(own))]


def snapshot(modules: list[ModuleType]) -> dict[tuple[str, str], tuple[object, object]]:
    """Every function and class of these modules, and of their classes, with its code."""
    seen = {("sys.modules", module.__name__): (sys.modules.get(module.__name__), None)
            for module in modules}
    for module in modules:
        for name, value in list(vars(module).items()):
            if callable(value):
                seen[module.__name__, name] = value, getattr(value, "__code__", None)
            is_ours = issubclass(type(value), type) and value.__module__ == module.__name__
            if is_ours and module.__name__.startswith(("minitron.", "teaching.")):
                seen |= _methods(value)
    return seen | _methods(torch.Tensor)


def _methods(cls: type) -> dict[tuple[str, str], tuple[object, object]]:
    values = {name: value for base in reversed(cls.__mro__) for name, value in vars(base).items()}
    return {(cls.__qualname__, name): (value, getattr(value, "__code__", None))
            for name, value in values.items() if callable(value)}
