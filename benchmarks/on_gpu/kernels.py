"""Rooflines: matmuls of growing size, and attention from 1k to 32k tokens, three ways.

A matmul of R rows with a square bf16 weight moves its three matrices once, at best; its arithmetic
intensity is FLOPs per byte of that. The roof is the datasheet's peak, or the fastest matmul here
where the device has none, and the bandwidth of a copy measured in the same run. Weights take turns,
so that none is still in the cache when its turn comes again, and many matmuls are timed together,
so that the time to launch one is hidden behind the others.

Attention is forward and backward, in bf16, with the causal mask; FLOPs count the full S x S square,
as the package's MFU does. The batch shrinks as the sequence grows, so that each length has as many
tokens. Fused is PyTorch's kernel, materialized has the S x S matrix in memory, and tiles are ours
by hand, in Python. Where the matrix does not fit, the row says how large it is, and no more. Tiles
stop where a step would take minutes.
"""

import itertools
import math
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from on_gpu.findings import Findings, Machine, release, seconds_each, spread
from torch import Tensor

from minitron.measure.clock import peak_flops
from minitron.measure.record import Row
from minitron.model.attention import tiled_attention
from minitron.model.transformer import fused_attention, materialized_attention
from minitron.plan.calibrate import memory_bandwidth

WIDTH, ROWS = 4096, tuple(2**power for power in range(15))
SQUARES = (1024, 2048, 4096, 8192, 16384)
LENGTHS, TOKENS = (1024, 2048, 4096, 8192, 16384, 32768), 32768
HEADS, KV_HEADS, HEAD_WIDTH = 16, 16, 128
BEYOND_CACHE = 2**28
"""Bytes of the weights that take turns: a few times an H200's cache of 60 MB."""

LEAST_FLOPS = 2**42
"""Of the matmuls that are timed together, up to 200 of them: some milliseconds."""

LONGEST_IN_TILES = 8192
TILE = 1024

ATTENTIONS = {
    "fused": fused_attention,
    "materialized": materialized_attention,
    "tiles": partial(tiled_attention, tile_size=TILE),
}


def measure(machine: Machine, folder: Path) -> Findings:
    """Measure both rooflines; each row has FLOP/s and what the roof would allow."""
    findings, device = Findings(), machine.device
    peak, bandwidth = peak_flops(device, torch.bfloat16).flops, memory_bandwidth(device)
    width, rows, squares = (64, (1, 16, 256), (64,)) if machine.tiny else (WIDTH, ROWS, SQUARES)
    shapes = [(count, width, width) for count in rows] + [(n, n, n) for n in squares]
    findings.rows += [matmul_row(*shape, machine, peak, bandwidth) for shape in shapes]

    lengths, tokens = ((32, 64), 64) if machine.tiny else (LENGTHS, TOKENS)
    for S in lengths:
        for name, attention in ATTENTIONS.items():
            if name == "tiles" and S > LONGEST_IN_TILES:
                continue
            findings.rows.append(attention_row(name, attention, S, tokens // S, machine, peak))
    return findings


def matmul_row(
    rows: int, inner: int, columns: int, machine: Machine, peak: float, bandwidth: float
) -> Row:
    """A row of x (rows, inner) times a weight (columns, inner), transposed as in a linear layer."""
    x = torch.randn(rows, inner, device=machine.device, dtype=torch.bfloat16)
    out = torch.empty(rows, columns, device=machine.device, dtype=torch.bfloat16)
    flops = 2 * rows * inner * columns
    moved = 2 * (rows * inner + inner * columns + rows * columns)
    num_weights = 1 if machine.tiny else math.ceil(BEYOND_CACHE / (2 * inner * columns))
    weights = itertools.cycle(
        torch.randn(num_weights, columns, inner, device=machine.device, dtype=torch.bfloat16)
    )
    calls = 1 if machine.tiny else max(4, min(200, LEAST_FLOPS // flops))
    seconds = seconds_each(lambda: torch.mm(x, next(weights).T, out=out), machine.device, 10, calls)
    return {
        "case": f"matmul {rows} x {inner} x {columns}",
        "kind": "matmul",
        "size": rows,
        **spread(seconds),
        "flops": flops,
        "bytes": moved,
        "flops_per_second": flops / min(seconds),
        "intensity": flops / moved,
        "roof": min(peak, flops / moved * bandwidth),
        "peak": peak,
        "bandwidth": bandwidth,
    }


def attention_row(
    name: str, attention: Callable, S: int, batch_size: int, machine: Machine, peak: float
) -> Row:
    """A row of one attention function, forward and backward."""
    flops = 12 * batch_size * HEADS * S * S * HEAD_WIDTH  # 2 matmuls forward, 4 backward
    matrix = 2 * batch_size * HEADS * S * S
    row = {
        "case": f"attention {name}, {S} tokens",
        "kind": "attention",
        "function": name,
        "sequence_length": S,
        "sequences": batch_size,
        "flops": flops,
        "matrix_bytes": matrix,
        "peak": peak,
        "fits": True,
    }
    shapes = [(batch_size, heads, S, HEAD_WIDTH) for heads in (HEADS, KV_HEADS, KV_HEADS)]
    inputs = [
        torch.randn(shape, device=machine.device, dtype=torch.bfloat16, requires_grad=True)
        for shape in shapes
    ]
    gradient = torch.randn(shapes[0], device=machine.device, dtype=torch.bfloat16)
    rounds = 2 if machine.tiny else 5

    def forward_backward() -> tuple[Tensor, ...]:
        return torch.autograd.grad(attention(*inputs, 0.0), inputs, gradient)

    if machine.on_gpu:
        release(machine.device)
        torch.cuda.reset_peak_memory_stats(machine.device)
        before = torch.cuda.memory_allocated(machine.device)
        try:
            forward_backward()
        except torch.OutOfMemoryError:
            return row | {"fits": False}
        row["peak_bytes"] = torch.cuda.max_memory_allocated(machine.device) - before
    seconds = seconds_each(forward_backward, machine.device, rounds)
    return row | spread(seconds) | {"flops_per_second": flops / min(seconds)}
