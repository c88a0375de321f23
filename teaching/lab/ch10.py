"""Chapter 10's measurements: the story model in any dtype, its gradients, recipes, long sums."""

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from statistics import fmean

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from minitron.comm.agreement import SINGLE_RANK
from minitron.config import Config, DataConfig, ModelConfig, ParallelConfig, TrainConfig
from minitron.corpus.stories import write_stories
from minitron.corpus.story_grammar import VOCABULARY
from minitron.dataset import TokenDataset
from minitron.measure.meter import Meter
from minitron.model.linear import Matmuls, set_all_linear_hooks
from minitron.model.transformer import Transformer, initialize
from minitron.parallel.data.ddp import apply_bucketed_data_parallel
from minitron.parallel.grid import Grid
from minitron.parallelize import build, lay_out
from minitron.precision import PRECISIONS, LossScale, MasterWeights, low_precision
from minitron.step import (
    accumulate_gradients,
    accumulate_over_ranks,
    learning_rate,
    make_optimizer,
    summed_loss,
    train_step,
)

S, B, NUM_STEPS = 64, 4, 120
SHAPE = ModelConfig("llama", len(VOCABULARY), S, 2, 64, 4, 4, 168)
IN_BLOCKS = ModelConfig("llama", -(-len(VOCABULARY) // 32) * 32, S, 2, 64, 4, 4, 160)
"""As SHAPE, with sizes that blocks of 32 divide."""

adamw = partial(torch.optim.AdamW, betas=(0.9, 0.98))

# The story model and a plain training loop's parts


def story_batches(folder: Path) -> list[Tensor]:
    """Write 100,000 tokens of stories to `folder`; return one batch (B, S + 1) more than steps."""
    write_stories(folder, num_tokens=100_000)
    dataset = TokenDataset(folder, "train", S, seed=0)
    return [dataset.batch(step * B, B) for step in range(NUM_STEPS + 1)]


def story_model(dtype: torch.dtype = torch.float32, shape: ModelConfig = SHAPE) -> Transformer:
    """Return the model with the same initial weights in every dtype, up to rounding."""
    model = Transformer(shape)
    initialize(model, seed=0)
    return model.to(dtype)


def add_gradients(model: nn.Module, tokens: Tensor, factor: float | None = None) -> float:
    """Add `factor` times the gradient of the summed loss (default: the mean's); return the mean."""
    num_tokens = tokens[:, 1:].numel()
    summed = summed_loss(model(tokens[:, :-1]).float(), tokens[:, 1:])
    (summed * (1 / num_tokens if factor is None else factor)).backward()
    return summed.item() / num_tokens


def set_rate(optimizer: torch.optim.Optimizer, step: int, peak: float = 3e-3) -> None:
    """Set the learning rate of `step`: 20 steps up to `peak`, then down to a hundredth of it."""
    for group in optimizer.param_groups:
        group["lr"] = learning_rate(step, peak, peak / 100, 20, NUM_STEPS)


def smoothed(losses: Sequence[float]) -> float:
    return sum(losses[-20:]) / 20


def train(model: nn.Module, batches: Iterable[Tensor]) -> list[float]:
    """Train with AdamW on `batches`; return the losses."""
    optimizer, losses = adamw(model.parameters()), []
    for step, tokens in enumerate(batches):
        optimizer.zero_grad()
        losses.append(add_gradients(model, tokens))
        set_rate(optimizer, step)
        optimizer.step()
    return losses


# Gradients


def lost_updates(weights: Tensor, dtype: torch.dtype, rate: float) -> float:
    """Return the share of the weights that do not change in `dtype` when `rate` is added."""
    held = weights.to(dtype)
    return ((held.float() + rate).to(dtype) == held).float().mean().item()


def accumulated(dtype: torch.dtype, sequences: Sequence[Tensor]) -> dict[int, Tensor]:
    """Return the sum of a bfloat16 model's gradients over sequences, added up in `dtype`.

    Keys are numbers of sequences, the powers of two; values are all gradients, (P,), float64.
    """
    model, seen = story_model(torch.bfloat16), {}
    for weight in model.parameters():
        weight.grad_dtype = dtype
    for count, tokens in enumerate(sequences, 1):
        add_gradients(model, tokens[None], factor=1.0)
        if count & (count - 1) == 0:
            parts = [weight.grad.double().flatten() for weight in model.parameters()]
            seen[count] = torch.cat(parts)
    return seen


def gradients(model: nn.Module, tokens: Tensor, factor: float) -> dict[str, Tensor]:
    """Return all gradients of outputs of linear layers, (n,), and all of weights, (P,)."""
    outputs = []
    hooks = [
        layer.register_full_backward_hook(lambda _, grads, out: outputs.append(out[0]))
        for layer in model.modules()
        if isinstance(layer, nn.Linear)
    ]
    model.zero_grad()
    add_gradients(model, tokens, factor)
    for hook in hooks:
        hook.remove()
    weights = [weight.grad.flatten() for weight in model.parameters()]
    return {
        "outputs": torch.cat([grad.flatten() for grad in outputs]),
        "weights": torch.cat(weights),
    }


class MatrixRecorder(Matmuls):
    """Plain matmuls that keep every matrix they meet, by its kind."""

    def __init__(self):
        self.seen: defaultdict[str, list[Tensor]] = defaultdict(list)

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        self.seen["weights"].append(weight.detach())
        self.seen["inputs"].append(x.flatten(0, -2))
        return super().linear(x, weight, bias)

    def grad_weight(self, grad: Tensor, x: Tensor) -> Tensor:
        self.seen["gradients of outputs"].append(grad)
        self.seen["the same, transposed"].append(grad.T)
        self.seen["gradients of weights"].append(super().grad_weight(grad, x))
        return self.seen["gradients of weights"][-1]


def matrices(model: nn.Module, tokens: Tensor) -> dict[str, list[Tensor]]:
    """Return what the linear layers multiply, and their weights' gradients, for one batch."""
    set_all_linear_hooks(model, matmuls=(recorder := MatrixRecorder()))
    add_gradients(model, tokens)
    return recorder.seen


def rounding(exact: Sequence[Tensor], rounded_by: Callable) -> dict[str, float]:
    """Return means over matrices: the relative error, and the change in length along the exact."""
    pairs = [(rounded_by(x), x) for x in exact]
    return {
        "error": fmean(((rounded - x).norm() / x.norm()).item() for rounded, x in pairs),
        "length": fmean(((rounded * x).sum() / (x * x).sum() - 1).item() for rounded, x in pairs),
    }


def train_clipped(
    actions: Sequence[Callable],
    make_optimizer: Callable,
    peak: float,
    batches: Sequence[Tensor],
    scale: float = 2.0**16,
) -> tuple[list[float], float]:
    """Train 60 steps on a scaled loss, with `actions` on the gradients before each update.

    Returns the losses, and the largest gradient norm that the optimizer was given.
    """
    model, losses, norms = story_model(), [], []
    weights = list(model.parameters())
    optimizer = make_optimizer(weights)
    for step, tokens in enumerate(batches[: NUM_STEPS // 2]):
        optimizer.zero_grad()
        losses.append(add_gradients(model, tokens, scale / (S * B)))
        for action in actions:
            action(weights, scale)
        norms.append(nn.utils.get_total_norm([weight.grad for weight in weights]).item())
        set_rate(optimizer, step, peak)
        optimizer.step()
    return losses, max(norms)


# Sums over many ranks


def gradient_of(rank: int) -> Tensor:
    """Return a rank's gradient (4096,) in bfloat16."""
    return torch.randn(4096, generator=torch.Generator().manual_seed(rank)).to(torch.bfloat16)


def summed_by(group: ProcessGroup, all_reduce: Callable) -> Tensor:
    """Return the sum of the ranks' gradients, by `all_reduce`."""
    summed = gradient_of(group.rank())
    all_reduce(summed, group)
    return summed


def in_tree(parts: Tensor) -> Tensor:
    """Sum (N, n) over the ranks in pairs, then in pairs of pairs, as recursive doubling does."""
    while len(parts) > 1:
        parts = parts[::2] + parts[1::2]
    return parts[0]


def in_ring(parts: Tensor) -> Tensor:
    """Sum (N, n) over the ranks, each chunk in the order in which it travels around the ring."""
    N, n = parts.shape
    chunk = torch.arange(n) * N // n  # chunk c starts at rank c + 1 and ends at c
    order = (chunk + 1 + torch.arange(N)[:, None]) % N
    total, *others = parts.gather(0, order)
    for part in others:
        total = total + part
    return total


def relative_error(summed: Tensor, parts: Tensor) -> float:
    exact = parts.double().sum(0)
    return ((summed.double() - exact).norm() / exact.norm()).item()


ROUNDING = 2.0**-8 / math.sqrt(3) * math.sqrt(3 / 8 / math.log(2))
"""Root mean square of a rounding to bfloat16, relative: the error is uniform in plus or minus half
a step, 2^-8 of a mantissa f from 1 to 2, and mantissas are distributed as 1/f."""

# The package's recipes


def in_float64(masters: type[MasterWeights], model: nn.Module, group: ProcessGroup) -> Grid:
    """Apply data parallelism and float64 masters, for the oracle."""
    parallel = apply_bucketed_data_parallel(model, group)
    return Grid(model, masters(model, torch.float64), data=parallel)


def config_of(precision: str, **parallel) -> Config:
    return Config(
        SHAPE,
        DataConfig(sequence_length=S),
        TrainConfig(precision=precision),
        ParallelConfig(**parallel),
    )


def prepared(config: Config, group: ProcessGroup = SINGLE_RANK) -> tuple:
    """Return a model as its config says, what a step asks of it, and the forward pass."""
    cpu = torch.device("cpu")
    model, parallel = build(config, lay_out(config.parallel, group.size(), cpu), cpu)
    forward = low_precision(model, cpu, PRECISIONS[config.train.precision])
    return model, parallel, forward


def first_gradients(group: ProcessGroup, config: Config, tokens: Tensor) -> dict[str, Tensor]:
    """Return every full gradient of the first step, of the float32 master where there is one."""
    _, parallel, forward = prepared(config, group)
    index, count = parallel.data_part
    mine = tokens[index::count]
    scale = LossScale().value if PRECISIONS[config.train.precision].scales_loss else 1.0
    accumulate_over_ranks(forward, [(mine[:, :-1], mine[:, 1:])], parallel, scale)
    return {name: grad / scale for name, grad in parallel.full_gradients().items()}


def held_by(precision: str, tokens: Tensor) -> dict[str, int]:
    """Return the bytes of the training state at the end of a backward pass, by the meter."""
    config = config_of(precision)
    model, parallel, forward = prepared(config)
    optimizer = parallel.shard(make_optimizer(model, config.train, torch.device("cpu")))
    pairs = [(tokens[:, :-1], tokens[:, 1:])]
    train_step(forward, optimizer, pairs, 1e-3, 1.0, parallel)
    optimizer.zero_grad()
    with Meter(model, optimizer) as meter:
        accumulate_gradients(forward, pairs)
    return {kind: meter.now()[kind] for kind in ("parameter", "gradient", "optimizer state")}


def train_recipe(precision: str, batches: Iterable[Tensor]) -> list[float]:
    """Train with the package's step and a recipe of its table; return the losses."""
    config = config_of(precision)
    model, parallel, forward = prepared(config)
    optimizer = parallel.shard(adamw(model.parameters()))
    loss_scale = PRECISIONS[precision].make_loss_scale()
    losses = []
    for step, tokens in enumerate(batches):
        rate = learning_rate(step, 3e-3, 3e-5, 20, NUM_STEPS)
        loss, _ = train_step(
            forward, optimizer, [(tokens[:, :-1], tokens[:, 1:])], rate, 1.0, parallel, loss_scale
        )
        losses.append(loss.item())
    return losses
