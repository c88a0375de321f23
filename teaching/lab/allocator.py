"""A model of PyTorch's CUDA caching allocator, for machines without a GPU.

The rules and their constants are those of `c10/cuda/CUDACachingAllocator.cpp`: sizes are rounded up
to 512 bytes; requests up to 1 MiB are served from 2 MiB segments, requests below 10 MiB from 20 MiB
segments, and larger ones get a segment of their own, rounded up to 2 MiB. The smallest free block
that fits is used, and split if the rest is worth keeping. A freed block merges with its free
neighbors in the same segment. When the device is full, segments without a live block are returned
to it, and the request is tried once more.

Left out: streams, `max_split_size_mb`, garbage collection, expandable segments, graph pools.
"""

from dataclasses import dataclass

MIB = 2**20
SMALL = MIB
"""Requests up to this size come from the pool of small blocks."""
CAPACITY = 320 * MIB
"""Of the device in chapter 2's experiment, and what the recorded one may add to its memory."""


def round_up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple


def segment_bytes(size: int) -> int:
    """Return how many bytes the device is asked for when no free block fits `size` bytes."""
    if size <= SMALL:
        return 2 * MIB
    return 20 * MIB if size < 10 * MIB else round_up(size, 2 * MIB)


@dataclass(eq=False)
class Memory:
    """A block: `size` bytes of a segment, live or free."""

    size: int
    live: bool = False


class OutOfDeviceMemory(Exception):
    """No free block fits, and the device has no room for another segment."""


class CachingAllocator:
    """Segments of a device of `capacity` bytes, each a list of blocks in address order."""

    def __init__(self, capacity: int):
        self.capacity = capacity
        self.pools: dict[str, list[list[Memory]]] = {"small": [], "large": []}

    def allocate(self, asked: int) -> Memory:
        """Return a live block of at least `asked` bytes; raise OutOfDeviceMemory if none fits."""
        size = round_up(asked, 512)
        pool = self.pools["small" if size <= SMALL else "large"]
        if self._find(pool, size) is None and not self._grow(pool, size):
            self.release_free_segments()
            if not self._grow(pool, size):
                raise OutOfDeviceMemory(self._explain(size))
        return self._cut(*self._find(pool, size), size)

    def free(self, block: Memory) -> None:
        """Mark a block as free, and merge it with the free neighbors in its segment."""
        block.live = False
        for segment in self.segments:
            for i in reversed(range(1, len(segment))):
                if not segment[i].live and not segment[i - 1].live:
                    segment[i - 1].size += segment.pop(i).size

    def release_free_segments(self) -> None:
        """Return segments without a live block to the device, as `empty_cache()` does."""
        for pool in self.pools.values():
            pool[:] = [segment for segment in pool if any(block.live for block in segment)]

    @property
    def segments(self) -> list[list[Memory]]:
        return [segment for pool in self.pools.values() for segment in pool]

    @property
    def reserved(self) -> int:
        """Bytes taken from the device: what `nvidia-smi` sees."""
        return sum(block.size for segment in self.segments for block in segment)

    @property
    def allocated(self) -> int:
        """Bytes of live blocks: what tensors hold."""
        return sum(block.size for segment in self.segments for block in segment if block.live)

    @property
    def largest_free(self) -> int:
        free = [block.size for segment in self.segments for block in segment if not block.live]
        return max(free, default=0)

    def picture(self, unit: int = 10 * MIB) -> str:
        """Draw each segment in brackets, a character per `unit` bytes: # is live, . is free."""
        return " ".join(
            "[" + "".join(".#"[block.live] * (block.size // unit) for block in segment) + "]"
            for segment in self.segments
        )

    def _find(self, pool: list[list[Memory]], size: int) -> tuple[list[Memory], Memory] | None:
        """Return the smallest free block of at least `size` bytes, and its segment."""
        fitting = [
            (segment, block)
            for segment in pool
            for block in segment
            if not block.live and block.size >= size
        ]
        return min(fitting, key=lambda pair: pair[1].size, default=None)

    def _grow(self, pool: list[list[Memory]], size: int) -> bool:
        """Take another segment from the device, if it has room for one."""
        needed = segment_bytes(size)
        if self.reserved + needed > self.capacity:
            return False
        pool.append([Memory(needed)])
        return True

    def _cut(self, segment: list[Memory], block: Memory, size: int) -> Memory:
        """Use the first `size` bytes of a block; a rest worth keeping stays free."""
        rest = block.size - size
        if rest >= (512 if size <= SMALL else SMALL + 1):
            block.size = size
            segment.insert(segment.index(block) + 1, Memory(rest))
        block.live = True
        return block

    def _explain(self, size: int) -> str:
        waiting, left = self.reserved - self.allocated, self.capacity - self.reserved
        return (
            f"tried to allocate {size // MIB} MiB; {left // MIB} MiB "
            f"of the device are left.\n{self.allocated // MIB} MiB are allocated, "
            f"{waiting // MIB} MiB reserved but unallocated (largest block "
            f"{self.largest_free // MIB} MiB)"
        )
