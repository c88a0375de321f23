"""What the graders measure with, which an answer must leave as it is."""

import builtins
import sys
from collections.abc import Iterator
from operator import is_
from types import FunctionType, ModuleType

import torch
import torch.distributed
import torch.nn.functional

from minitron.pytorch.private import c10d_module


class Instruments:
    """Functions and classes as they were before an answer ran.

    To look at all of them by their full names takes many milliseconds. So namespaces are compared
    by the identity of what is in them (by `is_`, as each `id` is an audit event, of which the
    guard hears), and names are made up only where something that can be called has changed.
    """

    def __init__(self):
        self.modules = find_instruments()
        self.spaces = {owner: vars(owner) for owner in [*self.modules, *owners(self.modules)]}
        self.before = {owner: dict(space) for owner, space in self.spaces.items()}
        self.codes = {value: value.__code__ for space in self.before.values()
                      for value in space.values() if type(value) is FunctionType}
        self.seen = dict(self.before)

    def is_as_seen(self) -> bool:
        """Return whether every name stands for what it did, and every function has its code."""
        return self._have_modules_and_code() and not self._changed()

    def replaced(self) -> str | None:
        """Name one that is another now, or has other code; None if there is none."""
        changed = self._changed()
        calls = any(callable(value) for owner in changed for value in self._news(owner))
        if self._have_modules_and_code() and not calls:
            self.seen |= {owner: dict(self.spaces[owner]) for owner in changed}
            return None
        before = snapshot(self.modules, self.before)
        after = snapshot(self.modules, self.spaces)
        before |= {("sys.modules", module.__name__): module for module in self.modules}
        for (owner, name), value in before.items():
            if after.get((owner, name)) is not value or self._has_other_code(value):
                return f"{owner}.{name}"
        self.seen = {owner: dict(space) for owner, space in self.spaces.items()}
        return None

    def _have_modules_and_code(self) -> bool:
        return all(sys.modules.get(module.__name__) is module for module in self.modules) \
            and not any(map(self._has_other_code, self.codes))

    def _has_other_code(self, value: object) -> bool:
        return type(value) is FunctionType and value.__code__ is not self.codes[value]

    def _changed(self) -> list:
        """The owners in whose namespaces a name has come, gone, or stands for something else."""
        return [owner for owner, space in self.spaces.items()
                if len(space) != len(seen := self.seen[owner])
                or not all(map(is_, space, seen))
                or not all(map(is_, space.values(), seen.values()))]

    def _news(self, owner) -> Iterator[object]:
        """What one name stood for, or stands for now, where these differ."""
        space, seen = self.spaces[owner], self.seen[owner]
        for name in {*space, *seen}:
            values = space.get(name), seen.get(name)
            if values[0] is not values[1]:
                yield from values


def find_instruments() -> list[ModuleType]:
    own = ("minitron.measure", "minitron.pytorch", "teaching", "minitron.launch.rank_process")
    return [torch, torch.nn.functional, torch.autograd, torch.distributed,
            c10d_module, builtins,
            *(module for name, module in list(sys.modules.items()) if name.startswith(own))]


def snapshot(modules: list[ModuleType], spaces: dict) -> dict[tuple[str, str], object]:
    """Every function and class of these modules, and of their classes, as `spaces` have them."""
    seen = {("sys.modules", module.__name__): sys.modules.get(module.__name__)
            for module in modules}
    for module in modules:
        seen |= {(module.__name__, name): value for name, value in spaces[module].items()
                 if callable(value)}
    for cls in classes(modules, spaces):
        seen |= _methods(cls, spaces)
    return seen


def classes(modules: list[ModuleType], spaces: dict) -> list[type]:
    """Those whose methods count too: the modules' own, where they are ours, and tensors."""
    ours = [module for module in modules if module.__name__.startswith(("minitron.", "teaching."))]
    return [torch.Tensor, *(value for module in ours for value in spaces[module].values()
                            if issubclass(type(value), type)
                            and value.__module__ == module.__name__)]


def owners(modules: list[ModuleType]) -> list[type]:
    """The classes in whose namespaces these methods may stand."""
    spaces = {module: vars(module) for module in modules}
    return list(dict.fromkeys(base for cls in classes(modules, spaces) for base in cls.__mro__))


def _methods(cls: type, spaces: dict) -> dict[tuple[str, str], object]:
    values = {}
    for base in reversed(cls.__mro__):
        values |= spaces.get(base, vars(base))
    return {(cls.__qualname__, name): value for name, value in values.items() if callable(value)}
