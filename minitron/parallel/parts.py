"""What a rank keeps of a parameter, as boxes of the full one: so any layout can save and load.

Tensor parallelism leaves a rank a block of each parameter, ZeRO a range of the flattened block.
Such a range is a few boxes: the end of a row, whole rows, the beginning of a row. Boxes of one
layout and of another overlap in boxes, so what one has saved the other can read.

Read in this order: boxes_of, Part, Boxes.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

Offset = tuple[int, ...]


def boxes_of(shape: tuple[int, ...], own: range) -> Iterator[tuple[Offset, Offset]]:
    """Yield offset and sizes of the boxes that make up the elements `own` of a tensor of `shape`.

    Their elements, one box after the other, are those of `own` in their order. There are at most
    2 d - 1 of them in d dimensions.
    """
    if len(own) == prod(shape):
        yield (0,) * len(shape), tuple(shape)
        return
    if len(shape) == 1:
        yield (own.start,), (len(own),)
        return

    row = prod(shape[1:])
    first, last = own.start // row, own.stop // row  # rows in which the range starts and ends
    whole = range(-(-own.start // row), last)
    if own.start % row:
        end = min(row, own.stop - first * row)
        yield from within(first, boxes_of(shape[1:], range(own.start % row, end)))
    if whole:
        yield (whole.start, *(0 for _ in shape[1:])), (len(whole), *shape[1:])
    if own.stop % row and (last > first or own.start % row == 0):
        yield from within(last, boxes_of(shape[1:], range(own.stop % row)))


def within(row: int, boxes: Iterator[tuple[Offset, Offset]]) -> Iterator[tuple[Offset, Offset]]:
    """Yield boxes of row `row` as boxes of the full tensor."""
    for offset, sizes in boxes:
        yield (row, *offset), (1, *sizes)


@dataclass(frozen=True)
class Chunks:
    """Parts of a tensor of `shape`, by offset: views of what a rank keeps."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    at: dict[Offset, Tensor]

    @staticmethod
    def full(tensor: Tensor) -> "Chunks":
        """Return one box, all of `tensor`."""
        return Chunks(tuple(tensor.shape), tensor.dtype, {(0,) * tensor.dim(): tensor})

    def copy(self) -> "Chunks":
        """Return a copy on the CPU, which does not change with what it was taken from."""
        at = {offset: values.to("cpu", copy=True) for offset, values in self.at.items()}
        return Chunks(self.shape, self.dtype, at)


@dataclass(frozen=True)
class LocalShard:
    """The elements `own` of a flattened block of a parameter.

    The block has `block_shape` and lies at `origin` in the full one, of `shape`.
    """

    shape: tuple[int, ...]
    block_shape: tuple[int, ...]
    origin: Offset
    own: range
    values: Tensor
    """What the optimizer updates: len(own) elements, in any shape."""

    def boxes(self, values: Tensor) -> Chunks:
        """View `values`, a number for each of the part's elements, as boxes of the full one."""
        flat, start, at = values.detach().view(-1), 0, {}
        for offset, sizes in boxes_of(self.block_shape, self.own):
            count = prod(sizes)
            place = tuple(a + b for a, b in zip(self.origin, offset, strict=True))
            at[place] = flat[start : start + count].view(sizes)
            start += count
        return Chunks(self.shape, values.dtype, at)
