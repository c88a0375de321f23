"""Chapter 1's measurements: training the story model, gradient noise, throughput, the roofline."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import median

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer
from torch import Tensor

from minitron.config import ModelConfig, TrainConfig
from minitron.corpus.story_grammar import ADJECTIVES, BOYS, GIRLS, OBJECTS, PLACES, VOCABULARY
from minitron.dataset import TokenDataset
from minitron.measure.clock import Clock
from minitron.model.generate import generate
from minitron.model.transformer import Transformer, initialize
from minitron.plan.dryrun import FORMULAS, attention_flops
from minitron.pytorch.private import DispatchMode, fake_tensors, storage_address, tensors_in
from minitron.step import accumulate_gradients, learning_rate, make_optimizer, train_step

CPU = torch.device("cpu")
BATCH, TOTAL_STEPS = 16, 600
"""Sequences per step, and the steps over which the learning rate falls."""


def new_model(config: ModelConfig) -> tuple[Transformer, torch.optim.Optimizer]:
    """Return a freshly initialized model and its optimizer."""
    model = Transformer(config)
    initialize(model, seed=0)
    return model, make_optimizer(model, TrainConfig(), CPU)


def train_story_model(
    config: ModelConfig,
    data: TokenDataset,
    num_steps: int,
    peak: float = 0.01,
    warmup_steps: int = 50,
    watch: Callable[[int, Transformer], None] | None = None,
) -> tuple[Transformer, list[float]]:
    """Train a new model for the first `num_steps` of 600; return it and the loss of each step.

    `watch(step, model)` is called after every 25th step.
    """
    model, optimizer = new_model(config)
    losses = []
    for step in range(num_steps):
        batch = data.batch(step * BATCH, BATCH)
        rate = learning_rate(step, peak, peak / 10, warmup_steps, TOTAL_STEPS)
        loss, _ = train_step(model, optimizer, [(batch[:, :-1], batch[:, 1:])], rate, 1.0)
        losses.append(float(loss))
        if watch and (step + 1) % 25 == 0:
            watch(step + 1, model)
    return model, losses


# Gradient noise


def sequence_gradients(model: Transformer, batch: Tensor) -> Tensor:
    """Return the gradient of each sequence of `batch` (B, S+1) on its own: (B, parameters)."""
    rows = []
    for sequence in batch.split(1):
        model.zero_grad()
        accumulate_gradients(model, [(sequence[:, :-1], sequence[:, 1:])])
        rows.append(torch.cat([p.grad.flatten() for p in model.parameters()]))
    model.zero_grad()
    return torch.stack(rows)


def batch_variances(gradients: Tensor, sizes: Sequence[int]) -> list[float]:
    """Return the variance of the mean of `size` consecutive rows, summed over the parameters."""
    num_parameters = gradients.shape[1]
    return [float(gradients.view(-1, size, num_parameters).mean(1).var(0).sum()) for size in sizes]


# Throughput


def tokens_per_second(
    config: ModelConfig, data: TokenDataset, clock: Clock, sizes: Sequence[int]
) -> dict[int, list[float]]:
    """Return the speeds of several steps for each batch of `sizes` sequences, by its tokens."""
    model, optimizer = new_model(config)
    speeds = {}
    for size in sizes:
        batch = data.batch(0, size)
        inputs, targets = batch[:, :-1], batch[:, 1:]
        laps = []
        for _ in range(max(5, 64 // size)):
            clock.start()
            train_step(model, optimizer, [(inputs, targets)], 1e-3, 1.0)
            laps.append(clock.lap(num_tokens=targets.numel()).tokens_per_second)
        speeds[targets.numel()] = laps[1:]  # the first pays for set-up
    return speeds


# Where a step's time goes

TIMED_KINDS = {
    "mm": "matmuls",
    "addmm": "matmuls",
    "bmm": "matmuls",
    "gelu": "GELU",
    "gelu_backward": "GELU",
}


class OperatorClock(DispatchMode):
    """Add up the seconds of every operator, by kind; what `kinds` does not name is the `rest`."""

    def __init__(self, kinds: dict[str, str], rest: str):
        super().__init__()
        self.kinds, self.rest = kinds, rest
        self.found = dict.fromkeys(["matmuls", "attention", *kinds.values(), rest], 0.0)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        start = time.perf_counter()
        outputs = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        kind = (
            "attention"
            if name.startswith("_scaled_dot_product")
            else self.kinds.get(name, self.rest)
        )
        self.found[kind] += time.perf_counter() - start
        return outputs


def operator_times(step: Callable[[], object], repeats: int = 20) -> dict[str, float]:
    """Return the mean milliseconds of a step's operators by kind, on the CPU.

    What they leave of the step, "between operators", is autograd's, Python's and the clock's.
    """
    step()
    with OperatorClock(TIMED_KINDS, "other operators") as clock:
        start = time.perf_counter()
        for _ in range(repeats):
            step()
        total = time.perf_counter() - start
    found = clock.found | {"between operators": total - sum(clock.found.values())}
    return {kind: 1000 * seconds / repeats for kind, seconds in found.items()}


# What the model has learned to copy


def copyable(inputs: Tensor, targets: Tensor, end: int) -> Tensor:
    """Return which targets (B, S) are names or things that stand earlier in their own story."""
    kinds = {*BOYS, *GIRLS, *ADJECTIVES, *OBJECTS, *PLACES}
    is_name = torch.tensor([word in kinds for word in VOCABULARY])
    story = (inputs == end).cumsum(1)
    same_story = story[:, :, None] == story[:, None, :]
    earlier = (targets[:, :, None] == inputs[:, None, :]) & same_story
    return earlier.tril().any(-1) & is_name[targets]


@torch.no_grad()
def losses_by_kind(model: Transformer, batch: Tensor, end: int) -> tuple[float, float, float]:
    """Return the loss on all words of `batch` (B, S+1), on those one can copy, on all others."""
    inputs, targets = batch[:, :-1], batch[:, 1:]
    losses = F.cross_entropy(model(inputs).transpose(1, 2), targets, reduction="none")
    copied = copyable(inputs, targets, end)
    return losses.mean().item(), losses[copied].mean().item(), losses[~copied].mean().item()


def continue_story(model: Transformer, tokenizer: Tokenizer, num_tokens: int = 600) -> str:
    """Return the text that the model writes after the end of a story."""
    end = tokenizer.token_to_id("<end>")
    story = generate(model, torch.tensor([[end]]), num_tokens)
    return tokenizer.decode(story[0, 1:].tolist(), skip_special_tokens=False)


# The roofline


@dataclass(frozen=True)
class Roofline:
    """An operation under the roof: what it could reach, and what it does reach."""

    name: str
    intensity: float
    """FLOPs per byte that the operation must read or write."""
    reached: float
    """FLOP/s, measured."""
    peak: float
    """FLOP/s of the fastest matmul."""
    bandwidth: float
    """Bytes per second to and from memory."""
    spread: tuple[float, float] = (0.0, 0.0)
    """FLOP/s of the slowest and of the fastest run."""

    @property
    def roof(self) -> float:
        return min(self.peak, self.intensity * self.bandwidth)

    @property
    def bound(self) -> str:
        return "memory" if self.roof < self.peak else "compute"


def seconds_of(call: Callable[[], object], repeats: int = 7) -> list[float]:
    """Return the times of some calls, after one that is not counted."""
    call()
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return times


def copy_bandwidth(num_bytes: int = 256 * 2**20) -> float:
    """Measure the bytes read plus written per second in copying a tensor larger than all caches."""
    source = torch.ones(num_bytes // 4)
    target = torch.empty_like(source)
    return 2 * num_bytes / median(seconds_of(lambda: target.copy_(source)))


def roofline(peak: float, bandwidth: float) -> list[Roofline]:
    """Measure float32 operations from memory-bound to compute-bound against their roof.

    The roof is the fastest seen: `peak` and `bandwidth` rise to what an operation here exceeds.
    """
    x = torch.randn(4096, 2048)
    out = torch.empty_like(x)  # or each call would also pay for fresh pages
    measured = [("x + 1", x.numel(), 8 * x.numel(), seconds_of(lambda: torch.add(x, 1.0, out=out)))]

    weight = torch.randn(2048, 2048)
    for rows in (1, 4, 16, 64, 256, 1024):
        a, out = torch.randn(rows, 2048), torch.empty(rows, 2048)
        moved = 4 * (a.numel() + weight.numel() + out.numel())
        times = seconds_of(lambda a=a, out=out: torch.mm(a, weight.T, out=out))
        name = f"matmul of {rows} row{'s' * (rows > 1)}"
        measured.append((name, 2 * rows * weight.numel(), moved, times))

    peak = max(peak, *(flops / min(times) for _, flops, _, times in measured))
    bandwidth = max(bandwidth, *(moved / min(times) for _, _, moved, times in measured))
    return [
        Roofline(
            name,
            flops / moved,
            flops / median(times),
            peak,
            bandwidth,
            spread=(flops / max(times), flops / min(times)),
        )
        for name, flops, moved, times in measured
    ]


def roof_line(points: Sequence[Roofline]) -> tuple[list[float], list[float]]:
    """Return the roof's intensities and FLOP/s: its left end, its corner, its right end."""
    peak, bandwidth = points[0].peak, points[0].bandwidth
    intensities = [point.intensity for point in points]
    x = [min(intensities), peak / bandwidth, max(intensities)]
    return x, [min(peak, each * bandwidth) for each in x]


