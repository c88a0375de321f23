"""Published measurements, as jobs, layouts and systems that the estimate can be asked about.

The tables of `reference/` are copied from the papers that their source columns name. Each source
counts in its own way. Korthikanti et al. 2022 print seconds, nanotron tokens per second (its MFU
counts the embedding as a matmul). Narayanan et al. 2021 print hardware FLOP/s, recomputation
included; NVIDIA's Megatron-Core table model FLOP/s: their seconds follow by each source's formula.
All S x S scores of attention count in all of them.

Read in this order: Row, published_rows, left_open, published_layers; then `unseen`.
"""

import csv
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib.resources import files
from itertools import product

from minitron.config import ModelConfig, ParallelConfig
from minitron.cost.compute import published_llama
from minitron.plan.estimate import RATES, Estimate, Rates, System, estimate, memory_of
from minitron.plan.hardware import DEVICES
from minitron.plan.job import Decision, Job
from minitron.plan.operators import Work, block_backward, block_forward
from minitron.plan.traffic import layer_seconds

MEGATRON = System(
    "materialized", fuses=True, balance="blocks", scatters_messages=True, overlaps_gradients=False
)
"""Megatron-LM of 2021 and 2022."""
MEGATRON_CORE = System(fuses=True, balance="blocks", hides_tensor=True, hides_data=True)
"""Megatron-Core with its overlap flags, as NVIDIA's table was measured."""
NANOTRON = System(
    balance="time",
    both_gradients=True,
    copies=6,
    reduces_last=True,
    host_seconds=44e-6,
    host_seconds_beside_pipeline=305e-6,
)
"""nanotron as the Ultra-Scale Playbook used it: query, key and value, their rotation, and the
output of attention are copied between (S, B, D) and (B, S, D). `copies` is the number with which
its published memory is met best. What its hosts take is fitted to its rows, and no other source
shows it: their estimates are a fit, not a prediction."""
A100, H100 = DEVICES["A100-SXM-80GB"], DEVICES["H100-SXM-80GB"]
EFA = DEVICES["H100-SXM-80GB-EFA"]


@dataclass(frozen=True)
class Row:
    """A measured step."""

    source: str
    name: str
    job: Job
    decisions: tuple[Decision, ...]
    """One; or all that the source leaves open, of which the fastest that fits counts."""
    system: System
    seconds: float
    memory: float | None = None
    """Bytes on a rank; None if not published."""

    def predict(self, rates: Rates = RATES, system: System | None = None) -> Estimate:
        estimates = [
            estimate(self.job, each, system or self.system, rates) for each in self.decisions
        ]
        return min(estimates, key=lambda each: each.seconds)

    @property
    def layout(self) -> str:
        axes = self.decisions[0].parallel
        return f"tp {axes.tp}, pp {axes.pp}, dp {axes.dp}"


def published_rows() -> list[Row]:
    """Return every step that the estimate's constants are fitted to."""
    return [
        *map(narayanan, table("narayanan2021_table1")),
        *(row for each in table("korthikanti2022_table3_table5") for row in korthikanti(each)),
        *map(megatron_core, table("megatron_core_h100_weak_scaling")),
        *map(nanotron, table("playbook_nanotron_h100_runs")),
    ]


def table(name: str) -> list[dict[str, str]]:
    text = (files("minitron.plan") / "reference" / f"{name}.csv").read_text(encoding="utf-8")
    return list(csv.DictReader(text.splitlines()))


def numbers(row: dict[str, str], *names: str) -> tuple[int, ...]:
    return tuple(int(row[name]) for name in names)


def gpt(row: dict[str, str], dropout: float) -> ModelConfig:
    V, S, L, D, H = numbers(row, "vocab", "seq_len", "layers", "hidden", "heads")
    return ModelConfig("gpt", V, S, L, D, H, H, 4 * D, dropout > 0, dropout)


def axes(row: dict[str, str], chunks: int = 1, **options) -> ParallelConfig:
    dp, tp, pp = numbers(row, "dp", "tp", "pp")
    schedule = "interleaved" if chunks > 1 else "1f1b"
    return ParallelConfig(dp=dp, tp=tp, pp=pp, schedule=schedule, chunks=chunks, **options)


# The sources


def narayanan(row: dict[str, str]) -> Row:
    """Read table 1: full recomputation, no sequence parallelism."""
    gpus, batch, micro_batch, chunks = numbers(
        row, "gpus", "batch_size", "micro_batch", "virtual_stages"
    )
    job = Job(gpt(row, dropout=0.1), gpus, A100, 2048, batch, precision="fp16")
    decision = Decision(axes(row, chunks), "full", micro_batch)
    return Row(
        "Narayanan et al. 2021, table 1",
        f"{row['params_b']}B",
        job,
        (decision,),
        MEGATRON,
        float(row["step_time_s_derived"]),
    )


