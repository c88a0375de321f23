"""Layers over ranks train as one process does, in any order that is valid.

Each number of ranks is started once and does everything; the tests then look at what came back.
"""

from contextlib import nullcontext
from copy import copy
from functools import cache, partial
from typing import NamedTuple
from unittest.mock import patch

import pytest
import torch

from minitron.comm.agreement import SINGLE_RANK
from minitron.comm.mesh import make_mesh
from minitron.config import ConfigError
from minitron.launch import run
from minitron.model import linear
from minitron.model.recompute import apply_full_recompute, apply_selective_recompute
from minitron.parallel.data.ddp import (
    apply_bucketed_data_parallel,
    apply_hooked_data_parallel,
    apply_naive_data_parallel,
)
from minitron.parallel.data.zero import apply_zero1, apply_zero2
from minitron.parallel.grid import Grid
from minitron.parallel.one_device import OneDevice
from minitron.parallel.pipeline.executor import ScheduleExecutor
from minitron.parallel.pipeline.schedules import (
    Action,
    Schedule,
    breadth_first,
    gpipe,
    interleaved,
    one_forward_one_backward,
    sequential,
    zero_bubble,
)
from minitron.parallel.pipeline.stages import PipelineParallel, apply_pipeline_parallel
from minitron.parallel.pipeline.v_schedules import dualpipe_v, zb_v
from minitron.parallel.tensor.layers import RowParallelLinear, apply_tensor_parallel
from minitron.parallel.tensor.sequence import apply_sequence_parallel
from minitron.proof.difference import first_difference, hidden_by_adamw
from minitron.proof.oracle import (
    assert_same_training,
    sample_batches,
    small_model,
    trainings,
    undivided,
)
from tests.parallel.losses import summed
from tests.parallel.records import SGD, assert_same
from tests.parallel.test_pipeline_plan import random_schedule
from tests.tiers import collected, in_tiers, in_turn

V, S = 36, 12
MODEL = dict(
    vocab_size=V,
    max_sequence_length=S,
    width=24,
    num_heads=6,
    num_kv_heads=6,
    ffn_width=36,
    num_layers=5,
)
gpt = partial(small_model, "gpt", **MODEL)
llama = partial(small_model, "llama", **MODEL | {"num_kv_heads": 2})
untied = partial(gpt, tied_embedding=False)

chunked = partial(interleaved, num_chunks=2)
chunked_gpipe = partial(breadth_first, num_chunks=2)
chunked_halves = partial(zero_bubble, num_chunks=2)
zero2 = partial(apply_zero2, sync_every_micro_batch=False)
keeping = partial(apply_sequence_parallel, regather=False)


def there_and_back(num_ranks, num_micro_batches):
    """Two ranks, and four stages: the first and the last are on rank 0."""
    return Schedule(
        "there and back",
        num_micro_batches,
        tuple(
            tuple(
                Action(kind, i, stage)
                for i in range(num_micro_batches)
                for kind, stage in [("F", a), ("F", b), ("B", b), ("B", a)]
            )
            for a, b in ((0, 3), (1, 2))
        ),
    )


def unplanned(num_ranks, num_micro_batches):
    """Five stages on three ranks in no order, some with their backward pass in halves."""
    return random_schedule(1926)


def frozen():
    """On one stage the embedding, on another a layer's weight and bias, the head is alone."""
    model = untied()
    for name in (
        "token_embedding.weight",
        "blocks.0.attention.query.weight",
        "blocks.2.mlp.up.weight",
        "blocks.4.mlp.down.bias",
        "final_norm.weight",
    ):
        model.get_parameter(name).requires_grad_(False)
    return model


# The same training


