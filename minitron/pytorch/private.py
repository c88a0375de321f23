"""Everything the package takes from PyTorch that PyTorch does not promise to keep.

Each need is one function or name here, with the public thing that is missing; nothing else in
`minitron` or `teaching` may use a private name of PyTorch (a test says so). All of it is run by
`tests/pytorch/test_private.py`: when PyTorch changes, that file fails first and names the need.

Run on torch 2.11 (CUDA 13) and 2.13 (CPU).
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.autograd import profiler
from torch.distributed import distributed_c10d
from torch.utils import _python_dispatch, _pytree

# Fake tensors: shapes and dtypes without values


def host_value(tensor: Tensor, when_fake: Any) -> Any:
    """Ask for values of a tensor on the host: a number, or nested lists; waits for the device.

    A fake tensor has no values: `when_fake` stands for them, so that a step can be dry-run. Public
    PyTorch has no test for fake tensors.
    """
    return start_host_copy(tensor, when_fake)()


def start_host_copy(tensor: Tensor, when_fake: Any) -> Callable[[], Any]:
    """Start copying a tensor's values to the host; the function returned waits and returns them.

    It does not wait for what is launched between the two calls.
    """
    if isinstance(tensor, FakeTensor):
        return lambda: when_fake
    if tensor.device.type != "cuda":
        return tensor.tolist
    copy = tensor.to("cpu", non_blocking=True)  # to pinned memory: the host does not wait
    copied = torch.cuda.current_stream(tensor.device).record_event()

    def values() -> Any:
        copied.synchronize()
        return copy.tolist()

    return values


def fake_tensors() -> AbstractContextManager:
    """Make every new tensor of a block fake. Public PyTorch has only the meta device, on which a
    tensor forgets the device it stands for.
    """
    return FakeTensorMode()


def device_of(tensor: Tensor) -> torch.device:
    """Return the device that a tensor is on or, if it is fake, stands for.

    Public is `tensor.device`, but for a fake tensor that is an operator, which every mode sees.
    """
    return tensor.fake_device if isinstance(tensor, FakeTensor) else tensor.device


def init_fake_process_group(rank: int, num_ranks: int) -> None:
    """Act as `rank` of `num_ranks` that do not exist: collectives return at once, moving nothing.

    Public PyTorch names the backend "fake", but not the store that it needs.
    """
    # here, not above: PyTorch's test tools take time to import, and only a dry run needs them
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=num_ranks)


# Seeing every operator


class DispatchMode(_python_dispatch.TorchDispatchMode):
    """See every operator of this thread while entered, in its `__torch_dispatch__`.

    Public PyTorch has hooks for modules, but none for operators.
    """

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # else torch wraps what follows in a function that imports its compiler: 1 s


OpOverload = torch._ops.OpOverload
"""The type of the operators that a DispatchMode is called with; it has no public name."""


@contextmanager
def in_place_of(operators: Iterable[OpOverload], see: Callable) -> Iterator[None]:
    """Call `see(run, operator, args, kwargs)` where one of these operators of c10d would run.

    `run(*args, **kwargs)` then runs it. A DispatchMode sees the operator before that, and all
    other operators are as fast as ever. Public `torch.library` adds kernels only for backends that
    have none yet, and cannot call the kernel that it replaces.
    """
    library = torch.library.Library("c10d", "IMPL")
    for operator in operators:
        library.impl(operator, partial(_seen, operator, see), "BackendSelect", with_keyset=True)
    try:
        yield
    finally:
        library._destroy()


def _seen(operator: OpOverload, see: Callable, keys, *args, **kwargs):
    below = keys.remove(torch._C.DispatchKey.BackendSelect)
    return see(partial(operator.redispatch, below), operator, args, kwargs)


tree_map = _pytree.tree_map
"""Apply a function to each leaf of nested lists, tuples and dicts."""


def tensors_in(*values) -> list[Tensor]:
    """Return the tensors in nested lists, tuples and dicts, such as an operator's arguments.

    PyTorch's own `tree_leaves` is private too, and takes four times as long: it knows more types.
    """
    found = []
    for value in values:
        if isinstance(value, Tensor):
            found.append(value)
        elif isinstance(value, list | tuple):
            found += tensors_in(*value)
        elif isinstance(value, dict):
            found += tensors_in(*value.values())
    return found


def storage_address(tensor: Tensor) -> int:
    """Return a number that all tensors of one storage share, while it lives.

    Public is `untyped_storage().data_ptr()`, but that is 0 for fake and for empty tensors.
    """
    return tensor.untyped_storage()._cdata


# Autograd


def in_backward() -> bool:
    """Return whether this thread is inside a backward pass; public PyTorch does not tell."""
    return torch._C._current_graph_task_id() != -1


def running_node_number() -> int | None:
    """Return the number of the autograd node whose backward runs now; None outside of one.

    It is the number that `next_node_number` returned before the node was made in forward. Public
    are a node's hooks, which would have to be registered on every node.
    """
    node = torch._C._current_autograd_node()
    return None if node is None else node._sequence_nr()


def next_node_number() -> int:
    """Return the number that autograd's next node will get; public PyTorch does not tell."""
    return torch.autograd._get_sequence_nr()


