"""Data parallelism is the same training, and sends what it says, when it says."""

from contextlib import contextmanager, nullcontext
from functools import partial
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore

from minitron.comm.agreement import SINGLE_RANK
from minitron.launch import RankError, run
from minitron.measure.ledger import Ledger
from minitron.model.recompute import apply_full_recompute, apply_selective_recompute
from minitron.parallel import flat
from minitron.parallel.data import axis, ddp
from minitron.parallel.data.buckets import assign_buckets
from minitron.parallel.data.ddp import (
    BucketedDataParallel,
    HookedDataParallel,
    apply_bucketed_data_parallel,
    apply_hooked_data_parallel,
    apply_naive_data_parallel,
    average_gradients,
)
from minitron.parallel.one_device import OneDevice
from minitron.proof.difference import first_difference
from minitron.proof.oracle import (
    after_backward,
    assert_same_training,
    sample_batches,
    small_gpt,
    small_llama,
    trainings,
)
from tests.parallel.records import SGD, assert_same
from tests.tiers import collected, diagonal_of, in_tiers, in_turn, runs_all

SIZES = (1, 2, 3, 4)
SMALL = 3000  # bytes: several buckets in a small model


def bucketed(model, group, **options):
    return apply_bucketed_data_parallel(model, group, SMALL, **options)


VERSIONS = {
    "naive": apply_naive_data_parallel,
    "hooked": apply_hooked_data_parallel,
    "bucketed": bucketed,
    "one bucket": apply_bucketed_data_parallel,
}


def on_one_device(model, group):
    return OneDevice(model)


class Picky(nn.Module):
    """Uses `rare` for some samples alone, and `never` for none."""

    def __init__(self):
        super().__init__()
        self.never = nn.Linear(3, 5)
        self.gpt = small_gpt()
        self.rare = nn.Linear(29, 29)

    def forward(self, tokens):
        logits = self.gpt(tokens)
        chosen = tokens[:, 0] < 4
        if chosen.any():
            logits = logits + self.rare(logits) * chosen[:, None, None]
        return logits


def recomputed():
    model = small_llama()
    apply_full_recompute(model)
    apply_selective_recompute(model)
    return model


# name -> (model, micro-batches, sequences of each step, options, sizes of groups)
TRAININGS = {
    "accumulated; a rank has nothing": (small_gpt, 2, (9, 2, 7), {}, SIZES),
    "unused": (Picky, 2, (9, 5, 3), {"find_unused_parameters": True}, SIZES),
    "recomputed": (recomputed, 1, (9, 5), {}, (3,)),
}


CASES = [(training, version) for training in TRAININGS for version in VERSIONS]
KEPT = {  # by `make test`: each training, each version
    ("accumulated; a rank has nothing", "naive"),
    ("accumulated; a rank has nothing", "bucketed"),
    ("unused", "hooked"),
    ("unused", "one bucket"),
    ("unused", "bucketed"),
    ("recomputed", "bucketed"),
}


def train_all(group, cases, sizes_of_groups):
    """Records by training, version and size of group."""
    records = {}
    for size in sizes_of_groups:
        part = dist.new_group(range(size))
        if group.rank() >= size:
            continue
        for (training, version), optimizers in cases.items():
            model, num_micro_batches, sizes, options, groups = TRAININGS[training]
            if size in groups:
                records[training, version, size] = trainings(
                    part,
                    partial(VERSIONS[version], **options),
                    model,
                    sample_batches(sizes),
                    num_micro_batches,
                    optimizers,
                )
    return records


@pytest.fixture(scope="module")
def records(request):
    """Three ranks in `make test`, or groups of each size."""
    cases = in_turn(request, collected(request, "case"))
    sizes = SIZES if runs_all(request) else (3,)
    return run(train_all, max(sizes), cases, sizes, timeout=90, watch=False)


@pytest.mark.parametrize("case", in_tiers(KEPT, CASES))
def test_every_version_is_the_same_training(records, case):
    model, _, sizes, _, groups = TRAININGS[case[0]]
    reference = trainings(SINGLE_RANK, on_one_device, model, sample_batches(sizes), 1)
    sizes = {size for *tried, size in records[0] if tuple(tried) == case}
    assert sizes == set(groups) or sizes == {3}
    for size in sizes:
        assert_same(reference, [of_rank[*case, size] for of_rank in records[:size]])


# Mutations: take the essential line out, and the oracle must tell


class Sent:
    def wait(self):
        pass


def not_sent(tensor, *args, **kwargs):
    return Sent()


