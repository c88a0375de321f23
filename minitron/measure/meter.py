"""The meter: which bytes are held at every moment of a step, and by whom?

    with Meter(model, optimizer) as meter:
        train_step(model, optimizer, micro_batches, rate, clip_norm)
    print(meter.peak.total, meter.peak.bytes, meter.peak.tensors[:3])

A `DispatchMode` sees the outputs of every operator, in the forward pass, in backward and in
the optimizer, on CPU, on CUDA and with fake tensors. Each new storage is counted once, whatever
views it has, with its real size in bytes, until it dies. It starts as temporary, and moves up:

    activation        once autograd has saved it for the backward pass
    gradient          once it is a parameter's `.grad`
    optimizer state   once it stands in `optimizer.state`, or is the optimizer's own weight
    parameter         what the model owned before, buffers included; a storage that is filled
                      and emptied in place, as sharding does with gathered parameters

Only the model's device is counted. What existed before and belongs to neither (the tokens, say)
stays outside. Not seen: memory that a kernel takes and gives back within one operator, and what
the allocator adds (CUDA rounds each block up to 512 bytes).

Read in this order: Meter, its __torch_dispatch__, live.Entry.
"""

import time
import weakref
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import islice

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from minitron.measure.live import CATEGORIES, Entry, Moment, Snapshot
from minitron.pytorch.private import (
    DispatchMode,
    device_of,
    in_backward,
    next_node_number,
    resize_storage_op,
    running_node_number,
    storage_address,
    tensors_in,
)


