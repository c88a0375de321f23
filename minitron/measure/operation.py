"""What a communication operator of PyTorch says: which operation, over which group, how many bytes.

Read in this order: Operation, OPERATORS, read_operation.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from minitron.cost import Volume, collective_volume
from minitron.pytorch.private import (
    OpOverload,
    all_gather_base_op,
    functional_collectives,
    group_named,
    reduce_name,
    reduce_scatter_base_op,
)

c10d, functional = torch.ops.c10d, functional_collectives


@dataclass(frozen=True)
class Operation:
    """A collective, a send or a receive, as this rank calls it; bytes as in `ledger.Call`."""

    op: str
    group: dist.ProcessGroup
    payload: int
    volume: Volume
    peer: int | None
    tag: int
    reduce: str
    dtype: torch.dtype
    device: torch.device


class Operator(NamedTuple):
    """Where an operator keeps what matters: the positions of its arguments."""

    op: str
    full: int
    """Position of the full tensor, or of the lists of its parts."""
    times_size: bool = False
    """Whether there stands one rank's part of it."""
    peer: int | None = None
    tag: int | None = None
    reduce: int | None = None


OPERATORS: dict[OpOverload, Operator] = {
    c10d.allreduce_.default: Operator("all_reduce", 0, reduce=2),
    c10d.allreduce_coalesced_.default: Operator("all_reduce", 0, reduce=2),
    c10d.allgather_.default: Operator("all_gather", 0),
    c10d.allgather_coalesced_.default: Operator("all_gather", 0),
    c10d.allgather_into_tensor_coalesced_.default: Operator("all_gather", 0),
    all_gather_base_op: Operator("all_gather", 0),
    c10d.reduce_scatter_.default: Operator("reduce_scatter", 1, reduce=3),
    c10d.reduce_scatter_tensor_coalesced_.default: Operator("reduce_scatter", 1, reduce=3),
    reduce_scatter_base_op: Operator("reduce_scatter", 1, reduce=3),
    c10d.broadcast_.default: Operator("broadcast", 0, peer=2),
    c10d.reduce_.default: Operator("reduce", 0, peer=3, reduce=2),
    c10d.gather_.default: Operator("gather", 1, times_size=True, peer=3),
    c10d.scatter_.default: Operator("scatter", 0, times_size=True, peer=3),
    c10d.alltoall_.default: Operator("all_to_all", 1),
    c10d.alltoall_base_.default: Operator("all_to_all", 1),
    c10d.barrier.default: Operator("barrier", 0),
    c10d.monitored_barrier_.default: Operator("barrier", 0),
    c10d.send.default: Operator("send", 0, peer=2, tag=3),
    c10d.recv_.default: Operator("recv", 0, peer=2, tag=3),
    c10d.recv_any_source_.default: Operator("recv", 0, tag=2),
    functional.all_reduce.default: Operator("all_reduce", 0, reduce=1),
    functional.all_reduce_.default: Operator("all_reduce", 0, reduce=1),
    functional.all_reduce_coalesced.default: Operator("all_reduce", 0, reduce=1),
    functional.all_gather_into_tensor.default: Operator("all_gather", 0, times_size=True),
    functional.all_gather_into_tensor_coalesced.default: Operator("all_gather", 0, times_size=True),
    functional.reduce_scatter_tensor.default: Operator("reduce_scatter", 0, reduce=1),
    functional.reduce_scatter_tensor_coalesced.default: Operator("reduce_scatter", 0, reduce=1),
    functional.broadcast.default: Operator("broadcast", 0, peer=1),
    functional.all_to_all_single.default: Operator("all_to_all", 0),
}


def read_operation(func: OpOverload, args: tuple) -> Operation:
    """Read the call of an operator that is in `OPERATORS`."""
    operator, group = OPERATORS[func], group_of(args)
    tensors = flat(args[operator.full])
    num_elements = sum(tensor.numel() for tensor in tensors)
    if operator.op == "barrier":
        num_elements = 0  # its tensor tells the device only
    if operator.times_size:
        num_elements *= group.size()
    element_size = tensors[0].element_size()
    peer = None if operator.peer is None else args[operator.peer]

    if operator.op == "all_to_all":
        volume = all_to_all_volume(func, args, group)
    else:
        volume = collective_volume(
            operator.op, num_elements, element_size, group.size(), group.rank(), peer or 0
        )
    return Operation(
        operator.op,
        group,
        num_elements * element_size,
        volume,
        peer,
        tag=0 if operator.tag is None else args[operator.tag],
        reduce="" if operator.reduce is None else reduce_name(args[operator.reduce]),
        dtype=tensors[0].dtype,
        device=tensors[0].device,
    )


def group_of(args: tuple) -> dist.ProcessGroup:
    """Find the process group among an operator's arguments; functional ones name it, at the end."""
    for argument in args:
        if isinstance(argument, torch.ScriptObject):
            return dist.ProcessGroup.unbox(argument)
    name = args[-1]
    return group_named(name) if isinstance(name, str) else name


def axis_of(group: dist.ProcessGroup) -> str:
    """Return the name of the group's axis: "dp" for a mesh's, "world" for all ranks."""
    if group.group_desc == "default_pg":
        return "world"
    if group.group_desc == "undefined":
        return f"group {group.group_name}"
    return group.group_desc.removeprefix("mesh_")


def flat(tensors) -> list[Tensor]:
    """Return the tensors of nested lists, in order."""
    if isinstance(tensors, Tensor):
        return [tensors]
    return [tensor for inner in tensors for tensor in flat(inner)]


def all_to_all_volume(func: OpOverload, args: tuple, group: dist.ProcessGroup) -> Volume:
    """Return the bytes of the parts for other ranks, which may differ in size."""
    if func is c10d.alltoall_.default:
        received, sent = ([part.nbytes for part in flat(parts)] for parts in args[:2])
    elif func is c10d.alltoall_base_.default:
        output, input, _, output_rows, input_rows = args[:5]
        received = bytes_by_rank(output, output_rows, group.size())
        sent = bytes_by_rank(input, input_rows, group.size())
    else:
        input, output_rows, input_rows = args[:3]
        row_bytes = input.nbytes // max(1, len(input))
        received, sent = ([row_bytes * n for n in rows] for rows in (output_rows, input_rows))
    rank = group.rank()
    return Volume(sum(sent) - sent[rank], sum(received) - received[rank])


def bytes_by_rank(tensor: Tensor, rows: list[int], size: int) -> list[int]:
    """Return the bytes of each rank's rows of a tensor; an empty list cuts it evenly."""
    if not rows:
        return [tensor.nbytes // size] * size
    return [tensor.nbytes // max(1, len(tensor)) * n for n in rows]
