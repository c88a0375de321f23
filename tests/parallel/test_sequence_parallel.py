"""With the sequence divided between the cut layers it is the same training; less is held.

Each number of ranks is started once and does everything; the tests then look at what came back.
"""

from contextlib import nullcontext
from functools import cache, partial
from typing import NamedTuple
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore

from minitron.comm.agreement import SINGLE_RANK
from minitron.cost import tensor_parallel_parameters
from minitron.launch import run
from minitron.measure.ledger import Ledger
from minitron.measure.meter import Meter
from minitron.model.recompute import apply_full_recompute, apply_selective_recompute
from minitron.model.transformer import materialize, materialized_attention
from minitron.parallel.tensor import sequence
from minitron.parallel.tensor.layers import TensorParallel, apply_tensor_parallel
from minitron.parallel.tensor.sequence import SequenceParallelExchange, apply_sequence_parallel
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
keeping = partial(apply_sequence_parallel, regather=False)


def recomputed(make):
    model = make()
    apply_full_recompute(model)
    apply_selective_recompute(model)
    return model


# The same training


class Training(NamedTuple):
    model: partial
    sizes: tuple
    num_micro_batches: int = 1
    sequences: tuple = (3,)
    apply: partial = apply_sequence_parallel

    def records(self, group, apply, optimizers=None):
        batches = sample_batches(self.sequences, V, S)
        return trainings(group, apply, self.model, batches, self.num_micro_batches, optimizers)


TRAININGS = {
    "gpt": Training(gpt, SIZES, 1, (3, 2)),
    "gpt, untied, keeping": Training(partial(gpt, tied_embedding=False), (2,), 2, apply=keeping),
    "llama": Training(llama, (1, 2), 2, (3, 2)),
    "two ranks a key-value head": Training(partial(llama, num_kv_heads=2), (4,), 2),
    "all ranks one key-value head": Training(partial(llama, num_kv_heads=1), (3,), apply=keeping),
    "more key-value heads than ranks": Training(partial(llama, num_kv_heads=4), (2,)),
    "gpt, recomputed": Training(partial(recomputed, gpt), (3,)),
    "llama, recomputed": Training(partial(recomputed, partial(llama, num_kv_heads=2)), (2, 4), 2),
}


KEPT = {  # by `make test`
    "gpt",
    "llama",
    "all ranks one key-value head",
    "llama, recomputed",
}


def everything(group, names):
    size = group.size()
    return {
        "trainings": {
            name: TRAININGS[name].records(group, TRAININGS[name].apply, optimizers)
            for name, optimizers in names.items()
            if size in TRAININGS[name].sizes
        },
        "mutants": train_mutants(group) if size == 3 else {},
        "wire": {name: one_step(group, *step) for name, step in STEPS.items()},
        "held": {name: activations(group, *case) for name, case in HELD.items()}
        if size in (2, 4)
        else {},
        "16 bits": {name: in_bfloat16(group, *case) for name, case in HALF.items()}
        if size == 3
        else {},
        "overlap": overlap(group) if size == 2 else [],
    }


@pytest.fixture(scope="module")
def ranks(request):
    """Of each size, by rank; in `make test` of two sizes."""
    names = in_turn(request, collected(request, "training"))
    sizes = SIZES if runs_all(request) else IN_MAKE_TEST
    return {size: run(everything, size, names, timeout=90, watch=False) for size in sizes}


@pytest.mark.parametrize("training", in_tiers(KEPT, TRAININGS))
def test_it_is_the_same_training(ranks, training):
    reference = TRAININGS[training].records(SINGLE_RANK, undivided)
    for size in ranks.keys() & TRAININGS[training].sizes:
        assert_same(reference, [done["trainings"][training] for done in ranks[size]])


def test_the_oracle_takes_it_as_it_is():
    assert_same_training(apply_sequence_parallel, 2, llama, 1, (1,), vocabulary=V, sequence=S)


# Mutations: take the essential line out, and the oracle must tell


def not_summed(*args):
    pass


def own_part(self, out_partial):
    return sequence.equal_parts(out_partial, self.group.size(), 1)[self.group.rank()]


def own_grad_part(self, grad_partial):
    part = own_part(self, grad_partial)
    return lambda: part.contiguous()