# A step's operators


@dataclass(frozen=True)
class Operators:
    """Operators of one kind in a step: their FLOPs, and the bytes that they read and write."""

    flops: int = 0
    bytes: int = 0


OPERATOR_KINDS = {
    "mm": "matmuls",
    "addmm": "matmuls",
    "bmm": "matmuls",
    "_log_softmax": "loss",
    "_log_softmax_backward_data": "loss",
    "nll_loss_forward": "loss",
    "nll_loss_backward": "loss",
    "_fused_adamw_": "AdamW",
    "_foreach_add_": "AdamW",
}


class OperatorCount(DispatchMode):
    """Count FLOPs and bytes of every operator by kind; what is no matmul has a FLOP per value."""

    def __init__(self):
        super().__init__()
        kinds = ["matmuls", "attention", "pointwise, norms", "loss", "AdamW"]
        self.found = dict.fromkeys(kinds, Operators())

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        outputs = func(*args, **kwargs)
        name, read, written = (
            func.overloadpacket.__name__,
            tensors_in(args, kwargs),
            tensors_in(outputs),
        )
        known = {storage_address(tensor) for tensor in read}
        if name.startswith("_fused_adamw"):
            written = tensors_in(args[0], args[2:])  # all but the gradients, in place
        elif not name.endswith("_") and all(storage_address(each) in known for each in written):
            return outputs  # a view, or no tensor at all
        if name.startswith("_scaled_dot_product"):
            kind, flops = "attention", attention_flops(name, args)
        else:
            kind = OPERATOR_KINDS.get(name, "pointwise, norms")
            flops = (
                FORMULAS[name](*args, **kwargs, out_val=outputs)
                if name in FORMULAS
                else sum(tensor.numel() for tensor in written)
            )
        before, moved = self.found[kind], sum(tensor.nbytes for tensor in [*read, *written])
        self.found[kind] = Operators(before.flops + flops, before.bytes + moved)
        return outputs


