"""What a linear layer has been given combines, in any order: the same bits, and the same bytes.

Two ranks are started once and do everything; the tests then look at what came back.
"""

from functools import partial
from itertools import permutations

import pytest
import torch

from minitron.launch import run
from minitron.measure.ledger import Ledger
from minitron.model.float8 import Float8Matmuls, apply_float8
from minitron.model.linear import (
    Deferral,
    Linear,
    accumulate_all,
    apply_deferred_weight_gradients,
)
from minitron.parallel.tensor.layers import AllReduceExchange, apply_tensor_parallel
from minitron.parallel.tensor.sequence import SequenceParallelExchange, apply_sequence_parallel
from minitron.proof.oracle import small_model
from tests.parallel.events import Watcher

V, S, B = 36, 10, 2
llama = partial(
    small_model,
    "llama",
    vocab_size=V,
    max_sequence_length=S,
    num_layers=1,
    width=32,
    num_heads=4,
    num_kv_heads=2,
    ffn_width=48,
)
CUTS = {
    "tensor": apply_tensor_parallel,
    "sequence": apply_sequence_parallel,
    "keeping": partial(apply_sequence_parallel, regather=False),
}
TOKENS = torch.arange(B * S).view(B, S) % V
LAYERS = 8  # query, key, value, out, gate, up, down, head
TECHNIQUES = "float8", "cut", "deferral"


def made(group, cut, order):
    """A model to which these techniques are applied in this order; what cuts it, what defers."""
    torch.manual_seed(0)
    model, parallel, deferral = llama(), None, Deferral()
    for technique in order:
        if technique == "float8":
            apply_float8(model)
        elif technique == "cut":
            parallel = CUTS[cut](model, group)
        else:
            deferral = apply_deferred_weight_gradients(model)
    return model, parallel, deferral


def gradients(group, cut, order):
    """Of one backward pass in halves, if it can be, and W after it; what a layer has then."""
    model, parallel, deferral = made(group, cut, order)
    loss = parallel.summed_loss(model(TOKENS), TOKENS)
    with deferral.collecting() as later:
        loss.backward()
    num_deferred = sum(len(half.weights) for half in later)
    accumulate_all(later)
    layer = model.blocks[0].mlp.up
    given = [
        type(part) for part in (layer.parts.matmuls, layer.parts.exchange, layer.parts.deferral)
    ]
    return [p.grad for p in model.parameters()], num_deferred, given


def one_step(group, cut, is_deferred):
    """Calls and events of a backward pass, and of W; bytes kept in between."""
    order = ("cut", "deferral") if is_deferred else ("cut",)
    model, parallel, deferral = made(group, cut, order)
    loss = parallel.summed_loss(model(TOKENS), TOKENS)
    watcher = Watcher()
    exchange = AllReduceExchange if cut == "tensor" else SequenceParallelExchange
    with Ledger() as ledger, watcher.listening(exchange, "start_gather", "start_reduce"), watcher:
        with ledger.phase("I"), deferral.collecting() as later:
            loss.backward()
        in_input_half = len(watcher.events)
        kept = [(half.x.numel(), sum(rows.numel() for rows in half.rows)) for half in later]
        with ledger.phase("W"):
            accumulate_all(later)
    calls = [(call.phase, call.op, call.payload) for call in ledger.calls]
    return calls, watcher.events[:in_input_half], watcher.events[in_input_half:], kept


def everything(group):
    return {
        "bits": {
            (cut, order): gradients(group, cut, order)
            for cut in CUTS
            for order in [("float8", "cut"), *permutations(TECHNIQUES)]
        },
        "steps": {
            (cut, is_deferred): one_step(group, cut, is_deferred)
            for cut in CUTS
            for is_deferred in (False, True)
        },
    }


@pytest.fixture(scope="module")
def ranks():
    return run(everything, 2, timeout=60, watch=False)


@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("order", permutations(TECHNIQUES), ids="-".join)
def test_in_any_order_a_layer_keeps_what_it_has_and_computes_the_same_bits(ranks, cut, order):
    exchange = AllReduceExchange if cut == "tensor" else SequenceParallelExchange
    for done in ranks:
        expected, none_deferred, _ = done["bits"][cut, ("float8", "cut")]
        found, num_deferred, given = done["bits"][cut, order]
        frozen = sum(grad is None for grad in expected)
        assert none_deferred == 0 and num_deferred == LAYERS
        assert given == [Float8Matmuls, exchange, Deferral]
        assert frozen == sum(grad is None for grad in found) <= 1
        assert all(
            torch.equal(*pair) for pair in zip(found, expected, strict=True) if pair[0] is not None
        )


@pytest.mark.parametrize("cut", CUTS)
def test_as_much_is_sent_and_what_was_gathered_again_is_so_for_w(ranks, cut):
    for done in ranks:
        at_once, halves = (done["steps"][cut, is_deferred][0] for is_deferred in (False, True))
        assert sorted(call[1:] for call in halves) == sorted(call[1:] for call in at_once)
        in_w = [call for call in halves if call[0] == "W"]
        gathers = [("W", "all_gather", 4 * B * S * 32)] * 3  # attention, feed-forward, head
        assert in_w == (gathers if cut == "sequence" else [])


@pytest.mark.parametrize("cut", CUTS)
def test_between_the_halves_wait_what_forward_saved_and_the_gradients_of_outputs(ranks, cut):
    part = 2 if cut == "sequence" else 1
    tokens, whole = B * S, B * S * 32
    gradients = [tokens * V // 2, whole, tokens * 48, whole, tokens * (32 + 2 * 16) // 2]
    inputs = [whole // part, tokens * 24, whole // part, tokens * 16, whole // part]
    for done in ranks:
        kept = done["steps"][cut, True][3]  # head, down, gate and up, out, query and key and value
        assert kept == list(zip(inputs, gradients, strict=True))


def test_i_computes_no_gradient_of_a_weight_and_in_w_the_next_input_travels(ranks):
    gathers, gathered = ("start_gather", "starts"), ("start_gather", "ends")
    weights = {
        "head": (18, 32),
        "down": (32, 24),
        "up": (24, 32),
        "out": (32, 16),
        "query": (16, 32),
        "key": (8, 32),
    }
    for done in ranks:
        _, first, second, _ = done["steps"]["sequence", True]
        assert not {("product", shape) for shape in weights.values()} & set(first)
        # down and out, cut by rows, have saved the input that they read
        product = {name: ("product", shape) for name, shape in weights.items()}
        assert second == [
            gathers,
            gathered,
            product["head"],
            gathers,
            product["down"],
            gathered,
            product["up"],
            product["up"],
            gathers,
            product["out"],
            gathered,
            product["query"],
            product["key"],
            product["key"],
        ]


def test_a_layer_that_is_given_nothing_stays_pytorchs():
    assert not any(isinstance(module, Linear) for module in llama().modules())
