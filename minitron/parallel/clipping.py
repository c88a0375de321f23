"""Clip gradients to a global norm, where the ranks hold different gradients."""

from collections.abc import Mapping
from types import MappingProxyType

import torch.distributed as dist
from torch import Tensor, nn

from minitron.comm.collectives import all_reduce


def clip_pieces(
    pieces: list[Tensor],
    max_norm: float,
    like: Tensor,
    groups: list[dist.ProcessGroup],
    copies: Mapping[Tensor, int] = MappingProxyType({}),
) -> Tensor:
    """Scale the gradients of all ranks' pieces to a global norm of `max_norm` at most.

    `groups` are those over which the pieces are divided; a piece that several ranks hold has its
    number of `copies`. Returns the norm before, 0-d. nn.utils.clip_grad_norm_ would take the norm
    of this rank's pieces, and every rank would scale by a factor of its own.
    """
    gradients: dict[int, list[Tensor]] = {}
    for piece in pieces:
        if piece.grad is not None:
            gradients.setdefault(copies.get(piece, 1), []).append(piece.grad)
    # A rank without a gradient takes part too, with a zero of the same dtype and device.
    square = like.new_zeros(())
    for count, alike in gradients.items():
        square += nn.utils.get_total_norm(alike) ** 2 / count
    for group in groups:
        all_reduce(square, group)
    norm = square.sqrt()
    nn.utils.clip_grads_with_norm_(pieces, max_norm, norm)
    return norm
