"""Cut layers train as whole ones do, send what is said when it is said, and hold no whole logits.

Each number of ranks is started once and does everything; the tests then look at what came back.
"""

import time
from contextlib import nullcontext
from functools import cache, partial
from typing import NamedTuple
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F

from minitron.comm import differentiable
from minitron.comm.agreement import SINGLE_RANK
from minitron.config import ConfigError
from minitron.launch import run
from minitron.measure.ledger import Ledger
from minitron.measure.meter import Meter
from minitron.model.recompute import apply_full_recompute, apply_selective_recompute
from minitron.model.transformer import initial_value, initialize, materialize
from minitron.parallel.tensor import layers, vocabulary
from minitron.parallel.tensor.cuts import plan_placements
from minitron.parallel.tensor.layers import (
    AllReduceExchange,
    RowParallelLinear,
    TensorParallel,
    apply_tensor_parallel,
)
from minitron.parallel.tensor.sequence import apply_sequence_parallel
from minitron.parallel.tensor.vocabulary import (
    VocabularyParallelEmbedding,
)
from minitron.proof.difference import first_difference
from minitron.proof.oracle import (
    assert_same_training,
    sample_batches,
    small_model,
    trainings,
    undivided,
)
from tests.parallel.events import Watcher
from tests.parallel.records import SGD, assert_same
from tests.tiers import collected, in_tiers, in_turn, runs_all, tiered

V, S = 36, 12  # 2, 3 and 4 ranks divide all sizes
SIZES = (2, 3, 1, 4)
IN_MAKE_TEST = SIZES[:2]
MODEL = dict(
    vocab_size=V, max_sequence_length=S, width=24, num_heads=12, num_kv_heads=12, ffn_width=36
)
gpt = partial(small_model, "gpt", **MODEL)
llama = partial(small_model, "llama", **MODEL)
six_heads = partial(gpt, num_heads=6, num_kv_heads=6)


def frozen():
    """Of layers that compute together some train: a weight, a bias, and neither."""
    model = llama(num_kv_heads=4, tied_embedding=True)
    for name in (
        "token_embedding.weight",
        "blocks.0.attention.key.weight",
        "blocks.0.attention.value.weight",
        "blocks.1.attention.out.weight",
        "blocks.1.mlp.gate.weight",
    ):
        model.get_parameter(name).requires_grad_(False)
    return model


def frozen_biases():
    model = gpt(tied_embedding=False)
    for name in (
        "blocks.0.attention.query.bias",
        "blocks.0.attention.key.weight",
        "blocks.1.mlp.up.bias",
        "blocks.1.mlp.down.bias",
    ):
        model.get_parameter(name).requires_grad_(False)
    return model


def recomputed(make, *policies):
    model = make()
    for policy in policies:
        policy(model)
    return model


# The same training


class Training(NamedTuple):
    model: partial
    sizes: tuple
    num_micro_batches: int = 1
    sequences: tuple = (3,)

    def records(self, group, apply, optimizers=None):
        batches = sample_batches(self.sequences, V, S)
        return trainings(group, apply, self.model, batches, self.num_micro_batches, optimizers)


BOTH = apply_full_recompute, apply_selective_recompute
TRAININGS = {
    "gpt": Training(gpt, SIZES, 1, (3, 2)),
    "gpt, six heads": Training(six_heads, (3,)),
    "gpt, untied": Training(partial(gpt, tied_embedding=False), (2,), 2),
    "llama": Training(llama, (1, 3, 4), 2, (3, 2)),
    "llama, tied": Training(partial(llama, tied_embedding=True), (3,)),
    "two ranks a key-value head": Training(partial(llama, num_kv_heads=2), (4,), 2),
    "all ranks one key-value head": Training(partial(llama, num_kv_heads=1), (2, 3)),
    "a rank a key-value head": Training(partial(llama, num_kv_heads=4), (4,)),
    "more key-value heads than ranks": Training(partial(llama, num_kv_heads=4), (2,)),
    "frozen": Training(frozen, (2,)),
    "frozen biases": Training(frozen_biases, (3,)),
    "gpt, recomputed": Training(partial(recomputed, gpt, *BOTH), (3,)),
    "llama, recomputed": Training(
        partial(recomputed, partial(llama, num_kv_heads=2), *BOTH), (2, 4), 2
    ),
}
KEPT = {  # by `make test`
    "gpt",
    "llama",
    "all ranks one key-value head",
    "more key-value heads than ranks",
    "frozen",
    "frozen biases",
    "llama, recomputed",
}


