"""What the benchmarks share: sides that take turns, and the bytes that a step holds."""

import time
from collections.abc import Callable
from weakref import WeakValueDictionary

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from minitron.measure.clock import synchronize


def race(
    steps: list[Callable[[], object]], device: torch.device, rounds: int, warm_up: int = 2
) -> list[list[float]]:
    """Seconds per step of each, round by round; each goes first in its turn."""
    for step in steps:  # allocate, choose kernels, compile, fill .grad
        for _ in range(warm_up):
            step()
    seconds = [[] for _ in steps]
    for turn in range(rounds):
        for offset in range(len(steps)):
            index = (turn + offset) % len(steps)
            synchronize(device)
            start = time.perf_counter()
            steps[index]()
            synchronize(device)
            seconds[index].append(time.perf_counter() - start)
    return seconds


def of_slowest(seconds_by_rank: list[list[list[float]]]) -> list[list[float]]:
    """The largest of the ranks' seconds, by side and round."""
    sides = zip(*seconds_by_rank, strict=True)
    return [[max(times) for times in zip(*side, strict=True)] for side in sides]


def device_of(group: dist.ProcessGroup) -> torch.device:
    on_gpu = "nccl" in str(dist.get_backend_config(group))
    return torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")


def peak_bytes(step: Callable[[], object], device: torch.device, before: int) -> int:
    """Most bytes held in a step; `before`, those that were there before its model was made.

    On CUDA the allocator's count, on the CPU the sizes of the storages that operators use.
    """
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        step()
        return torch.cuda.max_memory_allocated(device) - before
    with Storages() as storages:
        step()
        storages.start_counting()
        step()
    return storages.peak


class Storages(TorchDispatchMode):
    """Most bytes of the storages that operators use, by their sizes at each moment.

    The meter cannot follow FSDP2 on the CPU: it fills and empties storages by `resize_`, which no
    operator sees, and its optimizer works on DTensors, which hide the tensors they hold.
    """

    def __init__(self):
        super().__init__()
        self.storages: WeakValueDictionary = WeakValueDictionary()  # by address
        self.is_counting, self.peak = False, 0

    def start_counting(self) -> None:
        """From now on: before, storages that C++ code has made become known by their use."""
        self.is_counting = True

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        outputs = func(*args, **(kwargs or {}))
        used, made = storages_in((args, kwargs)), storages_in(outputs)
        if self.is_counting:  # what is new and nobody has made is gloo's own, seen at some waits
            self.storages.update({key: made[key] for key in made.keys() - used.keys()})
            total = sum(storage.nbytes() for storage in self.storages.values())
            self.peak = max(self.peak, total)
        else:
            self.storages.update(used | made)
        return outputs


def storages_in(tree) -> dict[int, torch.UntypedStorage]:
    """The storages of all tensors in nested lists, tuples and dicts, by address."""
    tensors = [tensor for tensor in tree_leaves(tree) if isinstance(tensor, Tensor)]
    local = [t._local_tensor if isinstance(t, DTensor) else t for t in tensors]
    storages = [tensor.untyped_storage() for tensor in local]
    return {storage._cdata: storage for storage in storages}
