"""What a backward pass does in which order: messages that start and end, and matrix products."""

from contextlib import contextmanager
from unittest.mock import patch

import torch
from torch.utils._python_dispatch import TorchDispatchMode

PRODUCTS = (torch.ops.aten.mm.default, torch.ops.aten.addmm_.default)


class Watcher(TorchDispatchMode):
    """Collects events: (method, "starts"), (method, "ends"), ("product", shape of the result)."""

    def __init__(self):
        super().__init__()
        self.events = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if func in PRODUCTS:
            self.events.append(("product", tuple(out.shape)))
        return out

    @contextmanager
    def listening(self, cls, *names):
        """Listen to methods of `cls` that start something and return a function that waits."""
        with patch.multiple(cls, **{name: self.timed(name, getattr(cls, name)) for name in names}):
            yield

    def timed(self, name, start):
        def start_and_tell(*args):
            self.events.append((name, "starts"))
            wait = start(*args)

            def wait_and_tell():
                self.events.append((name, "ends"))
                return wait()

            return wait_and_tell

        return start_and_tell