def everything(group, names):
    size = group.size()
    return {
        "trainings": {
            name: TRAININGS[name].records(group, apply_tensor_parallel, optimizers)
            for name, optimizers in names.items()
            if size in TRAININGS[name].sizes
        },
        "mutants": train_mutants(group) if size == 3 else {},
        "weights": [weights(group, is_meta) for is_meta in (True, False)],
        "wire": {name: one_step(group, *step) for name, step in STEPS.items()},
        "shared": one_step(group, partial(llama, num_kv_heads=SHARED[size]))
        if size in SHARED
        else (),
        "overlap": overlap(group) if size == 2 else [],
        "left": left_after_a_step(group) if size == 2 else [],
    }


@pytest.fixture(scope="module")
def ranks(request):
    """Of each size, by rank; in `make test` of two sizes."""
    names = in_turn(request, collected(request, "training"))
    sizes = SIZES if runs_all(request) else IN_MAKE_TEST
    return {size: run(everything, size, names, timeout=90, watch=False) for size in sizes}


@pytest.mark.parametrize("training", in_tiers(KEPT, TRAININGS))
def test_it_is_the_same_training(ranks, training):
    expected = TRAININGS[training].records(SINGLE_RANK, undivided)
    for size in ranks.keys() & TRAININGS[training].sizes:
        assert_same(expected, [done["trainings"][training] for done in ranks[size]])


def test_the_oracle_takes_it_as_it_is():
    assert_same_training(apply_tensor_parallel, 2, gpt, 1, (1,), vocabulary=V, sequence=S)


# Mutations: take the essential line out, and the oracle must tell


def bias_on_every_rank(self, x):
    return self.exchange.reduce(F.linear(x, self.weight, self.bias))


class AllReducedBothWays(torch.autograd.Function):
    """What autograd would do with a collective."""

    @staticmethod
    def forward(ctx, x_partial, group):
        ctx.group = group
        return differentiable.summed(x_partial, group)

    @staticmethod
    def backward(ctx, grad):
        return differentiable.summed(grad, ctx.group), None


class ReducedTwice(AllReduceExchange):
    def reduce(self, out_partial):
        return AllReducedBothWays.apply(out_partial, self.group)


def own_embedding(self, tokens):
    rows, is_mine = vocabulary.local_rows(tokens, len(self.weight), self.rank)
    return F.embedding(rows, self.weight).masked_fill(~is_mine[..., None], 0)


def not_sent(*args, **kwargs):
    pass


ONE_HEAD = partial(llama, num_kv_heads=1)
MUTANTS = {
    "forward all-reduce removed": (
        gpt,
        patch.object(AllReduceExchange, "reduce", lambda self, out: out),
        "model: loss",
    ),
    "backward all-reduce removed": (
        gpt,
        patch.object(AllReduceExchange, "start_reduce", lambda self, grad: lambda: grad),
        "token_embedding.weight: gradient not proportional",
    ),
    "backward all-reduce in the wrong place too": (
        gpt,
        patch.object(layers, "AllReduceExchange", ReducedTwice),
        "token_embedding.weight: gradient ",
    ),
    "bias added on every rank": (
        gpt,
        patch.object(RowParallelLinear, "forward", bias_on_every_rank),
        "model: loss",
    ),
    "embedding not summed": (
        gpt,
        patch.object(VocabularyParallelEmbedding, "forward", own_embedding),
        "model: loss",
    ),
    "loss not summed": (gpt, patch.object(vocabulary, "all_reduce", not_sent), "model: loss"),
    "largest logit of this rank alone": (
        gpt,
        patch.object(vocabulary, "all_reduce_max", not_sent),
        "model: loss",
    ),
    "shared key-value head not summed": (
        ONE_HEAD,
        patch.object(TensorParallel, "sum_partial_gradients", not_sent),
        "blocks.0.attention.key.weight: gradient differs between ranks, together they are right",
    ),
    "no broadcast": (
        gpt,
        patch.object(layers, "broadcast_together", not_sent),
        "token_embedding.weight: initial weights differ on all ranks: no broadcast from rank 0",
    ),
    "none": (ONE_HEAD, nullcontext(), None),
}


def train_mutants(group):
    records = {}
    for name, (model, patched, _) in MUTANTS.items():
        with patched:
            records[name] = Training(model, ()).records(group, apply_tensor_parallel, SGD)["SGD"]
    return records


