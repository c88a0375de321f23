"""The ring all-reduce, chunk by chunk: who holds which sum after each step."""

import math
from collections.abc import Sequence

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from teaching.figures_style import (
    BLACK,
    GREY,
    RANK_COLOR,
    STYLE,
    canvas,
    ink,
)


def ring_sums(size: int, step: int) -> list[list[range]]:
    """Which ranks are summed in chunk c on rank r, `[r][c]`, after `step` steps of a ring.

    Chunk c sets out from rank c + 1 and is whole on rank c after size - 1 steps; then it goes
    round once more. A range counts on beyond size: take it modulo size.
    """
    sums = [[range(rank, rank + 1) for _ in range(size)] for rank in range(size)]
    for time in range(step):
        before = [list(row) for row in sums]
        for sender, chunk in sent_chunks(size, time):
            arrived = before[sender][chunk]
            reducing = time < size - 1
            sums[(sender + 1) % size][chunk] = range(arrived.start, arrived.stop + reducing)
    return sums


def sent_chunks(size: int, time: int) -> list[tuple[int, int]]:
    """Pairs (rank, chunk that it sends to the next rank) in step `time`, counted from 0."""
    return [(rank, (rank - time - 1) % size) for rank in range(size)]


@rc_context(STYLE)
def ring_frame(size: int, step: int) -> Figure:
    """Draw the ring all-reduce after `step` of its 2 (size - 1) steps, one row per rank.

    A cell is a chunk; it is filled with the colors and numbers of the ranks that are summed in
    it. An arrow shows what has come from the rank before.
    """
    figure, axes = canvas(height=0.8 + 0.6 * size)
    _draw_ring(axes, size, step, numbered=True)
    return figure


@rc_context(STYLE)
def ring_frames(size: int, steps: Sequence[int] | None = None) -> Figure:
    """Draw `ring_frame` small, for each of `steps` (default: all of them) side by side."""
    steps = range(2 * size - 1) if steps is None else steps
    num_rows = math.ceil(len(steps) / 4)
    figure = Figure(figsize=(7.0, num_rows * (0.45 + 0.28 * size)), layout="constrained")
    for position, step in enumerate(steps):
        axes = figure.add_subplot(num_rows, min(4, len(steps)), position + 1)
        _draw_ring(axes, size, step, numbered=False)
    return figure


def _draw_ring(axes: Axes, size: int, step: int, numbered: bool) -> None:
    for rank, row in enumerate(ring_sums(size, step)):
        for chunk, ranks in enumerate(row):
            _draw_chunk(axes, size, rank, chunk, {other % size for other in ranks}, numbered)
    for sender, chunk in sent_chunks(size, step - 1) if step else []:
        receiver = (sender + 1) % size
        axes.add_patch(
            Rectangle(
                (chunk + 0.06, receiver + 0.12),
                0.88,
                0.76,
                fill=False,
                edgecolor=BLACK,
                linewidth=1.8,
                zorder=3,
            )
        )
        axes.annotate(
            "",
            (chunk + 0.5, receiver + 0.14),
            (chunk + 0.5, receiver - 0.3),
            zorder=4,
            arrowprops={"arrowstyle": "-|>", "linewidth": 1.5, "color": BLACK},
        )

    axes.set_xlim(0, size)
    axes.set_ylim(size, -0.35)
    names = [f"rank {rank}" if numbered else f"{rank}" for rank in range(size)]
    axes.set_yticks([rank + 0.5 for rank in range(size)], names)
    axes.set_xticks(
        [chunk + 0.5 for chunk in range(size)],
        [f"chunk {chunk}" for chunk in range(size)] if numbered else [],
    )
    axes.tick_params(length=0, labelcolor=BLACK)
    axes.spines[:].set_visible(False)
    phase = "reduce-scatter" if step < size else "all-gather"
    axes.set_title(f"step {step}: {phase}" if step else "start", size=12 if numbered else 9)


def _draw_chunk(
    axes: Axes, size: int, rank: int, chunk: int, summed: set[int], numbered: bool
) -> None:
    """One cell: a stripe per rank, filled if that rank's numbers are in the sum."""
    axes.add_patch(
        Rectangle(
            (chunk + 0.06, rank + 0.12),
            0.88,
            0.76,
            facecolor="white",
            edgecolor=GREY,
            linewidth=0.8,
        )
    )
    for other in sorted(summed):
        width = 0.88 / size
        left = chunk + 0.06 + other * width
        color = RANK_COLOR[other % len(RANK_COLOR)]
        axes.add_patch(Rectangle((left, rank + 0.12), width, 0.76, facecolor=color))
        if numbered:
            axes.text(
                left + width / 2,
                rank + 0.5,
                str(other),
                ha="center",
                va="center",
                size=10,
                color=ink(color),
            )
