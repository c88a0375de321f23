"""What context parallelism sends and when, and what each rank holds of a long sequence."""

from functools import partial
from unittest.mock import patch

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from minitron.cost import context_parallel_volume
from minitron.launch import run
from minitron.measure.ledger import Ledger
from minitron.measure.meter import Meter
from minitron.model.recompute import apply_selective_recompute
from minitron.parallel.context import ring
from minitron.parallel.context.axis import apply_context_parallel
from minitron.parallel.context.chunks import contiguous
from minitron.parallel.context.gather import gathered_attention
from minitron.parallel.context.ring import ring_attention
from minitron.parallel.context.ulysses import ulysses_attention
from minitron.proof.oracle import small_model
from tests.tiers import tiered

V, B, S = 29, 2, 24
llama = partial(
    small_model,
    "llama",
    vocab_size=V,
    max_sequence_length=S,
    width=48,
    num_heads=24,
    num_kv_heads=12,
)
METHODS = {
    "ring": apply_context_parallel,
    "all-gather": partial(apply_context_parallel, attention=gathered_attention),
    "ulysses": partial(apply_context_parallel, attention=ulysses_attention, chunks_of=contiguous),
}
DTYPES = torch.float32, torch.bfloat16


def everything(group):
    return {
        "wire": {
            (name, dtype, count): one_step(group, apply, dtype, count)
            for name, apply in METHODS.items()
            for dtype in DTYPES
            for count in (1, 2)
        },
        "held": held_by_method(group),
        "events": events(group),
        "largest": largest_tensor(group),
        "again": one_step(group, METHODS["ring"], torch.float32, 2, apply_selective_recompute)[0],
    }


@pytest.fixture(scope="module", params=tiered([3, 2, 4]), ids="{} ranks".format)
def ranks(request):
    return run(everything, request.param, timeout=120, watch=False)


# What crosses the wire


def one_step(group, apply, dtype, num_layers, policy=lambda model: None):
    """Calls of the two passes, without the gradients' all-reduce, and the bytes."""
    model = llama(num_layers=num_layers).to(dtype)
    parallel = apply(model, group)
    policy(model)
    tokens = torch.zeros(B, S, dtype=torch.int64)

    def accumulate(micro_batches, divisor, sum_loss):
        [(inputs, targets)] = micro_batches
        sum_loss(model(inputs).float(), targets).backward()
        return torch.zeros(())

    with Ledger() as ledger:
        parallel.run_passes(
            accumulate,
            [(tokens, tokens)],
            parallel.own_parts,
            torch.ones(()),
            parallel.summed_loss,
        )
    calls = [(call.phase, call.op, call.payload, call.dtype) for call in ledger.calls]
    return calls, ledger.bytes_sent(), ledger.bytes_received()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", METHODS)
def test_a_block_sends_what_the_formula_says(ranks, name, dtype):
    expected = context_parallel_volume(
        llama().config, B, S, len(ranks), name, dtype.itemsize, grad_element_size=4
    )
    for done in ranks:
        (_, *one), (_, *two) = (done["wire"][name, dtype, count] for count in (1, 2))
        assert one == [*expected]
        assert two == [2 * each for each in expected]