def step_operators(config: ModelConfig, num_tokens: int, layers: int = 2) -> dict[str, Operators]:
    """Return the operators of a step of one sequence in bfloat16, on fake tensors, by kind.

    A model of `layers` and one of a layer less are counted: all layers are alike.
    """
    with fake_tensors():
        more, fewer = (
            _count_step(replace(config, num_layers=count), num_tokens)
            for count in (layers, layers - 1)
        )
    rest = config.num_layers - layers
    return {
        kind: Operators(
            *(
                a + rest * (a - b)
                for a, b in (
                    (more[kind].flops, fewer[kind].flops),
                    (more[kind].bytes, fewer[kind].bytes),
                )
            )
        )
        for kind in more
    }


def _count_step(config: ModelConfig, num_tokens: int) -> dict[str, Operators]:
    torch.set_default_dtype(torch.bfloat16)
    try:
        model = Transformer(config)
    finally:
        torch.set_default_dtype(torch.float32)
    optimizer = make_optimizer(model, TrainConfig(), CPU)
    tokens = torch.zeros(1, num_tokens, dtype=torch.int64)
    train_step(model, optimizer, [(tokens, tokens)], 1e-3, 1.0)  # AdamW makes its moments
    with OperatorCount() as count:
        train_step(model, optimizer, [(tokens, tokens)], 1e-3, 1.0)
    return count.found


def counted_and_timed(
    step: Callable[[], object], repeats: int = 20
) -> dict[str, tuple[Operators, float]]:
    """Return a step's operators by kind, and the mean seconds that they take, on the CPU."""
    step()
    with OperatorCount() as count:
        step()
    with OperatorClock(OPERATOR_KINDS, "pointwise, norms") as clock:
        for _ in range(repeats):
            step()
    return {kind: (each, clock.found[kind] / repeats) for kind, each in count.found.items()}


# torch.compile


def relu_of_scaled(x: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
    """Apply three pointwise operations in a row, as a norm's end and an activation do."""
    return torch.relu(x * scale + shift)


def eager_and_compiled(rows: int = 4096, width: int = 2048) -> list[tuple[str, int, list[float]]]:
    """Return name, bytes moved, times: of x + 1, of `relu_of_scaled`, eager and compiled, of tanh.

    They take turns, and write into tensors that are there already: fresh pages would cost more
    than the operations. Raises RuntimeError where torch.compile finds no C++ compiler.
    """
    x, scale, shift = torch.randn(rows, width), torch.randn(width), torch.randn(width)
    scaled, shifted, out = (torch.empty_like(x) for _ in range(3))

    def eager() -> None:
        torch.mul(x, scale, out=scaled)
        torch.add(scaled, shift, out=shifted)
        torch.clamp_min(shifted, 0, out=out)  # relu, which takes no `out`

    @torch.compile
    def into_out(x: Tensor, scale: Tensor, shift: Tensor, out: Tensor) -> None:
        out.copy_(relu_of_scaled(x, scale, shift))

    calls = [
        ("x + 1", 2, lambda: torch.add(x, 1.0, out=out)),
        ("eager, 3 operations", 6, eager),
        ("compiled, 1 kernel", 2, lambda: into_out(x, scale, shift, out)),
        ("tanh alone", 2, lambda: torch.tanh(x, out=out)),
    ]
    with torch.no_grad():
        try:
            into_out(x, scale, shift, out)
        except Exception as error:  # the compiler's own error class is private
            raise RuntimeError(f"torch.compile does not work here: {error}") from error
        found = [(name, transfers * x.nbytes, []) for name, transfers, _ in calls]
        for _ in range(9):
            for (_, _, times), (_, _, call) in zip(found, calls, strict=True):
                times += seconds_of(call, repeats=1)
    return found
