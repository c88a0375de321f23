"""ZeRO under every pipeline schedule: dp 2 x pp 2 trains as one process, and sends what is said."""

from functools import partial
from unittest.mock import patch

import pytest
import torch

from minitron.comm.agreement import SINGLE_RANK
from minitron.comm.mesh import make_mesh
from minitron.config import ParallelConfig
from minitron.cost.communication import ring_all_gather_volume, ring_reduce_scatter_volume
from minitron.cost.memory import RECIPES
from minitron.cost.sharding import hybrid_volume, step_collectives, step_holdings
from minitron.launch import run
from minitron.measure.ledger import Ledger
from minitron.measure.meter import Meter
from minitron.model.recompute import apply_full_recompute
from minitron.parallel.data.ddp import apply_bucketed_data_parallel
from minitron.parallel.data.fsdp import apply_fsdp
from minitron.parallel.data.zero import Zero2, apply_zero1, apply_zero2
from minitron.parallel.grid import Grid
from minitron.parallel.one_device import OneDevice
from minitron.parallel.pipeline.schedules import (
    Action,
    Schedule,
    breadth_first,
    gpipe,
    interleaved,
    one_forward_one_backward,
    zero_bubble,
)
from minitron.parallel.pipeline.stages import PipelineParallel, apply_pipeline_parallel
from minitron.parallel.pipeline.v_schedules import dualpipe_v, zb_v
from minitron.parallelize import make_schedule
from minitron.proof.difference import first_difference
from minitron.proof.oracle import sample_batches, small_gpt, small_llama, trainings
from minitron.step import accumulate_over_ranks
from tests.parallel.records import SGD, assert_same
from tests.parallel.saving import load, saved
from tests.tiers import collected, in_tiers, in_turn


def head_last(num_ranks, num_micro_batches):
    """A V of two ranks; the first has its last stage's W after all that its first stage does."""

    def stage_by_stage(*order):
        return tuple(
            Action(kind, i, stage) for kind, stage in order for i in range(num_micro_batches)
        )

    return Schedule(
        "head last",
        num_micro_batches,
        (
            stage_by_stage(("F", 0), ("F", 3), ("I", 3), ("B", 0), ("W", 3)),
            stage_by_stage(("F", 1), ("F", 2), ("B", 2), ("B", 1)),
        ),
    )


SCHEDULES = {
    "gpipe": gpipe,
    "1f1b": one_forward_one_backward,
    "interleaved": partial(interleaved, num_chunks=2),
    "zero-bubble": zero_bubble,
    "zb-v": zb_v,
    "dualpipe-v": dualpipe_v,
}
WITH_CHUNKS = {
    "gpipe, chunks": partial(breadth_first, num_chunks=2),
    "zero-bubble, chunks": partial(zero_bubble, num_chunks=2),
    "head last": head_last,
}
ONCE = {"sync_every_micro_batch": False}
KEPT = {"reshard_each_pass": False}
SMALL = {"bucket_bytes": 6000}
DATA = {
    "bucketed": partial(apply_bucketed_data_parallel, **SMALL),
    "zero 1": partial(apply_zero1, **SMALL),
    "zero 2": partial(apply_zero2, **SMALL),
    "zero 2, reduced once": partial(apply_zero2, **SMALL, **ONCE),
    "zero 3": apply_fsdp,
    "zero 3, reduced once": partial(apply_fsdp, **ONCE),
    "zero 3, kept": partial(apply_fsdp, **KEPT),
    "zero 3, kept, reduced once": partial(apply_fsdp, **KEPT, **ONCE),
}
CASES = [(schedule, data) for schedule in SCHEDULES for data in DATA]
KEPT = {  # by `make test`: each way to shard, and each schedule that shards differently
    ("interleaved", "zero 2"),
    ("zero-bubble", "zero 2, reduced once"),
    ("zb-v", "zero 3"),
    ("dualpipe-v", "zero 3, reduced once"),
    ("zero-bubble", "zero 3, kept"),
    ("head last", "zero 3"),
    ("frozen", "zero 1"),
}
CHUNKED = [
    ("gpipe, chunks", "zero 2"),
    ("gpipe, chunks", "zero 3, reduced once"),
    ("zero-bubble, chunks", "zero 1"),
    ("zero-bubble, chunks", "zero 3, kept"),
    *(("head last", data) for data in DATA),
]
STEPS = (8, 8)
M = 4  # micro-batches
gpt = partial(small_gpt, num_layers=4)  # whose embedding is on both ranks


ONE_STAGE_FROZEN = "bucketed", "zero 1", "zero 2", "zero 3"


def first_stage_frozen():
    """Of the first stage's ranks none has anything to train."""
    model = small_llama(num_layers=4)
    model.token_embedding.requires_grad_(False)
    model.blocks[:2].requires_grad_(False)
    return model