class Meter(DispatchMode):
    """Count live bytes by category while it is entered; each `with` starts a new count.

    The model's and optimizer's tensors count from the start. Under a FakeTensorMode, enter that
    mode first.
    """

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer | None = None):
        super().__init__()
        self.model, self.optimizer = model, optimizer
        self.device = device_of(next(model.parameters()))
        self.timeline: list[Moment] = []

    def now(self) -> dict[str, int]:
        """Return the live bytes of each of `CATEGORIES`."""
        return dict(self._bytes)

    @property
    def peak(self) -> Snapshot:
        """What was alive at the (first) moment with the most bytes."""
        totals = [moment.total for moment in self.timeline]
        index = totals.index(max(totals))
        alive = [entry.describe(index) for entry in self._history if entry.is_alive_at(index)]
        alive.sort(key=lambda tensor: -tensor.bytes)
        return Snapshot(dict(self.timeline[index].bytes), self.timeline[index].phase, alive)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Name the moments of the block, instead of forward, backward or optimizer."""
        self._named, outer = name, self._named
        try:
            yield
        finally:
            self._named = outer

    # Where it listens

    def __enter__(self):
        self.timeline, self._start = [], time.perf_counter()
        self._bytes = dict.fromkeys(CATEGORIES, 0)
        self._live: dict[int, Entry] = {}  # by the address of the storage
        self._history: list[Entry] = []
        self._phase, self._named, self._recomputing = "forward", None, False
        self._modules = [""]  # the modules whose forward is running, innermost last
        self._module_of_node: dict[int, str] = {}
        self._register_owned()
        self._record("")

        with ExitStack() as exits:
            for handle in self._install_hooks():
                exits.callback(handle.remove)
            exits.enter_context(saved_tensors_hooks(self._pack, lambda tensor: tensor))
            super().__enter__()
            self._exits = exits.pop_all()
        return self

    def __exit__(self, *error):
        super().__exit__(*error)
        self._exits.__exit__(*error)
        self._record("")

    def _install_hooks(self) -> Iterator:
        for name, module in self.model.named_modules():
            yield module.register_forward_pre_hook(partial(self._enter_module, name))
            yield module.register_forward_hook(self._leave_module, always_call=True)
        for name, parameter in self.model.named_parameters():
            if parameter.requires_grad:
                yield parameter.register_post_accumulate_grad_hook(
                    lambda p, name=name: self._own(p.grad, "gradient", name)
                )
        if self.optimizer is not None:
            yield self.optimizer.register_step_pre_hook(self._enter_optimizer)
            yield self.optimizer.register_step_post_hook(self._leave_optimizer)

    def _enter_module(self, name: str, *_) -> None:
        self._modules.append(name)
        if not in_backward():  # else it is recomputation
            self._phase = "forward"

    def _leave_module(self, *_) -> None:
        self._modules.pop()

    def _enter_optimizer(self, *_) -> None:
        self._register_owned()  # gradients that were assigned, not accumulated
        self._phase = "optimizer"
        self._record("")  # its operators work in place: later none may make a new tensor

    def _leave_optimizer(self, *_) -> None:
        self._register_owned()
        self._record("")

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if in_backward():
            self._phase = "backward"
            self._listen_to_recompute(func, args)
        elif self._phase == "optimizer":
            self._register_newest_state()
        inputs = {storage_address(tensor) for tensor in tensors_in(args, kwargs)}

        outputs = func(*args, **(kwargs or {}))

        op, module = func.overloadpacket.__name__, self._current_module()
        made = [
            tensor for tensor in tensors_in(outputs) if storage_address(tensor) not in inputs
        ]  # or it is a view
        if func is resize_storage_op:
            self._refill(args[0])
        if any([self._track(tensor, op, module) for tensor in made]) or func is resize_storage_op:
            self._record(op)
        return outputs

    def _listen_to_recompute(self, func, args) -> None:
        # Recomputation's own hooks detach what they keep. Only recomputation has gradients enabled
        # within the backward pass; inside a hook they are off.
        if func is not torch.ops.aten.detach.default:
            self._recomputing = torch.is_grad_enabled()
        elif self._recomputing:
            self._mark_saved(args[0])

    def _pack(self, tensor: Tensor) -> Tensor:
        self._mark_saved(tensor)
        # Not the tensor itself: a node that saves its own output would keep itself alive.
        return tensor.detach()

    def _mark_saved(self, tensor: Tensor) -> None:
        if storage_address(tensor) in self._live:
            self._promote(self._live[storage_address(tensor)], "activation")

    def _current_module(self) -> str:
        running = running_node_number()
        if running is not None and self._modules == [""]:
            return self._module_of_node.get(running, "")
        # the autograd node of the running operator has just been numbered
        number = next_node_number() - 1
        self._module_of_node.setdefault(number, self._modules[-1])
        return self._modules[-1]

    def _track(self, tensor: Tensor, name: str, module: str) -> bool:
        """Start counting the tensor's storage; False if it is already counted, or elsewhere."""
        key = storage_address(tensor)
        if key in self._live or device_of(tensor) != self.device:
            return False
        entry = Entry(tensor, name, module, born=len(self.timeline))
        entry.storage = weakref.ref(tensor.untyped_storage(), lambda _: self._forget(key))
        self._live[key] = entry
        self._history.append(entry)
        self._bytes["temporary"] += entry.bytes
        return True

    def _forget(self, key: int) -> None:
        entry = self._live.pop(key)
        entry.died = len(self.timeline)
        self._bytes[entry.category_at(entry.died)] -= entry.bytes

    def _refill(self, tensor: Tensor) -> None:
        """Count anew a storage that changes its size: sharding gathers parameters into it."""
        key = storage_address(tensor)
        if key in self._live:
            self._live[key].storage = None  # or its end would be counted twice
            self._forget(key)
        self._own(tensor, "parameter", "unsharded")

    def _promote(self, entry: Entry, category: str) -> None:
        """Move a storage up to `category`, from the last moment on: the one that made it."""
        last = max(len(self.timeline) - 1, entry.born)
        old = entry.category_at(last)
        if CATEGORIES.index(category) < CATEGORIES.index(old):
            entry.categories[last] = category
            for counts in (self._bytes, *(moment.bytes for moment in self.timeline[last:])):
                counts[old] -= entry.bytes
                counts[category] += entry.bytes

    def _record(self, op: str) -> None:
        seconds = time.perf_counter() - self._start
        self.timeline.append(Moment(self._named or self._phase, op, dict(self._bytes), seconds))

    def _own(self, tensor: Tensor | None, category: str, name: str) -> None:
        if tensor is not None and device_of(tensor) == self.device:
            self._track(tensor, name, "")
            entry = self._live[storage_address(tensor)]
            entry.name, entry.module = name, name.rpartition(".")[0]
            self._promote(entry, category)

    def _register_owned(self) -> None:
        for name, parameter in [*self.model.named_parameters(), *self.model.named_buffers()]:
            self._own(parameter, "parameter", name)
            self._own(parameter.grad, "gradient", name)
        if self.optimizer is not None:
            for group in self.optimizer.param_groups:
                for parameter in group["params"]:  # the model's are already parameters
                    self._own(parameter, "optimizer state", self._name_of(parameter))
                    self._own(parameter.grad, "gradient", self._name_of(parameter))
            for parameter in self.optimizer.state:
                self._register_state(parameter)

    def _register_newest_state(self) -> None:
        # The first step fills it one parameter after the other: the last may still be empty.
        for parameter in islice(reversed(self.optimizer.state), 2):
            self._register_state(parameter)

    def _register_state(self, parameter: Tensor) -> None:
        for key, value in self.optimizer.state[parameter].items():
            if isinstance(value, Tensor):
                self._own(value, "optimizer state", f"{self._name_of(parameter)} {key}")

    def _name_of(self, parameter: Tensor) -> str:
        entry = self._live.get(storage_address(parameter))
        return entry.name if entry else "master weight"
