"""What a checkpoint would hold, without a disk: every tensor whole, on every rank."""

from math import prod

import torch
from torch import Tensor

from minitron.comm.agreement import SINGLE_RANK, all_gather_objects
from minitron.parallel.state import load_training_state, training_state


def saved(parallel, optimizer, group=SINGLE_RANK) -> dict[str, Tensor]:
    """What ranks would save, joined over them; of what several have, all are alike."""
    own = {
        name: (boxes.shape, boxes.dtype, {at: t.clone() for at, t in boxes.at.items()})
        for name, boxes in training_state(parallel, optimizer).items()
    }
    whole, counts = {}, {}
    for of_rank in all_gather_objects(own, group):
        for name, (shape, dtype, boxes) in of_rank.items():
            tensor = whole.setdefault(name, torch.full(shape, -1, dtype=dtype))
            count = counts.setdefault(name, torch.zeros(shape, dtype=torch.int))
            for offset, values in boxes.items():
                place = slices(offset, values)
                is_first = count[place] == 0
                assert is_first.all() or (not is_first.any() and torch.equal(tensor[place], values))
                tensor[place] = values
                count[place] += 1
    assert all(count.min() > 0 for count in counts.values() if prod(count.shape))
    return whole


def load(parallel, optimizer, state: dict[str, Tensor]) -> None:
    """Give a parallel model what it holds of such a state."""

    def read(wanted) -> None:
        for name, boxes in wanted.items():
            for offset, values in boxes.at.items():
                values.copy_(state[name][slices(offset, values)])

    shapes = {name: (t.shape, t.dtype) for name, t in state.items()}
    load_training_state(parallel, optimizer, shapes, read)


def slices(offset: tuple, values: Tensor) -> tuple:
    return tuple(slice(start, start + n) for start, n in zip(offset, values.shape, strict=True))


def optimizer_of(model, optimizer) -> dict[str, Tensor]:
    """The state of an optimizer of the whole model, by the same names."""
    names = {p: name for name, p in model.named_parameters()}
    return {
        f"optimizer.{names[p]}.{key}": value
        for p, state in optimizer.state.items()
        for key, value in state.items()
    }
