"""Tensor parallelism: a layer too large for one rank is cut inside, and N ranks compute it.

Idea: Y = f(X A) B. Cut A by columns and B by rows. Each rank computes its columns of X A, applies
f to them, and multiplies them by its rows of B: one of N partial sums of Y, which an all-reduce
adds up. f needs no column of another rank: it is GELU, or attention, head by head.

Notation: N ranks, `tp` in shapes; G key-value heads. Y_partial is a partial sum.

Each rank holds: 1/N of the matrices and of the vocabulary; the norms, the biases that are added to
a sum, and learned positions; of the activations 1/N inside the cut layers, all between them. If
G < N, N/G ranks hold the same key-value head.

Communication: per block and micro-batch an all-reduce of (B, S, D) after attention and one after
the feed-forward; in the backward pass one of the gradient of the input of each. Together
8 B S D (N-1)/N elements sent and received per rank. For the embedding one more in the forward
pass, for the head one in the backward pass, for the loss three numbers a token. Once a step the
gradients of shared key-value heads. At the start a broadcast of rank 0's parameters.

Read in this order: cuts.PLAN, model.linear, AllReduceExchange, FusedColumnLinears,
RowParallelLinear, TensorParallel; then vocabulary, random_regions.

Reference: Shoeybi et al. 2019, "Megatron-LM" (section 3); Narayanan et al. 2021 (section 3.2: the
volume).
"""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from minitron.comm import differentiable
from minitron.comm.collectives import all_gather_together, all_reduce, broadcast_together
from minitron.comm.differentiable import start_all_reduce
from minitron.model.linear import Linear, NoExchange, set_linear_hooks
from minitron.model.transformer import global_parameters
from minitron.parallel.one_device import OneDevice
from minitron.parallel.placement import Placement
from minitron.parallel.tensor.cuts import plan_placements, planned
from minitron.parallel.tensor.random_regions import attention_with_local_rng
from minitron.parallel.tensor.vocabulary import (
    divide_vocabulary,
    vocabulary_parallel_cross_entropy,
)


class AllReduceExchange(NoExchange):
    """The exchange at the ends of a cut region, if all ranks have all activations around it.

    Where the region begins, each rank already has the full input (B, S, D); in the backward pass
    it has a partial sum of that input's gradient.
    """

    num_parts = 1  # of the sequence

    def __init__(self, group: ProcessGroup):
        self.group = group

    def start_reduce(self, grad_partial: Tensor) -> Callable[[], Tensor]:
        return start_all_reduce(grad_partial, self.group)

    def reduce(self, out_partial: Tensor) -> Tensor:
        """Sum the ranks' partial outputs, at the end of a cut region; differentiable."""
        return differentiable.all_reduce(out_partial, self.group)


class FusedColumnLinears:
    """Column-parallel layers of one input: the first to be called computes for all.

    So each of them must be called for each x, once; and all must have been given the same parts.
    """

    def __init__(self, layers: list[nn.Linear]):
        self.layers = layers
        self.x: Tensor | None = None
        self.outputs: dict[nn.Linear, Tensor] = {}

    def output(self, layer: nn.Linear, x: Tensor) -> Tensor:
        """Return the output (B, S, F/tp) of `layer` for `x` (B, S, D)."""
        if x is not self.x or layer not in self.outputs:
            parameters = [p for each in self.layers for p in (each.weight, each.bias)]
            outputs = layer.parts.compute(x, *parameters)
            self.x, self.outputs = x, dict(zip(self.layers, outputs, strict=True))

        output = self.outputs.pop(layer)
        if not self.outputs:
            self.x = None  # hold nothing until the next forward pass
        return output


class ColumnParallelLinear(Linear):
    """Holds weight (F/tp, D) and bias (F/tp,); `fused` with others that read its input."""

    def forward(self, x: Tensor) -> Tensor:
        return self.fused.output(self, x)


class RowParallelLinear(Linear):
    """Holds weight (D, F/tp) and the full bias (D,); reads (B, S, F/tp), a cut layer's output."""

    def forward(self, x: Tensor) -> Tensor:
        (out_partial,) = self.parts.compute(x, self.weight, None)
        out = self.exchange.reduce(out_partial)
        # after the sum, or the bias is added tp times
        return out if self.bias is None else out + self.bias.to(out.dtype)


