"""What fully sharded data parallelism gathers, frees and reduces together: a block, or the rest.

A unit has one flat buffer for each dtype, one more for what is frozen, and one for what another
stage of a pipeline has too.

Read in this order: flat.FlatUnit, Unit, split_into_units.
"""

from collections.abc import Collection

import torch.distributed as dist
from torch import nn

from minitron.comm.agreement import Group
from minitron.parallel.flat import FlatUnit
from minitron.pytorch.spans import span


class Unit:
    """The flats of one part of the model, and whether their parameters are there."""

    def __init__(
        self,
        name: str,
        parameters: list[nn.Parameter],
        group: Group,
        apart: Collection[nn.Parameter] = (),
        **options,
    ):
        self.name = name
        kinds: dict[tuple, list[nn.Parameter]] = {}
        for parameter in parameters:
            kind = parameter.dtype, parameter.requires_grad, parameter in apart
            kinds.setdefault(kind, []).append(parameter)
        self.flats = [FlatUnit(alike, group, **options) for alike in kinds.values()]
        self.parameters = set(parameters)
        self.trainable = [flat for flat in self.flats if flat.is_trainable]
        self.gathers: list[dist.Work] | None = None  # None: sharded
        for flat in self.flats:
            flat.reshard()

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
                flat.reshard()
            self.gathers = None

    def start_reduce(self) -> None:
        """Start the reduce-scatter of the gradients."""
        with span("ZeRO-3 reduce", self.name):
            for flat in self.trainable:
                for parameter in flat.parameters:
                    flat.take(parameter)
                flat.start_reduce()

    def finish_reduce(self, over_replicas: bool) -> None:
        """Have this rank's part of the gradients in the shards (see `FlatShards`)."""
        for flat in self.trainable:
            flat.finish_reduce(over_replicas)


def split_into_units(model: nn.Module) -> dict[str, list[nn.Parameter]]:
    """Return the parameters of each of `model.blocks`, by name, and last all others, the root.

    Raises ValueError for a parameter of which it is unknown when it is needed.
    """
    names = {parameter: name for name, parameter in model.named_parameters()}
    root = root_modules(model)
    parts = [list(block.modules()) for block in model.blocks] + [root]
    homes: dict[nn.Parameter, int] = {}
    for index, modules in enumerate(parts):
        for parameter in (p for module in modules for p in module.parameters(recurse=False)):
            if homes.setdefault(parameter, index) != index:
                raise ValueError(
                    f"{names[parameter]} is shared by a block and another part of the "
                    "model: share within one block, or outside of the blocks"
                )
    for parameter in model.parameters(recurse=False):
        raise ValueError(
            f"{names[parameter]} is a parameter of the model itself: put it into a "
            "module of its own, whose call tells when it is needed"
        )
    units = [f"blocks.{index}" for index in range(len(model.blocks))] + ["root"]
    return {unit: [p for p in homes if homes[p] == index] for index, unit in enumerate(units)}


def root_modules(model: nn.Module) -> list[nn.Module]:
    """Return the modules with parameters of their own outside the blocks."""
    inside = {module for block in model.blocks for module in block.modules()}
    return [
        module
        for module in model.modules()
        if module not in inside and any(True for _ in module.parameters(recurse=False))
    ]
