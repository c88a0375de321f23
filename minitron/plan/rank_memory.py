"""What micro-batches hold on one rank of a pipeline: activations and temporary buffers.

Kernels are CUDA's, as in `cost.activation_bytes_per_layer`. A CPU's RMSNorm is several operators,
which keep its input and the normed value in float32; a CPU's dropout keeps a mask of as many bytes
as its input. A step on the CPU holds so much more.

Read in this order: Rank, activations, temporary.
"""

from dataclasses import dataclass, replace
from functools import cached_property, lru_cache

from minitron import cost
from minitron.config import ModelConfig, ParallelConfig
from minitron.cost.precision import PRECISIONS
from minitron.cost.sharding import BUCKET_BYTES
from minitron.cost.tensor import tokens_between_layers
from minitron.plan.job import Decision, Job
from minitron.plan.systems import System

SCHEDULES = {
    "gpipe": "GPipe",
    "1f1b": "1F1B",
    "interleaved": "interleaved 1F1B",
    "zero-bubble": "ZB-H1",
}


@lru_cache(maxsize=4096)
def parameters_per_rank(model: ModelConfig, num_blocks: int, tp: int) -> int:
    """Count what one of `tp` ranks holds of a model with so many blocks."""
    return cost.tensor_parallel_parameters(replace(model, num_layers=num_blocks), tp)


@dataclass(frozen=True)
class Rank:
    """One rank of the pipeline; sizes are those of one micro-batch on one tensor-parallel rank."""

    job: Job
    decision: Decision
    system: System
    index: int
    num_blocks: int
    num_parameters: int

    @cached_property
    def parallel(self) -> ParallelConfig:
        return self.decision.parallel

    @cached_property
    def precision(self):
        return PRECISIONS[self.job.precision]

    @property
    def is_last(self) -> bool:
        return self.index == self.parallel.pp - 1

    @cached_property
    def value(self) -> int:
        """Bytes of what matmuls read and write."""
        return self.precision.activations.itemsize

    @cached_property
    def casts(self) -> bool:
        """Whether autocast rounds weights and inputs; ZeRO-3 gathers 16-bit weights instead."""
        return self.precision.autocasts and not self.has_units

    @cached_property
    def has_units(self) -> bool:
        """Whether a block's gradients travel together, as they come."""
        return self.parallel.zero == 3

    @cached_property
    def reshards(self) -> bool:
        """Whether weights are unsharded only while their unit computes."""
        return self.has_units and self.parallel.reshard_each_pass

    @cached_property
    def in_flight(self) -> int:
        """Micro-batches at once, at most, counted for each chunk of blocks."""
        parallel, m = self.parallel, self.decision.num_micro_batches(self.job)
        return cost.activations_held(
            SCHEDULES[parallel.schedule], parallel.pp, m, self.index, parallel.chunks
        )

    @cached_property
    def deferred(self) -> int:
        """Passes that wait for W, in a zero-bubble schedule, beside the one that runs."""
        splits = self.parallel.schedule == "zero-bubble"
        return min(self.index, self.in_flight - 1) if splits else 0

    @cached_property
    def tokens(self) -> int:
        return self.decision.micro_batch_size * self.job.sequence_length

    @cached_property
    def stream(self) -> int:
        """Values between layers, such as a message to the next stage."""
        job, size = self.job, self.decision.micro_batch_size
        return job.model.width * tokens_between_layers(
            size, job.sequence_length, self.decision.layout
        )

    @cached_property
    def messages(self) -> int:
        """Bytes: for each neighbor in the pipeline, one that arrives and one that leaves."""
        parallel = self.parallel
        num_neighbors = 2 if parallel.chunks > 1 else (self.index > 0) + (not self.is_last)
        return 2 * num_neighbors * (4 if self.casts else self.value) * self.stream

    @cached_property
    def logits(self) -> int:
        """Values; none where the loss is not."""
        return self.is_last * self.tokens * self.job.model.vocab_size // self.parallel.tp

    @cached_property
    def head(self) -> int:
        """Values of the matrix that makes the logits."""
        return self.is_last * self.job.model.vocab_size * self.job.model.width // self.parallel.tp

    @cached_property
    def block(self) -> int:
        """Parameters of a block."""
        one, two = (
            parameters_per_rank(self.job.model, count, self.parallel.tp) for count in (1, 2)
        )
        return two - one

    @property
    def gradient(self) -> int:
        """Bytes of a value of a gradient where it adds up."""
        return self.precision.gradients.itemsize

    @property
    def reduced(self) -> int:
        """The same where it travels."""
        return self.precision.reduction.itemsize

    @property
    def bucket(self) -> int:
        """Bytes of gradients that travel together; a matrix is not divided."""
        return max(BUCKET_BYTES, self.gradient * self.head)

    @property
    def has_buckets(self) -> bool:
        """Whether gradients are views of buckets, which nothing frees."""
        parallel = self.parallel
        return parallel.zero == 0 and parallel.dp > 1 and self.system.overlaps_gradients

    @cached_property
    def root(self) -> int:
        """Parameters outside of blocks."""
        return self.num_parameters - self.num_blocks * self.block

    def kept(self, recompute: cost.RecomputeKind) -> float:
        """Return the bytes that a block keeps for its backward pass."""
        model = self.job.model
        kept = cost.activation_bytes_per_layer(
            model, *self.sizes, recompute=recompute, layout=self.decision.layout
        )
        if recompute == "full":
            return kept + (4 - self.value) * self.stream * self.casts
        is_cut = self.parallel.tp > 1
        if is_cut:
            kept += self.system.copies * self.value * self.tokens * model.width // self.parallel.tp
        if self.casts:
            # The residual stream is float32; each linear layer rounds its input anew: GPT's query,
            # key, value and up; Llama's gate too. Columns of a cut pair share what arrives
            num_inputs = 2 if is_cut else 4 if model.family == "gpt" else 5
            kept += (2 * (4 - self.value) + (num_inputs - 2) * self.value) * self.stream
        return kept

    @cached_property
    def rounded(self) -> int:
        """Bytes of the weights that autocast has rounded: once a step, for all micro-batches."""
        model, tp = self.job.model, self.parallel.tp
        if not self.casts:
            return 0
        if tp == 1:
            return self.value * (self.num_blocks * self.block + self.head)
        rows = model.width * (model.width + model.ffn_width) // tp  # columns are rounded again
        return self.value * self.num_blocks * rows

    @property
    def sizes(self) -> tuple:
        return (
            self.decision.micro_batch_size,
            self.job.sequence_length,
            self.value,
            self.system.attention,
        )


