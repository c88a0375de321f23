"""The ledger: every operation, to the byte, in its phase; tables and mismatches of several ranks.

One rank of a larger world runs in this process, on PyTorch's fake process group.
"""

import gc
import pickle
import time
import warnings
import weakref
from contextlib import ExitStack, contextmanager
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._functional_collectives import all_reduce as functional_all_reduce
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

from minitron.launch import run
from minitron.launch.slow_network import SlowNetwork
from minitron.measure.ledger import Call, Ledger, Matcher, first_mismatch, merged
from minitron.model.recompute import recompute


@contextmanager
def one_rank(rank, size):
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=size)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # torch 2.13 renames some
            yield dist.group.WORLD
    finally:
        dist.destroy_process_group()


@pytest.fixture
def group():
    with one_rank(1, 4) as group:
        yield group


def parts(*lengths):
    return [torch.zeros(length) for length in lengths]


# op, payload, sent, received and peer on rank 1 of 4, counted by hand; float32
OPERATIONS = {
    "all_reduce of 3 + 3 + 2 + 2": (
        lambda: dist.all_reduce(torch.zeros(10)),
        ("all_reduce", 40, 60, 56, None),
    ),
    "all_reduce, fewer than ranks": (
        lambda: dist.all_reduce(torch.zeros(1)),
        ("all_reduce", 4, 8, 4, None),
    ),
    "all_reduce of nothing": (
        lambda: dist.all_reduce(torch.zeros(0)),
        ("all_reduce", 0, 0, 0, None),
    ),
    "all_reduce in 16 bits": (
        lambda: dist.all_reduce(torch.zeros(8, dtype=torch.bfloat16)),
        ("all_reduce", 16, 24, 24, None),
    ),
    "all_gather into one": (
        lambda: dist.all_gather_into_tensor(torch.zeros(12), torch.zeros(3)),
        ("all_gather", 48, 36, 36, None),
    ),
    "all_gather into a list": (
        lambda: dist.all_gather(parts(3, 3, 3, 3), torch.zeros(3)),
        ("all_gather", 48, 36, 36, None),
    ),
    "reduce_scatter of one": (
        lambda: dist.reduce_scatter_tensor(torch.zeros(3), torch.zeros(12)),
        ("reduce_scatter", 48, 36, 36, None),
    ),
    "reduce_scatter of a list": (
        lambda: dist.reduce_scatter(torch.zeros(3), parts(3, 3, 3, 3)),
        ("reduce_scatter", 48, 36, 36, None),
    ),
    "broadcast": (lambda: dist.broadcast(torch.zeros(5), 0), ("broadcast", 20, 20, 20, 0)),
    "broadcast from here": (lambda: dist.broadcast(torch.zeros(5), 1), ("broadcast", 20, 40, 0, 1)),
    "reduce": (lambda: dist.reduce(torch.zeros(5), 0), ("reduce", 20, 20, 20, 0)),
    "gather": (lambda: dist.gather(torch.zeros(2), None, 0), ("gather", 32, 8, 0, 0)),
    "gather here": (
        lambda: dist.gather(torch.zeros(2), parts(2, 2, 2, 2), 1),
        ("gather", 32, 0, 24, 1),
    ),
    "scatter": (lambda: dist.scatter(torch.zeros(2), None, 0), ("scatter", 32, 0, 8, 0)),
    "all_to_all": (
        lambda: dist.all_to_all_single(torch.zeros(8), torch.zeros(8)),
        ("all_to_all", 32, 24, 24, None),
    ),
    "all_to_all, uneven": (
        lambda: dist.all_to_all_single(
            torch.zeros(7, 2), torch.zeros(8, 2), [1, 2, 0, 4], [3, 3, 1, 1]
        ),
        ("all_to_all", 64, 40, 40, None),
    ),
    "all_to_all of lists": (
        lambda: dist.all_to_all(parts(1, 2, 0, 4), parts(1, 2, 0, 4)),
        ("all_to_all", 28, 20, 20, None),
    ),
    "barrier": (lambda: dist.barrier(), ("barrier", 0, 0, 0, None)),
    "send": (lambda: dist.send(torch.zeros(5), 3), ("send", 20, 20, 0, 3)),
    "recv": (lambda: dist.recv(torch.zeros(5), 0), ("recv", 20, 0, 20, 0)),
    "recv from any": (lambda: dist.irecv(torch.zeros(5)).wait(), ("recv", 20, 0, 20, None)),
    "functional": (
        lambda: functional_all_reduce(torch.zeros(10), "sum", dist.group.WORLD).wait(),
        ("all_reduce", 40, 60, 56, None),
    ),
}


