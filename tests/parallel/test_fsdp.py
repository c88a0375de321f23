"""Sharded parameters train as whole ones do, travel as often as said, and leave when said."""

import functools
import weakref
from contextlib import nullcontext
from functools import cache, partial
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore

from minitron.comm.agreement import SINGLE_RANK
from minitron.config import ModelConfig, TrainConfig
from minitron.launch import RankError, run
from minitron.measure.ledger import Ledger
from minitron.measure.meter import Meter
from minitron.model.recompute import (
    apply_full_recompute,
    apply_segmented_recompute,
    apply_selective_recompute,
)
from minitron.model.transformer import Transformer, initial_value, initialize
from minitron.parallel import clipping, flat
from minitron.parallel.data import axis, units
from minitron.parallel.data.fsdp import apply_fsdp
from minitron.parallel.grid import Grid
from minitron.parallel.one_device import OneDevice
from minitron.proof import oracle
from minitron.proof.difference import first_difference
from minitron.proof.oracle import assert_same_training, sample_batches, small_gpt, trainings
from minitron.step import make_optimizer, train_step
from tests.parallel.early_adagrad import EarlyAdagrad
from tests.parallel.records import SGD, assert_same
from tests.parallel.saving import load, saved
from tests.tiers import collected, diagonal_of, in_tiers, in_turn, tiered

SIZES = (1, 2, 3, 4, 8)
LAYERS = 4


def deep(family="llama", width=18, frozen=False):
    tied = family == "gpt"
    config = ModelConfig(family, 29, 7, LAYERS, width, 3, 3, 25, tied_embedding=tied)
    model = Transformer(config)
    model.blocks[1].mlp_norm.weight.requires_grad_(not frozen)
    model.final_norm.weight.requires_grad_(not frozen)
    return model


def recomputed():
    model = deep(frozen=True)
    apply_full_recompute(model)
    apply_selective_recompute(model)
    return model


def segmented():
    model = deep("gpt")
    apply_segmented_recompute(model, [3, 1])
    return model


class NormFirst(nn.Module):
    """Reads a parameter of the root in the backward pass of what comes before the blocks."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(29, 6)
        self.norm = nn.LayerNorm(6)
        self.blocks = nn.ModuleList(nn.Linear(6, 6) for _ in range(2))
        self.head = nn.Linear(6, 29)

    def forward(self, tokens):
        x = self.norm(self.embedding(tokens))
        for block in self.blocks:
            x = x + block(x).relu()
        return self.head(x)


class Tiny(NormFirst):
    """Has blocks of one element, fewer than ranks."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.PReLU() for _ in range(2))


def on_one_device(model, group):
    return OneDevice(model)


# The same training

WHOLE = {"sync_every_micro_batch": False}
KEPT = {"reshard_after_forward": False}
CLIP = 0.2

# name -> (model, micro-batches, sequences of each step, options, sizes of groups)
TRAININGS = {
    "gpt": (small_gpt, 1, (17, 15), {}, SIZES),
    "llama, kept after forward": (deep, 1, (9, 8), KEPT, (3,)),
    "summed in the shards": (small_gpt, 2, (7, 6), {}, (2, 3)),
    "summed whole": (small_gpt, 2, (7, 6), WHOLE, (3,)),
    "summed whole, kept": (recomputed, 3, (9, 10), WHOLE | KEPT, (3,)),
    "recomputed": (recomputed, 2, (9, 8), {}, (3, 4)),
    "recomputed in segments": (segmented, 1, (9, 5), {}, (3,)),
    "a norm before the blocks": (NormFirst, 1, (9, 5), {}, (3,)),
    "fewer elements than ranks": (Tiny, 1, (9, 5), {}, (3, 4)),
}
OPTIMIZERS = {
    "momentum": partial(torch.optim.SGD, lr=0.1, momentum=0.9),
    "Adagrad": partial(EarlyAdagrad, lr=0.01, eps=1e-3),
}


CASES = [(training, size) for training, (*_, sizes) in TRAININGS.items() for size in sizes]
IN_MAKE_TEST = {case for case in CASES if case[1] == 3}


def train_all(group, cases):
    """Records by training and size of group."""
    parts = {size: dist.new_group(range(size)) for size in SIZES if size <= group.size()}
    records = {}
    for (training, size), optimizers in cases.items():
        model, num_micro_batches, sizes, options, _ = TRAININGS[training]
        if group.rank() < size:
            with patch.dict(oracle.OPTIMIZERS, OPTIMIZERS if training == "gpt" else {}):
                records[training, size] = trainings(
                    parts[size],
                    partial(apply_fsdp, **options),
                    model,
                    sample_batches(sizes),
                    num_micro_batches,
                    optimizers,
                )
    return records


