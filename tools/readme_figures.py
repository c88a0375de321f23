"""Draw README's two pictures: what the course takes off a GPU, and what the system consists of.

    python tools/readme_figures.py      # writes docs/course.png and docs/system.png

The bytes of the first are the planner's. The file keeps them in a comment, so that a test can
compare them with what the planner says today.
"""

import json
import sys
import tomllib
from pathlib import Path

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from minitron.config import ModelConfig, ParallelConfig  # noqa: E402
from minitron.plan.hardware import DEVICES  # noqa: E402
from minitron.plan.job import Decision, Job  # noqa: E402
from minitron.plan.memory import memory_of  # noqa: E402
from teaching.figures_style import (  # noqa: E402
    AXIS_COLOR,
    BAND,
    BLACK,
    CATEGORY_COLOR,
    GREY,
    STYLE,
)

NUM_GPUS, SEQUENCE_LENGTH, SEQUENCES = 64, 8192, 512
DEVICE = DEVICES["H100-SXM-80GB"]
SPLIT = {"zero": 1, "tp": 8}
CHAPTERS = {  # precision, what is recomputed, and the layout after each chapter
    "1, 2  one GPU, float32": ("fp32", "none", {}),
    "3  recompute activations": ("fp32", "full", {}),
    "4, 5  data parallel: nothing saved": ("fp32", "full", {}),
    "6  ZeRO-1": ("fp32", "full", {"zero": 1}),
    "6  ZeRO-2": ("fp32", "full", {"zero": 2}),
    "6  ZeRO-3": ("fp32", "full", {"zero": 3}),
    "7  tensor parallel, ZeRO-1": ("fp32", "full", SPLIT),
    "8  sequence parallel": ("fp32", "full", SPLIT | {"sequence": True}),
    "9  pipeline parallel": ("fp32", "full", SPLIT | {"sequence": True, "pp": 2}),
    "10  bf16": ("bf16", "full", SPLIT | {"sequence": True, "pp": 2}),
    "11, 12  room to keep activations": ("bf16", "none", SPLIT | {"sequence": True, "pp": 2}),
}

PATH = {  # in minitron/
    "corpus/": "tokens",
    "model/": "a Transformer that\nknows nothing of ranks",
    "step.py": "loss, gradients,\noptimizer",
    "checkpoint/": "saved on N ranks,\nloaded on any M",
}
SEAMS = {  # in minitron/parallel/: what an axis takes in hand
    "tensor/": ("its linear layers", "tp"),
    "context/": ("its attention", "cp"),
    "pipeline/": ("its list of blocks", "pp"),
    "data/": ("its gradients, ZeRO", "dp"),
}


def bytes_by_chapter() -> dict[str, dict[str, int]]:
    """Return what the fullest GPU holds after each chapter, by the meter's kinds."""
    with (ROOT / "configs" / "llama-8b.toml").open("rb") as file:
        model = ModelConfig(**tomllib.load(file)["model"])
    held = {}
    for name, (precision, recompute, axes) in CHAPTERS.items():
        dp = NUM_GPUS // (axes.get("tp", 1) * axes.get("pp", 1))
        job = Job(model, NUM_GPUS, DEVICE, SEQUENCE_LENGTH, SEQUENCES, precision=precision)
        kinds = memory_of(job, Decision(ParallelConfig(dp=dp, **axes), recompute))
        held[name] = {kind: round(count) for kind, count in kinds.items()}
    return held


@rc_context(STYLE)
def course() -> Figure:
    """Draw a bar per chapter: Llama 3.1 8B on 64 H100s, sequences of 8,192 tokens."""
    held = bytes_by_chapter()
    figure = Figure(figsize=(9.6, 4.6))
    axes = figure.add_axes((0.34, 0.11, 0.64, 0.75))
    limit, right = DEVICE.memory_bytes / 1e9, 265
    axes.axvspan(limit, right, color=BAND, zorder=0)
    axes.text(
        right - 2,
        len(held) - 0.6,
        f"does not fit on an H100 ({limit:.1f} GB)",
        color=GREY,
        ha="right",
        va="bottom",
    )
    for row, kinds in enumerate(held.values()):
        left = 0.0
        for kind, color in CATEGORY_COLOR.items():
            width = kinds[kind] / 1e9
            axes.barh(row, width, 0.72, left, color=color, label="" if row else kind)
            left += width
        axes.text(left + 2, row, f"{left:.0f} GB", va="center")

    axes.set_xlim(0, right)
    axes.set_ylim(len(held) - 0.5, -0.5)
    axes.set_yticks(range(len(held)), list(held))
    axes.tick_params(axis="y", length=0, labelcolor=BLACK)
    axes.set_xlabel(f"GB on the fullest of {NUM_GPUS} GPUs")
    figure.legend(
        ncols=len(CATEGORY_COLOR),
        loc="upper right",
        bbox_to_anchor=(0.99, 1.0),
        frameon=False,
        handlelength=0.9,
        columnspacing=1.3,
        handletextpad=0.5,
    )
    figure.text(0.335, 0.895, "after chapter", color=GREY, ha="right")
    return figure


