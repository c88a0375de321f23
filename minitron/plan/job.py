"""What is to be trained on how many GPUs, and one layout for it.

Read in this order: Job, Decision, size_of.
"""

import math
from dataclasses import dataclass

from minitron import cost
from minitron.config import Config, ModelConfig, ParallelConfig, require
from minitron.config.layout import WrongNumRanks, require_ranks
from minitron.plan.hardware import Device

USABLE = 0.8
"""Of the memory; the rest is CUDA's, NCCL's, and lost between tensors."""


@dataclass(frozen=True)
class Job:
    """What to train, on which GPUs, in which steps."""

    model: ModelConfig
    num_gpus: int
    device: Device
    sequence_length: int
    global_batch_size: int
    gpus_per_node: int = 8
    precision: str = "bf16"

    @property
    def limit(self) -> float:
        """Bytes that a GPU may hold."""
        return USABLE * self.device.memory_bytes


@dataclass(frozen=True)
class Decision:
    """A layout, and how the tree came to it."""

    parallel: ParallelConfig
    recompute: cost.RecomputeKind = "none"
    micro_batch_size: int = 1
    steps: tuple[str, ...] = ()
    """Each question with its two numbers and the answer."""

    def __post_init__(self):
        require(
            not self.parallel.is_v,
            f"parallel.schedule = {self.parallel.schedule}: the "
            "planner has no formula for a rank that holds the first and the last stage",
            "measure one with `minitron dryrun`, or simulate the schedule (chapter 9)",
            field="parallel.schedule",
        )
        require(
            self.parallel.cp == 1,
            f"parallel.cp = {self.parallel.cp}: the planner has no formula for context parallelism",
            "measure one with `minitron dryrun`",
            field="parallel.cp",
        )

    @property
    def layout(self) -> cost.Layout:
        return cost.Layout(self.parallel.tp, self.parallel.sequence)

    @property
    def accumulation(self) -> cost.Accumulation:
        """What gradients are between micro-batches, if ZeRO divides them."""
        if not self.parallel.sync_every_micro_batch:
            return "unsharded"
        return "reduced" if self.parallel.sync_replicas_every_micro_batch else "sharded"

    @property
    def num_shards(self) -> int:
        """Ranks among which ZeRO divides the state, of those along dp."""
        return self.parallel.dp // self.parallel.replicas

    def collectives(self, job: Job) -> cost.StepCollectives:
        """Count how often a step sends parameters and gradients along dp."""
        parallel = self.parallel
        return cost.step_collectives(
            parallel.zero,
            self.num_micro_batches(job),
            parallel.reshard_each_pass,
            self.accumulation,
        )

    def num_micro_batches(self, job: Job) -> int:
        """Count the micro-batches of a step, on the rank that reads most."""
        sequences = math.ceil(job.global_batch_size / self.parallel.dp)
        return math.ceil(sequences / self.micro_batch_size)

    def __str__(self) -> str:
        axes, size = self.parallel, self.micro_batch_size
        recomputed = {"none": "", "selective": ", attention recomputed", "full": ", recomputed"}
        together = f", {size} sequences at once" if size > 1 else ""
        return (
            f"tp {axes.tp}, pp {axes.pp}, dp {axes.dp}, ZeRO-{axes.zero}"
            f"{recomputed[self.recompute]}{together}"
        )


def size_of(model: ModelConfig) -> str:
    """Say how many parameters, as in "124 M" or "1.01 T"."""
    number = cost.num_parameters(model)
    prefixes = {"T": 1e12, "G": 1e9, "M": 1e6, "k": 1e3}
    prefix = next((each for each in prefixes if number >= 0.9995 * prefixes[each]), "k")
    return f"{number / prefixes[prefix]:.3g} {prefix}"


def require_gpus(config: Config, num_gpus: int) -> None:
    """Raise ConfigError if so many GPUs cannot run `config`, as a run would, but nothing starts."""
    try:
        require_ranks(config, num_gpus)
    except WrongNumRanks as error:
        error.remedies = (f"plan for {error.needed}", *error.remedies[1:])
        raise
