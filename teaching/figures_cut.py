"""Matrices, and who holds which part of them: the picture of tensor and sequence parallelism.

A part has the color and the number of its rank; grey is replicated on every rank. Cards on top of
each other are copies on several ranks; striped ones are partial sums.

Read in this order: Matrix, cut.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from matplotlib.text import Text

from teaching.figures_style import (
    BAND,
    BLACK,
    GREY,
    RANK_COLOR,
    STYLE,
    WORK_COLOR,
    ink,
)

Holders = int | tuple[int, ...]
"""The rank that holds a part, or the ranks that hold a copy each."""
OPERATORS = {"=": "=", "x": "\u00d7", "+": "+"}
COLLECTIVES = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "broadcast")

# Lengths are inches: the axes are the page
WIDTH, MARGIN = 7.0, 0.12
LONGEST_UNIT, SHORTEST_UNIT = 0.8, 0.3
OPERATOR, PASSAGE = 0.3, 0.85
LETTER = 0.082
CARD, GAP = 0.17, 0.05
"""What is seen of a card behind another one, and the distance to the cards of the next part."""
TITLE, NAME, SHAPE, LEGEND = 0.32, 0.22, 0.34, 0.36
"""Room for a row's title, a line of a matrix's name, its shape, and the legend."""
LINES = 4
"""Lines of the grid per unit of length."""
STRIPES = "////"


@dataclass(frozen=True)
class Matrix:
    """A matrix, replicated unless `columns`, `rows` or `sum_of` says who holds what.

    `shape` is written below it, such as "S x D"; `height` and `width` are lengths in the picture.
    """

    name: str
    shape: str
    height: float = 1.0
    width: float = 1.0
    columns: Sequence[Holders] = ()
    """Who holds each block of columns, from the left."""
    rows: Sequence[Holders] = ()
    """Who holds each block of rows, from the top."""
    sum_of: tuple[int, ...] = ()
    """The ranks that hold a partial sum each, as large as the matrix itself."""

    def __post_init__(self):
        assert sum(map(bool, (self.columns, self.rows, self.sum_of))) <= 1, "cut one way at most"


Box = tuple[float, float, float, float]
"""Left, top, width, height."""
Between = str | tuple[str, str]
Row = Sequence[Matrix | Between]


@rc_context(STYLE)
def cut(rows: dict[str, Row]) -> Figure:
    """Draw equations, a row each, with its title above: `[X, "x", A, "=", Y, "all-reduce", Z]`.

    Between two matrices stands an operator, "x", "=" or "+", or an arrow with any other text,
    purple if that begins with a collective's name. A pair stands for two arrows, forward and
    back: ("all-gather", "reduce-scatter"), "" where nothing is sent.

    Raises ValueError if a row is too long for the page.
    """
    unit = _unit(rows)
    above = [NAME * max(m.name.count("\n") + 1 for m in _matrices(row)) for row in rows.values()]
    heights = [max(_size(m, unit)[1] for m in _matrices(row)) for row in rows.values()]
    bottom = sum(above) + sum(heights) + len(rows) * (TITLE + SHAPE)
    figure = Figure(figsize=(WIDTH, bottom + LEGEND))
    axes = figure.add_axes((0, 0, 1, 1), xlim=(0, WIDTH), ylim=(bottom + LEGEND, 0))
    axes.set_axis_off()

    top = 0.0
    for (title, row), names, height in zip(rows.items(), above, heights, strict=True):
        axes.text(MARGIN, top + TITLE / 2, title, va="center", weight="bold")
        _draw_row(axes, row, top + TITLE + names + height / 2, unit)
        top += TITLE + names + height + SHAPE
    _draw_legend(axes, [item for row in rows.values() for item in row], bottom + LEGEND / 2)
    return figure


def _matrices(row: Row) -> list[Matrix]:
    return [item for item in row if isinstance(item, Matrix)]


def _unit(rows: dict[str, Row]) -> float:
    """The largest scale, in inches per unit of length, in which every row fits on the page."""
    unit = LONGEST_UNIT
    for title, row in rows.items():
        while sum(_room(item, unit) for item in row) > WIDTH - 2 * MARGIN:
            unit -= 0.01
            if unit < SHORTEST_UNIT:
                raise ValueError(
                    f"the row {title!r} with its {len(row)} items does not fit on {WIDTH:g} "
                    "inches: shorten it, or continue in another row"
                )
    return unit


def _room(item: Matrix | Between, unit: float) -> float:
    """How wide an item is, in inches."""
    if isinstance(item, tuple):
        return PASSAGE
    if isinstance(item, str):
        return OPERATOR if item in OPERATORS else 0.3 + _text_width(_broken(item))
    return max(_size(item, unit)[0], _text_width(item.name), _text_width(item.shape))


def _size(matrix: Matrix, unit: float) -> tuple[float, float]:
    """Width and height of a matrix as drawn, in inches, with the cards behind it."""
    behind = CARD * max(0, len(matrix.sum_of) - 1)
    return matrix.width * unit + behind, matrix.height * unit + behind


def _text_width(text: str) -> float:
    return LETTER * max(map(len, text.split("\n")))


def _broken(text: str) -> str:
    return text.replace("-", "-\n")


def _draw_row(axes: Axes, row: Row, middle: float, unit: float) -> None:
    left = MARGIN
    for item in row:
        room = _room(item, unit)
        if isinstance(item, Matrix):
            _draw_matrix(axes, item, left + room / 2, middle, unit)
        elif item in OPERATORS:
            axes.text(left + room / 2, middle, OPERATORS[item], size=14, ha="center", va="center")
        elif isinstance(item, str):
            _draw_arrow(axes, item, left, left + room, middle)
        else:
            forward, backward = item
            _draw_arrow(axes, forward, left, left + room, middle - 0.07)
            _draw_arrow(axes, backward, left + room, left, middle + 0.07)
        left += room


def _draw_arrow(axes: Axes, text: str, start: float, end: float, y: float) -> None:
    """An arrow; one that points left has its text below."""
    color = WORK_COLOR["communication"] if text.startswith(COLLECTIVES) else GREY
    inset = 0.07 if end > start else -0.07
    axes.annotate(
        "",
        (end - inset, y),
        (start + inset, y),
        arrowprops={
            "arrowstyle": "-|>",
            "color": color,
            "linewidth": 2 if text else 1,
            "shrinkA": 0,
            "shrinkB": 0,
        },
    )
    above = end > start
    axes.text(
        (start + end) / 2,
        y + (-0.07 if above else 0.07),
        _broken(text),
        size=9.5,
        ha="center",
        va="bottom" if above else "top",
        color=BLACK,
        linespacing=1.1,
    )


def _draw_matrix(axes: Axes, matrix: Matrix, center: float, middle: float, unit: float) -> None:
    width, height = _size(matrix, unit)
    left, top = center - width / 2, middle - height / 2
    axes.text(center, top - 0.06, matrix.name, ha="center", va="bottom", linespacing=1.1)
    axes.text(
        center, top + height + 0.06, matrix.shape, ha="center", va="top", size=9.5, color=GREY
    )

    def part(holders: Holders, column: float, row: float, num_columns: int, num_rows: int) -> None:
        box = (
            left + column * width / num_columns,
            top + row * height / num_rows,
            width / num_columns,
            height / num_rows,
        )
        ranks = (holders,) if isinstance(holders, int) else holders
        _draw_cards(axes, ranks, box, unit, is_striped=bool(matrix.sum_of))

    for index, holders in enumerate(matrix.columns):
        part(holders, index, 0, len(matrix.columns), 1)
    for index, holders in enumerate(matrix.rows):
        part(holders, 0, index, 1, len(matrix.rows))
    if matrix.sum_of:
        part(matrix.sum_of, 0, 0, 1, 1)
    if _is_whole(matrix):
        _draw_card(axes, (left, top, width, height), unit, BAND)
        _write(axes, (center, middle), "all", GREY, BAND)


def _draw_cards(
    axes: Axes, ranks: tuple[int, ...], box: Box, unit: float, is_striped: bool
) -> None:
    """A card per rank, each a step to the lower right of the one behind it."""
    left, top, width, height = box
    steps = len(ranks) - 1
    step = min(CARD, 0.6 * min(width, height) / steps) if steps else 0.0
    behind = steps * step + GAP if steps else 0.0
    for index, rank in enumerate(ranks):
        color = RANK_COLOR[rank % len(RANK_COLOR)]
        x, y = left + index * step, top + index * step
        card = _draw_card(axes, (x, y, width - behind, height - behind), unit, color, is_striped)

        place = (x + CARD / 2, y + CARD / 2) if steps else (x + width / 2, y + height / 2)
        ground = "white" if is_striped else color
        number = _write(axes, place, str(rank), ink(ground), ground)
        number.set(clip_path=card, clip_on=True)


def _draw_card(
    axes: Axes, box: Box, unit: float, color: str, is_striped: bool = False
) -> Rectangle:
    """A rectangle with the lines of a grid, or striped in its color."""
    left, top, width, height = box
    card = axes.add_patch(
        Rectangle(
            (left, top),
            width,
            height,
            linewidth=1.3,
            hatch=STRIPES if is_striped else None,
            facecolor="white" if is_striped else color,
            edgecolor=color if is_striped else "white",
        )
    )
    if is_striped:
        return card

    num_columns, num_rows = (max(1, round(LINES * length / unit)) for length in (width, height))
    grid = {"color": "white", "linewidth": 0.5, "alpha": 0.5, "zorder": 1}  # under the next card
    for index in range(1, num_columns):
        x = left + index * width / num_columns
        axes.plot([x, x], [top, top + height], **grid)
    for index in range(1, num_rows):
        y = top + index * height / num_rows
        axes.plot([left, left + width], [y, y], **grid)
    return card


def _write(axes: Axes, place: tuple[float, float], text: str, color: str, ground: str) -> Text:
    """Text in a part, on a patch that covers the lines behind it."""
    return axes.text(
        *place,
        text,
        size=10,
        color=color,
        ha="center",
        va="center_baseline",
        zorder=1,
        bbox={"facecolor": ground, "linewidth": 0, "pad": 0.8},
    )


def _draw_legend(axes: Axes, items: Row, middle: float) -> None:
    """Say what each look means that occurs."""
    parts = [holders for m in _matrices(items) for holders in (*m.columns, *m.rows)]
    sums = any(m.sum_of for m in _matrices(items))
    looks = [
        ("a shard", any(isinstance(holders, int) for holders in parts), RANK_COLOR[:1], None),
        ("replicated", any(_is_whole(m) for m in _matrices(items)), (BAND,), None),
        ("a copy per rank", any(isinstance(h, tuple) for h in parts), RANK_COLOR[:2], None),
        ("partial sums", sums, RANK_COLOR[:2], STRIPES),
    ]
    left = MARGIN
    for text, occurs, colors, hatch in looks:
        for index, color in enumerate(colors if occurs else ()):
            axes.add_patch(
                Rectangle(
                    (left, middle - 0.09 + 0.05 * index),
                    0.18,
                    0.14,
                    hatch=hatch,
                    linewidth=0.8,
                    facecolor="white" if hatch else color,
                    edgecolor=color if hatch else "white",
                )
            )
            left += 0.05
        if occurs:
            axes.text(left + 0.18, middle, text, size=9.5, va="center", color=GREY)
            left += 0.35 + 0.073 * len(text)
    if any(isinstance(item, tuple) for item in items):
        axes.text(
            left, middle, "upper arrow: forward, lower: backward", size=9.5, va="center", color=GREY
        )


def _is_whole(matrix: Matrix) -> bool:
    return not (matrix.columns or matrix.rows or matrix.sum_of)