@cache
def of_one_process(model):
    return Training(model, ()).records(SINGLE_RANK, undivided, SGD)["SGD"]


@pytest.mark.parametrize("name", MUTANTS)
def test_the_oracle_names_the_mutation(ranks, name):
    model, _, message = MUTANTS[name]
    found = first_difference(of_one_process(model), [done["mutants"][name] for done in ranks[3]])
    assert found is None if message is None else message in found, found


# Weights of any layout are slices of the same


def for_weights(size):
    return gpt() if size == 3 else llama(num_kv_heads=2)


def weights(group, is_meta):
    """Made on the meta device or from a broadcast: parts, cuts, and all together again."""
    with torch.device("meta" if is_meta else "cpu"):
        model = for_weights(group.size())
    if not is_meta:
        initialize(model, seed=5 + group.rank())
    parallel = apply_tensor_parallel(model, group)
    if is_meta:
        materialize(model, "cpu")
        parallel.fill(lambda name, shape: initial_value(name, shape, 5, 2))
    for parameter in model.parameters():
        assert parameter.is_contiguous()
        assert parameter.untyped_storage().nbytes() == parameter.nbytes  # not a view of the whole
    tied = model.head.weight is model.token_embedding.weight
    return model.state_dict(), parallel.placements, parallel.full_parameters(), tied


@pytest.mark.parametrize("size", tiered(SIZES, keep=2))
def test_the_weights_of_any_layout_are_slices_of_the_same(ranks, size):
    model = for_weights(size)
    initialize(model, seed=5)
    for rank, done in enumerate(ranks[size]):
        for parts, cuts, full, tied in done["weights"]:
            assert tied == model.config.tied_embedding
            assert list(parts) == list(model.state_dict())
            assert cuts == plan_placements(model, rank, size)
            for name, parameter in model.named_parameters():
                assert torch.equal(parts[name], cuts[name].local(parameter))
                assert cuts[name].full_shape(parts[name].shape) == parameter.shape
                assert torch.equal(full[name], parameter)


def test_which_part_a_rank_holds_counted_by_hand():
    cuts = plan_placements(llama(num_kv_heads=2), 2, 4)
    matrix, kv = torch.arange(24 * 36).view(24, 36), torch.arange(4 * 24).view(4, 24)
    assert torch.equal(cuts["blocks.0.mlp.down.weight"].local(matrix), matrix[:, 18:27])
    assert torch.equal(cuts["blocks.1.attention.key.weight"].local(kv), kv[2:])  # ranks 2 and 3
    assert torch.equal(cuts["blocks.1.attention.query.weight"].local(matrix), matrix[12:18])
    assert torch.equal(cuts["head.weight"].local(matrix.T), matrix.T[18:27])
    assert torch.equal(cuts["final_norm.weight"].local(matrix[0]), matrix[0])
    shared = {name for name, cut in cuts.items() if cut.is_partial}
    assert shared == {
        f"blocks.{n}.attention.{kind}.weight" for n in (0, 1) for kind in ("key", "value")
    }


@pytest.mark.parametrize(
    ("family", "sizes", "ranks", "name"),
    [
        ("gpt", {}, 5, "num_heads = 12"),
        ("llama", {"num_kv_heads": 4}, 6, "num_kv_heads = 4"),
        ("gpt", {"ffn_width": 34}, 4, "ffn_width = 34"),
        ("llama", {"vocab_size": 29}, 3, "vocab_size = 29"),
    ],
)
def test_a_size_that_does_not_divide_is_told_with_both_numbers(family, sizes, ranks, name):
    model = small_model(family, **MODEL | sizes)
    words = f"^model.{name} is not divisible by {ranks} ranks of tensor parallelism: raise it to "
    with pytest.raises(ConfigError, match=words):
        plan_placements(model, 0, ranks)


# What crosses the wire, and when


def one_step(group, make, dtype=torch.float32):
    model = make().to(dtype)
    parallel = apply_tensor_parallel(model, group)
    tokens = torch.zeros(2, S, dtype=torch.int64)
    with Ledger() as ledger:
        parallel.summed_loss(model(tokens), tokens).backward()
        with ledger.phase("finish"):
            parallel.finish()
    calls = [(call.phase, call.op, call.reduce, call.payload) for call in ledger.calls]
    return calls, ledger.bytes_sent(), ledger.bytes_received()