@pytest.mark.parametrize("name", OPERATIONS)
def test_every_operation_is_recorded_to_the_byte(name, group):
    operation, expected = OPERATIONS[name]

    with Ledger() as ledger:
        operation()

    [call] = ledger.calls
    assert (call.op, call.payload, call.sent, call.received, call.peer) == expected
    assert (call.size, call.ranks, call.axis) == (4, (0, 1, 2, 3), "world")


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5])
def test_the_ranks_of_an_all_reduce_send_its_payload_2_n_minus_1_times(size):
    for length in (0, 1, size - 1, size + 1, 37):
        total = {"sent": 0, "received": 0}
        for rank in range(size):
            with one_rank(rank, size), Ledger() as ledger:
                dist.all_reduce(torch.zeros(length, dtype=torch.float64))
            total["sent"] += ledger.bytes_sent()
            total["received"] += ledger.bytes_received()

        assert total == dict.fromkeys(total, 2 * (size - 1) * 8 * length)


def test_with_fake_tensors_the_calls_are_the_same(group):
    def step():
        dist.all_reduce(torch.zeros(10))
        dist.isend(torch.zeros(3), 2).wait()

    with Ledger() as real:
        step()
    with FakeTensorMode(), Ledger() as fake:
        step()

    assert [str(call) for call in fake.calls] == [str(call) for call in real.calls]
    assert fake.bytes_sent() == real.bytes_sent() == 60 + 12


def test_phases_are_told_by_modules_backward_and_optimizer(group):
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    optimizer = torch.optim.AdamW(model.parameters())
    reduce_gradient = model[0].weight.register_post_accumulate_grad_hook
    reduce_gradient(lambda parameter: dist.all_reduce(parameter.grad))
    model[0].register_forward_hook(lambda *_: dist.barrier())
    optimizer.register_step_pre_hook(lambda *_: dist.broadcast(torch.zeros(1), 0))

    with Ledger() as ledger:
        for _ in range(2):
            # the replay in backward runs the module's forward, barrier included
            recompute(model, torch.ones(1, 4, requires_grad=True)).sum().backward()
            dist.all_gather(parts(1, 1, 1, 1), torch.zeros(1))  # after it, for it
            optimizer.step()
            with ledger.phase("evaluation"):
                dist.barrier()
            dist.reduce(torch.zeros(1), 0)

    one_step = [
        ("barrier", "forward"),
        ("barrier", "backward"),
        ("all_reduce", "backward"),
        ("all_gather", "backward"),
        ("broadcast", "optimizer"),
        ("barrier", "evaluation"),
        ("reduce", "forward"),
    ]
    assert [(call.op, call.phase) for call in ledger.calls] == 2 * one_step
    assert ledger.bytes_sent(phase="backward") == ledger.bytes_sent("all_reduce") + 2 * 12
    assert ledger.bytes_sent(axis="dp") == 0


def test_groups_are_counted_and_named_by_their_axis(group):
    mesh = dist.device_mesh.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    plain = dist.new_group([0, 1])

    with Ledger() as ledger:
        for _ in range(2):
            dist.all_reduce(torch.zeros(4), group=mesh.get_group("dp"))
            dist.all_reduce(torch.zeros(4), group=mesh.get_group("tp"))
        dist.barrier(plain)
        dist.barrier()

    seen = [(call.axis, call.number, call.ranks) for call in ledger.calls]
    assert seen[:4] == [("dp", 0, (1, 3)), ("tp", 0, (0, 1)), ("dp", 1, (1, 3)), ("tp", 1, (0, 1))]
    assert seen[4] == (f"group {plain.group_name}", 0, (0, 1))
    assert seen[5] == ("world", 0, (0, 1, 2, 3))
    assert ledger.bytes_sent(axis="dp") == 32


def test_groups_of_the_same_ranks_are_counted_apart(group):
    first, second = (dist.new_group([0, 1], group_desc="dp") for _ in range(2))

    with Ledger() as ledger:
        for part in (first, second, first):
            dist.barrier(part)

    assert [(call.axis, call.number) for call in ledger.calls] == [("dp", 0), ("dp", 0), ("dp", 1)]
    assert [call.group for call in ledger.calls] == [
        part.group_name for part in (first, second, first)
    ]


