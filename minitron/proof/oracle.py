"""The oracle: is it the same training?

    assert_same_training(apply_bucketed_data_parallel, 4)

Four ranks and one process train the same small model on the same samples, in float64, with SGD
and with AdamW. Losses, every gradient and every parameter must agree on every rank after every
step, to 1e-12 of a tensor's largest value. The ranks begin with different weights, and the last
batch is smaller than the others, so that what depends on equal ranks is found out.

SGD, because AdamW divides a gradient's scale away: a sum that should have been a mean changes
almost nothing. AdamW, because it moves a parameter that has a gradient of zero instead of none.

`apply(model, group)` changes the model and returns a `ParallelModel` (`parallel.interface`): the
oracle asks what a training step asks, and one device is the reference.

Read in this order: assert_same_training, trainings, train; then `difference.first_difference`.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn

from minitron.comm.agreement import SINGLE_RANK, Group
from minitron.comm.collectives import all_reduce, broadcast_together
from minitron.config import ModelConfig
from minitron.launch import run
from minitron.model.transformer import Transformer
from minitron.parallel.interface import MicroBatches, ParallelModel, SumLoss
from minitron.parallel.one_device import OneDevice
from minitron.proof.difference import Moment, Values, first_difference, hidden_by_adamw

VOCABULARY, SEQUENCE = 29, 7  # ids (B, 7) below 29

Apply = Callable[[nn.Module, dist.ProcessGroup], ParallelModel]

OPTIMIZERS = {
    "SGD": partial(torch.optim.SGD, lr=0.1),
    # A large eps: where the true gradient is zero (a key's bias), it would blow up rounding.
    "AdamW": partial(torch.optim.AdamW, lr=1e-3, eps=1e-6, weight_decay=0.1),
}


def small_model(family: str, **sizes) -> nn.Module:
    """Make a Transformer of odd sizes, one parameter frozen; GPT ties its embedding, Llama groups.

    `sizes` are fields of ModelConfig that it shall have instead.
    """
    if family == "gpt":
        config = ModelConfig("gpt", VOCABULARY, SEQUENCE, 2, 15, 3, 3, 21)
    else:
        config = ModelConfig("llama", VOCABULARY, SEQUENCE, 2, 18, 3, 1, 25, tied_embedding=False)
    model = Transformer(replace(config, **sizes))
    model.blocks[0].mlp_norm.weight.requires_grad_(False)
    return model


small_gpt = partial(small_model, "gpt")
small_llama = partial(small_model, "llama")


def assert_same_training(
    apply: Apply,
    num_ranks: int,
    make_model: Callable[[], nn.Module] = small_gpt,
    num_micro_batches: int = 1,
    batch_sizes: tuple[int, ...] | None = None,
    timeout: float = 30.0,
    vocabulary: int = VOCABULARY,
    sequence: int = SEQUENCE,
) -> None:
    """Assert that `num_ranks` ranks with `apply` train as one process does without.

    `make_model()` draws weights from PyTorch's generator and maps token ids (B, `sequence`) below
    `vocabulary` to logits (B, `sequence`, `vocabulary`). Each rank splits its part of a batch into
    `num_micro_batches` at most. `batch_sizes` are the sequences of each step over all ranks, by
    default 2N+1, 2N+1, 2N-1; with fewer than N a rank gets none. Raises AssertionError naming the
    first step, tensor and factor that differ and the likeliest cause.
    """
    sizes = batch_sizes or (2 * num_ranks + 1, 2 * num_ranks + 1, 2 * num_ranks - 1)
    arguments = make_model, sample_batches(sizes, vocabulary, sequence), num_micro_batches

    reference = trainings(SINGLE_RANK, undivided, *arguments)
    by_rank = run(trainings, num_ranks, apply, *arguments, timeout=timeout)

    for optimizer, expected in reference.items():
        found = first_difference(expected, [records[optimizer] for records in by_rank])
        if found is not None:
            hidden = hidden_by_adamw(reference, by_rank) if optimizer == "SGD" else ""
            raise AssertionError(f"{found} with {optimizer} on {num_ranks} ranks{hidden}")


def undivided(model: nn.Module, group: Group) -> ParallelModel:
    """Return the reference: a model that is all on one device."""
    return OneDevice(model)


def after_backward(function: Callable[[nn.Module, dist.ProcessGroup], None]) -> Apply:
    """Make an `apply` of a function that averages the gradients after the backward pass."""

    def apply(model: nn.Module, group: dist.ProcessGroup) -> ParallelModel:
        broadcast_together((p.detach() for p in model.parameters()), 0, group)
        return AfterBackward(model, group, function)

    return apply


class AfterBackward(OneDevice):
    """A model that every rank holds in full, whose gradients `function` averages."""

    def __init__(
        self,
        model: nn.Module,
        group: dist.ProcessGroup,
        function: Callable[[nn.Module, dist.ProcessGroup], None],
    ):
        super().__init__(model)
        self.group, self.function = group, function
        self.data_part = group.rank(), group.size()

    def finish(self) -> None:
        self.function(self.model, self.group)

    def mean(self, tensor: Tensor) -> Tensor:
        total = tensor.detach().clone()
        all_reduce(total, self.group)
        return total / self.group.size()


def sample_batches(
    sizes: tuple[int, ...], vocabulary: int = VOCABULARY, sequence: int = SEQUENCE
) -> list[Tensor]:
    """Draw token ids (B, S+1), one tensor a step."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(size, sequence + 1) for size in sizes]
    return [torch.randint(vocabulary, shape, generator=generator) for shape in shapes]


