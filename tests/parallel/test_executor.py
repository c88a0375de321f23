"""What a rank holds during and after a step, and what it computes without a gradient."""

from functools import partial
from unittest.mock import patch

import pytest
import torch

from minitron.launch import run
from minitron.measure.ledger import Ledger
from minitron.model.recompute import RECOMPUTE_POLICIES
from minitron.model.transformer import global_name, initialize, materialize
from minitron.parallel.pipeline.executor import ScheduleExecutor
from minitron.parallel.pipeline.schedule_check import peak_activations
from minitron.parallel.pipeline.schedules import (
    gpipe,
    interleaved,
    one_forward_one_backward,
    sequential,
    zero_bubble,
)
from minitron.parallel.pipeline.stages import apply_pipeline_parallel
from minitron.proof.oracle import small_model
from tests.parallel.losses import V, micro_batches, summed

M = 5
gpt = partial(small_model, "gpt", vocab_size=V, num_layers=4)
chunked = partial(interleaved, num_chunks=2)
SCHEDULES = {
    "sequential": sequential,
    "GPipe": gpipe,
    "1F1B": one_forward_one_backward,
    "halves": zero_bubble,
    "two chunks": chunked,
}
HELD = [*((name, 4) for name in SCHEDULES), ("1F1B", 1), ("halves", 1)]
FREEZING = [one_forward_one_backward, zero_bubble]


def seeded(**sizes):
    torch.manual_seed(0)
    return gpt(**sizes)


def held(group, make_schedule, num_micro_batches):
    """The most micro-batches held in a step, and what is left after it."""
    executors, counts = set(), []
    forward = ScheduleExecutor.forward

    def counted(self, action):
        forward(self, action)
        executors.add(self)
        counts.append(len(self.kept) + sum(map(bool, self.deferred.values())))

    pipeline = apply_pipeline_parallel(seeded(), group, make_schedule)
    with patch.object(ScheduleExecutor, "forward", counted):
        pipeline.run(micro_batches(num_micro_batches), summed, 99.0)
    (executor,) = executors
    left = [executor.kept, executor.made, executor.arriving, executor.leaving]
    return max(counts), sum(map(len, left)) + sum(map(len, executor.deferred.values()))


def parts(group, make_schedule):
    """Names on this rank, and whether the weights made there are those of the whole model."""
    with torch.device("meta"):
        model = gpt()
    pipeline = apply_pipeline_parallel(model, group, make_schedule)
    materialize(model, torch.device("cpu"))
    initialize(model, seed=3)
    whole = gpt()
    initialize(whole, seed=3)
    expected = dict(whole.named_parameters())
    same = all(
        torch.equal(parameter, expected[global_name(model, name)])
        for name, parameter in model.named_parameters()
    )
    return [name for name, _ in model.named_parameters()], same, pipeline.ranges


def evaluated(group, make_schedule):
    """A sum of losses and logits without a gradient."""
    model = seeded()
    if group is None:
        with torch.no_grad():
            pairs = micro_batches(M)
            losses = sum(summed(model(tokens), targets) for tokens, targets in pairs)
            return losses, model(pairs[0][0]), True
    pipeline = apply_pipeline_parallel(model, group, make_schedule)
    total = pipeline.run_forward_passes(None, micro_batches(M), summed)
    logits = pipeline.predict(micro_batches(M)[0][0])
    return total, logits, all(p.grad is None for p in model.parameters())


def with_dropout(group, probability, policy):
    model = seeded(dropout=probability)
    policy(model)
    pipeline = apply_pipeline_parallel(model, group, one_forward_one_backward)
    torch.manual_seed(group.rank())
    loss = pipeline.run(micro_batches(M), summed, 99.0)
    return [loss, *(p.grad for p in model.parameters() if p.requires_grad)]


def in_bfloat16(group):
    pipeline = apply_pipeline_parallel(seeded().bfloat16(), group)
    with Ledger() as ledger:
        loss = pipeline.run(micro_batches(M), summed, 99.0)
    return loss, {(call.op, call.dtype) for call in ledger.calls}


