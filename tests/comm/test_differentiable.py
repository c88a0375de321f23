"""Collectives with a backward pass: their gradients against differences, and what both send.

Each number of ranks is started once and does everything; the tests then look at what came back.
"""

from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from minitron import cost
from minitron.comm import differentiable
from minitron.comm.differentiable import (
    all_gather,
    all_reduce,
    all_to_all,
    equal_parts,
    reduce_scatter,
)
from minitron.launch import run
from minitron.measure.ledger import Ledger
from tests.tiers import collected, in_tiers, tiered


class Case(NamedTuple):
    """A function of (x, group), and which of its ends all ranks hold alike."""

    function: Callable
    wire: tuple[str | None, str | None]
    """The collective of the forward and of the backward pass."""
    cut: tuple[int, ...] = ()
    """The dims that must divide by the ranks."""
    same_input: bool = False
    same_output: bool = False


CASES = {
    "all_reduce": Case(all_reduce, ("all_reduce", None), same_output=True),
    **{
        f"all_gather {dim}": Case(
            lambda x, group, dim=dim: all_gather(x, group, dim), ("all_gather", "reduce_scatter")
        )
        for dim in (0, 1, 2, -1)
    },
    **{
        f"reduce_scatter {dim}": Case(
            lambda x, group, dim=dim: reduce_scatter(x, group, dim),
            ("reduce_scatter", "all_gather"),
            (dim,),
        )
        for dim in (0, 1, 2, -1)
    },
    **{
        f"all_to_all {dims}": Case(
            lambda x, group, dims=dims: all_to_all(x, group, *dims),
            ("all_to_all", "all_to_all"),
            dims[:1],
        )
        for dims in ((0, 1), (1, 2), (-1, 0), (1, 1))
    },
}


def example(case: Case, group, dtype=torch.float64) -> Tensor:
    """A small x of integers, of which sums are exact in bfloat16 too."""
    shape = [2, 2, 2]
    for dim in case.cut:
        shape[dim] = group.size()
    generator = torch.Generator().manual_seed(0 if case.same_input else group.rank())
    return torch.randint(-4, 5, shape, generator=generator).to(dtype)


# Differences: an output that all ranks hold counts once; an input that all hold changes on all


def differences(case: Case, function: Callable, x: Tensor, group) -> Tensor:
    """How this rank's outputs change with every element of every rank: (inputs, own outputs)."""
    rows, step = [], 1e-5
    for source in [group.rank()] if case.same_input else range(group.size()):
        for index in range(x.numel()):
            change = torch.zeros_like(x)
            change.view(-1)[index] = step if source == group.rank() else 0.0
            above, below = function(x + change, group), function(x - change, group)
            rows.append((above - below).flatten() / (2 * step))
    return torch.stack(rows)


def backward(case: Case, function: Callable, x: Tensor, group) -> Tensor:
    """The gradient of every output of every rank: (outputs, own inputs)."""
    rows, x = [], x.clone().requires_grad_()
    out = function(x, group)
    for target in [group.rank()] if case.same_output else range(group.size()):
        for index in range(out.numel()):
            grad = torch.zeros_like(out)
            grad.view(-1)[index] = 1.0 if target == group.rank() else 0.0
            rows.append(torch.autograd.grad(out, x, grad, retain_graph=True)[0].flatten())
    return torch.stack(rows)


def used_twice(function: Callable) -> Callable:
    """x goes through the collective two times, once on a branch of its own."""
    return lambda x, group: function(x, group) * function((x / 4).sin(), group)


def together(parts: list[Tensor], all_alike: bool) -> Tensor:
    if not all_alike:
        return torch.cat(parts, dim=1)
    assert all(torch.equal(parts[0], part) for part in parts)
    return parts[0]


KEPT = {
    "all_reduce",
    "all_gather 1",
    "all_gather -1",
    "reduce_scatter 1",
    "reduce_scatter -1",
    "all_to_all (1, 2)",
    "all_to_all (-1, 0)",
}  # by `make test`


def everything(group, names):
    done = {}
    for name in names:
        case = CASES[name]
        x = example(case, group)
        for kind, function in (("once", case.function), ("twice", used_twice(case.function))):
            if kind == "once" or name in TWICE:
                done[name, kind] = (
                    differences(case, function, x, group),
                    backward(case, function, x, group),
                )
        done[name, "wire"] = passed(case, group)
        done[name, "layout"] = of_any_layout(case, group)
        done[name, "bf16"] = one_pass(case, example(case, group, torch.bfloat16), group)
        done[name, "exact"] = one_pass(case, x, group)
    return done