# Training, and recording it


def trainings(
    group: Group,
    apply: Apply,
    make_model: Callable[[], nn.Module],
    batches: list[Tensor],
    num_micro_batches: int,
    optimizers: Iterable[str] | None = None,
) -> dict[str, list[Moment]]:
    """Train with each optimizer, on each of many ranks or in one process; returns the records.

    `optimizers` are names of OPTIMIZERS, by default all.
    """
    records = {}
    for name in optimizers or OPTIMIZERS:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(group.rank())  # other weights on each rank: those of rank 0 must win
            model = make_model().double()
        parallel = apply(model, group)
        assert isinstance(parallel, ParallelModel), (
            f"apply returned a {type(parallel).__name__}: derive it from OneDevice, and answer "
            "differently where it differs"
        )
        records[name] = list(train(parallel, OPTIMIZERS[name], batches, num_micro_batches))
    return records


def train(
    parallel: ParallelModel, factory: Callable, batches: list[Tensor], num_micro_batches: int
) -> Iterator[Moment]:
    """Take one step per batch, and record every number there is at each moment."""
    optimizer = parallel.make_optimizer(factory)
    yield Moment(0, "initial", as_arrays(parallel.full_parameters()))
    for step, tokens in enumerate(batches):
        optimizer.zero_grad()
        loss = mean_loss(parallel, tokens, num_micro_batches)
        yield Moment(step, "loss", as_arrays({"model": loss}))
        yield Moment(step, "kept", as_arrays(parallel.full_parameters()))
        yield Moment(step, "gradient", as_arrays(parallel.full_gradients()))
        optimizer.step()
        yield Moment(step, "updated", as_arrays(parallel.full_parameters()))


def mean_loss(parallel: ParallelModel, tokens: Tensor, num_micro_batches: int) -> Tensor:
    """Run this rank's part of a batch, forward and backward; returns the batch's mean loss.

    The ranks' gradients are averaged, so each divides by the tokens of all ranks over their
    number: a mean of means would favor the tokens of a rank that has few.
    """
    index, count = parallel.data_part
    divisor = torch.tensor(tokens[:, 1:].numel() / count, dtype=torch.float64)
    part = tokens[index::count]
    micro_batches = part.tensor_split(min(num_micro_batches, len(part))) if len(part) else []
    pairs = [(each[:, :-1], each[:, 1:]) for each in micro_batches]

    def accumulate(micro_batches: MicroBatches, divisor: Tensor, sum_loss: SumLoss) -> Tensor:
        [(inputs, targets)] = micro_batches
        loss = sum_loss(parallel.model(inputs), targets) / divisor
        loss.backward()
        return loss.detach()

    return parallel.mean(parallel.forward_backward(accumulate, pairs, divisor))


def as_arrays(tensors: dict[str, Tensor | None]) -> Values:
    return {
        name: None if tensor is None else tensor.detach().cpu().numpy().copy()
        for name, tensor in tensors.items()
    }
