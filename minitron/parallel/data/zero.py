"""ZeRO stages 1 and 2: data parallelism in which each rank keeps a part of the training state.

Idea: N ranks that make the same update hold N copies of the optimizer state. In stage 1 each
keeps and updates one N-th of it, and of the weights, and gathers what the others have updated. It
then needs one N-th of the gradients too: a reduce-scatter delivers that, where data parallelism
has an all-reduce. Stage 2 frees the gradients as soon as they are reduced, and adds up shards.

Notation: N ranks; P trainable parameters; a shard is one N-th of a bucket of parameters, its end
filled up so that all are equal; a piece is what a shard holds of one parameter.

Each rank holds: all parameters and the activations of its part of the batch; 1/N of the optimizer
state, and of the float32 master weights if the parameters have 16 bits; gradients: all of them in
stage 1 until the last backward pass of a step, which frees them bucket by bucket as they are
reduced; 1/N and two buckets in stage 2.

Communication: per step a reduce-scatter of every gradient and an all-gather of every parameter,
P (N-1)/N elements sent and received per rank each: together as much as one all-reduce. Gradients
travel during the last backward pass; in stage 2 during each, unless they are to stay unsharded
meanwhile. At the start a broadcast of rank 0's parameters; with `clip` an all-reduce of one number.

Read in this order: flat.owned_ranges, flat.FlatShards, buckets.BucketQueue, Zero1, Zero2.

Reference: Rajbhandari et al. 2019, "ZeRO" (section 5.1, 5.2: the stages; 7.2.1: the volume).
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor, nn

from minitron.cost.sharding import BUCKET_BYTES
from minitron.parallel.data.buckets import BucketQueue, bucket_parameters
from minitron.parallel.data.ddp import missing_gradient_message
from minitron.parallel.data.sharded import ShardedDataParallel
from minitron.parallel.flat import FlatShards
from minitron.parallel.interface import Kind, Values
from minitron.pytorch.spans import span


class Zero1(ShardedDataParallel):
    """Stage 1: shard the optimizer's state; gradients add up unsharded until the last micro-batch.

    In the last backward pass of a step they travel bucket by bucket, `bucket_bytes` in one
    message, and are freed once they have arrived: the bucket on its way and the next are held.
    With `find_unused_parameters` a parameter without a gradient counts as zeros (see
    `DataParallel`). Raises ValueError if no parameter is trainable, but for a pipeline's stage.

    With `overlap_gather` a step ends before the parameters are gathered: that starts with the next
    forward pass, in which a block waits for what it reads. Every rank must run one, or none.
    Between steps read the parameters by `full_parameters`, not from the model.
    """

    max_in_flight = 1  # beside it one is filled

    def __init__(
        self,
        model: nn.Module,
        group: dist.ProcessGroup,
        bucket_bytes: int = BUCKET_BYTES,
        find_unused_parameters: bool = False,
        sync_every_micro_batch: bool = False,
        overlap_gather: bool = False,
        **options,
    ):
        super().__init__(model, group, sync_every_micro_batch=sync_every_micro_batch, **options)
        self.find_unused_parameters = find_unused_parameters
        self.names = {p: name for name, p in model.named_parameters() if p.requires_grad}
        if not self.names and not self.is_stage:
            raise ValueError("the model has 0 trainable parameters: requires_grad_(True) some")
        if self.data_part[1] > 1:
            self.broadcast_module_state()
        self.queues = [
            self.make_queue(stage, bucket_bytes) for stage in self.pipeline.stage_parameters()
        ]
        self.queue_of = {p: queue for queue in self.queues for p in queue.bucket_of}
        self.register_shards([bucket for queue in self.queues for bucket in queue.buckets])
        self.hooks = [p.register_post_accumulate_grad_hook(self.collect) for p in self.names]
        self.gathers: dict[FlatShards, dist.Work] = {}  # parameters on their way
        self.overlap_gather = overlap_gather
        self.is_stale = False  # the optimizer has updated shards that no gather has sent
        if overlap_gather:
            for module in model.modules():
                self.gather_before(module)

    def make_queue(self, stage: list[nn.Parameter], bucket_bytes: int) -> BucketQueue:
        """Make the buckets of one pipeline stage; a parameter of two stages has one of its own."""
        of_stage = set(stage)
        names = {p: name for p, name in self.names.items() if p in of_stage}
        shared = [p for p in self.pipeline.shared_parameters() if names.pop(p, None)]
        buckets = bucket_parameters(names, bucket_bytes) + [[p] for p in shared]
        return BucketQueue(
            [FlatShards(bucket, self.group, self.replicas) for bucket in buckets],
            self.max_in_flight,
            lambda bucket: bucket.finish_reduce(self.reduces_over_replicas),
        )

    # Gradients

    @contextmanager
    def pass_context(
        self,
        stage: int,
        kind: Kind,
        is_last: bool,
        incomplete: frozenset[nn.Parameter],
    ) -> Iterator[None]:
        """Reduce a stage's gradients in the pass that completes them, or in the last of a step."""
        with super().pass_context(stage, kind, is_last, incomplete):
            yield
            if kind in ("B", "W") and self.reduces:
                self.send_rest(self.queues[stage])
                if not is_last:
                    self.queues[stage].wait()

    def collect(self, parameter: nn.Parameter) -> None:
        """Take a gradient that is complete, or let it add up where it will be sent from."""
        if self.reduces and parameter not in self.incomplete:
            self.accept(parameter)
        elif not self.sync_every_micro_batch:
            self.queue_of[parameter].bucket_of[parameter].accumulate(parameter)

    def accept(self, parameter: nn.Parameter) -> None:
        """Move one more gradient into its bucket, and send the buckets whose turn has come."""
        queue = self.queue_of[parameter]
        if parameter in queue.ready:
            raise ValueError(
                f"{self.names[parameter]}: a second gradient before finish(): run every backward "
                "pass of a step but the last under no_sync()"
            )
        if parameter.grad is not None:
            self.used.add(parameter)
        queue.accept(parameter)

    def send_rest(self, queue: BucketQueue) -> None:
        """Start to reduce what is not on its way yet."""
        for bucket in queue.buckets:
            for parameter in bucket.parameters:
                if parameter not in queue.ready:
                    self.accept(parameter)

    def reduce(self) -> None:
        """Reduce what is not on its way yet, and wait for everything."""
        for queue in self.queues:
            self.send_rest(queue)
            queue.wait()

    def finish(self) -> None:
        """Leave in every piece's `.grad` the mean over the ranks; call it after the last backward.

        Raises ValueError if this rank has gradients for some parameters and none for others.
        """
        used = {p: p in self.used or p.grad is not None for p in self.names}
        missing = [self.names[p] for p, has_gradient in used.items() if not has_gradient]
        if 0 < len(missing) < len(used) and not self.find_unused_parameters:
            raise ValueError(
                missing_gradient_message(missing, len(used), self.group.rank())
                + ", else pass find_unused_parameters=True"
            )
        self.finish_gather()  # if nothing has used them
        self.reduce()
        unused = self.unused_on_all_ranks(used) if used and self.find_unused_parameters else set()
        for flat in self.flats:
            flat.set_gradients(unused)
        self.copy_buffers()
        self.used.clear()

    def discard(self) -> None:
        for queue in self.queues:
            if queue.ready:  # some are on their way: the other ranks wait for the rest of them
                self.send_rest(queue)
                queue.wait()
        super().discard()

    def unused_on_all_ranks(self, used: dict[nn.Parameter, bool]) -> set[nn.Parameter]:
        device = self.flats[0].full.device
        num_users = torch.tensor(list(used.values()), dtype=torch.int32, device=device)
        self.sum_over_ranks(num_users)
        return {p for p, count in zip(used, num_users.tolist(), strict=True) if count == 0}

    # Parameters

    def copy_to_parameters(self) -> None:
        """Bring the shards of all ranks into the parameters."""
        self.start_gather()
        self.finish_gather()

    def after_step(self) -> None:
        if self.overlap_gather:
            self.is_stale = True  # a step's first message, a small one, goes before the gathers
        else:
            self.copy_to_parameters()

    def start_gather(self) -> None:
        """Start to gather the parameters, those first that the forward pass needs first."""
        with span("ZeRO gather weights"):
            self.is_stale = False
            self.finish_gather()
            self.gathers = {flat: flat.unshard() for flat in reversed(self.flats)}

    def finish_gather(self) -> None:
        """Have all parameters there, before anything else reads or sets them or their pieces."""
        self.wait_for(self.flats)

    def wait_for(self, flats: Iterable[FlatShards]) -> None:
        """Have the parameters of these buckets there."""
        if self.is_stale:
            self.start_gather()
        for flat in flats if self.gathers else ():
            if flat in self.gathers:
                self.gathers.pop(flat).wait()

    def gather_before(self, module: nn.Module) -> None:
        """Have everything there that a module may read whenever its forward pass begins.

        That is all it contains, since some layers compute for their neighbors as well (with tensor
        parallelism, query for key and value). Only a model with a list of parts, which it calls
        one after the other, waits for its own parameters alone.
        """
        has_list = any(isinstance(each, nn.ModuleList | nn.Sequential) for each in module.modules())
        read = dict.fromkeys(
            self.flat_of[p] for p in module.parameters(recurse=not has_list) if p in self.flat_of
        )
        if read:
            self.hooks.append(module.register_forward_pre_hook(lambda *_: self.wait_for(read)))

    def full_parameters(self) -> dict[str, Tensor]:
        self.finish_gather()
        return super().full_parameters()

    def fill(self, value: Values) -> None:
        self.finish_gather()  # or what arrives would replace the values
        super().fill(value)

    def optimizer_tensor(self, parameter: nn.Parameter) -> Tensor:
        self.finish_gather()  # who loads a checkpoint sets the piece, which may be on its way
        return super().optimizer_tensor(parameter)

    def remove(self) -> None:
        self.finish_gather()
        super().remove()


