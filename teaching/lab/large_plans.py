"""Searches and dry runs of large jobs, read from a committed record: each takes seconds to compute.

    python -m teaching.lab.large_plans      makes the record anew, in a few minutes

A record has the layouts that a search chose, and what a dry run counted. The seconds and bytes of a
chosen layout are estimated when it is shown. What is not in the record is computed.

Read in this order: Chosen, chosen, counted, SEARCHES and DRY_RUNS, main.
"""

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import cache

import torch

from minitron import cost
from minitron.config import (
    Config,
    ConfigError,
    DataConfig,
    ModelConfig,
    ParallelConfig,
    TrainConfig,
)
from minitron.measure.live import LiveTensor, Snapshot
from minitron.plan.dryrun import DryRun, Traffic, dry_run
from minitron.plan.explain import RESOURCES, doubled
from minitron.plan.hardware import DEVICES
from minitron.plan.job import Decision, Job
from minitron.plan.search import Candidate, Search, search
from minitron.system.files import read_json
from teaching.exercises import ROOT

FILE = ROOT / "benchmarks" / "results" / "plans" / "large.json"


@dataclass(frozen=True)
class Chosen:
    """What a search found for a job."""

    job: Job
    best: Candidate
    """The fastest layout that fits."""
    with_twice: dict[str, Candidate]
    """The fastest one on devices with twice as much of each of RESOURCES."""


def chosen(job: Job) -> Chosen:
    """Return what the search for a job found: from the record, else by a search now.

    Raises ConfigError if no layout fits.
    """
    row = _record().get(search_key(job))
    if row is None:
        return chosen_now(job)
    twice = {
        resource: Candidate(_with_twice(job, resource), _decision(fields))
        for resource, fields in row["with_twice"].items()
    }
    return Chosen(job, Candidate(job, _decision(row["best"])), twice)


def chosen_now(job: Job) -> Chosen:
    """Search now. Raises ConfigError if no layout fits."""
    found = search(job)
    return Chosen(
        job, found.candidates[0], {resource: _best_with(resource, found) for resource in RESOURCES}
    )


def _best_with(resource: str, found: Search) -> Candidate:
    """Try the 300 best layouts of the search, and all that fit only now."""
    given = _with_twice(found.job, resource)
    now_fit = [each for each in found.too_large if each.total_bytes <= given.limit]
    layouts = [each.decision for each in found.candidates[:300] + now_fit]
    return min((Candidate(given, layout) for layout in layouts), key=lambda each: each.seconds)


def _with_twice(job: Job, resource: str) -> Job:
    return replace(job, device=doubled(job.device, resource))


def counted(job: Job, layout: Decision, rank: int) -> DryRun:
    """Return the dry run of a rank: from the record, else run now.

    Recorded tensors are those of TENSORS alone.
    """
    row = _record().get(dry_run_key(job, layout, rank))
    if row is None:
        return dry_run(config_of(job, layout), job.num_gpus, rank)
    tensors = [
        LiveTensor(
            **fields | {"dtype": getattr(torch, fields["dtype"]), "shape": tuple(fields["shape"])}
        )
        for fields in row["peak"]["tensors"]
    ]
    traffic = {tuple(key): Traffic(*values) for key, values in row["traffic"]}
    return DryRun(
        **row | {"peak": Snapshot(**row["peak"] | {"tensors": tensors}), "traffic": traffic}
    )


def config_of(job: Job, layout: Decision) -> Config:
    """Return the configuration of a run of this job in this layout."""
    train = TrainConfig(
        global_batch_size=job.global_batch_size,
        recompute=layout.recompute,
        micro_batch_size=layout.micro_batch_size,
        precision=job.precision,
    )
    data = DataConfig(sequence_length=job.sequence_length)
    return Config(job.model, data, train, layout.parallel)


# The large jobs of chapters 11 and 12


def cut(
    dp: int,
    tp: int = 1,
    pp: int = 1,
    chunks: int = 1,
    recompute: str = "none",
    micro_batch: int = 1,
    zero: int = 1,
) -> Decision:
    """Return a layout, with sequence parallelism wherever there is tensor parallelism."""
    schedule = "interleaved" if chunks > 1 else "1f1b"
    parallel = ParallelConfig(
        dp=dp, tp=tp, pp=pp, chunks=chunks, schedule=schedule, sequence=tp > 1, zero=zero
    )
    return Decision(parallel, recompute, micro_batch)