def applied(schedule, data, policy=lambda model: None):
    def apply(model, world):
        mesh = make_mesh("cpu", pp=2, dp=2)
        policy(model)
        make_schedule = (SCHEDULES | WITH_CHUNKS)[schedule]
        pipeline = apply_pipeline_parallel(model, mesh.group("pp"), make_schedule)
        stages = {} if data == "bucketed" else {"pipeline": pipeline}
        return Grid(model, data=DATA[data](model, mesh.group("dp"), **stages), pipeline=pipeline)

    return apply


def training_of(case):
    """How a case is applied to a model, and the model's maker."""
    if case == "recomputed":
        return applied("1f1b", "zero 3", apply_full_recompute), small_llama
    schedule, data = case
    if schedule == "frozen":
        return applied("1f1b", data), first_stage_frozen
    return applied(schedule, data), gpt


def train_all(world, cases, wires):
    batches = sample_batches(STEPS)
    done = {
        case: trainings(world, *training_of(case), batches, M, optimizers)
        for case, optimizers in cases.items()
    }
    with patch.object(PipelineParallel, "sum_partial_gradients", lambda *_: None):
        done["tied"] = trainings(world, applied("1f1b", "zero 3"), gpt, batches[:1], M, SGD)["SGD"]
    done["wire"] = {case: wire(world, *case) for case in wires if "zero 3" in case[1]}
    done["wire 2"] = {case: wire_of_stage_2(world, *case) for case in wires if "zero 2" in case[1]}
    with patch.object(Zero2, "reduces", True):
        done["always reduced"] = wire_of_stage_2(world, "1f1b", "zero 2, reduced once")
    done["state"] = {data: state_of(world, data) for data in ("zero 2", "zero 3")}
    return done


@pytest.fixture(scope="module")
def ranks(request):
    cases, wires = in_turn(request, collected(request, "case")), collected(request, "wire")
    return run(train_all, 4, cases, wires, timeout=200, watch=False)


@pytest.fixture(scope="module")
def reference():
    return {
        model: trainings(SINGLE_RANK, on_one_device, model, sample_batches(STEPS), 1)
        for model in (gpt, small_llama, first_stage_frozen)
    }


def on_one_device(model, group):
    return OneDevice(model)


@pytest.mark.parametrize(
    "case",
    in_tiers(
        KEPT, [*CASES, *CHUNKED, "recomputed", *(("frozen", data) for data in ONE_STAGE_FROZEN)]
    ),
)
def test_it_is_the_same_training(ranks, reference, case):
    _, model = training_of(case)
    assert_same(reference[model], [done[case] for done in ranks])


def test_the_oracle_tells_that_tied_gradients_are_not_summed(ranks, reference):
    found = first_difference(reference[gpt]["SGD"][:4], [done["tied"] for done in ranks])
    assert found.startswith("token_embedding.weight: gradient not proportional"), found


# What crosses the wire, and what is held


def wire(world, schedule, data):
    """Bytes sent over the data axis in a step, by the ledger and by the formulas; parameters held.

    Each pass gathers its stage's units: forward and backward of M micro-batches. Only the embedding
    is not needed in the backward pass. What is kept is gathered once. A rank with both ends of the
    model has one root, and three passes that gather it: all but the first stage's backward.
    """
    model = gpt()
    parallel = applied(schedule, data)(model, world)
    optimizer = parallel.make_optimizer(torch.optim.SGD)
    tokens = torch.zeros(1, 7, dtype=torch.long)
    with Meter(model, optimizer) as meter, Ledger() as ledger:
        parallel.forward_backward(None, M * [(tokens, tokens)], 1.0)
    moved = [
        sum(
            getattr(call, way)
            for call in ledger.calls
            if call.op in ("all_gather", "reduce_scatter")
        )
        for way in ("sent", "received")
    ]

    axis = parallel.data
    embedding = axis.root.flats if parallel.pipeline.rank == 0 else []
    num_passes = 3 if parallel.pipeline.shares_ends else 1
    scatters = 1 if "once" in data else M
    formula = torch.zeros(2)
    for flat in axis.flats:
        gathers = 1 if "kept" in data else num_passes * M if flat in embedding else 2 * M
        place = flat.num_elements, 4, axis.group.size(), axis.group.rank()
        formula += gathers * torch.tensor(ring_all_gather_volume(*place))
        if flat.is_trainable:
            formula += scatters * torch.tensor(ring_reduce_scatter_volume(*place))
    peak = max(moment.bytes["parameter"] for moment in meter.timeline)
    whole = sum(flat.full.nbytes for flat in axis.flats)
    return moved, formula.tolist(), peak / whole


