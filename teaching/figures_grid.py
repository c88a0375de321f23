"""The ranks of a mesh in their nodes: who talks with rank 0 along which axis, over which link.

Read in this order: group_along, rank_grid.
"""

from itertools import accumulate
from math import dist, gcd, prod
from operator import mul
from typing import NamedTuple

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch, Rectangle

from teaching.figures_style import (
    AXIS_COLOR,
    BAND,
    BLACK,
    GREY,
    STYLE,
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