STEPS = {
    "gpt": (gpt,),
    "llama": (llama,),
    "gpt, deeper": (partial(gpt, num_layers=3),),
    "llama, bf16": (llama, torch.bfloat16),
    "llama, bf16, deeper": (partial(llama, num_layers=3), torch.bfloat16),
}
SHARED = {3: 1, 4: 2}  # key-value heads, of which several ranks hold each


@pytest.mark.parametrize("name", ["gpt", "llama"])
def test_each_call_of_a_step(ranks, name):
    """With L = 2 blocks 4 b s h bytes a tensor: the embedding's, two a block, the loss's two."""
    whole, tokens = 4 * 2 * S * 24, 4 * 2 * S
    expected = (
        [("forward", "all_reduce", "sum", whole)] * 5
        + [
            ("forward", "all_reduce", "max", tokens),
            ("forward", "all_reduce", "sum", 2 * tokens),
        ]
        + [("backward", "all_reduce", "sum", whole)] * 5
    )
    for of_size in ranks.values():
        for done in of_size:
            assert done["wire"][name][0] == expected  # no all-gather, and nothing left to finish


@pytest.mark.parametrize("size", tiered(SIZES, keep=2))
@pytest.mark.parametrize(("name", "num_bytes"), [("gpt", 4), ("llama, bf16", 2)])
def test_a_block_sends_and_receives_8_bsh_elements_less_one_nth(ranks, name, num_bytes, size):
    """8 b s h (t-1)/t: Narayanan et al. 2021, section 3.2."""
    block = 8 * (2 * S * 24) * (size - 1) // size * num_bytes
    for done in ranks[size]:
        (_, *few), (_, *many) = done["wire"][name], done["wire"][f"{name}, deeper"]
        assert [b - a for a, b in zip(few, many, strict=True)] == [block, block]


@pytest.mark.parametrize("size", tiered(SHARED))
def test_shared_key_value_heads_are_summed_once_a_step_in_one_message(ranks, size):
    num_elements = 2 * 2 * (2 * SHARED[size]) * 24  # of 2 blocks keys and values, heads of 2 x 24
    for done in ranks[size]:
        calls = done["shared"][0]
        assert calls[:-1] == done["wire"]["llama"][0]
        assert calls[-1] == ("finish", "all_reduce", "sum", 4 * num_elements)


def overlap(group):
    model = llama(num_layers=1, num_kv_heads=4)
    parallel = apply_tensor_parallel(model, group)
    tokens = torch.zeros(2, S, dtype=torch.int64)
    loss = parallel.summed_loss(model(tokens), tokens)
    watcher = Watcher()
    with watcher.listening(AllReduceExchange, "start_reduce"), watcher:
        loss.backward()
    return watcher.events


def test_weight_gradients_are_computed_while_the_input_gradient_travels(ranks):
    x, starts, ends = ("product", (2 * S, 24)), ("start_reduce", "starts"), ("start_reduce", "ends")
    head = [x, starts, ("product", (18, 24)), ends]
    gate_and_up = [x, x, starts, ("product", (18, 24)), ("product", (18, 24)), ends]
    attention = [
        x,
        x,
        x,
        starts,
        ("product", (12, 24)),
        ("product", (4, 24)),
        ("product", (4, 24)),
        ends,
    ]
    for events in (done["overlap"] for done in ranks[2]):
        assert events[:4] == head
        assert events[6:12] == gate_and_up  # after both gradients of down, which are its own
        assert events[-8:] == attention
        assert events.count(starts) == 3


# What is let go


def left(meter):
    """Live bytes that are neither parameters nor gradients, once gloo's threads have let go."""
    for _ in range(2000):
        held = meter.now()
        if held["activation"] + held["temporary"] == 0:
            break
        time.sleep(1e-3)
    return held["activation"] + held["temporary"]


def left_after_a_step(group):
    seen = []
    for policies in ((), BOTH):
        for apply in (apply_tensor_parallel, apply_sequence_parallel):
            model = llama()
            parallel = apply(model, group)
            for policy in policies:
                policy(model)
            tokens = torch.zeros(2, S, dtype=torch.int64)
            with Meter(model) as meter:
                with torch.no_grad():
                    model(tokens)
                seen.append(left(meter))
                parallel.summed_loss(model(tokens), tokens).backward()
                seen.append(left(meter))
    return seen


def test_a_step_leaves_nothing_behind(ranks):
    """Layers that compute together keep each other's outputs until they are asked for."""
    for done in ranks[2]:
        assert done["left"] == 8 * [0]
