"""Who sends to whom in an all-reduce: around a ring, by halving, along a tree."""

import math
from collections.abc import Callable

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch

from teaching.figures_style import BAND, GREY, RANK_COLOR, STYLE, WORK_COLOR, ink

SIZE = 8
"""The ranks of each pattern."""
THICKEST = 10.0
"""Points, of a line that carries the full tensor."""
PARENT = {4: 0, 2: 4, 6: 4, 1: 2, 3: 2, 5: 6, 7: 6}
"""A binary tree in which the odd ranks are leaves; the root, rank 0, has one child."""


@rc_context(STYLE)
def message_patterns() -> Figure:
    """Draw the messages of a ring, of recursive halving and of a tree on 8 ranks, side by side.

    A line is as thick as the share of the tensor that it carries at a time; a tree's pieces are
    drawn as thin as the smallest of these. Halving shows rank 0's partners in color, step by step.
    """
    figure = Figure(figsize=(7.0, 2.75), layout="constrained")
    ring, halving, tree = figure.subplots(1, 3, width_ratios=(2.7, 3.3, 2.7))

    for rank in range(SIZE):
        _send(ring, on_circle(rank), on_circle(rank + 1), 1 / SIZE, "-|>")
    _finish(ring, on_circle, f"ring: {2 * (SIZE - 1)} steps of G/{SIZE}")

    partners = halving_partners(0)
    for distance, _ in partners:
        for rank in range(SIZE):
            _send(halving, on_circle(rank), on_circle(rank ^ distance), 0.08, "-", BAND)
    for step, (distance, share) in enumerate(partners, 1):
        x, y = on_circle(distance)
        _send(halving, on_circle(0), (x, y), share, "<|-|>")
        halving.text(
            x + 0.25,
            y + 0.12,
            f"step {step}:\nG/{round(1 / share)}",
            size=8.5,
            color=GREY,
            va="top" if y < 0 else "center",
        )
    _finish(halving, on_circle, f"halving: {2 * len(partners)} steps, G/2 to G/{SIZE}", right=1.95)

    for child, parent in PARENT.items():
        _send(tree, in_tree(child), in_tree(parent), 1 / SIZE, "<|-|>")
    _finish(tree, in_tree, "tree: up, then down")
    return figure


def halving_partners(rank: int) -> list[tuple[int, float]]:
    """Return, step by step, a rank's partner and the share of the tensor that it sends to it."""
    distances = [SIZE >> step for step in range(1, int(math.log2(SIZE)) + 1)]
    return [(rank ^ distance, distance / SIZE) for distance in distances]


def on_circle(rank: int) -> tuple[float, float]:
    angle = math.pi / 2 - 2 * math.pi * rank / SIZE  # rank 0 at the top, clockwise
    return math.cos(angle), math.sin(angle)


def in_tree(rank: int) -> tuple[float, float]:
    """Return a place by its rank from left to right and by its depth; the root is at the top."""
    depth, above = 0, rank
    while above in PARENT:
        depth, above = depth + 1, PARENT[above]
    return ((rank or SIZE / 2) - SIZE / 2) / 3.5, 1 - 2 * depth / 3


def _send(
    axes: Axes,
    begin: tuple[float, float],
    end: tuple[float, float],
    share: float,
    style: str,
    color: str = WORK_COLOR["communication"],
) -> None:
    axes.add_patch(
        FancyArrowPatch(
            begin,
            end,
            arrowstyle=style,
            mutation_scale=9,
            linewidth=THICKEST * share,
            color=color,
            shrinkA=9,
            shrinkB=9,
        )
    )


def _finish(axes: Axes, place: Callable, title: str, right: float = 1.35) -> None:
    for rank in range(SIZE):
        x, y = place(rank)
        axes.plot([x], [y], "o", markersize=15, color=RANK_COLOR[rank])
        axes.text(x, y, str(rank), ha="center", va="center", size=9, color=ink(RANK_COLOR[rank]))
    axes.set_title(title, size=10)
    axes.set_xlim(-1.35, right)
    axes.set_ylim(-1.25, 1.25)
    axes.set_aspect("equal")
    axes.set_axis_off()
