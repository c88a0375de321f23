"""With the sequence divided inside attention too it is the same training, in three ways.

Each number of ranks is started once and does everything; the tests then look at what came back.
"""

from contextlib import nullcontext
from functools import partial
from typing import NamedTuple
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F

from minitron.comm.agreement import SINGLE_RANK
from minitron.config import ConfigError
from minitron.launch import run
from minitron.model.attention import tiled_attention
from minitron.model.recompute import apply_full_recompute, apply_selective_recompute
from minitron.model.transformer import consecutive_positions, initialize
from minitron.parallel.context import gather, ring
from minitron.parallel.context.axis import ContextParallel, apply_context_parallel
from minitron.parallel.context.chunks import contiguous, own_chunks, zigzag
from minitron.parallel.context.gather import gathered_attention
from minitron.parallel.context.ring import RingAttention, ring_attention
from minitron.parallel.context.ulysses import ulysses_attention
from minitron.parallel.one_device import IGNORED, OneDevice
from minitron.proof.difference import first_difference
from minitron.proof.oracle import (
    assert_same_training,
    sample_batches,
    small_model,
    trainings,
    undivided,
)
from minitron.step import accumulate_over_ranks
from tests.model.test_attention import sdpa, with_gradients
from tests.parallel.records import SGD, assert_same
from tests.tiers import collected, in_tiers, in_turn, runs_all

V, S = 29, 24  # 2, 3 and 4 ranks have two chunks each
SIZES = (2, 3, 1, 4)
IN_MAKE_TEST = SIZES[:2]
MODEL = dict(vocab_size=V, max_sequence_length=S, width=48, num_heads=24)
gpt = partial(small_model, "gpt", **MODEL, num_kv_heads=24)
two_heads = partial(small_model, "llama", **MODEL, num_kv_heads=2)
twelve_heads = partial(small_model, "llama", **MODEL, num_kv_heads=12)

on_ring = apply_context_parallel
gathered = partial(apply_context_parallel, attention=gathered_attention)
ulysses = partial(apply_context_parallel, attention=ulysses_attention, chunks_of=contiguous)
METHODS = {"ring": on_ring, "all-gather": gathered, "ulysses": ulysses}


def recomputed(make):
    model = make()
    apply_full_recompute(model)
    return model


def selective(apply, model, group):
    parallel = apply(model, group)
    apply_selective_recompute(model)
    return parallel


# The same training


class Training(NamedTuple):
    model: partial
    apply: partial
    sizes: tuple = SIZES
    num_micro_batches: int = 1

    def records(self, group, apply, optimizers=None):
        batches = sample_batches((3, 2), V, S)
        return trainings(group, apply, self.model, batches, self.num_micro_batches, optimizers)


TRAININGS = {
    "ring, gpt": Training(gpt, on_ring),
    "ring, llama": Training(two_heads, on_ring, (2, 3, 4), 2),
    "all-gather, gpt": Training(gpt, gathered),
    "all-gather, llama": Training(two_heads, gathered, (2, 3, 4), 2),
    "ulysses, gpt": Training(gpt, ulysses),
    "ulysses, llama": Training(twelve_heads, ulysses, (2, 3, 4), 2),
    "contiguous ring": Training(
        two_heads, partial(apply_context_parallel, chunks_of=contiguous), (4,)
    ),
    "ring, recomputed": Training(partial(recomputed, two_heads), partial(selective, on_ring), (3,)),
    "all-gather, recomputed": Training(gpt, partial(selective, gathered), (2,)),
    "ulysses, recomputed": Training(
        partial(recomputed, twelve_heads), partial(selective, ulysses), (3,)
    ),
}


KEPT = {"ring, llama", "all-gather, llama", "ulysses, llama", "ring, recomputed"}


def everything(group, names):
    size = group.size()
    return {
        "trainings": {
            name: TRAININGS[name].records(group, TRAININGS[name].apply, optimizers)
            for name, optimizers in names.items()
            if size in TRAININGS[name].sizes
        },
        "mutants": train_mutants(group) if size == 3 else {},
        "logits": {
            (name, length): logits_of(apply, make, group, length)
            for name, apply in METHODS.items()
            for length in (S, S - 5)
            for make in [gpt if name == "ring" else twelve_heads]
        },
        "counted": {name: counted_unequally(apply, group) for name, apply in METHODS.items()},
        "packed": {
            name: packed(group, *PACKED[name]) for name in PACKED if size < 3 or name != "ulysses"
        },
    }