def call_after_backward(function: Callable[[], None]) -> None:
    """Call `function` when the running backward pass has ended; only from within a hook of it.

    Public are only hooks of a single tensor or node; DDP and FSDP2 use this one too.
    """
    torch.autograd.Variable._execution_engine.queue_callback(function)


# Operators without a public name

resize_storage_op = torch.ops.inductor.resize_storage_bytes_.default


def resize_storage(tensor: Tensor, num_bytes: int) -> None:
    """Free a tensor's storage (0 bytes) or allocate it again; its views see it refilled.

    Public is `untyped_storage().resize_`, but it is no operator: the meter could not see it.
    """
    torch.ops.inductor.resize_storage_bytes_(tensor, num_bytes)


def launch_step_if(is_finite: Tensor, optimizer: torch.optim.Optimizer) -> bool:
    """Launch a step that leaves weights and state as they are unless `is_finite` (0-d, bool).

    Returns False, and launches nothing, if the optimizer cannot decide that on the device, as the
    fused ones can. Public is only `torch.amp.GradScaler`, which finds infinities itself.
    """
    if not getattr(optimizer, "_step_supports_amp_scaling", False):
        return False
    optimizer.found_inf = (~is_finite).float()
    try:
        optimizer.step()
    finally:
        del optimizer.found_inf
    return True


def multiply_tensors_(tensors: Sequence[Tensor], factor: float) -> None:
    """Multiply each tensor in place, on GPUs in few kernels: what public optimizers do inside."""
    torch._foreach_mul_(tensors, factor)


def multiply_float8(
    a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, out_dtype: torch.dtype
) -> Tensor:
    """Multiply 8-bit floats on a GPU: a (n, k) by rows, b (k, m) by columns, sizes that divide by
    16. The public `torch.nn.functional.scaled_mm` is not in torch 2.9.
    """
    return torch._scaled_mm(a, b, scale_a=scale_a, scale_b=scale_b, out_dtype=out_dtype)


device_op = torch.ops.prim.device.default
"""What `tensor.device` is for a fake tensor."""
convert_op = torch.ops.aten._to_copy.default
"""What `Tensor.to` becomes where it converts."""

# Communication

functional_collectives = torch.ops._c10d_functional
"""The collectives that compiled code and DTensor call; public is only a module in torch.distributed
that has been announced as experimental."""
all_gather_base_op = torch.ops.c10d._allgather_base_.default
"""What `dist.all_gather_into_tensor` calls."""
reduce_scatter_base_op = torch.ops.c10d._reduce_scatter_base_.default
"""What `dist.reduce_scatter_tensor` calls."""
c10d_module = distributed_c10d
"""Where `dist.all_reduce` and the others are defined: graders look whether they were replaced."""


def group_named(name: str) -> dist.ProcessGroup:
    """Return the process group of a name, which is what functional collectives pass.

    Public PyTorch has the way from a group to its name, and not the way back.
    """
    return distributed_c10d._resolve_process_group(name)


def reduce_name(operation: str | torch.ScriptObject) -> str:
    """Return "sum" or "max", say, for what an operator gets; "" where an older PyTorch hides it.

    Public is `dist.ReduceOp`, into which the object cannot be turned.
    """
    if isinstance(operation, str):  # functional collectives
        return operation
    if not operation._has_method("op"):
        return ""
    return dist.ReduceOp.RedOpType(operation.op()).name.lower()


class WorkAround(dist.Work):
    """A handle of a started operation that asks another one; for subclasses that add to it.

    Public is `dist.Work` itself, but a receive from any rank asks it for a private method.
    """

    def __init__(self, work: dist.Work):
        super().__init__()
        self.work = work

    def _source_rank(self) -> int:
        return self.work._source_rank()


# CUDA's caching allocator


@contextmanager
def record_allocations(device: torch.device) -> Iterator[None]:
    """Let the allocator keep a trace of what it does in a block, for `allocator_trace`.

    Public are sums (`torch.cuda.memory_stats`) and the segments of one moment.
    """
    torch.cuda.memory._record_memory_history("all", context=None, device=device)
    try:
        yield
    finally:
        torch.cuda.memory._record_memory_history(None, device=device)


def allocator_trace(device: torch.device) -> list[dict]:
    """Return what the allocator has done on `device` since `record_allocations` was entered.

    Each entry has an "action" ("alloc", "free_completed", "segment_alloc", ...) and a "size".
    """
    traces = torch.cuda.memory._snapshot(device)["device_traces"]
    return traces[torch.cuda.current_device() if device.index is None else device.index]


# Profiling


def is_profiling() -> bool:
    """Return whether a profiler runs; without it a name in its trace still costs 5 us a span."""
    return profiler._is_profiler_enabled
