"""How tensor parallelism cuts each parameter: a plan for the modules, and what follows from it.

Read in this order: PLAN, Cut, plan_cuts.
"""

import fnmatch
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from minitron.config import ModelConfig
from minitron.cost.tensor import kv_heads_per_rank, share

PLAN = {
    "token_embedding": "vocabulary",  # weight (V/tp, D)
    "blocks.*.attention.query": "columns",  # (D/tp, D): H/tp heads
    "blocks.*.attention.key": "columns",  # (G K/tp, D), or one head if G < tp
    "blocks.*.attention.value": "columns",
    "blocks.*.attention.out": "rows",  # (D, D/tp), the columns of H/tp heads
    "blocks.*.mlp.gate": "columns",  # (F/tp, D); Llama alone has it
    "blocks.*.mlp.up": "columns",
    "blocks.*.mlp.down": "rows",  # (D, F/tp)
    "head": "columns",  # (V/tp, D)
}
"""Which modules are cut, and how; the others are replicated.

A linear layer computes x A. Cut by columns of A, each rank computes some of the outputs; by rows,
it reads some of the inputs. PyTorch stores A transposed: weights are (outputs, inputs).
"""


@dataclass(frozen=True)
class Cut:
    """Which part of a parameter a rank holds: number `index` of `count` equal ones along `dim`.

    The same part is on `copies` ranks next to each other. Count 1: all of it, on all ranks. If it
    `is_partial`, each of these ranks has a partial sum of its gradient; else each has all of it.
    """

    dim: int
    index: int
    count: int
    copies: int
    is_partial: bool = False

    def of(self, full: Tensor) -> Tensor:
        """Return this rank's part, a view."""
        return full.chunk(self.count, self.dim)[self.index]

    def copy_of(self, full: Tensor) -> Tensor:
        """Copy this rank's part, contiguous as kernels expect it, so that the rest can be freed."""
        return self.of(full).clone(memory_format=torch.contiguous_format)

    def origin(self, shard: torch.Size) -> tuple[int, ...]:
        """Return where in the full tensor a part of shape `shard` starts."""
        return tuple(size * self.index if dim == self.dim else 0 for dim, size in enumerate(shard))

    def unshard(self, parts: list[Tensor]) -> Tensor:
        """Join what all ranks hold, in their order."""
        return torch.cat(parts[:: self.copies], self.dim)

    def full_shape(self, shard: torch.Size) -> torch.Size:
        """Return the full shape of which `shard` is a part."""
        shape = list(shard)
        shape[self.dim] *= self.count
        return torch.Size(shape)


def plan_cuts(model: nn.Module, rank: int, size: int) -> dict[str, Cut]:
    """Return the cut of every parameter by its name, for rank `rank` of `size`.

    Raises ConfigError for sizes of the model that do not divide.
    """
    require_sizes(model.config, size)
    dims: dict[str, int] = {}
    for path, kind in planned(model):
        dims[f"{path}.weight"] = 1 if kind == "rows" else 0
        if kind != "rows":  # whose bias is added to the sum: every rank holds it
            dims[f"{path}.bias"] = 0

    cuts = {}
    for name, _ in model.named_parameters():
        count = size if name in dims else 1
        if name.rpartition(".")[0].endswith((".key", ".value")):
            count = min(count, model.config.num_kv_heads)
        copies = size // count
        is_shared = name in dims and copies > 1  # by ranks with other query heads
        cuts[name] = Cut(dims.get(name, 0), rank // copies, count, copies, is_shared)
    return cuts


def planned(model: nn.Module) -> Iterator[tuple[str, str]]:
    """Yield the modules that the plan cuts: path and kind, in the model's order."""
    for path, _ in model.named_modules():
        for pattern, kind in PLAN.items():
            if fnmatch.fnmatchcase(path, pattern):
                yield path, kind


def require_sizes(model: ModelConfig, size: int) -> None:
    """Raise ConfigError if a size of the model does not divide over `size` ranks."""
    for name in ("num_heads", "ffn_width", "vocab_size"):
        share(f"model.{name}", getattr(model, name), size)
    kv_heads_per_rank(model, size)
