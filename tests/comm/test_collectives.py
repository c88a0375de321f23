"""Collectives from messages: exact sums, the same bits everywhere, and the volumes of the formulas.

Each number of ranks is started once and does everything; the tests then look at what came back.
"""

import math
import warnings
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from minitron import cost
from minitron.comm import collectives
from minitron.launch import run
from minitron.measure.ledger import Ledger
from minitron.pytorch.private import fake_tensors
from tests.tiers import tiered

ALL_REDUCES = {
    "ring": (collectives.all_reduce_ring, cost.ring_all_reduce_volume),
    "naive": (collectives.all_reduce_naive, cost.naive_all_reduce_volume),
    "doubling": (collectives.all_reduce_doubling, cost.doubling_all_reduce_volume),
    "halving": (collectives.all_reduce_halving, cost.halving_all_reduce_volume),
}
DTYPES = (torch.float64, torch.bfloat16, torch.int64)


def lengths(size):
    return sorted({0, 1, size - 1, size, size + 1, 101})


def summand(rank, length, dtype):
    generator = torch.Generator().manual_seed(100 * rank + length)
    values = torch.randn(length, generator=generator, dtype=torch.float64)
    return (100 * values).to(dtype) if dtype == torch.int64 else values.to(dtype)


def recorded(function, tensor, group):
    """The tensor afterwards, and the messages: (op, peer, bytes)."""
    with Ledger() as ledger:
        result = function(tensor, group)
    return tensor, result, [(call.op, call.peer, call.payload) for call in ledger.calls]


def everything(group):
    rank, size = group.rank(), group.size()
    done = {}
    for length in lengths(size):
        for dtype in DTYPES:
            for name, (all_reduce, _) in ALL_REDUCES.items():
                tensor = summand(rank, length, dtype)
                done[name, length, dtype] = recorded(all_reduce, tensor, group)
        done["scatter", length] = recorded(
            collectives.reduce_scatter_ring, summand(rank, length, torch.float64), group
        )
        gathered = torch.full((length,), math.nan, dtype=torch.float64)
        gathered.tensor_split(size)[rank].fill_(rank)
        done["gather", length] = recorded(collectives.all_gather_ring, gathered, group)

    collectives.POSTS_AHEAD = ()  # in this process alone
    tensor = summand(rank, 101, torch.float64)
    done["in turn"] = recorded(collectives.all_reduce_ring, tensor, group)
    return done


@pytest.fixture(scope="module", params=tiered([3, 1, 2, 4, 5], keep=2), ids="{} ranks".format)
def ranks(request):
    return run(everything, request.param)


def exact_sum(size, length, dtype):
    summands = torch.stack([summand(rank, length, dtype) for rank in range(size)])
    if dtype == torch.int64:
        return summands.sum(0)
    return torch.tensor([math.fsum(column) for column in summands.T.tolist()], dtype=torch.float64)


@pytest.mark.parametrize("name", ALL_REDUCES)
def test_an_all_reduce_is_the_exact_sum_with_the_same_bits_on_every_rank(ranks, name):
    size = len(ranks)
    tolerances = {torch.float64: 1e-12, torch.int64: 0.0, torch.bfloat16: 2**-8 * 4 * size}
    for length in lengths(size):
        for dtype, tolerance in tolerances.items():
            sums = [done[name, length, dtype][0] for done in ranks]
            right = exact_sum(size, length, dtype)
            torch.testing.assert_close(sums[0].to(right.dtype), right, rtol=0, atol=tolerance)
            assert all(torch.equal(sums[0], other) for other in sums)


@pytest.mark.parametrize("name", ALL_REDUCES)
def test_the_ledger_counts_the_formulas_bytes_on_every_rank(ranks, name):
    size = len(ranks)
    for length in lengths(size):
        for dtype in DTYPES:
            for rank, done in enumerate(ranks):
                expected = ALL_REDUCES[name][1](length, dtype.itemsize, size, rank)
                assert volume(done[name, length, dtype][2]) == expected, (length, rank)


