"""Cut layers, other samples and divided state together: 2 x 2 ranks train as one process does.

The ranks are started once and do everything; the tests then look at what came back.
"""

from functools import partial
from typing import NamedTuple
from unittest.mock import patch

import pytest
import torch
from torch import nn

from minitron.comm.agreement import SINGLE_RANK
from minitron.comm.mesh import make_mesh
from minitron.launch import run
from minitron.model.recompute import apply_full_recompute, apply_selective_recompute
from minitron.parallel.clipping import clip_pieces
from minitron.parallel.data.ddp import (
    apply_bucketed_data_parallel,
    apply_hooked_data_parallel,
    apply_naive_data_parallel,
)
from minitron.parallel.data.fsdp import apply_fsdp
from minitron.parallel.data.zero import apply_zero1, apply_zero2
from minitron.parallel.grid import Grid
from minitron.parallel.one_device import OneDevice
from minitron.parallel.tensor.layers import apply_tensor_parallel
from minitron.parallel.tensor.sequence import apply_sequence_parallel
from minitron.proof.oracle import sample_batches, small_model, trainings, undivided
from tests.parallel.records import assert_same
from tests.parallel.saving import saved
from tests.tiers import collected, in_tiers, in_turn

V, S = 36, 12
MODEL = dict(
    vocab_size=V, max_sequence_length=S, width=24, num_heads=6, num_kv_heads=6, ffn_width=36
)
gpt = partial(small_model, "gpt", **MODEL)
llama = partial(small_model, "llama", **MODEL)
one_head = partial(llama, num_kv_heads=1)  # which both ranks of a pair hold

tensor, sequence = apply_tensor_parallel, apply_sequence_parallel
keeping = partial(apply_sequence_parallel, regather=False)
WHOLE = {"sync_every_micro_batch": False}


