"""Pipeline parallelism: each rank holds some of the layers, and micro-batches pass through.

Idea: a stage needs nothing of the others but its input, and in the backward pass the gradient of
its output. With one batch only one rank would work at a time; so the batch is cut into
micro-batches, and a schedule says in which order each rank works on which.

Notation: p ranks; m micro-batches; v stages on each rank. x is a stage's input (B, S, D).

Each rank holds: the parameters of its stages, the embedding on the first, norm and head on the
last; the activations of the micro-batches that have gone forward and not yet back.

Communication: per micro-batch a message of (B, S, D) to the next stage and one of its gradient
back, over each of the p v - 1 boundaries between ranks. Messages are not waited for by who sends
them. Both ends post them in the one order that all ranks read from the schedule, so that no valid
schedule can come to a standstill, also where messages between two ranks keep their order (NCCL).
Once a step, the loss; and of a tied embedding the gradient, both ways between the first and the
last stage.

Read in this order: schedules; plan.rank_program and split_blocks; PipelineParallel; executor.

Reference: Huang et al. 2019, "GPipe" (section 2); Narayanan et al. 2021 (section 2.2).
"""

from collections.abc import Callable
from contextlib import nullcontext
from math import ceil

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from minitron.comm.agreement import all_gather_objects, all_gather_tensors
from minitron.comm.collectives import broadcast, broadcast_together, exchange
from minitron.config import require
from minitron.model.linear import NoDeferral, apply_deferred_weight_gradients
from minitron.parallel.interface import Accumulate, MicroBatches, OwnParts, SumLoss
from minitron.parallel.one_device import OneDevice
from minitron.parallel.pipeline.block_costs import Count, count_parameters
from minitron.parallel.pipeline.executor import ScheduleExecutor
from minitron.parallel.pipeline.plan import Message, forwards, rank_program, split_blocks
from minitron.parallel.pipeline.schedule_check import check, peak_activations
from minitron.parallel.pipeline.schedules import Action, Schedule, one_forward_one_backward
from minitron.parallel.placement import WHOLE, Placement

MakeSchedule = Callable[[int, int], Schedule]


