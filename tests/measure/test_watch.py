"""The watch announces communication before it is issued, and sees nothing else."""

import threading

import torch
import torch.distributed as dist

from minitron.launch import run
from minitron.measure.watch import Watch
from minitron.pytorch.private import DispatchMode
from minitron.pytorch.spans import span


class Issued(DispatchMode):
    def __init__(self, events):
        super().__init__()
        self.events = events

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.events.append(func.__name__)
        return func(*args, **(kwargs or {}))


class Mean(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        dist.all_reduce(grad := grad.clone(), dist.ReduceOp.SUM)
        return grad, None


def announced(group):
    events = []
    with Watch(lambda what: events.append(what if what is None else str(what))):
        dist.all_reduce(torch.zeros(10))
        with span(phase="F0 stage 1"):
            torch.ones(3) * 2
            dist.barrier()
        Mean.apply(torch.ones(2, requires_grad=True), group).sum().backward()
        other = threading.Thread(target=dist.all_reduce, args=(torch.zeros(1),))
        other.start(), other.join()
        dist.all_reduce(torch.zeros(10))
    dist.all_reduce(torch.zeros(10))
    return events


def test_calls_of_this_thread_and_of_backward_passes_are_announced():
    (events,) = run(announced, 1, watch=False)
    assert events == [
        "all_reduce #0 (40 B, axis world)",
        "F0 stage 1",
        "barrier #1 (0 B, axis world)",
        None,
        "all_reduce #2 (8 B, axis world)",
        "all_reduce #3 (40 B, axis world)",
    ]


def test_a_call_is_announced_before_it_is_done():
    def reduced(group):
        x, seen = torch.full((2,), 3.0), []
        with Watch(lambda call: seen.append(x.tolist())):
            dist.all_reduce(x)
        return seen, x.tolist()

    assert run(reduced, 2, watch=False) == 2 * [([[3.0, 3.0]], [6.0, 6.0])]


def test_nothing_else_passes_through_the_watch():
    def compute(group):
        calls = []
        with Watch(calls.append):
            x = torch.ones(4, requires_grad=True)
            (x * 2).sum().backward()
            torch.optim.SGD([x], lr=0.1).step()
        return calls

    assert run(compute, 1, watch=False) == [[]]
