"""Print which layout each config of a large model suggests, and what its fullest GPU holds.

    python tools/layouts.py    # the table in configs/README.md

A config says in its head with which options it runs on how many GPUs. Here they are read as
the command line would, and added up with the formulas of `minitron.plan.memory`.
"""

import math
import re
from dataclasses import replace
from pathlib import Path

from minitron import cost
from minitron.config import Config
from minitron.config.layout import data_parallel_size
from minitron.plan.hardware import DEVICES
from minitron.plan.job import Decision, Job
from minitron.plan.memory import memory_of
from minitron.train import read_options

CONFIGS = Path(__file__).parents[1] / "configs"
NAMES = ("gpt2-124m", "llama-1b", "llama-8b", "llama-70b", "gpt3-175b")
LINE = re.compile(r"^# +([\d,]+) GPUs: (.*)$", flags=re.MULTILINE)
TOO_FEW = "too few"
KINDS = {
    "weights": "parameter",
    "gradients": "gradient",
    "optimizer": "optimizer state",
    "activations": "activation",
    "temporary": "temporary",
}

Bytes = dict[str, float]


def suggested(name: str) -> dict[int, Config | None]:
    """By the number of GPUs, the config with the options for it; None if they are too few."""
    path = CONFIGS / f"{name}.toml"
    found = {}
    for number, words in LINE.findall(path.read_text()):
        options = [] if "--" not in words else words.split()
        found[int(number.replace(",", ""))] = (
            None if words.startswith(TOO_FEW) else read_options([str(path), *options])
        )
    return found


def micro_batches(config: Config, num_gpus: int) -> tuple[int, int]:
    """How many of them a rank reads for one step, and of how many sequences each."""
    num_sequences = math.ceil(config.train.global_batch_size / data_parallel_size(config, num_gpus))
    size = min(num_sequences, config.train.micro_batch_size)
    return math.ceil(num_sequences / size), size


def bytes_held(config: Config, num_gpus: int) -> Bytes:
    """What the fullest GPU holds at most, by kind.

    Not counted: CUDA itself, NCCL's buffers, and memory lost between tensors.
    """
    train = config.train
    parallel = replace(config.parallel, dp=data_parallel_size(config, num_gpus))
    job = Job(
        config.model,
        num_gpus,
        DEVICES["H100-SXM-80GB"],
        config.data.sequence_length,
        train.global_batch_size,
        precision=train.precision,
    )
    decision = Decision(parallel, train.recompute, micro_batches(config, num_gpus)[1])
    held = memory_of(job, decision)
    return {name: held[kind] for name, kind in KINDS.items()}


def describe(config: Config, num_gpus: int) -> str:
    """The layout in words: "dp 2, pp 4, tp 8 + sequence, ZeRO-1"."""
    parallel = config.parallel
    words = [f"dp {data_parallel_size(config, num_gpus)}"]
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
    rows = [["config", "GPUs", "layout", "micro-batches", "bubble", *KINDS, "total"]]
    for name in NAMES:
        for num_gpus, config in suggested(name).items():
            start = [name, f"{num_gpus:,}"]
            if config is None:
                rows.append([*start, TOO_FEW, *[""] * (len(rows[0]) - 3)])
                continue
            held = bytes_held(config, num_gpus)
            m, size = micro_batches(config, num_gpus)
            rows.append(
                [
                    *start,
                    describe(config, num_gpus),
                    f"{m} of {size}",
                    idle(config, num_gpus),
                    *(f"{held[kind] / 1e9:.1f}" for kind in KINDS),
                    f"{sum(held.values()) / 1e9:.0f}",
                ]
            )
    lines = ["| " + " | ".join(row) + " |" for row in rows]
    rule = "|---|--:|---|--:|" + "--:|" * (len(rows[0]) - 4)
    return "\n".join([lines[0], rule, *lines[1:]])


if __name__ == "__main__":
    print(table())
