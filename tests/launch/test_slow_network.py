"""The emulated network, on a clock that only sleeping moves: nothing here takes real time.

One rank of a larger world runs in this process, on PyTorch's fake process group.
"""

import time
from contextlib import ExitStack

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore

from minitron import cost
from minitron.comm.collectives import all_reduce_ring
from minitron.launch import run
from minitron.launch.slow_network import SlowNetwork
from minitron.measure.ledger import Ledger, Transfer

LATENCY, BANDWIDTH = 0.5, 8.0  # s and bytes/s: one float32 takes 1 s


class Clock:
    """Time passes while somebody sleeps; computing is sleeping, too."""

    def __init__(self):
        self.now = 100.0

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        assert seconds >= 0
        self.now += seconds

    compute = sleep


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def network(clock):
    dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=4)
    with SlowNetwork(LATENCY, BANDWIDTH, clock, clock.sleep) as network:
        yield network
    dist.destroy_process_group()


def send(to=2, num_floats=1):
    return dist.isend(torch.zeros(num_floats), to)


def recv(source=0, num_floats=1):
    return dist.irecv(torch.zeros(num_floats), source)


def seconds(op, num_bytes):
    return cost.collective_seconds(op, num_bytes, 4, LATENCY, BANDWIDTH)


def test_a_blocking_collective_takes_its_time(clock, network):
    dist.all_reduce(torch.zeros(4))

    assert clock.now - 100 == seconds("all_reduce", 16) == 2 * 3 * (0.5 + 4 / 8)


def test_compute_behind_a_transfer_costs_nothing_more(clock, network):
    work = dist.broadcast(torch.zeros(2), 0, async_op=True)  # 2 x (0.5 + 1) s
    clock.compute(5)
    work.wait()

    assert clock.now - 100 == 5


def test_complete_is_what_has_arrived_and_is_due(clock):
    class Arriving(dist.Work):
        def is_completed(self):
            return clock.now >= 102

    early, late = Transfer(Arriving(), clock), Transfer(Arriving(), clock)
    early.due, late.due = 101, 103

    seen = []
    for _ in range(4):
        seen.append((early.is_completed(), late.is_completed()))
        clock.compute(1)
    assert seen == [(False, False), (False, False), (True, False), (True, True)]


def test_waiting_takes_what_compute_has_left(clock, network):
    work = dist.broadcast(torch.zeros(2), 0, async_op=True)
    clock.compute(2)
    work.wait()
    work.wait()

    assert clock.now - 100 == 3


def test_transfers_queue_for_the_link(clock, network):
    works = [dist.broadcast(torch.zeros(2), 0, async_op=True) for _ in range(3)]
    works[0].wait()
    assert clock.now - 100 == 3

    works[2].wait()
    assert clock.now - 100 == 9

    works[1].wait()
    dist.broadcast(torch.zeros(2), 0)
    assert clock.now - 100 == 12


def test_an_idle_link_is_not_saved_for_later(clock, network):
    clock.compute(10)
    send().wait()

    assert clock.now - 100 == 11


def test_sending_and_receiving_share_nothing(clock, network):
    works = [send(), recv(), send(), recv()]
    for work in works:
        work.wait()

    assert clock.now - 100 == 2


def test_a_collective_needs_both_ways(clock, network):
    works = [recv(), dist.broadcast(torch.zeros(2), 0, async_op=True), send()]
    for work in works:
        work.wait()

    assert clock.now - 100 == 1 + 3 + 1


def test_messages_posted_together_run_together(clock, network):
    message, ring = torch.zeros(1), [(dist.isend, 2), (dist.irecv, 0)]
    for work in dist.batch_isend_irecv([dist.P2POp(op, message, peer) for op, peer in ring]):
        work.wait()

    assert clock.now - 100 == 1


def test_a_ring_of_messages_takes_what_the_formula_says(clock, network):
    all_reduce_ring(torch.zeros(8), dist.group.WORLD)

    assert clock.now - 100 == cost.ring_all_reduce_seconds(32, 4, LATENCY, BANDWIDTH)


def test_a_collective_from_a_hook_overlaps_with_backward(clock, network):
    model = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False))
    works = []
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(
            lambda p: works.append(dist.all_reduce(p.grad, async_op=True))
        )
    model[0].register_full_backward_hook(lambda *_: clock.compute(4))

    model(torch.ones(1, 2, requires_grad=True)).sum().backward()
    for work in works:
        work.wait()

    each = seconds("all_reduce", 16)
    assert each == 6
    assert clock.now - 100 == 2 * each  # 4 s of compute are hidden


def test_a_future_is_done_when_it_is_due(clock, network):
    work = dist.all_reduce(torch.zeros(4), async_op=True)
    work.get_future().wait()

    assert clock.now - 100 == 6


@pytest.mark.parametrize("order", ["ledger first", "network first"])
def test_the_ledger_sees_the_emulated_end_and_the_waits(clock, order):
    dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=4)
    ledger = Ledger(clock=clock)
    network = SlowNetwork(LATENCY, BANDWIDTH, clock, clock.sleep)
    modes = [ledger, network] if order == "ledger first" else [network, ledger]

    with ExitStack() as stack:
        for mode in modes:
            stack.enter_context(mode)
        with ledger.phase("work"):
            work = dist.all_reduce(torch.zeros(4), async_op=True)  # 6 s
            message = send()
            assert ledger.calls[0].finished == 106
            clock.compute(2)
            work.wait()  # 4 s more
            clock.compute(3)
            message.wait()
    dist.destroy_process_group()

    times = [(call.started, call.finished) for call in ledger.calls]
    assert times == [(100, 106), (100, 109)]  # a message's, when a wait for it returned
    assert [(span.start, span.end) for span in ledger.spans] == [(100, 102), (106, 109)]


def test_torch_ddp_waits_for_the_emulated_network():
    def train(group):
        model = nn.parallel.DistributedDataParallel(nn.Linear(50, 50), process_group=group)
        with SlowNetwork(latency=0.05, bandwidth=1e9), Ledger() as ledger:
            model(torch.ones(1, 50)).sum().backward()
        [call], done = ledger.calls, time.perf_counter()
        return call.started, call.finished, done

    for started, finished, done in run(train, 2):
        assert finished - started > 0.09
        assert done >= finished


def test_it_says_what_it_is():
    assert str(SlowNetwork(1e-3, 100e6)) == "emulated network: latency 1 ms, bandwidth 100 MB/s"