def activations(at: Rank) -> float:
    """Return the bytes that the micro-batches under way keep for their backward passes."""
    parallel, recompute = at.parallel, at.decision.recompute
    held = at.in_flight * at.num_blocks / parallel.chunks * at.kept(recompute)
    if at.deferred:  # what is computed again stays until W, and so do the gradients of the logits
        again = at.kept("none") - at.kept("full") if recompute == "full" else 0
        held += at.deferred * (at.num_blocks / parallel.chunks * again + at.value * at.logits)
    # Replayed blocks' rounded weights go when autocast ends: with the forward pass, or a pipeline's
    # step
    goes = recompute == "full" and parallel.pp == 1 and at.casts
    held += at.value * at.head if goes else at.rounded
    if not at.is_last:
        return held
    options = {"recompute": recompute, "layout": at.decision.layout}
    block = cost.activation_bytes_per_layer(at.job.model, *at.sizes, **options)
    ends = (
        cost.activation_bytes(at.job.model, *at.sizes, **options) - at.job.model.num_layers * block
    )
    if at.casts:  # the last norm's float32 input
        ends += (4 - at.value) * at.stream
    # All other schedules begin the backward pass where the forward pass ends
    return held + ends * (at.in_flight // parallel.chunks if parallel.schedule == "gpipe" else 1)


# What is there for a moment


def temporary(at: Rank, activation: float) -> float:
    """Return the bytes beside `activation` when most are there; less what has been freed until
    then."""
    moments = [in_a_block(at), at_the_end(at) - activation]
    if at.is_last:
        moments += [at_the_loss(at), at_the_head(at)]
    if at.decision.recompute == "full" and at.parallel.pp == 1:
        moments.append(at.rounded + at.value * at.logits)
    return max(0, *moments)


def at_the_loss(at: Rank) -> float:
    """Count two float32 gradients; one where the vocabulary is cut: its loss is one operator."""
    gradients = 4 * at.logits * (2 if at.parallel.tp == 1 else 1)
    # Between the passes of a pipeline the root's weights are not there
    root = at.value * at.root if at.reshards and at.parallel.pp == 1 else 0
    return gradients + at.messages + root


def at_the_head(at: Rank) -> float:
    """Return the gradients of logits and weight, when the softmax is gone."""
    held = (at.value - 4) * at.logits + at.gradient * at.head
    if at.reshards:  # the root's weights, and the last block's on their way
        return held + at.value * (at.root + at.block)
    return held + (at.reduced * at.head if at.parallel.zero == 2 else 0)


def in_a_block(at: Rank) -> float:
    """Count the bytes when a block's backward pass begins, or ends, its activations gone."""
    model, value = at.job.model, at.value
    inside = value * (at.tokens + model.width) * model.ffn_width // at.parallel.tp  # of down
    inside += value * at.stream
    if at.decision.recompute == "full":
        inside += at.kept("none")
    if at.parallel.zero == 2:
        inside += 2 * at.bucket
    if at.has_units:  # the gradients of the block before leave
        kept = at.kept(at.decision.recompute)
        inside = max(inside, at.gradient * at.block - kept)
        inside += at.gradient * at.head + max(0, at.reduced * at.block - kept)
    if at.reshards:  # the next block comes
        inside += min(2, at.num_blocks) * value * at.block
    return inside - 4 * at.logits + at.messages


def at_the_end(at: Rank) -> float:
    """Count the bytes when all activations are gone and gradients travel, or become float32."""
    if at.has_units:  # the root's leave last; beside those of a tied matrix is their sum
        added = 2 * at.gradient * at.head * at.job.model.tied_embedding
        both, there = at.gradient + at.reduced, at.value * at.reshards
        return max(both * at.root, at.gradient * at.root + added + (both + there) * at.block)
    if at.parallel.zero > 0:
        return 2 * at.bucket
    if at.precision.master is None:
        return 0
    return (4 - (0 if at.has_buckets else at.gradient)) * at.num_parameters
