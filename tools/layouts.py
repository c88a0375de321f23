"""Print which layout each config of a large model suggests, and what its fullest GPU holds.

    python tools/layouts.py    # the table in configs/README.md

A config says in its head with which options it runs on how many GPUs. Here they are read as
the command line would, and added up with the formulas of `minitron.cost`.
"""

import math
import re
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from minitron import cost
from minitron.config import Config, ModelConfig
from minitron.cost.sharding import FULLY_SHARDED
from minitron.parallel.data_parallel import BUCKET_BYTES
from minitron.parallel.pipeline_plan import split_blocks
from minitron.precision import PRECISIONS
from minitron.run_checks import num_readers
from minitron.train import read_options

CONFIGS = Path(__file__).parents[1] / "configs"
NAMES = ("gpt2-124m", "llama-1b", "llama-8b", "llama-70b", "gpt3-175b")
LINE = re.compile(r"^# +([\d,]+) GPUs: (.*)$", flags=re.MULTILINE)
TOO_FEW = "too few"
SCHEDULES = {"gpipe": "GPipe", "1f1b": "1F1B", "interleaved": "interleaved 1F1B",
             "zero-bubble": "ZB-H1"}

Bytes = dict[str, float]


def suggested(name: str) -> dict[int, Config | None]:
    """By the number of GPUs, the config with the options for it; None if they are too few."""
    path = CONFIGS / f"{name}.toml"
    found = {}
    for number, words in LINE.findall(path.read_text()):
        options = [] if "--" not in words else words.split()
        found[int(number.replace(",", ""))] = None if words.startswith(TOO_FEW) else \
            read_options([str(path), *options])
    return found


def micro_batches(config: Config, num_gpus: int) -> tuple[int, int]:
    """How many of them a rank reads for one step, and of how many sequences each."""
    num_sequences = math.ceil(config.train.global_batch_size / num_readers(config, num_gpus))
    size = min(num_sequences, config.train.micro_batch_size)
    return math.ceil(num_sequences / size), size


def bytes_held(config: Config, num_gpus: int) -> Bytes:
    """What the fullest GPU holds at most, by kind.

    Not counted: CUDA itself, NCCL's buffers, and memory lost between tensors.
    """
    ranks = range(config.parallel.pp)
    return max((of_stages(config, num_gpus, rank) for rank in ranks), key=lambda b: sum(b.values()))


class Sizes(NamedTuple):
    """Parameters that one of the tensor-parallel ranks holds."""

    block: int
    embedding: int
    head: int


def sizes_of(model: ModelConfig, tp: int) -> Sizes:
    """The head includes the last norm; a tied one is the embedding, where both are on one rank."""
    one, two = (cost.tensor_parallel_parameters(replace(model, num_layers=n), tp) for n in (1, 2))
    norm = cost.num_norm_parameters(model)
    head = model.vocab_size * model.width // tp
    embedding = one - (two - one) - norm - (0 if model.tied_embedding else head)
    return Sizes(two - one, embedding, head + norm)


def of_stages(config: Config, num_gpus: int, rank: int) -> Bytes:
    """What a GPU of the pipeline's `rank` holds."""
    p, v, L = config.parallel.pp, config.parallel.chunks, config.model.num_layers
    block, embedding, head = sizes_of(config.model, config.parallel.tp)
    parts = split_blocks([block] * L, p * v, embedding, head)
    layers = sum(len(parts[stage]) for stage in range(rank, p * v, p))

    is_first, is_last = rank == 0, rank == p - 1
    ends = embedding * is_first + head * is_last
    if is_first and is_last and config.model.tied_embedding:
        ends -= config.model.vocab_size * config.model.width // config.parallel.tp
    m, size = micro_batches(config, num_gpus)
    held = cost.activations_held(SCHEDULES[config.parallel.schedule], p, m, rank, v) / v
    return {
        **states(config, num_gpus, layers * block + ends),
        "activations": activations(config, size, layers * held, is_last),
        "in passing": in_passing(config, size, block, ends, is_last),
    }


