"""Published measurements that no constant was fitted to, by one rule for what they leave open.

Where a source does not state micro-batches or chunks, the fastest that fits counts. A published
rate becomes seconds with the FLOPs that its source counts: those of the hardware in Narayanan et
al. 2021, of the model in Llama Team 2024.

Read in this order: unseen_rows, sharded_rows, the sources.
"""

from dataclasses import replace

from minitron import cost
from minitron.plan.estimate import System, estimate
from minitron.plan.job import Decision, Job
from minitron.plan.published import (
    A100,
    H100,
    MEGATRON,
    MEGATRON_CORE,
    Row,
    axes,
    gpt,
    korthikanti,
    left_open,
    numbers,
    table,
)

DEEPSPEED = replace(MEGATRON, shards_ahead=False)
"""Megatron-LM's models with DeepSpeed's ZeRO-3 of 2021: a submodule's matrices are gathered one by
one before it computes, all streams wait for them, and overlap_comm is off by default
(github.com/microsoft/DeepSpeed, runtime/zero/stage3.py: fetch_sub_module)."""


def unseen_rows() -> list[Row]:
    """Read steps of the same papers, and of larger trainings, with ZeRO-0, 1 or 2."""
    cut = [row for row in table("narayanan2021_table2") if row["scheme"] != "ZeRO-3"]
    return [
        *map(narayanan, table("narayanan2021_table1_unseen")),
        *(
            row
            for each in table("korthikanti2022_table3_table5_unseen")
            for row in korthikanti(each)
        ),
        *map(narayanan_cut, cut),
        *map(larger, table("larger_trainings")),
    ]


def sharded_rows(system: System = DEEPSPEED) -> list[Row]:
    """Read steps with ZeRO-3 (Narayanan et al. 2021, table 2), as `system` would run them."""
    sharded = [row for row in table("narayanan2021_table2") if row["scheme"] == "ZeRO-3"]
    return [narayanan_sharded(row, system) for row in sharded]


# The sources


def narayanan(row: dict[str, str]) -> Row:
    """Read table 1, the models that `published_rows` leaves out."""
    size, chunks = numbers(row, "micro_batch", "virtual_stages")
    layout = Decision(axes(row, chunks), "full", size)
    return rated("Narayanan et al. 2021, table 1", row, (layout,), MEGATRON)


def narayanan_cut(row: dict[str, str]) -> Row:
    """Read table 2, tp and pp; chunks are not stated."""
    L, pp = numbers(row, "layers", "pp")
    layout = Decision(axes(row), "full", 1)
    chunks = [v for v in range(1, L // pp + 1) if L // pp % v == 0]
    options = left_open(job_of(row), layout, MEGATRON, chunks, sizes=(1,))
    return rated("Narayanan et al. 2021, table 2", row, options, MEGATRON)


def narayanan_sharded(row: dict[str, str], system: System) -> Row:
    (size,) = numbers(row, "micro_batch")
    layout = Decision(axes(row, zero=3), "full", size)
    return rated("Narayanan et al. 2021, table 2, ZeRO-3", row, (layout,), system)


def job_of(row: dict[str, str]) -> Job:
    gpus, batch, S = numbers(row, "gpus", "batch_size", "seq_len")
    return Job(gpt(row, dropout=0.1), gpus, A100, S, batch, precision="fp16")


def rated(source: str, row: dict[str, str], options: tuple[Decision, ...], system: System) -> Row:
    """Make a row of which hardware FLOP/s of a GPU are published."""
    job = job_of(row)
    flops = estimate(job, options[0], system).hardware_flops
    seconds = flops / job.num_gpus / (float(row["tflops_per_gpu_hw"]) * 1e12)
    name = f"{row['params_b']}B on {job.num_gpus:,}"
    return Row(source, name, job, options, system, seconds)


def larger(row: dict[str, str]) -> Row:
    """Read MT-NLG, in Megatron-LM's layout without chunks; Llama 3, as Megatron-Core would run it.

    Llama's ZeRO is said to divide gradients and optimizer states, and weights without freeing them
    (Llama Team 2024, section 3.3.2): stage 2, once a step. Its 16 stages have 16 sequences on
    16,384 GPUs, so that micro-batches are of 1.
    """
    gpus, batch, S, pp = numbers(row, "gpus", "batch_size", "seq_len", "pp")
    name = f"{row['model']} on {gpus:,}"
    if row["model"].startswith("MT-NLG"):
        sizes = {"vocab": 51200, "seq_len": S, "layers": 105, "hidden": 20480, "heads": 128}
        model = gpt({key: str(value) for key, value in sizes.items()}, dropout=0.1)
        job = Job(model, gpus, A100, S, batch, precision="fp16")
        layout = Decision(axes(row), "full")
        options = left_open(job, layout, MEGATRON, chunks=(1,))
        return Row("Smith et al. 2022", name, job, options, MEGATRON, float(row["step_time_s"]))

    model = cost.PUBLISHED[row["model"]]
    job = Job(model, gpus, H100, S, batch, precision="bf16-fp32-grads")
    layout = Decision(axes(row, sequence=True, zero=2, sync_every_micro_batch=False))
    chunks = range(1, model.num_layers // pp + 1)
    options = left_open(job, layout, MEGATRON_CORE, chunks, sizes=(1,))
    flops = estimate(job, options[0], MEGATRON_CORE).model_flops
    seconds = flops / gpus / (float(row["tflops_per_gpu"]) * 1e12)
    return Row("Llama Team 2024", name, job, options, MEGATRON_CORE, seconds)
