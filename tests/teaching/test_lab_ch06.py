"""Chapter 6's measurements: the queue that predicts prefetch, what hybrid sharding sends."""

from unittest.mock import patch

import pytest
import torch

from minitron.launch import run
from minitron.parallel.data.fsdp import apply_fsdp
from teaching.lab import ch06, show_source, verdict
from teaching.lab import ch06_prefetch as overlap

L = overlap.WIDE.num_layers


def test_without_prefetch_nothing_overlaps_but_gradients():
    """Two gathers a block; only a block's gradients travel while the next block's are fetched."""
    forward, backward, transfer = 1.0, 2.0, 0.1
    lanes = overlap.predict_lanes((forward * L, backward * L), transfer, prefetch=False)
    blocks = lanes["predicted compute"]
    for before, after in zip(blocks, blocks[1:], strict=False):
        assert after.start - before.end >= 1e3 * transfer - 1e-6
    assert len(lanes["predicted network"]) == 3 * L


def test_with_prefetch_a_fast_network_leaves_three_exposed_transfers():
    passes, transfer = (1.0 * L, 2.0 * L), 0.1
    seconds = overlap.predicted_seconds(passes, transfer, prefetch=True)
    assert seconds == pytest.approx(sum(passes) + 3 * transfer)  # first, at the turn, last
    assert seconds < overlap.predicted_seconds(passes, transfer, prefetch=False)


def test_a_slow_network_is_the_limit():
    seconds = overlap.predicted_seconds((0.0, 0.0), 1.0, prefetch=True)
    assert seconds == pytest.approx(3 * L)


def test_a_transfer_is_drawn_as_long_as_it_occupies_the_link():
    """Whenever the rank waited for it: gloo's reduce-scatter seems to last until then."""
    steps = run(overlap.slow_passes, 2, [overlap.without_prefetch], (1e-3, 1e9), 1, watch=False)
    calls, spans, _ = steps[0][0][0]
    lanes = overlap.measured_lanes(calls, spans, (1e-3, 1e9))
    blocks = lanes["rank 0 network"]
    assert len(blocks) == len(calls) > 3 * L
    for block, call in zip(blocks, sorted(calls, key=lambda call: call.started), strict=True):
        assert block.end - block.start == pytest.approx(1 + call.payload / 2e6)  # ms, 2 ranks
    assert all(a.end <= b.start + 1e-9 for a, b in zip(blocks, blocks[1:], strict=False))


@pytest.mark.parametrize("grid", [(1, 2), (2, 1), (2, 2)])
def test_hybrid_sharding_sends_what_the_formula_says(grid):
    num_ranks = grid[0] * grid[1]
    sent, stored = run(ch06.hybrid_step, num_ranks, grid, watch=False)[0]
    assert sent == ch06.hybrid_formula(grid)
    P = ch06.cost.num_parameters(ch06.shape_of(4))
    assert stored == pytest.approx(4 * P / grid[1], rel=0.01)


def test_hybrid_sharding_is_the_same_training():
    assert verdict(ch06.apply_hybrid, 4) == "the same training"


def test_prefetch_taken_away_changes_no_loss():
    def loss(group, apply):
        model = ch06.Transformer(ch06.shape_of(1))
        ch06.initialize(model, seed=0)
        parallel = apply(model, group)
        optimizer = parallel.shard(ch06.adamw(model.parameters()))
        rows = torch.arange(18).view(2, 9)
        ch06.take_step(model, parallel, optimizer, rows)
        return ch06.loss_of(model, rows).item()

    losses = [run(loss, 2, apply, watch=False) for apply in (apply_fsdp, overlap.without_prefetch)]
    assert losses[0] == losses[1]


def test_a_view_keeps_its_whole_storage():
    whole = torch.zeros(8)
    assert ch06.bytes_kept([whole[:2]]) == 32 and ch06.bytes_kept([whole[:2], whole[2:]]) == 32
    assert ch06.bytes_kept([whole[:2].clone()]) == 8


def test_a_ring_over_two_nodes_crosses_between_them_twice():
    sent = [{"dp": 10, "replicas": 0}] * 4
    assert ch06.between_nodes((1, 4), sent, ranks_per_node=2) == 2 * 10
    sent = [{"dp": 10, "replicas": 3}] * 4  # a group in each node: only the replicas' rings cross
    assert ch06.between_nodes((2, 2), sent, ranks_per_node=2) == 4 * 3


def test_part_of_a_method_is_shown_with_its_place():
    with patch("IPython.display.display") as display:
        show_source(ch06.between_nodes, first="replicas, shards =", last="total = 0")
    place, code = display.call_args.args[0].data.split("\n\n")
    assert place.startswith("[teaching/lab/ch06.py, line ") and ", of between_nodes]" in place
    assert code == "```python\nreplicas, shards = grid\ntotal = 0\n```"


def test_the_recorded_copies_are_hidden_in_part():
    plain, sharded = map(overlap.recorded_steps().get, ("plain step", "FSDP step"))
    assert plain["other_streams_ms"] == 0 < sharded["hidden_ms"] < sharded["other_streams_ms"]
    assert overlap.draw_copies().axes[0].get_xlabel() == "ms of copies in one step"