def wire_of_stage_2(world, schedule, data):
    """Bytes sent over the data axis in a step, and of gradients held between passes: counted, and
    by formula; and those of a bucket of each stage.

    All parameters are gathered once, after the update; gradients are reduced after each of M
    micro-batches, or once. A rank holds their shards; or, reduced once, all of them unsharded. With
    two stages a bucket of one may be on its way while the other computes; and zero-bubble schedules
    have the gradients of norms before those of the matrices that share their buckets.
    """
    model = gpt()
    parallel = applied(schedule, data)(model, world)
    axis, held = parallel.data, []
    optimizer = parallel.make_optimizer(torch.optim.SGD)
    tokens = torch.zeros(1, 7, dtype=torch.long)

    def gradients_between_passes(step, *args, **kwargs):
        flats = axis.flats
        held.append(
            sum(
                tensor.nbytes
                for flat in flats
                for tensor in (flat.grad_full, flat.grad_shard)
                if tensor is not None
            )
            + sum(
                p.grad.nbytes
                for p in axis.names
                if p.grad is not None and axis.flat_of[p].grad_full is None
            )
        )
        return around(step, *args, **kwargs)

    around = axis.pass_context
    with patch.object(axis, "pass_context", gradients_between_passes), Ledger() as ledger:
        parallel.forward_backward(None, M * [(tokens, tokens)], 1.0)
        optimizer.step()
    moved = [
        sum(
            getattr(call, way)
            for call in ledger.calls
            if call.op in ("all_gather", "reduce_scatter")
        )
        for way in ("sent", "received")
    ]

    accumulation = "unsharded" if "once" in data else "sharded"
    calls = step_collectives(2, M, accumulation=accumulation)
    formula = torch.zeros(2)
    for flat in axis.flats:
        size, place = axis.group.size(), axis.group.rank()
        volume = hybrid_volume(flat.num_elements, 4, 4, (1, size), (0, place), calls)
        formula += torch.tensor(volume["shards"])
    count = sum(flat.num_elements for flat in axis.flats)
    expected = step_holdings(
        count, size, 2, RECIPES["fp32"], RECIPES["fp32"], accumulation=accumulation
    )["gradient"]
    buckets = sum(max(4 * flat.num_elements for flat in queue.buckets) for queue in axis.queues)
    return moved, formula.tolist(), max(held), expected, buckets


def cases_of(data):
    cases = [case for case in CASES if data in case[1]]
    return in_tiers(KEPT.intersection(cases), cases)


@pytest.mark.parametrize("wire", cases_of("zero 3"))
def test_the_volume_is_that_of_the_formulas(ranks, wire):
    for done in ranks:
        moved, formula, held = done["wire"][wire]
        assert moved == formula
        assert (held > 0.99) == ("kept" in wire[1]), held


@pytest.mark.parametrize("wire", cases_of("zero 2"))
def test_stage_2_sends_and_holds_what_the_formulas_say(ranks, wire):
    for done in ranks:
        moved, formula, held, expected, buckets = done["wire 2"][wire]
        assert moved == formula
        on_the_way = 0 if wire[0] in ("gpipe", "1f1b") else buckets
        assert expected <= held <= expected + on_the_way


def test_the_ledger_tells_that_stage_2_reduces_too_often(ranks):
    for done in ranks:
        moved, formula, *_ = done["always reduced"]
        assert moved[0] > formula[0]


# A state that is saved


def state_of(world, data):
    """What is saved after a step, and after one more."""
    torch.manual_seed(0)
    model = gpt().double()
    parallel = applied("1f1b", data)(model, world)
    optimizer = parallel.make_optimizer(partial(torch.optim.AdamW, lr=0.01, eps=1e-6))
    take_step(parallel, optimizer, 0)
    state = saved(parallel, optimizer, world)
    take_step(parallel, optimizer, 1)
    return state, saved(parallel, optimizer, world)


def take_step(parallel, optimizer, number):
    optimizer.zero_grad()
    index, count = parallel.data_part
    tokens = sample_batches((8, 8))[number][index::count]
    pairs = [(part[:, :-1], part[:, 1:]) for part in tokens.split(1)]
    accumulate_over_ranks(parallel.model, pairs, parallel)
    optimizer.step()


@pytest.mark.parametrize("data", ["zero 2", "zero 3"])
def test_a_state_continues_on_one_process(ranks, data):
    state, expected = ranks[0]["state"][data]
    model = gpt().double()
    parallel = OneDevice(model)
    optimizer = parallel.make_optimizer(partial(torch.optim.AdamW, lr=0.01, eps=1e-6))
    load(parallel, optimizer, state)
    take_step(parallel, optimizer, 1)
    torch.testing.assert_close(
        saved(parallel, optimizer, SINGLE_RANK), expected, rtol=1e-9, atol=1e-12
    )


@pytest.mark.parametrize("zero", [2, 3])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_no_layout_is_refused(schedule, zero):
    chunks = 1 if schedule in ("gpipe", "1f1b", "zero-bubble") else 2
    parallel = ParallelConfig(dp=2, pp=2, zero=zero, schedule=schedule, chunks=chunks)
    assert make_schedule(parallel)(2, M).num_ranks == 2
