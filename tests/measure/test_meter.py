"""The meter against PyTorch's own tracker, and what it says of each tensor."""

import contextlib

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.mem_tracker import MemTracker
from torch.utils.checkpoint import checkpoint

from minitron.config import ModelConfig
from minitron.measure.meter import CATEGORIES, Meter
from minitron.model.recompute import apply_full_recompute
from minitron.model.transformer import Transformer
from minitron.step import summed_loss
from tests.tiers import diagonal_of, tiered

SMALL = ModelConfig(
    "gpt",
    vocab_size=97,
    num_layers=2,
    width=32,
    num_heads=4,
    num_kv_heads=4,
    ffn_width=128,
    dropout=0.1,
)
ADAMS = {
    "fused": dict(fused=True),
    "foreach": dict(foreach=True),
    "for loop": dict(foreach=False, fused=False),
}


def make(config=SMALL, num_sequences=2, **adam):
    model = Transformer(config)
    optimizer = torch.optim.AdamW(model.parameters(), **adam)
    tokens = torch.zeros(2, num_sequences, 32, dtype=torch.int64)
    return model, optimizer, tokens[0], tokens[1].clone()


def backward(model, inputs, targets):
    summed_loss(model(inputs), targets).backward()


def size_of(tensors):
    return sum(tensor.untyped_storage().nbytes() for tensor in tensors)


# Totals: an independent count


def readings(config, adam, with_theirs, segments=lambda model: None):
    """Total bytes after each part of two steps, and the peak."""
    model, optimizer, inputs, targets = make(config, **adam)
    segments(model)
    if with_theirs:
        meter = MemTracker()
        meter.track_external(model, optimizer, inputs, targets)
    else:
        meter = Meter(model, optimizer)

    def total(moment="current"):
        if with_theirs:
            devices = meter.get_tracker_snapshot(moment).values()
            return sum(d["Total"] for d in devices) - size_of([inputs, targets])
        return sum(meter.now().values()) if moment == "current" else meter.peak.total

    totals = []
    with meter:
        for step in range(2):
            if with_theirs and step:
                meter.reset_mod_stats()
            loss = summed_loss(model(inputs.view(-1, 32)), targets)
            totals.append(total())
            loss.backward()
            totals.append(total())
            optimizer.step()
            totals.append(total())
            optimizer.zero_grad()
            del loss
            totals.append(total())
    return [*totals, total("peak")]


@pytest.mark.parametrize("fake, adam", diagonal_of(["real", "fake"], ADAMS))
@pytest.mark.parametrize("family", tiered(["llama", "gpt"]))
def test_totals_are_those_of_pytorchs_tracker(family, fake, adam):
    """To the byte, in both steps, once the tokens are taken off, which the tracker counts too."""
    adam = ADAMS[adam]
    num_layers = 12 if family == "gpt" and adam.get("fused") else 2
    config = ModelConfig(
        family,
        vocab_size=97,
        num_layers=num_layers,
        width=32,
        num_heads=4,
        num_kv_heads=4,
        ffn_width=128,
    )
    with FakeTensorMode() if fake == "fake" else contextlib.nullcontext():
        ours = readings(config, adam, with_theirs=False)
        theirs = readings(config, adam, with_theirs=True)
    assert ours == theirs
    assert len(set(ours)) > 5


def checkpointed(model):
    model.run_blocks = lambda blocks, x, rotation: checkpoint(
        lambda x: blocks[1](blocks[0](x, rotation), rotation), x, use_reentrant=False
    )


def test_totals_with_torchs_own_checkpointing_are_those_of_its_tracker():
    ours = readings(SMALL, ADAMS["fused"], False, checkpointed)
    theirs = readings(SMALL, ADAMS["fused"], True, checkpointed)
    assert ours == pytest.approx(theirs, rel=0.02)
    assert ours[-1] < readings(SMALL, ADAMS["fused"], False)[-1]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_the_peak_is_the_cuda_allocators():
    """Within 2 %: the allocator rounds blocks to 512 bytes, and cuBLAS keeps a workspace, which
    the warm-up has paid for."""
    config = ModelConfig(
        "llama",
        vocab_size=8192,
        num_layers=12,
        width=512,
        num_heads=8,
        num_kv_heads=8,
        ffn_width=1536,
        max_sequence_length=512,
    )
    with torch.device("cuda"):
        model, optimizer, *_ = make(config, fused=True)
        tokens = torch.zeros(4, 512, dtype=torch.int64)
    for _ in range(2):  # the second, warm time counts
        optimizer.zero_grad()
        outside = (
            torch.cuda.memory_allocated()
            - size_of(model.parameters())
            - size_of(value for state in optimizer.state.values() for value in state.values())
        )
        torch.cuda.reset_peak_memory_stats()
        with Meter(model, optimizer) as meter:
            backward(model, tokens, tokens)
            optimizer.step()
        theirs = torch.cuda.max_memory_allocated() - outside
    assert meter.peak.total == pytest.approx(theirs, rel=0.02)