def with_a_frozen_stage(group, make_schedule):
    """Gradients on this rank; without a group, those of the whole model."""
    model = seeded(tied_embedding=False).double()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not name.startswith(("token", "position", "blocks.0", "blocks.1")))
    if group is None:
        for tokens, targets in micro_batches(M):
            (summed(model(tokens), targets) / 7).backward()
    else:
        apply_pipeline_parallel(model, group, make_schedule).run(micro_batches(M), summed, 7)
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def everything(group):
    nothing = RECOMPUTE_POLICIES["none"]
    return {
        "held": {(name, m): held(group, SCHEDULES[name], m) for name, m in HELD},
        "parts": [parts(group, make) for make in (gpipe, chunked)],
        "evaluated": [evaluated(group, make) for make in (gpipe, chunked)],
        "dropout": [
            with_dropout(group, *case)
            for case in ((0.3, nothing), (0.3, RECOMPUTE_POLICIES["full"]), (0.0, nothing))
        ],
        "bfloat16": in_bfloat16(group),
        "frozen": [with_a_frozen_stage(group, make) for make in FREEZING],
    }


@pytest.fixture(scope="module")
def ranks():
    return run(everything, 2, timeout=60, watch=False)


def test_each_rank_holds_what_the_schedule_says_and_nothing_after_the_step(ranks):
    for name, m in HELD:
        found = [done["held"][name, m] for done in ranks]
        peaks = peak_activations(SCHEDULES[name](2, m))
        assert found == [(peak, 0) for peak in peaks], (name, m)


@pytest.mark.parametrize("index", [0, 1], ids=["one stage", "two chunks"])
def test_each_rank_has_its_stages_parameters_with_the_whole_models_weights(ranks, index):
    names = [name for name, _ in gpt().named_parameters()]
    num_chunks = index + 1
    for rank, done in enumerate(ranks):
        found, same, ranges = done["parts"][index]
        blocks = {block for chunk in range(num_chunks) for block in ranges[rank + 2 * chunk]}
        expected = [
            name
            for name in names
            if name.startswith(
                tuple(f"blocks.{block}." for block in blocks)
                + (("token_embedding", "position_embedding") if rank == 0 else ("final_norm",))
            )
        ]
        assert found == expected + ["head.weight"] * rank  # the tied copy
        assert same
    assert sorted(block for part in ranges for block in part) == [0, 1, 2, 3]


@pytest.mark.parametrize("index", [0, 1], ids=["one stage", "two chunks"])
def test_every_rank_evaluates_what_one_process_does(ranks, index):
    total, logits, _ = evaluated(None, None)
    for done in ranks:
        found_total, found_logits, without_gradients = done["evaluated"][index]
        torch.testing.assert_close(found_total, total)
        torch.testing.assert_close(found_logits, logits)
        assert without_gradients


def test_dropout_under_recomputation_is_the_same_bit_for_bit(ranks):
    for done in ranks:
        plain, recomputed, without = done["dropout"]
        assert len(plain) > 10
        assert all(map(torch.equal, plain, recomputed))
        assert not torch.equal(plain[0], without[0])


def test_bfloat16_losses_travel_as_float32(ranks):
    for loss, calls in (done["bfloat16"] for done in ranks):
        assert loss.dtype == torch.float32
        assert loss == ranks[0]["bfloat16"][0] != loss.bfloat16()
        assert ("broadcast", torch.float32) in calls and ("broadcast", torch.bfloat16) not in calls
        assert ("send", torch.bfloat16) in calls


@pytest.mark.parametrize("index", [0, 1], ids=["1F1B", "halves"])
def test_a_stage_may_be_frozen_as_a_whole(ranks, index):
    first, last = (done["frozen"][index] for done in ranks)
    assert first == {}
    torch.testing.assert_close(last, with_a_frozen_stage(None, None), rtol=1e-10, atol=1e-12)