def test_reductions_are_told_apart(group):
    kinds = dist.ReduceOp
    one, four = torch.zeros(1), torch.zeros(4)
    with Ledger() as ledger:
        dist.all_reduce(one)
        dist.all_reduce(one, op=kinds.MAX)
        dist.all_reduce_coalesced([one, one], op=kinds.MIN)
        dist.reduce(one, 0, op=kinds.PRODUCT)
        dist.reduce_scatter_tensor(one, four, op=kinds.AVG)
        dist.reduce_scatter(one, parts(1, 1, 1, 1), op=kinds.BOR)
        functional_all_reduce(one, "max", dist.group.WORLD).wait()
        dist.broadcast(one, 0)

    assert [call.reduce for call in ledger.calls] == [
        "sum",
        "max",
        "min",
        "product",
        "avg",
        "bor",
        "max",
        "",
    ]


def test_messages_are_counted_by_peer(group):
    with Ledger() as ledger:
        dist.barrier()
        for peer in (2, 2, 3):
            dist.send(torch.zeros(1), peer)
        dist.recv(torch.zeros(1), 2)
        dist.barrier()

    assert [call.name for call in ledger.calls] == [
        "barrier #0",
        "send #0 to rank 2",
        "send #1 to rank 2",
        "send #0 to rank 3",
        "recv #0 from rank 2",
        "barrier #1",
    ]


