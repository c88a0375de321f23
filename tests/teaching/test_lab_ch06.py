"""Chapter 6's measurements: the queue that predicts prefetch, what hybrid sharding sends."""

from unittest.mock import patch

import pytest
import torch

from minitron.comm.collectives import all_gather_ring, reduce_scatter_ring
from minitron.cost.sharding import zero_volume
from minitron.launch import run
from minitron.measure.ledger import Call, Span
from minitron.parallel.data.fsdp import apply_fsdp
from teaching.lab import ch06, show_source, verdict
from teaching.lab import ch06_prefetch as overlap

L = overlap.WIDE.num_layers
START = torch.arange(3 * 5 * 5, dtype=torch.float64).view(3, 5, 5)


def like_zero_1(group, num_steps=3):
    """Send what ZeRO-1 sends, and keep what it keeps, without training."""
    weights, grads = START.clone(), torch.zeros(START.numel(), dtype=START.dtype)
    for _ in range(num_steps):
        own = reduce_scatter_ring(grads, group)
        all_gather_ring(weights.view(-1), group)
    return {"parameter": [weights], "gradient": [grads], "optimizer state": [own.repeat(2)]}


def test_the_report_counts_errors_and_bytes_and_draws_what_is_kept(capsys):
    right = START.clone()
    right[2, 4, 4] += 1
    figure = ch06.report(like_zero_1, 1, START, right, num_ranks=2)
    head, *rows = capsys.readouterr().out.splitlines()
    assert head == "rank   error   bytes sent     formula   sent in units of P"
    for rank, row in enumerate(rows):
        sent = zero_volume(75, 8, 2, rank, 1).sent
        assert row.split() == [str(rank), "1e+00", str(sent), str(sent), f"{sent / 600:.4f}"]
    written = [text.get_text() for axes in figure.axes for text in axes.texts]
    assert len(rows) == 2 and written.count("600 B") == 4, "two ranks keep two full tensors each"


def test_zero_by_hand_shards_all_weights_at_once_and_then_each_layer():
    sent = [
        [ch06.sent_by_formula(stage, START, 4, rank) for rank in range(4)] for stage in (1, 2, 3)
    ]
    assert [sum(ranks) for ranks in sent] == [6 * 600, 6 * 600, 9 * 600]  # 2 (N-1) P, 3 (N-1) P
    assert sent[1] == [3 * zero_volume(25, 8, 4, rank, 2).sent for rank in range(4)]
    assert sent[0] != sent[1], "a remainder falls on every layer"


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


def step(seconds, forward=0.6, backward=1.2):
    """A step on a link that carries a message while the rank computes, and another afterwards."""
    spans = [Span("forward", 0, forward), Span("backward", forward, forward + backward)]
    calls = [
        Call(0, "all_gather", "dp", torch.float32, 2e8, 1e8, 1e8, "forward", None, 2, start, None)
        for start in (0.0, forward + backward)
    ]
    return calls, spans, seconds


STEPS = {
    "without prefetch": [step(s, 0.66) for s in (4.0, 3.9, 4.2)],
    "with prefetch": [step(s) for s in (2.5, 2.6, 2.4)],
}


def test_a_step_is_compared_with_a_prediction_by_its_own_compute(capsys):
    compared = overlap.compare(STEPS, (0.6, 1.2), 0.1)
    without, with_it = compared.values()
    assert without.measured == pytest.approx([3900, 4000, 4200])
    assert without.predicted == pytest.approx(1800 + 18 * 100)
    assert without.with_own_compute == pytest.approx(without.predicted + 60)
    assert with_it.predicted == with_it.with_own_compute == pytest.approx(1800 + 3 * 100)
    assert without.errors == pytest.approx((400, 60))

    overlap.print_times(compared)
    overlap.print_errors(compared)
    assert capsys.readouterr().out.splitlines() == [
        "ms                 predicted   measured  (spread)        predicted, own compute",
        "without prefetch        3600       4000  (3900 to 4200)                 3660",
        "with prefetch           2100       2500  (2400 to 2600)                 2100",
        "gain                    1500       1500                              1560",
        "prefetch pays here",
        "ms                 longer than predicted   due to compute   the rest",
        "without prefetch                     400               60        340",
        "with prefetch                        400                0        400",
        "gain                                   0               60        -60",
        "in the gain, the two parts are no larger than the spread of the repeats: noise",
    ]


@pytest.mark.parametrize(
    ("with_prefetch", "meaning"),
    [
        (2500, "have opposite signs: they cancel, at least in part"),  # parts 60 and -60
        (2300, "add up"),  # 60 and 140
    ],
)
def test_parts_of_the_gain_mean_something_only_beyond_the_spread(with_prefetch, meaning, capsys):
    for spread, said in (
        (300, "are no larger than the spread of the repeats: noise"),
        (1, meaning),
    ):
        compared = {
            "without prefetch": overlap.Comparison([4000, 4000, 4000 + spread], 3600, 3660),
            "with prefetch": overlap.Comparison([with_prefetch] * 3, 2100, 2100),
        }
        overlap.print_errors(compared)
        assert capsys.readouterr().out.splitlines()[-1] == f"in the gain, the two parts {said}"


def test_no_gain_is_said():
    slow = {"without prefetch": STEPS["with prefetch"], "with prefetch": STEPS["without prefetch"]}
    with patch("builtins.print") as said:
        overlap.print_times(overlap.compare(slow, (0.6, 1.2), 0.1))
    assert said.call_args.args[0].startswith("no gain here")


def test_the_fastest_step_is_drawn_below_its_prediction():
    network = 0.0, 2e8  # a message takes half a second
    figure = overlap.draw_fastest(STEPS, (0.6, 1.2), 0.1, network, "with prefetch")
    lanes = [label.get_text() for label in figure.axes[0].get_yticklabels()]
    assert [lane.split()[0] for lane in lanes] == ["predicted", "predicted", "rank", "rank"]
    assert figure.axes[0].get_xlim()[1] == pytest.approx(2300)  # until the last message is there
    assert overlap.hidden_in_fastest(STEPS["with prefetch"], network) == pytest.approx(0.5)


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