def own_tokens(self, x):
    """Every rank's tokens are taken for this one's."""
    whole = torch.cat([x] * self.group.size(), 1)
    return lambda: whole


def norms_only(self, gradient):
    """Sums the gradients of norms, and forgets biases and positions."""
    cuts = self.placements
    self.placements = {
        name: cut if "norm" in name else cuts["token_embedding.weight"]
        for name, cut in cuts.items()
    }
    finish(self, gradient)
    self.placements = cuts


finish = TensorParallel.sum_partial_gradients
TOGETHER = "gradient differs between ranks, together they are right: never reduced?"
MUTANTS = {
    "gradients of norms not summed": (
        llama,
        patch.object(TensorParallel, "sum_partial_gradients", not_summed),
        f"blocks.0.attention_norm.weight: {TOGETHER}",
    ),
    "gradients of biases and positions not summed": (
        gpt,
        patch.object(TensorParallel, "sum_partial_gradients", norms_only),
        f"position_embedding.weight: {TOGETHER}",
    ),
    "reduce-scatter removed": (
        gpt,
        patch.object(SequenceParallelExchange, "reduce", own_part),
        "model: loss",
    ),
    "reduce-scatter of the backward pass removed": (
        gpt,
        patch.object(SequenceParallelExchange, "start_reduce", own_grad_part),
        "token_embedding.weight: gradient not proportional",
    ),
    "all-gather removed": (
        gpt,
        patch.object(SequenceParallelExchange, "start_gather", own_tokens),
        "model: loss",
    ),
    "none": (llama, nullcontext(), None),
}


def train_mutants(group):
    records = {}
    for name, (model, patched, _) in MUTANTS.items():
        with patched:
            records[name] = Training(model, ()).records(group, apply_sequence_parallel, SGD)["SGD"]
    return records


@cache
def of_one_process(model):
    return Training(model, ()).records(SINGLE_RANK, undivided, SGD)["SGD"]


@pytest.mark.parametrize("name", MUTANTS)
def test_the_oracle_names_the_mutation(ranks, name):
    model, _, message = MUTANTS[name]
    found = first_difference(of_one_process(model), [done["mutants"][name] for done in ranks[3]])
    assert found is None if message is None else message in found, found


# What crosses the wire


def one_step(group, apply, make, num_layers):
    model = make(num_layers=num_layers)
    parallel = apply(model, group)
    tokens = torch.zeros(2, S, dtype=torch.int64)
    with Ledger() as ledger:
        parallel.summed_loss(model(tokens), tokens).backward()
        with ledger.phase("finish"):
            parallel.finish()
    calls = [(call.phase, call.op, call.payload) for call in ledger.calls]
    return calls, ledger.bytes_sent(), ledger.bytes_received()


STEPS = {
    (name, num_layers): (apply, make, num_layers)
    for name, apply, make in (
        ("tensor", apply_tensor_parallel, gpt),
        ("keeping", keeping, gpt),
        ("regathering", apply_sequence_parallel, gpt),
        ("llama", apply_sequence_parallel, llama),
    )
    for num_layers in (1, 2)
}
WHOLE = 4 * 2 * S * 24


def test_each_call_of_a_step(ranks):
    """The embedding's sum, two pairs a block, and the head's all-gather, then the loss."""
    gather, scatter = ("all_gather", WHOLE), ("reduce_scatter", WHOLE)
    loss = [("all_reduce", 4 * 2 * S), ("all_reduce", 8 * 2 * S)]
    forward = [scatter] + 4 * [gather, scatter] + [gather] + loss
    for name, backward in (
        ("keeping", [scatter] + 4 * [gather, scatter] + [gather]),
        # a layer's input is gathered again before the sum of its gradient leaves
        ("regathering", [gather, scatter] + 4 * [gather, gather, scatter] + [gather]),
    ):
        for of_size in ranks.values():
            for done in of_size:
                calls = done["wire"][name, 2][0]
                assert [call[1:] for call in calls if call[0] == "forward"] == forward
                assert [call[1:] for call in calls if call[0] == "backward"] == backward


