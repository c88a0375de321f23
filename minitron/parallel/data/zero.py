"""ZeRO stages 1 and 2: data parallelism in which each rank keeps a part of the training state.

Idea: N ranks that make the same update hold N copies of the optimizer state. In stage 1 each
keeps and updates one N-th of it, and of the weights, and gathers what the others have updated. It
then needs one N-th of the gradients too: a reduce-scatter delivers that, where data parallelism
has an all-reduce. Stage 2 reduces the gradients during the backward pass and frees them at once.

Notation: N ranks; P trainable parameters; a shard is one N-th of a bucket of parameters, its end
filled up so that all are equal; a piece is what a shard holds of one parameter.

Each rank holds: all parameters and the activations of its part of the batch; 1/N of the optimizer
state, and of the float32 master weights if the parameters have 16 bits; gradients: all of them
until `finish` in stage 1, 1/N and two buckets in stage 2.

Communication: per step a reduce-scatter of every gradient and an all-gather of every parameter,
P (N-1)/N elements sent and received per rank each: together as much as one all-reduce. Stage 2
reduces after each micro-batch, unless it is told to hold gradients whole meanwhile. At the
start a broadcast of rank 0's parameters; with `clip` an all-reduce of one number.

Read in this order: shards.owned_ranges, shards.Bucket, Zero1, Zero2.

Reference: Rajbhandari et al. 2019, "ZeRO" (section 5.1, 5.2: the stages; 7.2.1: the volume).
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor, nn

from minitron.comm.collectives import all_reduce, broadcast
from minitron.cost.sharding import BUCKET_BYTES
from minitron.model.transformer import global_parameters
from minitron.parallel.clipping import clip_pieces
from minitron.parallel.data.ddp import DataParallel, no_gradient
from minitron.parallel.data.shards import (
    Bucket,
    also_discard,
    gather_pieces,
    share_out,
)
from minitron.parallel.interface import Values
from minitron.pytorch.spans import span


class Zero1(DataParallel):
    """Stage 1: shard the optimizer's state; gradients stay whole until `finish`.

    A step is that of `DataParallel`; the optimizer must have been given to `shard`, and the
    gradients are then not in the parameters' `.grad` but in those of its pieces. For optimizers
    that treat every element alike: SGD, Adam and most others, but not LBFGS, Adafactor or Muon.

    `bucket_bytes` are the bytes of gradients that travel in one message. Raises ValueError if no
    parameter is trainable.
    """

    def __init__(self, model: nn.Module, group, bucket_bytes: int = BUCKET_BYTES, **options):
        super().__init__(model, group, **options)
        self.names = {p: name for name, p in model.named_parameters() if p.requires_grad}
        if not self.names:
            raise ValueError("the model has 0 trainable parameters: requires_grad_(True) some")
        self.buckets = [Bucket(bucket, group) for bucket in share_out(self.names, bucket_bytes)]
        self.bucket_of = {p: bucket for bucket in self.buckets for p in bucket.parameters}
        self.pieces = {p: t for bucket in self.buckets for p, t in bucket.pieces.items()}
        self.owned_elements = {p: bucket.owned.get(p, range(0))
                               for p, bucket in self.bucket_of.items()}
        self.ready: set[nn.Parameter] = set()  # in a bucket, since the last `reduce`
        self.used: set[nn.Parameter] = set()  # had a gradient on this rank, since `finish`
        self.num_sent = 0

    # Gradients

    def accept(self, parameter: nn.Parameter) -> None:
        """Move one more gradient into its bucket, and send the buckets whose turn has come."""
        if parameter in self.ready:
            raise ValueError(
                f"{self.names[parameter]}: a second gradient before finish(): run every backward "
                "pass of a step but the last under no_sync()"
            )
        self.ready.add(parameter)
        if parameter.grad is not None:
            self.used.add(parameter)
        self.bucket_of[parameter].take(parameter)
        # A bucket waits for those before it: all ranks must send in the same order.
        while self.num_sent < len(self.buckets) \
                and self.ready.issuperset(self.buckets[self.num_sent].parameters):
            self.send_next()

    def send_next(self) -> None:
        """Start to reduce one bucket; free the one before it, so that two are held at most."""
        if self.num_sent > 0:
            self.buckets[self.num_sent - 1].finish_reduce()
        with span("ZeRO reduce bucket", self.num_sent):
            self.buckets[self.num_sent].start_reduce()
        self.num_sent += 1

    def reduce(self) -> None:
        """Reduce what is not on its way yet, and wait for everything."""
        for bucket in self.buckets:
            for parameter in bucket.parameters:
                if parameter not in self.ready:
                    self.accept(parameter)
        self.buckets[-1].finish_reduce()
        self.ready, self.num_sent = set(), 0

    def finish(self) -> None:
        """Leave in every piece's `.grad` the mean over the ranks; call it after the last backward.

        Raises ValueError if this rank has gradients for some parameters and none for others.
        """
        used = {p: p in self.used or p.grad is not None for p in self.names}
        missing = [self.names[p] for p, has_gradient in used.items() if not has_gradient]
        if 0 < len(missing) < len(used) and not self.find_unused_parameters:
            raise ValueError(no_gradient(missing, len(used), self.group.rank())
                             + ", else pass find_unused_parameters=True")
        self.reduce()
        unused = self.unused_on_all_ranks(used) if self.find_unused_parameters else set()
        for bucket in self.buckets:
            bucket.hand_over(unused)
        for buffer in self.buffers:
            broadcast(buffer, 0, self.group)
        self.used = set()

    def discard(self) -> None:
        """Forget all gradients since the last step; every rank must call it."""
        if self.ready:  # some are on their way: the other ranks wait for the rest of them
            self.reduce()
        for bucket in self.buckets:
            bucket.grad_shard = None
        for parameter in self.names:
            parameter.grad = None
        self.used = set()

    def unused_on_all_ranks(self, used: dict[nn.Parameter, bool]) -> set[nn.Parameter]:
        device = self.buckets[0].flat.device
        num_users = torch.tensor(list(used.values()), dtype=torch.int32, device=device)
        all_reduce(num_users, self.group)
        return {p for p, count in zip(used, num_users.tolist(), strict=True) if count == 0}

    def clip(self, parameters: list[Tensor], max_norm: float) -> Tensor:
        """Scale gradients to a global norm of `max_norm` at most; returns the norm before, 0-d."""
        return clip_pieces(parameters, max_norm, self.buckets[0].master, [self.group])

    # The optimizer

    def shard(self, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        """Let `optimizer`, made for the parameters, update this rank's pieces alone; returns it.

        Its groups and their options stay; it has not taken a step yet. Every `step` ends with the
        all-gather; `zero_grad` discards what `finish` has not handed over as well.
        """
        for group in optimizer.param_groups:
            group["params"] = [self.pieces[p] for p in group["params"] if p in self.pieces]
        also_discard(optimizer, self.discard)
        optimizer.register_step_pre_hook(self.require_finished)
        optimizer.register_step_post_hook(self.unshard_parameters)
        return optimizer

    def require_finished(self, *_) -> None:
        if self.used or any(p.grad is not None for p in self.names):
            raise ValueError("optimizer.step() before finish(): the gradients are not complete")

    def unshard_parameters(self, *_) -> None:
        """Bring the shards of all ranks into the parameters."""
        with span("ZeRO gather weights"):
            for work in [bucket.unshard() for bucket in self.buckets]:
                work.wait()

    def copy_to_parameters(self) -> None:
        """Bring the shards of all ranks into the parameters."""
        self.unshard_parameters()

    def optimized(self, parameter: nn.Parameter) -> Tensor:
        return self.pieces.get(parameter, parameter)

    def owned(self, parameter: nn.Parameter) -> range:
        return self.owned_elements.get(parameter, super().owned(parameter))

    def norm_groups(self) -> list[dist.ProcessGroup]:
        return [self.group]

    @torch.no_grad()
    def fill(self, value: Values) -> None:
        """Set every parameter, and this rank's pieces of it, before it is rounded."""
        for name, parameter in global_parameters(self.model):
            full = value(name, parameter.shape)
            parameter.copy_(full)
            if parameter in self.pieces:
                own = self.owned(parameter)
                self.pieces[parameter].copy_(full.flatten()[own.start:own.stop])

    # Whole again, whatever the number of ranks

    def full_gradients(self) -> dict[str, Tensor | None]:
        """Every gradient after `finish`, by name, on the CPU; every rank must call it."""
        own = {p: piece.grad for p, piece in self.pieces.items()}
        whole = gather_pieces(own, self.buckets, self.group)
        return {name: whole[p] for p, name in self.names.items()}