def states(config: Config, num_gpus: int, num_parameters: int) -> Bytes:
    """Weights, gradients and what the optimizer holds, float32 weights among it."""
    zero = config.parallel.zero
    recipe = FULLY_SHARDED if zero == 3 else PRECISIONS[config.train.precision].cost
    held = cost.zero_holdings(num_parameters, num_readers(config, num_gpus), zero, recipe)
    return {"weights": held["parameter"], "gradients": held["gradient"],
            "optimizer": held["optimizer state"]}


def activations(config: Config, size: int, num_blocks: float, is_last: bool) -> float:
    """What is kept for the backward pass, of as many blocks and micro-batches as are held."""
    one = replace(config.model, num_layers=1)
    args = size, config.data.sequence_length
    options = {"recompute": config.train.recompute, "layout": layout_of(config)}
    block = cost.activation_bytes_per_layer(one, *args, **options)
    ends = cost.activation_bytes(one, *args, **options) - block
    return num_blocks * block + is_last * ends


def layout_of(config: Config) -> cost.Layout:
    return cost.Layout(config.parallel.tp, config.parallel.sequence)


def in_passing(config: Config, B: int, block_size: int, ends: int, is_last: bool) -> float:
    """What is there for a moment.

    A block's gradients beside its activations, and these again if they are made anew; the logits
    beside their softmax, float32, before or after the loss; two buckets of gradients, or units.
    """
    S, tp = config.data.sequence_length, config.parallel.tp
    block = cost.activation_bytes_per_layer(config.model, B, S, layout=layout_of(config))
    replayed = 0 if config.train.recompute == "none" else block
    logits = 8 * is_last * B * S * config.model.vocab_size // tp

    precision, zero = PRECISIONS[config.train.precision], config.parallel.zero
    cast = 2 * (config.model.num_layers * block_size if precision.autocasts else 0)
    if zero == 3:  # two blocks and the ends, each with gradients as they are made and as they leave
        per_value = precision.activations.itemsize + precision.gradients.itemsize \
            + precision.reduction.itemsize
        travelling = per_value * (2 * block_size + ends)
    else:
        largest = max(BUCKET_BYTES, config.model.vocab_size * config.model.width // tp
                      * precision.gradients.itemsize)
        travelling = 2 * largest * (zero > 0)
    return block + replayed + logits + cast + travelling


def describe(config: Config, num_gpus: int) -> str:
    """The layout in words: "dp 2, pp 4, tp 8 + sequence, ZeRO-1"."""
    parallel = config.parallel
    words = [f"dp {num_readers(config, num_gpus)}"]
    if parallel.pp > 1:
        words.append(f"pp {parallel.pp}" + (f" x {parallel.chunks}" if parallel.chunks > 1 else ""))
    if parallel.tp > 1:
        words.append(f"tp {parallel.tp}" + (" + sequence" if parallel.sequence else ""))
    if parallel.zero:
        words.append(f"ZeRO-{parallel.zero}")
    return ", ".join(words)


def idle(config: Config, num_gpus: int) -> str:
    """The share of a step in which the pipeline's ranks wait."""
    p, (m, _) = config.parallel.pp, micro_batches(config, num_gpus)
    if p == 1:
        return ""
    bubble = cost.pipeline_bubble(p, m, 1, 2, config.parallel.chunks)
    return f"{100 * bubble.of_total:.1f} %"


def table() -> str:
    """All configs and sizes, as Markdown."""
    kinds = ("weights", "gradients", "optimizer", "activations", "in passing")
    rows = [["config", "GPUs", "layout", "micro-batches", "idle", *kinds, "GB in all"]]
    for name in NAMES:
        for num_gpus, config in suggested(name).items():
            start = [name, f"{num_gpus:,}"]
            if config is None:
                rows.append([*start, TOO_FEW, *[""] * (len(rows[0]) - 3)])
                continue
            held = bytes_held(config, num_gpus)
            m, size = micro_batches(config, num_gpus)
            rows.append([*start, describe(config, num_gpus), f"{m} of {size}",
                         idle(config, num_gpus), *(f"{held[kind] / 1e9:.1f}" for kind in kinds),
                         f"{sum(held.values()) / 1e9:.0f}"])
    lines = ["| " + " | ".join(row) + " |" for row in rows]
    rule = "|---|--:|---|--:|" + "--:|" * (len(rows[0]) - 4)
    return "\n".join([lines[0], rule, *lines[1:]])


if __name__ == "__main__":
    print(table())
