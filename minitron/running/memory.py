"""Whether a run fits in memory, asked before anything is built.

What is too large takes minutes to fail, or stops the machine. Nothing is refused that would have
run: the training state, the activations of one micro-batch and the samples that are read at once
are each compared with the memory alone, for they need not be there at the same time.

Read in this order: require_memory, least_bytes, least_activations.
"""

from dataclasses import replace
from math import ceil, isqrt

import torch

from minitron import cost
from minitron.config import Config, require
from minitron.config.layout import data_parallel_size
from minitron.cost.sharding import FULLY_SHARDED
from minitron.dataset import TOKEN_BYTES
from minitron.precision import PRECISIONS

MICRO_BATCH_BYTES = 1000  # of Python's objects, two tensors

REMEDIES = {
    "the training state": "lower model.width, num_layers, ffn_width or vocab_size, or shard it "
    "with parallel.tp, parallel.pp or parallel.zero",
    "a micro-batch's activations": "lower train.micro_batch_size or data.sequence_length, "
    "recompute them with train.recompute, or split the sequence with "
    "parallel.cp",
    "the samples of a step": "lower train.global_batch_size",
    "the samples of an evaluation": "lower train.eval_sequences",
}


def require_memory(
    config: Config, num_ranks: int, available: float, place: str, num_eval_sequences: int = 0
) -> None:
    """Raise ConfigError if one thing alone needs more than the `available` bytes of `place`."""
    for what, size in least_bytes(config, num_ranks, num_eval_sequences).items():
        require(
            size <= available,
            f"{what} would take at least {gigabytes(size)} on each rank, but {place} "
            f"has {gigabytes(available)} of memory: {REMEDIES[what]}",
        )


def gigabytes(size: float) -> str:
    return f"{size / 1e9:,.1f} GB" if size < 1e15 else f"{size / 1e9:.1e} GB"


def least_bytes(config: Config, num_ranks: int, num_eval_sequences: int = 0) -> dict[str, float]:
    """Return what a rank holds at least, by purpose; temporary tensors are left out."""
    model, axes, train = config.model, config.parallel, config.train
    precision, readers = PRECISIONS[train.precision], data_parallel_size(config, num_ranks)
    recipe = FULLY_SHARDED if axes.zero == 3 else precision.cost
    num_parameters = cost.tensor_parallel_parameters(model, axes.tp) // axes.pp
    sample = (config.data.sequence_length + 1) * (TOKEN_BYTES + torch.int64.itemsize)
    num_sequences = ceil(train.global_batch_size / readers)
    num_micro_batches = ceil(num_sequences / train.micro_batch_size)
    micro_batch_size = min(train.micro_batch_size, num_sequences)
    return {
        "the training state": cost.zero_bytes(num_parameters, readers * axes.cp, axes.zero, recipe),
        "a micro-batch's activations": least_activations(config, micro_batch_size),
        "the samples of a step": num_sequences * sample + num_micro_batches * MICRO_BATCH_BYTES,
        "the samples of an evaluation": ceil(num_eval_sequences / readers) * sample,
    }


def least_activations(config: Config, num_sequences: int) -> float:
    """Return the bytes of one micro-batch: a block with the ends, or all blocks that a rank has."""
    model, axes, train = config.model, config.parallel, config.train
    kept, num_blocks = train.recompute, model.num_layers / axes.pp
    if kept == "sqrt" or train.compile:
        kept, num_blocks = "full", isqrt(model.num_layers) / axes.pp
    sizes = (
        num_sequences,
        config.data.sequence_length // axes.cp,
        PRECISIONS[train.precision].activations.itemsize,
    )
    options = {"recompute": kept, "layout": cost.Layout(axes.tp, axes.sequence)}
    ends = cost.activation_bytes(replace(model, num_layers=1), *sizes, **options)
    return max(ends, num_blocks * cost.activation_bytes_per_layer(model, *sizes, **options))