TWICE = ("all_reduce", "all_gather 1", "reduce_scatter 1", "all_to_all (1, 2)")


@pytest.fixture(scope="module", params=tiered([3, 1, 2], keep=2), ids="{} ranks".format)
def ranks(request):
    return run(everything, request.param, collected(request, "name"), timeout=60, watch=False)


@pytest.mark.parametrize("name", in_tiers(KEPT, CASES))
def test_the_backward_pass_is_the_gradient(ranks, name):
    case = CASES[name]
    for kind in ("once", "twice") if name in TWICE else ("once",):
        numerical = together([done[name, kind][0] for done in ranks], case.same_output)
        gradient = together([done[name, kind][1] for done in ranks], case.same_input)
        torch.testing.assert_close(gradient.T, numerical, rtol=0, atol=1e-8)
        assert numerical.abs().sum() > 0


# The wire


def passed(case: Case, group) -> list[tuple]:
    """What the ledger saw of a forward and a backward pass, in the table's order."""
    x = example(case, group, torch.float32).requires_grad_()
    with Ledger() as ledger:
        out = case.function(x, group)
        with ledger.phase("backward"):
            out.backward(torch.ones_like(out))
    full = max(x.numel(), out.numel())
    return full, [(c.phase, c.op, c.payload, c.sent, c.received) for c in ledger.calls]


@pytest.mark.parametrize("name", in_tiers(KEPT, CASES))
def test_each_pass_is_one_collective_of_the_table_and_sends_its_bytes(ranks, name):
    size = len(ranks)
    for rank, done in enumerate(ranks):
        num_elements, calls = done[name, "wire"]
        expected = []
        for phase, op in zip(("forward", "backward"), CASES[name].wire, strict=True):
            if op is not None:
                volume = wire_volume(op, num_elements, size, rank)
                expected.append((phase, op, 4 * num_elements, *volume))
        assert calls == expected


