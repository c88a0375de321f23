"""A run's configuration: five frozen dataclasses, read from TOML, overridden on the command line.

    minitron train configs/stories.toml --model.num-layers 12 --train.steps 200

A field's comment gives its unit or the reason for its value; `minitron train --help` prints it.
Every impossible value is one `ConfigError` line: what was wrong, both numbers, the remedy.
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from minitron.config.checks import (
    other_heads,
    require_at_least,
    require_at_most,
    require_below_1,
    require_positive,
    require_types,
    round_up,
)
from minitron.config.parallel import ParallelConfig
from minitron.system.errors import ConfigError, require

LARGEST_SIZE = 10**9
"""Of a dimension: the bytes of a matrix still fit in an int64."""
MOST_LAYERS = 2_000  # twice as many as any published (DeepNet, Wang et al. 2022)


@dataclass(frozen=True)
class ModelConfig:
    family: Literal["gpt", "llama"] = "llama"
    """gpt: LayerNorm, learned positions, GELU, biases. llama: RMSNorm, RoPE, SwiGLU, no biases."""
    vocab_size: int = 0
    """Rows of the embedding, V. 0: as many as the data's vocabulary has."""
    max_sequence_length: int = 128
    """Longest sequence the model accepts, in tokens (rows of the learned positions of gpt)."""
    num_layers: int = 4
    """Blocks, L."""
    width: int = 128
    """Model width, D."""
    num_heads: int = 4
    """Query heads, H; the head width is K = D/H."""
    num_kv_heads: int = 4
    """Key and value heads; fewer than num_heads is grouped-query attention (llama only)."""
    ffn_width: int = 384
    """Feed-forward width, F: 4 D is usual for gpt, about 8/3 D for llama."""
    tied_embedding: bool = True
    """The output head shares the token embedding's weight."""
    dropout: float = 0.0
    """Dropout rate of attention weights and of each branch's output, during training."""
    rope_theta: float = 10_000.0
    """Base of the rotary frequencies (llama only)."""
    rope_scaling: float = 1.0
    """Factor by which Llama 3.1 slows down rotations with periods above 8192 tokens; 1: off."""
    norm_eps: float = 1e-5
    """Added to the variance in every norm."""

    def __post_init__(self):
        require_types("model", self)
        sizes = ("max_sequence_length", "width", "num_heads", "num_kv_heads", "ffn_width")
        require_positive("model", self, *sizes, "num_layers", "norm_eps")
        require_at_most("model", self, **dict.fromkeys([*sizes, "vocab_size"], LARGEST_SIZE))
        require_at_most(
            "model", self, num_layers=MOST_LAYERS, rope_theta=10**12, rope_scaling=10**6, norm_eps=1
        )
        require_at_least("model", self, vocab_size=0, rope_theta=1, rope_scaling=1)
        require_below_1("model", self, "dropout")
        self._require_heads()

    def _require_heads(self) -> None:
        if self.width % self.num_heads:  # not `require`: only then look for what divides
            raise ConfigError(
                f"model.width = {self.width} is not a multiple of model.num_heads = "
                f"{self.num_heads}",
                f"try {other_heads(self)}",
                field="model.width",
            )
        require(
            self.num_heads % self.num_kv_heads == 0,
            f"model.num_heads = {self.num_heads} is "
            f"not a multiple of model.num_kv_heads = {self.num_kv_heads}",
            f"try --model.num-kv-heads {self.num_heads}",
            field="model.num_kv_heads",
        )
        if self.family == "gpt":
            require(
                self.num_kv_heads == self.num_heads,
                f"model.num_kv_heads = {self.num_kv_heads} with model.family = gpt: grouped-query "
                "attention needs model.family = llama",
                f"set it to num_heads = {self.num_heads}",
                field="model.num_kv_heads",
            )
        else:
            require(
                self.head_width % 2 == 0,
                f"model.width / model.num_heads = {self.head_width} is odd",
                "rotary positions rotate pairs of numbers, so make the head width even",
                field="model.num_heads",
            )

    @property
    def head_width(self) -> int:
        return self.width // self.num_heads