@rc_context(STYLE)
def system() -> Figure:
    """Draw a step's path through the model, what divides it, and what measures it."""
    figure = Figure(figsize=(9.6, 5.2))
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set_xlim(0, 96)
    axes.set_ylim(0, 52)
    axes.axis("off")

    places = [(3, 14), (21, 28), (53, 18), (75, 18)]
    for (name, what), (left, width) in zip(PATH.items(), places, strict=True):
        box(axes, left, 22, width, 9, name, what, BAND)
    for (left, width), (following, _) in zip(places, places[1:], strict=False):
        arrow(axes, (left + width, 26.5), (following, 26.5))

    heading(axes, 48, "parallel/: each axis attaches from outside, and the model does not change")
    for number, (name, (what, axis)) in enumerate(SEAMS.items()):
        left = 3 + 23.5 * number
        box(axes, left, 38, 20, 7.5, name, what, "white", AXIS_COLOR[axis])
        target = {"tp": 27, "cp": 35, "pp": 43, "dp": 62}[axis]
        arrow(axes, (left + 10, 38), (target, 31.2), AXIS_COLOR[axis])

    heading(axes, 18.2, "four instruments check every claim, in tests, chapters, and exercises")
    instruments = [
        ("oracle", "the same training?"),
        ("ledger", "bytes on the wire"),
        ("meter", "bytes held, by kind"),
        ("clock", "tokens/s, MFU"),
    ]
    for number, (name, what) in enumerate(instruments):
        box(axes, 3 + 23.5 * number, 8.5, 20, 7.5, name, what, "white", BLACK)
    axes.text(
        48,
        3.5,
        "the same code runs on:   laptop processes (gloo)   |   GPU nodes under "
        "torchrun (NCCL)   |   1,024 ranks that do not exist (dry run)",
        ha="center",
        va="center",
        fontsize=9.5,
        color=BLACK,
    )
    return figure


def heading(axes: Axes, y: float, text: str) -> None:
    axes.text(3, y, text, fontsize=10.5, color=GREY, va="center")


def box(
    axes: Axes,
    left: float,
    bottom: float,
    width: float,
    height: float,
    name: str,
    what: str,
    face: str,
    edge: str = BAND,
) -> None:
    """Draw a box with a name and, below it, what it is."""
    axes.add_patch(
        FancyBboxPatch(
            (left, bottom),
            width,
            height,
            facecolor=face,
            edgecolor=edge,
            boxstyle="round,pad=0,rounding_size=0.8",
            linewidth=1.8,
        )
    )
    middle = left + width / 2
    axes.text(
        middle,
        bottom + height - 2.2,
        name,
        ha="center",
        va="center",
        fontsize=11,
        fontweight="bold",
    )
    axes.text(middle, bottom + (height - 3) / 2, what, ha="center", va="center", fontsize=9.5)


def arrow(
    axes: Axes, start: tuple[float, float], end: tuple[float, float], color: str = GREY
) -> None:
    axes.add_patch(
        FancyArrowPatch(
            start,
            end,
            arrowstyle="-|>",
            mutation_scale=11,
            color=color,
            linewidth=1.6,
            shrinkA=0,
            shrinkB=0,
        )
    )


def main() -> None:
    comment = json.dumps(bytes_by_chapter())
    for name, figure, facts in (("course", course(), comment), ("system", system(), "")):
        metadata = {"Software": None} | ({"Comment": facts} if facts else {})
        figure.savefig(ROOT / "docs" / f"{name}.png", metadata=metadata)


if __name__ == "__main__":
    main()