# Categories


def test_every_byte_is_put_where_it_belongs():
    model, optimizer, inputs, targets = make(fused=True)
    parameters = size_of(model.parameters())
    with Meter(model, optimizer) as meter:
        assert meter.now() == dict.fromkeys(CATEGORIES, 0) | {"parameter": parameters}
        loss = summed_loss(model(inputs), targets)
        saved = meter.now()["activation"]
        loss.backward()
        after_backward = meter.now()
        optimizer.step()
        after_step = meter.now()

    assert saved > parameters / 2
    assert after_backward["activation"] == after_backward["optimizer state"] == 0
    assert after_backward["gradient"] == after_step["gradient"] == parameters
    states = [v for state in optimizer.state.values() for v in state.values()]
    assert after_step["optimizer state"] == size_of(states) > 2 * parameters


def test_the_second_step_finds_gradients_and_states_in_place():
    model, optimizer, inputs, targets = make(fused=True)
    with Meter(model, optimizer):
        backward(model, inputs, targets)
        optimizer.step()
    with Meter(model, optimizer) as meter:
        held = meter.now()
        backward(model, inputs, targets)
    assert held["gradient"] == held["parameter"] < held["optimizer state"]
    assert meter.now() == held | {"temporary": 0}


def test_optimizer_state_is_told_apart_while_it_is_created():
    model, optimizer, inputs, targets = make(fused=True)
    with Meter(model, optimizer) as meter:
        backward(model, inputs, targets)
        optimizer.step()
    moments = [m for m in meter.timeline if m.phase == "optimizer" and m.op == "zeros_like"]
    assert len(moments) > 10
    largest = max(size_of([p]) for p in model.parameters())
    assert max(m.bytes["temporary"] for m in moments) <= largest + 100


def test_a_weight_of_the_optimizer_alone_is_optimizer_state():
    model = nn.Linear(4, 4, bias=False, dtype=torch.bfloat16)
    master = nn.Parameter(model.weight.detach().float())
    with Meter(model, torch.optim.SGD([master], lr=0.1)) as meter:
        assert meter.now()["parameter"] == 32 and meter.now()["optimizer state"] == 64


def test_views_and_tied_weights_count_once_and_frozen_ones_get_no_gradient():
    tied, *_ = make()
    assert tied.head.weight is tied.token_embedding.weight
    model, _, inputs, targets = make()
    frozen = [p for p in model.blocks[0].parameters()]
    for parameter in frozen:
        parameter.requires_grad_(False)
    with Meter(model) as meter:
        parameters = meter.now()["parameter"]
        view = torch.zeros(10).view(2, 5)[0]
        assert meter.now()["temporary"] == 40
        backward(model, inputs, targets)
        assert view.shape == (5,)
    assert parameters == size_of(set(model.parameters()))
    assert meter.now()["gradient"] == parameters - size_of(frozen)


def test_what_was_there_before_stays_outside():
    model, _, inputs, _ = make()
    with Meter(model) as meter:
        part = inputs[:, 1:]
        assert part.shape == (2, 31)
        assert meter.now()["temporary"] == 0


def test_accumulation_holds_the_activations_of_one_micro_batch():
    model, _, inputs, targets = make(num_sequences=4)
    peaks = {}
    for size in (4, 2, 1):
        model.zero_grad()
        with Meter(model) as meter:
            for x, y in zip(inputs.split(size), targets.split(size), strict=True):
                backward(model, x, y)
        peaks[size] = max(m.bytes["activation"] for m in meter.timeline)
        assert meter.now()["activation"] == 0
    assert peaks[2] / peaks[4] == pytest.approx(0.5, abs=0.02)
    assert peaks[1] / peaks[4] == pytest.approx(0.25, abs=0.02)


def test_a_replay_holds_the_activations_of_one_block():
    plain, _, inputs, targets = make()
    with Meter(plain) as without:
        backward(plain, inputs, targets)
    model, *_ = make()
    apply_full_recompute(model)
    with Meter(model) as meter:
        loss = summed_loss(model(inputs), targets)
        kept = meter.now()["activation"]
        loss.backward()
        del loss

    assert kept < max(m.bytes["activation"] for m in without.timeline) / 2
    replayed = max(m.bytes["activation"] for m in meter.timeline if m.phase == "backward")
    assert replayed > kept  # what a replay makes for the backward pass is activation again
    assert meter.now() == without.now()


# The timeline and the peak


