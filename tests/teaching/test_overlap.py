"""The predicted step is the queue of buckets on one link, beside the compute."""

from types import SimpleNamespace

import pytest

from minitron import cost
from teaching.overlap import (
    Compute,
    compute_in_proportion,
    exposed_seconds,
    gradient_sizes,
    hidden_share,
    in_buckets,
    step_lanes,
    transfers,
)

SIZES = [100, 300, 600]
LINK = (0.5, 1000.0)


def seconds(num_bytes):
    return cost.ring_all_reduce_seconds(num_bytes, 2, *LINK)


def test_gradients_become_ready_from_the_last_to_the_first():
    compute = compute_in_proportion(SIZES, forward=1.0, backward=2.0)
    assert compute.ready == pytest.approx([3.0, 2.8, 2.2])
    assert compute.backward == 3.0


def test_a_bucket_leaves_when_its_last_gradient_is_ready_and_the_link_is_free():
    first, second = transfers([9.0, 2.8, 2.2], SIZES, [[2, 1], [0]], 2, *LINK)
    assert first == (2.8, pytest.approx(2.8 + seconds(900)))
    assert second == (9.0, pytest.approx(9.0 + seconds(100))), "the link was free before"

    first, second = transfers([3.0, 2.8, 2.2], SIZES, [[2, 1], [0]], 2, *LINK)
    assert second[0] == first[1] > 3.0, "the link was busy"


def test_the_optimizer_waits_for_the_last_bucket_or_for_the_backward_pass():
    compute = Compute(1.0, [3.0, 2.0], optimizer=0.5)
    lanes = step_lanes(compute, [(2.0, 2.5), (3.0, 4.0)])
    assert [(block.kind, block.start, block.end) for block in lanes["predicted compute"]] == [
        ("forward", 0, 1000),
        ("backward", 1000, 3000),
        ("optimizer", 4000, 4500),
    ]
    assert [(b.start, b.end) for b in lanes["predicted network"]] == [(2000, 2500), (3000, 4000)]
    assert step_lanes(compute, [])["predicted compute"][-1].start == 3000


def test_exposed_is_what_is_on_its_way_after_the_backward_pass():
    compute = Compute(1.0, [3.0, 2.0], optimizer=0.5)
    assert exposed_seconds(compute, [(2.0, 2.5), (3.0, 4.0)]) == 1.0
    assert exposed_seconds(compute, [(2.0, 2.5)]) == 0


def test_buckets_and_sizes_of_a_model_that_is_never_made():
    model = cost.PUBLISHED["Llama 3.2 1B"]
    sizes = gradient_sizes(model)
    assert sum(sizes) == 2 * cost.num_parameters(model)
    buckets = in_buckets(sizes)
    assert sorted(sum(buckets, [])) == list(range(len(sizes))) and 0 in buckets[-1]
    assert sum(sizes[index] for index in buckets[0]) <= 2**20


def test_the_hidden_share_counts_each_moment_once():
    calls = [
        SimpleNamespace(started=start, finished=end)
        for start, end in [(0, 4), (6, 8), (1, 3), (7, 10)]
    ]  # 8 seconds, twice two at once
    spans = [SimpleNamespace(start=3, end=7), SimpleNamespace(start=9, end=20)]
    assert hidden_share(calls, spans) == pytest.approx((1 + 1 + 1) / 8)
    assert hidden_share(calls, []) == 0
