"""Several axes as one: what a step, a checkpoint and the oracle ask of a parallel model.

Along `tensor` the ranks compute each layer together, on the same samples; along `data` they hold
the same parts of it, and read other samples. Either may be None, with one rank along its axis.

Read in this order: Combined, from finish to clip; then how the parts are joined.
"""

from collections.abc import Callable
from contextlib import nullcontext

import torch
from torch import Tensor, nn

from minitron.comm.agreement import rank_and_size
from minitron.model.transformer import fill
from minitron.parallel.data_parallel import DataParallel
from minitron.parallel.fsdp import FullyShardedDataParallel
from minitron.parallel.shards import clip_pieces
from minitron.parallel.tensor_parallel import TensorParallel
from minitron.parallel.vocabulary_parallel import WholeLogits
from minitron.parallel.zero import Zero1


class Combined:
    """A step is that of `DataParallel`; the optimizer is one from `shard`."""

    def __init__(
        self,
        model: nn.Module,
        data: DataParallel | FullyShardedDataParallel | None,
        tensor: TensorParallel | None,
    ):
        self.model, self.data, self.tensor = model, data, tensor
        self.data_group = None if data is None else data.group
        self.data_part = rank_and_size(self.data_group)
        self.device = next(model.parameters()).device
        self.is_sharded = isinstance(data, (Zero1, FullyShardedDataParallel))
        self.pieces = data.pieces if self.is_sharded else {}
        if tensor is not None:
            self.summed_loss = tensor.summed_loss

    # A step

    def no_sync(self):
        """The context of every micro-batch but the last."""
        return nullcontext() if self.data is None else self.data.no_sync()

    def finish(self) -> None:
        """Leave in every `.grad` the mean over the samples; call it after the last backward."""
        if self.data is not None:
            self.data.finish()
        if self.tensor is not None:
            self.tensor.finish(lambda parameter: self.pieces.get(parameter, parameter).grad)

    def mean(self, tensor: Tensor) -> Tensor:
        """The mean of a small tensor over the ranks that read other samples; without a graph."""
        return tensor.detach() if self.data is None else self.data.mean(tensor)

    def clip(self, parameters: list[Tensor], max_norm: float) -> Tensor:
        """Scale gradients to a global norm of `max_norm` at most; returns the norm before, 0-d."""
        like = torch.zeros((), device=self.device)
        copies = {}
        groups = [self.data_group] if self.is_sharded else []
        if self.tensor is not None:
            groups.append(self.tensor.group)
            copies = {self.pieces.get(p, p): self.tensor.cuts[name].copies
                      for name, p in self.model.named_parameters()}
        return clip_pieces(parameters, max_norm, like, groups, copies)

    # The optimizer

    def shard(self, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        """Let `optimizer`, made for the model's parameters, update what this rank keeps."""
        names = {p: name for name, p in self.model.named_parameters()}
        self.optimizer = optimizer
        self.optimized = [names[p] for group in optimizer.param_groups for p in group["params"]]
        return self.data.shard(optimizer) if self.is_sharded else optimizer

    def make_optimizer(self, factory: Callable[[list], torch.optim.Optimizer]):
        """`factory(parameters)`, sharded: the oracle asks for it."""
        return self.shard(factory([p for p in self.model.parameters() if p.requires_grad]))

    def optimizer_state(self) -> dict:
        """The state of an optimizer of the whole model; every rank must call it."""
        owner = self.data if self.is_sharded else self.optimizer
        state = owner.optimizer_state() if self.is_sharded else owner.state_dict()
        return self.with_tensors(state, self.tensor.join) if self.tensor else state

    def load_optimizer_state(self, state: dict) -> None:
        """Take what this rank keeps of a whole state."""
        if self.tensor is not None:
            state = self.with_tensors(state, lambda cut, full: cut.copy_of(full))
        if self.is_sharded:
            self.data.load_optimizer_state(state)
        else:
            self.optimizer.load_state_dict(state)

    def with_tensors(self, state: dict, change: Callable) -> dict:
        """Change what has a number for each element; counts of steps, 0-d, stay."""
        changed = {
            number: {
                key: change(self.tensor.cuts[self.optimized[number]], value)
                if isinstance(value, Tensor) and value.dim() > 0 else value
                for key, value in values.items()
            }
            for number, values in state["state"].items()
        }
        return {**state, "state": changed}

    # The whole model

    def fill(self, value: Callable[[str, torch.Size], Tensor]) -> None:
        """Set every parameter to `value(name, full shape)`; one is held at a time."""
        if self.tensor is not None:
            value = self.tensor.parts_of(value)
        if isinstance(self.data, FullyShardedDataParallel):
            self.data.fill(value)
        else:
            fill(self.model, value)

    def full_parameters(self) -> dict[str, Tensor]:
        """Every parameter by name; every rank must call it."""
        if isinstance(self.data, FullyShardedDataParallel):
            parts = self.data.full_parameters()
        else:
            parts = {name: p.detach() for name, p in self.model.named_parameters()}
        return parts if self.tensor is None else self.tensor.whole(parts)

    def full_gradients(self) -> dict[str, Tensor | None]:
        """Every gradient after `finish` by name; every rank must call it."""
        if self.is_sharded:
            parts = self.data.full_gradients()
        else:
            parts = {n: p.grad for n, p in self.model.named_parameters() if p.requires_grad}
        return parts if self.tensor is None else self.tensor.whole(parts)

    def whole_model(self) -> nn.Module:
        """The model with logits (B, S, V), to draw tokens from."""
        if self.tensor is None:
            return self.model
        return WholeLogits(self.model, self.tensor.group, self.tensor.exchange.num_parts)