def test_the_timeline_names_phases_and_operators():
    model, optimizer, inputs, targets = make(foreach=True)
    with Meter(model, optimizer) as meter:
        for _ in range(2):
            backward(model, inputs, targets)
            with meter.phase("clip"):
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
    phases = [m.phase for m in meter.timeline]
    changes = [b for a, b in zip([None, *phases], phases, strict=False) if a != b]
    assert changes == ["forward", "backward", "clip", "optimizer"] * 2
    ops = {m.op for m in meter.timeline if m.phase == "forward"}
    assert {"addmm", "gelu", "_log_softmax"} <= ops
    assert meter.timeline[0].op == meter.timeline[-1].op == ""


@pytest.mark.parametrize("kind", [{"fused": True}, {"foreach": True}])
def test_the_optimizer_takes_time_also_where_it_makes_no_new_tensor(kind):
    model, optimizer, inputs, targets = make(**kind)
    with Meter(model, optimizer) as meter:
        for _ in range(2):
            backward(model, inputs, targets)
            optimizer.step()
            optimizer.zero_grad()
    times = [m.seconds for m in meter.timeline]
    assert times == sorted(times) and times[0] >= 0
    starts = [
        i
        for i, m in enumerate(meter.timeline)
        if m.phase == "optimizer" and meter.timeline[i - 1].phase != "optimizer"
    ]
    assert len(starts) == 2
    assert all(meter.timeline[i + 1].phase == "optimizer" for i in starts), "it also ends"
    assert all(meter.timeline[i + 1].seconds > meter.timeline[i].seconds for i in starts)


def test_the_peak_is_a_moment_and_its_tensors_add_up():
    model, optimizer, inputs, targets = make(fused=True)
    with Meter(model, optimizer) as meter:
        backward(model, inputs, targets)
        optimizer.step()
    peak = meter.peak
    assert peak.total == max(m.total for m in meter.timeline)
    for category in CATEGORIES:
        held = [t.bytes for t in peak.tensors if t.category == category]
        assert sum(held) == peak.bytes[category]
    sizes = [t.bytes for t in peak.tensors]
    assert sizes == sorted(sizes, reverse=True)


def test_tensors_are_named_with_their_module():
    model, _, inputs, targets = make(num_sequences=16)
    with Meter(model) as meter:
        backward(model, inputs, targets)
    tensors = {(t.name, t.category): t for t in meter.peak.tensors}
    weight = tensors["blocks.1.mlp.up.weight", "parameter"]
    assert (weight.module, weight.shape, weight.dtype) == (
        "blocks.1.mlp.up",
        (128, 32),
        torch.float32,
    )
    by_module = {(t.name, t.module) for t in meter.peak.tensors if t.category == "activation"}
    assert {("gelu", "blocks.0.mlp"), ("addmm", "blocks.1.mlp.up")} <= by_module


def test_a_backward_tensor_belongs_to_the_module_whose_gradient_it_is():
    model = nn.Sequential(nn.Linear(2, 50), nn.Sigmoid(), nn.Linear(50, 1))
    with Meter(model) as meter:
        model(torch.ones(100, 2)).sum().backward()
    made = [(e.name, e.module) for e in meter._history]
    assert ("sigmoid_backward", "1") in made and ("mm", "2") in made


def test_a_storage_filled_in_place_is_a_gathered_parameter():
    model, full = nn.Linear(10, 10), torch.empty(1000)
    resize = torch.ops.inductor.resize_storage_bytes_
    resize(full, 0)
    with Meter(model) as meter:
        owned = meter.now()["parameter"]
        for _ in range(2):
            resize(full, 4000)
            assert meter.now()["parameter"] == owned + 4000
            resize(full, 0)
            assert meter.now()["parameter"] == owned
        resize(full, 4000)
        del full
        assert meter.now()["parameter"] == owned
    assert max(moment.bytes["parameter"] for moment in meter.timeline) == owned + 4000


# What must not go wrong


def test_an_error_inside_leaves_nothing_behind():
    model, optimizer, inputs, targets = make(fused=True)
    with pytest.raises(IndexError), Meter(model, optimizer) as meter:
        model(inputs + 1000)
    moments = len(meter.timeline)
    backward(model, inputs, targets)
    optimizer.step()
    assert len(meter.timeline) == moments
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    assert all(not p._post_accumulate_grad_hooks for p in model.parameters())
    with Meter(model, optimizer) as meter:
        assert meter.now()["temporary"] == 0


def test_the_training_is_the_same_with_a_meter():
    gradients = []
    for metered in (False, True):
        torch.manual_seed(0)
        model, _, inputs, targets = make()
        with Meter(model) if metered else contextlib.nullcontext():
            backward(model, inputs, targets)
        gradients.append([p.grad for p in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))


def test_nothing_is_kept_alive():
    model = nn.Linear(10, 10)
    with Meter(model) as meter:
        out = F.relu(model(torch.ones(5, 10)))  # relu saves its own output
        assert meter.now()["activation"] > 0
        del out
        assert meter.now()["activation"] == meter.now()["temporary"] == 0