def changed(change):
    """The all-reduce of gradients, changed; the loss, 0-d, is left alone."""
    real = ddp.all_reduce

    def all_reduce(tensor, group, async_op=False):
        function = change(real, group.size()) if tensor.dim() else real
        return function(tensor, group, async_op=async_op)

    return both(
        patch.object(ddp, "all_reduce", all_reduce), patch.object(flat, "all_reduce", all_reduce)
    )


@contextmanager
def both(one, other):
    with one, other:
        yield


def scaled(factor):
    return lambda real, size: (
        lambda tensor, *args, **kwargs: real(tensor.mul_(factor(size)), *args, **kwargs)
    )


class LastBucketDropped(BucketedDataParallel):
    def send(self, index):
        return Sent() if index == len(self.buckets) - 1 else super().send(index)


class LastGradientDropped(HookedDataParallel):
    def send(self, index):
        return Sent() if index == len(self.buckets) - 1 else super().send(index)


class ParameterReduced(HookedDataParallel):
    """The trap: the hook's argument, called `grad`, is the parameter."""

    def prepare(self, grad):
        pass

    def send(self, index):
        (grad,) = self.buckets[index]
        return ddp.all_reduce(grad.detach(), self.group, async_op=True)


def parameters_averaged(model, group):
    for grad in model.parameters():
        ddp.all_reduce(grad.detach(), group)
        grad.detach().div_(group.size())


def last_left_out(model, group):
    parameters = [p for p in model.parameters() if p.requires_grad]
    parameters[-1].requires_grad_(False)
    average_gradients(model, group)
    parameters[-1].requires_grad_(True)


NEVER = "gradient differs between ranks, together they are right: never reduced"
THREE = {name: VERSIONS[name] for name in ("naive", "hooked", "bucketed")}
MUTANTS = {
    **{
        ("collective removed", name): (apply, lambda: changed(lambda real, size: not_sent), NEVER)
        for name, apply in THREE.items()
    },
    **{
        ("mean dropped", name): (
            apply,
            lambda: changed(scaled(lambda size: size)),
            "token_embedding.weight: gradient 4.0x too large on all ranks: summed instead of averaged?",  # noqa: E501
        )
        for name, apply in THREE.items()
    },
    **{
        ("divided twice", name): (
            apply,
            lambda: changed(scaled(lambda size: 1 / size)),
            "token_embedding.weight: gradient 4.0x too small on all ranks: divided twice?",
        )
        for name, apply in THREE.items()
    },
    **{
        ("no broadcast", name): (
            apply,
            lambda: patch.object(axis, "broadcast_together", not_sent),
            "token_embedding.weight: initial weights differ on rank 1, 2, 3 alone: no broadcast",
        )
        for name, apply in THREE.items()
    },
    ("last dropped", "naive"): (
        after_backward(last_left_out),
        nullcontext,
        f"final_norm.bias: {NEVER}",
    ),
    ("last dropped", "hooked"): (
        LastGradientDropped,
        nullcontext,
        f"token_embedding.weight: {NEVER}",
    ),
    ("last dropped", "bucketed"): (
        lambda m, g: LastBucketDropped(m, g, SMALL),
        nullcontext,
        f"token_embedding.weight: {NEVER}",
    ),
    ("parameter reduced", "naive"): (after_backward(parameters_averaged), nullcontext, NEVER),
    ("parameter reduced", "hooked"): (
        ParameterReduced,
        nullcontext,
        "the backward pass made the parameter itself 4.0x too large on all ranks: does a hook",
    ),
}


KEPT_MUTANTS = {  # by `make test`: each mutation, and each version
    ("collective removed", "naive"),
    ("collective removed", "bucketed"),
    ("mean dropped", "hooked"),
    ("divided twice", "bucketed"),
    ("no broadcast", "naive"),
    ("last dropped", "hooked"),
    ("last dropped", "bucketed"),
    ("parameter reduced", "hooked"),
}


def train_mutants(group, keys):
    records = {}
    for key in keys:
        apply, patched, _ = MUTANTS[key]
        with patched():
            records[key] = trainings(group, apply, small_gpt, sample_batches((9,)), 1, SGD)
    return records


@pytest.fixture(scope="module")
def mutants(request):
    return run(train_mutants, 4, collected(request, "key"), timeout=90)


@pytest.fixture(scope="module")
def expected():
    return trainings(SINGLE_RANK, on_one_device, small_gpt, sample_batches((9,)), 1, SGD)["SGD"]


@pytest.mark.parametrize("key", in_tiers(KEPT_MUTANTS, MUTANTS))
def test_the_oracle_names_the_mutation(mutants, expected, key):
    found = first_difference(expected, [records[key]["SGD"] for records in mutants])
    assert MUTANTS[key][-1] in found


