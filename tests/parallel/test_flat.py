"""Every element has one owner, and the buckets follow the backward pass."""

import pytest
import torch
from torch import nn

from minitron.parallel.data.buckets import bucket_parameters
from minitron.parallel.flat import owned_ranges


def test_owned_ranges_by_hand():
    # 10 elements on 4 ranks: shards of 3; the last holds one, and two that are none
    sizes = [4, 1, 0, 5]
    assert [[list(own) for own in owned_ranges(sizes, 4, rank)] for rank in range(4)] == [
        [[0, 1, 2], [], [], []],
        [[3], [0], [], [0]],
        [[], [], [], [1, 2, 3]],
        [[], [], [], [4]],
    ]


@pytest.mark.parametrize("size", (1, 2, 3, 4, 8))
def test_every_element_has_one_owner(size):
    sizes = [5, 1, 2, 0, 17]
    by_rank = [owned_ranges(sizes, size, rank) for rank in range(size)]
    for ranges, num_elements in zip(zip(*by_rank, strict=True), sizes, strict=True):
        assert [element for own in ranges for element in own] == list(range(num_elements))
    lengths = [sum(map(len, ranges)) for ranges in by_rank]
    assert max(lengths) == -(-sum(sizes) // size)


def test_buckets_are_of_one_dtype_and_in_the_order_of_the_backward_pass():
    a, b, c, d = (nn.Parameter(torch.ones(4)) for _ in range(4))
    low = nn.Parameter(torch.ones(4, dtype=torch.bfloat16))
    buckets = bucket_parameters({a: "a", b: "b", low: "low", c: "c", d: "d"}, bucket_bytes=32)
    names = {a: "a", b: "b", low: "low", c: "c", d: "d"}
    assert [[names[p] for p in bucket] for bucket in buckets] == [["d", "c"], ["low"], ["b", "a"]]
