"""`minitron prove`: every technique against one process, on this machine's ranks.

In float64, ranks and one process agree to 12 digits: the mathematics is the same. In float32 two
such runs drift apart by rounding, which a second table measures.

Read in this order: run_prove, TECHNIQUES, prove; then describe_rounding and losses.
"""

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import NamedTuple

import torch
from torch import nn

from minitron.comm.agreement import SINGLE_RANK, Group
from minitron.config import (
    Config,
    ConfigError,
    DataConfig,
    ModelConfig,
    ParallelConfig,
    TrainConfig,
    command_line,
    require,
)
from minitron.config.layout import require_layout
from minitron.corpus.story_grammar import VOCABULARY, sample_story
from minitron.launch import RankError, is_torchrun_rank, run
from minitron.model.transformer import Transformer, initialize
from minitron.parallel.data.ddp import apply_bucketed_data_parallel, apply_naive_data_parallel
from minitron.parallel.data.fsdp import apply_fsdp
from minitron.parallel.data.zero import apply_zero1, apply_zero2
from minitron.parallel.grid import Grid
from minitron.parallel.interface import ParallelModel
from minitron.parallel.pipeline.stages import apply_pipeline_parallel
from minitron.parallel.tensor.layers import apply_tensor_parallel
from minitron.parallel.tensor.sequence import apply_sequence_parallel
from minitron.parallelize import CONTEXTS
from minitron.proof.difference import Moment, first_difference, largest_difference
from minitron.proof.oracle import (
    OPTIMIZERS,
    Apply,
    sample_batches,
    small_llama,
    trainings,
    undivided,
)
from minitron.step import train_step

MOST_RANKS = 64
SECONDS_PER_RANK = 30  # of a training, before it counts as a hang; they share the cores

# A model that 2, 3 and 4 ranks divide along every axis, 6 and 8 along all but the pipeline's.
VOCABULARY_SIZE, SEQUENCE = 48, 48
SIZES = dict(
    vocab_size=VOCABULARY_SIZE,
    max_sequence_length=SEQUENCE,
    num_layers=4,
    width=48,
    num_heads=24,
    num_kv_heads=24,
    ffn_width=48,
)

STORY_TOKENS = 64
STEPS = 1, 10, 100
"""Steps whose losses the second table compares."""


class Technique(NamedTuple):
    """A way to divide the training, and how a config asks for it: an axis, and other fields."""

    apply: Apply
    axis: str = "dp"
    options: dict = {}
    num_micro_batches: int = 1  # of each rank's part of a batch, at most


def apply_stages(model: nn.Module, group: Group) -> ParallelModel:
    return Grid(model, pipeline=apply_pipeline_parallel(model, group))


TECHNIQUES = {
    "data parallelism, naive": Technique(apply_naive_data_parallel),
    "data parallelism, bucketed": Technique(apply_bucketed_data_parallel),
    "ZeRO-1": Technique(apply_zero1),
    "ZeRO-2": Technique(apply_zero2),
    "ZeRO-3": Technique(apply_fsdp),
    "tensor parallelism": Technique(apply_tensor_parallel, "tp"),
    "sequence parallelism": Technique(apply_sequence_parallel, "tp", {"sequence": True}),
    **{
        f"context parallelism, {name}": Technique(apply, "cp", {"context": name})
        for name, apply in CONTEXTS.items()
    },
    "pipeline parallelism, 1F1B": Technique(apply_stages, "pp", num_micro_batches=2),
}


@dataclass(frozen=True)
class Prove:
    """Train a small model with every kind of parallelism and in one process, and compare them.

    Takes about a minute on 2 cores. The exit code is 1 if a technique trains differently.
    """

    ranks: int = 2
    """Processes to start, 2 to 64; techniques that cannot run on so many are left out."""


def run_prove(args: Sequence[str]) -> int:
    """Print both tables; returns the exit code."""
    ranks = command_line.parse(Prove, args, "minitron prove").ranks
    require(
        not is_torchrun_rank(),
        "minitron prove under torchrun: it starts its own ranks",
        f"run minitron prove --ranks {ranks} without torchrun",
    )
    require(
        2 <= ranks <= MOST_RANKS,
        f"--ranks {ranks}",
        f"use 2 to {MOST_RANKS}",
        "the reference is one process",
    )

    print(
        f"The same small Llama trains on {ranks} ranks and in one process, in float64. Largest "
        "relative\ndifference of any loss, gradient, or parameter, on any rank:\n\n"
        f"{'technique':34}{''.join(f'{name:>10}' for name in OPTIMIZERS)}   verdict",
        flush=True,
    )
    faults = []
    for name, technique in TECHNIQUES.items():
        result = prove(technique, ranks)
        print(f"{name:34}{result}", flush=True)
        if result.fault:
            faults.append(f"\n{name} is not the same training:\n{result.fault}")
    if faults:
        print("\n".join(faults))
        return 1
    print(f"\n{describe_rounding(ranks)}")
    return 0