def korthikanti(row: dict[str, str]) -> list[Row]:
    """Read tables 3 and 5: full recomputation, and sequence parallelism with selective."""
    gpus, batch, micro_batch, chunks = numbers(
        row, "gpus", "global_batch", "micro_batch", "virtual_stages"
    )
    job = Job(gpt(row, dropout=0.1), gpus, A100, 2048, batch, precision="fp16")
    rows = []
    for recompute, sequence, column in (
        ("full", False, "iter_s_full_recompute"),
        ("selective", True, "iter_s_sp_plus_selective"),
    ):
        parallel = axes(row, chunks, sequence=sequence)
        decision = Decision(parallel, recompute, micro_batch)
        rows.append(
            Row(
                "Korthikanti et al. 2022, table 5",
                f"{row['model']}, {recompute}",
                job,
                (decision,),
                MEGATRON,
                float(row[column]),
            )
        )
    return rows


def megatron_core(row: dict[str, str]) -> Row:
    """Read NVIDIA's weak scaling: micro-batches and chunks are not stated."""
    tp, pp, gpus, batch, L = numbers(row, "tp", "pp", "gpus", "batch_size", "layers")
    job = Job(gpt(row, dropout=0.0), gpus, H100, 4096, batch, precision="bf16-fp32-grads")
    chunks = [v for v in range(1, L // pp + 1) if L // pp % v == 0 and (pp > 1 or v == 1)]
    layout = Decision(axes(row, sequence=tp > 1, zero=1), "none")
    return Row(
        "Megatron-Core r0.8.0, H100",
        row["model"],
        job,
        left_open(job, layout, MEGATRON_CORE, chunks),
        MEGATRON_CORE,
        float(row["step_time_s_derived"]),
    )


def left_open(
    job: Job,
    layout: Decision,
    system: System,
    chunks: Sequence[int],
    sizes: Sequence[int] = (1, 2, 4, 8),
) -> tuple[Decision, ...]:
    """Return the layout with each of `chunks` and micro-batch `sizes` that can run and fit.

    All that can run, if none fits: the system holds less than this package does.
    """
    options = []
    for v, size in product(chunks, sizes):
        parallel = replace(layout.parallel, chunks=v, schedule="interleaved" if v > 1 else "1f1b")
        option = replace(layout, parallel=parallel, micro_batch_size=size)
        if job.global_batch_size % (parallel.dp * size) == 0 and (
            v == 1 or option.num_micro_batches(job) % parallel.pp == 0
        ):
            options.append(option)
    fit = [each for each in options if sum(memory_of(job, each, system).values()) <= job.limit]
    return tuple(fit or options)


def nanotron(row: dict[str, str]) -> Row:
    """Read the Ultra-Scale Playbook's runs of one model on 8 to 64 H100 with EFA."""
    V, S, L, D, H, F = numbers(row, "vocab", "seq_len", "layers", "hidden", "heads", "ffn")
    gpus, batch, micro_batch, zero, tp = numbers(row, "gpus", "gbs", "mbs", "zero", "tp")
    job = Job(
        published_llama(L, D, H, H, F, V, S), gpus, EFA, S, batch, precision="bf16-fp32-grads"
    )
    decision = Decision(axes(row, sequence=tp > 1, zero=zero), "none", micro_batch)
    name = f"{row['nodes']} nodes, micro-batches of {micro_batch}, ZeRO-{zero}"
    return Row(
        "nanotron 8.86B, H100",
        name,
        job,
        (decision,),
        NANOTRON,
        float(row["step_time_s_derived"]),
        float(row["mem_gb"]) * 1e9,
    )


# One layer


def published_layers(rates: Rates = RATES) -> list[tuple[str, float, float]]:
    """Read Korthikanti et al. 2022, table 4: name, published and estimated seconds of a pass.

    Of the 22B model: t = 8, 4 sequences of 2048 tokens.
    """
    model = ModelConfig("gpt", 51200, 2048, 48, 6144, 64, 64, 4 * 6144, True, 0.1)
    job = Job(model, 8, A100, 2048, 4, precision="fp16")
    options = {  # recomputation, sequence parallelism
        "Baseline no recompute": ("none", False),
        "Sequence Parallelism": ("none", True),
        "Baseline with recompute": ("full", False),
        "Selective Recompute": ("selective", False),
        "Selective + Sequence": ("selective", True),
    }
    found = []
    for row in table("korthikanti2022_table4"):
        recompute, sequence = options[row["experiment"]]
        decision = Decision(ParallelConfig(dp=1, tp=8, sequence=sequence), recompute, 4)
        work = Work(model, A100, 4, 2048, decision.layout, "fp16", MEGATRON, rates)
        hidden = work.tokens * model.width * work.value
        waits = layer_seconds(job, decision, MEGATRON, hidden, rates.overlap)
        passes = {"forward": block_forward(work), "backward": block_backward(work, recompute)}
        for phase, computed in passes.items():
            found.append(
                (
                    f"{row['experiment']}, {phase}",
                    float(row[f"{phase}_ms"]) / 1e3,
                    computed.seconds + waits[phase],
                )
            )
    return found


def error(estimated: float, published: float) -> float:
    """Return the logarithm of their ratio: 0.05 is 5 % too much, -0.05 as much too little."""
    return math.log(estimated / published)
