"""ZeRO-1 and ZeRO-2 are the same training, and hold and send what the formulas say."""

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import NamedTuple
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore

from minitron import cost
from minitron.comm.agreement import SINGLE_RANK
from minitron.comm.mesh import make_mesh
from minitron.cost.sharding import zero_holdings, zero_volume
from minitron.launch import RankError, run
from minitron.measure.ledger import Ledger
from minitron.measure.meter import Meter
from minitron.model.recompute import apply_full_recompute, apply_selective_recompute
from minitron.parallel import flat
from minitron.parallel.data.zero import Zero1, Zero2, apply_zero1, apply_zero2
from minitron.parallel.grid import Grid
from minitron.parallel.one_device import OneDevice
from minitron.parallel.pipeline.stages import apply_pipeline_parallel
from minitron.parallel.tensor.layers import apply_tensor_parallel
from minitron.parallel.tensor.sequence import apply_sequence_parallel
from minitron.proof import oracle
from minitron.proof.difference import first_difference
from minitron.proof.oracle import (
    assert_same_training,
    sample_batches,
    small_gpt,
    small_llama,
    small_model,
    trainings,
)
from minitron.step import train_step
from tests.parallel.early_adagrad import EarlyAdagrad
from tests.parallel.records import SGD, assert_same
from tests.parallel.saving import load, saved
from tests.tiers import collected, in_tiers, in_turn, tiered

SIZES = (1, 2, 3, 4, 8)
SMALL = 6000  # bytes: several buckets in a small model
MAX_NORM = 1.0  # of gradients whose norm is about 6

VERSIONS = {
    "stage 1": partial(apply_zero1, bucket_bytes=SMALL),
    "stage 2": partial(apply_zero2, bucket_bytes=SMALL, sync_every_micro_batch=False),
    "stage 2, one bucket": partial(apply_zero2, sync_every_micro_batch=False),
    "stage 2, every micro-batch": partial(apply_zero2, bucket_bytes=SMALL),
    "stage 1, gathered ahead": partial(apply_zero1, bucket_bytes=SMALL, overlap_gather=True),
    "stage 2, a parameter a bucket": partial(
        apply_zero2, bucket_bytes=1, sync_every_micro_batch=False
    ),
}
OPTIMIZERS = oracle.OPTIMIZERS | {
    "momentum": partial(torch.optim.SGD, lr=0.1, momentum=0.9, weight_decay=0.1),
}
MORE_OPTIMIZERS = {
    "fused AdamW": partial(oracle.OPTIMIZERS["AdamW"], fused=True),
    "Adagrad": partial(EarlyAdagrad, lr=0.01, eps=1e-6, initial_accumulator_value=0.1),
}


class Picky(nn.Module):
    """Uses `rare` for some samples alone, and `never` for none; one parameter is a number."""

    def __init__(self):
        super().__init__()
        self.never = nn.Linear(3, 5)
        self.gpt = small_gpt()
        self.rare = nn.Linear(29, 29)
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, tokens):
        logits = self.gpt(tokens) * self.scale
        chosen = tokens[:, 0] < 4
        if chosen.any():
            logits = logits + self.rare(logits) * chosen[:, None, None]
        return logits


def recomputed():
    model = small_llama()
    apply_full_recompute(model)
    apply_selective_recompute(model)
    return model


class Training(NamedTuple):
    model: Callable = small_gpt
    num_micro_batches: int = 1
    sequences: Callable = lambda N: (2 * N + 1, 2 * N - 1)  # of each step, on N ranks
    options: dict = {}
    sizes: tuple = (3,)
    versions: tuple = ("stage 1", "stage 2")
    optimizers: dict = OPTIMIZERS

    def records(self, group, apply, optimizers=None):
        batches = sample_batches(
            self.sequences(self.sizes[0] if group is SINGLE_RANK else group.size())
        )
        with patch.dict(oracle.OPTIMIZERS, self.optimizers, clear=True):
            return trainings(group, apply, self.model, batches, self.num_micro_batches, optimizers)


