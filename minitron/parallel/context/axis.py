"""Context parallelism: each rank has its part of the sequence, in every layer.

Idea: norms, linear layers and the loss treat each token by itself. Only attention needs the keys
and values of other tokens, and one of three functions brings them: `ring_attention`,
`gathered_attention` or `ulysses_attention`. Everything else must treat a rank's tokens as part of a
longer sequence: positions and targets are those of the whole sequence, and losses and gradients are
averaged over these ranks, as over ranks that read other samples.

Notation: N ranks, `cp` in shapes.

Each rank holds: all parameters, gradients and optimizer state, which data parallelism over the same
ranks may divide (`Grid`); of all activations 1/N.

Communication: inside attention, see the three functions. Once a step an all-reduce of every
gradient; together with data parallelism it is that one's, over all ranks of both. Once, at the
start, a broadcast of rank 0's parameters.

Read in this order: ContextParallel.own_tokens, mean, finish; apply_context_parallel.

Reference: Liu et al. 2023 (section 3); Llama team 2024 (section 3.3.2).
"""

from collections.abc import Callable
from functools import partial

from torch import Tensor, nn
from torch.distributed import ProcessGroup

from minitron.comm.collectives import all_reduce, broadcast_together
from minitron.comm.differentiable import start_all_gather
from minitron.config import require
from minitron.parallel.context.chunks import (
    ChunksOf,
    all_chunks,
    in_sequence_order,
    own_chunks,
    positions,
    zigzag,
)
from minitron.parallel.context.ring import ring_attention
from minitron.parallel.data.ddp import average_gradients
from minitron.parallel.one_device import OneDevice


class ContextParallel(OneDevice):
    """A model whose ranks all read the same samples, and compute a part of each sequence.

    The model's `forward` takes this rank's tokens (B, S/cp) and returns their logits.
    """

    def __init__(
        self, model: nn.Module, group: ProcessGroup, attention: Callable, chunks_of: ChunksOf
    ):
        super().__init__(model)
        dropout = model.config.dropout
        require(
            dropout == 0,
            f"model.dropout = {dropout} with context parallelism: context-parallel attention "
            "has no dropout",
            "set model.dropout to 0",
            field="model.dropout",
        )
        self.group, self.rank, self.size = group, group.rank(), group.size()
        self.chunks = chunks_of(self.rank, self.size)
        self.all_chunks = all_chunks(chunks_of, self.size)
        self.ranks_per_sample, self.sequence_parts = self.size, len(self.all_chunks)

        broadcast_together((p.detach() for p in model.parameters()), 0, group)
        model.positions_of = self.positions_of
        for block in model.blocks:
            block.attention.attention_fn = partial(attention, group=group, chunks_of=chunks_of)

    def positions_of(self, tokens: Tensor) -> Tensor:
        """Return where in their sequence this rank's tokens (B, S/cp) stand, (S/cp,)."""
        return positions(self.chunks, tokens.shape[1], tokens.device)

    def own_tokens(self, tokens: Tensor) -> Tensor:
        """Return this rank's part of inputs or targets (B, S), (B, S/cp).

        Of targets, so they are shifted before the cut: the last token of a chunk has its target on
        another rank.
        """
        return own_chunks(tokens, self.chunks, self.size)

    # A step

    def finish(self) -> None:
        average_gradients(self.model, self.group)

    def mean(self, tensor: Tensor) -> Tensor:
        return self.sum_over_sequence(tensor) / self.size

    # Without a gradient

    def sum_over_sequence(self, tensor: Tensor) -> Tensor:
        total = tensor.detach().clone()
        all_reduce(total, self.group)
        return total

    def full_logits(self, logits: Tensor) -> Tensor:
        """Gather logits (B, S/cp, V) to (B, S, V), in the sequence's order; without a gradient."""
        gathered = start_all_gather(logits.detach(), self.group, dim=1)()
        return in_sequence_order(gathered, self.all_chunks)


def apply_context_parallel(
    model: nn.Module,
    group: ProcessGroup,
    attention: Callable = ring_attention,
    chunks_of: ChunksOf = zigzag,
) -> ContextParallel:
    """Divide the sequences of `model` over `group`; every rank starts from rank 0's parameters.

    `attention` is `ring_attention` or `gathered_attention`, or `ulysses_attention` with
    `chunks_of=contiguous`. Parameters on the meta device stay there. Raises ConfigError for a
    model with dropout.
    """
    return ContextParallel(model, group, attention, chunks_of)
