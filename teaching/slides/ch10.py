"""Drawings of deck 10: bytes and dtypes, what rounding loses, clipping, overflows, block scales."""

import math

import torch
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor

from minitron.model.block_scaled import quantize_mxfp8, quantize_nvfp4
from minitron.model.float8 import quantize
from minitron.precision import PRECISIONS
from teaching.figures_style import (
    BLACK,
    CATEGORY_COLOR,
    GREY,
    RANK_COLOR,
    SERIES,
    WORK_COLOR,
    canvas,
    label_end,
    pale,
)
from teaching.floats import layout_of
from teaching.slides.shapes import BAD, GOOD, SMALL, WIDE, arrow, box, name_rows, page, write

f32, bf16, f16 = torch.float32, torch.bfloat16, torch.float16
NAMES = {f32: "float32", bf16: "bfloat16", f16: "float16"}
LINE = {f32: SERIES[0], bf16: SERIES[1], f16: SERIES[2]}


@rc_context(WIDE)
def bytes_per_parameter() -> Figure:
    """Draw what a parameter takes in one dtype: its weight, its gradient, and two moments."""
    figure, axes = page(10, 2.2)
    kinds = {"weight": "parameter", "gradient": "gradient", "2 moments": "optimizer state"}
    for index, dtype in enumerate((f32, bf16, f16)):
        top = 0.15 + 0.7 * index
        write(axes, (0.1, top + 0.27), NAMES[dtype])
        left = 1.5
        for name, kind in kinds.items():
            size = dtype.itemsize * (2 if name == "2 moments" else 1)
            text = f"{name}: {size}" if dtype == f32 else str(size)
            box(axes, (left, top, 0.42 * size, 0.55), text, CATEGORY_COLOR[kind], 13)
            left += 0.42 * size
        write(axes, (left + 0.15, top + 0.27), f"{4 * dtype.itemsize} bytes")
    return figure


@rc_context(WIDE)
def smallest_update() -> Figure:
    """Draw how large an update must be to change a weight, in bfloat16 and float16."""
    figure, axes = canvas(10, 3.4)
    weights = torch.logspace(-3, 0, 2000, dtype=torch.float64)[:-1]
    for dtype in (bf16, f16):
        layout = layout_of(dtype)
        half = [layout.spacing(weight) / 2 for weight in weights.tolist()]
        axes.plot(weights, half, color=LINE[dtype])
        label_end(axes, 1, half[-1], NAMES[dtype], LINE[dtype])
    ends = ((8e-5, 1.1e-3, "left", "Llama 3 405B at first"), (8e-7, 0.95, "right", "at the end"))
    for rate, x, side, words in ends:
        axes.axhline(rate, color=GREY, linestyle="--", linewidth=1.5)
        axes.text(x, 1.25 * rate, f"{words}: {rate:.0e}", size=13, color=GREY, ha=side)
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlim(1e-3, 1)
    axes.set_ylim(1e-7, 1e-2)
    axes.tick_params(labelsize=12)
    axes.set_xlabel("size of the weight")
    axes.set_ylabel("smallest update\nthat changes it")
    return figure


@rc_context(WIDE)
def sums_of_ones() -> Figure:
    """Draw the sum of ones added one by one: where it stops growing in 16 bits."""
    figure, axes = canvas(10, 4.2)
    times = 4000
    for dtype in (f32, f16, bf16):
        total, one = torch.zeros((), dtype=dtype), torch.ones((), dtype=dtype)
        sums = [0.0]
        for _ in range(times):
            total += one
            sums.append(total.item())
        axes.plot(range(times + 1), sums, color=LINE[dtype], linewidth=2.5)
        label_end(axes, times, sums[-1], f"{NAMES[dtype]}: {sums[-1]:,.0f}", LINE[dtype])
    axes.set_xlim(0, times)
    axes.set_ylim(0)
    axes.tick_params(labelsize=12)
    axes.set_xlabel("ones added")
    axes.set_ylabel("sum")
    return figure


