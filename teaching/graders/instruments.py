"""What the graders measure with, which an answer must leave as it is."""

import builtins
import sys
from operator import is_
from types import ModuleType

import torch
import torch.distributed
import torch.nn.functional

from minitron.pytorch.private import c10d_module


class Instruments:
    """Functions and classes as they were before an answer ran.

    Looking at all of them takes milliseconds, so what has not changed since the last look is only
    compared by identity: by `is_`, as each `id` is an audit event, of which the guard hears.
    """

    def __init__(self):
        self.modules = find_instruments()
        self.before = snapshot(self.modules)
        self.codes = [(value, code) for value, code in self.before.values() if code is not None]
        self.namespaces = [vars(owner) for owner in [*self.modules, *owners(self.modules)]]
        self.look()

    def look(self) -> None:
        """Remember what every name stands for."""
        self.seen = [(list(space), list(space.values())) for space in self.namespaces]

    def is_as_seen(self) -> bool:
        """Return whether every name stands for what it did, and every function has its code."""
        spaces = zip(self.namespaces, self.seen, strict=True)
        return all(sys.modules.get(module.__name__) is module for module in self.modules) \
            and all(value.__code__ is code for value, code in self.codes) \
            and all(list(space) == names and all(map(is_, space.values(), values))
                    for space, (names, values) in spaces)

    def replaced(self) -> str | None:
        """Name one that is another now, or has other code; None if there is none."""
        if self.is_as_seen():
            return None
        after = snapshot(self.modules)
        for (owner, name), (value, code) in self.before.items():
            now = after.get((owner, name), (None, None))
            if now[0] is not value or now[1] is not code:
                return f"{owner}.{name}"
        self.look()
        return None


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
    for cls in classes(modules):
        seen |= _methods(cls)
    return seen


def classes(modules: list[ModuleType]) -> list[type]:
    """Those whose methods count too: the modules' own, where they are ours, and tensors."""
    ours = [module for module in modules if module.__name__.startswith(("minitron.", "teaching."))]
    return [torch.Tensor, *(value for module in ours for value in vars(module).values()
                            if issubclass(type(value), type)
                            and value.__module__ == module.__name__)]


def owners(modules: list[ModuleType]) -> list[type]:
    """The classes in whose namespaces these methods may stand."""
    return list(dict.fromkeys(base for cls in classes(modules) for base in cls.__mro__))


def _methods(cls: type) -> dict[tuple[str, str], tuple[object, object]]:
    values = {name: value for base in reversed(cls.__mro__) for name, value in vars(base).items()}
    return {(cls.__qualname__, name): (value, getattr(value, "__code__", None))
            for name, value in values.items() if callable(value)}
