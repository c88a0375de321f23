"""What a checkpoint holds of a model and its optimizer, at any layout: boxes of full tensors."""

from collections.abc import Callable
from itertools import chain

import torch
from torch import Tensor

from minitron.parallel.interface import ParallelModel
from minitron.parallel.parts import Chunks

Saved = dict[str, tuple[torch.Size, torch.dtype]]
"""The tensors of a checkpoint, by name: full shapes and dtypes."""


def training_state(parallel: ParallelModel, optimizer: torch.optim.Optimizer) -> dict[str, Chunks]:
    """Return what this rank saves: weights as the optimizer has them, and the optimizer state."""
    found = {}
    for name, part in parallel.parts():
        found[f"model.{name}"] = part.boxes(part.values)
        for key, value in optimizer.state.get(part.values, {}).items():
            if isinstance(value, Tensor):
                boxes = part.boxes(value) if value.dim() else Chunks.full(value)
                found[f"optimizer.{name}.{key}"] = boxes
    return found


def load_training_state(
    parallel: ParallelModel,
    optimizer: torch.optim.Optimizer,
    saved: Saved,
    read: Callable[[dict[str, Chunks]], None],
) -> None:
    """Let `read` fill what this rank holds, of a state with these names, shapes and dtypes."""
    wanted, states = {}, {}
    for name, part in parallel.parts():
        wanted[f"model.{name}"] = part.boxes(part.values)
        states[part.values] = state = {}
        for saved_name, (shape, dtype) in saved.items():
            place, _, key = saved_name.rpartition(".")
            if place == f"optimizer.{name}":
                like = part.values if shape else torch.empty(())
                state[key] = value = torch.empty_like(like, dtype=dtype, requires_grad=False)
                wanted[saved_name] = part.boxes(value) if shape else Chunks.full(value)
    read(wanted)

    groups = optimizer.state_dict()["param_groups"]
    order = chain(*(group["params"] for group in optimizer.param_groups))
    number = {piece: index for index, piece in enumerate(order)}
    by_number = {number[piece]: state for piece, state in states.items() if state}
    optimizer.load_state_dict({"state": by_number, "param_groups": groups})
    parallel.copy_to_parameters()
