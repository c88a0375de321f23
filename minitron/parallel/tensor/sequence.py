"""Sequence parallelism: between the cut layers, each rank has its part of the sequence alone.

Idea: tensor parallelism leaves norms, dropout and the residual stream on every rank. They treat
each token by itself, so each rank can do it for 1/N of them. An all-reduce is a reduce-scatter and
an all-gather: put the norm between the two, and the wire carries no byte more.

Notation: N ranks, `tp` in shapes.

Each rank holds: parameters as in tensor parallelism; of all activations of a block 1/N, but with
`regather=False` the full inputs of the cut layers.

Communication: per block and micro-batch an all-gather of (B, S/tp, D) before attention and before
the feed-forward, and a reduce-scatter after each; in the backward pass the same in reverse:
8 B S D (N-1)/N elements sent and received per rank. As a layer keeps its part of the input alone
and gathers it again in the backward pass, 2 B S D (N-1)/N more; not with `regather=False`, which
keeps the whole. Embedding and head are the two halves of one more such pair. Once a step an
all-reduce of the gradients of the replicated parameters: norms, biases added to a sum, learned
positions. Each rank has seen its tokens alone.

Read in this order: SequenceParallelExchange, apply_sequence_parallel.

Reference: Korthikanti et al. 2022 (section 4.2.2). Not to be confused with context parallelism,
which divides the sequence inside attention too.
"""

from collections.abc import Callable
from dataclasses import replace

from torch import Tensor, nn
from torch.distributed import ProcessGroup

from minitron.comm import differentiable
from minitron.comm.differentiable import equal_parts, start_all_gather, start_reduce_scatter
from minitron.parallel.tensor.layers import AllReduceExchange, TensorParallel
from minitron.parallel.tensor.random_regions import OwnDropout

SEQUENCE = 1  # dim of (B, S, D)


class SequenceParallelExchange(AllReduceExchange):
    """The messages at the two ends of a cut region, if each rank has (B, S/tp, D) outside it."""

    def __init__(self, group: ProcessGroup, regathers: bool):
        super().__init__(group)
        self.regathers, self.num_parts = regathers, group.size()

    def start_gather(self, x: Tensor) -> Callable[[], Tensor]:
        return start_all_gather(x, self.group, SEQUENCE)

    def start_reduce(self, grad_partial: Tensor) -> Callable[[], Tensor]:
        return start_reduce_scatter(grad_partial, self.group, SEQUENCE)

    def reduce(self, out_partial: Tensor) -> Tensor:
        return differentiable.reduce_scatter(out_partial, self.group, SEQUENCE)


def apply_sequence_parallel(
    model: nn.Module, group: ProcessGroup, regather: bool = True
) -> TensorParallel:
    """Do what `apply_tensor_parallel` does, and divide the sequence between the cut layers.

    The sequence must divide by the number of ranks: the forward pass raises ValueError if not.
    """
    parallel = TensorParallel(model, SequenceParallelExchange(group, regather))
    for name, placement in parallel.placements.items():
        if placement.count == 1:  # it is replicated: every rank has used it for its own tokens
            parallel.placements[name] = replace(placement, is_partial=True)

    for module in model.modules():
        if type(module) is nn.Dropout:
            module.__class__, module.rank = OwnDropout, parallel.rank
    if model.config.family == "gpt":
        model.position_embedding.register_forward_pre_hook(
            lambda module, inputs: equal_parts(inputs[0], parallel.size, 0)[parallel.rank]
        )
    return parallel