@rc_context(WIDE)
def clip_and_unscale() -> Figure:
    """Draw a gradient's norm on its way to the optimizer, in the right and in the wrong order."""
    figure, axes = page(10, 2.6)
    scale = 2.0**16
    orders = {"right": ("unscale", "clip to 1"), "wrong": ("clip to 1", "unscale")}
    for index, (name, steps) in enumerate(orders.items()):
        top, norm = 0.35 + 1.2 * index, 2 * scale
        write(axes, (0.1, top + 0.35), name, BAD if index else GOOD, weight="bold")
        for step, left, room in zip(steps, (1.0, 4.3), (1.55, 0.95), strict=True):
            write(axes, (left, top + 0.35), f"norm {_say(norm)}")
            norm = norm / scale if step == "unscale" else min(norm, 1.0)
            box(axes, (left + room, top + 0.05, 1.2, 0.6), step, WORK_COLOR["optimizer"])
            arrow(axes, (left + room + 1.25, top + 0.35), (left + room + 1.65, top + 0.35))
        write(axes, (7.0, top + 0.35), f"norm {_say(norm)} to the optimizer")
    return figure


def _say(norm: float) -> str:
    """Return a norm in words: digits if it is large, an exponent if it is small."""
    return f"{norm:,.0f}" if norm >= 1 else f"{norm:.1e}"


def zero_steps(is_together: bool) -> tuple[list[float], Tensor]:
    """Return the scales and weights of the chapter's four ranks with ZeRO-1, in one process."""
    scales, weights = [2.0**16] * 4, torch.zeros(4, 3)
    for step in range(5):
        grads = torch.tensor(scales)[:, None].expand(4, 12).clone()
        grads[3, 4] *= math.inf if step == 2 else 1
        own = grads.sum(0).view(4, 3)
        finite = [bool(part.isfinite().all()) for part in own]
        accepts = [all(finite)] * 4 if is_together else finite
        for rank in range(4):
            if accepts[rank]:
                weights[rank] -= own[rank] / (4 * scales[rank])
            else:
                scales[rank] /= 2
    return scales, weights


@rc_context(WIDE)
def overflow_on_one_rank() -> Figure:
    """Draw four ranks of which one sees the overflow: each decides alone, or all together."""
    figure, axes = page(10, 4.5)
    write(axes, (0.1, 0.72), "gradients\nof step 2", linespacing=1.15)
    for rank in range(4):
        left = 1.9 + 2.05 * rank
        write(axes, (left, 0.22), f"rank {rank} owns", GREY, SMALL)
        for index in range(3):
            is_infinite = 3 * rank + index == 4
            bounds = (left + 0.6 * index, 0.45, 0.56, 0.56)
            text = "inf" if is_infinite else "ok"
            box(axes, bounds, text, BLACK if is_infinite else RANK_COLOR[rank], SMALL)
    for top, name, is_together in (
        (1.4, "each decides\nalone", False),
        (3.05, "by the norm\nover all ranks", True),
    ):
        scales, weights = zero_steps(is_together)
        write(axes, (0.1, top + 0.55), name, linespacing=1.15)
        for rank, scale in enumerate(scales):
            skips = is_together or rank == 1
            left = 1.9 + 2.05 * rank
            verb = "skips" if skips else "steps"
            color = BAD if weights[rank, 0] != -4 else GOOD
            text = f"{verb}\nscale $2^{{{math.log2(scale):.0f}}}$"
            box(axes, (left, top, 1.76, 0.8), text, "white", 13, RANK_COLOR[rank])
            words = f"weights {weights[rank, 0]:.4g}".replace("-", "\u2212")
            write(axes, (left, top + 1.05), words, color)
    return figure


COLUMNS = ("parameters", "compute", "gradients", "reduction", "master")


