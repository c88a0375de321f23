"""Gradients that come in another order on each rank are the same training with every technique.

What travels together, and in which order, is agreed: by the order of the parameters' names, or by
what rank 0 has seen. The branches here have weights of the same shape, so that a wrong order is
no mismatch: only the oracle can tell.
"""

from contextlib import nullcontext
from functools import partial
from unittest.mock import patch

import pytest
from torch import nn

from minitron.comm.agreement import SINGLE_RANK
from minitron.launch import run
from minitron.parallel.data import ddp, fsdp, zero
from minitron.parallel.data.buckets import bucket_parameters
from minitron.parallel.data.ddp import (
    HookedDataParallel,
    apply_bucketed_data_parallel,
    apply_hooked_data_parallel,
    apply_naive_data_parallel,
)
from minitron.parallel.data.fsdp import apply_fsdp
from minitron.parallel.data.units import split_into_units
from minitron.parallel.data.zero import Zero2, apply_zero1, apply_zero2
from minitron.parallel.one_device import OneDevice
from minitron.proof.difference import first_difference
from minitron.proof.oracle import sample_batches, trainings
from tests.parallel.records import SGD, assert_same
from tests.tiers import collected, in_tiers, in_turn

ONE_WEIGHT = 12 * 12 * 8  # bytes: one in each bucket


class Branches(nn.Module):
    """Two layers on the same input; the one that computes last has its gradient first."""

    def __init__(self):
        super().__init__()
        self.left, self.right = (nn.Linear(12, 12, bias=False) for _ in range(2))

    def forward(self, x, right_first: bool):
        branches = (self.right, self.left) if right_first else (self.left, self.right)
        first, second = (branch(x).tanh() for branch in branches)
        return x + (first + second)


class EitherOrder(nn.Module):
    """An order of computation that depends on the data, as with experts or early exits."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(29, 12)
        self.blocks = nn.ModuleList(Branches() for _ in range(2))
        self.head = nn.Linear(12, 29)

    def forward(self, tokens):
        right_first = bool(tokens[0, 0] % 2)
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x, right_first)
        return self.head(x)


def batches():
    """Of two ranks and three steps: rank 0 computes the left branch first, rank 1 the right one."""
    steps = sample_batches((4, 6, 4))
    for tokens in steps:
        tokens[0::2, 0], tokens[1::2, 0] = 2, 3
    return steps


bucketed = partial(apply_bucketed_data_parallel, bucket_bytes=ONE_WEIGHT)
VERSIONS = {
    "naive": apply_naive_data_parallel,
    "hooked": apply_hooked_data_parallel,
    "bucketed": bucketed,
    "ZeRO-1": partial(apply_zero1, bucket_bytes=ONE_WEIGHT),
    "ZeRO-2": partial(apply_zero2, bucket_bytes=ONE_WEIGHT),
    "ZeRO-2, once a step": partial(
        apply_zero2, bucket_bytes=ONE_WEIGHT, sync_every_micro_batch=False
    ),
    "FSDP": apply_fsdp,
    "FSDP, kept": partial(apply_fsdp, reshard_after_forward=False, sync_every_micro_batch=False),
}


# Mutations: take the agreement out


def no_broadcast_of_the_order(group):
    real = ddp.broadcast
    return patch.object(
        ddp,
        "broadcast",
        lambda tensor, *args: real(tensor, *args) if tensor.is_floating_point() else None,
    )


class SentWhenFull(HookedDataParallel):
    def accept(self, parameter):
        self.prepare(parameter)
        self.ready[parameter] = None
        number = next(n for n, (of_bucket,) in enumerate(self.buckets) if of_bucket is parameter)
        self.works.append(self.send(number))


class ReducedWhenFull(Zero2):
    def accept(self, parameter):
        queue, bucket = self.queue_of[parameter], self.flat_of[parameter]
        queue.ready.add(parameter)
        self.used.add(parameter)
        bucket.take(parameter)
        if queue.ready.issuperset(bucket.parameters):
            bucket.start_reduce()
            bucket.finish_reduce()


def other_buckets_on_rank_1(group):
    def exchanged(names, bucket_bytes):
        parameters = {name: parameter for parameter, name in names.items()}
        pairs = {"left": "right", "right": "left"}
        order = [".".join(pairs.get(part, part) for part in name.split(".")) for name in parameters]
        return bucket_parameters([parameters[name] for name in order], bucket_bytes)

    swapped = patch.object(zero, "bucket_parameters", exchanged)
    return swapped if group.rank() == 1 else nullcontext()


def other_units_on_rank_1(group):
    def exchanged(model):
        return {
            name: parameters[::-1] if name != "root" else parameters
            for name, parameters in split_into_units(model).items()
        }

    return patch.object(fsdp, "split_into_units", exchanged) if group.rank() == 1 else nullcontext()


MIXED = "gradient differs between ranks, right on none"
# name -> (apply, what is taken out, what the oracle says, the first step that is wrong)
MUTANTS = {
    "bucketed: the order is not that of rank 0": (bucketed, no_broadcast_of_the_order, MIXED, 1),
    "hooked: a gradient is sent when it is ready": (SentWhenFull, nullcontext, MIXED, 0),
    "ZeRO-2: a bucket is sent when it is full": (
        partial(ReducedWhenFull, bucket_bytes=ONE_WEIGHT),
        nullcontext,
        "gradient not proportional to that of one process on all ranks",
        0,
    ),
    "ZeRO-1: buckets differ": (VERSIONS["ZeRO-1"], other_buckets_on_rank_1, MIXED, 0),
    "FSDP: units differ": (apply_fsdp, other_units_on_rank_1, "initial weights differ", 0),
}


CASES = [(name, num_micro_batches) for name in VERSIONS for num_micro_batches in (1, 2)]
KEPT = {case for case in CASES if case[1] == 1 + ("FSDP" in case[0] or "ZeRO-2" in case[0])}
"""By `make test`: each version."""


def train_all(group, cases):
    records = {}
    for (name, num_micro_batches), optimizers in cases.items():
        records[name, num_micro_batches] = trainings(
            group, VERSIONS[name], EitherOrder, batches(), num_micro_batches, optimizers
        )
    for name, (apply, patched, *_) in MUTANTS.items():
        with patched(group):
            records[name] = trainings(group, apply, EitherOrder, batches(), 1, SGD)
    return records


@pytest.fixture(scope="module")
def records(request):
    return run(train_all, 2, in_turn(request, collected(request, "case")), timeout=120)


@pytest.fixture(scope="module")
def reference():
    return trainings(SINGLE_RANK, lambda model, group: OneDevice(model), EitherOrder, batches(), 1)


@pytest.mark.parametrize("case", in_tiers(KEPT, CASES))
def test_it_is_the_same_training(records, reference, case):
    assert_same(reference, [of_rank[case] for of_rank in records])


@pytest.mark.parametrize("name", MUTANTS)
def test_without_the_agreement_the_oracle_tells(records, reference, name):
    _, _, words, step = MUTANTS[name]
    found = first_difference(reference["SGD"], [of_rank[name]["SGD"] for of_rank in records])
    assert found.startswith(f"blocks.0.left.weight: {words}")
    assert found.endswith(f"(step {step}; 4 of 7 differ)")  # the branches, and nothing else
