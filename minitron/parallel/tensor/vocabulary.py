"""The two ends of a model whose vocabulary is divided over N ranks: embedding and loss.

Rank r has the tokens from r V/N on: their rows of the embedding, and their logits. A token is
known to one rank; what the others do not know adds up to nothing.

Reference: Shoeybi et al. 2019, "Megatron-LM" (section 3, input and output embedding).
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup

from minitron.comm.collectives import all_reduce, all_reduce_max
from minitron.parallel.one_device import IGNORED


class VocabularyParallelEmbedding(nn.Embedding):
    """Holds V/N rows, and looks up the tokens that are among them; `exchange` sums the rest.

    A token that no rank has, V or more, is zeros: to tell would mean to wait for the device.
    """

    def forward(self, tokens: Tensor) -> Tensor:
        rows, is_mine = local_rows(tokens, len(self.weight), self.rank)
        found = F.embedding(rows, self.weight)  # (B, S, D)
        out_partial = found.masked_fill(~is_mine[..., None], 0)
        return self.exchange.reduce(out_partial)


def divide_vocabulary(embedding: nn.Embedding, exchange, rank: int, size: int) -> None:
    """Let an embedding that holds its part of the rows look up the tokens that are among them."""
    embedding.__class__ = VocabularyParallelEmbedding  # it stays where it is, with its hooks
    embedding.exchange, embedding.rank = exchange, rank
    embedding.num_embeddings //= size


def vocabulary_parallel_cross_entropy(
    logits_shard: Tensor, targets: Tensor, group: ProcessGroup
) -> Tensor:
    """Return the cross-entropy of logits (B, S, V/N) and targets (B, S), summed, nats.

    The same 0-d sum on every rank. No rank sees the logits of another: three numbers a token cross
    the wire. A target of -100 does not count. Computed in float32 or better.
    """
    return CrossEntropy.apply(logits_shard, targets, group)


class CrossEntropy(torch.autograd.Function):
    """-log softmax of the target: log of the sum of all exponentials, less the target's logit."""

    @staticmethod
    def forward(ctx, logits_shard: Tensor, targets: Tensor, group: ProcessGroup) -> Tensor:
        precise = logits_shard.to(torch.promote_types(logits_shard.dtype, torch.float32))
        largest = precise.amax(-1)  # (B, S)
        all_reduce_max(largest, group)
        shifted = precise - largest[..., None]  # so that no exponential overflows

        is_counted = targets != IGNORED
        rows, is_mine = local_rows(targets, logits_shard.shape[-1], group.rank())
        is_mine &= is_counted
        target = shifted.gather(-1, rows[..., None]).squeeze(-1).where(is_mine, 0)
        softmax = shifted.exp_()
        sums = torch.stack([softmax.sum(-1), target])  # (2, B, S)
        all_reduce(sums, group)

        total, target = sums
        softmax /= total[..., None]
        ctx.save_for_backward(softmax, rows, is_mine, is_counted)
        ctx.dtype = logits_shard.dtype
        return (total.log() - target).where(is_counted, 0).sum()

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor):
        softmax, rows, is_mine, is_counted = ctx.saved_tensors
        grad_logits = softmax * (grad * is_counted)[..., None]
        grad_logits.scatter_add_(-1, rows[..., None], -(grad * is_mine)[..., None])
        return grad_logits.to(ctx.dtype), None, None


def local_rows(tokens: Tensor, num_rows: int, rank: int) -> tuple[Tensor, Tensor]:
    """Return each token's row on this rank, 0 if it is elsewhere; and whether it is here."""
    rows = tokens - rank * num_rows
    is_mine = (rows >= 0) & (rows < num_rows)
    return rows.where(is_mine, 0), is_mine
