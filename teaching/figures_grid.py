"""The ranks of a mesh: who talks with rank 0 over which link, who sums what, who stores what.

Read in this order: group_along, rank_grid; placed_steps; Crossing, who_sums; Piece, pieces.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import dist, gcd, prod
from operator import mul
from typing import NamedTuple

import numpy
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch, Rectangle

from teaching.figures_style import (
    AXIS_COLOR,
    BAND,
    BLACK,
    GREY,
    RANK_COLOR,
    STYLE,
    WORK_COLOR,
    ink,
)

MOST_RANKS, WIDEST = 128, 16
"""Squares in a figure, and beside each other."""

# Lengths are inches: the axes are the page
WIDTH, MARGIN, LARGEST = 7.0, 0.15, 0.5
PADDING, NAME, LEGEND, SAMPLE = 0.14, 0.2, 0.27, 0.47
"""Around the squares of a node; above them for its name; below all for each axis; for a line."""
SQUARE = 0.66
"""A square's share of its place; between squares there are links."""
DASHES = (0, (3, 1.5))

Place = tuple[float, float]
Places = dict[int, Place]
"""The middle of each rank's square, from the upper left corner."""


class Box(NamedTuple):
    """A node."""

    left: float
    top: float
    width: float
    height: float


def group_along(axes: dict[str, int], axis: str) -> range:
    """Rank 0 and those that differ from it along `axis` alone; the last axis varies fastest."""
    names = list(axes)
    stride = prod(axes[name] for name in names[names.index(axis) + 1 :])
    return range(0, stride * axes[axis], stride)


@rc_context(STYLE)
def rank_grid(axes: dict[str, int], gpus_per_node: int = 8) -> Figure:
    """Draw the ranks of a mesh as squares in their nodes, and rank 0's group along each axis.

    `axes` maps names to sizes, as for `make_mesh`: the last one varies fastest. Lines are solid
    inside a node, over NVLink, and dashed between nodes, over the network. Raises ValueError for
    more ranks than can be drawn, or if they do not fill their nodes.
    """
    num_ranks = prod(axes.values())
    if num_ranks > MOST_RANKS:
        raise ValueError(f"{num_ranks} ranks, of which {MOST_RANKS} can be drawn: draw fewer")
    size = min(gpus_per_node, num_ranks)
    if num_ranks % size:
        raise ValueError(f"{num_ranks} ranks do not fill nodes of {size}: draw a multiple of it")

    places, boxes, pitch = _lay_out(axes, size)
    groups = {axis: group_along(axes, axis) for axis in reversed(axes) if axes[axis] > 1}
    is_mixed = any(group[1] < size <= group[-1] for group in groups.values())
    left, bottom = boxes[0].left, boxes[-1].top + boxes[-1].height + MARGIN

    height = bottom + LEGEND * len(groups) + MARGIN
    figure = Figure(figsize=(WIDTH, height))
    page = figure.add_axes((0, 0, 1, 1), xlim=(0, WIDTH), ylim=(height, 0))
    page.set_axis_off()
    for number, box in enumerate(boxes):
        _draw_node(page, box, number)
    for axis, group in groups.items():
        _draw_links(page, places, group, size, pitch, AXIS_COLOR[axis])
    for rank, place in places.items():
        _draw_rank(page, place, rank, pitch, _color(rank, groups))
    for row, (axis, group) in enumerate(groups.items()):
        words = (left + SAMPLE * (2 if is_mixed else 1), bottom + LEGEND * (row + 0.5))
        _describe(page, words, axis, group, size)
    return figure


