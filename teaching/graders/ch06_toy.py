"""What the graders of chapter 6 share: odd models, shards cut by hand, late arrival, live bytes."""

import time
from weakref import WeakValueDictionary

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from minitron.pytorch.private import (
    DispatchMode,
    all_gather_base_op,
    reduce_scatter_base_op,
    storage_address,
    tensors_in,
    tree_map,
)
from teaching.graders.ch04_toy import VOCAB, Toy
from teaching.graders.ranks import Wire, _LateWork, relative_error

CLOSE = 1e-5  # of the largest value: PyTorch's clipping adds 1e-6 to the norm
ROWS, WIDTH = 4, 5
PATIENCE = 1.0  # seconds
SMALL = 4096  # bytes, of a loss and counts of steps: what the network may hold is larger
ELEMENT = 8  # bytes: all is float64


class Odd(Toy):
    """211 trainable elements, which no number of ranks divides."""

    def __init__(self):
        super().__init__()
        self.odd = nn.Parameter(torch.full((1,), 0.5, dtype=torch.float64))

    def forward(self, tokens: Tensor, extra: bool, swapped: bool) -> Tensor:
        return self.odd * super().forward(tokens, extra, swapped)


class Tiny(nn.Module):
    """Two elements: fewer than ranks."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([0.7, -0.4], dtype=torch.float64))

    def forward(self, tokens: Tensor, extra: bool, swapped: bool) -> Tensor:
        ramp = torch.arange(VOCAB, dtype=torch.float64)
        return self.weight[0] * F.one_hot(tokens, VOCAB) + self.weight[1] * ramp


class Scale(nn.Module):
    """One element, of shape (): fewer than ranks."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(0.8))

    def forward(self, x: Tensor) -> Tensor:
        return self.scale * x


def make_blocks() -> list[nn.Module]:
    """Three units of 82, 1 and 30 elements, float64, alike on all ranks."""
    blocks = [nn.Sequential(nn.Linear(WIDTH, 7), nn.Tanh(), nn.Linear(7, WIDTH)), Scale(),
              nn.Linear(WIDTH, WIDTH)]
    generator = torch.Generator().manual_seed(6)
    for block in blocks:
        for parameter in block.double().parameters():
            parameter.data.normal_(generator=generator)
    return blocks


def loss_of(out: Tensor, rank: int, number: int) -> Tensor:
    return (out - data(rank, number)[1]).square().mean()


def data(rank: int, number: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(100 * rank + number)
    return torch.randn(2, ROWS, WIDTH, generator=generator, dtype=torch.float64).unbind()


def shard_length(num_elements: int, num_ranks: int) -> int:
    return -(-num_elements // num_ranks)


def cut(tensors: list[Tensor], num_ranks: int) -> list[Tensor]:
    """The shards (L,) of tensors that lie end to end, the last one's end filled with zeros."""
    flat = torch.cat([tensor.detach().flatten() for tensor in tensors])
    length = shard_length(len(flat), num_ranks)
    filled = torch.cat([flat, flat.new_zeros(num_ranks * length - len(flat))])
    return [filled[rank * length:(rank + 1) * length].clone() for rank in range(num_ranks)]


def is_close(seen, right: Tensor) -> bool:
    """Whether two tensors are equal but for rounding; zeros must be zeros."""
    if not isinstance(seen, Tensor) or seen.shape != right.shape:
        return False
    return torch.equal(seen, right) or relative_error(seen, right) < CLOSE


class ShardWire(Wire):
    """A Wire on which reduce-scatter and all-gather too arrive when they are waited for."""

    def __init__(self, allowed: set[str]):
        super().__init__(allowed)
        self._late = _LateArrival(self.note)


class _LateArrival(DispatchMode):
    def __init__(self, note):
        super().__init__()
        self.note = note
        self.works: list[_LateWork] = []  # a boxed Work does not keep its Python part alive

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func not in ARRIVES_LATE:
            return func(*args, **(kwargs or {}))
        copies = tree_map(lambda tensor: tensor.detach().clone(), args[0])
        result = func(copies, *args[1:], **(kwargs or {}))
        tensors = tensors_in(args[0])
        work = _LateWork(result, tensors, tensors_in(copies), len(self.works), self.note)
        self.works.append(work)
        return args[0], work.boxed()


ARRIVES_LATE = {
    torch.ops.c10d.allreduce_.default,
    torch.ops.c10d.reduce_scatter_.default,
    reduce_scatter_base_op,
    torch.ops.c10d.allgather_.default,
    all_gather_base_op,
}


class Held(DispatchMode):
    """Count the bytes of what is made in the block while it lives, at the size it has by then.

    Other than `measure.meter` it notices that a storage has been resized. Under it, everything is
    made: the model, the answer's object, what autograd saves.
    """

    def __init__(self):
        super().__init__()
        self.storages = WeakValueDictionary()  # by address
        self.peak = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        before = {storage_address(tensor) for tensor in tensors_in(args, kwargs)}
        outputs = func(*args, **(kwargs or {}))
        for tensor in tensors_in(outputs):
            if storage_address(tensor) not in before:
                self.storages[storage_address(tensor)] = tensor.untyped_storage()
        self.peak = max(self.peak, self.now())
        return outputs

    def now(self) -> int:
        """Bytes that are alive."""
        return sum(storage.nbytes() for storage in list(self.storages.values()))

    def settled(self, most: int) -> int:
        """As `now`; the network's own thread may hold a tensor a little longer than wait()."""
        give_up = time.monotonic() + PATIENCE
        while self.now() > most and time.monotonic() < give_up:
            time.sleep(0.01)
        return self.now()


def storage_bytes(module: nn.Module) -> int:
    """Bytes behind the parameters of `module`, those of one storage once."""
    storages = {storage_address(p): p.untyped_storage().nbytes() for p in module.parameters()}
    return sum(storages.values())
