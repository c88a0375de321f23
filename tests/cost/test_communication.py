"""Volumes and times against hand counts and bounds. That the collectives send these volumes to the
byte is tested with them, in tests/comm/test_collectives.py."""

import math

import pytest
import torch

from minitron import cost
from minitron.cost.communication import SECONDS, VOLUMES

ALL_REDUCES = ("ring", "naive", "doubling", "halving")


def volumes(name, num_elements, size):
    function = getattr(cost, f"{name}_volume")
    return [function(num_elements, 1, size, rank) for rank in range(size)]


@pytest.mark.parametrize("size", [1, 2, 3, 5, 8])
def test_chunks_are_cut_as_torch_cuts(size):
    for num_elements in (0, 1, size - 1, size, size + 1, 103):
        cut = torch.empty(num_elements).tensor_split(size)
        assert cost.chunk_sizes(num_elements, size) == [len(chunk) for chunk in cut]


def test_volumes_counted_by_hand():
    # 10 values on 4 ranks: chunks of 3, 3, 2, 2
    assert volumes("ring_reduce_scatter", 10, 4) == [(7, 8), (7, 7), (8, 7), (8, 8)]
    assert volumes("ring_all_gather", 10, 4) == [(7, 7), (8, 7), (8, 8), (7, 8)]
    assert volumes("naive_all_reduce", 10, 4) == [(30, 30), (10, 10), (10, 10), (10, 10)]
    assert volumes("doubling_all_reduce", 10, 4) == 4 * [(20, 20)]
    # 5 ranks: rank 4 hands its tensor to rank 0 and gets the sum
    assert volumes("doubling_all_reduce", 10, 5) == [(30, 30), *3 * [(20, 20)], (10, 10)]
    # rank 0 sends chunks 2 and 3, then 1; it receives 6 and 3 values to add; then the same back
    assert volumes("halving_all_reduce", 10, 4) == [(16, 16), (16, 16), (14, 14), (14, 14)]
    # a tree of 6: 0 -> 1, 2, 4; 1 -> 3, 5
    assert volumes("broadcast", 1, 6) == [(3, 0), (2, 1), *4 * [(0, 1)]]
    assert volumes("reduce", 1, 6) == [(0, 3), (1, 2), *4 * [(1, 0)]]
    assert volumes("gather", 10, 4) == [(0, 7), (3, 0), (2, 0), (2, 0)]
    assert volumes("scatter", 10, 4) == [(7, 0), (0, 3), (0, 2), (0, 2)]
    assert volumes("all_to_all", 10, 4) == [(7, 9), (7, 9), (8, 6), (8, 6)]


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 8, 13])
def test_what_one_rank_sends_another_receives(size):
    for num_elements in (0, 1, size - 1, size + 1, 103):
        collectives = [op for op in VOLUMES if op not in ("send", "recv")]
        every = [
            [
                cost.collective_volume(op, num_elements, 2, size, rank, root=size - 1)
                for rank in range(size)
            ]
            for op in collectives
        ]
        every += [volumes(f"{name}_all_reduce", num_elements, size) for name in ALL_REDUCES]
        for of_ranks in every:
            assert sum(sent for sent, _ in of_ranks) == sum(received for _, received in of_ranks)


@pytest.mark.parametrize("size", [2, 3, 4, 5, 7, 8])
def test_no_link_carries_less_than_in_a_ring(size):
    """2 (N-1)/N of the tensor is the bound; halving reaches it for a power of two."""
    num_elements = 1000 * math.lcm(size, 8)
    bound = 2 * (size - 1) * num_elements // size
    assert volumes("ring_all_reduce", num_elements, size) == size * [(bound, bound)]
    for name in ALL_REDUCES:
        busiest = max(volume.sent for volume in volumes(f"{name}_all_reduce", num_elements, size))
        assert busiest >= bound
        if name == "halving" and size in (2, 4, 8):
            assert busiest == bound