@pytest.fixture(scope="module")
def records(request):
    """The first training is by all optimizers in any case."""
    cases = in_turn(request, collected(request, "case"))
    cases |= {case: None for case in cases if case[0] == "gpt"}
    num_ranks = max((size for _, size in cases), default=1)
    return run(train_all, num_ranks, cases, timeout=90, watch=False)


@pytest.mark.parametrize("case", in_tiers(IN_MAKE_TEST, CASES))
def test_it_is_the_same_training(records, case):
    training, size = case
    model, _, sizes, *_ = TRAININGS[training]
    with patch.dict(oracle.OPTIMIZERS, OPTIMIZERS if training == "gpt" else {}):
        reference = trainings(SINGLE_RANK, on_one_device, model, sample_batches(sizes), 1)
    assert len(reference) == (4 if training == "gpt" else 2)
    assert_same(reference, [of_rank[case] for of_rank in records[:size]])


def clipped(model, group):
    """Clips in `finish`, in one process as on many ranks."""
    parallel = on_one_device(model, group) if group is SINGLE_RANK else apply_fsdp(model, group)
    finish = parallel.finish

    def finish_and_clip():
        finish()
        norm = parallel.clip([parallel.optimizer_tensor(p) for p in model.parameters()], CLIP)
        assert norm > CLIP

    parallel.finish = finish_and_clip
    return parallel


# Mutations: take the essential line out, and the oracle must tell


class Sent:
    def wait(self):
        pass


def not_sent(*args, **kwargs):
    return Sent()


def own_part(output, input, group, async_op=False):
    output.copy_(input.view(group.size(), -1)[group.rank()])
    return Sent()


def summed(output, input, group, async_op=False):
    return reduce_scatter_single(output, input * group.size(), group, async_op)


def unshard_once(flat):
    """What has been gathered once is taken for good."""
    work = unshard(flat)
    work.wait()
    if not hasattr(flat, "stale"):
        flat.stale = flat.full.clone()
    flat.full.copy_(flat.stale)
    return Sent()


reduce_scatter_single, unshard = flat.reduce_scatter_single, flat.FlatUnit.unshard
MUTANTS = {
    "reduce-scatter removed": (
        apply_fsdp,
        lambda: patch.object(flat, "reduce_scatter_single", own_part),
        "token_embedding.weight: gradient not proportional to that of one process on all ranks",
    ),
    "mean dropped": (
        apply_fsdp,
        lambda: patch.object(flat, "reduce_scatter_single", summed),
        "token_embedding.weight: gradient 3.0x too large on all ranks: summed instead of averaged",
    ),
    "stale parameters": (
        apply_fsdp,
        lambda: patch.object(flat.FlatUnit, "unshard", unshard_once),
        "(step 1; 1 of 1 differ)",
    ),
    "no broadcast": (
        apply_fsdp,
        lambda: patch.object(axis, "broadcast_together", not_sent),
        "token_embedding.weight: initial weights differ on all ranks: no broadcast from rank 0",
    ),
    "clipped by the local norm": (
        clipped,
        lambda: patch.object(clipping, "all_reduce", not_sent),
        "gradient not proportional",
    ),
    "none: clipped by the global norm": (clipped, nullcontext, None),
}


def train_mutants(group):
    records = {}
    for name, (apply, patched, _) in MUTANTS.items():
        with patched():
            records[name] = trainings(group, apply, small_gpt, sample_batches((9, 9)), 1, SGD)
    return records


@pytest.fixture(scope="module")
def mutants():
    return run(train_mutants, 3, timeout=60)


@cache
def of_one_process(apply):
    return trainings(SINGLE_RANK, apply, small_gpt, sample_batches((9, 9)), 1, SGD)["SGD"]


@pytest.mark.parametrize("name", MUTANTS)
def test_the_oracle_names_the_mutation(mutants, name):
    apply, _, message = MUTANTS[name]
    expected = of_one_process(clipped if apply is clipped else on_one_device)
    found = first_difference(expected, [records[name]["SGD"] for records in mutants])
    assert found is None if message is None else message in found


# What crosses the wire, and when