@pytest.fixture(scope="module")
def ranks(request):
    """Of each size, by rank; in `make test` of two sizes."""
    names = in_turn(request, collected(request, "training"))
    sizes = SIZES if runs_all(request) else IN_MAKE_TEST
    return {size: run(everything, size, names, timeout=300, watch=False) for size in sizes}


@pytest.mark.parametrize("training", in_tiers(KEPT, TRAININGS))
def test_it_is_the_same_training(ranks, training):
    reference = TRAININGS[training].records(SINGLE_RANK, undivided)
    for size in ranks.keys() & TRAININGS[training].sizes:
        by_rank = [done["trainings"][training] for done in ranks[size]]
        assert_same(reference, by_rank)


def test_the_oracle_takes_it_as_it_is():
    assert_same_training(apply_context_parallel, 2, gpt, 1, (1,), vocabulary=V, sequence=S)


# Each token's loss, with and without filling up the last chunk


def logits_of(apply, make, group, length):
    model = make().double()
    initialize(model, seed=0)
    tokens = torch.arange(2 * length).view(2, length) % V
    with torch.no_grad():
        return apply(model, group).full_model()(tokens)


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("length", [S, S - 5])
def test_every_token_has_the_loss_that_it_has_in_one_process(ranks, name, length):
    make = gpt if name == "ring" else twelve_heads
    expected = logits_of(undivided, make, SINGLE_RANK, length)
    targets = (torch.arange(2 * length).view(2, length) * 7 % V).flatten()
    losses = F.cross_entropy(expected.flatten(0, 1), targets, reduction="none")
    for of_size in ranks.values():
        for done in of_size:
            logits = done["logits"][name, length]
            seen = F.cross_entropy(logits.flatten(0, 1), targets, reduction="none")
            torch.testing.assert_close(seen, losses, rtol=1e-12, atol=0)


# Unequal numbers of counted tokens on the ranks: padding at the end, and a prompt at the start


def counted_unequally(apply, group):
    model = twelve_heads().double()
    initialize(model, seed=0)
    parallel = apply(model, group)
    pairs = []
    for tokens, kept in zip(sample_batches((2, 1), V, S), (range(3, 17), range(0, 2)), strict=True):
        targets = torch.full_like(tokens[:, 1:], IGNORED)
        targets[:, kept.start : kept.stop] = tokens[:, 1:][:, kept.start : kept.stop]
        pairs.append((tokens[:, :-1], targets))
    loss = accumulate_over_ranks(model, pairs, parallel)
    with torch.no_grad():
        total = parallel.sum_losses(model, pairs)
    return loss, total, parallel.full_gradients()


@pytest.mark.parametrize("name", METHODS)
def test_each_counted_token_counts_once(ranks, name):
    loss, total, gradients = counted_unequally(undivided, SINGLE_RANK)
    close = partial(torch.testing.assert_close, rtol=1e-12, atol=1e-15)
    for of_size in ranks.values():
        for done in of_size:
            seen_loss, seen_total, seen_gradients = done["counted"][name]
            close(seen_loss, loss)
            close(seen_total, total)
            close(seen_gradients, gradients)


# Documents packed into one sequence


def packed(group, attention, chunks_of):
    """This rank's part of output and gradients."""
    rank, size = group.rank(), group.size()
    chunks = chunks_of(rank, size)
    own = [own_chunks(x.transpose(1, 2), chunks, size).transpose(1, 2) for x in whole()]
    attend = partial(attention, dropout=0.0, group=group, chunks_of=chunks_of, documents=DOCUMENTS)
    return with_gradients(attend, *own)


def whole():
    generator = torch.Generator().manual_seed(0)
    return [
        torch.randn(2, heads, S, 5, generator=generator, dtype=torch.float64)
        for heads in (6, 2, 2, 6)
    ]


def whole_documents(*tensors, documents, **options):
    core = partial(tiled_attention, documents=documents)
    return ulysses_attention(*tensors, core=core, **options)


PACKED = {
    "ring": (ring_attention, zigzag),
    "all-gather": (gathered_attention, zigzag),
    "ulysses": (whole_documents, contiguous),
}
DOCUMENTS = torch.zeros(2, S, dtype=torch.int64)
DOCUMENTS[0, 5:], DOCUMENTS[0, 17:], DOCUMENTS[1, 1:], DOCUMENTS[1, 12:] = 1, 2, 3, 1


@pytest.mark.parametrize("name", PACKED)
def test_a_token_sees_only_its_own_document(ranks, name):
    expected = with_gradients(partial(sdpa, documents=DOCUMENTS), *whole())
    for size in ranks.keys() & (1, 2) if name == "ulysses" else ranks:  # must divide two heads
        for rank, done in enumerate(ranks[size]):
            chunks = PACKED[name][1](rank, size)
            for seen, want in zip(done["packed"][name], expected, strict=True):
                own = own_chunks(want.transpose(1, 2), chunks, size).transpose(1, 2)
                torch.testing.assert_close(seen, own, rtol=1e-12, atol=1e-12)