@dataclass(frozen=True)
class DataConfig:
    path: Path = Path("data/stories")
    """Folder with train_*.bin, val_*.bin and tokenizer.json; `minitron data` makes one."""
    sequence_length: int = 128
    """Tokens a sample trains on, S."""

    def __post_init__(self):
        require_types("data", self)
        require_positive("data", self, "sequence_length")


@dataclass(frozen=True)
class TrainConfig:
    steps: int = 1000
    """Optimizer steps."""
    global_batch_size: int = 32
    """Sequences per optimizer step, over all ranks: GBS."""
    micro_batch_size: int = 32
    """Sequences in one forward and backward pass on one rank: MBS."""
    learning_rate: float = 3e-3
    """Peak of the schedule."""
    min_learning_rate: float = 3e-4
    """Learning rate at the end of the cosine."""
    warmup_steps: int = 50
    """Steps of linear warm-up."""
    continuation: Literal["none", "constant", "linear", "restart", "stretch"] = "none"
    """What the learning rate does if a run is resumed with a different number of steps, peak,
    minimum or warm-up. none: refuse to resume if the rate would jump. constant: keep the last rate.
    linear: go from the last rate to the minimum, or to 0 if the last rate is not above the minimum.
    restart: warm up and decay again. stretch: jump to the new cosine."""
    weight_decay: float = 0.1
    """AdamW's decay, on matrices only (norms and biases are left alone)."""
    beta1: float = 0.9
    """AdamW: decay rate of the running mean of the gradient."""
    beta2: float = 0.95
    """AdamW: decay rate of the running mean of the squared gradient."""
    clip_norm: float = 1.0
    """Largest global gradient norm; 0 switches clipping off."""
    precision: Literal["fp32", "bf16-autocast", "bf16", "bf16-fp32-grads", "fp16", "fp8"] = "fp32"
    """fp32: all float32. bf16-autocast: float32 weights, bf16 matmuls. bf16, fp16: 16-bit weights
    and gradients, float32 master weights; fp16 scales the loss. bf16-fp32-grads: bf16 with float32
    gradients. fp8: bf16 with 8-bit matmuls."""
    recompute: Literal["none", "full", "selective", "sqrt"] = "none"
    """Activations to recompute in the backward pass instead of keeping them. full: every block's.
    selective: attention's. sqrt: those of about sqrt(L) segments of blocks."""
    compile: bool = False
    """Run the model through torch.compile."""
    device: str = "auto"
    """auto, cpu, cuda, cuda:1, mps, ...; auto takes CUDA if there is one, else the CPU."""
    seed: int = 0
    """Seeds the weights, the order of the samples, and dropout."""
    log_every: int = 1
    """Steps between writes of the log, each of which waits for the device: use about 10 on GPUs.
    Every step is logged."""
    eval_every: int = 200
    """Steps between evaluations; 0 evaluates at the end only."""
    eval_sequences: int = 256
    """Validation sequences per evaluation."""
    checkpoint_every: int = 200
    """Steps between checkpoints; 0 saves at the end only (and when interrupted)."""
    keep_checkpoints: int = 2
    """Newest checkpoints to keep; older ones are deleted."""
    async_checkpoint: bool = False
    """Write checkpoints in the background, from a copy in the host's memory."""
    hang_timeout: float = 900.0
    """Seconds without a finished step after which a run on several ranks ends, and reports which
    rank the others wait for. Leave time for a first step that compiles and for a save, which may
    take minutes; an evaluation is watched in pieces no longer than a step. 0: off; PyTorch then
    ends a stuck collective after half an hour, without naming a rank."""

    def __post_init__(self):
        require_types("train", self)
        self._require_ranges()
        require(
            self.recompute == "none" or not self.compile,
            f"train.recompute = {self.recompute} with train.compile = {self.compile}: "
            "torch.compile decides itself which activations to keep",
            "switch one of them off",
            field="train.recompute",
        )
        require(
            self.hang_timeout <= 1500,
            f"train.hang_timeout = {self.hang_timeout:g}: PyTorch "
            "ends a collective after 1,800 s, and names no rank",
            "set it to 1500 or less",
            field="train.hang_timeout",
        )
        require_below_1("train", self, "beta1", "beta2")
        self._require_rates()

    def _require_ranges(self) -> None:
        require_positive(
            "train",
            self,
            "steps",
            "global_batch_size",
            "micro_batch_size",
            "learning_rate",
            "log_every",
            "eval_sequences",
            "keep_checkpoints",
        )
        require_at_least(
            "train",
            self,
            warmup_steps=0,
            eval_every=0,
            checkpoint_every=0,
            weight_decay=0,
            clip_norm=0,
            min_learning_rate=0,
            seed=0,
            hang_timeout=0,
        )

    def _require_rates(self) -> None:
        require(
            self.min_learning_rate <= self.learning_rate,
            f"train.min_learning_rate = "
            f"{self.min_learning_rate} is above train.learning_rate = {self.learning_rate}",
            "lower it, or raise the peak",
            field="train.min_learning_rate",
        )
        require(
            self.learning_rate * self.weight_decay < 1,
            f"train.weight_decay = "
            f"{self.weight_decay:g} with train.learning_rate = {self.learning_rate:g}: a step "
            "would take away all of a weight, or more",
            "their product must be less than 1",
            field="train.weight_decay",
        )


