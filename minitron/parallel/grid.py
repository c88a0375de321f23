"""Several axes as one: what a step, a checkpoint and the oracle ask of a parallel model.

Along `tensor` the ranks compute each layer together, along `pipeline` one after the other, on the
same samples; along `data` they hold the same parts, and read other samples. Each may be None, with
one rank along its axis.

Read in this order: Combined, from finish to clip; then how the parts are joined.
"""

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from itertools import chain

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from minitron.comm.agreement import gathered, rank_and_size
from minitron.model.transformer import global_name, global_parameters
from minitron.parallel.data.ddp import DataParallel
from minitron.parallel.data.fsdp import FullyShardedDataParallel
from minitron.parallel.data.shards import clip_pieces
from minitron.parallel.data.zero import Zero1
from minitron.parallel.parts import Boxes, Part
from minitron.parallel.pipeline.stages import MicroBatches, PipelineParallel
from minitron.parallel.tensor.layers import TensorParallel
from minitron.precision import MasterWeights


class Combined:
    """A step is that of `DataParallel`; the optimizer is one from `shard`."""

    def __init__(
        self,
        model: nn.Module,
        data: DataParallel | FullyShardedDataParallel | None,
        tensor: TensorParallel | None,
        pipeline: PipelineParallel | None = None,
        masters: MasterWeights | None = None,
    ):
        self.model, self.data, self.tensor, self.pipeline = model, data, tensor, pipeline
        self.masters = masters
        self.data_group = None if data is None else data.group
        self.data_part = rank_and_size(self.data_group)
        self.device = next(model.parameters()).device
        self.is_sharded = isinstance(data, (Zero1, FullyShardedDataParallel))
        self.keeper = data if self.is_sharded else masters  # of what is optimized
        self.pieces = {} if self.keeper is None else self.keeper.pieces
        if tensor is not None:
            self.summed_loss = tensor.summed_loss
        if pipeline is not None:
            if getattr(data, "sync_every_micro_batch", False):
                raise ValueError("in a pipeline gradients are whole until all micro-batches are "
                                 "through: pass sync_every_micro_batch=False")
            self.run = self.run_pipeline
            pipeline.sequence_parts = 1 if tensor is None else tensor.exchange.num_parts

    # A step

    def no_sync(self):
        """The context of every micro-batch but the last."""
        return nullcontext() if self.data is None else self.data.no_sync()

    def run_pipeline(self, micro_batches: MicroBatches, sum_loss: Callable, divisor) -> Tensor:
        """All micro-batches of a step, forward and backward; gradients travel in `finish`."""
        with self.no_sync():  # also until the tied embedding's copies have the same gradient
            return self.pipeline.run(micro_batches, sum_loss, divisor)

    def finish(self) -> None:
        """Leave in every `.grad` the mean over the samples; call it after the last backward."""
        if self.data is not None:
            self.data.finish()
        if self.masters is not None:
            self.masters.hand_over()
        if self.tensor is not None:
            self.tensor.finish(lambda parameter: self.pieces.get(parameter, parameter).grad)

    def mean(self, tensor: Tensor) -> Tensor:
        """The mean of a small tensor over the ranks that read other samples; without a graph."""
        return tensor.detach() if self.data is None else self.data.mean(tensor)

    def clip(self, parameters: list[Tensor], max_norm: float) -> Tensor:
        """Scale gradients to a global norm of `max_norm` at most; returns the norm before, 0-d."""
        dtype = torch.promote_types(next(self.model.parameters()).dtype, torch.float32)
        like = torch.zeros((), dtype=dtype, device=self.device)
        groups = [self.data_group] if self.is_sharded else []
        groups += [axis.group for axis in (self.tensor, self.pipeline) if axis is not None]
        copies = {self.pieces.get(p, p): self.num_copies(name, p)
                  for name, p in global_parameters(self.model)}
        return clip_pieces(parameters, max_norm, like, groups, copies)

    def num_copies(self, name: str, parameter: nn.Parameter) -> int:
        """How many ranks have the same gradient, of those that read the same samples."""
        of_layer = 1 if self.tensor is None else self.tensor.cuts[name].copies
        is_tied = self.pipeline is not None and parameter is self.pipeline.tied
        return of_layer * (2 if is_tied else 1)

    # The optimizer

    def shard(self, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        """Let `optimizer`, made for the model's parameters, update what this rank keeps."""
        self.optimizer = optimizer
        if self.keeper is not None:
            self.keeper.shard(optimizer)
        if self.pipeline is not None:
            optimizer.register_step_post_hook(self.pipeline.share_tied_weight)
        return optimizer

    def make_optimizer(self, factory: Callable[[list], torch.optim.Optimizer]):
        """`factory(parameters)`, sharded: the oracle asks for it."""
        return self.shard(factory([p for p in self.model.parameters() if p.requires_grad]))

    # Saving and loading at any layout

    def parts(self) -> Iterator[tuple[str, Part]]:
        """What this rank keeps of each parameter, by its global name."""
        owned = getattr(self.keeper, "owned", {})
        for name, parameter in global_parameters(self.model):
            block, own = parameter.shape, owned.get(parameter, range(parameter.numel()))
            whole, origin = block, (0,) * len(block)
            if self.tensor is not None:
                cut = self.tensor.cuts[name]
                whole, origin = cut.full_shape(block), cut.origin(block)
            if own:
                values = self.pieces.get(parameter, parameter)
                yield name, Part(tuple(whole), tuple(block), origin, own, values)

    def state(self) -> dict[str, Boxes]:
        """Weights, as the optimizer has them, and the optimizer's state: what this rank keeps."""
        found = {}
        for name, part in self.parts():
            if self.has_copy_of(name):
                continue
            found[f"model.{name}"] = part.boxes(part.values)
            for key, value in self.optimizer.state.get(part.values, {}).items():
                if isinstance(value, Tensor):
                    boxes = part.boxes(value) if value.dim() else Boxes.whole(value)
                    found[f"optimizer.{name}.{key}"] = boxes
        return found

    def has_copy_of(self, name: str) -> bool:
        """Whether this is the last stage, with a copy of the first one's embedding."""
        if self.pipeline is None or self.pipeline.group.rank() == 0:
            return False
        return name == "token_embedding.weight"

    def load_state(
        self, saved: dict[str, tuple[torch.Size, torch.dtype]],
        read: Callable[[dict[str, Boxes]], None],
    ) -> None:
        """Let `read` fill what this rank keeps, of a state with these names, shapes and dtypes."""
        wanted, states = {}, {}
        for name, part in self.parts():
            wanted[f"model.{name}"] = part.boxes(part.values)
            states[part.values] = state = {}
            for saved_name, (shape, dtype) in saved.items():
                place, _, key = saved_name.rpartition(".")
                if place == f"optimizer.{name}":
                    like = part.values if shape else torch.empty(())
                    state[key] = value = torch.empty_like(like, dtype=dtype, requires_grad=False)
                    wanted[saved_name] = part.boxes(value) if shape else Boxes.whole(value)
        read(wanted)

        own = self.optimizer.state_dict()["param_groups"]
        order = chain(*(group["params"] for group in self.optimizer.param_groups))
        number = {piece: index for index, piece in enumerate(order)}
        by_number = {number[piece]: state for piece, state in states.items() if state}
        self.optimizer.load_state_dict({"state": by_number, "param_groups": own})
        if self.keeper is not None:
            self.keeper.bring_back()

    # The whole model

    @torch.no_grad()
    def fill(self, value: Callable[[str, torch.Size], Tensor]) -> None:
        """Set every parameter to `value(name, full shape)`; one is held at a time."""
        if self.tensor is not None:
            value = self.tensor.parts_of(value)
        if isinstance(self.data, FullyShardedDataParallel):
            self.data.fill(value)
            return
        for name, parameter in global_parameters(self.model):
            full = value(name, parameter.shape)
            parameter.copy_(full)
            if self.keeper is not None:
                self.keeper.keep(parameter, full)

    def full_parameters(self) -> dict[str, Tensor]:
        """Every parameter by name; every rank must call it."""
        if isinstance(self.data, FullyShardedDataParallel):
            parts = self.data.full_parameters()
        else:
            parts = {name: p.detach() for name, p in global_parameters(self.model)}
        return self.whole(parts)

    def full_gradients(self) -> dict[str, Tensor | None]:
        """Every gradient after `finish` by name; every rank must call it."""
        if self.keeper is not None:
            parts = self.keeper.full_gradients()
        else:
            parts = {n: p.grad for n, p in global_parameters(self.model) if p.requires_grad}
        return self.whole(parts)

    def whole(self, parts: dict[str, Tensor | None]) -> dict[str, Tensor | None]:
        parts = {global_name(self.model, name): part for name, part in parts.items()}
        parts = parts if self.tensor is None else self.tensor.whole(parts)
        if self.pipeline is None:
            return parts
        own = {name: part if part is None else part.to("cpu", copy=True)
               for name, part in parts.items()}
        by_stage = gathered(own, self.pipeline.group)
        return {name: value for part in reversed(by_stage)  # a tied one is the first stage's
                for name, value in part.items()}

    def whole_model(self) -> nn.Module:
        """The model with logits (B, S, V), to draw tokens from."""
        if self.tensor is None and self.pipeline is None:
            return self.model
        return WholeLogits(self.model, self.tensor, self.pipeline)


class WholeLogits(nn.Module):
    """A model in parts as one from tokens (B, S) to logits (B, S, V), on every rank."""

    def __init__(
        self, model: nn.Module, tensor: TensorParallel | None, pipeline: PipelineParallel | None
    ):
        super().__init__()
        self.model, self.config = model, model.config
        self.tensor, self.pipeline = tensor, pipeline
        self.train(model.training)

    def forward(self, tokens: Tensor) -> Tensor:
        S = tokens.shape[1]
        if self.tensor is not None:  # fill up to equal parts: it changes no earlier logits
            tokens = F.pad(tokens, (0, -S % self.tensor.exchange.num_parts))
        if self.pipeline is not None:
            logits = self.pipeline.predict(tokens)
        else:
            logits = self.model(tokens)
        return logits[:, :S] if self.tensor is None else self.tensor.full_logits(logits[:, :S])