@pytest.mark.parametrize("size", tiered(SIZES, keep=2))
def test_a_block_sends_as_much_as_with_tensor_parallelism_and_2_bsh_more_to_regather(ranks, size):
    """8 and 10 b s h (t-1)/t elements: Korthikanti et al. 2022, section 4.2.2."""
    for done in ranks[size]:
        finished = finish_bytes(done, size)
        for name, factor in (("tensor", 8), ("keeping", 8), ("regathering", 10), ("llama", 10)):
            block = factor * (2 * S * 24) * (size - 1) // size * 4
            (_, *few), (_, *many) = done["wire"][name, 1], done["wire"][name, 2]
            grown = [b - a - finished[name] for a, b in zip(few, many, strict=True)]
            assert grown == [block, block], name


def finish_bytes(done, size):
    """What the last all-reduce of the step sends for a block more, by name."""
    few, many = (
        {
            name: sum(
                payload for phase, _, payload in done["wire"][name, L][0] if phase == "finish"
            )
            for name, _ in STEPS
        }
        for L in (1, 2)
    )
    return {name: 2 * (many[name] - few[name]) * (size - 1) // size for name in few}


def test_what_every_rank_holds_whole_is_summed_once_a_step_in_one_message(ranks):
    """GPT: two norms and two biases a block but a frozen norm's weight, final norm, positions.
    Llama: norms alone, one frozen."""
    expected = {"gpt": 2 * 6 * 24 - 24 + 2 * 24 + S * 24, "llama": 2 * 2 * 24 - 24 + 24}
    for size in ranks.keys() - {1}:  # of one rank everything is whole
        for done in ranks[size]:
            for name, family in (("regathering", "gpt"), ("keeping", "gpt"), ("llama", "llama")):
                finishing = [call for call in done["wire"][name, 2][0] if call[0] == "finish"]
                assert finishing == [("finish", "all_reduce", 4 * expected[family])]
            assert not any(call[0] == "finish" for call in done["wire"]["tensor", 2][0])


# Under autocast


HALF = {
    (family, name): (make, apply)
    for family, make in (("gpt", gpt), ("llama", llama))
    for name, apply in (
        ("tensor", apply_tensor_parallel),
        ("keeping", keeping),
        ("regathering", apply_sequence_parallel),
    )
}


def in_bfloat16(group, make, apply):
    """Loss, gradients and payloads; without a group those of one process."""
    torch.manual_seed(0)
    model = make()
    parallel = None if group is None else apply(model, group)
    tokens = torch.arange(2 * S).view(2, S)
    with Ledger() as ledger:
        with torch.autocast("cpu", torch.bfloat16):
            logits = model(tokens)
        if group is None:
            loss = F.cross_entropy(logits.float().flatten(0, 1), tokens.flatten(), reduction="sum")
        else:
            loss = parallel.summed_loss(logits.float(), tokens)
        loss.backward()
    if group is None:
        return loss.item(), {name: p.grad for name, p in model.named_parameters()}, []
    parallel.finish()
    return loss.item(), parallel.full_gradients(), [call.payload for call in ledger.calls]


@pytest.mark.parametrize("case", HALF, ids=" ".join)
def test_under_autocast_layers_send_16_bits_and_gradients_have_32(ranks, case):
    """The embedding, which autocast leaves in 32 bits, sends them; and the loss."""
    loss, grads, _ = in_bfloat16(None, *HALF[case])
    largest = max(grad.abs().max() for grad in grads.values() if grad is not None)
    for done in ranks[3]:
        got_loss, got_grads, payloads = done["16 bits"][case]
        assert got_loss == pytest.approx(loss, rel=1e-3)
        for name, grad in got_grads.items():
            assert grad.dtype == torch.float32
            assert (grad - grads[name]).abs().max() < 0.02 * largest, name
        wide = [n for n in payloads if n not in (WHOLE // 2, 4 * 2 * S, 8 * 2 * S)]
        assert wide == [WHOLE] * (1 if case[1] == "tensor" else 2)
        assert payloads.count(WHOLE // 2) >= 2 * 2 * 2 + 1


# What is held

b, s, h, a = 2, 64, 256, 4
HELD = {
    ("tensor", "none"): (apply_tensor_parallel, lambda model: None),
    ("tensor", "selective"): (apply_tensor_parallel, apply_selective_recompute),
    ("sequence", "none"): (apply_sequence_parallel, lambda model: None),
    ("sequence", "selective"): (apply_sequence_parallel, apply_selective_recompute),
    ("keeping", "none"): (keeping, lambda model: None),
}


def cuda_dropout(x, p=0.5, training=True, inplace=False):
    """With a mask of one byte a value, as CUDA's; the CPU's has as many as a value."""
    return torch.native_dropout(x, p, True)[0] if p > 0 and training else x


def activations(group, apply, recompute):
    """Bytes that a block saves: what a model of two saves more than one of one."""
    saved = []
    for num_layers in (1, 2):
        model = small_model(
            "gpt",
            vocab_size=32,
            max_sequence_length=s,
            num_layers=num_layers,
            width=h,
            num_heads=a,
            num_kv_heads=a,
            ffn_width=4 * h,
            dropout=0.1,
        )
        model = model.bfloat16()
        for block in model.blocks:
            block.attention.attention_fn = materialized_attention
        apply(model, group)
        recompute(model)
        tokens = torch.zeros(b, s, dtype=torch.int64)
        with patch.object(F, "dropout", cuda_dropout), Meter(model) as meter:
            logits = model(tokens)
            saved.append(meter.now()["activation"])
            del logits
    return saved[1] - saved[0]


@pytest.mark.parametrize("t", tiered([2, 4]))
def test_a_block_saves_what_korthikanti_2022_says(ranks, t):
    """Table 2, within 2 %: it leaves out the norms' statistics and the causal mask."""
    scores = 5 * a * s / (h * t)
    table = {
        ("tensor", "none"): 10 + 24 / t + scores,
        ("tensor", "selective"): 10 + 24 / t,
        ("sequence", "none"): 34 / t + scores,
        ("sequence", "selective"): 34 / t,
        ("keeping", "none"): 30 / t + 4 + scores,  # which is not in the table
    }
    for done in ranks[t]:
        for name, factor in table.items():
            assert done["held"][name] == pytest.approx(s * b * h * factor, rel=0.02), name


# Overlap


def overlap(group):
    model = llama(num_layers=1)
    parallel = apply_sequence_parallel(model, group)
    tokens = torch.zeros(2, S, dtype=torch.int64)
    loss = parallel.summed_loss(model(tokens), tokens)
    watcher = Watcher()
    with watcher.listening(SequenceParallelExchange, "start_gather", "start_reduce"), watcher:
        loss.backward()
    return watcher.events


def test_the_input_comes_while_its_gradient_is_computed_which_leaves_past_the_weights(ranks):
    x, weight = ("product", (2 * S, 24)), ("product", (18, 24))
    gathers, gathered = ("start_gather", "starts"), ("start_gather", "ends")
    reduces, reduced = ("start_reduce", "starts"), ("start_reduce", "ends")
    for done in ranks[2]:
        events = done["overlap"]
        assert events[:6] == [gathers, x, reduces, gathered, weight, reduced]  # head
        after_down = events[8:]
        assert after_down[:9] == [
            gathers,
            x,
            x,
            reduces,
            gathered,
            weight,
            weight,
            reduced,
            ("product", (24, 12)),
        ]
        assert events.count(gathers) == events.count(reduces) == 3


# Without the ranks


@pytest.mark.parametrize("apply", tiered([apply_sequence_parallel, apply_tensor_parallel]))
def test_a_step_of_one_fake_rank_of_many(apply):
    dist.init_process_group("fake", store=FakeStore(), rank=5, world_size=16)
    try:
        with FakeTensorMode():
            with torch.device("meta"):
                model = small_model(
                    "gpt",
                    vocab_size=160,
                    max_sequence_length=64,
                    width=64,
                    num_heads=16,
                    num_kv_heads=16,
                    ffn_width=256,
                    dropout=0.1,
                )
            parallel = apply(model, dist.group.WORLD)
            apply_full_recompute(model)
            materialize(model, "cpu")
            tokens = torch.zeros(2, 64, dtype=torch.int64)
            with Meter(model) as meter, Ledger() as ledger:
                parallel.summed_loss(model(tokens), tokens).backward()
                parallel.finish()
            assert meter.now()["parameter"] == 4 * tensor_parallel_parameters(model.config, 16)
            # embedding, head, two blocks; each block's forward once more, but for its last message
            whole = 4 * 2 * 64 * 64
            assert ledger.bytes_sent() > (2 + 2 * 4) * 2 * whole * 15 // 16
    finally:
        dist.destroy_process_group()