def test_a_forgotten_no_sync_is_named():
    def forgetful(model, group):
        parallel = bucketed(model, group)
        parallel.no_sync = nullcontext
        return parallel

    with pytest.raises(RankError, match=r"a second gradient before finish\(\): run every"):
        assert_same_training(forgetful, 2, num_micro_batches=2, batch_sizes=(4,))


def test_an_unused_parameter_is_named():
    match = r"no gradient for [24] of \d+ parameters \(never.weight, .*find_unused_parameters=True"
    with pytest.raises(RankError, match=match):
        assert_same_training(bucketed, 2, Picky, batch_sizes=(4,))


def test_zeros_for_a_parameter_that_nobody_uses_are_not_the_same_training():
    with pytest.raises(
        AssertionError,
        match="never.weight: gradient on all ranks, one process has none: AdamW would let it decay",
    ):
        assert_same_training(after_backward(average_gradients), 2, Picky, batch_sizes=(4,))


# What crosses the wire, and when


def view(parallel, parameter):
    """Where the parameter's gradient is in its bucket."""
    return parallel.flat_of[parameter].grad_views[parameter]


def wire(group):
    """What the ledger and the model saw, by version."""
    seen = {}
    tokens = torch.randint(29, (2, 7))
    for version, apply in VERSIONS.items():
        model = small_gpt()
        issued = []  # when the last gradient comes; before its own hook runs
        tied = model.token_embedding.weight
        tied.register_post_accumulate_grad_hook(lambda p, i=issued: i.append(len(ledger.calls)))
        parallel = apply(model, group)
        for _ in range(2):
            with Ledger() as ledger:
                with parallel.no_sync():
                    model(tokens).sum().backward()
                assert not ledger.calls
                model(tokens).sum().backward()
                parallel.finish()
        buckets = getattr(parallel, "buckets", None)
        buffered = version in ("bucketed", "one bucket") and group.size() > 1
        seen[version] = dict(
            ops=[call.op for call in ledger.calls],
            payload=sum(call.payload for call in ledger.calls),
            early=issued[-1],
            num_buckets=buckets and len(buckets),
            gradients=sum(p.nbytes for p in model.parameters() if p.requires_grad),
            views=buffered and all(p.grad is view(parallel, p) for p in parallel.names),
            storages=len({p.grad.untyped_storage().data_ptr() for p in parallel.names}),
        )
        parallel.remove()
        with Ledger() as ledger:
            model(tokens).sum().backward()
        assert not ledger.calls
    return seen


def test_the_wire():
    for seen in run(wire, 2):
        for version in VERSIONS:
            assert seen[version]["payload"] == seen[version]["gradients"]
            assert set(seen[version]["ops"]) == {"all_reduce"}
        assert seen["naive"]["early"] == 0
        for version in ("hooked", "bucketed"):
            num_sent = len(seen[version]["ops"])
            assert num_sent == seen[version]["num_buckets"] > 4
            assert seen[version]["early"] >= num_sent - 2
        assert len(seen["one bucket"]["ops"]) == seen["one bucket"]["storages"] == 1
        for version in ("bucketed", "one bucket"):
            assert seen[version]["views"]


def test_one_rank_communicates_nothing():
    (seen,) = run(wire, 1)
    assert [of["ops"] for of in seen.values()] == [[]] * len(VERSIONS)


def test_buckets_follow_the_first_backward_pass():
    class Backwards(nn.Module):
        def __init__(self):
            super().__init__()
            self.parts = nn.ModuleList(nn.Linear(9, 9, bias=False) for _ in range(4))
            self.parts[1].half_precision = nn.Parameter(torch.ones(9, dtype=torch.bfloat16))

        def forward(self, x):
            for part in reversed(self.parts):  # so the first one's gradient comes first
                x = part(x)
            return x * self.parts[1].half_precision

    def order(group):
        model = Backwards()
        parallel = apply_bucketed_data_parallel(model, group, 2 * 9 * 9 * 4)

        def names():
            return [[parallel.names[p] for p in bucket] for bucket in parallel.buckets]

        before = names()
        model(torch.ones(2, 9)).sum().backward()
        parallel.finish()
        gradients = [p.grad.clone() for p in model.parameters()]
        assert all(p.grad is view(parallel, p) for p in parallel.names)
        model.zero_grad()
        model(torch.ones(2, 9)).sum().backward()
        parallel.finish()
        same = [torch.equal(p.grad, g) for p, g in zip(model.parameters(), gradients, strict=True)]
        return before, names(), same

    for before, after, same in run(order, 2):
        assert before == [
            ["parts.3.weight", "parts.2.weight"],
            ["parts.1.half_precision"],
            ["parts.1.weight", "parts.0.weight"],
        ]
        assert after == [
            ["parts.1.half_precision"],
            ["parts.0.weight", "parts.1.weight"],
            ["parts.2.weight", "parts.3.weight"],
        ]
        assert all(same)


