"""What happens when in a step: a profiler's trace, and what the gathers of FSDP hide.

Two steps are traced, a plain one and one under FSDP. With a single GPU, FSDP's group has one rank:
its gathers are copies from the shard into the unsharded parameter. They still run on a stream of
their own while the layer before computes, and the trace shows how much of them is hidden. Both
traces are written beside the record: drop one onto https://ui.perfetto.dev.

On a CPU there are no streams: the record then has the named ranges alone.
"""

import gzip
import json
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist
from on_gpu.findings import Findings, Machine
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from minitron.config import ModelConfig, TrainConfig
from minitron.measure.clock import synchronize
from minitron.measure.record import Row
from minitron.model.transformer import Transformer, initialize
from minitron.parallel.data.fsdp import apply_fsdp
from minitron.precision import PRECISIONS, low_precision
from minitron.step import make_optimizer, train_step
from teaching.lab.gpu_models import OVERLAP

TINY = ModelConfig("llama", 256, 32, 2, 32, 2, 2, 64, tied_embedding=False)
MOST_RANGES = 120
"""That a record keeps; the trace has all."""

ON_STREAMS = ("kernel", "gpu_memcpy", "gpu_memset")
"""Kinds of a trace's events that keep a stream busy."""

Interval = tuple[float, float]


def measure(machine: Machine, folder: Path) -> Findings:
    """Trace both steps; rows have the ranges, and milliseconds by kind of GPU work."""
    findings = Findings()
    for name, make in (("plain step", plain_step), ("FSDP step", fsdp_step)):
        with one_rank_group(machine.device) as group:
            step = make(TINY if machine.tiny else OVERLAP.model, machine.device, group)
            path = folder / f"trace_{name.split()[0].lower()}.json.gz"
            row = read_trace(traced(step, machine, path))
        findings.rows.append({"case": name, "trace": path.name, **row})
    if not machine.on_gpu:
        findings.notes.append("a CPU has no streams: nothing is said of what gathers hide")
    return findings


@contextmanager
def one_rank_group(device: torch.device) -> Iterator[dist.ProcessGroup]:
    """Make a process group of this process alone."""
    backend = "nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield dist.group.WORLD
    finally:
        dist.destroy_process_group()


def batch_of(config: ModelConfig, device: torch.device) -> tuple[Tensor, Tensor]:
    shape = OVERLAP.sequences, config.max_sequence_length + 1
    tokens = torch.randint(0, config.vocab_size, shape, device=device)
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def plain_step(config: ModelConfig, device: torch.device, group) -> Callable[[], object]:
    """A step under bf16 autocast."""
    with device:
        model = Transformer(config)
    optimizer = make_optimizer(model, TrainConfig(), device)
    forward, batch = low_precision(model, device), batch_of(config, device)
    return lambda: train_step(forward, optimizer, [batch], 1e-4, 1.0)


def fsdp_step(config: ModelConfig, device: torch.device, group) -> Callable[[], object]:
    """A step of FSDP, which gathers bf16 parameters from float32 shards."""
    model = Transformer(config).to(device)
    initialize(model, seed=0)
    parallel = apply_fsdp(model, group, compute_dtype=torch.bfloat16)
    optimizer = parallel.shard(make_optimizer(model, TrainConfig(), device))
    batch = batch_of(config, device)
    forward = low_precision(model, device, PRECISIONS["bf16"])
    return lambda: train_step(forward, optimizer, [batch], 1e-4, 1.0, parallel)


def traced(step: Callable[[], object], machine: Machine, path: Path) -> list[dict]:
    """Profile the fourth step, write its trace, and return the trace's events."""
    for _ in range(3):
        step()
    activities = [ProfilerActivity.CPU]
    if machine.on_gpu:
        activities.append(ProfilerActivity.CUDA)
    synchronize(machine.device)
    with profile(activities=activities) as profiler:
        step()
        synchronize(machine.device)
    path.parent.mkdir(parents=True, exist_ok=True)
    profiler.export_chrome_trace(str(path))
    with gzip.open(path, "rt", encoding="utf-8") as file:
        return json.load(file)["traceEvents"]


# Reading a trace