class PipelineParallel(OneDevice):
    """A model of which this rank holds some stages; the names of its parameters stay.

    Not its `forward`: a step calls `run`, with all micro-batches.
    """

    def __init__(
        self,
        model: nn.Module,
        group: ProcessGroup,
        make_schedule: MakeSchedule,
        count: Count,
        sequence_parts: int,
        autocast: torch.dtype | None,
    ):
        super().__init__(model)
        self.group, self.make_schedule = group, make_schedule
        self.rank, self.size = group.rank(), group.size()
        self.programs: dict[int, list[Action | Message]] = {}  # by the number of micro-batches
        self.sequence_parts, self.autocast = sequence_parts, autocast
        # Where the stages are does not depend on m; and every schedule runs 2p micro-batches.
        self.layout = schedule = make_schedule(self.size, 2 * self.size)
        check(schedule)
        require(
            schedule.num_ranks == self.size,
            f"a schedule of {schedule.num_ranks} ranks on {self.size}",
            f"make it for {self.size}",
        )
        self.stages = schedule.stages_of(self.rank)
        self.last_stage = schedule.num_stages - 1
        self.ends = schedule.rank_of[0], schedule.rank_of[self.last_stage]
        self.names = [name for name, _ in model.named_parameters()]  # of the whole model
        costs, first, last = count(model)
        self.ranges = split_blocks(costs, schedule.num_stages, first, last)
        self.deferral = NoDeferral()
        if any(action.kind == "W" for action in schedule.all_actions):
            self.deferral = apply_deferred_weight_gradients(model)
        self.connect_data(OneDevice(model))
        self.keep_stages()

    def stage_parameters(self) -> list[list[nn.Parameter]]:
        """Return the parameters of each of this rank's stages; a tied one is the first stage's."""
        model, stages, found = self.model, [], set()
        ends = {"blocks", "final_norm", "head"}
        for stage in self.stages:
            modules = list(model.blocks[index] for index in self.ranges[stage])
            if stage == 0:
                modules = [m for name, m in model.named_children() if name not in ends] + modules
            if stage == self.last_stage:
                modules += [model.final_norm, model.head]
            own = dict.fromkeys(p for m in modules for p in m.parameters() if p not in found)
            stages.append(list(own))
            found.update(own)
        return stages

    def shared_parameters(self) -> list[nn.Parameter]:
        return [] if self.tied is None else [self.tied]

    def require_runnable(self, num_micro_batches: int) -> None:
        """Raise ConfigError if the schedule cannot run so many micro-batches."""
        self.program(num_micro_batches)

    def num_in_flight(self, num_micro_batches: int) -> int:
        """Return the most micro-batches whose activations this rank holds at once."""
        schedule = self.make_schedule(self.size, num_micro_batches)
        return ceil(peak_activations(schedule)[self.rank] / len(self.stages))

    def program(self, num_micro_batches: int) -> list[Action | Message]:
        """List what this rank does in a step; raises ConfigError for a schedule that cannot run."""
        m = num_micro_batches
        if m not in self.programs:
            schedule = self.make_schedule(self.size, m)
            check(schedule)
            require(
                schedule.num_micro_batches == m,
                f"a schedule of {schedule.num_micro_batches} "
                f"micro-batches in a step of {m}: make_schedule(num_ranks, {m}) must have {m}",
            )
            require(
                schedule.rank_of == self.layout.rank_of,
                "the schedule puts stages on ranks as "
                f"{schedule.rank_of}, the model is laid out as {self.layout.rank_of}: a stage "
                "must stay on its rank",
            )
            self.programs[m] = rank_program(schedule, self.rank)
        return self.programs[m]

    def keep_stages(self) -> None:
        """Start from rank 0's parameters, and let go of those of the other ranks' stages."""
        model = self.model
        broadcast_together((p.detach() for p in model.parameters()), 0, self.group)

        own = {index for stage in self.stages for index in self.ranges[stage]}
        for index in range(len(model.blocks)):
            if index not in own:
                model.blocks[index] = nn.Identity()
        if 0 not in self.stages:
            model.token_embedding = nn.Identity()
            if model.config.family == "gpt":
                model.position_embedding = nn.Identity()
        if self.last_stage not in self.stages:
            model.final_norm, model.head = nn.Identity(), nn.Identity()

    def run_passes(
        self,
        accumulate: Accumulate,
        micro_batches: MicroBatches,
        own_parts: OwnParts,
        divisor: Tensor,
        sum_loss: SumLoss,
    ) -> Tensor:
        """Run the schedule, in which micro-batches overlap."""
        if not micro_batches:
            return torch.zeros_like(divisor)
        return self.run(own_parts(micro_batches), sum_loss, divisor)

    def run(self, micro_batches: MicroBatches, sum_loss: SumLoss, divisor: float | Tensor):
        """Add the gradients of all micro-batches to `.grad`; returns the loss, on every rank.

        The loss is the sum of `sum_loss(logits, targets)` over the micro-batches, over `divisor`:
        not a mean of their means. Every rank needs all inputs and targets, (B, S) token ids.
        """
        executor = ScheduleExecutor(self, micro_batches, lambda *pair: sum_loss(*pair) / divisor)
        total = executor.run(self.program(len(micro_batches)))
        dtype = torch.promote_types(executor.dtype, torch.float32)
        return self.from_last(total, torch.zeros((), dtype=dtype, device=executor.device))

    @torch.no_grad()
    def evaluate(self, micro_batches: MicroBatches, read: Callable) -> Tensor | None:
        """Sum `read(logits, targets)` over the micro-batches, on the last stage's rank."""
        executor = ScheduleExecutor(self, micro_batches, read)
        return executor.run(rank_program(forwards(self.layout, len(micro_batches)), self.rank))

    def shape_between(self, tokens: Tensor) -> tuple[int, int, int]:
        """Return the shape of what one stage sends to the next, and gets back."""
        return tokens.shape[0], tokens.shape[1] // self.sequence_parts, self.model.config.width

    def from_last(self, value: Tensor | None, like: Tensor) -> Tensor:
        """Bring a value from the last stage's rank to all; `like` has its shape."""
        value = like if value is None else value.to(like.dtype)
        broadcast(value, self.ends[1], self.group)
        return value

    def run_forward_passes(
        self,
        forward: Callable[[Tensor], Tensor],
        micro_batches: MicroBatches,
        sum_loss: SumLoss,
    ) -> Tensor:
        """Return the summed loss of all micro-batches, on every rank; without a gradient."""
        loss = self.evaluate(micro_batches, sum_loss)
        first = next(self.model.parameters())
        dtype = torch.promote_types(first.dtype, torch.float32)
        return self.from_last(loss, first.new_zeros((), dtype=dtype))

    def predict(self, tokens: Tensor) -> Tensor:
        """Return the logits of `tokens` (B, S), on every rank; without a gradient."""
        logits = self.evaluate([(tokens, tokens)], lambda logits, targets: logits)
        known = None if logits is None else (logits.shape, logits.dtype)
        shape, dtype = all_gather_objects(known, self.group)[self.ends[1]]
        return self.from_last(logits, torch.empty(shape, dtype=dtype, device=tokens.device))

    def casting(self, enabled: bool):
        """Return the autocast context, if any: off around a step, which keeps its cast weights."""
        if self.autocast is None:
            return nullcontext()
        device = next(self.model.parameters()).device
        return torch.autocast(device.type, self.autocast, enabled=enabled)

    # The full model

    def all_gather_shards(self, blocks: dict[str, Tensor | None]) -> dict[str, Tensor | None]:
        """Join the parameters of all stages, on the CPU."""
        by_stage = all_gather_tensors(blocks, self.group)
        return {
            name: value
            for stage in reversed(by_stage)  # a tied one is the first stage's
            for name, value in stage.items()
        }

    def norm_groups(self) -> list[ProcessGroup]:
        return [self.group]

    # A tied embedding is on two ranks

    def placement(self, name: str) -> Placement:
        is_on_two = self.tied is not None and name == "token_embedding.weight"
        return Placement(copies=2, is_partial=True) if is_on_two else WHOLE

    @property
    def tied(self) -> nn.Parameter | None:
        """This rank's copy of the tied embedding, if another rank has one as well."""
        first, last = self.ends
        if not self.model.config.tied_embedding or first == last or self.rank not in self.ends:
            return None
        return (self.model.token_embedding if self.rank == first else self.model.head).weight

    @property
    def tied_within_rank(self) -> frozenset[nn.Parameter]:
        """The tied embedding, if it belongs to two stages of this rank."""
        is_shared = self.shares_ends and self.model.config.tied_embedding
        return frozenset({self.model.head.weight} if is_shared else ())

    @property
    def shares_ends(self) -> bool:
        """Whether the first and the last stage are two, and both on this rank."""
        return self.ends == (self.rank, self.rank) and self.last_stage > 0

    def finish(self) -> None:
        self.sum_partial_gradients(lambda parameter: parameter.grad)

    def sum_partial_gradients(self, gradient: Callable[[nn.Parameter], Tensor | None]) -> None:
        """Give both copies of a tied embedding the sum of their gradients.

        Of this rank's shard of them, if data parallelism has divided them. The sum has the same
        bits on both, and so has what an optimizer makes of it.
        """
        own = None if self.tied is None else gradient(self.tied)
        if own is None or own.numel() == 0:  # there are more ranks than elements, on both sides
            return
        peer = self.ends[1] if self.rank == self.ends[0] else self.ends[0]
        received = torch.empty_like(own)
        exchange(own.contiguous(), peer, received, peer, self.group)
        own += received


def apply_pipeline_parallel(
    model: nn.Module,
    group: ProcessGroup,
    make_schedule: MakeSchedule = one_forward_one_backward,
    count: Count = count_parameters,
    sequence_parts: int = 1,
    autocast: torch.dtype | None = None,
) -> PipelineParallel:
    """Leave each rank of `group` its stages of `model`, to run as `make_schedule(p, m)` says.

    The stages cost about the same, as `count` counts. Every rank starts from rank 0's parameters.
    Under sequence parallelism this rank sees one of `sequence_parts` of what stages exchange; with
    `autocast`, forward passes compute in that dtype.
    Raises ConfigError for a schedule that cannot run, and for fewer blocks than stages.
    """
    return PipelineParallel(model, group, make_schedule, count, sequence_parts, autocast)