def _lay_out(axes: dict[str, int], size: int) -> tuple[Places, list[Box], float]:
    """Where the ranks are and their nodes of `size`, and how far squares are apart."""
    num_nodes = prod(axes.values()) // size
    columns = gcd(next((n for n in reversed(axes.values()) if n > 1), 1), size)
    columns = columns if columns <= WIDEST else gcd(columns, WIDEST)
    beside, is_downwards = _arrangement(axes, size, columns)
    pitch = min(LARGEST, (WIDTH - 2 * MARGIN - beside * 2 * PADDING) / (beside * columns))
    width, height = columns * pitch + PADDING, size // columns * pitch + PADDING + NAME
    left = (WIDTH - beside * (width + PADDING) + PADDING) / 2

    places, boxes = {}, []
    for node in range(num_nodes):
        row, column = divmod(node, beside)
        if is_downwards:
            column, row = divmod(node, num_nodes // beside)
        box = Box(
            left + column * (width + PADDING), MARGIN + row * (height + PADDING), width, height
        )
        boxes.append(box)
        for index in range(size):
            down, right = divmod(index, columns)
            places[node * size + index] = (
                box.left + PADDING / 2 + (right + 0.5) * pitch,
                box.top + NAME + PADDING / 2 + (down + 0.5) * pitch,
            )
    return places, boxes, pitch


def _arrangement(axes: dict[str, int], size: int, columns: int) -> tuple[int, bool]:
    """How many nodes are beside each other, and whether they are numbered downwards.

    The nodes of the fastest axis that leaves a node fill a row, or a column if the row is too long.
    """
    spans = accumulate(reversed(axes.values()), mul)
    num_nodes = prod(axes.values()) // size
    in_line = next((span // size for span in spans if span > size), 1)
    if in_line * columns <= WIDEST:
        return in_line, False
    if num_nodes % in_line == 0 and num_nodes // in_line * columns <= WIDEST:
        return num_nodes // in_line, True
    return WIDEST // columns, False


def _draw_node(page: Axes, box: Box, number: int) -> None:
    page.add_patch(
        FancyBboxPatch(
            (box.left, box.top),
            box.width,
            box.height,
            boxstyle="round,pad=0,rounding_size=0.08",
            facecolor="white",
            edgecolor=GREY,
            linewidth=1,
        )
    )
    page.text(
        box.left + box.width - 0.1,
        box.top + 0.13,
        f"node {number}",
        size=9,
        color=GREY,
        ha="right",
        va="center",
    )


def _draw_rank(page: Axes, place: Place, rank: int, pitch: float, color) -> None:
    side = SQUARE * pitch
    x, y = place
    page.add_patch(Rectangle((x - side / 2, y - side / 2), side, side, facecolor=color, zorder=3))
    page.text(
        x,
        y,
        str(rank),
        ha="center",
        va="center_baseline",
        zorder=4,
        size=min(11, 30 * side),
        color=ink(color),
    )


def _color(rank: int, groups: dict[str, range]) -> str:
    """Rank 0 is in every group; another is in one at most."""
    if rank == 0:
        return BLACK
    return next((AXIS_COLOR[axis] for axis, group in groups.items() if rank in group), BAND)


def _draw_links(
    page: Axes, places: Places, group: range, size: int, pitch: float, color: str
) -> None:
    """From each rank of the group to the next, in a bow around squares that are between them."""
    for rank, following in zip(group, group[1:], strict=False):
        is_inside = rank // size == following // size
        start, end = places[rank], places[following]
        bow = 0.0
        if any(_is_between(place, start, end) for place in places.values()):
            bow = -min(0.2, 0.22 / dist(start, end))
            if start[0] == end[0]:  # from left edge to left edge, else from top to top
                bow = -bow
                start, end = ((x - SQUARE * pitch / 2, y) for x, y in (start, end))
            else:
                start, end = ((x, y - SQUARE * pitch / 2) for x, y in (start, end))
        page.add_patch(
            FancyArrowPatch(
                start,
                end,
                arrowstyle="-",
                color=color,
                zorder=2,
                shrinkA=0,
                shrinkB=0,
                connectionstyle=f"arc3,rad={bow}",
                linewidth=4 if is_inside else 2,
                linestyle="-" if is_inside else DASHES,
            )
        )


def _is_between(place: Place, start: Place, end: Place) -> bool:
    detour = dist(start, place) + dist(place, end) - dist(start, end)
    return place not in (start, end) and detour < 1e-6


def _describe(page: Axes, place: Place, axis: str, group: range, size: int) -> None:
    """The axis, its group and its links in words, which begin at `place`; samples before them."""
    links = []
    if group[1] < size:
        links.append(("NVLink", "-", 4))
    if group[-1] >= size:
        links.append(("the network", DASHES, 2))
    for number, (_, style, width) in enumerate(reversed(links), start=1):
        left, y = place[0] - SAMPLE * number, place[1]
        page.plot(
            [left, left + 0.8 * SAMPLE],
            [y, y],
            color=AXIS_COLOR[axis],
            linewidth=width,
            linestyle=style,
            solid_capstyle="butt",
        )

    numbers = ", ".join(map(str, group)) if len(group) <= 8 else f"0, {group[1]} ... {group[-1]}"
    names = " and ".join(name for name, _, _ in links)
    page.text(*place, f"{axis}: ranks {numbers}, over {names}", va="center", size=10)


# What the order of the axes costs


BAR_COLOR = {"matmul": WORK_COLOR["matmul"]} | {
    axis: AXIS_COLOR[axis] for axis in ("tp", "pp", "dp")
}
"""Of the parts of a step, in the order in which they follow each other in a bar."""


@rc_context(STYLE)
def placed_steps(
    steps: dict[tuple[str, ...], dict[str, float]], sizes: dict[str, int], gpus_per_node: int = 8
) -> Figure:
    """Draw a row for each order of the axes: rank 0's groups among the GPUs, and a step's parts.

    `steps` maps an order, outermost axis first, to seconds by part. On the left each column is a
    node and each square a GPU; ranks go down the columns. Rank 0 is black, and the other ranks of
    its groups have the color of their axis.
    """
    figure = Figure(figsize=(7.0, 1.0 + 0.52 * len(steps)), layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=(1.05, 1))
    num_nodes = prod(sizes.values()) // gpus_per_node
    for row, order in enumerate(steps):
        colors = numpy.array(_colors_of_ranks({axis: sizes[axis] for axis in order}))
        left.pcolormesh(
            numpy.arange(num_nodes + 1),
            row - 0.42 + 0.84 * numpy.arange(gpus_per_node + 1) / gpus_per_node,
            colors.reshape(num_nodes, gpus_per_node, 3).swapaxes(0, 1),
            edgecolors="white",
            linewidth=0.4,
        )
    left.set_xlim(0, num_nodes)
    left.set_ylim(len(steps) - 0.45, -0.62)
    left.set_yticks(range(len(steps)), [" ".join(order) for order in steps])
    left.set_xticks([])
    left.tick_params(axis="y", length=0, labelcolor=BLACK)
    for side in ("left", "bottom"):
        left.spines[side].set_visible(False)
    left.set_xlabel(f"{num_nodes} nodes of {gpus_per_node} GPUs; rank 0 is black")

    _draw_bars(right, list(steps.values()))
    figure.legend(
        handles=[
            Rectangle((0, 0), 1, 1, facecolor=color, label={"matmul": "matmuls"}.get(part, part))
            for part, color in BAR_COLOR.items()
            if any(part in parts for parts in steps.values())
        ],
        loc="outside upper center",
        ncols=len(BAR_COLOR),
        frameon=False,
        handlelength=0.9,
        handleheight=0.9,
        fontsize=10,
    )
    return figure


def _draw_bars(axes: Axes, steps: Sequence[dict[str, float]]) -> None:
    """A bar for each step, of its parts in seconds."""
    span = 1.15 * max(sum(parts.values()) for parts in steps)
    for row, parts in enumerate(steps):
        left = 0.0
        for part, color in BAR_COLOR.items():
            width = parts.get(part, 0.0)
            axes.barh(row, width, 0.7, left, color=color, linewidth=0.7, edgecolor="white")
            left += width
        axes.annotate(
            f"{left:.3g} s", (left, row), textcoords="offset points", xytext=(5, 0), va="center"
        )
    axes.set_xlim(0, span)
    axes.set_ylim(len(steps) - 0.45, -0.62)
    axes.set_yticks([])
    axes.spines["left"].set_visible(False)
    axes.set_xlabel("time per step (s)")


def _colors_of_ranks(axes: dict[str, int]) -> list[tuple[float, float, float]]:
    """Return each rank's color: black for rank 0, its axis' in a group of rank 0, else grey."""
    colors = [BAND] * prod(axes.values())
    for axis in axes:
        for rank in group_along(axes, axis):
            colors[rank] = AXIS_COLOR[axis] if rank else BLACK
    return [to_rgb(color) for color in colors]


# Who sums what with whom


class Crossing(NamedTuple):
    """What ranks must agree on in a step, and the axes along which they add it up."""

    name: str
    summed: tuple[str, ...]
    when: str
    copied: tuple[str, ...] = ()
    """Axes along which one rank sends it to the others."""


SMALL_PITCH, BETWEEN = 0.29, 0.1
"""Of the squares in a panel, and between its two halves."""
BOW = 0.45
"""Of a link from half to half, in inches of its height."""


@rc_context(STYLE)
def who_sums(crossings: Sequence[Crossing]) -> Figure:
    """Draw a panel for each of `crossings`: ranks of pp 2 x dp 2 x tp 2, joined where they add up.

    A solid line joins ranks that sum; an arrow goes from a rank that sends a copy. A stage is a
    half of a panel, with neighbors along tp beside and along dp below each other.
    """
    figure = Figure(figsize=(WIDTH, 2.05))
    page = figure.add_axes((0, 0, 1, 1), xlim=(0, WIDTH), ylim=(2.05, 0))
    page.set_axis_off()
    room = (WIDTH - 2 * MARGIN) / len(crossings)
    for index, crossing in enumerate(crossings):
        middle = MARGIN + room * (index + 0.5)
        page.text(middle, 0.27, crossing.name, ha="center", va="center", size=10)
        _draw_crossing(page, crossing, middle)
        _write_axes(page, crossing, middle)
    return figure


def _draw_crossing(page: Axes, crossing: Crossing, middle: float) -> None:
    left, top = middle - (4 * SMALL_PITCH + BETWEEN) / 2, 0.74
    places = {}
    for rank in range(8):
        stage, copy, index = rank // 4, rank // 2 % 2, rank % 2
        x = left + (2 * stage + index + 0.5) * SMALL_PITCH + stage * BETWEEN
        places[rank] = (x, top + (copy + 0.5) * SMALL_PITCH)
    for axis in (*crossing.summed, *crossing.copied):
        stride = {"tp": 1, "dp": 2, "pp": 4}[axis]
        for rank in (rank for rank in range(8) if rank // stride % 2 == 0):
            ends = [places[rank], places[rank + stride]]
            is_copied = axis in crossing.copied
            if is_copied:
                ends.reverse()  # from the last stage
            _join(page, ends, axis, is_copied, bow=BOW if axis == "pp" else 0, up=rank % 4 < 2)
    for rank, place in places.items():
        _draw_rank(page, place, rank, SMALL_PITCH, BAND)


def _join(page: Axes, ends: list[Place], axis: str, is_copied: bool, bow: float, up: bool) -> None:
    """A line between two ranks: around others, above them or below, if it has a bow."""
    (left, _), (right, _) = ends
    half = SQUARE * SMALL_PITCH / 2
    if bow:
        ends = [(x, y - half if up else y + half) for x, y in ends]
    outwards = -1 if up == (left < right) else 1
    page.add_patch(
        FancyArrowPatch(
            *ends,
            arrowstyle="-|>" if is_copied else "-",
            mutation_scale=8,
            color=AXIS_COLOR[axis],
            linewidth=1.2 if is_copied else 2.5,
            shrinkA=0,
            shrinkB=0,
            zorder=2,
            connectionstyle=f"arc3,rad={outwards * bow}",
        )
    )


def _write_axes(page: Axes, crossing: Crossing, middle: float) -> None:
    """Below the ranks: the axes in their colors, and when."""
    words = [(axis, AXIS_COLOR[axis]) for axis in crossing.summed]
    words += [(f"{axis} (copy)", AXIS_COLOR[axis]) for axis in crossing.copied]
    lengths = [0.095 * len(word) + 0.1 for word, _ in words]
    x = middle - sum(lengths) / 2
    for (word, color), length in zip(words, lengths, strict=True):
        page.text(
            x + length / 2,
            1.68,
            word,
            size=10,
            weight="bold",
            color=color,
            ha="center",
            va="center",
        )
        x += length
    page.text(middle, 1.9, crossing.when, size=9, color=GREY, ha="center", va="center")


# Boxes of a matrix, as a checkpoint stores them

CELL = 0.3
"""The side of an element, in inches."""


@dataclass(frozen=True)
class Piece:
    """A box of a matrix, and the rank that has written it."""

    rank: int
    offset: tuple[int, int]
    sizes: tuple[int, int]


@rc_context(STYLE)
def pieces(shape: tuple[int, int], panels: dict[str, Sequence[Piece]]) -> Figure:
    """Draw the elements of a matrix in panels: a piece has its rank's color, and a frame.

    Elements have their number in the flattened matrix; what is in no piece is empty.
    """
    rows, columns = shape
    width, top = (WIDTH - 2 * MARGIN) / len(panels), 0.5
    bottom = top + rows * CELL
    figure = Figure(figsize=(WIDTH, bottom + 0.54))
    axes = figure.add_axes((0, 0, 1, 1), xlim=(0, WIDTH), ylim=(bottom + 0.54, 0))
    axes.set_axis_off()
    ranks = sorted({piece.rank for drawn in panels.values() for piece in drawn})
    for index, rank in enumerate(ranks):
        left = WIDTH / 2 + 1.6 * (index - len(ranks) / 2)
        color = RANK_COLOR[rank]
        axes.add_patch(Rectangle((left, bottom + 0.22), 0.2, 0.2, facecolor=color, edgecolor=BLACK))
        axes.text(
            left + 0.1,
            bottom + 0.32,
            str(rank),
            size=9,
            color=ink(color),
            ha="center",
            va="center_baseline",
        )
        axes.text(left + 0.28, bottom + 0.32, f"rank {rank}'s file", size=9.5, va="center")
    for index, (title, drawn) in enumerate(panels.items()):
        middle = MARGIN + (index + 0.5) * width
        left = middle - columns * CELL / 2
        axes.text(middle, top / 2, title, ha="center", va="center")
        axes.add_patch(
            Rectangle((left, top), columns * CELL, rows * CELL, facecolor="none", edgecolor=BAND)
        )
        for piece in drawn:
            _draw_piece(axes, piece, left, top, columns)
    return figure


def _draw_piece(axes: Axes, piece: Piece, left: float, top: float, columns: int) -> None:
    (row, column), (height, width) = piece.offset, piece.sizes
    color = RANK_COLOR[piece.rank]
    axes.add_patch(
        Rectangle(
            (left + column * CELL + 0.02, top + row * CELL + 0.02),
            width * CELL - 0.04,
            height * CELL - 0.04,
            facecolor=color,
            edgecolor=BLACK,
            linewidth=1.2,
        )
    )
    for down in range(row, row + height):
        for right in range(column, column + width):
            axes.text(
                left + (right + 0.5) * CELL,
                top + (down + 0.5) * CELL,
                str(columns * down + right),
                size=9,
                color=ink(color),
                ha="center",
                va="center_baseline",
            )