TRAININGS = {
    "plain": Training(sizes=SIZES),
    "gathered ahead": Training(
        recomputed, 2, lambda N: (2 * N + 1, 2 * N), versions=("stage 1, gathered ahead",)
    ),
    "recomputed": Training(recomputed),
    "accumulated": Training(
        num_micro_batches=2, sequences=lambda N: (2 * N + 1, 2 * N), versions=tuple(VERSIONS)[:4]
    ),
    "a rank has nothing": Training(num_micro_batches=2, sequences=lambda N: (9, 2, 7)),
    "unused": Training(
        Picky, 2, lambda N: (9, 6, 3), {"find_unused_parameters": True}, versions=tuple(VERSIONS)
    ),
    "other optimizers": Training(
        Picky, options={"find_unused_parameters": True}, optimizers=MORE_OPTIMIZERS
    ),
}
CASES = [
    (name, version, size)
    for name, training in TRAININGS.items()
    for version in training.versions
    for size in training.sizes
]
KEPT = {  # by `make test`: each training and each version
    ("plain", "stage 1", 3),
    ("gathered ahead", "stage 1, gathered ahead", 3),
    ("recomputed", "stage 2", 3),
    ("accumulated", "stage 2, one bucket", 3),
    ("accumulated", "stage 2, every micro-batch", 3),
    ("a rank has nothing", "stage 2", 3),
    ("unused", "stage 1", 3),
    ("unused", "stage 2, a parameter a bucket", 3),
    ("other optimizers", "stage 2", 3),
}
OF_ALL_OPTIMIZERS = "plain", "other optimizers"


