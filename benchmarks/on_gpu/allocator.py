"""What CUDA's caching allocator does in two steps, and when it cannot: three experiments.

Read in this order: measure, then the experiments one after the other; `timeline` reads a trace.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from on_gpu.findings import Findings, release
from torch import Tensor

from minitron.comm.mesh import OneRankMesh
from minitron.config import Config
from minitron.measure.record import Row
from minitron.plan.dryrun import micro_batches
from minitron.pytorch.private import allocator_trace, record_allocations
from minitron.running.training import Training
from teaching.lab.allocator import CAPACITY, MIB, CachingAllocator, OutOfDeviceMemory

MOST_POINTS = 400
"""Of a drawn timeline."""


def measure(findings: Findings, config: Config, device: torch.device) -> None:
    """Add the rows and targets of the three experiments."""
    findings.rows.append(two_steps(config, device))
    out = second_step_out_of_memory(config, device)
    findings.rows.append(out)
    findings.at_least(
        "a model that passes its first step runs out of memory in its second",
        float(out["failed_in_step"] == 2),
        1,
    )
    for before in (False, True):
        row = fragmentation(before, device)
        findings.rows.append(row)
        findings.at_least(
            f"{row['case']}: as the model of the allocator says",
            float(row["succeeds"] == row["predicted"]),
            1,
        )
        findings.at_least(
            f"{row['case']}: in segments as the model's",
            float(alike(row["picture"], row["predicted_picture"])),
            1,
        )


def bytes_before(device: torch.device) -> int:
    """Return the bytes allocated already, cuBLAS's workspace among them; 0 on a CPU."""
    if device.type != "cuda":
        return 0
    for dtype in (torch.bfloat16, torch.float32):
        a = torch.ones(64, 64, device=device, dtype=dtype)
        a @ a
    del a
    release(device)
    return torch.cuda.memory_allocated(device)


# Two steps, block by block


def two_steps(config: Config, device: torch.device) -> Row:
    """Trace the allocator through the first two steps; the row holds points of a timeline."""
    before = bytes_before(device)
    training = Training(config, OneRankMesh(), device)
    pairs = micro_batches(training, config.train.global_batch_size)
    start = torch.cuda.memory_allocated(device), torch.cuda.memory_reserved(device)
    ends, peaks = [], []
    with record_allocations(device):
        for _ in range(2):
            torch.cuda.reset_peak_memory_stats(device)
            training.update(pairs, 1e-4)
            peaks.append(torch.cuda.max_memory_allocated(device) - before)
            ends.append(len(allocator_trace(device)))
        points = timeline(allocator_trace(device), *start)
    return {
        "case": "two steps",
        "peak_of_step": peaks,
        "entries": ends,
        **thinned(points, MOST_POINTS),
    }


def timeline(entries: list[dict], allocated: int, reserved: int) -> list[tuple[int, int, int]]:
    """Add up a trace's entries: (number of the entry, bytes allocated, bytes reserved) after each.

    The trace is that of torch.cuda.memory's snapshots, which starts at these two sums.
    """
    points = [(0, allocated, reserved)]
    for number, entry in enumerate(entries, start=1):
        match entry["action"]:
            case "alloc":
                allocated += entry["size"]
            case "free_completed":
                allocated -= entry["size"]
            case "segment_alloc" | "segment_map":
                reserved += entry["size"]
            case "segment_free" | "segment_unmap":
                reserved -= entry["size"]
            case _:
                continue
        points.append((number, allocated, reserved))
    return points


def thinned(points: list[tuple[int, int, int]], most: int) -> dict[str, list[int]]:
    """Keep of each stretch of points the one with the most bytes allocated: peaks stay."""
    length = -(-len(points) // most)
    stretches = [points[start : start + length] for start in range(0, len(points), length)]
    kept = [max(stretch, key=lambda point: point[1]) for stretch in stretches]
    entry, allocated, reserved = zip(*kept, strict=True)
    return {"entry": list(entry), "allocated": list(allocated), "reserved": list(reserved)}


# Out of memory in the second step


def second_step_out_of_memory(config: Config, device: torch.device) -> Row:
    """Limit the device to what the first step reserves and the second does not fit into."""
    release(device)  # the models of earlier parts: their bytes would raise the limit
    needs = []  # of the two steps: what each reserves, and what it cannot do without
    training = Training(config, OneRankMesh(), device)
    pairs = micro_batches(training, config.train.global_batch_size)
    for _ in range(2):
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
        training.update(pairs, 1e-4)
        needs.append(
            (torch.cuda.max_memory_reserved(device), torch.cuda.max_memory_allocated(device))
        )
    del training
    limit = (needs[0][0] + needs[1][1]) // 2

    failed = None
    release(device)
    with limited(limit, device):
        training = Training(config, OneRankMesh(), device)
        for step in (1, 2):
            torch.cuda.empty_cache()
            try:
                training.update(pairs, 1e-4)
            except torch.OutOfMemoryError:
                failed = step
                break
        del training
    return {
        "case": "out of memory in the second step",
        "limit_bytes": limit,
        "reserved_of_step": [need[0] for need in needs],
        "allocated_of_step": [need[1] for need in needs],
        "failed_in_step": failed,
    }


@contextmanager
def limited(num_bytes: int, device: torch.device) -> Iterator[None]:
    """Let this process reserve at most so many bytes of the device."""
    total = torch.cuda.get_device_properties(device).total_memory
    torch.cuda.set_per_process_memory_fraction(min(1.0, num_bytes / total), device)
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, device)
        release(device)


