"""Drawings for chapter 4: GPUs and years, bytes per rank, samples, a mismatch, wrong averages."""

import tempfile
from pathlib import Path

import numpy as np
import torch
from matplotlib import rc_context
from matplotlib.figure import Figure

from minitron import cost
from minitron.config import ModelConfig
from minitron.dataset import TokenDataset, write_shard
from minitron.measure.clock import DENSE_BF16_PEAKS
from minitron.model.transformer import Transformer, initialize
from teaching.figures_style import (
    BLACK,
    GREY,
    RANK_COLOR,
    SERIES,
    STYLE,
    WORK_COLOR,
    canvas,
    ink,
)
from teaching.lab import loss_of
from teaching.slides.models import LLAMA_8B, LLAMA_8B_HOURS
from teaching.slides.shapes import PLATE, box, frame, hatched, page, write

RANKS = 4


@rc_context(STYLE)
def gpus_and_years() -> Figure:
    """Draw the same GPU hours as one GPU's years and as 30 days of many GPUs, a square each."""
    figure, axes = page(7, 3.2)
    years, count, columns = LLAMA_8B_HOURS / 24 / 365, round(LLAMA_8B_HOURS / 24 / 30), 86
    flops = 15e12 * cost.training_flops_per_token(LLAMA_8B, 8192)
    ideal = flops / (0.4 * DENSE_BF16_PEAKS["H100"]) / 3600 / 24 / 365
    left, cell = 0.4, 0.075
    decade = 10 * columns * cell / years
    write(axes, (0.1, 0.2), f"1 H100: {years:.0f} years", weight="bold")
    axes.plot(0.2, 0.62, "s", color=SERIES[0], markersize=4)
    for start in range(0, int(years), 10):
        width = min(decade, (years - start) * decade / 10)
        box(axes, (left + start / 10 * decade, 0.42, width, 0.4), color=WORK_COLOR["matmul"])
    place = left + ideal / 10 * decade
    axes.plot([place, place], [0.36, 0.92], color=BLACK, linestyle="--", linewidth=1.3)
    write(axes, (place, 1.06), f"at an MFU of 40 %: {ideal:.0f} years", ha="center")
    write(axes, (left + columns * cell, 1.06), "a block: ten years", GREY, ha="right")

    write(axes, (0.1, 1.45), f"{count:,} H100s: 30 days", weight="bold")
    x = [left + cell * (index % columns + 0.5) for index in range(count)]
    y = [1.72 + cell * (index // columns) for index in range(count)]
    axes.plot(x, y, "s", color=SERIES[0], markersize=3.4, markeredgewidth=0)
    return figure


@rc_context(STYLE)
def bytes_per_rank() -> Figure:
    """Draw the bytes that a rank sends in a ring over the number of ranks, and twice the tensor."""
    figure, axes = canvas(height=2.4)
    counts = [2**power for power in range(1, 12)]
    num_values = cost.num_parameters(LLAMA_8B)
    sent = [cost.ring_all_reduce_volume(num_values, 2, N, rank=0).sent / 1e9 for N in counts]
    axes.set_xscale("log", base=2)
    axes.axhline(4 * num_values / 1e9, color=GREY, linestyle=":", linewidth=1.5)
    axes.text(2, 4 * num_values / 1e9 + 1, f"2 G = {4 * num_values / 1e9:.1f} GB", color=GREY)
    axes.plot(counts, sent, "o--", color=SERIES[0])
    for N, value in zip(counts, sent, strict=True):
        if N in (2, 8, 64, 2048):
            axes.text(N, value - 3.2, f"{value:.1f}", ha="center", va="center")
    axes.set_xticks((2, 8, 64, 2048), ["2", "8", "64", "2,048"])
    axes.set(ylim=(0, 39), xlabel="ranks", ylabel="GB sent by a rank")
    return figure


@rc_context(STYLE)
def samples() -> Figure:
    """Draw a step's eight samples by the rank that reads them, with 1, 2, 3 and 4 ranks."""
    length, batch_size, position = 4, 8, 16
    figure, axes = page(7, 2.75)
    with tempfile.TemporaryDirectory() as folder:
        write_shard(Path(folder) / "train_0.bin", np.arange(400))
        data = TokenDataset(Path(folder), "train", sequence_length=length, seed=0)
        alone = (data.batch(position, batch_size)[:, 0] // length).tolist()
        for row, num_ranks in enumerate((1, 2, 3, 4)):
            name = f"{num_ranks} ranks" if row else "one process"
            top = 0.1 + 0.67 * row
            write(axes, (1.25, top + 0.28), name, ha="right")
            for rank in range(num_ranks):
                own = data.batch(position, batch_size, rank, num_ranks)[:, 0] // length
                for sample in own.tolist():
                    left, color = 1.35 + 0.7 * alone.index(sample), ink(RANK_COLOR[rank])
                    box(axes, (left, top, 0.66, 0.55), color=RANK_COLOR[rank])
                    look = {"color": color, "ha": "center"}
                    write(axes, (left + 0.33, top + 0.19), str(sample), weight="bold", **look)
                    write(axes, (left + 0.33, top + 0.41), f"rank {rank}", size=9, **look)
    return figure


@rc_context(STYLE)
def mismatch() -> Figure:
    """Draw three ranks in an all-reduce that the fourth skips, and the fourth in a barrier."""
    figure, axes = page(7, 2.75)
    for rank in range(RANKS):
        top = 0.15 + 0.66 * rank
        skips = rank == 2
        box(axes, (0.1, top, 0.75, 0.42), f"rank {rank}", RANK_COLOR[rank])
        color = SERIES[1] if skips else WORK_COLOR["communication"]
        calls = ("barrier", "") if skips else ("all_reduce(loss)", "barrier")
        box(axes, (0.95, top, 1.65, 0.42), calls[0], color)
        hatched(axes, (2.6, top, 2.5, 0.42))
        text = "waits for ranks 0, 1, 3" if skips else "waits for rank 2"
        write(axes, (3.85, top + 0.21), text, ha="center", bbox=PLATE)
        if calls[1]:
            frame(axes, (5.2, top, 1.6, 0.42), calls[1])
    return figure


MODEL = ModelConfig(
    family="gpt",
    vocab_size=64,
    max_sequence_length=24,
    num_layers=2,
    width=32,
    num_heads=4,
    num_kv_heads=4,
    ffn_width=128,
)


def own_gradients() -> tuple[float, list[float]]:
    """Return one weight's gradient of the full batch, and of each rank's own samples."""
    generator = torch.Generator().manual_seed(0)
    batch = torch.randint(64, (16, 25), generator=generator)

    def gradient(rows: torch.Tensor) -> torch.Tensor:
        model = Transformer(MODEL)
        initialize(model, seed=0)
        model = model.double()
        loss_of(model, rows).backward()
        return model.token_embedding.weight.grad.flatten()

    full = gradient(batch)
    parts = torch.stack([gradient(batch[rank::RANKS]) for rank in range(RANKS)])
    index = (parts.abs().sum(0) * (parts * full > 0).all(0)).argmax()  # no rank's sign differs
    return full[index].item(), parts[:, index].tolist()


@rc_context(STYLE)
def wrong_averages() -> Figure:
    """Draw one weight's gradient on four ranks: their mean, their sum, and with the wrong hook."""
    full, own = own_gradients()
    shown = [value / full for value in own]
    mean = sum(shown) / RANKS
    figure = Figure(figsize=(7.0, 3.1), layout="constrained")
    panels = figure.subplots(1, 3, sharey=True)
    for axes, title, values in zip(
        panels,
        (
            "mean: correct",
            f"sum: {sum(shown):.1f}x too large",
            "hook: differs by rank",
        ),
        ([mean] * RANKS, [sum(shown)] * RANKS, shown),
        strict=True,
    ):
        axes.set_title(title, size=12)
        for rank, value in enumerate(values):
            axes.bar(rank, value, 0.8, color=RANK_COLOR[rank])
            axes.text(rank, value + 0.08, f"{value:.1f}", ha="center")
        axes.axhline(1, color=BLACK, linestyle="--", linewidth=1.2)
        axes.set_xticks(range(RANKS), [f"{rank}" for rank in range(RANKS)])
        axes.set_xlabel("rank")
        axes.tick_params(axis="y", length=0)
    panels[0].set(ylim=(0, 4.6), yticks=[0, 1, 2, 3, 4])
    panels[0].set_ylabel("gradient of a weight,\nrelative to one process")
    return figure
