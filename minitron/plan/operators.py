"""Seconds of what a step computes: a block's passes, both ends of a model, the optimizer.

A matmul takes as long as its multiplications and the memory that it reads and writes: a
large one is nearly as fast as the device can multiply, a narrow one much slower. Everything else
takes as long as its memory: each kernel reads its inputs and writes its outputs once.

Notation: T tokens of a micro-batch; D width; F feed-forward width; t tensor-parallel ranks. All
numbers are one rank's.

Read in this order: Rates, Cost, Work, block_forward, block_backward, the head, optimizer_seconds.
Reference: Williams et al. 2009, "Roofline"; Korthikanti et al. 2022, section 4.1 (which tensors
there are).
"""

from dataclasses import dataclass
from functools import cached_property

from minitron import cost
from minitron.config import ModelConfig
from minitron.cost.precision import PRECISIONS
from minitron.cost.tensor import ONE_DEVICE, kv_heads_per_rank, share, tokens_between_layers
from minitron.plan.hardware import Device
from minitron.plan.systems import MINITRON, System


@dataclass(frozen=True)
class Rates:
    """The constants of the estimate, for all models and devices."""

    matmul: float = 0.9
    """Of the device's fastest matmul's FLOP/s, what the multiplications of any matmul reach."""
    memory: float = 0.88
    """Of the memory's bandwidth, what one kernel after the other reaches."""
    attention: float = 0.196
    """An effective rate: of the matmuls' FLOP/s, what fused attention reaches on the half that is
    not masked, with all that surrounds it in the systems of the rows (copies, rotation, casts). The
    kernel alone reaches about 0.4 on an H100 (Dao 2023, section 4)."""
    overlap: float = 0.16
    """Of the seconds that a collective travels beside a computation, those by which that gets
    longer: the two share the device. Not fitted: on average a computation is 18.9 % slower
    meanwhile (Lee et al. 2025, arXiv 2507.03114, on four A100, H100, MI210 or MI250), and
    1 - 1 / 1.189 = 0.16."""
    kernel: float = 20e-6
    """Seconds that the host takes to start a kernel. Assumed, not fitted: no published row is so
    small that it shows."""


RATES = Rates()
"""Fitted by `benchmarks/estimate.py --fit`; what is left over: benchmarks/results/estimate.md."""


@dataclass(frozen=True)
class Cost:
    """Seconds by kind of operator, and how many kernels the host must start."""

    matmul: float = 0.0
    attention: float = 0.0
    elementwise: float = 0.0
    num_kernels: float = 0.0

    @property
    def seconds(self) -> float:
        return self.matmul + self.attention + self.elementwise

    def __add__(self, other: "Cost") -> "Cost":
        return Cost(
            self.matmul + other.matmul,
            self.attention + other.attention,
            self.elementwise + other.elementwise,
            self.num_kernels + other.num_kernels,
        )

    def times(self, count: float) -> "Cost":
        return Cost(
            count * self.matmul,
            count * self.attention,
            count * self.elementwise,
            count * self.num_kernels,
        )


@dataclass(frozen=True)
class Work:
    """A micro-batch of `batch_size` sequences on one rank of a layout."""

    model: ModelConfig
    device: Device
    batch_size: int
    sequence_length: int
    layout: cost.Layout = ONE_DEVICE
    precision: str = "bf16"
    system: System = MINITRON
    rates: Rates = RATES

    @cached_property
    def tokens(self) -> int:
        return self.batch_size * self.sequence_length

    @cached_property
    def tokens_between(self) -> int:
        return tokens_between_layers(self.batch_size, self.sequence_length, self.layout)

    @cached_property
    def value(self) -> int:
        """Bytes of an activation."""
        return PRECISIONS[self.precision].activations.itemsize

    @cached_property
    def matmul_flops(self) -> float:
        """FLOP/s of the large matmuls outside linear layers."""
        slower = self.device.float32_share if self.precision == "fp32" else 1
        return self.rates.matmul * slower * self.device.matmul_share * self.device.bf16_flops

    @cached_property
    def linear_flops(self) -> float:
        """FLOP/s of the blocks' linear layers, which fp8 makes faster."""
        device = self.device
        faster = (device.fp8_flops or device.bf16_flops) / device.bf16_flops
        return self.matmul_flops * (faster if self.precision == "fp8" else 1)

    def memory_seconds(self, num_bytes: float) -> float:
        return num_bytes / (self.rates.memory * self.device.memory_bandwidth)

    def matmul_seconds(self, m: float, n: float, k: float, rate: float, count: float = 1) -> float:
        """Estimate `count` matmuls (m, k) x (k, n)."""
        # The sum, not the longer: a kernel loads before it multiplies, and stores after
        multiply = 2 * m * n * k / rate
        return count * (multiply + self.memory_seconds(self.value * (m * k + k * n + m * n)))


# A block


def block_forward(work: Work) -> Cost:
    """Estimate one block's forward pass."""
    return linears(work) + attention_forward(work) + between_forward(work)


def block_backward(work: Work, recompute: cost.RecomputeKind = "none") -> Cost:
    """Estimate one block's backward pass, two matmuls for each, and what it recomputes."""
    backward = linears(work).times(2) + attention_backward(work) + between_backward(work)
    if recompute == "selective":
        return backward + attention_forward(work)
    return backward + block_forward(work) if recompute == "full" else backward