def test_each_call_of_a_ring(ranks):
    """Keys and values in both passes, their gradients in float32 in the backward pass alone."""
    size = len(ranks)
    pair = 2 * B * 12 * (S // size) * 2  # elements: G = 12, K = 2
    there, home = (torch.bfloat16, 2 * pair), (torch.float32, 4 * pair)
    for done in ranks:
        calls = done["wire"]["ring", torch.bfloat16, 2][0]
        for phase, expected in (
            ("forward", 2 * (size - 1) * [there]),
            ("backward", 2 * (size - 1) * [there, home]),
        ):
            for op in ("send", "recv"):
                seen = [(call[3], call[2]) for call in calls if call[:2] == (phase, op)]
                assert sorted(seen, key=str) == sorted(expected, key=str)


def test_the_others_are_one_message_each(ranks):
    for done in ranks:
        ops = [call[:2] for call in done["wire"]["all-gather", torch.float32, 2][0]]
        assert ops == 2 * [("forward", "all_gather")] + 2 * [
            ("backward", "all_gather"),
            ("backward", "reduce_scatter"),
        ]
        ops = [call[:2] for call in done["wire"]["ulysses", torch.float32, 2][0]]
        assert ops == 8 * [("forward", "all_to_all")] + 8 * [("backward", "all_to_all")]


def test_recomputed_attention_travels_once_more(ranks):
    for done in ranks:
        plain = done["wire"]["ring", torch.float32, 2][0]
        forward = [call[1:] for call in plain if call[0] == "forward"]
        extra = [call[1:] for call in done["again"] if call[0] == "backward"]
        assert len(extra) == len([c for c in plain if c[0] == "backward"]) + len(forward)


# When: a message is on its way while the tensor that it carries is used


def events(group):
    """The order of starts, waits and computing, of one attention's two passes."""
    log = []

    def logged(name, function):
        def call(*args):
            log.append(name)
            return function(*args)

        return call

    def start_shift(tensor, group):
        name = "gradients" if tensor.dtype == torch.float32 else "keys"
        log.append(f"start {name}")
        return logged(f"wait for {name}", real_start(tensor, group))

    real_start = ring.start_shift
    tensors = [
        torch.randn(1, heads, 4, 2, dtype=torch.bfloat16, requires_grad=True) for heads in (2, 1, 1)
    ]
    with (
        patch.object(ring, "start_shift", start_shift),
        patch.object(ring, "attend_chunks", logged("compute", ring.attend_chunks)),
        patch.object(
            ring, "attend_chunks_backward", logged("compute", ring.attend_chunks_backward)
        ),
    ):
        out = ring_attention(*tensors, 0.0, group)
        log.append("backward")
        out.sum().backward()
    return log


@pytest.mark.parametrize("ranks", [3], indirect=True, ids="{} ranks".format)
def test_messages_travel_while_ranks_compute(ranks):
    start, wait = "start keys", "wait for keys"
    sent, came = "start gradients", "wait for gradients"
    for done in ranks:
        assert done["events"] == [
            start,
            "compute",
            wait,
            start,
            "compute",
            wait,
            "compute",
            "backward",
            start,
            "compute",
            wait,
            start,
            "compute",
            sent,
            wait,
            "compute",
            came,
            sent,
            came,
        ]


# What is held


def held_by_method(group):
    return {name: block_activations(group, apply) for name, apply in METHODS.items()}


@pytest.fixture(scope="module")
def held_alone():
    (held,) = run(held_by_method, 1, watch=False)
    return held


def block_activations(group, apply):
    """Bytes that a block keeps for the backward pass: what two keep more than one."""
    held = []
    for num_layers in (1, 2):
        model = small_model(
            "llama",
            vocab_size=V,
            max_sequence_length=192,
            num_layers=num_layers,
            width=48,
            num_heads=12,
            num_kv_heads=12,
            ffn_width=96,
        )
        parallel = apply(model, group)
        tokens = parallel.own_tokens(torch.zeros(1, 192, dtype=torch.int64))
        with Meter(model) as meter:
            logits = model(tokens)
            held.append(meter.now()["activation"])
            del logits
    return held[1] - held[0]


@pytest.mark.parametrize("name", METHODS)
def test_activations_are_divided_by_the_ranks(ranks, held_alone, name):
    for done in ranks:
        assert done["held"][name] == pytest.approx(held_alone[name] / len(ranks), rel=0.01)


class Largest(TorchDispatchMode):
    """The most elements of any tensor that an operator has made."""

    numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for each in out if isinstance(out, (tuple, list)) else [out]:
            if isinstance(each, torch.Tensor):
                self.numel = max(self.numel, each.numel())
        return out


LONG = 1024


def largest_tensor(group):
    """On a rank of a ring, of one head's attention over 1024 tokens a rank."""
    tensors = [torch.randn(1, 1, LONG, 8, requires_grad=True) for _ in range(3)]
    with Largest() as largest:
        ring_attention(*tensors, 0.0, group).sum().backward()
    return largest.numel


def test_the_s_by_s_matrix_never_exists(ranks):
    for done in ranks:
        assert done["largest"] <= 256 * 256 < (len(ranks) * LONG) ** 2 / 2 / 30