class Layout(NamedTuple):
    make_schedule: partial
    pp: int
    model: partial = gpt
    num_micro_batches: int = 4
    sequences: tuple = (9, 5)
    apply_data: partial | None = None
    apply_tensor: partial | None = None
    policies: tuple = ()

    @property
    def size(self):
        return self.pp * (2 if self.apply_data else 1) * (2 if self.apply_tensor else 1)

    def apply(self, model, group):
        tp = 2 if self.apply_tensor else 1
        mesh = make_mesh("cpu", dp=self.size // (self.pp * tp), pp=self.pp, tp=tp)
        tensor = (
            self.apply_tensor(model, mesh.group("tp")) if self.apply_tensor else OneDevice(model)
        )
        for policy in self.policies:
            policy(model)
        pipeline = apply_pipeline_parallel(
            model, mesh.group("pp"), self.make_schedule, sequence_parts=tensor.sequence_parts
        )
        stages = {"pipeline": pipeline} if self.apply_data in (apply_zero1, zero2) else {}
        data = (
            self.apply_data(model, mesh.group("dp"), **stages)
            if self.apply_data
            else OneDevice(model)
        )
        return Grid(model, data=data, tensor=tensor, pipeline=pipeline)

    def records(self, group, apply=None, optimizers=None):
        batches = sample_batches(self.sequences, V, S)
        return trainings(
            group, apply or self.apply, self.model, batches, self.num_micro_batches, optimizers
        )


@cache
def one_process(layout):
    return layout.records(SINGLE_RANK, undivided)


one_f_one_b = one_forward_one_backward
FULL, SELECTIVE = (apply_full_recompute,), (apply_selective_recompute,)
LAYOUTS = {
    "alone, 1F1B": Layout(one_f_one_b, 1, num_micro_batches=2),
    "alone, halves": Layout(zero_bubble, 1, num_micro_batches=3),
    "alone, two chunks": Layout(chunked, 1, llama, 3),
    "alone, halves, tensor": Layout(zero_bubble, 1, frozen, 3, (9, 5), None, apply_tensor_parallel),
    "alone, halves, sequence": Layout(
        zero_bubble, 1, llama, 2, (9, 5), None, apply_sequence_parallel, SELECTIVE
    ),
    "2, sequential": Layout(sequential, 2, num_micro_batches=3),
    "2, halves": Layout(zero_bubble, 2, num_micro_batches=5),
    "2, two chunks": Layout(chunked, 2, llama),
    "2, one micro-batch": Layout(gpipe, 2, untied, 1),
    "2, there and back": Layout(there_and_back, 2, num_micro_batches=3),
    "2, frozen": Layout(zero_bubble, 2, frozen),
    "2, GPipe, two chunks": Layout(chunked_gpipe, 2, llama, 3),
    "2, halves, two chunks": Layout(chunked_halves, 2),
    "3, halves, two chunks": Layout(chunked_halves, 3, partial(gpt, num_layers=7), 6, (7, 8)),
    "3, 1F1B": Layout(one_f_one_b, 3, num_micro_batches=5),
    "3, halves, fewer micro-batches": Layout(zero_bubble, 3, llama, 2),
    "3, halves, untied": Layout(zero_bubble, 3, untied, 7),
    "3, two chunks": Layout(chunked, 3, partial(gpt, num_layers=7), 3, (7, 8)),
    "3, frozen": Layout(gpipe, 3, frozen, 3),
    "2, ZB-V": Layout(zb_v, 2),
    "2, ZB-V, fewer micro-batches": Layout(zb_v, 2, llama, 2),
    "2, DualPipeV": Layout(dualpipe_v, 2, num_micro_batches=5),
    "3, ZB-V": Layout(zb_v, 3, partial(gpt, num_layers=7), 6, (7, 8)),
    "3, DualPipeV": Layout(dualpipe_v, 3, partial(untied, num_layers=6), 7, (7, 9)),
    "4, ZB-V": Layout(zb_v, 4, partial(gpt, num_layers=8), 7, (9, 5)),
    "4, DualPipeV": Layout(dualpipe_v, 4, partial(llama, num_layers=9), 8, (9, 8)),
    "3, unplanned": Layout(unplanned, 3, num_micro_batches=4),
    "4, 1F1B, fewer micro-batches": Layout(one_f_one_b, 4, llama, 3),
    "4, GPipe, full": Layout(gpipe, 4, gpt, 5, policies=FULL),
    "4, halves": Layout(zero_bubble, 4, gpt, 6),
    "4, two chunks": Layout(chunked, 4, partial(llama, num_layers=8), 4),
    "naive": Layout(gpipe, 2, llama, 2, (9, 5), apply_naive_data_parallel),
    "hooked": Layout(zero_bubble, 2, gpt, 2, (9, 5), apply_hooked_data_parallel),
    "bucketed": Layout(one_f_one_b, 2, gpt, 3, (9, 5), apply_bucketed_data_parallel),
    "bucketed, halves": Layout(zero_bubble, 2, gpt, 3, (9, 5), apply_bucketed_data_parallel),
    "zero 1": Layout(zero_bubble, 2, gpt, 4, (9, 8), apply_zero1, None, FULL),
    "zero 2": Layout(chunked, 2, gpt, 2, (9, 5), zero2),
    "zero 1, halves, two chunks": Layout(chunked_halves, 2, gpt, 4, (8, 8), apply_zero1),
    "hooked, ZB-V": Layout(zb_v, 2, gpt, 3, (9, 6), apply_hooked_data_parallel),
    "bucketed, DualPipeV": Layout(dualpipe_v, 2, gpt, 4, (9, 8), apply_bucketed_data_parallel),
    "zero 2, there and back": Layout(there_and_back, 2, gpt, 3, (9, 6), zero2),
    "sequence, DualPipeV": Layout(
        dualpipe_v, 2, llama, 4, (9, 5), None, apply_sequence_parallel, SELECTIVE
    ),
    "sequence, halves, two chunks": Layout(
        chunked_halves, 2, llama, 2, (9, 5), None, apply_sequence_parallel
    ),
    "tensor": Layout(one_f_one_b, 2, llama, 4, (9, 5), None, apply_tensor_parallel, SELECTIVE),
    "tensor, halves": Layout(zero_bubble, 2, llama, 4, (9, 5), None, apply_tensor_parallel),
    "sequence, halves": Layout(zero_bubble, 2, gpt, 3, (9, 5), None, apply_sequence_parallel),
    "sequence, full": Layout(zero_bubble, 2, gpt, 3, (9, 5), None, apply_sequence_parallel, FULL),
    "sequence, halves, keeping": Layout(zero_bubble, 2, untied, 3, (9, 5), None, keeping),
}
KEPT = {  # by `make test`: each schedule, alone and with each kind of the other axes
    "alone, halves, sequence",
    "2, one micro-batch",
    "2, there and back",
    "2, frozen",
    "3, 1F1B",
    "2, halves, two chunks",
    "2, ZB-V, fewer micro-batches",
    "2, DualPipeV",
    "3, unplanned",
    "bucketed",
    "zero 1",
    "sequence, DualPipeV",
}


def everything(group, names):
    size = group.size()
    return {
        "trainings": {
            name: LAYOUTS[name].records(group, optimizers=optimizers)
            for name, optimizers in names.items()
            if LAYOUTS[name].size == size
        },
        "mutants": {
            name: train_mutant(group, name, *mutant)
            for name, mutant in MUTANTS.items()
            if mutant[0].size == size
        },
    }


@pytest.fixture(scope="module")
def ranks(request):
    """Of each size that a test needs, by rank."""
    names = in_turn(request, collected(request, "case"))
    layouts = [LAYOUTS[name] for name in names] + [layout for layout, *_ in MUTANTS.values()]
    sizes = {layout.size for layout in layouts}
    return {size: run(everything, size, names, timeout=300, watch=False) for size in sizes}


@pytest.mark.parametrize("case", in_tiers(KEPT, LAYOUTS))
def test_it_is_the_same_training(ranks, case):
    layout = LAYOUTS[case]
    by_rank = [done["trainings"][case] for done in ranks[layout.size]]
    assert_same(one_process(layout), by_rank)


def test_the_oracle_takes_it_as_it_is():
    def apply(model, group):
        return Grid(model, pipeline=apply_pipeline_parallel(model, group))

    assert_same_training(apply, 2, gpt, 3, (5,), vocabulary=V, sequence=S)


# Mutations: take the essential line out, and the oracle must tell

run_all, send, take = PipelineParallel.run, ScheduleExecutor.send, linear.Deferral.defers


def gradient_of_a_sum(self, micro_batches, sum_loss, divisor):
    """The loss that is shown is the mean of all; the backward pass of each starts from its own."""

    def unscaled(logits, targets):
        loss = sum_loss(logits, targets)
        return loss.detach() + len(micro_batches) * (loss - loss.detach())

    return run_all(self, micro_batches, unscaled, divisor)


def mean_of_means(self, micro_batches, sum_loss, divisor):
    """Every micro-batch weighs the same, however few tokens it has."""
    return run_all(
        self,
        micro_batches,
        lambda logits, targets: sum_loss(logits, targets) / targets.numel(),
        len(micro_batches),
    )


def last_gradient_zeroed(self, message):
    if message.action[:2] == ("B", len(self.micro_batches) - 1):
        self.made[message.action].zero_()
    send(self, message)


def first_sent_again(self, message):
    """One buffer for all micro-batches that nobody fills anew."""
    if message.action.kind == "F":
        self.first = getattr(self, "first", self.made[message.action])
        self.made[message.action] = self.first
    send(self, message)


def weights_dropped(self, action):
    self.deferred.pop((action.micro_batch, action.stage))


def one_weight_dropped(later):
    linear.accumulate_all(later[:-1])


def defers_and_computes(self, half):
    """What is deferred is computed at once too."""
    take(self, copy(half))
    return False


def own_tokens(self):
    """This rank's part of the input is taken for every rank's."""
    if self.parts.exchange.regathers:
        x_full = torch.cat([self.x] * self.parts.exchange.group.size(), 1)
        self.wait_for_x = lambda: x_full


def bias_on_every_rank(self, x):
    return self.exchange.reduce(self.parts.compute(x, self.weight, self.bias)[0])


def not_done(*args, **kwargs):
    pass


EVEN = Layout(one_f_one_b, 2, gpt, 4, (8, 8))
UNEVEN = Layout(one_f_one_b, 3, gpt, 4, (9,))
HALVES = Layout(zero_bubble, 2, untied, 4, (8,))
CUT_HALVES = Layout(zero_bubble, 1, untied, 2, (4,), None, apply_sequence_parallel)
HIDDEN = "micro-batch losses not weighted"
MUTANTS = {
    "micro-batch losses not weighted": (
        EVEN,
        patch.object(PipelineParallel, "run", gradient_of_a_sum),
        "gradient 4.0x too large on all ranks",
    ),
    "mean of means": (UNEVEN, patch.object(PipelineParallel, "run", mean_of_means), "model: loss"),
    "tied gradients not exchanged": (
        EVEN,
        patch.object(PipelineParallel, "sum_partial_gradients", not_done),
        "token_embedding.weight: gradient not proportional to that of one process on all ranks",
    ),
    "gradient of the last micro-batch lost": (
        EVEN,
        patch.object(ScheduleExecutor, "send", last_gradient_zeroed),
        "gradient not proportional to that of one process on all ranks",
    ),
    "the first micro-batch sent again": (
        EVEN,
        patch.object(ScheduleExecutor, "send", first_sent_again),
        "model: loss",
    ),
    "gradients of weights dropped": (
        HALVES,
        patch.object(ScheduleExecutor, "weights", weights_dropped),
        "gradient missing (None) on all ranks",
    ),
    "one gradient of a weight dropped": (
        CUT_HALVES,
        patch("minitron.parallel.pipeline.executor.accumulate_all", one_weight_dropped),
        "gradient missing (None) on all ranks",
    ),
    "gradients of weights deferred and computed at once": (
        CUT_HALVES,
        patch.object(linear.Deferral, "defers", defers_and_computes),
        "gradient 2.0x too large on all ranks",
    ),
    "gradients of weights from this rank's tokens": (
        CUT_HALVES,
        patch.object(linear.WeightGradients, "start", own_tokens),
        "gradient not proportional to that of one process",
    ),
    "bias of a row layer added on every rank": (
        CUT_HALVES,
        patch.object(RowParallelLinear, "forward", bias_on_every_rank),
        "model: loss",
    ),
    "halves of cut layers, none": (CUT_HALVES, nullcontext(), None),
    "no broadcast": (
        EVEN,
        patch("minitron.parallel.pipeline.stages.broadcast_together", not_done),
        "initial weights differ on all ranks: no broadcast from rank 0",
    ),
    "none": (HALVES, nullcontext(), None),
}


def train_mutant(group, name, layout, patched, _):
    with patched:
        return layout.records(group, optimizers=None if name == HIDDEN else SGD)


@pytest.mark.parametrize("name", MUTANTS)
def test_the_oracle_names_the_mutation(ranks, name):
    layout, _, message = MUTANTS[name]
    by_rank = [done["mutants"][name]["SGD"] for done in ranks[layout.size]]
    found = first_difference(one_process(layout)["SGD"], by_rank)
    assert found is None if message is None else message in found, found


def test_adamw_would_hide_losses_that_are_not_weighted(ranks):
    """Its losses hardly change, while the gradients are four times too large."""
    by_rank = [done["mutants"][HIDDEN] for done in ranks[2]]
    assert "AdamW" in hidden_by_adamw(one_process(EVEN), by_rank)


# Mistakes


@pytest.mark.parametrize(
    ("make_schedule", "words"),
    [
        (lambda p, m: one_f_one_b(2, m), "^a schedule of 2 ranks on 1: make it for 1$"),
        (lambda p, m: Schedule("", m, ((Action("F", 0, 0),),)), "^stage 0 never runs B0"),
        (partial(interleaved, num_chunks=6), "^5 blocks do not fill 6 stages of a pipeline"),
        (lambda p, m: one_f_one_b(p, 2), "^a schedule of 2 micro-batches in a step of 3: "),
        (lambda p, m: interleaved(p, m, m), "a stage must stay on its rank$"),
    ],
)
def test_a_schedule_that_cannot_run_here_is_told_in_one_line(make_schedule, words):
    def one_rank(group):
        tokens = torch.zeros(1, S, dtype=torch.int64)
        with pytest.raises(ConfigError, match=words):
            apply_pipeline_parallel(untied(), group, make_schedule).run(
                3 * [(tokens, tokens)], summed, 1.0
            )

    run(one_rank, 1)