class TensorParallel(OneDevice):
    """A model whose layers are cut; its code and the names of its parameters stay.

    Its logits are (B, S, V/tp): use `summed_loss`, or `full_logits`. Call `finish` after the last
    backward pass of a step. All ranks read the same samples.
    """

    divides_vocabulary = True

    def __init__(self, model: nn.Module, exchange: AllReduceExchange):
        super().__init__(model)
        self.group, self.exchange = exchange.group, exchange
        self.rank, self.size = self.group.rank(), self.group.size()
        self.placements = plan_placements(model, self.rank, self.size)
        self.shard_parameters()
        self.parallelize_layers()

    def shard_parameters(self) -> None:
        """Leave this rank its part of every parameter."""
        broadcast_together((p.detach() for p in self.model.parameters()), 0, self.group)
        for name, parameter in global_parameters(self.model):
            parameter.data = self.placements[name].local_copy(parameter.detach())

    def parallelize_layers(self) -> None:
        readers: dict[str, list[nn.Linear]] = {}  # of the same input: neighbors in the model
        for path, kind in planned(self.model):
            layer = self.model.get_submodule(path)
            if kind == "columns":
                set_linear_hooks(layer, ColumnParallelLinear, exchange=self.exchange)
                readers.setdefault(path.rpartition(".")[0], []).append(layer)
            elif kind == "rows":
                set_linear_hooks(layer, RowParallelLinear)
                layer.exchange = self.exchange
            else:
                divide_vocabulary(layer, self.exchange, self.rank, self.size)
            if kind != "vocabulary":
                layer.out_features, layer.in_features = layer.weight.shape
        for layers in readers.values():
            fused = FusedColumnLinears(layers)
            for layer in layers:
                layer.fused = fused
        for block in self.model.blocks:
            core = block.attention.attention_fn
            block.attention.attention_fn = partial(attention_with_local_rng, core, self.rank)

    # A step

    def summed_loss(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Return the cross-entropy of logits (B, S, V/tp), summed over counted targets, nats."""
        return vocabulary_parallel_cross_entropy(logits, targets, self.group)

    def full_logits(self, logits: Tensor) -> Tensor:
        """Gather logits (B, S, V/tp) to (B, S, V), to draw tokens from; without a gradient."""
        return differentiable.start_all_gather(logits.detach(), self.group, logits.dim() - 1)()

    def finish(self) -> None:
        """Sum the gradients of which the ranks have partial sums."""
        self.sum_partial_gradients(lambda parameter: parameter.grad)

    def sum_partial_gradients(self, gradient: Callable[[nn.Parameter], Tensor | None]) -> None:
        """Sum the gradients of which the ranks have partial sums, a message for each dtype."""
        shared: dict[torch.dtype, list[tuple[Placement, Tensor]]] = {}
        for name, parameter in global_parameters(self.model):
            placement, grad = self.placements[name], gradient(parameter)
            if placement.is_partial and grad is not None:
                shared.setdefault(grad.dtype, []).append((placement, grad))
        for partial_sums in shared.values():
            self.sum_in_one_message(partial_sums)

    def sum_in_one_message(self, partial_sums: list[tuple[Placement, Tensor]]) -> None:
        """Sum gradients over the ranks that hold the same part, in place.

        Each travels as all of its parts, zeros but for this rank's: so one group is enough.
        """
        sizes = [placement.count * grad.numel() for placement, grad in partial_sums]
        flat = partial_sums[0][1].new_zeros(sum(sizes))
        own = [
            parts.view(placement.count, *grad.shape)[placement.index]
            for parts, (placement, grad) in zip(flat.split(sizes), partial_sums, strict=True)
        ]
        for part, (_, grad) in zip(own, partial_sums, strict=True):
            part.copy_(grad)
        all_reduce(flat, self.group)
        for part, (_, grad) in zip(own, partial_sums, strict=True):
            grad.copy_(part)

    # The full model

    @property
    def sequence_parts(self) -> int:
        """In how many parts the sequence is divided between the layers."""
        return self.exchange.num_parts

    def norm_groups(self) -> list[ProcessGroup]:
        return [self.group]

    def placement(self, name: str) -> Placement:
        return self.placements[name]

    def all_gather_shards(self, blocks: dict[str, Tensor | None]) -> dict[str, Tensor | None]:
        """Join what each rank has for its parts of the parameters, by name.

        On the CPU, since a device may not have room for all of them.
        """
        cut = {
            name: block
            for name, block in blocks.items()
            if block is not None and self.placements[name].count > 1
        }
        own = (block.to(self.device) for block in cut.values())
        full = {
            name: self.placements[name].join(list(parts.unbind())).cpu()
            for name, parts in zip(cut, all_gather_together(own, self.group), strict=True)
        }
        return blocks | full

    @property
    def device(self) -> torch.device:
        return next(self.model.parameters()).device


def apply_tensor_parallel(model: nn.Module, group: ProcessGroup) -> TensorParallel:
    """Cut the layers of `model` over `group` as `cuts.PLAN` says; every rank starts from rank 0's.

    Parameters on the meta device stay there. Raises ConfigError for sizes of the model that do not
    divide by the number of ranks.
    """
    return TensorParallel(model, AllReduceExchange(group))
