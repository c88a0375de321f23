"""Measure this machine as a `Device`, in seconds: what `minitron plan --calibrate` plans for.

On a GPU of hardware.csv the datasheet's peaks stay, and what is reached of them is measured. On any
other device the fastest matmul stands for the peak: MFU then counts from what this machine
can do. On a CPU a device is one rank of `run`, with one thread, while another one works beside it.

Two ranks sum tensors of several sizes; latency and bandwidth follow from the times. There is no
second node to measure: links between nodes are those of the datasheet, or else as fast as inside.

Read in this order: calibrate, matmul_flops, memory_bandwidth, ring_link.
Reference: Hockney 1994 (latency and bandwidth of a link).
"""

import os
import time
from collections.abc import Callable
from dataclasses import replace

import torch
import torch.distributed as dist

from minitron import cost
from minitron.launch import run
from minitron.launch.process import memory_bytes, pick_device
from minitron.measure.clock import synchronize
from minitron.plan.hardware import DEVICES, Device

MATMUL_SIZES = {"cpu": (256, 512, 1024), "cuda": (2048, 4096, 8192)}
COPIED = {"cpu": 2**26, "cuda": 2**30}
"""Bytes, more than any cache holds."""
MESSAGES = tuple(2**power for power in range(12, 25, 2))
"""Bytes of the tensors that two ranks sum: 4 KiB to 16 MiB."""


def calibrate(name: str = "auto") -> Device:
    """Measure matmuls, memory and all-reduces on this machine.

    `name` is "auto", "cpu" or "cuda". Raises ConfigError if there is no such device. A GPU that is
    alone keeps its datasheet's links; of an unknown device the watts are 0.
    """
    device = pick_device(name)
    if device.type == "cpu":
        measured = run(measured_rank, 2, timeout=120)[0]
        return replace(measured, memory_bytes=total_memory(device))

    known = known_device(torch.cuda.get_device_name(device))
    measured = alone(device, known)
    if torch.cuda.device_count() < 2:
        return measured
    link = run(ring_link, 2, "cuda", timeout=120)[0]
    share = min(1.0, link.bandwidth / measured.nvlink_bandwidth) if known else 1.0
    peak = measured.nvlink_bandwidth if known else link.bandwidth
    return replace(measured, nvlink_bandwidth=peak, nvlink_share=share, nvlink_latency=link.latency)


def measured_rank(group: dist.ProcessGroup) -> Device:
    """Measure what one of two CPU ranks can do while the other one does the same."""
    device = torch.device("cpu")
    dist.barrier(group)
    measured, link = alone(device, None), ring_link(group, "cpu")
    return replace(
        measured,
        nvlink_bandwidth=link.bandwidth,
        nvlink_latency=link.latency,
        nic_bandwidth=link.bandwidth,
        nic_latency=link.latency,
    )


def alone(device: torch.device, known: Device | None) -> Device:
    """Measure what a device can do without others; its links are `known`'s."""
    flops, float32 = (matmul_flops(device, dtype) for dtype in (torch.bfloat16, torch.float32))
    measured = {
        "name": f"this machine's {device.type}",
        "source": "minitron.plan.calibrate",
        "memory_bytes": total_memory(device),
        "float32_share": float32 / flops,
    }
    bandwidth = memory_bandwidth(device)
    if known:
        share = min(1.0, flops / known.bf16_flops)
        return replace(known, **measured, matmul_share=share, memory_bandwidth=bandwidth)
    peak = max(flops, float32)  # many CPUs multiply float32 faster: MFU stays below 1 in both
    return Device(
        **measured,
        bf16_flops=peak,
        fp8_flops=None,
        memory_bandwidth=bandwidth,
        nvlink_bandwidth=bandwidth,
        nic_bandwidth=bandwidth,
        watts=0.0,
        matmul_share=flops / peak,
        nvlink_share=1.0,
        nic_share=1.0,
    )


def known_device(full_name: str) -> Device | None:
    """Find the row of hardware.csv for a name like "NVIDIA A100-SXM4-80GB", by chip and memory."""
    rows = [
        device
        for device in DEVICES.values()
        if device.name.split("-")[0] in full_name and "PCIe" not in full_name
    ]
    exact = [device for device in rows if device.name.split("-")[2] in full_name]
    return next(iter(exact or rows), None)


def total_memory(device: torch.device) -> float:
    """Return the bytes of the device; on a CPU, a core's part of the machine's."""
    num_sharing = (os.cpu_count() or 1) if device.type == "cpu" else 1
    return memory_bytes(device) / num_sharing


# What is measured


def matmul_flops(device: torch.device, dtype: torch.dtype) -> float:
    """Measure the FLOP/s of the fastest of several square matmuls, a times a transposed."""
    fastest = 0.0
    for size in MATMUL_SIZES[device.type]:
        a = torch.randn(size, size, device=device).to(dtype)
        seconds = fastest_seconds(lambda a=a: a @ a.T, device)
        fastest = max(fastest, 2 * size**3 / seconds)
    return fastest


def memory_bandwidth(device: torch.device) -> float:
    """Measure the bytes per second that a copy reads and writes."""
    source = torch.zeros(COPIED[device.type] // 4, device=device)
    target = torch.empty_like(source)
    return 2 * COPIED[device.type] / fastest_seconds(lambda: target.copy_(source), device)


def ring_link(group: dist.ProcessGroup, kind: str) -> cost.Link:
    """Fit latency and bandwidth of a hop to all-reduces: n bytes on two ranks are 2 hops of n/2."""
    device = torch.device(kind, group.rank() if kind == "cuda" else None)
    if kind == "cuda":
        torch.cuda.set_device(device)
        group = dist.new_group(backend="nccl")
    seconds = []
    for num_bytes in MESSAGES:
        tensor = torch.zeros(num_bytes // 4, device=device)
        each = fastest_seconds(lambda t=tensor: dist.all_reduce(t, group=group), device, times=5)
        slowest = torch.tensor([each], dtype=torch.float64, device=device)
        dist.all_reduce(slowest, dist.ReduceOp.MAX, group=group)
        seconds.append(slowest.item() / 2)
    hops = [num_bytes / 2 for num_bytes in MESSAGES]
    latency, bandwidth = cost.fit_link(hops, seconds)
    if bandwidth <= 0:  # on a busy machine a short message may take longer than a long one
        bandwidth = hops[-1] / seconds[-1]
    return cost.Link(max(latency, 0.0), bandwidth)


def fastest_seconds(do: Callable[[], object], device: torch.device, times: int = 3) -> float:
    """Return the least of several times, after a first call that sets up."""
    do()
    least = float("inf")
    for _ in range(times):
        synchronize(device)
        start = time.perf_counter()
        do()
        synchronize(device)
        least = min(least, time.perf_counter() - start)
    return least