def read_trace(events: list[dict]) -> Row:
    """Return ranges by name, and what ran on the GPU's streams, in milliseconds from the start."""
    timed = [event for event in events if event.get("ph") == "X"]
    on_gpu = [event for event in timed if event.get("cat") in ON_STREAMS]
    named = [event for event in timed if event.get("cat") == "gpu_user_annotation"]
    named = named or [event for event in timed if event.get("cat") == "user_annotation"]
    named = sorted((event for event in named if "dur" in event), key=lambda event: event["ts"])
    start = min((event["ts"] for event in on_gpu or named), default=0.0)
    kept = named[:MOST_RANGES]
    forward_ends = [end_of(event) for event in named if event["name"] == "forward"]
    update = [event for event in named if event["name"].startswith("Optimizer.step")]
    row = {
        "range": [event["name"] for event in kept],
        "range_start_ms": [milliseconds(event["ts"] - start) for event in kept],
        "range_end_ms": [milliseconds(end_of(event) - start) for event in kept],
        # autograd works in a thread of its own: what is between the two is the backward pass
        "forward_end_ms": milliseconds(max(forward_ends, default=math.nan) - start),
        "update_start_ms": milliseconds(
            min((event["ts"] for event in update), default=math.nan) - start
        ),
        "update_end_ms": milliseconds(max(map(end_of, update), default=math.nan) - start),
    }
    return row | (by_stream(on_gpu, start) if on_gpu else {})


def by_stream(events: list[dict], start: float) -> Row:
    """Return busy milliseconds by kind of work, and how much of the other streams' is hidden."""
    streams: dict[int, list[dict]] = {}
    for event in events:
        streams.setdefault(event["args"]["stream"], []).append(event)
    busiest = max(streams, key=lambda stream: sum(event["dur"] for event in streams[stream]))
    computing = union(streams[busiest])
    others = union(event for stream, each in streams.items() if stream != busiest for event in each)
    kinds: dict[str, float] = {}
    for event in streams[busiest]:
        kind = kind_of(event["name"])
        kinds[kind] = kinds.get(kind, 0.0) + event["dur"]
    end = max(map(end_of, events))
    hidden = overlap(computing, others)
    return {
        "step_ms": milliseconds(end - start),
        "busy_ms": milliseconds(length(computing)),
        **{f"{kind}_ms": milliseconds(spent) for kind, spent in kinds.items()},
        "num_streams": len(streams),
        "other_streams_ms": milliseconds(length(others)),
        "hidden_ms": milliseconds(hidden),
        "hidden_share": hidden / length(others) if others else None,
        "lane_start_ms": [milliseconds(left - start) for left, _ in others[:MOST_RANGES]],
        "lane_end_ms": [milliseconds(right - start) for _, right in others[:MOST_RANGES]],
    }


def kind_of(name: str) -> str:
    """Say what kind of work a kernel of this name does."""
    lower = name.lower()
    for kind, parts in {
        "matmul": ("gemm", "nvjet", "cutlass", "xmma", "sm90_", "matmul"),
        "attention": ("flash", "fmha", "attention", "cudnn_generated"),
        "copy": ("memcpy", "memset"),
        "optimizer": ("adam", "foreach", "multi_tensor"),
    }.items():
        if any(part in lower for part in parts):
            return kind
    return "elementwise"


def union(events) -> list[Interval]:
    """Join the intervals of events that touch; in the order of their starts."""
    spans = sorted((event["ts"], end_of(event)) for event in events)
    joined: list[Interval] = []
    for left, right in spans:
        if joined and left <= joined[-1][1]:
            joined[-1] = joined[-1][0], max(right, joined[-1][1])
        else:
            joined.append((left, right))
    return joined


def overlap(some: list[Interval], others: list[Interval]) -> float:
    """Return for how long both are busy."""
    both = length(some) + length(others)
    merged = union({"ts": left, "dur": right - left} for left, right in [*some, *others])
    return both - length(merged)


def end_of(event: dict) -> float:
    return event["ts"] + event["dur"]


def length(intervals: list[Interval]) -> float:
    return sum(right - left for left, right in intervals)


def milliseconds(microseconds: float) -> float:
    return round(microseconds / 1000, 4)