def volume(messages):
    return tuple(sum(n for op, _, n in messages if op == kind) for kind in ("send", "recv"))


def test_reduce_scatter_returns_the_ranks_own_chunk_of_the_sum(ranks):
    size = len(ranks)
    for length in lengths(size):
        chunks = exact_sum(size, length, torch.float64).tensor_split(size)
        for rank, done in enumerate(ranks):
            flat, chunk, messages = done["scatter", length]
            torch.testing.assert_close(chunk, chunks[rank], rtol=0, atol=1e-12)
            assert torch.equal(chunk, flat.tensor_split(size)[rank])  # in place
            assert volume(messages) == cost.ring_reduce_scatter_volume(length, 8, size, rank)


def test_all_gather_fills_in_every_ranks_chunk(ranks):
    size = len(ranks)
    for length in lengths(size):
        owners = torch.arange(size).repeat_interleave(torch.tensor(cost.chunk_sizes(length, size)))
        for rank, done in enumerate(ranks):
            flat, _, messages = done["gather", length]
            assert torch.equal(flat, owners.double())
            assert volume(messages) == cost.ring_all_gather_volume(length, 8, size, rank)


def test_in_a_ring_each_rank_sends_to_the_next_one_alone(ranks):
    size = len(ranks)
    for rank, done in enumerate(ranks):
        messages = done["ring", 101, torch.float64][2]
        sends = [peer for op, peer, _ in messages if op == "send"]
        receives = [peer for op, peer, _ in messages if op == "recv"]
        assert sends == 2 * (size - 1) * [(rank + 1) % size]
        assert receives == 2 * (size - 1) * [(rank - 1) % size]


# More than a socket holds; a group that is not all ranks; tensors that are not flat


def large_messages(group):
    collectives.LARGEST_PIECE = 600_000  # so that a chunk has four
    tensors = [torch.full((1_500_001,), float(group.rank() + 1)) for _ in ALL_REDUCES]
    for tensor, (all_reduce, _) in zip(tensors, ALL_REDUCES.values(), strict=True):
        all_reduce(tensor, group)
    return [tensor.unique().tolist() for tensor in tensors]


def test_large_messages_do_not_block():
    assert run(large_messages, 3) == 3 * [len(ALL_REDUCES) * [[6.0]]]


def odd_and_even_ranks(group):
    groups = [dist.new_group([1, 3]), dist.new_group([0, 2, 4])]
    mine = groups[0] if group.rank() % 2 else groups[1]
    sums = []
    for all_reduce, _ in ALL_REDUCES.values():
        parameter = torch.nn.Parameter(torch.full((2, 3), float(group.rank())))
        all_reduce(parameter, mine)
        sums.append(parameter.detach().unique().tolist())
    return sums


def test_the_group_is_an_argument_and_a_parameter_of_any_shape_will_do():
    odd, even = len(ALL_REDUCES) * [[4.0]], len(ALL_REDUCES) * [[6.0]]
    assert run(odd_and_even_ranks, 5) == [even, odd, even, odd, even]


@pytest.mark.parametrize("name", ALL_REDUCES)
def test_a_tensor_that_cannot_be_reduced_in_place_is_refused_in_one_line(name):
    with pytest.raises(ValueError, match=r"^a tensor of shape \(3, 2\) with strides \(1, 3\)"):
        ALL_REDUCES[name][0](torch.zeros(2, 3).T, None)


# On NCCL a receive ahead of its turn would hang: there, each step's two messages go together


def test_in_turn_the_ring_is_the_same(ranks):
    size = len(ranks)
    for done in ranks:
        tensor, _, messages = done["in turn"]
        expected, _, same_messages = done["ring", 101, torch.float64]
        assert torch.equal(tensor, expected)
        assert [op for op, *_ in messages] == 2 * (size - 1) * ["send", "recv"]
        assert sorted(messages) == sorted(same_messages)


