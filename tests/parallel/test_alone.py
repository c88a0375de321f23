"""An axis without a grid around it answers what the interface promises, as one device does."""

from functools import partial

import pytest
import torch

from minitron.comm.agreement import SINGLE_RANK
from minitron.launch import run
from minitron.parallel.data.fsdp import apply_fsdp
from minitron.parallel.data.zero import apply_zero1
from minitron.parallel.one_device import OneDevice
from minitron.parallel.pipeline.stages import apply_pipeline_parallel
from minitron.parallel.tensor.layers import apply_tensor_parallel
from minitron.parallel.tensor.sequence import apply_sequence_parallel
from minitron.proof.oracle import mean_loss, sample_batches, small_model

MAX_NORM = 0.01  # below the norm of these gradients
AXES = {
    "tensor": apply_tensor_parallel,
    "sequence": apply_sequence_parallel,
    "pipeline": apply_pipeline_parallel,
    "zero 1": apply_zero1,
    "zero 3": apply_fsdp,
}
make_model = partial(
    small_model, "llama", width=16, num_heads=2, num_kv_heads=2, ffn_width=24, vocab_size=30
)


def answers(group, apply):
    """A norm before clipping, clipped gradients, a summed loss and logits, in float64."""
    torch.manual_seed(0)
    parallel = apply(make_model().double(), group)
    optimizer = parallel.make_optimizer(partial(torch.optim.SGD, lr=0.1))
    [tokens] = sample_batches((4,), vocabulary=30, sequence=8)
    mean_loss(parallel, tokens, 2)
    updated = [p for each in optimizer.param_groups for p in each["params"]]
    norm = parallel.clip(updated, MAX_NORM)
    gradients = parallel.full_gradients()

    inputs, targets = tokens[:, :-1], tokens[:, 1:]
    loss = parallel.sum_losses(parallel.model, [(inputs, targets)])
    with torch.no_grad():
        logits = parallel.full_model()(inputs)
    return norm, gradients, loss, logits


def all_answers(group):
    return {name: answers(group, apply) for name, apply in AXES.items()}


@pytest.fixture(scope="module")
def by_rank():
    return run(all_answers, 2, watch=False)


@pytest.mark.parametrize("name", AXES)
def test_it_clips_and_predicts_as_one_device_does(by_rank, name):
    expected = answers(SINGLE_RANK, lambda model, group: OneDevice(model))
    assert expected[0] > MAX_NORM
    for found in by_rank:
        torch.testing.assert_close(found[name], expected, rtol=1e-11, atol=1e-12)
