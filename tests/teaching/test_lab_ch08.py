"""Chapter 8's measurements: what drifts, which masks differ, what a block keeps and sends."""

import pytest
import torch

from minitron.launch import run
from minitron.parallel.tensor.layers import apply_tensor_parallel
from minitron.parallel.tensor.sequence import apply_sequence_parallel
from teaching.lab import ch08


def forgotten(model, group):
    parallel = apply_sequence_parallel(model, group)
    parallel.finish = lambda: None
    return parallel


@pytest.mark.parametrize(("apply", "same"), [(apply_sequence_parallel, True), (forgotten, False)])
def test_norm_weights_drift_without_the_sum_while_losses_agree(apply, same):
    (losses, gains), (other_losses, other_gains) = run(ch08.train, 2, apply, 3, watch=False)
    assert losses == other_losses
    assert torch.equal(gains, other_gains) is same
    assert (ch08.verdict(apply, 2) == "the same training") is same


@pytest.mark.parametrize(
    ("apply", "stream_alike"), [(apply_tensor_parallel, True), (apply_sequence_parallel, False)]
)
def test_heads_differ_and_the_stream_is_alike_where_it_is_replicated(apply, stream_alike):
    first, second = run(ch08.masks, 2, apply)
    assert not torch.equal(first["heads"], second["heads"])
    assert torch.equal(first["stream"], second["stream"]) is stream_alike


def test_replicated_parameters_have_partial_gradients():
    names = ch08.parameters_whose_gradients_differ(2)
    assert "final_norm.weight" in names and "position_embedding.weight" in names
    assert "blocks.0.mlp.down.bias" in names and "blocks.0.mlp.up.bias" not in names


@pytest.mark.parametrize("way", ch08.WAYS)
def test_a_block_keeps_and_sends_what_the_formulas_say(way):
    by_rank = run(ch08.measured_block, ch08.RANKS, way, True, watch=False)
    assert by_rank[0][0] == pytest.approx(ch08.block_formula(way, "selective", 2), rel=0.005)
    assert [sum(call.sent for call in calls) for _, calls in by_rank] == ch08.sent_formula(way)