def linears(work: Work) -> Cost:
    """Estimate the linear layers: query, key and value; out; up (and gate); down."""
    model, t = work.model, work.layout.tensor_parallel
    D, F = model.width, share("model.ffn_width", model.ffn_width, t)
    heads = share("model.num_heads", model.num_heads, t) * model.head_width
    keys = kv_heads_per_rank(model, t) * model.head_width
    ups = 1 if model.family == "gpt" else 2
    outputs = [heads + 2 * keys, *[F] * ups]
    shapes = [(n, D) for n in outputs] + [(D, heads), (D, F)]
    seconds = sum(work.matmul_seconds(work.tokens, n, k, work.linear_flops) for n, k in shapes)
    return Cost(matmul=seconds, num_kernels=len(shapes))


def attention_forward(work: Work) -> Cost:
    """Estimate Q K^T, softmax, dropout, P V."""
    S, K, squares = attention_sizes(work)
    if work.system.attention == "fused":
        return Cost(attention=fused_seconds(work, 2), num_kernels=1)
    matmuls = work.matmul_seconds(S, S, K, work.matmul_flops, 2 * squares)
    moved = 2 if work.system.fuses else 6  # scale, mask, softmax
    moved += 2.5 if work.model.dropout > 0 else 0  # writes a mask of bytes
    scores = work.memory_seconds(moved * work.value * squares * S * S)
    return Cost(attention=matmuls + scores, num_kernels=4)


def attention_backward(work: Work) -> Cost:
    """Estimate two matmuls for each; fused attention recomputes Q K^T (Dao 2023, section 3.1)."""
    S, K, squares = attention_sizes(work)
    if work.system.attention == "fused":
        return Cost(attention=fused_seconds(work, 5), num_kernels=3)
    matmuls = work.matmul_seconds(S, S, K, work.matmul_flops, 4 * squares)
    moved = (3 if work.system.fuses else 7) + (2.5 if work.model.dropout > 0 else 0)
    scores = work.memory_seconds(moved * work.value * squares * S * S)
    return Cost(attention=matmuls + scores, num_kernels=6)


def attention_sizes(work: Work) -> tuple[int, int, int]:
    """Return S, the head width, and how many S x S squares there are."""
    heads = share("model.num_heads", work.model.num_heads, work.layout.tensor_parallel)
    return work.sequence_length, work.model.head_width, work.batch_size * heads


def fused_seconds(work: Work, num_matmuls: int) -> float:
    """Estimate matmuls of S x S and K, of which the masked half is skipped."""
    S, K, squares = attention_sizes(work)
    flops = num_matmuls * squares * 2 * S * S * K / 2
    return flops / (work.rates.attention * work.matmul_flops)


def between_forward(work: Work) -> Cost:
    """Estimate two norms, two residual additions, and what the feed-forward has between matmuls."""
    if work.model.dropout > 0:  # writes a mask of bytes
        add = 3.5 if work.system.fuses else 5.5
    else:
        add = 3
    if work.model.family == "gpt":
        return elementwise(work, 2 * (2 + add), 2, 6)
    return elementwise(work, 2 * (2 + add), 3 if work.system.fuses else 5, 8)


def between_backward(work: Work) -> Cost:
    """Estimate the same; a norm reads two, writes one; gradients meet where the stream branched."""
    add = 5.5 if work.model.dropout > 0 else 3
    if work.model.family == "gpt":
        return elementwise(work, 2 * (3 + add), 3, 8)
    return elementwise(work, 2 * (3 + add), 5 if work.system.fuses else 9, 11)


def elementwise(work: Work, between: float, inside: float, num_kernels: int) -> Cost:
    """Estimate `between` passes over (T, D), `inside` over (T, F/t); llama rotates Q and K too."""
    model, t = work.model, work.layout.tensor_parallel
    values = (
        between * work.tokens_between * model.width + inside * work.tokens * model.ffn_width / t
    )
    if model.family == "llama":
        turned = (model.num_heads / t + kv_heads_per_rank(model, t)) * model.head_width
        values += 2 * work.tokens * turned
    return Cost(elementwise=work.memory_seconds(work.value * values), num_kernels=num_kernels)


# Both ends


def head_forward(work: Work) -> Cost:
    """Estimate final norm, logits, and a float32 cross-entropy: reads logits, writes softmax."""
    V = share("model.vocab_size", work.model.vocab_size, work.layout.tensor_parallel)
    D, T = work.model.width, work.tokens
    logits = work.matmul_seconds(T, V, D, work.matmul_flops)
    moved = work.memory_seconds((work.value + 4 + 4 + 4) * T * V)
    return Cost(matmul=logits, elementwise=moved, num_kernels=6)


def head_backward(work: Work) -> Cost:
    """Estimate two matmuls for the logits; their gradient is handled in float32, then rounded."""
    V = share("model.vocab_size", work.model.vocab_size, work.layout.tensor_parallel)
    D, T = work.model.width, work.tokens
    logits = 2 * work.matmul_seconds(T, V, D, work.matmul_flops)
    moved = work.memory_seconds((4 + 4 + 4 + work.value) * T * V)
    return Cost(matmul=logits, elementwise=moved, num_kernels=6)


# Gradients and weights


def accumulation(work: Work) -> Cost:
    """Add the gradients of a block's weights to those of earlier micro-batches."""
    gradient = PRECISIONS[work.precision].cost.gradient
    num_weights = cost.num_block_parameters(work.model) / work.layout.tensor_parallel
    seconds = work.memory_seconds((work.value + 2 * gradient) * num_weights)
    return Cost(elementwise=seconds, num_kernels=8)


def optimizer_seconds(work: Work, num_gradients: float, num_updated: float) -> float:
    """Clip and update: gradients are read twice, the state of what is updated read and written.

    A rank has `num_gradients` gradients, and updates `num_updated` weights.
    """
    recipe = PRECISIONS[work.precision].cost
    state = 2 * (recipe.master + recipe.optimizer_state) + recipe.parameter
    return work.memory_seconds(2 * recipe.gradient * num_gradients + state * num_updated)
