"""Where a rank's block of a parameter lies in the full parameter, and which ranks hold it too.

FSDP2 and DTensor describe a sharded tensor by a mesh and placements along it; this is the same idea
for one axis, or for several together.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from math import prod

import torch
from torch import Tensor


@dataclass(frozen=True)
class Placement:
    """A rank's block: number `index` of `count` equal ones along `dim`; count 1 is all of it.

    The same block is on `copies` ranks next to each other. If it `is_partial`, each of these has a
    partial sum of its gradient; else each has all of it.
    """

    dim: int = 0
    index: int = 0
    count: int = 1
    copies: int = 1
    is_partial: bool = False

    def local(self, full: Tensor) -> Tensor:
        """Return this rank's block, a view."""
        return full.chunk(self.count, self.dim)[self.index]

    def local_copy(self, full: Tensor) -> Tensor:
        """Copy this rank's block, contiguous as kernels expect it; the rest can then be freed."""
        return self.local(full).clone(memory_format=torch.contiguous_format)

    def offset(self, block: torch.Size) -> tuple[int, ...]:
        """Return where in the full tensor a block of this shape starts."""
        return tuple(size * self.index if dim == self.dim else 0 for dim, size in enumerate(block))

    def full_shape(self, block: torch.Size) -> torch.Size:
        """Return the shape of the full tensor that has blocks of this shape."""
        shape = list(block)
        shape[self.dim] *= self.count
        return torch.Size(shape)

    def join(self, blocks: list[Tensor]) -> Tensor:
        """Return the full tensor of what the ranks of one axis hold, in their order."""
        return torch.cat(blocks[:: self.copies], self.dim)


WHOLE = Placement()
"""All of a parameter, on this rank alone."""


def together(placements: Iterable[Placement]) -> Placement:
    """Return where a parameter lies along several axes, of which one at most divides it."""
    placements = list(placements)
    divided = [placement for placement in placements if placement.count > 1]
    assert len(divided) <= 1, f"two axes divide one parameter: {divided}"
    return replace(
        divided[0] if divided else WHOLE,
        copies=prod(placement.copies for placement in placements),
        is_partial=any(placement.is_partial for placement in placements),
    )