def flat_bytes(model, group_size, trainable=(True, False)):
    """Bytes of all flat tensors, (N-1)/N of which each rank sends and receives."""
    total = 0
    for parameters in units.split_into_units(model).values():
        for kind in trainable:
            length = sum(p.numel() for p in parameters if p.requires_grad == kind)
            total += -(-length // group_size) * group_size * 4
    return total


WIRES = {
    "plain": (deep, {}),
    "recomputed": (recomputed, {}),
    "kept": (deep, KEPT),
    "frozen": (partial(deep, frozen=True), {}),
    "segmented": (segmented, {}),
    "whole": (deep, WHOLE),
    "bf16": (deep, {"compute_dtype": torch.bfloat16}),
}


def wire(group, names):
    seen = {}
    for name in names:
        make, options = WIRES[name]
        model = make()
        expected = flat_bytes(model, group.size()), flat_bytes(model, group.size(), (True,))
        parallel = apply_fsdp(model, group, **options)
        calls_at = []  # how many had been issued when a block began
        for block in model.blocks:
            block.register_forward_pre_hook(lambda *_, c=calls_at: c.append(len(ledger.calls)))
            block.register_full_backward_hook(lambda *_, c=calls_at: c.append(len(ledger.calls)))
        tokens = torch.randint(29, (2, 7))
        with Ledger() as ledger:
            model(tokens).sum().backward()
            parallel.finish()
        with Ledger() as two:
            with parallel.no_sync():
                model(tokens).sum().backward()
            model(tokens).sum().backward()
            parallel.finish()
        with Ledger() as evaluation, torch.no_grad():
            model(tokens)
        assert all(unit.is_sharded for unit in parallel.units)
        seen[name] = dict(
            expected=expected,
            calls_at=calls_at[: 2 * LAYERS],
            ops=[call.op for call in ledger.calls],
            moved={
                op: (ledger.bytes_sent(op), ledger.bytes_received(op), two.bytes_sent(op))
                for op in ("all_gather", "reduce_scatter")
            },
            root_bytes=sum(flat.full.nbytes for flat in parallel.root.flats),
            evaluation=evaluation.bytes_sent(),
        )
    return seen


@pytest.fixture(scope="module")
def volumes(request):
    names = {*collected(request, "of_wire"), "plain", "bf16", "segmented"}
    return run(wire, 3, sorted(names), watch=False)


@pytest.mark.parametrize(
    "of_wire", tiered(["plain", "recomputed", "kept", "whole", "frozen"], keep=4)
)
def test_the_volume_is_three_times_the_parameters_to_the_byte(volumes, of_wire):
    name, gathers = of_wire, 1 if of_wire == "kept" else 2
    for seen in volumes:
        gathered, reduced = (whole * 2 // 3 for whole in seen[name]["expected"])  # (N-1)/N
        assert seen[name]["moved"] == {
            "all_gather": (gathers * gathered,) * 2 + (2 * gathers * gathered,),
            "reduce_scatter": (reduced, reduced, reduced if name == "whole" else 2 * reduced),
        }
        assert set(seen[name]["ops"]) == {"all_gather", "reduce_scatter"}
        assert (reduced < gathered) == (name in ("frozen", "recomputed"))


def test_an_evaluation_gathers_once_and_the_root_at_both_ends(volumes):
    for seen in volumes:
        plain = seen["plain"]
        assert plain["evaluation"] == (plain["expected"][0] + plain["root_bytes"]) * 2 // 3


def test_half_precision_halves_the_volume(volumes):
    for seen in volumes:
        half, plain = seen["bf16"]["moved"], seen["plain"]["moved"]
        assert {op: tuple(2 * n for n in moved) for op, moved in half.items()} == plain


def test_a_recomputation_over_several_blocks_gathers_again_what_is_not_there(volumes):
    for seen in volumes:
        gathers = [op for op in seen["segmented"]["ops"] if op == "all_gather"]
        # the first of three: when the last one begins, the one before it is on its way
        assert len(gathers) == 2 * (LAYERS + 1) + 1


def test_the_next_unit_is_on_its_way_while_one_computes(volumes):
    forward = list(range(3, LAYERS + 3))  # root and block 0; 1; ...; in the last block the root
    # then the last block, the one before, then a gather and a reduction for each
    backward = [LAYERS + 4 + 2 * index for index in range(LAYERS - 1)] + [3 * LAYERS + 1]
    for seen in volumes:
        assert seen["plain"]["calls_at"][:LAYERS] == forward
        assert seen["plain"]["calls_at"][LAYERS:] == backward


# What is held


def count_gradients(blocks):
    """A list that gets the bytes of all gradients there whenever there is one more."""
    parameters, counts = list(blocks.parameters()), []

    def count(_):
        counts.append(sum(p.grad.nbytes for p in parameters if p.grad is not None))

    for parameter in parameters:
        parameter.register_post_accumulate_grad_hook(count)
    return counts


def memory(group):
    seen = {}
    for name, recompute, options in [
        ("plain", lambda model: None, {}),
        ("recomputed", apply_full_recompute, {}),
        ("kept", lambda model: None, KEPT),
        ("segments", lambda model: apply_segmented_recompute(model, [3, 1]), {}),
        ("bf16", lambda model: None, {"compute_dtype": torch.bfloat16}),
    ]:
        model = deep("gpt", width=96)
        num_parameters = sum(p.numel() for p in model.parameters())
        recompute(model)
        parallel = apply_fsdp(model, group, **options)
        optimizer = parallel.make_optimizer(torch.optim.AdamW)
        full_gradients = count_gradients(model.blocks)
        tokens = torch.randint(29, (2, 7))
        with Meter(model, optimizer) as meter:
            model(tokens).sum().backward()
            parallel.finish()
            optimizer.step()
        seen[name] = dict(
            num_parameters=num_parameters,
            held={kind: n for kind, n in meter.now().items() if kind != "temporary"},
            full_gradients=max(full_gradients),
            peak=max(moment.bytes["parameter"] for moment in meter.timeline),
            units=[sum(flat.full.nbytes for flat in unit.flats) for unit in parallel.units],
            shard=sum(flat.shard.nbytes for flat in parallel.flats),
            nan=sum(flat.absent.nbytes for flat in parallel.flats),
        )
    return seen


def test_memory_is_a_share_of_everything_and_two_units():
    for rank_seen in run(memory, 2, watch=False):
        for name, seen in rank_seen.items():
            total = sum(seen["held"].values())
            assert total == pytest.approx(16 * seen["num_parameters"] / 2, rel=0.01)
            assert seen["held"]["gradient"] == seen["shard"]
            *blocks, root = seen["units"]
            assert root < blocks[0] == min(blocks)
            peak = {"kept": root + sum(blocks), "segments": 3 * blocks[0]}.get(name, 2 * blocks[0])
            assert seen["peak"] == peak + seen["nan"]
            assert 0.9 * blocks[0] < seen["full_gradients"] <= blocks[0]  # beside what travels


# Setting up, saving, loading


def at(weights, name, shape):
    assert weights[name].shape == shape
    return weights[name]


def from_meta(group):
    with torch.device("meta"):
        model = deep("gpt")
    parallel = apply_fsdp(model, group, device="cpu")
    before = model(torch.zeros(1, 7, dtype=torch.long)).isnan().all().item()
    parallel.fill(lambda name, shape: initial_value(name, shape, 5, LAYERS))
    model(torch.zeros(1, 7, dtype=torch.long)).sum().backward()
    parallel.finish()
    tied = model.head.weight is model.token_embedding.weight
    return before, tied, parallel.full_parameters(), parallel.full_gradients()


def test_a_model_is_built_from_the_meta_device():
    model = deep("gpt")
    initialize(model, 5)
    model(torch.zeros(1, 7, dtype=torch.long)).sum().backward()
    for unfilled, tied, weights, gradients in run(from_meta, 3):
        assert unfilled and tied
        for name, parameter in model.named_parameters():
            assert torch.equal(weights[name], parameter)
            torch.testing.assert_close(gradients[name], parameter.grad)
    with pytest.raises(RankError, match="on the meta device: pass the device"):
        run(lambda group: apply_fsdp(Transformer(model.config).to("meta"), group), 1)


TRAIN = TrainConfig(weight_decay=0.5)


def train(model, optimizer, batches, parallel):
    """Steps as in a real run, the rank's share of each batch."""
    rank, size = parallel.data_part
    losses = []
    for tokens in batches:
        part = tokens[rank::size]
        micro_batches = [(half[:, :-1], half[:, 1:]) for half in part.tensor_split(2)]
        loss, _ = train_step(model, optimizer, micro_batches, 0.01, CLIP, parallel)
        losses.append(loss.item())
    return losses


def resume(group, batches, state=None):
    torch.manual_seed(0 if group is SINGLE_RANK or state is None else 1 + group.rank())
    model = deep("gpt").double()
    parallel = Grid(
        model, data=OneDevice(model) if group is SINGLE_RANK else apply_fsdp(model, group)
    )
    optimizer = parallel.shard(make_optimizer(model, TRAIN, torch.device("cpu")))
    if state is not None:
        load(parallel, optimizer, state)
    losses = train(model, optimizer, batches, parallel)
    state = saved(parallel, optimizer, group)
    decays = [group["weight_decay"] for group in optimizer.param_groups]
    return losses, state, decays


def test_a_run_goes_on_at_another_number_of_ranks_and_in_one_process():
    batches = sample_batches((9, 9, 9))
    torch.manual_seed(0)
    model = deep("gpt").double()
    optimizer = make_optimizer(model, TRAIN, torch.device("cpu"))
    expected = train(model, optimizer, batches, OneDevice(model))

    first, state, decays = run(resume, 3, batches[:1])[1]
    second, state, _ = run(resume, 2, batches[1:2], state)[1]
    assert decays == [0.5, 0.0]  # matrices alone
    third, state, _ = resume(SINGLE_RANK, batches[2:], state)

    assert first + second + third == pytest.approx(expected, rel=1e-12)
    for name, parameter in model.named_parameters():
        if not name.endswith("key.bias"):  # its gradient is zero but for rounding
            other = state[f"model.{name}"]
            torch.testing.assert_close(parameter.detach(), other, rtol=1e-10, atol=1e-12)


def test_half_precision_computes_and_shards_stay_whole():
    def half(group):
        torch.manual_seed(0)
        model = deep()
        exact = deep()
        exact.load_state_dict(model.state_dict())
        parallel = apply_fsdp(model, group, compute_dtype=torch.bfloat16)
        tokens = torch.randint(29, (2, 7))
        logits = model(tokens)
        logits.float().logsumexp(-1).sum().backward()
        exact(tokens).logsumexp(-1).sum().backward()
        parallel.finish()
        kinds = {piece.grad.dtype for piece in parallel.pieces.values()}
        gradients = parallel.full_gradients()
        error = max(
            (gradients[name] - p.grad).norm() / p.grad.norm()
            for name, p in exact.named_parameters()
        )
        return logits.dtype, kinds, error.item()

    for dtype, kinds, error in run(half, 2):
        assert (dtype, kinds) == (torch.bfloat16, {torch.float32})
        assert 0 < error < 0.1


# What goes wrong, and what is not wanted


@pytest.mark.parametrize(
    "where, options", diagonal_of(["nowhere", "recomputation", "backward"], [{}, WHOLE])
)
def test_a_step_works_after_a_backward_pass_that_has_raised(where, options):
    def gradients(group):
        torch.manual_seed(0)
        model = small_gpt()
        if where == "recomputation":
            apply_full_recompute(model)
        parallel = apply_fsdp(model, group, **options)
        optimizer = parallel.make_optimizer(torch.optim.SGD)
        tokens = torch.arange(14).view(2, 7)
        num_calls = 0

        def fail(*_):
            nonlocal num_calls
            num_calls += 1
            if num_calls == {"recomputation": 2, "backward": 1}.get(where):
                raise ArithmeticError

        if where == "backward":
            model.blocks[0].mlp.down.register_full_backward_pre_hook(fail)
        else:
            model.blocks[0].mlp.down.register_forward_pre_hook(fail)

        with (
            nullcontext() if where == "nowhere" else pytest.raises(ArithmeticError),
            parallel.no_sync(),
        ):
            model(tokens).sum().backward()
        optimizer.zero_grad()
        model(2 * tokens).sum().backward()
        parallel.finish()
        return parallel.full_gradients()

    torch.manual_seed(0)
    model = small_gpt()
    model(2 * torch.arange(14).view(2, 7)).sum().backward()
    for of_rank in run(gradients, 2):
        for name, gradient in of_rank.items():
            torch.testing.assert_close(gradient, model.get_parameter(name).grad)


def test_what_travels_stays_until_it_has_arrived():
    """Its memory would be given to others while a GPU sends it; gloo keeps it itself."""

    class Watched:
        def __init__(self, work, sent):
            self.work, self.sent = work, weakref.ref(sent)

        def wait(self):
            assert self.sent() is not None, "freed on its way"
            self.work.wait()

    def watched(collective):
        def call(output, input, group, async_op):
            copy = input.clone()  # which the other's work does not keep
            return Watched(collective(output, copy, group, async_op=True), input)

        return call

    def step(group):
        model = deep()
        parallel = apply_fsdp(model, group, compute_dtype=torch.bfloat16)
        with (
            patch.object(flat, "all_gather_single", watched(flat.all_gather_single)),
            patch.object(flat, "reduce_scatter_single", watched(reduce_scatter_single)),
        ):
            model(torch.randint(29, (2, 7))).sum().backward()
            parallel.finish()
        return [each.leaving for each in parallel.flats if each.leaving is not None]

    assert run(step, 2) == [[], []]


# Mistakes


class Table(NormFirst):
    def __init__(self):
        super().__init__()
        self.register_buffer("table", torch.ones(3, device="meta"))


def test_a_freed_parameter_reads_as_nan():
    def read(group):
        model = small_gpt()
        apply_fsdp(model, group)
        return [p.isnan().all().item() for p in model.parameters()]

    assert all(map(all, run(read, 2)))


class OwnParameter(NormFirst):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))