A100, H100 = DEVICES["A100-SXM-80GB"], DEVICES["H100-SXM-80GB"]
GPT3 = replace(cost.PUBLISHED["GPT-3 175B"], vocab_size=51_200)  # divisible by 8
LLAMA = cost.PUBLISHED["Llama 3.1 405B"]
MT_NLG, TRILLION = (
    ModelConfig("gpt", 51_200, 2048, layers, width, heads, heads, 4 * width, dropout=0.1)
    for layers, width, heads in ((105, 20_480, 128), (128, 25_600, 160))
)
PUBLISHED = {
    "GPT-3 175B": (
        Job(replace(GPT3, dropout=0.0), 1024, A100, 2048, 1536, precision="bf16-fp32-grads"),
        cut(16, tp=8, pp=8),
    ),
    "MT-NLG 530B": (Job(MT_NLG, 2240, A100, 2048, 1920), cut(8, 8, 35, recompute="full")),
    "1T": (Job(TRILLION, 3072, A100, 2048, 3072), cut(6, 8, 64, recompute="full")),
    "Llama 3.1 405B": (Job(LLAMA, 16_384, H100, 8192, 2048), cut(128, 8, 16, chunks=4)),
}
"""Published jobs, and their papers' layouts."""
COMPARED = (
    (cost.PUBLISHED["Llama 3.2 1B"], 8192),
    (cost.PUBLISHED["Llama 3.1 70B"], 8192),
    (GPT3, 2048),
)
"""The models with which chapter 11 compares tree and search, and their sequence lengths."""
SEARCHES = [job for job, _ in PUBLISHED.values()] + [
    Job(model, num_gpus, H100, length, global_batch_size=1024)
    for model, length in COMPARED
    for num_gpus in (64, 1024)
]
GPT3_JOB, GPT3_LAYOUT = PUBLISHED["GPT-3 175B"]
DRY_RUNS = [
    (GPT3_JOB, cut(16, tp=8, pp=8, micro_batch=8), 0),
    *((GPT3_JOB, GPT3_LAYOUT, stage * 16 * 8) for stage in (0, 4, 7)),
    *(
        (job, each, job.num_gpus - 1)
        for name, (job, each) in PUBLISHED.items()
        if name != "GPT-3 175B"
    ),
]
TENSORS = [(GPT3_JOB, GPT3_LAYOUT, 0)]
"""The dry runs whose tensors at the peak are recorded one by one."""


# The record


@cache
def _record() -> dict[str, dict]:
    return read_json(FILE)


def search_key(job: Job) -> str:
    return f"search {job!r}"


def dry_run_key(job: Job, layout: Decision, rank: int) -> str:
    return f"dry run of rank {rank}: {layout!r}, {job!r}"


def _decision(fields: dict) -> Decision:
    return Decision(**fields | {"parallel": ParallelConfig(**fields["parallel"]), "steps": ()})


def search_row(job: Job) -> dict:
    """Make what the record has of a search."""
    found = chosen_now(job)
    return {
        "best": asdict(found.best.decision),
        "with_twice": {name: asdict(each.decision) for name, each in found.with_twice.items()},
    }


def dry_run_row(job: Job, layout: Decision, rank: int) -> dict:
    """Make what the record has of a dry run."""
    done = dry_run(config_of(job, layout), job.num_gpus, rank)
    tensors = done.peak.tensors if (job, layout, rank) in TENSORS else []
    return asdict(done) | {
        "peak": {
            "bytes": done.peak.bytes,
            "phase": done.peak.phase,
            "tensors": [
                asdict(each) | {"dtype": str(each.dtype).removeprefix("torch.")} for each in tensors
            ],
        },
        "traffic": [[list(key), list(values)] for key, values in done.traffic.items()],
    }


def rows() -> dict[str, Callable[[], dict]]:
    """Return, by key, what makes each row of the record."""
    searches = {search_key(job): lambda job=job: search_row(job) for job in SEARCHES}
    dry_runs = {dry_run_key(*each): lambda each=each: dry_run_row(*each) for each in DRY_RUNS}
    return searches | dry_runs


def main() -> None:
    record = {}
    for key, make in rows().items():
        try:
            record[key] = make()
        except ConfigError as error:  # nothing fits
            print(error)
        print(f"{len(record)} of {len(rows())}", flush=True)
    FILE.parent.mkdir(parents=True, exist_ok=True)
    lines = [f"{json.dumps(key)}: {json.dumps(row)}" for key, row in record.items()]
    FILE.write_text("{\n" + ",\n".join(lines) + "\n}\n")  # a row a line, for who compares


if __name__ == "__main__":
    main()