def test_only_the_cpu_posts_ahead(monkeypatch):
    steps = []
    monkeypatch.setattr(collectives, "exchange", lambda *step: steps.append(step))
    group = SimpleNamespace(rank=lambda: 1, size=lambda: 4)
    collectives.all_reduce_ring(torch.empty(10, device="meta"), group)
    assert [(len(out), to, len(into), source) for out, to, into, source, _ in steps] == [
        (3, 2, 2, 0),
        (2, 2, 2, 0),
        (2, 2, 3, 0),  # chunk 0, 3, 2 out; 3, 2, 1 in
        (3, 2, 3, 0),
        (3, 2, 2, 0),
        (2, 2, 2, 0),  # chunk 1, 0, 3 out; 0, 3, 2 in
    ]


# PyTorch's own


def wrapped(group):
    warnings.simplefilter("error")  # torch 2.13 warns of the names before it
    rank, size = group.rank(), group.size()
    total, copied = torch.tensor([float(rank)]), torch.tensor([rank])
    parts, part = torch.empty(size, 2), torch.empty(1, 2)

    works = [
        collectives.all_reduce(total, group, async_op=True),
        collectives.broadcast(copied, 2, group, async_op=True),
        collectives.all_gather_single(parts, torch.full((1, 2), float(rank)), group, async_op=True),
    ]
    for work in works:
        work.wait()
    assert collectives.reduce_scatter_single(part, parts, group) is None
    return total.item(), copied.item(), parts[:, 1].tolist(), part.tolist()


def test_the_wrappers_call_the_collective_that_they_name():
    for rank, result in enumerate(run(wrapped, 3)):
        assert result == (3.0, 2, [0.0, 1.0, 2.0], [2 * [3.0 * rank]])


# The ring's buffers, which it keeps for the next call


def ring_after_inference(group):
    with torch.inference_mode():
        collectives.all_reduce_ring(torch.ones(8), group)
    flat = torch.ones(8)
    collectives.all_reduce_ring(flat, group)
    return flat


def test_a_ring_in_inference_mode_does_not_spoil_the_next_one():
    for flat in run(ring_after_inference, 2):
        assert flat.tolist() == [2.0] * 8


def test_fake_buffers_are_not_kept():
    with fake_tensors():
        fake = collectives.receive_buffers(4, torch.empty(4))
    real = collectives.receive_buffers(4, torch.empty(4))
    assert all(type(each) is torch.Tensor for each in real)
    assert all(type(each) is not torch.Tensor for each in fake)
    assert collectives.receive_buffers(4, torch.empty(4)) is real


def together(group):
    """What this rank has after tensors of two dtypes and a large one have travelled, and the calls.

    The last one is not in the order of its memory, as a view of a matrix's columns is not.
    """
    rank = float(group.rank())
    tensors = [
        torch.full((2, 3), rank),
        torch.full((), rank),
        torch.full((5,), rank).double(),
        torch.full((collectives.LARGEST_PIECE // 4 + 1,), rank),
        torch.full((4,), rank),
    ]
    with Ledger() as gathering:
        gathered = list(
            collectives.all_gather_together([*tensors, torch.full((3, 2), rank).T], group)
        )
    meta = torch.empty(7, device="meta")
    with Ledger() as sending:
        collectives.broadcast_together([meta, *tensors], 1, group)
    return gathered, tensors, [len(ledger.calls) for ledger in (gathering, sending)]


def test_small_neighbors_share_a_message():
    for gathered, tensors, calls in run(together, 3):
        shapes = [(2, 3), (), (5,), (collectives.LARGEST_PIECE // 4 + 1,), (4,), (2, 3)]
        for parts, shape in zip(gathered, shapes, strict=True):
            assert torch.equal(
                parts,
                torch.arange(3.0, dtype=parts.dtype).view(3, *[1] * len(shape)).expand(3, *shape),
            )
        assert [tensor.dtype for tensor in tensors].index(torch.float64) == 2
        assert all(bool((tensor == 1).all()) for tensor in tensors)
        assert calls == [4, 4]  # two, one of another dtype, the large one, the rest