def decaying_matrices(model):
    parameters = [p for p in model.parameters() if p.requires_grad]
    return [
        {"params": [p for p in parameters if p.dim() >= 2]},
        {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
    ]


def clipping(optimizer, clip):
    """Let every step begin by clipping, as `train_step` does."""

    def before_step(optimizer, *_):
        clip([p for group in optimizer.param_groups for p in group["params"]], MAX_NORM)

    optimizer.register_step_pre_hook(before_step)
    return optimizer


def on_ranks(apply, clip=None):
    """`apply`, with two parameter groups and clipping."""

    def apply_all(model, group):
        parallel = apply(model, group)
        parallel.make_optimizer = lambda factory: clipping(
            parallel.shard(factory(decaying_matrices(model))), clip or parallel.clip
        )
        return parallel

    return apply_all


in_one_process = on_ranks(lambda model, group: OneDevice(model))


def train_all(group, cases):
    parts = {size: dist.new_group(range(size)) for size in SIZES if size <= group.size()}
    records = {}
    for (name, version, size), optimizers in cases.items():
        if group.rank() < size:
            training = TRAININGS[name]
            apply = on_ranks(partial(VERSIONS[version], **training.options))
            records[name, version, size] = training.records(parts[size], apply, optimizers)
    return records


@pytest.fixture(scope="module")
def records(request):
    cases = in_turn(request, collected(request, "case"))
    cases |= {case: None for case in cases if case[0] in OF_ALL_OPTIMIZERS}
    num_ranks = max((size for *_, size in cases), default=1)
    return run(train_all, num_ranks, cases, timeout=300, watch=False)


@pytest.mark.parametrize("case", in_tiers(KEPT, CASES))
def test_every_version_is_the_same_training(records, case):
    name, version, size = case
    training = TRAININGS[name]._replace(num_micro_batches=1, sizes=(size,))
    expected = training.records(SINGLE_RANK, in_one_process)
    assert len(expected) == len(training.optimizers)
    assert_same(expected, [of_rank[case] for of_rank in records[:size]])


def test_the_oracle_takes_them_as_they_are():
    assert_same_training(apply_zero1, 2)
    assert_same_training(apply_zero2, 2, small_llama)


def two_steps(group, apply):
    torch.manual_seed(0)
    model = small_gpt().double()
    parallel = apply(model, group)
    optimizer = parallel.shard(torch.optim.AdamW(decaying_matrices(model), eps=1e-6))
    rank, size = parallel.data_part
    losses = []
    for tokens in sample_batches((6, 4)):
        parts = tokens[rank::size].split(2)
        micro_batches = [(part[:, :-1], part[:, 1:]) for part in parts]
        loss, _ = train_step(model, optimizer, micro_batches, 0.01, 0.0, parallel)
        losses.append(loss)
    return model.state_dict(), torch.stack(losses)


@pytest.mark.parametrize("version", ["stage 1", "stage 2"])
def test_it_fits_train_step(version):
    weights, losses = two_steps(SINGLE_RANK, lambda model, group: OneDevice(model))
    for other_weights, other_losses in run(two_steps, 2, VERSIONS[version]):
        torch.testing.assert_close(other_weights, weights, rtol=1e-10, atol=1e-12)
        torch.testing.assert_close(other_losses, losses, rtol=1e-5, atol=0, check_dtype=False)


def test_buffers_follow_rank_0():
    def running_means(group):
        model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
        parallel = apply_zero2(model, group)
        x = torch.randn(5, 4, generator=torch.Generator().manual_seed(group.rank()))
        model(x).sum().backward()
        own = model[1].running_mean.clone()
        parallel.finish()
        return own, model[1].running_mean

    (own, first), (other, second) = run(running_means, 2)
    assert torch.equal(own, first) and torch.equal(first, second)
    assert not torch.equal(other, second)


# Mutations: take the essential line out, and the oracle must tell


class Sent:
    def wait(self):
        pass


def not_reduced(output, input, group, async_op):
    output.copy_(input.chunk(group.size())[group.rank()])
    return Sent()


def summed(output, input, group, async_op):
    input *= group.size()
    return REDUCE_SCATTER(output, input, group, async_op)


def not_gathered(bucket):
    return Sent()


REDUCE_SCATTER = flat.reduce_scatter_single


class SteppedEarly(Zero2):
    """The optimizer gets what is there when the last micro-batch has not been added yet."""

    def finish(self):
        there = [bucket.cut(bucket.grad_shard.clone()) for bucket in self.flats]
        super().finish()
        for bucket, grads in zip(self.flats, there, strict=True):
            for parameter, piece in bucket.pieces.items():
                piece.grad = grads[parameter]


class SteppedUnfinished(Zero1):
    def finish(self):
        pass

    def require_finished(self, *_):
        pass


MUTANTS = {
    **{
        (mutation, stage): (apply, partial(patch.object, where, name, replacement), None, words)
        for stage, apply in (("stage 1", apply_zero1), ("stage 2", VERSIONS["stage 2"]))
        for mutation, where, name, replacement, words in (
            (
                "reduce-scatter removed",
                flat,
                "reduce_scatter_single",
                not_reduced,
                "token_embedding.weight: gradient not proportional",
            ),
            (
                "mean dropped",
                flat,
                "reduce_scatter_single",
                summed,
                "token_embedding.weight: gradient 3.0x too large on all ranks: summed instead",
            ),
            (
                "all-gather removed",
                flat.FlatShards,
                "unshard",
                not_gathered,
                "after the update the parameter is",
            ),
        )
    },
    **{
        ("clipped by the local norm", stage): (
            VERSIONS[stage],
            nullcontext,
            nn.utils.clip_grad_norm_,
            "after the update the parameter is",
        )
        for stage in ("stage 1", "stage 2")
    },
    ("stepped early", "stage 2"): (
        SteppedEarly,
        nullcontext,
        None,
        "token_embedding.weight: gradient not proportional",
    ),
    ("stepped before finish", "stage 1"): (
        SteppedUnfinished,
        nullcontext,
        None,
        "gradient missing (None) on all ranks",
    ),
}


def train_mutants(group):
    records = {}
    for key, (apply, patched, clip, _) in MUTANTS.items():
        with patched():
            records[key] = trainings(
                group, on_ranks(apply, clip), small_gpt, sample_batches((9,)), 2, SGD
            )["SGD"]
    return records


@pytest.fixture(scope="module")
def mutants():
    return run(train_mutants, 3, timeout=60, watch=False)


@pytest.fixture(scope="module")
def expected():
    return trainings(SINGLE_RANK, in_one_process, small_gpt, sample_batches((9,)), 1, SGD)["SGD"]


@pytest.mark.parametrize("key", MUTANTS, ids=" ".join)
def test_the_oracle_names_the_mutation(mutants, expected, key):
    assert MUTANTS[key][-1] in first_difference(expected, [records[key] for records in mutants])


# What crosses the wire, and when


def mlp(dtype=torch.float32):
    torch.manual_seed(0)
    parts = [nn.Linear(59, 61), nn.Linear(61, 59)] * 2 + [nn.Linear(59, 48), nn.Linear(48, 59)]
    parts.append(nn.Linear(59, 59, bias=False))
    parts[2].weight.requires_grad_(False)
    return nn.Sequential(*parts, nn.Linear(59, 5)).to(dtype)


def wire(group):
    """Of one step with 3 micro-batches: what the ledger saw, and the volume by the formula."""
    seen = {}
    for version in tuple(VERSIONS)[:4]:
        model, issued = mlp(), []
        model[0].bias.register_post_accumulate_grad_hook(
            lambda p, issued=issued: issued.append(len(ledger.calls))
        )
        parallel = VERSIONS[version](model, group)
        optimizer = parallel.make_optimizer(torch.optim.SGD)
        with Ledger() as ledger:
            for _ in range(2):
                with parallel.no_sync():
                    model(torch.ones(1, 59)).sum().backward()
            num_before = len(ledger.calls)
            model(torch.ones(1, 59)).sum().backward()
            parallel.finish()
            optimizer.step()
        elements = [bucket.num_elements for bucket in parallel.flats]
        every = "every" in version
        stage = 1 if version == "stage 1" else 2
        seen[version] = dict(
            num_before=num_before,
            early=issued[-1] - num_before,
            calls=[(call.op, call.phase, call.payload) for call in ledger.calls[num_before:]],
            buckets=[4 * n for n in elements],
            filling=sum(elements) - sum(p.numel() for p in parallel.names),
            bytes=(ledger.bytes_sent(), ledger.bytes_received()),
            formula=zero_volume(
                sum(elements), 4, group.size(), group.rank(), stage, 3 if every else 1
            ),
        )
    return seen


@pytest.mark.parametrize("size", tiered([3, 1, 4]))
def test_the_wire(size):
    for of_rank in run(wire, size):
        for version, seen in of_rank.items():
            num_buckets = len(seen["buckets"])
            assert seen["bytes"] == seen["formula"]
            assert seen["filling"] < size * num_buckets
            assert seen["num_before"] == (2 * num_buckets if "every" in version else 0)
            when = "backward"  # what follows a backward pass counts to it
            assert seen["calls"] == [
                *(("reduce_scatter", when, n) for n in seen["buckets"]),
                *(("all_gather", "optimizer", n) for n in reversed(seen["buckets"])),
            ]
            assert num_buckets > 3 or "one" in version
            assert seen["early"] == num_buckets - 1


def step(model, parallel, optimizer, x):
    model(x).sum().backward()
    parallel.finish()
    optimizer.step()
    optimizer.zero_grad()


def test_a_step_ends_before_its_parameters_are_gathered():
    """A module waits for its own; the last ones are on their way when the first one runs."""

    def buckets_in_flight(group):
        model, seen = mlp(), []
        parallel = VERSIONS["stage 1, gathered ahead"](model, group)
        optimizer = parallel.make_optimizer(torch.optim.SGD)
        step(model, parallel, optimizer, torch.ones(1, 59))
        for module in (model[0], model[-1]):
            module.register_forward_hook(lambda *_: seen.append(len(parallel.gathers)))
        assert parallel.is_stale and not parallel.gathers
        model(torch.ones(1, 59))
        return len(parallel.flats), seen[0], seen[-1]

    for num_buckets, first, last in run(buckets_in_flight, 2):
        assert num_buckets > first > last == 0


# Parameters that are on their way


class Arriving:
    """A gather that arrives no sooner than it is waited for, and what it sends meanwhile."""

    def __init__(self, bucket):
        self.bucket, self.sent = bucket, bucket.own.clone()
        self.full = torch.empty_like(bucket.full)
        flat.all_gather_single(self.full, self.sent, bucket.group)

    def wait(self):
        assert torch.equal(self.bucket.own, self.sent), "what is being sent has been changed"
        self.bucket.full.copy_(self.full)


gathered_late = patch.object(flat.FlatShards, "unshard", lambda bucket: Arriving(bucket))
LATE = {"bucket_bytes": 1, "overlap_gather": True}  # a parameter a bucket


def with_layers_divided(divide, model, world):
    """dp 2 x tp 2, or x pp 2; or dp alone."""
    if divide is None:
        return Grid(model, data=apply_zero1(model, world, **LATE))
    if divide is apply_pipeline_parallel:
        mesh = make_mesh("cpu", pp=2, dp=2)
        stages = {"pipeline": divide(model, mesh.group("pp"))}
        return Grid(model, data=apply_zero1(model, mesh.group("dp"), **LATE, **stages), **stages)
    mesh = make_mesh("cpu", dp=2, tp=2)
    tensor = divide(model, mesh.group("tp"))
    return Grid(model, data=apply_zero1(model, mesh.group("dp"), **LATE), tensor=tensor)


def late_steps(group, divide=None):
    """Losses of two steps and of a validation after each; nothing else reads the parameters."""
    torch.manual_seed(0)
    model = small_model(
        "llama",
        vocab_size=32,
        max_sequence_length=8,
        width=24,
        num_heads=4,
        num_kv_heads=2,
        ffn_width=36,
    ).double()
    parallel = (
        OneDevice(model) if group is SINGLE_RANK else with_layers_divided(divide, model, group)
    )
    optimizer = parallel.shard(torch.optim.AdamW(decaying_matrices(model), lr=0.05, eps=1e-6))
    rank, size = parallel.data_part
    losses = []
    with gathered_late:
        for tokens in sample_batches((4, 4), sequence=8):
            part = tokens[rank::size]
            pairs = [(part[:, :-1], part[:, 1:])]
            loss, _ = train_step(model, optimizer, pairs, 0.05, 0.0, parallel)
            validated = parallel.sum_losses(model, pairs)
            losses += [loss, parallel.mean(validated.double()) * size]
    return torch.stack(losses), dict(parallel.full_parameters())


@pytest.mark.parametrize(
    "divide",
    tiered([apply_tensor_parallel, apply_pipeline_parallel, apply_sequence_parallel, None], keep=2),
)
def test_a_module_waits_for_all_that_it_reads(divide):
    """A cut query computes for key and value too, whose weights are in other buckets."""
    losses, weights = late_steps(SINGLE_RANK)
    for found, others in run(late_steps, 4 if divide else 2, divide):
        torch.testing.assert_close(found, losses, rtol=1e-6, atol=0, check_dtype=False)
        torch.testing.assert_close(others, weights, rtol=1e-9, atol=1e-12)


def test_the_next_step_begins_before_they_are_sent():
    """It first averages the number of its tokens, which would wait for all weights."""

    def messages(group):
        model = mlp()
        parallel = apply_zero1(model, group, **LATE)
        step(model, parallel, parallel.make_optimizer(torch.optim.SGD), torch.ones(1, 59))
        with Ledger() as ledger:
            parallel.mean(torch.ones(()))
            model(torch.ones(1, 59))
        return [call.op for call in ledger.calls], len(parallel.flats)

    for ops, num_buckets in run(messages, 2):
        assert ops == ["all_reduce", *num_buckets * ["all_gather"]]


def a_late_training(group):
    torch.manual_seed(0)
    model = small_gpt().double()
    data = OneDevice(model) if group is SINGLE_RANK else apply_zero1(model, group, **LATE)
    parallel = Grid(model, data=data)
    optimizer = parallel.make_optimizer(partial(torch.optim.AdamW, lr=0.05, eps=1e-6))
    return model, parallel, optimizer, partial(one_step, model, parallel, optimizer)


def clones(parameters):
    return {name: parameter.clone() for name, parameter in parameters.items()}


def one_step(model, parallel, optimizer, number):
    """Afterwards all parameters are on their way."""
    rank, size = parallel.data_part
    optimizer.zero_grad()
    (model(sample_batches((4, 4))[number][rank::size, 1:]) ** 2).mean().backward()
    parallel.finish()
    optimizer.step()
    if size > 1:
        parallel.data.start_gather()
        assert len(parallel.data.gathers) == len(parallel.data.flats) > 9


@torch.no_grad()
def loss_of(model):
    return (model(torch.arange(7)[None]) ** 2).mean()


def read_and_set(group):
    """What whoever reads or sets the parameters finds, and the loss afterwards."""
    found = {}
    with gathered_late:
        model, parallel, optimizer, step = a_late_training(group)
        step(0)
        state = saved(parallel, optimizer, group)
        found["saved"] = state, loss_of(model)
        step(1)
        load(parallel, optimizer, state)
        found["loaded"] = saved(parallel, optimizer, group), loss_of(model)

        model, parallel, _, step = a_late_training(group)
        step(0)
        found["read"] = clones(parallel.full_parameters()), loss_of(model)
        step(1)
        parallel.fill(lambda name, shape: torch.full(shape, len(name) / 100))
        found["filled"] = clones(parallel.full_parameters()), loss_of(model)

        model, parallel, _, step = a_late_training(group)
        step(0)
        if group is not SINGLE_RANK:
            parallel.data.remove()
        found["hooks removed"] = dict(model.named_parameters()), loss_of(model)
    return found


@pytest.fixture(scope="module")
def late():
    return run(read_and_set, 2)


@pytest.mark.parametrize("what", ["saved", "loaded", "read", "filled", "hooks removed"])
def test_whoever_reads_or_sets_parameters_waits_for_them(late, what):
    expected = read_and_set(SINGLE_RANK)[what]
    for found in late:
        torch.testing.assert_close(found[what], expected, rtol=1e-9, atol=1e-12)


# How many bytes


@pytest.mark.parametrize("size", tiered([3, 2, 4]))
def test_as_many_bytes_as_an_all_reduce_to_the_byte(size):
    def bytes_sent(group):
        model = nn.Linear(11, 24)  # 288 parameters, which 2, 3 and 4 ranks share evenly
        sent = []
        for apply in (apply_zero1, apply_zero2):
            parallel = apply(model, group)
            optimizer = parallel.make_optimizer(torch.optim.AdamW)
            with Ledger() as ledger:
                step(model, parallel, optimizer, torch.ones(1, 11))
            sent.append(ledger.bytes_sent())
            parallel.remove()
        return sent

    for rank, sent in enumerate(run(bytes_sent, size)):
        assert sent == 2 * [2 * 288 * 4 * (size - 1) // size]
        assert sent[0] == cost.ring_all_reduce_volume(288, 4, size, rank).sent


# Which bytes are held


def held(group, dtype):
    """Bytes by category at the moments of a step, with Adam and small activations, by stage."""
    seen = {}
    for stage, apply in ((1, apply_zero1), (2, apply_zero2)):
        model = nn.Sequential(*(nn.Linear(128, 128) for _ in range(24))).to(dtype)
        parallel = apply(model, group, 2**15 * dtype.itemsize)
        optimizer = parallel.make_optimizer(torch.optim.AdamW)
        x = torch.ones(1, 128, dtype=dtype)
        step(model, parallel, optimizer, x)
        with Meter(model, optimizer) as meter:
            with parallel.no_sync():
                model(x).sum().backward()
            accumulating = meter.now()
            model(x).sum().backward()
            parallel.finish()
            finished = len(meter.timeline)
            optimizer.step()
            at_step = meter.now()
            optimizer.zero_grad()
        peak = max(moment.total for moment in meter.timeline[:finished])
        seen[stage] = accumulating, at_step, peak, sum(p.numel() for p in model.parameters())
    return seen


@pytest.mark.parametrize("size", tiered([3, 1]))
@pytest.mark.parametrize(("dtype", "recipe"), [(torch.float32, "fp32"), (torch.bfloat16, "bf16")])
def test_bytes_held_equal_the_formulas(size, dtype, recipe):
    recipe = cost.RECIPES[recipe]
    for of_rank in run(held, size, dtype):
        for stage, (accumulating, at_step, peak, num_parameters) in of_rank.items():
            expected = zero_holdings(num_parameters, size, stage, recipe)
            for kind in ("parameter", "optimizer state"):
                assert accumulating[kind] == pytest.approx(expected[kind], rel=0.01)
                assert at_step[kind] == pytest.approx(expected[kind], rel=0.01)
            # stage 2 adds gradients up in shards, which the meter cannot know as such
            gradients = accumulating["gradient"] + accumulating["temporary"]
            assert gradients == pytest.approx(expected["gradient"], rel=0.01)
            # the optimizer takes float32
            assert at_step["gradient"] == pytest.approx(4 * num_parameters / size, rel=0.01)
            # beside them two buckets, one gradient and the shards that arrive
            buckets = 4 * 2**15 * dtype.itemsize
            arriving = dtype.itemsize * num_parameters / size * (stage == 1)
            handed_over = 4 * num_parameters / size * (dtype == torch.bfloat16)
            assert peak < sum(expected.values()) + buckets + arriving + handed_over


# Gradients that are not wanted


class Failing(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        raise ArithmeticError("in the backward pass")


@pytest.mark.parametrize(
    "version", in_tiers({"stage 1", "stage 2, every micro-batch"}, tuple(VERSIONS)[:4])
)
def test_zero_grad_discards_what_finish_has_not_handed_over(version):
    """After a backward pass, after one under no_sync, and after one that has raised."""

    def gradients(group):
        model = mlp()
        parallel = VERSIONS[version](model, group)
        optimizer = parallel.make_optimizer(torch.optim.SGD)

        model(torch.ones(1, 59)).sum().backward()
        optimizer.zero_grad()
        with parallel.no_sync():
            model(torch.ones(1, 59)).sum().backward()
        optimizer.zero_grad()
        with pytest.raises(ArithmeticError):
            model[4:](Failing.apply(model[:4](torch.ones(1, 59)))).sum().backward()
        optimizer.zero_grad()

        model(2 * torch.ones(1, 59)).sum().backward()
        parallel.finish()
        return parallel.full_gradients()

    expected = mlp()
    expected(2 * torch.ones(1, 59)).sum().backward()
    for of_rank in run(gradients, 2):
        for name, gradient in of_rank.items():
            torch.testing.assert_close(gradient, expected.get_parameter(name).grad)


# Mistakes


def test_a_frozen_model_is_named():
    def frozen(group):
        apply_zero1(nn.Linear(3, 2).requires_grad_(False), group)

    with pytest.raises(RankError, match="the model has 0 trainable parameters"):
        run(frozen, 1)


def test_a_step_before_finish_is_named():
    def hasty(group):
        model = nn.Linear(3, 2)
        parallel = apply_zero2(model, group)
        optimizer = parallel.make_optimizer(torch.optim.SGD)
        model(torch.ones(1, 3)).sum().backward()
        optimizer.step()

    with pytest.raises(RankError, match=r"optimizer.step\(\) before finish\(\)"):
        run(hasty, 2)


def test_a_forgotten_no_sync_is_named():
    def forgetful(model, group):
        parallel = VERSIONS["stage 2"](model, group)
        parallel.no_sync = nullcontext
        return parallel

    with pytest.raises(RankError, match=r"a second gradient before finish\(\): run every"):
        assert_same_training(forgetful, 2, num_micro_batches=2, batch_sizes=(4,))


def test_an_unused_parameter_is_named():
    match = r"no gradient for [24] of \d+ parameters \(never.weight, .*find_unused_parameters=True"
    with pytest.raises(RankError, match=match):
        assert_same_training(apply_zero1, 2, Picky, batch_sizes=(4,))


@pytest.mark.parametrize("version", tiered(["stage 2", "stage 1"]))
def test_a_step_of_one_fake_rank_of_many(version):
    dist.init_process_group("fake", store=FakeStore(), rank=3, world_size=3072)
    try:
        with FakeTensorMode():
            model = small_llama()
            parallel = VERSIONS[version](model, dist.group.WORLD)
            optimizer = parallel.make_optimizer(torch.optim.AdamW)
            for _ in range(2):
                model(torch.randint(29, (2, 7))).sum().backward()
                parallel.finish()
                parallel.clip([p for g in optimizer.param_groups for p in g["params"]], 1.0)
                optimizer.step()
                optimizer.zero_grad()
            assert 0 < sum(map(torch.numel, parallel.pieces.values())) <= 2 * len(parallel.flats)
    finally:
        dist.destroy_process_group()