def test_the_root_is_where_a_rooted_operation_starts():
    assert cost.collective_volume("broadcast", 5, 4, 4, rank=2, root=2) == (40, 0)
    assert cost.collective_volume("broadcast", 5, 4, 4, rank=0, root=2) == (0, 20)
    assert cost.collective_volume("gather", 8, 4, 4, rank=0, root=3) == (8, 0)


@pytest.mark.parametrize("size", [1, 2, 4, 8])
@pytest.mark.parametrize("name", ["ring", "doubling", "halving"])
def test_without_latency_the_time_is_that_of_the_busiest_link(name, size):
    """Where every rank is as busy as any other, the volume over the bandwidth; alpha counts the
    messages in a row."""
    num_elements, bandwidth = 840, 1e3
    sent = volumes(f"{name}_all_reduce", num_elements, size)[0].sent
    seconds = getattr(cost, f"{name}_all_reduce_seconds")
    assert seconds(num_elements, size, 0.0, bandwidth) == pytest.approx(sent / bandwidth)
    steps = {"ring": 2 * (size - 1), "doubling": math.log2(size), "halving": 2 * math.log2(size)}
    assert seconds(0, size, 1.0, bandwidth) == steps[name]


def test_times_by_hand():
    # alpha 1 s, 10 bytes/s, 60 bytes
    assert cost.naive_all_reduce_seconds(60, 3, 1.0, 10.0) == 2 * 2 * (1 + 6)
    assert cost.doubling_all_reduce_seconds(60, 3, 1.0, 10.0) == (1 + 2) * (1 + 6)
    assert cost.halving_all_reduce_seconds(60, 3, 1.0, 10.0) == 2 * 1 + 6 + 2 * (1 + 6)
    assert cost.broadcast_seconds(60, 5, 1.0, 10.0) == 3 * (1 + 6)
    assert cost.collective_seconds("barrier", 0, 5, 1.0, 10.0) == 3
    assert cost.collective_seconds("send", 60, 5, 1.0, 10.0) == 7
    assert all(SECONDS[op](0, 1, 1.0, 10.0) == 0 for op in SECONDS if op not in ("send", "recv"))
    assert set(SECONDS) == set(VOLUMES)


def test_trees_win_where_a_rings_latency_is_too_long():
    link = (10e-6, 50e9)
    assert (
        cost.tree_all_reduce_seconds(1e5, 1024, *link)
        < cost.ring_all_reduce_seconds(1e5, 1024, *link) / 10
    )
    assert cost.ring_all_reduce_seconds(1e9, 8, *link) < cost.tree_all_reduce_seconds(1e9, 8, *link)
    # the bytes of a long tensor: 2 n, as of a ring
    assert cost.tree_all_reduce_seconds(1e15, 1024, *link) == pytest.approx(2e15 / 50e9, rel=1e-2)
    assert cost.tree_all_reduce_seconds(1e15, 1, *link) == 0


def test_levels_send_the_least_over_the_slow_link():
    inside, across = cost.Link(1e-6, 400e9), cost.Link(10e-6, 50e9)
    together = cost.hierarchical_all_reduce_seconds(1e9, 8, 4, inside, across)
    assert together == pytest.approx(
        2 * 7 * (1e-6 + 1e9 / 8 / 400e9) + 2 * 3 * (10e-6 + 1e9 / 8 / 4 / 50e9)
    )
    assert together < cost.ring_all_reduce_seconds(1e9, 32, *across)
    assert cost.hierarchical_all_reduce_seconds(
        1e9, 8, 1, inside, across
    ) == cost.ring_all_reduce_seconds(1e9, 8, *inside)


def test_a_fit_finds_the_link_that_made_the_measurements():
    sizes = [1, 1_000, 100_000, 10_000_000]
    seconds = [cost.message_seconds(n, 2e-4, 3e8) for n in sizes]
    assert cost.fit_link(sizes, seconds) == pytest.approx((2e-4, 3e8))

    # the longest message, 20 % late, must not hide the latency of the short ones
    latency, _ = cost.fit_link(sizes, [*seconds[:-1], 1.2 * seconds[-1]])
    assert latency == pytest.approx(2e-4, rel=0.05)