class Layout(NamedTuple):
    model: partial
    apply_data: partial
    apply_tensor: partial = tensor
    policies: tuple = ()
    tp: int = 2

    def apply(self, model, group):
        mesh = make_mesh("cpu", dp=group.size() // self.tp, tp=self.tp)
        parallel = self.apply_tensor(model, mesh.group("tp")) if self.tp > 1 else OneDevice(model)
        for policy in self.policies:
            policy(model)
        return Grid(model, data=self.apply_data(model, mesh.group("dp")), tensor=parallel)


FULL, SELECTIVE = (apply_full_recompute,), (apply_selective_recompute,)
LAYOUTS = {
    "naive": Layout(gpt, apply_naive_data_parallel),
    "hooked, sequence, full": Layout(llama, apply_hooked_data_parallel, sequence, FULL),
    "bucketed, keeping, full": Layout(gpt, apply_bucketed_data_parallel, keeping, FULL),
    "zero 1": Layout(one_head, apply_zero1),
    "zero 1, sequence, full": Layout(gpt, apply_zero1, sequence, FULL),
    "zero 2, selective": Layout(gpt, apply_zero2, tensor, SELECTIVE),
    "zero 2 summed whole, sequence": Layout(one_head, partial(apply_zero2, **WHOLE), sequence),
    "zero 3, full": Layout(gpt, apply_fsdp, tensor, FULL + SELECTIVE),
    "zero 3, sequence": Layout(one_head, apply_fsdp, sequence),
    "zero 3 summed whole, sequence, full": Layout(
        gpt, partial(apply_fsdp, **WHOLE), sequence, FULL
    ),
    "four ranks a layer": Layout(partial(one_head, num_heads=12), apply_fsdp, sequence, FULL, 4),
    "whole layers": Layout(gpt, apply_zero2, tensor, (), 1),
}
KEPT = {"hooked, sequence, full", "zero 1", "zero 2 summed whole, sequence", "zero 3, full"}
SEQUENCES = 5, 4  # of each step: two and three on the data-parallel ranks


def train_all(group, names):
    """Records of two trainings by the oracle's optimizers, and what a third leaves."""
    done = {"mutants": train_mutants(group)}
    for name, optimizers in names.items():
        layout = LAYOUTS[name]
        batches, num_micro_batches = sample_batches(SEQUENCES, V, S), min(layout.tp, 2)
        done[name] = (
            trainings(group, layout.apply, layout.model, batches, num_micro_batches, optimizers),
            clipped_steps(group, layout),
        )
    return done


@pytest.fixture(scope="module")
def ranks(request):
    names = in_turn(request, collected(request, "name"))
    return run(train_all, 4, names, timeout=300, watch=False)


@pytest.mark.parametrize("name", in_tiers(KEPT, LAYOUTS))
def test_it_is_the_same_training(ranks, name):
    model, batches = LAYOUTS[name].model, sample_batches(SEQUENCES, V, S)
    expected = trainings(SINGLE_RANK, undivided, model, batches, 1)
    assert_same(expected, [done[name][0] for done in ranks])


# Clipping by the norm of the whole gradient; the optimizer's state; the same bits


def decaying_matrices(model):
    parameters = [p for p in model.parameters() if p.requires_grad]
    return [
        {"params": [p for p in parameters if p.dim() >= 2]},
        {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
    ]


def clipped_steps(group, layout, saves: bool = True):
    """Norms before clipping, weights, what is saved after two steps."""
    torch.manual_seed(0)
    model = layout.model().double()
    parallel = Grid(model) if group is SINGLE_RANK else layout.apply(model, group)
    optimizer = parallel.shard(torch.optim.AdamW(decaying_matrices(model), eps=1e-6))

    norms, (index, count) = [], parallel.data_part
    for tokens in sample_batches((4, 4), V, S):
        optimizer.zero_grad()
        part = tokens[index::count]
        loss = parallel.summed_loss(model(part[:, :-1]), part[:, 1:])
        (loss / part[:, 1:].numel()).backward()
        parallel.finish()
        parameters = [p for held in optimizer.param_groups for p in held["params"]]
        norms.append(parallel.clip(parameters, max_norm=0.1))
        optimizer.step()
    held = {name: p.detach().clone() for name, p in model.named_parameters()}
    state = saved(parallel, optimizer, group) if saves else {}
    return torch.stack(norms), parallel.full_parameters(), state, held


@pytest.mark.parametrize("name", in_tiers(KEPT, LAYOUTS))
def test_norm_and_optimizer_state_are_those_of_the_whole_model(ranks, name):
    norms, weights, state, _ = clipped_steps(SINGLE_RANK, LAYOUTS[name])
    assert min(norms) > 0.2  # of which 0.1 is left
    close = partial(torch.testing.assert_close, rtol=1e-10, atol=1e-12)
    for done in ranks:
        got_norms, got_weights, got_state, _ = done[name][1]
        close(got_norms, norms)
        close(dict(got_weights), dict(weights))
        close(dict(got_state), dict(state))


@pytest.mark.parametrize("name", in_tiers(KEPT, LAYOUTS))
def test_what_several_ranks_hold_stays_the_same_bits(ranks, name):
    """Ranks whose copies part by a rounding part further with every step."""
    for done in ranks[1:]:
        for parameter, value in ranks[0][name][1][1].items():
            assert torch.equal(done[name][1][1][parameter], value), parameter


# Mutations: what only these layouts can get wrong


def own_norm(parallel, parameters, max_norm):
    return nn.utils.clip_grad_norm_(parameters, max_norm)


def counting_copies_twice(parallel, parameters, max_norm):
    groups = [parallel.layers["tensor"].group]
    return clip_pieces(parameters, max_norm, parameters[0].new_zeros(()), groups)


def train_mutants(group):
    norms = []
    for clip in (own_norm, counting_copies_twice, Grid.clip):
        with patch.object(Grid, "clip", clip):
            # copies that part are not what a checkpoint can hold
            norms.append(clipped_steps(group, LAYOUTS["naive"], saves=False)[0])
    return norms


def test_the_norm_is_neither_that_of_own_parts_nor_counts_copies_twice(ranks):
    expected, *_ = clipped_steps(SINGLE_RANK, LAYOUTS["naive"])
    for *wrong, right in (done["mutants"] for done in ranks):
        torch.testing.assert_close(right, expected, rtol=1e-10, atol=0)
        for norms in wrong:
            assert (norms / expected - 1).abs()[0] > 0.01