def wire_volume(op: str, num_elements: int, size: int, rank: int) -> tuple[int, int]:
    if op == "all_to_all":  # each keeps its own part
        return (4 * num_elements * (size - 1) // size,) * 2
    return cost.collective_volume(op, num_elements, 4, size, rank)


# Layout, type, and whose tensors


def one_pass(case: Case, x: Tensor, group) -> tuple[Tensor, Tensor]:
    """Output, and gradient of x for a gradient of small integers."""
    x = x.detach().requires_grad_()
    out = case.function(x, group)
    rank = 0 if case.same_output else group.rank()
    grad = (torch.arange(out.numel()) % 5 - rank).view(out.shape).to(x.dtype)
    out.backward(grad)
    return out.detach(), x.grad


def of_any_layout(case: Case, group) -> list[bool]:
    """The same bits from tensors that are not contiguous, and none of the arguments changes."""
    plain = example(case, group)
    turned = plain.permute(2, 0, 1).contiguous().permute(1, 2, 0)
    assert not turned.is_contiguous() or group.size() == 1

    outs, grads, kept = [], [], []
    for x in (plain, turned):
        leaf = x.detach().requires_grad_()
        out = case.function(leaf, group)
        grad = torch.arange(out.numel(), dtype=x.dtype).view(out.shape).transpose(0, 2)
        grad = grad.contiguous().transpose(0, 2) if x is turned else grad.transpose(0, 2)
        before = x.clone(), grad.clone()
        out.backward(grad)
        outs.append(out.detach().clone())
        grads.append(leaf.grad.clone())
        kept.append(torch.equal(x, before[0]) and torch.equal(grad, before[1]))
    return [torch.equal(*outs), torch.equal(*grads), *kept]


@pytest.mark.parametrize("name", in_tiers(KEPT, CASES))
def test_any_layout_gives_the_same_bits_and_arguments_stay(ranks, name):
    for done in ranks:
        assert done[name, "layout"] == 4 * [True]


@pytest.mark.parametrize("name", in_tiers(KEPT, CASES))
def test_bfloat16_stays_bfloat16(ranks, name):
    for done in ranks:
        for seen, exact in zip(done[name, "bf16"], done[name, "exact"], strict=True):
            assert seen.dtype == torch.bfloat16
            assert torch.equal(seen.double(), exact)


# What each gives, from tensors that say where they come from


def whence(group):
    """Element (i, j) of rank r is 100 r + 10 i + j."""
    rank, size = group.rank(), group.size()
    x = 100 * rank + 10 * torch.arange(size)[:, None] + torch.arange(2)
    return (
        all_gather(x, group, 1),
        reduce_scatter(x, group, 0),
        all_to_all(x, group, 0, 1),
        all_reduce(x, group),
    )


def test_the_parts_come_in_the_order_of_the_ranks():
    for rank, (gathered, scattered, exchanged, total) in enumerate(run(whence, 3)):
        assert gathered[1].tolist() == [10, 11, 110, 111, 210, 211]
        assert scattered.tolist() == [[300 + 30 * rank, 303 + 30 * rank]]
        row = 10 * rank
        assert exchanged.tolist() == [[row, row + 1, row + 100, row + 101, row + 200, row + 201]]
        assert total[2].tolist() == [360, 363]


def in_part_of_the_ranks(group):
    groups = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    mine = groups[group.rank() % 2]
    x = torch.full((2, 1), float(group.rank()), requires_grad=True)
    out = all_gather(x, mine, 1)
    (out * torch.tensor([1.0, 10.0])).sum().backward()
    return out[0].tolist(), x.grad.flatten().tolist()


def test_the_group_is_an_argument():
    even, odd = [0.0, 2.0], [1.0, 3.0]
    assert run(in_part_of_the_ranks, 4) == [
        (even, [2.0, 2.0]),
        (odd, [2.0, 2.0]),
        (even, [20.0, 20.0]),
        (odd, [20.0, 20.0]),
    ]


# In two halves


def in_halves(group):
    """Rank 1 starts only when it hears that rank 0 has started: one that waits would hang."""
    seen, token = [], torch.zeros(1)
    x = torch.arange(6.0).view(2, 3) + group.rank()
    for start in (
        lambda: differentiable.start_all_reduce(x.clone(), group),
        lambda: differentiable.start_all_gather(x, group, 1),
        lambda: differentiable.start_reduce_scatter(x, group, 0),
    ):
        if group.rank() == 1:
            dist.recv(token, group=group, group_src=0)
        wait = start()
        if group.rank() == 0:
            dist.send(token, group=group, group_dst=1)
        seen.append(wait().tolist())
    return seen


def test_a_start_does_not_wait_and_its_wait_gives_the_result():
    for rank, (total, whole, part) in enumerate(run(in_halves, 2)):
        assert total == [[1.0, 3.0, 5.0], [7.0, 9.0, 11.0]]
        assert whole == [[0.0, 1, 2, 1, 2, 3], [3.0, 4, 5, 4, 5, 6]]
        assert part == [[[1.0, 3.0, 5.0]], [[7.0, 9.0, 11.0]]][rank]


# Mistakes


def sizes_that_do_not_divide(group):
    x, messages = torch.zeros(2, 5, 3), []
    for function in (
        lambda: reduce_scatter(x, group, 0),
        lambda: reduce_scatter(x, group, 1),
        lambda: all_to_all(x, group, 1, 2),
        lambda: all_to_all(x, group, 0, 1),
    ):
        with pytest.raises(ValueError) as info:  # before anything is sent, so no rank waits
            function()
        messages.append(str(info.value))
    return messages


def test_a_dim_that_does_not_divide_is_told_with_both_numbers():
    for messages in run(sizes_that_do_not_divide, 3):
        for message, (dim, entries, padded) in zip(
            messages, [(0, 2, 3), (1, 5, 6), (1, 5, 6), (0, 2, 3)], strict=True
        ):
            assert message == (
                f"dim {dim} of (2, 5, 3) has {entries} entries, which are not divisible by 3 "
                f"ranks: pad it to {padded}"
            )


def test_parts_are_views_of_equal_size():
    x = torch.arange(12).view(2, 6)
    parts = equal_parts(x, 3, 1)
    assert [part.tolist() for part in parts] == [
        [[0, 1], [6, 7]],
        [[2, 3], [8, 9]],
        [[4, 5], [10, 11]],
    ]
    assert all(
        part.untyped_storage().data_ptr() == x.untyped_storage().data_ptr() for part in parts
    )


def second_derivative(group):
    x = torch.ones(2, requires_grad=True)
    (grad,) = torch.autograd.grad(all_reduce(x, group).pow(2).sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        grad.sum().backward()


def test_a_second_derivative_is_refused():
    run(second_derivative, 2)
