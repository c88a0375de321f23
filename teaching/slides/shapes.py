"""What the decks' drawings are made of: a page in inches, boxes, arrows and words on it.

Letters are as large as the figure's style says: 11 points on a page of 7 inches (STYLE), 14 on one
of 10 inches (WIDE). A slide shows a page on about 1,000 of its 1,280 pixels.
"""

from collections.abc import Sequence

from matplotlib import rcParams
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch, Rectangle

from teaching.figures_style import BAND, BLACK, GREY, STYLE, ink

SIZE, SMALL = 14, 12
"""Points of letters in a figure of 10 inches."""
WIDE = STYLE | {
    "font.size": SIZE,
    "axes.labelsize": 13,
    "axes.titlesize": SIZE,
    "axes.titlelocation": "left",
}
"""The style of a figure of 10 inches; STYLE is that of one of 7."""
GOOD, BAD = "#00734F", "#B34700"
"""Words that judge: green and the theme's red, which differ in lightness too."""
PREDICTED = {"edgecolor": BLACK, "linestyle": "--", "linewidth": 1}
"""The edge of a bar that shows an estimate; its color is pale."""
PLATE = {"facecolor": "white", "linewidth": 0, "pad": 1.5}
"""The box behind words that stand on lines or hatching."""

Color = str | tuple[float, ...]
Place = tuple[float, float]
Bounds = tuple[float, float, float, float]
"""Left, top, width and height."""


def page(width: float, height: float) -> tuple[Figure, Axes]:
    """Return an empty page; its coordinates are inches from the upper left corner."""
    figure = Figure(figsize=(width, height))
    axes = figure.add_axes((0, 0, 1, 1), xlim=(0, width), ylim=(height, 0))
    axes.set_axis_off()
    return figure, axes


def box(
    axes: Axes,
    bounds: Bounds,
    text: str = "",
    color: Color = BAND,
    size: float | None = None,
    edge: Color = "white",
    **style: object,
) -> None:
    """Draw a filled rectangle with `text` in its middle."""
    style = {"linewidth": 1.2, "facecolor": color, "edgecolor": edge} | style
    _draw_rectangle(axes, bounds, text, ink(color), size, **style)


def frame(axes: Axes, bounds: Bounds, text: str = "", size: float | None = None) -> None:
    """Draw an empty box: something that is not there, or not kept."""
    style = {"facecolor": "white", "edgecolor": GREY, "linestyle": ":"}
    _draw_rectangle(axes, bounds, text, GREY, size, **style)


def _draw_rectangle(
    axes: Axes, bounds: Bounds, text: str, color: Color, size: float | None, **style: object
) -> None:
    left, top, width, height = bounds
    axes.add_patch(Rectangle((left, top), width, height, **style))
    place = (left + width / 2, top + height / 2)
    write(axes, place, text, color, size, ha="center", linespacing=1.15)


def hatched(axes: Axes, bounds: Bounds) -> None:
    """Draw a box of what is idle or free."""
    left, top, *size = bounds
    style = {"facecolor": "white", "edgecolor": "#B0B0B0", "hatch": "///"}
    axes.add_patch(Rectangle((left, top), *size, **style))


def outline(axes: Axes, bounds: Bounds, color: Color = BLACK) -> None:
    """Draw the edges of what contains other boxes."""
    left, top, *size = bounds
    axes.add_patch(Rectangle((left, top), *size, fill=False, edgecolor=color, linewidth=1.6))


def row(
    axes: Axes, corner: Place, texts: Sequence[object], colors: Sequence[Color], side: float = 0.5
) -> None:
    """Draw squares beside each other, from `corner` on to the right."""
    for index, (text, color) in enumerate(zip(texts, colors, strict=True)):
        box(axes, (corner[0] + index * side, corner[1], side, side), str(text), color)


def write(
    axes: Axes,
    place: Place,
    text: str,
    color: Color = BLACK,
    size: float | None = None,
    **style: object,
) -> None:
    """Write words that begin at `place` and have it at half their height."""
    axes.text(*place, text, color=color, size=size, **{"va": "center_baseline"} | style)


def arrow(axes: Axes, start: Place, end: Place, color: Color = GREY, **style: object) -> None:
    """Draw an arrow from `start` to `end`."""
    style = {"arrowstyle": "-|>", "linewidth": 2, "shrinkA": 0, "shrinkB": 0} | style
    head = 1.3 * rcParams["font.size"]
    axes.add_patch(FancyArrowPatch(start, end, color=color, mutation_scale=head, **style))


def name_rows(axes: Axes, names: Sequence[str], top: float = -0.5, size: float = SIZE) -> None:
    """Name the rows of a chart of 10 inches, the first at the top; the chart begins at `top`."""
    axes.set_yticks(range(len(names)), names, size=size)
    axes.set_ylim(len(names) - 0.5, top)
    axes.tick_params(axis="y", length=0, labelcolor=BLACK)
    axes.tick_params(axis="x", labelsize=SMALL)
