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
Once a step, the loss; and the gradient of a tied embedding, between the first and the last stage.

Read in this order: schedules; pipeline_plan.script and split_blocks; PipelineParallel, Passage.

Reference: Huang et al. 2019, "GPipe" (section 2); Narayanan et al. 2021 (section 2.2).
"""

from collections.abc import Callable
from contextlib import ExitStack, contextmanager, nullcontext

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from minitron.comm.agreement import gathered
from minitron.comm.collectives import broadcast, exchange
from minitron.config import require
from minitron.measure.ledger import Ledger
from minitron.parallel.deferred import Deferral, apply_deferred_weight_gradients
from minitron.parallel.pipeline_plan import Message, forwards, script, split_blocks
from minitron.parallel.schedule_check import check
from minitron.parallel.schedules import Action, Schedule, one_forward_one_backward

MicroBatches = list[tuple[Tensor, Tensor]]
MakeSchedule = Callable[[int, int], Schedule]


class PipelineParallel:
    """A model of which this rank holds some stages; the names of its parameters stay.

    Not its `forward`: a step calls `run`, with all micro-batches.
    """

    data_part = (0, 1)

    def __init__(self, model: nn.Module, group: ProcessGroup, make_schedule: MakeSchedule):
        self.model, self.group, self.make_schedule = model, group, make_schedule
        self.rank, self.size = group.rank(), group.size()
        self.surroundings: Callable = nullcontext  # of each forward pass: autocast, say
        self.sequence_parts = 1  # by sequence parallelism, which sees 1/tp of x
        self.layout = schedule = self.schedule(self.size)
        self.stages = schedule.stages_of(self.rank)
        self.last_stage = schedule.num_stages - 1
        self.ends = schedule.rank_of[0], schedule.rank_of[self.last_stage]
        self.names = [name for name, _ in model.named_parameters()]  # of the whole model
        self.ranges = split_blocks(*count_costs(model, schedule.num_stages))
        self.deferral = Deferral()
        if any(action.kind == "W" for action in schedule.all_actions):
            self.deferral = apply_deferred_weight_gradients(model)
        self.keep_stages()

    def schedule(self, num_micro_batches: int) -> Schedule:
        """The schedule of a step; raises ConfigError if it cannot run on these ranks."""
        schedule = self.make_schedule(self.size, num_micro_batches)
        check(schedule)
        require(schedule.num_ranks == self.size, f"a schedule of {schedule.num_ranks} ranks on "
                f"{self.size}: make it for {self.size}")
        return schedule

    def keep_stages(self) -> None:
        """Start from rank 0's parameters, and let go of those of the other ranks' stages."""
        model = self.model
        for parameter in model.parameters():
            if not parameter.is_meta:
                broadcast(parameter.detach(), 0, self.group)

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

    def run(self, micro_batches: MicroBatches, sum_loss: Callable, divisor: float | Tensor):
        """Add the gradients of all micro-batches to `.grad`; returns the loss, on every rank.

        The loss is the sum of `sum_loss(logits, targets)` over the micro-batches, over `divisor`:
        not a mean of their means. Every rank needs all inputs and targets, (B, S) token ids.
        """
        passage = Passage(self, micro_batches, lambda *pair: sum_loss(*pair) / divisor)
        total = passage.run(self.schedule(len(micro_batches)))
        self.sum_tied_gradients()
        return self.from_last(total, torch.zeros((), dtype=passage.dtype, device=passage.device))

    @torch.no_grad()
    def evaluate(self, micro_batches: MicroBatches, read: Callable) -> Tensor | None:
        """The sum of `read(logits, targets)` over the micro-batches, on the last stage's rank."""
        return Passage(self, micro_batches, read).run(forwards(self.layout, len(micro_batches)))

    def shape_between(self, tokens: Tensor) -> tuple[int, int, int]:
        """The shape of what one stage sends to the next, and gets back."""
        return tokens.shape[0], tokens.shape[1] // self.sequence_parts, self.model.config.width

    def from_last(self, value: Tensor | None, like: Tensor) -> Tensor:
        """Bring a value from the last stage's rank to all; `like` has its shape."""
        value = like if value is None else value.to(like.dtype)
        broadcast(value, self.ends[1], self.group)
        return value

    def total(self, micro_batches: MicroBatches, sum_loss: Callable) -> Tensor:
        """The sum of the losses of all micro-batches, on every rank; without a gradient."""
        loss = self.evaluate(micro_batches, sum_loss)
        return self.from_last(loss, torch.zeros((), device=micro_batches[0][0].device))

    def predict(self, tokens: Tensor) -> Tensor:
        """The logits of `tokens` (B, S), on every rank; without a gradient."""
        logits = self.evaluate([(tokens, tokens)], lambda logits, targets: logits)
        shape = gathered(None if logits is None else logits.shape, self.group)[self.ends[1]]
        return self.from_last(logits, torch.empty(shape, device=tokens.device))

    # A tied embedding is on two ranks

    @property
    def tied(self) -> nn.Parameter | None:
        """This rank's copy of the tied embedding, if another rank has one as well."""
        first, last = self.ends
        if not self.model.config.tied_embedding or first == last or self.rank not in self.ends:
            return None
        return (self.model.token_embedding if self.rank == first else self.model.head).weight

    def sum_tied_gradients(self) -> None:
        """Give both copies of a tied embedding the sum of their gradients."""
        if self.tied is None or self.tied.grad is None:
            return
        peer = self.ends[1] if self.rank == self.ends[0] else self.ends[0]
        received = torch.empty_like(self.tied.grad)
        exchange(self.tied.grad.contiguous(), peer, received, peer, self.group)
        self.tied.grad += received


