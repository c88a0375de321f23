"""The steps that `benchmarks/gpu.py` measures on a GPU, and what is predicted for them."""

from dataclasses import dataclass, replace

from minitron import cost
from minitron.config import ModelConfig, ParallelConfig
from minitron.corpus.story_grammar import VOCABULARY
from minitron.plan.estimate import Estimate, estimate
from minitron.plan.hardware import Device
from minitron.plan.job import Decision, Job


@dataclass(frozen=True)
class MeasuredStep:
    """A training step of one device: the model, and the sequences that it trains on."""

    model: ModelConfig
    sequences: int
    micro_batch_size: int
    """Sequences at a time."""

    @property
    def sequence_length(self) -> int:
        return self.model.max_sequence_length

    @property
    def num_tokens(self) -> int:
        return self.sequences * self.sequence_length

    def estimate(
        self, device: Device, precision: str, recompute: cost.RecomputeKind = "none"
    ) -> Estimate:
        """Estimate seconds and bytes on a device, without compiling."""
        job = Job(self.model, 1, device, self.sequence_length, self.sequences, precision=precision)
        return estimate(job, Decision(ParallelConfig(dp=1), recompute, self.micro_batch_size))


GPT2 = ModelConfig("gpt", 50304, 1024, 12, 768, 12, 12, 3072)
LLAMA = ModelConfig("llama", 32000, 2048, 24, 2048, 16, 16, 5632, tied_embedding=False)
STORYTELLER = ModelConfig("llama", -(-len(VOCABULARY) // 64) * 64, 512, 4, 2048, 16, 16, 5632)

SPEED = {"GPT-2 124M": MeasuredStep(GPT2, 32, 32), "Llama 1.3B": MeasuredStep(LLAMA, 16, 4)}
"""Of part "mfu". The Llama's micro-batches are as large as 80 GB allow without compiling."""
MEMORY = MeasuredStep(replace(LLAMA, num_layers=12), 4, 4)
"""With half of the layers of the Llama above."""
OVERLAP = MeasuredStep(replace(LLAMA, num_layers=6), 4, 4)
PRECISION = MeasuredStep(STORYTELLER, 8, 8)