class Zero2(Zero1):
    """Stage 2: reduce gradients bucket by bucket as the backward pass makes them, and free them.

    They are reduced after each micro-batch, at the end of `no_sync` too, and add up in the shards:
    P (N-1)/N elements more for each further micro-batch, of which every rank must have as many.
    Without `sync_every_micro_batch` they add up whole under `no_sync`, P elements held as in
    stage 1, and travel once a step.
    """

    def __init__(
        self, model: nn.Module, group: dist.ProcessGroup, bucket_bytes: int = BUCKET_BYTES,
        sync_every_micro_batch: bool = True, **options,
    ):
        super().__init__(model, group, bucket_bytes, **options)
        self.sync_every_micro_batch = sync_every_micro_batch
        self.hooks = [p.register_post_accumulate_grad_hook(self.collect) for p in self.names]

    def collect(self, parameter: nn.Parameter) -> None:
        """Take a gradient that is complete."""
        if self.synchronising:
            self.accept(parameter)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Run a micro-batch that is not the last one."""
        if not self.sync_every_micro_batch:
            with super().no_sync():
                yield
            return
        yield
        self.reduce()


def apply_zero1(model: nn.Module, group: dist.ProcessGroup, *args, **options) -> Zero1:
    """Let `model` train over `group` by stage 1; `args` may be `bucket_bytes`."""
    return Zero1(model, group, *args, **options)


def apply_zero2(model: nn.Module, group: dist.ProcessGroup, *args, **options) -> Zero2:
    """Let `model` train over `group` by stage 2; `args` may be `bucket_bytes`."""
    return Zero2(model, group, *args, **options)
