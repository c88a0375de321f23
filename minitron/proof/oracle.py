"""The oracle: is it the same training?

    assert_same_training(apply_bucketed_data_parallel, 4)

Four ranks and one process train the same small model on the same samples, in float64, with SGD
and with AdamW. Losses, every gradient and every parameter must agree on every rank after every
step, to 1e-12 of a tensor's largest value. The ranks begin with different weights, and the last
batch is smaller than the others, so that what depends on equal ranks is found out.

SGD, because AdamW divides a gradient's scale away: a sum that should have been a mean changes
almost nothing. AdamW, because it moves a parameter that has a gradient of zero instead of none.

`apply(model, group)` changes the model and returns an object, or None. What the object offers of
the methods and attributes of `Whole` is used in place of them.

Read in this order: assert_same_training, train, Whole; then `difference.first_difference`.
"""

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from minitron.comm.agreement import rank_and_size
from minitron.comm.collectives import all_reduce, broadcast
from minitron.config import ModelConfig
from minitron.launch import run
from minitron.model.transformer import Transformer
from minitron.proof.difference import Moment, Values, first_difference, hidden_by_adamw

VOCABULARY, SEQUENCE = 29, 7  # ids (B, 7) below 29

Apply = Callable[[nn.Module, dist.ProcessGroup], object]

QUESTIONS = (
    "data_part", "no_sync", "summed_loss", "run", "finish", "mean", "make_optimizer",
    "full_gradients", "full_parameters",
)
OPTIMIZERS = {
    "SGD": partial(torch.optim.SGD, lr=0.1),
    # A large eps: where the true gradient is zero (a key's bias), it would blow up rounding.
    "AdamW": partial(torch.optim.AdamW, lr=1e-3, eps=1e-6, weight_decay=0.1),
}


def small_model(family: str, **sizes) -> nn.Module:
    """A Transformer of odd sizes with a frozen parameter; GPT ties its embedding, Llama groups.

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

    reference = trainings(None, lambda model, group: None, *arguments)
    by_rank = run(trainings, num_ranks, apply, *arguments, timeout=timeout)

    for optimizer, expected in reference.items():
        found = first_difference(expected, [records[optimizer] for records in by_rank])
        if found is not None:
            hidden = hidden_by_adamw(reference, by_rank) if optimizer == "SGD" else ""
            raise AssertionError(f"{found} with {optimizer} on {num_ranks} ranks{hidden}")


def after_backward(function: Callable[[nn.Module, dist.ProcessGroup], None]) -> Apply:
    """Make an `apply` of a function that averages the gradients after the backward pass."""

    def apply(model: nn.Module, group: dist.ProcessGroup):
        for parameter in model.parameters():
            broadcast(parameter.detach(), 0, group)
        return SimpleNamespace(finish=partial(function, model, group))

    return apply


def sample_batches(
    sizes: tuple[int, ...], vocabulary: int = VOCABULARY, sequence: int = SEQUENCE
) -> list[Tensor]:
    """Token ids (B, S+1), one tensor a step."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(size, sequence + 1) for size in sizes]
    return [torch.randint(vocabulary, shape, generator=generator) for shape in shapes]


# Training, and recording it


class Whole:
    """What the oracle asks; these are the answers of a model that every rank holds whole.

    `data_part` is which part of a batch this rank reads: (index, count); (0, 1) is all of it.
    """

    def __init__(self, model: nn.Module, group: dist.ProcessGroup | None):
        self.model = model
        self.group = group
        self.data_part = rank_and_size(group)

    def no_sync(self):
        """The context of every micro-batch but the last."""
        return nullcontext()

    def summed_loss(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Cross-entropy summed over the targets (B, S)."""
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")

    def run(self, micro_batches: list[tuple[Tensor, Tensor]], sum_loss: Callable, divisor: float):
        """Forward and backward of each (inputs, targets); the sum of the losses over `divisor`."""
        total = torch.zeros((), dtype=torch.float64)
        for number, (inputs, targets) in enumerate(micro_batches, start=1):
            with nullcontext() if number == len(micro_batches) else self.no_sync():
                loss = sum_loss(self.model(inputs), targets) / divisor
                loss.backward()
            total += loss.detach()
        return total

    def finish(self) -> None:
        """Called after the last backward pass."""

    def mean(self, loss: Tensor) -> Tensor:
        """The mean over the ranks of the losses of their parts."""
        if self.group is None:
            return loss
        total = loss.clone()
        all_reduce(total, self.group)
        return total / self.group.size()

    def make_optimizer(self, factory: Callable) -> torch.optim.Optimizer:
        """`factory(parameters)`, or an object of your own with `step` and `zero_grad`."""
        return factory([p for p in self.model.parameters() if p.requires_grad])

    def full_gradients(self) -> dict[str, Tensor | None]:
        """Every gradient, unsharded, by its global name."""
        return {name: p.grad for name, p in self.model.named_parameters() if p.requires_grad}

    def full_parameters(self) -> dict[str, Tensor]:
        """Every parameter, unsharded, by its global name."""
        return dict(self.model.named_parameters())


def trainings(
    group: dist.ProcessGroup | None,
    apply: Apply,
    make_model: Callable[[], nn.Module],
    batches: list[Tensor],
    num_micro_batches: int,
) -> dict[str, list[Moment]]:
    """Train with each optimizer, on one rank or (no group) in one process; returns the records."""
    rank, _ = rank_and_size(group)
    records = {}
    for name, factory in OPTIMIZERS.items():
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(rank)  # other weights on each rank: those of rank 0 must win
            model = make_model().double()
        parallel = apply(model, group)
        whole = Whole(model, group)
        for question in QUESTIONS:
            setattr(whole, question, getattr(parallel, question, getattr(whole, question)))
        records[name] = list(train(whole, factory, batches, num_micro_batches))
    return records


def train(
    whole: Whole, factory: Callable, batches: list[Tensor], num_micro_batches: int
) -> Iterator[Moment]:
    """Take one step per batch and tell what there is at each moment."""
    optimizer = whole.make_optimizer(factory)
    yield Moment(0, "initial", as_arrays(whole.full_parameters()))
    for step, tokens in enumerate(batches):
        optimizer.zero_grad()
        loss = accumulate_gradients(whole, tokens, num_micro_batches)
        yield Moment(step, "loss", as_arrays({"model": loss}))
        yield Moment(step, "kept", as_arrays(whole.full_parameters()))
        yield Moment(step, "gradient", as_arrays(whole.full_gradients()))
        optimizer.step()
        yield Moment(step, "updated", as_arrays(whole.full_parameters()))


def accumulate_gradients(whole: Whole, tokens: Tensor, num_micro_batches: int) -> Tensor:
    """Run this rank's part of a batch; returns the mean loss of the batch.

    The ranks' gradients are averaged, so each divides by the tokens of all ranks over their
    number: a mean of means would favour the tokens of a rank that has few.
    """
    index, count = whole.data_part
    divisor = tokens[:, 1:].numel() / count
    part = tokens[index::count]
    micro_batches = part.tensor_split(min(num_micro_batches, len(part))) if len(part) else []

    total = torch.zeros((), dtype=torch.float64)
    if micro_batches:
        pairs = [(part[:, :-1], part[:, 1:]) for part in micro_batches]
        total = whole.run(pairs, whole.summed_loss, divisor)
    whole.finish()
    return whole.mean(total)


def as_arrays(tensors: dict[str, Tensor | None]) -> Values:
    return {name: None if tensor is None else tensor.detach().cpu().numpy().copy()
            for name, tensor in tensors.items()}