# Fragmentation


class DeviceAllocator:
    """The real allocator behind the calls of `CachingAllocator`, its model in chapter 2."""

    def __init__(self, device: torch.device):
        self.device = device

    def allocate(self, size: int) -> list[Tensor]:
        """Return a block that `free` empties; raises torch.OutOfMemoryError."""
        return [torch.empty(size, dtype=torch.uint8, device=self.device)]

    def free(self, block: list[Tensor]) -> None:
        block.clear()


def fragmentation(after_longer_batch: bool, device: torch.device) -> Row:
    """Free every second of ten tensors of 30 MiB, then ask for 40 MiB."""
    bytes_before(device)
    occupied = fill_free_blocks(device)
    model = CachingAllocator(CAPACITY)
    keep_every_second(model, after_longer_batch)
    expected = model.picture()
    older = {segment["address"] for segment in torch.cuda.memory_snapshot()}
    with limited(torch.cuda.memory_reserved(device) + CAPACITY + MIB, device):
        allocator = DeviceAllocator(device)
        blocks = keep_every_second(allocator, after_longer_batch)
        drawn = picture(
            [segment for segment in torch.cuda.memory_snapshot() if segment["address"] not in older]
        )
        succeeds = can_allocate(allocator, 40 * MIB)
        del blocks, occupied
    name = "after longer sequences" if after_longer_batch else "nothing before"
    return {
        "case": f"fragmentation, {name}",
        "succeeds": succeeds,
        "predicted": can_allocate(model, 40 * MIB),
        "picture": drawn,
        "predicted_picture": expected,
    }


def fill_free_blocks(device: torch.device) -> list[Tensor]:
    """Return tensors that occupy the free blocks of older segments, such as cuBLAS's workspace's.

    One of them could hold a tensor of 30 MiB: then one segment less would be taken from the device,
    and the request for 40 MiB would find room for another one.
    """
    free = [
        block["size"]
        for segment in torch.cuda.memory_snapshot()
        if segment["segment_type"] == "large"
        for block in segment["blocks"]
        if block["state"] == "inactive"
    ]
    # The largest first: each then goes to the one free block of its size.
    return [
        torch.empty(size, dtype=torch.uint8, device=device) for size in sorted(free, reverse=True)
    ]


def alike(picture: str, other: str) -> bool:
    """Return whether two pictures show the same segments, in whatever order."""
    return sorted(picture.split()) == sorted(other.split())


def keep_every_second(allocator: CachingAllocator | DeviceAllocator, after_longer: bool) -> list:
    """Return five live tensors of 30 MiB, each beside one that has been freed."""
    if after_longer:
        for block in [allocator.allocate(60 * MIB) for _ in range(5)]:
            allocator.free(block)
    blocks = [allocator.allocate(30 * MIB) for _ in range(10)]
    for block in blocks[::2]:
        allocator.free(block)
    return blocks[1::2]


def can_allocate(allocator: CachingAllocator | DeviceAllocator, size: int) -> bool:
    """Return whether a request succeeds; what it has allocated may be freed at once."""
    try:
        allocator.allocate(size)
    except (OutOfDeviceMemory, torch.OutOfMemoryError):
        return False
    return True


def picture(segments: list[dict], unit: int = 10 * MIB) -> str:
    """Draw a snapshot's segments as chapter 2 does: a character per 10 MiB, # live, . free."""
    return " ".join(
        "["
        + "".join(
            ("." if block["state"] == "inactive" else "#") * round(block["size"] / unit)
            for block in segment["blocks"]
        )
        + "]"
        for segment in segments
    )
