"""The model of the CUDA caching allocator follows the rules it states."""

import pytest

from teaching.lab.allocator import MIB, CachingAllocator, OutOfDeviceMemory, segment_bytes


def in_halves(capacity=320 * MIB):
    """Five segments of 60 MiB, each half live and half free."""
    allocator = CachingAllocator(capacity)
    for block in [allocator.allocate(60 * MIB) for _ in range(5)]:
        allocator.free(block)
    blocks = [allocator.allocate(30 * MIB) for _ in range(10)]
    for block in blocks[::2]:
        allocator.free(block)
    return allocator


@pytest.mark.parametrize(
    ("asked", "segment"),
    [(1, 2), (MIB, 2), (MIB + 512, 20), (10 * MIB - 512, 20), (10 * MIB, 10), (31 * MIB, 32)],
)
def test_a_segment_is_as_large_as_the_request_says(asked, segment):
    assert segment_bytes(asked) == segment * MIB
    allocator = CachingAllocator(64 * MIB)
    allocator.allocate(asked)
    assert allocator.reserved == segment * MIB


def test_sizes_are_rounded_up_to_512_bytes():
    allocator = CachingAllocator(2 * MIB)
    allocator.allocate(1)
    assert allocator.allocated == 512


def test_free_whole_segments_are_returned_before_a_request_fails():
    allocator = CachingAllocator(320 * MIB)
    blocks = [allocator.allocate(30 * MIB) for _ in range(10)]
    for block in blocks[::2]:
        allocator.free(block)
    allocator.allocate(40 * MIB)
    assert allocator.reserved == allocator.allocated == (5 * 30 + 40) * MIB


def test_a_live_block_pins_its_segment():
    allocator = in_halves()
    assert allocator.reserved - allocator.allocated == 150 * MIB
    message = "150 MiB reserved but unallocated .largest block 30 MiB"
    with pytest.raises(OutOfDeviceMemory, match=message):
        allocator.allocate(40 * MIB)
    assert allocator.reserved == 300 * MIB, "no segment could be returned"
    allocator.allocate(30 * MIB)
    assert allocator.reserved == 300 * MIB, "a free half was used"


def test_free_neighbors_merge_and_live_ones_do_not():
    allocator = CachingAllocator(60 * MIB)
    allocator.free(allocator.allocate(60 * MIB))
    first, second, third = (allocator.allocate(20 * MIB) for _ in range(3))
    allocator.free(first)
    allocator.free(third)
    assert allocator.largest_free == 20 * MIB
    allocator.free(second)
    assert allocator.largest_free == 60 * MIB


def test_the_smallest_block_that_fits_is_used():
    allocator = CachingAllocator(100 * MIB)
    large, small = allocator.allocate(60 * MIB), allocator.allocate(40 * MIB)
    allocator.free(large)
    allocator.free(small)
    assert allocator.allocate(40 * MIB) is small
    assert allocator.picture() == "[......] [####]"


def test_a_small_rest_stays_with_its_block():
    allocator = CachingAllocator(100 * MIB)
    allocator.free(allocator.allocate(32 * MIB))
    assert allocator.allocate(31 * MIB).size == 32 * MIB, "1 MiB is not worth a block"
    assert CachingAllocator(2 * MIB).allocate(1000).size == 1024


def test_small_and_large_requests_do_not_share_a_pool():
    allocator = CachingAllocator(100 * MIB)
    allocator.free(allocator.allocate(60 * MIB))
    allocator.allocate(MIB)
    assert allocator.picture(MIB) == f"[#.] [{60 * '.'}]"