@dataclass(frozen=True)
class LogConfig:
    all_ranks: bool = False
    """Write a log, and a trace, for every rank, not only rank 0: metrics_rank1.jsonl, ..."""
    tensorboard: bool = False
    """Write the log for TensorBoard too, into the run's folder."""
    wandb: str = ""
    """Send the log to this project at Weights & Biases too."""
    trace_steps: int = 0
    """Steps to profile, after the first few: traces/rank0.json.gz, shown by ui.perfetto.dev."""

    def __post_init__(self):
        require_types("log", self)
        require_at_least("log", self, trace_steps=0)


@dataclass(frozen=True)
class Config:
    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    log: LogConfig = field(default_factory=LogConfig)

    def __post_init__(self):
        require(
            self.data.sequence_length <= self.model.max_sequence_length,
            f"data.sequence_length = {self.data.sequence_length} is longer than "
            f"model.max_sequence_length = {self.model.max_sequence_length}",
            "raise the second or lower the first",
            field="data.sequence_length",
        )
        parallel = self.parallel
        num_stages = parallel.pp * parallel.chunks
        require(
            self.model.num_layers >= num_stages,
            f"model.num_layers = {self.model.num_layers} "
            f"does not fill parallel.pp x parallel.chunks = {num_stages} stages",
            f"lower them to {self.model.num_layers} at most, or add layers",
            field="parallel.pp",
            kind="fewer layers than stages",
        )
        require(
            parallel.cp == 1 or self.model.dropout == 0,
            f"model.dropout = "
            f"{self.model.dropout} with parallel.cp = {parallel.cp}: context-parallel attention "
            "has no dropout",
            "set model.dropout to 0",
            field="model.dropout",
        )
        for name, length in (
            ("data.sequence_length", self.data.sequence_length),
            ("model.max_sequence_length", self.model.max_sequence_length),
        ):
            require(
                length % parallel.sequence_parts == 0,
                f"{name} = {length} is not divisible by {parallel.words_for_sequence_parts}",
                f"use {round_up(length, parallel.sequence_parts)}",
                field=name,
                kind=f"a sequence that {'tp' if parallel.cp == 1 else 'cp'} does not divide",
            )
        if self.train.compile:
            self._require_compilable()

    def _require_compilable(self) -> None:
        parallel = self.parallel
        for axis, works, why in (
            (
                "zero",
                parallel.zero < 3,
                "a compiled model keeps the weights that stage 3 frees",
            ),
            ("tp", parallel.tp == 1, "collectives inside sharded layers are not compiled"),
            ("cp", parallel.cp == 1, "messages inside attention are not compiled"),
            ("pp", parallel.pp == 1, "pipeline stages are not compiled"),
            (
                "overlap_gather",
                not parallel.overlap_gather,
                "waiting for weights between layers breaks the compiled graph",
            ),
        ):
            require(
                works,
                f"train.compile with parallel.{axis} = {getattr(parallel, axis)}: {why}",
                "switch it off",
                field="train.compile",
            )