@rc_context(WIDE)
def recipes() -> Figure:
    """Draw which dtype holds what in each recipe, darker for more bits, and its bytes."""
    figure, axes = page(10, 4.5)
    shades = {32: WORK_COLOR["attention"], 16: WORK_COLOR["matmul"], 8: WORK_COLOR["elementwise"]}
    short = {torch.float32: "f32", bf16: "bf16", f16: "f16", torch.float8_e4m3fn: "e4m3"}
    titles = ("parameters", "matmuls", "gradients", "sent", "master")
    for column, title in enumerate(titles):
        write(axes, (2.25 + 1.3 * column + 0.6, 0.25), title, GREY, 13, ha="center")
    write(axes, (9.3, 0.25), "bytes", GREY, 13, ha="center")
    for index, (name, precision) in enumerate(PRECISIONS.items()):
        top = 0.5 + 0.66 * index
        write(axes, (0.1, top + 0.29), name)
        for column, field in enumerate(COLUMNS):
            dtype = getattr(precision, field)
            bounds = (2.25 + 1.3 * column, top, 1.22, 0.58)
            if dtype is None:
                box(axes, bounds, "none", "white", 13, "#CCCCCC")
            else:
                box(axes, bounds, short[dtype], shades[8 * dtype.itemsize], 13)
        write(axes, (9.3, top + 0.29), str(precision.cost.total), ha="center")
    return figure


def _per_tensor(x: Tensor) -> Tensor:
    """Return a tensor rounded to 8 bits with one scale."""
    values, scale = quantize(x, torch.float8_e4m3fn)
    return values.float() * scale


FORMATS = {
    "e4m3,\none scale": _per_tensor,
    "MXFP8,\nblocks of 32": lambda x: quantize_mxfp8(x).dequantize(),
    "NVFP4,\nblocks of 16": lambda x: quantize_nvfp4(x).dequantize(),
}


@rc_context(WIDE)
def scales_and_an_outlier() -> Figure:
    """Draw rounding errors with one scale or one per block, with and without an outlier."""
    figure = Figure(figsize=(10, 4.3))
    axes = figure.add_axes((0.16, 0.15, 0.8, 0.42))
    x = torch.randn(65_536, generator=torch.Generator().manual_seed(0))
    outlier = x.clone()
    outlier[0] = 100_000.0
    for y, rounded in enumerate(FORMATS.values()):
        for shift, tensor, color in ((-0.2, x, pale(SERIES[0])), (0.2, outlier, SERIES[1])):
            error = 100 * ((rounded(tensor) - tensor)[1:].norm() / tensor[1:].norm()).item()
            axes.barh(y + shift, error, 0.38, color=color)
            words = " without the outlier" if shift < 0 else " with it: the others"
            text = f"{error:.2f}%{words if y == 0 else ''}"
            write(axes, (error + 0.1, y + shift), text, size=13)
    name_rows(axes, list(FORMATS), size=13)
    axes.set_xlim(0, 18)
    axes.set_xlabel("error of a value (%)")
    above = figure.add_axes((0, 0.6, 1, 0.4), xlim=(0, 10), ylim=(1.72, 0))
    above.set_axis_off()
    for left, size, words in (
        (0.2, 12, "one scale for the tensor"),
        (5.3, 4, "a scale for each block"),
    ):
        _draw_blocks(above, left, size, words)
    return figure


def _draw_blocks(axes: Axes, left: float, size: int, words: str) -> None:
    """Draw twelve values, the first of them the outlier, in blocks that share a scale."""
    write(axes, (left, 0.2), words, weight="bold")
    for index in range(12):
        gap = 0.12 * (index // size)
        is_hit = index < size
        color = BAD if index == 0 else SERIES[1] if is_hit else pale(SERIES[0])
        box(axes, (left + 0.34 * index + gap, 0.45, 0.32, 0.45), color=color)
    for block in range(12 // size):
        start = left + (0.34 * size + 0.12) * block
        axes.plot([start, start + 0.34 * size - 0.04], [1.0, 1.0], color=GREY, linewidth=2)
        write(axes, (start + 0.17 * size, 1.22), "scale", GREY, SMALL, ha="center")
    write(axes, (left, 1.55), "first: the outlier; red: values that suffer", GREY, SMALL)
