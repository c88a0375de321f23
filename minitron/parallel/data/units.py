"""What fully sharded data parallelism gathers, frees and reduces together: a block, or the rest.

A unit has one flat tensor for each dtype, and one more for what is frozen: parameters end to end,
filled up so that each of the N ranks has an equal shard. A piece is what a shard holds of one
parameter, maybe nothing.

Read in this order: Flat, from unshard to finish_reduce; Unit; split_into_units.
"""

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn

from minitron.comm.collectives import all_gather_single, broadcast, reduce_scatter_single
from minitron.parallel.data.shards import owned_ranges
from minitron.pytorch.private import resize_storage
from minitron.pytorch.spans import span


class Flat:
    """Parameters of one dtype and their gradients, end to end.

    shard   (n/N,)  what this rank keeps, and the optimizer updates
    pieces          by parameter of the model, its part of the shard
    full    (n,)    what the model computes with: its parameters are views; empty when sharded
    """

    def __init__(
        self, parameters: list[nn.Parameter], group: dist.ProcessGroup,
        device: torch.device | str | None, compute_dtype: torch.dtype | None,
        reduce_dtype: torch.dtype | None, have_values: bool,
    ):
        self.parameters, self.group = parameters, group
        first = parameters[0]
        self.is_trainable, device = first.requires_grad, device or first.device
        self.sizes = [parameter.numel() for parameter in parameters]
        owned = owned_ranges(self.sizes, group.size(), group.rank())
        self.owned = dict(zip(parameters, owned, strict=True))
        length = -(-sum(self.sizes) // group.size())

        self.shard = torch.full((length,), torch.nan, dtype=first.dtype, device=device)
        pieces = [nn.Parameter(piece, self.is_trainable) for piece in self.cut(self.shard)]
        self.pieces = dict(zip(parameters, pieces, strict=True))
        dtype = compute_dtype or first.dtype
        self.full = torch.empty(group.size() * length, dtype=dtype, device=device)
        self.reduce_dtype = reduce_dtype or dtype
        self.views = self.join(self.full)
        # In place of a freed parameter: whoever reads it finds NaN, and not freed memory.
        self.absent = torch.full((), torch.nan, dtype=dtype, device=device)

        if have_values:
            self.fill(self.from_rank_0)
        self.free()

    def cut(self, shard: Tensor) -> list[Tensor]:
        """The pieces in a tensor (n/N,)."""
        sizes = [len(own) for own in self.owned.values()]
        return list(shard[:sum(sizes)].split(sizes))

    def join(self, full: Tensor) -> list[Tensor]:
        """The parameters in a tensor (n,), in their shapes."""
        parts = full[:sum(self.sizes)].split(self.sizes)
        return [part.view(p.shape) for p, part in zip(self.parameters, parts, strict=True)]

    def fill(self, value: Callable[[nn.Parameter], Tensor]) -> None:
        """Set each parameter to a full `value`; one is held at a time."""
        for parameter, own in self.owned.items():
            full = value(parameter).detach().reshape(parameter.shape)
            self.pieces[parameter].detach().copy_(full.flatten()[own.start:own.stop])

    def from_rank_0(self, parameter: nn.Parameter) -> Tensor:
        value = parameter.detach().to(self.shard.device, copy=True).contiguous()
        broadcast(value, 0, self.group)
        return value

    def unshard(self) -> dist.Work:
        """Start to fill `full` with the shards of all ranks."""
        resize_storage(self.full, self.full.nbytes)
        for parameter, view in zip(self.parameters, self.views, strict=True):
            parameter.data = view
        # Kept until it has left: while a GPU sends it, nothing else may take its memory.
        self.leaving = self.shard.to(self.full.dtype)
        return all_gather_single(self.full, self.leaving, self.group, async_op=True)

    def gather(self, own: list[Tensor | None]) -> list[Tensor | None]:
        """Join what the ranks have for their pieces, on the CPU; None is None on all of them."""
        shard, full = torch.zeros_like(self.shard), self.shard.new_empty(len(self.full))
        for value, place in zip(own, self.cut(shard), strict=True):
            if value is not None:
                place.copy_(value)
        all_gather_single(full, shard, self.group)
        return [None if value is None else tensor.cpu()
                for value, tensor in zip(own, self.join(full), strict=True)]

    def free(self) -> None:
        """Let go of the full parameters."""
        for parameter in self.parameters:
            parameter.data = self.absent.expand(parameter.shape)
        resize_storage(self.full, 0)

    def reduce(self) -> dist.Work:
        """Start to average the gradients over the ranks, and free them; None counts as zeros."""
        grad_full = torch.zeros_like(self.full, dtype=self.reduce_dtype)
        for parameter, grad in zip(self.parameters, self.join(grad_full), strict=True):
            if parameter.grad is not None:
                torch.mul(parameter.grad, 1 / self.group.size(), out=grad)
                parameter.grad = None
        self.grad_shard = grad_full.new_empty(len(self.shard))
        self.grad_full = grad_full  # kept until it has left
        return reduce_scatter_single(self.grad_shard, grad_full, self.group, async_op=True)

    def add_gradients(self) -> None:
        """Add what has arrived to the pieces' `.grad`."""
        grads = self.cut(self.grad_shard.to(self.shard.dtype))
        for piece, grad in zip(self.pieces.values(), grads, strict=True):
            piece.grad = grad if piece.grad is None else piece.grad.add_(grad)
        self.grad_shard = self.grad_full = None


class Unit:
    """The flats of one part of the model, and whether their parameters are there."""

    def __init__(
        self, name: str, parameters: list[nn.Parameter], group: dist.ProcessGroup, **options
    ):
        self.name = name
        kinds: dict[tuple, list[nn.Parameter]] = {}
        for parameter in parameters:
            kinds.setdefault((parameter.dtype, parameter.requires_grad), []).append(parameter)
        self.flats = [Flat(alike, group, **options) for alike in kinds.values()]
        self.trainable = [flat for flat in self.flats if flat.is_trainable]
        self.gathers: list[dist.Work] | None = None  # None: sharded
        self.reductions: list[dist.Work] = []

    @property
    def is_sharded(self) -> bool:
        return self.gathers is None

    def unshard(self) -> None:
        """Start to gather the parameters, if they are not there or on their way."""
        if self.is_sharded:
            with span("ZeRO-3 gather", self.name):
                self.gathers = [flat.unshard() for flat in self.flats]

    def wait_for_unshard(self) -> None:
        """Have the parameters there."""
        self.unshard()
        for work in self.gathers:
            work.wait()
        for flat in self.flats:
            flat.leaving = None
        self.gathers = []

    def reshard(self) -> None:
        """Free the parameters, if they are there."""
        if not self.is_sharded:
            self.wait_for_unshard()  # else they would arrive in freed memory
            for flat in self.flats:
                flat.free()
            self.gathers = None

    def start_reduce(self) -> None:
        """Start the reduce-scatter of the gradients."""
        with span("ZeRO-3 reduce", self.name):
            self.reductions = [flat.reduce() for flat in self.trainable]

    def finish_reduce(self) -> None:
        """Have this rank's part of the gradients in the pieces."""
        for flat, work in zip(self.trainable, self.reductions, strict=True):
            work.wait()
            flat.add_gradients()
        self.reductions = []


def split_into_units(model: nn.Module) -> dict[str, list[nn.Parameter]]:
    """The parameters of each of `model.blocks`, by name, and at last those of the rest, the root.

    Raises ValueError for a parameter that nobody can tell when it is needed.
    """
    names = {parameter: name for name, parameter in model.named_parameters()}
    root = root_modules(model)
    parts = [list(block.modules()) for block in model.blocks] + [root]
    homes: dict[nn.Parameter, int] = {}
    for index, modules in enumerate(parts):
        for parameter in (p for module in modules for p in module.parameters(recurse=False)):
            if homes.setdefault(parameter, index) != index:
                raise ValueError(f"{names[parameter]} is shared by a block and another part of the "
                                 "model: share within one block, or outside of the blocks")
    for parameter in model.parameters(recurse=False):
        raise ValueError(f"{names[parameter]} is a parameter of the model itself: put it into a "
                         "module of its own, whose call tells when it is needed")
    units = [f"blocks.{index}" for index in range(len(model.blocks))] + ["root"]
    return {unit: [p for p in homes if homes[p] == index] for index, unit in enumerate(units)}


def root_modules(model: nn.Module) -> list[nn.Module]:
    """The modules with parameters of their own outside the blocks."""
    inside = {module for block in model.blocks for module in block.modules()}
    return [module for module in model.modules()
            if module not in inside and any(True for _ in module.parameters(recurse=False))]