class Result(NamedTuple):
    """Largest differences by optimizer, why the technique was left out, what was wrong with it."""

    differences: dict[str, float] = {}
    refusal: str = ""
    fault: str = ""

    def __str__(self) -> str:
        cells = [shown(self.differences.get(name)) for name in OPTIMIZERS]
        verdict = (
            f"left out: {self.refusal}"
            if self.refusal
            else "not the same training"
            if self.fault
            else "the same training"
        )
        return f"{''.join(f'{cell:>10}' for cell in cells)}   {verdict}"


def shown(difference: float | None) -> str:
    return "-" if difference is None else f"{difference:.0e}" if difference else "0"


def prove(technique: Technique, ranks: int) -> Result:
    """Train by `technique` on `ranks` processes, and compare with one process."""
    refusal = why_refused(technique, ranks)
    if refusal:
        return Result(refusal=refusal)
    try:
        by_rank = run(
            records,
            ranks,
            technique.apply,
            ranks,
            technique.num_micro_batches,
            timeout=SECONDS_PER_RANK * ranks,
        )
    except RankError as error:
        return Result(fault=str(error))
    differences, fault = {}, ""
    for optimizer, expected in reference(ranks).items():
        seen = [done[optimizer] for done in by_rank]
        differences[optimizer] = largest_difference(expected, seen)
        found = first_difference(expected, seen)
        fault = fault or (f"{found} with {optimizer}" if found else "")
    return Result(differences, fault=fault)


def why_refused(technique: Technique, ranks: int) -> str:
    """Return what keeps so many ranks from dividing the small model so; "" if nothing does."""
    try:
        parallel = ParallelConfig(**{technique.axis: ranks}, **technique.options)
        train = TrainConfig(global_batch_size=2 * ranks, micro_batch_size=1)
        data = DataConfig(sequence_length=SEQUENCE)
        config = Config(ModelConfig("llama", **SIZES), data, train, parallel)
        require_layout(config, ranks)
    except ConfigError as error:
        return error.problem
    return ""


@cache
def reference(ranks: int) -> dict[str, list[Moment]]:
    """Return the records of one process, on the samples that so many ranks share."""
    return records(SINGLE_RANK, undivided, ranks)


def records(
    group: Group, apply: Apply, ranks: int, num_micro_batches: int = 1
) -> dict[str, list[Moment]]:
    """Train for two steps, on batches that so many ranks cannot share evenly."""
    batches = sample_batches((2 * ranks + 1, 2 * ranks - 1), VOCABULARY_SIZE, SEQUENCE)
    return trainings(group, apply, partial(small_llama, **SIZES), batches, num_micro_batches)


# How rounding grows


def describe_rounding(ranks: int) -> str:
    """Return the second table: the losses of two runs of the same training, and what parts them."""
    lines = [
        f"A story model trains with data parallelism for {STEPS[-1]} steps. Relative difference of "
        f"its loss on {ranks}\nranks and in one process:\n",
        f"{'step':10}{''.join(f'{step:>10}' for step in STEPS)}",
    ]
    for dtype in (torch.float64, torch.float32):
        alone = losses(SINGLE_RANK, undivided, dtype, STEPS[-1])
        divided = run(
            losses,
            ranks,
            apply_bucketed_data_parallel,
            dtype,
            STEPS[-1],
            timeout=SECONDS_PER_RANK * ranks,
        )[0]
        cells = [shown(abs(divided[step - 1] / alone[step - 1] - 1)) for step in STEPS]
        lines.append(
            f"{str(dtype).removeprefix('torch.'):10}{''.join(f'{cell:>10}' for cell in cells)}"
        )
    return "\n".join(lines) + (
        "\n\nFloat64 shows that the mathematics is the same. In float32 the two runs drift apart, "
        "because\nranks sum in a different order and so round differently: of two orders of "
        "summation, neither is wrong."
    )


def losses(group: Group, apply: Apply, dtype: torch.dtype, num_steps: int) -> list[float]:
    """Train a small story model with `minitron train`'s own step; returns the loss of each."""
    S, rate = STORY_TOKENS, 1e-2
    model = Transformer(ModelConfig("llama", len(VOCABULARY), S, 2, 48, 4, 4, 128)).to(dtype)
    initialize(model, seed=0)
    parallel = apply(model, group)
    optimizer = parallel.make_optimizer(partial(torch.optim.AdamW, betas=(0.9, 0.98)))
    index, count = parallel.data_part
    found = []
    for tokens in story_batches(num_steps, max(8, count), S):
        part = tokens[index::count]
        micro_batch = part[:, :-1], part[:, 1:]
        loss, _ = train_step(model, optimizer, [micro_batch], rate, 1.0, parallel)
        found.append(float(loss))
    return found


def story_batches(num_steps: int, size: int, sequence: int) -> Iterator[torch.Tensor]:
    """Yield the stories of each step, (B, S+1) token ids; the same in every process."""
    number = {word: index for index, word in enumerate(VOCABULARY)}
    rng, tokens, needed = random.Random(0), [], size * (sequence + 1)
    for _ in range(num_steps):
        while len(tokens) < needed:
            tokens += [number[word] for word in sample_story(rng)]
        yield torch.tensor(tokens[:needed]).view(size, sequence + 1)
        tokens = tokens[needed:]