class Shared(NormFirst):
    def __init__(self):
        super().__init__()
        self.blocks[1].weight = self.blocks[0].weight


class Unused(NormFirst):
    def __init__(self):
        super().__init__()
        self.never = nn.Linear(3, 3)


@pytest.mark.parametrize(
    ("model", "words"),
    [
        (OwnParameter, "scale is a parameter of the model itself: put it into a module"),
        (Shared, "blocks.0.weight is shared by a block and another part of the model"),
        (Table, r"table is a buffer on the meta device, and fill\(\) sets only parameters"),
        (Unused, r"no gradient for 2 of 11 parameters \(never.weight, never.bias\): freeze"),
    ],
)
def test_mistakes_are_named(model, words):
    with pytest.raises(RankError, match=words):
        assert_same_training(apply_fsdp, 2, model, batch_sizes=(2,))


def test_a_step_of_one_fake_rank_of_many():
    dist.init_process_group("fake", store=FakeStore(), rank=3, world_size=3072)
    try:
        with FakeTensorMode():
            model = small_gpt()
            apply_full_recompute(model)
            parallel = apply_fsdp(model, dist.group.WORLD)
            optimizer = parallel.make_optimizer(torch.optim.AdamW)
            with Meter(model, optimizer) as meter, Ledger() as ledger:
                for _ in range(2):
                    optimizer.zero_grad()
                    model(torch.randint(29, (2, 7))).sum().backward()
                    parallel.finish()
                    optimizer.step()
            assert parallel.mean(torch.zeros(())).shape == ()
            assert meter.now()["parameter"] == 4 * len(parallel.flats)
            assert ledger.bytes_sent("all_gather", phase="backward") > 0
    finally:
        dist.destroy_process_group()