# What is refused


def test_dropout_is_refused():
    with pytest.raises(ConfigError, match="model.dropout = 0.1 with context parallelism"):
        apply_context_parallel(gpt(dropout=0.1), SINGLE_RANK)


def test_ulysses_is_refused_another_order():
    with pytest.raises(ValueError, match="chunks_of = zigzag: .* pass chunks_of=contiguous"):
        ulysses_attention(*whole()[:3], 0.0, SINGLE_RANK, chunks_of=zigzag)


# Mutations: take the essential line out, and the oracle must tell


def shift_after_cut(self, micro_batches):
    """As if each rank made the targets of its own tokens (bionemo-framework PR 1449)."""
    cut = [(self.own_tokens(inputs), self.own_tokens(targets)) for inputs, targets in micro_batches]
    return [(inputs, torch.cat([inputs[:, 1:], targets[:, -1:]], 1)) for inputs, targets in cut]


def restart_positions(self, tokens):
    """As ring-flash-attention's README warns of."""
    return consecutive_positions(tokens)


def loss_times_cp(self, tensor):
    """Megatron-LM 673."""
    return self.sum_over_sequence(tensor)


def tokens_counted_cp_times(self, accumulate, micro_batches, own_parts, divisor, sum_loss):
    """prime-rl 2359."""
    divisor = divisor * self.size
    return OneDevice.run_passes(self, accumulate, micro_batches, own_parts, divisor, sum_loss)


def not_reduced(self):
    """slime PR 1366."""


def stale_in_backward(ctx, grad_out):
    """The own keys and values in every step of the backward ring (diffusers 14265)."""

    def stale(own, group):
        for source, _ in travel(own, group):
            yield source, own

    with patch.object(ring, "travel", stale):
        return backward(ctx, grad_out)


def own_keys_alone(query, key, value, query_chunks, key_chunks, documents=None):
    """A mask that is causal within a rank instead of within the sequence."""
    return attend_chunks(query, key, value, query_chunks, sorted(key_chunks), documents)


def own_part(x_partial, group, dim):
    return lambda: x_partial.chunk(group.size(), dim)[group.rank()].contiguous()


travel, start_shift, backward = ring.travel, ring.start_shift, RingAttention.backward
attend_chunks = gather.attend_chunks
MUTANTS = {
    "targets shifted after the cut": (
        on_ring,
        patch.object(ContextParallel, "own_parts", shift_after_cut),
        "model: loss",
    ),
    "positions restart on each rank": (
        on_ring,
        patch.object(ContextParallel, "positions_of", restart_positions),
        "model: loss",
    ),
    "loss times cp": (
        on_ring,
        patch.object(ContextParallel, "mean", loss_times_cp),
        "model: loss 3.0x too large on all ranks",
    ),
    "tokens counted cp times": (
        on_ring,
        patch.object(ContextParallel, "run_passes", tokens_counted_cp_times),
        "model: loss 3.0x too small on all ranks",
    ),
    "gradients not reduced": (
        on_ring,
        patch.object(ContextParallel, "finish", not_reduced),
        "gradient differs between ranks, together they are right: never reduced?",
    ),
    "stale keys and values in the backward ring": (
        on_ring,
        patch.object(RingAttention, "backward", staticmethod(stale_in_backward)),
        "token_embedding.weight: gradient not proportional",
    ),
    "chunks taken for those of the sequence's order": (
        gathered,
        patch.object(gather, "attend_chunks", own_keys_alone),
        "model: loss",
    ),
    "reduce-scatter of keys and values removed": (
        gathered,
        patch.object(gather, "start_reduce_scatter", own_part),
        ": gradient",
    ),
    "none": (on_ring, nullcontext(), None),
}


def train_mutants(group):
    records = {}
    for name, (apply, patched, _) in MUTANTS.items():
        with patched:
            records[name] = Training(two_heads, apply).records(group, apply, SGD)["SGD"]
    return records


@pytest.fixture(scope="module")
def expected():
    return Training(two_heads, on_ring).records(SINGLE_RANK, undivided, SGD)["SGD"]


@pytest.mark.parametrize("name", MUTANTS)
def test_the_oracle_names_the_mutation(ranks, expected, name):
    message = MUTANTS[name][2]
    found = first_difference(expected, [done["mutants"][name] for done in ranks[3]])
    assert found is None if message is None else message in found, found
