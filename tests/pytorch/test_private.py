"""Each thing that PyTorch keeps private still does what it is taken for."""

import subprocess
import sys

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import _functional_collectives as functional

from minitron.launch import run
from minitron.pytorch import SLOW_TO_IMPORT, private


class Seen(private.DispatchMode):
    """The operators of a block."""

    def __init__(self):
        super().__init__()
        self.operators = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.operators.append(func)
        return func(*args, **(kwargs or {}))


# Fake tensors


def test_values_are_asked_for_on_the_host_and_fake_tensors_have_a_default():
    real = torch.tensor([3, 4])
    assert private.host_value(real, when_fake="default") == [3, 4]
    assert private.host_value(real.sum() > 6, when_fake=False) is True
    with private.fake_tensors():
        fake = torch.ones(2, device="cuda")
        assert fake.device.type == "cuda"  # on a machine without one
        assert private.host_value(fake, when_fake="default") == "default"


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_a_copy_to_the_host_does_not_wait_for_what_is_launched_later_gpu():
    values = private.start_host_copy(torch.tensor([3, 4], device="cuda"), when_fake=None)
    torch.cuda._sleep(10**9)  # half a second
    later = torch.cuda.Event()
    later.record()
    assert values() == [3, 4]
    assert not later.query()


def test_a_fake_group_has_ranks_that_do_not_exist():
    private.init_fake_process_group(rank=5, num_ranks=3072)
    try:
        x = torch.ones(2)
        dist.all_reduce(x)
        group = dist.group.WORLD
        assert (group.rank(), group.size(), x.tolist()) == (5, 3072, [1, 1])
    finally:
        dist.destroy_process_group()


# Operators


def test_a_dispatch_mode_sees_operators_forward_and_backward_and_what_converts():
    x = torch.ones(2, requires_grad=True)
    with Seen() as seen:
        (x * 2).sum().backward()
        x.detach().to(torch.float64)
    counts = [seen.operators.count(op) for op in (torch.ops.aten.mul.Tensor, private.convert_op)]
    assert counts == [2, 1]
    assert all(isinstance(operator, private.OpOverload) for operator in seen.operators)