def test_a_call_is_announced_before_it_is_issued(group):
    events = []

    class Issued(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            events.append(func.__name__)
            return func(*args, **(kwargs or {}))

    gradient = torch.zeros(10)
    with Issued(), Ledger(announce=lambda call: events.append(str(call))):
        dist.all_reduce(gradient)

    assert events == ["all_reduce #0 (40 B, axis world)", "allreduce_.default"]


def test_two_ledgers_see_the_same_and_each_with_starts_anew(group):
    inner = Ledger()
    with Ledger() as outer:
        dist.barrier()
        for _ in range(2):
            with inner:
                dist.all_reduce(torch.zeros(4))

    assert [call.op for call in outer.calls] == ["barrier", "all_reduce", "all_reduce"]
    assert [call.op for call in inner.calls] == ["all_reduce"]
    assert inner.calls[0].finished is not None


def test_calls_travel_between_processes(group):
    with Ledger() as ledger:
        dist.all_reduce(torch.zeros(4))

    assert pickle.loads(pickle.dumps(ledger.calls)) == ledger.calls


@pytest.mark.parametrize("modes", [[Ledger], [SlowNetwork], [Ledger, SlowNetwork]])
def test_no_tensor_is_kept_that_was_waited_for(modes):
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    gc.disable()
    with ExitStack() as stack:
        stack.callback(dist.destroy_process_group)
        stack.callback(gc.enable)
        for mode in modes:
            stack.enter_context(mode() if mode is Ledger else mode(0.0, 1e12))
        tensor = torch.zeros(4)
        alive = weakref.ref(tensor.untyped_storage())
        work = dist.all_reduce(tensor, async_op=True)
        work.wait()
        del work, tensor

        for _ in range(1000):  # gloo's thread may hold the work for a moment longer
            if alive() is None:
                break
            time.sleep(0.002)
        assert alive() is None


def test_a_ledger_that_is_left_listens_no_more(group):
    with Ledger() as ledger:
        dist.barrier()
    alive = weakref.ref(ledger)
    del ledger
    gc.collect()

    assert alive() is None


def test_a_wait_after_the_record_ends_its_call_and_leaves_the_next_alone(group):
    ledger = Ledger()
    with ledger:
        work = dist.isend(torch.zeros(1), 2)
    assert ledger.calls[0].finished is None
    work.wait()
    assert ledger.calls[0].finished is not None

    with ledger:
        other = dist.isend(torch.zeros(1), 2)
        work.wait()
        assert ledger.calls[0].finished is None
        other.wait()


# Real ranks


def test_on_real_ranks_every_call_finishes_and_they_match():
    def talk(group):  # each kind of work that gloo has
        rank, size = group.rank(), group.size()
        with Ledger() as ledger:
            early = dist.all_reduce(torch.ones(7), group=group, async_op=True)
            to, source = (rank + 1) % size, (rank - 1) % size
            works = dist.batch_isend_irecv(
                [
                    dist.P2POp(dist.isend, torch.ones(rank + 1), to, group),
                    dist.P2POp(dist.irecv, torch.ones(source + 1), source, group),
                ]
            )
            assert ledger.calls[1].finished is None
            for work in [early, *works]:
                work.wait()
            dist.all_gather_object([None] * size, {"rank": rank}, group=group)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", FutureWarning)
                dist.reduce_scatter_tensor(torch.ones(1), torch.ones(size), group=group)
            if rank == 0:
                dist.send(torch.ones(2), 1, group)
            if rank == 1:
                assert dist.recv(torch.ones(2)) == 0
        return ledger.calls

    calls = run(talk, 3)

    ops = ["all_reduce", "send", "recv", "all_gather", "all_gather"]
    assert [[call.op for call in mine][:5] for mine in calls] == [ops] * 3
    assert all(call.started <= call.finished for mine in calls for call in mine)
    assert first_mismatch(calls) is None
    table = merged(calls)
    assert [row.sent for row in table if row.op == "all_reduce"] == [(36, 40, 36)]
    assert [row.sent for row in table if row.op == "send"] == [(4 + 8, 8, 12)]


def test_the_all_reduce_that_torch_ddp_starts_from_cpp_is_seen():
    def train(group):
        model = nn.parallel.DistributedDataParallel(nn.Linear(50, 50), process_group=group)
        with Ledger() as ledger:
            model(torch.ones(1, 50)).sum().backward()
        return ledger.calls

    for [call] in run(train, 2):
        assert (call.op, call.phase, call.payload) == ("all_reduce", "backward", 4 * 50 * 51)
        assert call.sent == call.payload
        assert call.finished > call.started


# Side by side


def call(op="all_reduce", number=0, payload=4_200_000, at=0.0, **more):
    values = dict(
        axis="dp",
        dtype=torch.float32,
        sent=payload,
        received=payload,
        phase="backward",
        peer=None,
        size=4,
        ranks=(0, 1, 2, 3),
    )
    return Call(number=number, op=op, payload=payload, started=at, **values | more)


def test_a_table_adds_up_by_op_axis_and_phase_and_shows_where_ranks_differ():
    ranks = [[call(), call(number=1, sent=1)], [call(), call("barrier", payload=0, axis="tp")]]

    table = merged(ranks)

    assert table[0].calls == (2, 1)
    assert table[0].sent == (4_200_001, 4_200_000)
    assert table[1].calls == (0, 1)
    assert str(table).splitlines() == [
        "op          axis  phase     calls               payload                  sent"
        "              received",
        "all_reduce  dp    backward   1..2  4,200,000..8,400,000  4,200,000..4,200,001"
        "  4,200,000..8,400,000",
        "barrier     tp    backward   0..1                     0                     0"
        "                     0",
    ]


SIZES = "all_reduce #17 (4.2 MB, axis dp), rank 0 in all_reduce #17 (2.1 MB)"
MISMATCHES = {
    "rank 2 waits in all_reduce #17 (4.2 MB, axis dp), rank 0 in all_gather #17": call(
        "all_gather", 17, at=1
    ),
    f"rank 2 waits in {SIZES}": call(number=17, payload=2_100_000, at=1),
    "rank 2 waits in all_reduce #17 (4,200,000 B, axis dp), rank 0 in all_reduce #17 (4,200,004 B)": call(  # noqa: E501
        number=17, payload=4_200_004, at=1
    ),
    "rank 2 waits in all_reduce #17 (float32, axis dp), rank 0 in all_reduce #17 (int32)": call(
        number=17, dtype=torch.int32, at=1
    ),
}


@pytest.mark.parametrize("message", MISMATCHES)
def test_a_mismatch_is_named(message):
    assert first_mismatch([[MISMATCHES[message]], [], [call(number=17)], []]) == message


def test_another_root_is_a_mismatch():
    ranks = [[call("broadcast", peer=1, at=1)], [], [], [call("broadcast", peer=0)]]

    assert first_mismatch(ranks) == (
        "rank 3 waits in broadcast #0 (root 0, axis dp), rank 0 in broadcast #0 (root 1)"
    )


def test_another_reduction_is_a_mismatch():
    ranks = [[call(reduce="max", at=1)], [], [], [call(reduce="sum")]]

    assert first_mismatch(ranks) == (
        "rank 3 waits in all_reduce #0 (sum, axis dp), rank 0 in all_reduce #0 (max)"
    )


def test_groups_of_the_same_ranks_and_name_are_not_mixed_up():
    first, second = call(group="1"), call("barrier", group="2")

    assert first_mismatch([[first, second], [first, second], [], []]) is None
    assert first_mismatch([[first], [second], [], []]) is None
    assert first_mismatch([[first], [call("barrier", group="1")], [], []]) is not None


def in_order(*calls):
    return [replace(call, started=float(place)) for place, call in enumerate(calls)]


def test_a_crossed_order_over_two_groups_is_a_mismatch():
    """It needs two ranks with both groups in common, and no wait in between."""
    dp, tp = call(axis="dp", payload=8), call("all_gather", axis="tp", ranks=(0, 1, 3), payload=16)
    later = replace(tp, number=1)
    rule = (
        ": ranks that share two groups must issue the collectives of both in the same order, "
        "or they can deadlock with NCCL"
    )
    crossed = (
        "rank 0 issued all_reduce #0 (8 B, axis dp) before all_gather #0 (16 B, axis tp), "
        f"rank 1 has come to the latter without it{rule}"
    )

    assert first_mismatch([in_order(dp, tp), in_order(tp, dp), [], []]) == crossed
    assert first_mismatch([in_order(dp, tp), in_order(tp), [], []]) == crossed
    assert first_mismatch([in_order(tp, dp, later), [], [], in_order(tp, later, dp)]) == (
        "rank 0 issued all_reduce #0 (8 B, axis dp) before all_gather #1 (16 B, axis tp), "
        f"rank 3 has come to the latter without it{rule}"
    )


def test_orders_that_no_two_ranks_can_cross():
    dp, tp = call(axis="dp", payload=8), call("all_gather", axis="tp", ranks=(0, 1, 3))
    alone = call(axis="ep", ranks=(0, 2), payload=8)
    to_2, to_3 = (call("send", peer=peer, ranks=(0, 1, 2, 3), size=4) for peer in (2, 3))

    # behind
    assert first_mismatch([in_order(dp, tp), in_order(dp), in_order(dp), []]) is None
    # rank 2 is not in tp, and is alone with rank 0 in the other
    assert first_mismatch([in_order(dp, tp, alone), [], in_order(dp, alone), []]) is None
    assert first_mismatch([in_order(tp, alone), in_order(tp), in_order(alone), []]) is None
    assert first_mismatch([in_order(alone, tp), in_order(tp), in_order(alone), []]) is None
    # messages
    assert first_mismatch([in_order(to_2, dp, to_3), in_order(to_3, dp, to_2), [], []]) is None
    assert first_mismatch([in_order(to_2, to_3), in_order(to_3, to_2), [], []]) is None


def test_all_that_wait_are_named():
    ranks = [[call()], [call()], [call()], [call("barrier", at=1)]]

    assert first_mismatch(ranks) == (
        "ranks 0, 1 and 2 wait in all_reduce #0 (4.2 MB, axis dp), rank 3 in barrier #0"
    )


def test_who_is_behind_or_in_another_group_does_not_mismatch():
    first, second = [call(ranks=ranks, size=2) for ranks in ((0, 2), (1, 3))]
    other = call("all_gather", ranks=(1, 3), size=2)

    assert first_mismatch([[call(), call("barrier", 1)], [call()], [], []]) is None
    assert first_mismatch([[first], [other], [first], [other]]) is None
    assert first_mismatch([[first], [other], [first], [second]]) is not None


def test_all_to_all_may_send_more_here_than_there():
    ranks = [[call("all_to_all", payload=8)], [call("all_to_all", payload=16)], [], []]

    assert first_mismatch(ranks) is None


def test_messages_are_compared_with_those_they_meet():
    def send(to, **more):
        return call("send", peer=to, **more)

    def recv(source, **more):
        return call("recv", peer=source, **more)

    ring = [[send((rank + 1) % 4), recv(rank - 1 if rank else 3)] for rank in range(4)]
    assert first_mismatch(ring) is None
    assert first_mismatch([[send(1, tag=1), send(1, payload=8)], [recv(0, payload=8)]]) is None
    assert send(1, tag=2).name == "send #0 to rank 1, tag 2"
    assert first_mismatch([[send(1, payload=8)], [recv(0, at=1)]]) == (
        "rank 0 waits in send #0 to rank 1 (8 B, axis dp), rank 1 in recv #0 from rank 0 (4.2 MB)"
    )
    # which message the first receive met is not known
    assert first_mismatch([[send(1, at=1)], [recv(None), recv(0, payload=8, at=2)]]) is None


def test_the_matcher_forgets_what_all_ranks_have_reached():
    matcher = Matcher()
    for number in range(3):
        for rank in range(4):
            assert matcher.add(rank, call(number=number)) is None

    assert not matcher._waiting