def test_an_optimizer_of_some_parameters_loses_no_state():
    """Neither the first nor the last of a unit need be in it, nor need keys be the same."""

    def states(group):
        torch.manual_seed(0)
        model = small_gpt()
        fully = apply_fsdp(model, group)
        parallel = Grid(model, data=fully)
        names = [n for p, n in fully.names.items() if fully.pieces[p].requires_grad]
        left_out = {names[2], names[-1]}
        some = [p for p, n in fully.names.items() if n in names and n not in left_out]
        optimizer = parallel.shard(
            torch.optim.SGD(
                [{"params": some[::2], "momentum": 0.9}, {"params": some[1::2], "momentum": 0.0}],
                lr=0.1,
            )
        )
        model(torch.randint(29, (2, 7))).sum().backward()
        parallel.finish()
        optimizer.step()
        before = saved(parallel, optimizer, group)
        load(parallel, optimizer, before)
        again = saved(parallel, optimizer, group)
        same = all(torch.equal(again[name], tensor) for name, tensor in before.items())
        return sum(name.endswith(".momentum_buffer") for name in before), len(some[::2]), same

    for found, expected, same in run(states, 2):
        assert found == expected > 5 and same


def test_a_step_before_finish_is_refused_and_one_after_makes_the_gathered_old():
    def steps(group):
        torch.manual_seed(0)
        model = small_gpt()
        parallel = apply_fsdp(
            model, group, reshard_after_forward=False, sync_every_micro_batch=False
        )
        optimizer = parallel.make_optimizer(functools.partial(torch.optim.SGD, lr=0.1))
        tokens = torch.randint(29, (2, 7))
        with parallel.no_sync():
            model(tokens).sum().backward()
        with pytest.raises(ValueError, match="before finish"):
            optimizer.step()

        model(tokens).sum().backward()
        parallel.finish()
        model(tokens)  # leaves parameters gathered
        optimizer.step()
        return all(unit.is_sharded for unit in parallel.units)

    assert run(steps, 2) == [True, True]