def test_buffers_follow_rank_0():
    def buffers(group):
        model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
        model.register_buffer("table", torch.zeros(1), persistent=False)
        parallel = apply_bucketed_data_parallel(model, group)
        model.table += group.rank()  # not in the state: left alone
        x = torch.randn(5, 4, generator=torch.Generator().manual_seed(group.rank()))
        model(x).sum().backward()
        own = model[1].running_mean.clone()
        parallel.finish()
        return own, model[1].running_mean, model.table.item()

    (own, first, _), (other, second, table) = run(buffers, 2)
    assert torch.equal(own, first) and torch.equal(first, second)
    assert not torch.equal(other, second)
    assert table == 1


def test_mean_and_a_gradient_that_is_zeroed_in_place():
    def step(group):
        model = nn.Linear(3, 1)
        parallel = apply_bucketed_data_parallel(model, group)
        for _ in range(3):
            for p in model.parameters():
                if p.grad is not None:
                    p.grad.zero_()
            model(torch.full((1, 3), float(group.rank()))).sum().backward()
            parallel.finish()
        value = torch.tensor(float(group.rank()), requires_grad=True)
        mean = parallel.mean(value)
        return model.weight.grad.tolist(), mean.item(), mean.requires_grad, value.item()

    results = run(step, 3)
    assert results == [([[1.0, 1.0, 1.0]], 1.0, False, float(rank)) for rank in range(3)]


# Gradients that are not wanted


class Failing(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        raise ArithmeticError("in the backward pass")


def three_layers():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 30), nn.Linear(30, 30), nn.Linear(30, 3))


def gradients_after_failures(group):
    """By version, those of a step after one that was left, twice: in it the buckets are rebuilt."""
    found = {}
    for version, apply in VERSIONS.items():
        model, x = three_layers(), torch.full((1, 5), 1.0 + group.rank())
        parallel = apply(model, group)
        optimizer = parallel.make_optimizer(torch.optim.SGD)
        for _ in range(2):
            model(x).sum().backward()
            optimizer.zero_grad()
            with parallel.no_sync():
                model(x).sum().backward()
            optimizer.zero_grad()
            with pytest.raises(ArithmeticError):
                model[1:](Failing.apply(model[:1](x))).sum().backward()
            optimizer.zero_grad()
            model(x).sum().backward()
            parallel.finish()
        found[version] = parallel.full_gradients()
        optimizer.zero_grad()
        assert all(p.grad is None for p in model.parameters())
    return found


def test_zero_grad_begins_a_step_anew():
    """After a backward pass, after one under no_sync, and after one that has raised."""
    expected = three_layers()
    expected(torch.full((1, 5), 1.5)).sum().backward()
    for found in run(gradients_after_failures, 2):
        for version in VERSIONS:
            for name, gradient in found[version].items():
                torch.testing.assert_close(gradient, expected.get_parameter(name).grad)


# Plans


@pytest.mark.parametrize(
    ("sizes", "limit", "buckets"),
    [
        ([40, 10, 20, 30], 50, [[3, 2], [1, 0]]),
        ([40, 10, 20, 30], 45, [[3], [2, 1], [0]]),
        ([1, 100, 1, 1], 10, [[3, 2], [1], [0]]),
        ([5], 1, [[0]]),
        ([], 10, []),
    ],
)
def test_assign_buckets(sizes, limit, buckets):
    assert assign_buckets(sizes, limit) == buckets


@pytest.mark.parametrize("version, find_unused_parameters", diagonal_of(VERSIONS, [False, True]))
def test_a_step_of_one_fake_rank_of_many(version, find_unused_parameters):
    dist.init_process_group("fake", store=FakeStore(), rank=3, world_size=3072)
    try:
        with FakeTensorMode():
            model = small_llama()
            parallel = VERSIONS[version](
                model, dist.group.WORLD, find_unused_parameters=find_unused_parameters
            )
            for _ in range(2):
                model.zero_grad()
                model(torch.randint(29, (2, 7))).sum().backward()
                parallel.finish()
            assert parallel.mean(torch.zeros(())).shape == ()
            assert all(p.grad.shape == p.shape for p in parallel.names)
    finally:
        dist.destroy_process_group()