def count_costs(model: nn.Module, num_stages: int) -> tuple[list[float], int, float, float]:
    """The arguments of `split_blocks`, counted in parameters: what is held, and multiplied."""
    ends = (model.token_embedding, model.head)
    return [size_of(block) for block in model.blocks], num_stages, *map(size_of, ends)


def size_of(module: nn.Module) -> float:
    return float(sum(parameter.numel() for parameter in module.parameters()))


# One step


class Passage:
    """All micro-batches of a step on their way through this rank's stages.

    `read(logits, targets)` makes of the last stage's logits what the backward pass starts from.
    """

    def __init__(self, pipeline: PipelineParallel, micro_batches: MicroBatches, read: Callable):
        self.pipeline, self.model = pipeline, pipeline.model
        self.micro_batches, self.read = micro_batches, read
        parameter = next(self.model.parameters())
        self.dtype, self.device = parameter.dtype, parameter.device
        self.total: Tensor | None = None
        self.made: dict[Action, Tensor] = {}  # to be sent, or read by another stage of this rank
        self.arriving: dict[Action, tuple[dist.Work, Tensor]] = {}
        self.sent: list[tuple[dist.Work, Tensor]] = []
        self.kept: dict[tuple[int, int], tuple[Tensor | None, Tensor]] = {}  # for the backward pass
        self.deferred: dict[tuple[int, int], list[Callable[[], None]]] = {}

    def run(self, schedule: Schedule) -> Tensor | None:
        """Do what the schedule says; returns the sum of what `read` has made, on the last rank."""
        compute = {"F": self.forward, "B": self.backward, "I": self.backward, "W": self.weights}
        for step in script(schedule, self.pipeline.rank):
            if isinstance(step, Message):
                (self.send if step.is_send else self.receive)(step)
            else:
                with named(f"{step} stage {step.stage}"):
                    compute[step.kind](step)
        for work, _ in self.sent:
            work.wait()
        return self.total

    def forward(self, action: Action) -> None:
        """Take a micro-batch through one stage."""
        (tokens, targets), stage = self.micro_batches[action.micro_batch], action.stage
        blocks = self.pipeline.ranges[stage]
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = None if stage == 0 else self.take(action._replace(stage=stage - 1))
        with self.pipeline.surroundings():
            if x is None:
                out = self.model.embed(tokens, positions)
            else:
                out = x.requires_grad_(torch.is_grad_enabled())
            rotation = self.model.rotation(positions, out.dtype)
            out = self.model.run_blocks(self.model.blocks[blocks.start:blocks.stop], out, rotation)
            if stage == self.pipeline.last_stage:
                logits = self.model.predict(out)
                logits = logits.to(torch.promote_types(logits.dtype, torch.float32))

        if stage == self.pipeline.last_stage:
            out = self.read(logits, targets)
            self.total = out.detach() if self.total is None else self.total + out.detach()
        else:
            self.made[action] = out.detach()
        if torch.is_grad_enabled():
            self.kept[action.micro_batch, stage] = x, out

    def backward(self, action: Action) -> None:
        """Compute a stage's gradients; for I, put those of the weights off."""
        place = action.micro_batch, action.stage
        x, out = self.kept.pop(place)
        is_last = action.stage == self.pipeline.last_stage
        grad = None if is_last else self.take(action._replace(stage=action.stage + 1))
        if action.kind == "B":
            torch.autograd.backward(out, grad)
        else:
            with self.pipeline.deferral.collecting() as self.deferred[place]:
                torch.autograd.backward(out, grad)
        if x is not None:
            self.made[action] = x.grad

    def weights(self, action: Action) -> None:
        """Compute the gradients of the weights that I has put off."""
        for compute in self.deferred.pop((action.micro_batch, action.stage)):
            compute()

    # Messages

    def send(self, message: Message) -> None:
        tensor = self.made.pop(message.action).contiguous()
        work = dist.isend(tensor, group=self.pipeline.group, group_dst=message.peer)
        self.sent = [(work, t) for work, t in self.sent if not work.is_completed()]
        self.sent.append((work, tensor))  # a tensor must stay until it has left

    def receive(self, message: Message) -> None:
        tokens = self.micro_batches[message.action.micro_batch][0]
        shape = self.pipeline.shape_between(tokens)
        buffer = torch.empty(shape, dtype=self.dtype, device=self.device)
        work = dist.irecv(buffer, group=self.pipeline.group, group_src=message.peer)
        self.arriving[message.action] = work, buffer

    def take(self, action: Action) -> Tensor:
        """What another stage has made, as soon as it is here."""
        if action in self.made:
            return self.made.pop(action)
        work, tensor = self.arriving.pop(action)
        work.wait()
        return tensor


@contextmanager
def named(action: str):
    """Let the ledgers that listen call this stretch by its action."""
    with ExitStack() as stack:
        for mode in _get_current_dispatch_mode_stack():
            if isinstance(mode, Ledger):
                stack.enter_context(mode.phase(action))
        yield


def apply_pipeline_parallel(
    model: nn.Module, group: ProcessGroup, make_schedule: MakeSchedule = one_forward_one_backward
) -> PipelineParallel:
    """Leave each rank of `group` its stages of `model`, to run as `make_schedule(p, m)` says.

    Every rank starts from rank 0's parameters. Raises ConfigError for a schedule that cannot run,
    and if the model has fewer blocks than the schedule has stages.
    """
    return PipelineParallel(model, group, make_schedule)
