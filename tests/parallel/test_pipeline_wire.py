"""What a pipeline sends, byte for byte, and what is said where it stands still."""

import time
from collections import Counter
from functools import partial
from unittest.mock import patch

import pytest
import torch

from minitron.cost.pipeline import pipeline_volume
from minitron.launch import RankError, run
from minitron.measure.ledger import Ledger
from minitron.parallel.grid import Grid
from minitron.parallel.pipeline.executor import ScheduleExecutor
from minitron.parallel.pipeline.schedules import (
    gpipe,
    interleaved,
    one_forward_one_backward,
    zero_bubble,
)
from minitron.parallel.pipeline.stages import apply_pipeline_parallel
from minitron.proof.oracle import small_model
from tests.parallel.losses import B, S, V, micro_batches, summed

D, M = 15, 6  # small_gpt's width
MESSAGE = B * S * D * 4  # bytes
CASES = {
    "GPipe": (gpipe, 2, 1),
    "1F1B": (one_forward_one_backward, 3, 1),
    "halves": (zero_bubble, 3, 1),
    "two chunks": (partial(interleaved, num_chunks=2), 2, 2),
    "alone": (one_forward_one_backward, 1, 1),
}
gpt = partial(small_model, "gpt", vocab_size=V, width=D, num_layers=4)
untied = partial(gpt, tied_embedding=False)


def calls_of_a_step(group, make_model, make_schedule):
    """Of the step, and of what follows the optimizer's."""
    model = make_model()
    pipeline = apply_pipeline_parallel(model, group, make_schedule)
    parallel = Grid(model, pipeline=pipeline)
    optimizer = parallel.make_optimizer(partial(torch.optim.SGD, lr=0.1))
    with Ledger() as step:
        pipeline.run(micro_batches(M), summed, 99.0)
        parallel.finish()
    with Ledger() as update:
        optimizer.step()
    weight = pipeline.tied
    return step.calls, update.calls, None if weight is None else (weight, weight.grad)


@pytest.mark.parametrize("name", CASES)
def test_each_boundary_sees_one_message_a_micro_batch_each_way(name):
    make_schedule, num_ranks, num_chunks = CASES[name]
    done = run(calls_of_a_step, num_ranks, untied, make_schedule)
    last_stage = num_ranks * num_chunks - 1

    sent: Counter = Counter()
    for rank, (calls, update, _) in enumerate(done):
        messages = [call for call in calls if call.op in ("send", "recv")]
        assert {call.payload for call in messages} <= {MESSAGE}
        volume = tuple(sum(getattr(call, way) for call in messages) for way in ("sent", "received"))
        assert volume == pipeline_volume(B, S, D, 4, num_ranks, M, rank, num_chunks)
        sent.update((rank, call.peer) for call in messages if call.op == "send")
        others = [(call.op, call.payload) for call in calls if call not in messages]
        assert others == [("broadcast", 4)]  # the loss
        assert update == []

    expected: Counter = Counter()
    for stage in range(last_stage):
        here, there = stage % num_ranks, (stage + 1) % num_ranks
        expected[here, there] += M
        expected[there, here] += M
    assert sent == expected
    assert sum(call.sent for calls, *_ in done for call in calls if call.op == "broadcast") == 4 * (
        num_ranks - 1
    )


def test_a_tied_embedding_is_exchanged_once_and_stays_the_same():
    done = run(calls_of_a_step, 3, gpt, one_forward_one_backward)
    size = 4 * V * D
    for rank, (calls, update, _) in enumerate(done):
        found = sorted((call.op, call.peer) for call in calls if call.payload == size)
        other = 2 - rank
        assert found == ([] if rank == 1 else [("recv", other), ("send", other)])
        num_messages = M * (4 if rank == 1 else 2)
        assert sum(call.payload == MESSAGE for call in calls) == num_messages
        assert len(calls) == len(found) + num_messages + 1  # the loss
        assert update == []  # the same sum makes the same update
    (weight, grad), (other_weight, other_grad) = done[0][2], done[2][2]
    assert torch.equal(weight, other_weight) and torch.equal(grad, other_grad)


def stands_still(group):
    """Rank 1 never leaves the backward pass of the second micro-batch."""
    backward = ScheduleExecutor.backward

    def stuck(self, action):
        if group.rank() == 1 and action.micro_batch == 1:
            time.sleep(100)
        backward(self, action)

    with patch.object(ScheduleExecutor, "backward", stuck):
        apply_pipeline_parallel(gpt(), group).run(micro_batches(4), summed, 99.0)


def test_a_stuck_stage_is_named_by_its_action():
    with pytest.raises(RankError) as caught:
        run(stands_still, 2, timeout=3)
    text = str(caught.value)
    assert "rank 0 waits for recv" in text and "in B1 stage 0" in text
    assert "rank 1 is in B1 stage 1" in text