class Zero2(Zero1):
    """Stage 2: free gradients as soon as they are reduced, and reduce them after each micro-batch.

    They add up in the shards: P (N-1)/N elements more for each further micro-batch, of which every
    rank must have as many. Without `sync_every_micro_batch` they add up unsharded under `no_sync`:
    P elements held as in stage 1, and sent once a step.
    """

    def __init__(
        self,
        model: nn.Module,
        group: dist.ProcessGroup,
        bucket_bytes: int = BUCKET_BYTES,
        sync_every_micro_batch: bool = True,
        **options,
    ):
        super().__init__(
            model, group, bucket_bytes, sync_every_micro_batch=sync_every_micro_batch, **options
        )

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Run a micro-batch that is not the last one."""
        with super().no_sync():
            yield
            if self.reduces:
                self.reduce()


def apply_zero1(model: nn.Module, group: dist.ProcessGroup, *args, **options) -> Zero1:
    """Let `model` train over `group` by stage 1; `args` may be `bucket_bytes`."""
    return Zero1(model, group, *args, **options)


def apply_zero2(model: nn.Module, group: dist.ProcessGroup, *args, **options) -> Zero2:
    """Let `model` train over `group` by stage 2; `args` may be `bucket_bytes`."""
    return Zero2(model, group, *args, **options)
