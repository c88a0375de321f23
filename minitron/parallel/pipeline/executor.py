"""One step of a pipeline's rank: micro-batches pass through its stages, messages come and go.

Read in this order: ScheduleExecutor.run, forward, backward; then its messages.
"""

from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from minitron.model.linear import WeightGradients, accumulate_all
from minitron.parallel.interface import MicroBatches
from minitron.parallel.pipeline.plan import Message, as_full_backward
from minitron.parallel.pipeline.schedules import Action
from minitron.pytorch.spans import span


class ScheduleExecutor:
    """All micro-batches of a step on their way through this rank's stages.

    `pipeline` is the `PipelineParallel` that holds the stages; `read(logits, targets)` makes of the
    last stage's logits what the backward pass starts from.
    """

    def __init__(self, pipeline, micro_batches: MicroBatches, read: Callable):
        self.pipeline, self.model = pipeline, pipeline.model
        self.micro_batches, self.read = micro_batches, read
        parameter = next(self.model.parameters())
        self.dtype, self.device = parameter.dtype, parameter.device
        self.total: Tensor | None = None
        self.num_done: Counter[int] = Counter()  # backward passes, by stage
        self.finished: list[int] = []  # stages whose gradients are those of the whole step
        self.made: dict[Action, Tensor] = {}  # to be sent, or read by another stage of this rank
        self.arriving: dict[Action, tuple[dist.Work, Tensor]] = {}
        self.leaving: dict[tuple[int, str], tuple[dist.Work, Tensor]] = {}  # one each way and rank
        self.kept: dict[tuple[int, int], tuple] = {}  # x, and where the backward pass begins
        self.deferred: dict[tuple[int, int], list[WeightGradients]] = {}

    def run(self, steps: list[Action | Message]) -> Tensor | None:
        """Execute a rank's program; on the last rank, return the sum of what `read` returned."""
        compute = {"F": self.forward, "B": self.backward, "I": self.backward, "W": self.weights}
        with self.pipeline.casting(False):
            for step in steps:
                if isinstance(step, Message):
                    (self.send if step.is_send else self.receive)(step)
                else:
                    action = f"{step} stage {step.stage}"
                    with span("pipeline", action, phase=action), self.pass_context(step):
                        compute[step.kind](step)
        self.complete_shared_gradients()
        for work, _ in self.leaving.values():
            work.wait()
        self.leaving.clear()
        return self.total

    def pass_context(self, action: Action) -> AbstractContextManager:
        """Return the context in which the data axis wants a pass to run.

        Where a rank has both ends of the model, what they share is the first stage's: a tied
        embedding, and a unit of ZeRO-3. It is complete when both are.
        """
        pipeline, stage = self.pipeline, action.stage
        if action.kind in ("B", "W"):  # which complete a micro-batch's gradients
            self.num_done[stage] += 1
            if self.num_done[stage] == len(self.micro_batches):
                self.finished.append(stage)
        needed = {stage} | ({pipeline.last_stage} if pipeline.shares_ends and stage == 0 else set())
        incomplete = pipeline.tied_within_rank if stage == pipeline.last_stage else frozenset()
        return pipeline.data.pass_context(
            pipeline.stages.index(stage), action.kind, needed.issubset(self.finished), incomplete
        )

    def complete_shared_gradients(self) -> None:
        """Let the data axis send what both ends share, if the last stage has finished last."""
        ends = [stage for stage in self.finished if stage in (0, self.pipeline.last_stage)]
        if self.pipeline.shares_ends and ends[-1:] == [self.pipeline.last_stage]:
            with self.pipeline.data.pass_context(0, "W", True, frozenset()):
                pass

    def forward(self, action: Action) -> None:
        """Take a micro-batch through one stage."""
        (tokens, targets), stage = self.micro_batches[action.micro_batch], action.stage
        blocks = self.pipeline.ranges[stage]
        positions = self.model.positions_of(tokens)
        x = None if stage == 0 else self.take(action._replace(stage=stage - 1))
        with self.pipeline.casting(True):
            if x is None:
                out = self.model.embed(tokens, positions)
            else:
                out = x.requires_grad_(torch.is_grad_enabled())
            rotation = self.model.rotation(positions, out.dtype)
            out = self.model.run_blocks(
                self.model.blocks[blocks.start : blocks.stop], out, rotation
            )
            if stage == self.pipeline.last_stage:
                logits = self.model.predict(out)
                logits = logits.to(torch.promote_types(logits.dtype, torch.float32))

        if stage == self.pipeline.last_stage:
            out = self.read(logits, targets)
            self.total = out.detach() if self.total is None else self.total + out.detach()
        else:
            self.made[action] = out.detach()
        if torch.is_grad_enabled():
            # The edge of the graph instead of `out`: its values are needed no more once sent.
            edge = get_gradient_edge(out) if out.requires_grad else None  # all up to here is frozen
            self.kept[action.micro_batch, stage] = x, edge

    def backward(self, action: Action) -> None:
        """Compute a stage's gradients; for I, defer those of the weights."""
        place = action.micro_batch, action.stage
        x, edge = self.kept.pop(place)
        is_last = action.stage == self.pipeline.last_stage
        grad = None if is_last else self.take(Action("B", place[0], action.stage + 1))
        deferral = self.pipeline.deferral
        with deferral.collecting() if action.kind == "I" else nullcontext([]) as later:
            if edge is not None:
                torch.autograd.backward(edge, grad)
        self.deferred[place] = later
        if x is not None:
            self.made[Action("B", *place)] = x.grad

    def weights(self, action: Action) -> None:
        """Compute the gradients of the weights that I has deferred."""
        accumulate_all(self.deferred.pop((action.micro_batch, action.stage)))

    # Messages

    def send(self, message: Message) -> None:
        """Start to send; a tensor stays until it has left, and the next one waits for that."""
        action = as_full_backward(message.action)
        tensor = self.made.pop(action).contiguous()
        way = message.peer, action.kind
        if way in self.leaving:
            self.leaving.pop(way)[0].wait()
        work = dist.isend(tensor, group=self.pipeline.group, group_dst=message.peer)
        self.leaving[way] = work, tensor

    def receive(self, message: Message) -> None:
        tokens = self.micro_batches[message.action.micro_batch][0]
        shape = self.pipeline.shape_between(tokens)
        buffer = torch.empty(shape, dtype=self.dtype, device=self.device)
        work = dist.irecv(buffer, group=self.pipeline.group, group_src=message.peer)
        self.arriving[as_full_backward(message.action)] = work, buffer

    def take(self, action: Action) -> Tensor:
        """Return what another stage has made, as soon as it is here."""
        if action in self.made:
            return self.made.pop(action)
        work, tensor = self.arriving.pop(action)
        work.wait()
        return tensor