def test_a_dispatch_mode_does_not_import_the_compiler():
    code = f"""
import sys, torch
from minitron.pytorch.private import DispatchMode
class Mode(DispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {{}}))
with Mode():
    torch.ones(2) + 1
assert "{SLOW_TO_IMPORT}" not in sys.modules
torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1)
assert "{SLOW_TO_IMPORT}" in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def talk(group):
    seen = []

    def see(run_it, operator, args, kwargs):
        seen.append(str(operator))
        return run_it(*args, **kwargs)

    reduce = torch.ops.c10d.allreduce_.default
    with private.in_place_of([reduce], see), Seen() as mode:
        x = torch.ones(2) + 1
        seen.append("begin")
        dist.all_reduce(x, group=group)
        with torch.inference_mode():
            dist.all_reduce(torch.ones(1), group=group, async_op=True)
        functional.all_reduce(x, "sum", group).wait()
    dist.all_reduce(x, group=group)  # seen no more
    return seen, mode.operators.count(reduce), x.tolist()


def test_communication_alone_is_seen_below_every_mode():
    # of the functional collective the mode sees the functional operator
    assert run(talk, 1, watch=False) == [(["begin"] + 3 * ["c10d.allreduce_.default"], 2, [2, 2])]


def test_tensors_of_nested_containers():
    a, b, c = torch.ones(3, 1).unbind()
    found = private.tensors_in([a, 1, None], (("name", {"b": b, "lr": 0.1}),), c)
    assert [id(tensor) for tensor in found] == [id(a), id(b), id(c)]


def test_a_function_of_each_leaf():
    assert private.tree_map(lambda leaf: leaf + 1, [1, (2, {"a": 3})]) == [2, (3, {"a": 4})]


def test_tensors_of_one_storage_have_one_address_also_if_it_is_fake():
    for context in (torch.no_grad, private.fake_tensors):
        with context():
            a, b = torch.ones(4), torch.ones(4)
            address = private.storage_address
            assert address(a) == address(a[1:]) != address(b)


def test_a_storage_is_freed_and_filled_under_its_views_and_a_mode_sees_it():
    tensor = torch.ones(4)
    view = tensor[2:]
    with Seen() as seen:
        private.resize_storage(tensor, 0)
        assert view.untyped_storage().nbytes() == 0
        private.resize_storage(tensor, tensor.nbytes)
    tensor.fill_(3)
    assert view.tolist() == [3, 3]
    assert seen.operators == 2 * [private.resize_storage_op]


@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD])
def test_a_fused_optimizer_decides_on_the_device_whether_to_step(kind):
    weight = torch.nn.Parameter(torch.ones(2))
    optimizer = kind([weight], lr=0.1, fused=True)
    weight.grad = torch.ones(2)
    assert private.launch_step_if(torch.tensor(False), optimizer)
    assert weight.tolist() == [1, 1]
    assert private.launch_step_if(torch.tensor(True), optimizer)
    moved = weight.detach().clone()
    assert (moved < 1).all()
    optimizer.step()  # and the next one decides nothing
    assert (weight < moved).all()
    assert not private.launch_step_if(torch.tensor(True), kind([weight], lr=0.1, fused=False))


def test_tensors_are_multiplied_in_place():
    tensors = [torch.ones(2), torch.ones(3)]
    private.multiply_tensors_(tensors, 0.5)
    assert torch.cat(tensors).tolist() == 5 * [0.5]


@pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() < (8, 9),
    reason="no GPU that multiplies 8-bit floats",
)
def test_a_gpu_multiplies_float8():
    a = torch.ones(16, 32, device="cuda").to(torch.float8_e4m3fn)
    b = torch.ones(64, 32, device="cuda").to(torch.float8_e4m3fn).T
    scale = torch.full((), 0.5, device="cuda")
    out = private.multiply_float8(a, b, scale, scale, torch.float32)
    assert torch.equal(out, torch.full((16, 64), 8.0, device="cuda"))


# Autograd


class Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, seen):
        ctx.seen = seen
        return 2 * x

    @staticmethod
    def backward(ctx, grad):
        ctx.seen.append((private.in_backward(), private.running_node_number()))
        return 2 * grad, None


def test_the_running_node_has_the_number_that_it_got_in_forward():
    seen, x = [], torch.ones(2, requires_grad=True)
    number = private.next_node_number()
    y = Double.apply(x, seen)
    assert private.next_node_number() == number + 1
    assert (private.in_backward(), private.running_node_number()) == (False, None)
    y.exp().sum().backward()
    assert seen == [(True, number)]


def test_a_call_comes_after_the_whole_backward_pass():
    model, order = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), []
    model[1].register_full_backward_pre_hook(
        lambda *_: private.call_after_backward(lambda: order.append("end"))
    )
    model[0].weight.register_post_accumulate_grad_hook(lambda _: order.append("first layer"))
    model(torch.ones(1, 2)).sum().backward()
    assert order == ["first layer", "end"]


# Communication


def collectives_of_a_rank(group: dist.ProcessGroup) -> list[str]:
    x = torch.ones(2)
    with Seen() as seen:
        dist.all_gather_into_tensor(torch.empty(4), x, group=group)
        dist.reduce_scatter_tensor(torch.empty(1), x, op=dist.ReduceOp.MAX, group=group)
        functional.all_reduce(x, "sum", group).wait()
        work = private.WorkAround(
            dist.isend(x, group_dst=1, group=group)
            if group.rank() == 0
            else dist.irecv(x, group=group)
        )
        work.work.wait()
        source = None if group.rank() == 0 else work._source_rank()

    names = {
        private.all_gather_base_op: "all_gather",
        private.reduce_scatter_base_op: "reduce_scatter",
        private.functional_collectives.all_reduce.default: "functional all_reduce",
    }
    assert private.group_named(group.group_name) is group
    return [names[func] for func in seen.operators if func in names], source


def test_collectives_are_the_operators_they_are_taken_for():
    names = ["all_gather", "reduce_scatter", "functional all_reduce"]
    assert run(collectives_of_a_rank, 2) == [(names, None), (names, 0)]


def reduction_of_a_rank(group: dist.ProcessGroup) -> list[str]:
    class Reductions(private.DispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if func is torch.ops.c10d.allreduce_.default:
                names.append(private.reduce_name(args[2]))
            return func(*args, **(kwargs or {}))

    names = [private.reduce_name("avg")]
    with Reductions():
        dist.all_reduce(torch.ones(1), op=dist.ReduceOp.MAX, group=group)
    return names


def test_a_reduction_has_a_name_where_the_version_tells_it():
    [names] = run(reduction_of_a_rank, 1)
    assert names in (["avg", "max"], ["avg", ""])


def test_the_module_of_collectives_is_that_of_torch_distributed():
    assert private.c10d_module.all_reduce is dist.all_reduce


# Profiling


def test_a_running_profiler_is_noticed():
    assert not private.is_profiling()
    with torch.profiler.profile():
        assert private.is_profiling()
