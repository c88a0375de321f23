"""What the meter has seen: which storages were alive at which moment, as which kind of bytes."""

from dataclasses import dataclass

import torch
from torch import Tensor

CATEGORIES = ("parameter", "gradient", "optimizer state", "activation", "temporary")


@dataclass(frozen=True)
class Moment:
    """What was alive after one operator, before anything it made superfluous was freed."""

    phase: str
    """forward, backward, optimizer, or the name given to `Meter.phase`."""
    op: str
    """The operator that made a new tensor, such as "addmm"; "" at the start and the end, of the
    optimizer's step too."""
    bytes: dict[str, int]
    """Live bytes of each of `CATEGORIES`."""
    seconds: float
    """Since the meter was entered; the meter's own work is in it."""

    @property
    def total(self) -> int:
        return sum(self.bytes.values())


@dataclass(frozen=True)
class LiveTensor:
    """A storage, described by the tensor it was made as."""

    name: str
    """The parameter's global name ("... exp_avg" for optimizer state), or the op that made it."""
    shape: tuple[int, ...]
    dtype: torch.dtype
    bytes: int
    category: str
    module: str
    """The module that made it ("blocks.0.mlp"), in backward the one whose gradient it is, or ""."""


@dataclass(frozen=True)
class Snapshot:
    """All that was alive at one moment; `tensors` from the largest to the smallest."""

    bytes: dict[str, int]
    phase: str
    tensors: list[LiveTensor]
    total = Moment.total


class Entry:
    """A storage's history; moments are numbered by their place in the timeline."""

    def __init__(self, tensor: Tensor, name: str, module: str, born: int):
        self.name, self.module = name, module
        self.shape, self.dtype = tuple(tensor.shape), tensor.dtype
        self.bytes = tensor.untyped_storage().nbytes()
        self.born, self.died = born, None
        self.categories = {born: "temporary"}  # moment -> category from then on
        self.storage = None  # a weak reference, which tells when it dies

    def is_alive_at(self, moment: int) -> bool:
        return self.born <= moment and (self.died is None or moment < self.died)

    def category_at(self, moment: int) -> str:
        return self.categories[max(m for m in self.categories if m <= moment)]

    def describe(self, moment: int) -> LiveTensor:
        category = self.category_at(moment)
        return LiveTensor(self.name, self.shape, self.dtype, self.bytes, category, self.module)
