"""What all figures share: colors, fonts, labels, and the way into a notebook or a file.

Figures are drawn without pyplot and so without a screen or global state.
"""

import base64
import html
import io
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter

BLACK, GREY, BAND = "#000000", "#6B6B6B", "#E3E3E3"

# One color means one thing: no two of these share a color, and none is close to another, also as
# the color-blind see them. Ranks have the colors of Okabe and Ito, and the rank's number in them.
RANK_COLOR = (
    "#0072B2",
    "#E69F00",
    "#009E73",
    "#D55E00",
    "#56B4E9",
    "#CC79A7",
    "#F0E442",
    "#5A5A5A",
)
CATEGORY_COLOR = {  # kinds of bytes, in the order in which they are stacked
    "parameter": "#1B1AA6",
    "gradient": "#CD7A7C",
    "optimizer state": "#12882C",
    "activation": "#7ADAEC",
    "temporary": "#C4B03C",
}
WORK_COLOR = {  # what a rank does
    "forward": "#B3C2EB",
    "backward": "#DEA67C",
    "optimizer": "#B8E468",
    "communication": "#A661BC",
    "matmul": "#5FBEAB",
    "attention": "#235E58",
    "elementwise": "#D1EFE9",
}
AXIS_COLOR = {
    "tp": "#0B2F91",
    "dp": "#D32C67",
    "pp": "#A36904",
    "cp": "#154E19",
    "ep": "#AE4CD5",
}
NUMBER_COLOR = {  # what a format makes of a magnitude, from the smallest on; and its bits
    "zero": "#E72112",
    "subnormal": "#E9D489",
    "normal": "#7395C3",
    "inf": "#7C1263",
    "exponent": "#674AC5",
    "mantissa": "#593C29",
}
SERIES = ("#28A1B0", "#D3573D", "#702086", "#0611F9", BLACK)
"""Lines and points that stand for none of these; what is measured has the first."""
PALETTES = {
    "rank": RANK_COLOR,
    "bytes": tuple(CATEGORY_COLOR.values()),
    "work": tuple(WORK_COLOR.values()),
    "axis": tuple(AXIS_COLOR.values()),
    "number": tuple(NUMBER_COLOR.values()),
    "series": SERIES,
}

STYLE = {
    "figure.dpi": 150,
    "figure.facecolor": "white",
    "savefig.facecolor": "white",
    "font.family": "DejaVu Sans",  # comes with matplotlib: the same letters everywhere
    "font.size": 11,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": GREY,
    "axes.labelcolor": "#333333",
    "xtick.color": GREY,
    "ytick.color": GREY,
    "lines.linewidth": 2,
    "hatch.linewidth": 0.6,
}


def png(figure: Figure) -> bytes:
    """Encode a figure as PNG; the same figure gives the same bytes."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", metadata={"Software": None})
    return buffer.getvalue()


def save(figure: Figure, path: Path) -> None:
    """Write a figure to `path` as PNG."""
    path.write_bytes(png(figure))


def show(figure: Figure, alt: str) -> None:
    """Put a figure into the notebook, with `alt` as its alternative text and its caption.

    A stored image is plain `image/png`, which GitHub and nbconvert show; nbconvert takes `alt` from
    its metadata. JupyterLab does not, so in a live notebook the image is HTML. GitHub drops
    alternative texts, so the same sentence stands below as Markdown, where a screen reader finds
    it. `alt` states the figure's message, not its parts.
    """
    from IPython.display import Markdown, display

    if is_live():
        display({"text/html": image_tag(figure, alt), "text/plain": alt}, raw=True)
    else:
        bundle = {"image/png": png(figure), "text/plain": alt}
        about = {"alt": alt, "width": _pixels(figure)[0]}
        display(bundle, raw=True, metadata={"image/png": about})
    display(Markdown(f"*{alt}*"))


def is_live() -> bool:
    """Whether a person runs this cell: a front end says which cell it is, a program does not."""
    from IPython import get_ipython

    parent = getattr(get_ipython(), "get_parent", dict)()
    return bool(parent.get("metadata"))


def image_tag(figure: Figure, alt: str) -> str:
    """Return the figure as an HTML image of its own size, with its alternative text."""
    width, height = _pixels(figure)
    data = base64.b64encode(png(figure)).decode()
    return (
        f'<img alt="{html.escape(alt)}" width="{width}" height="{height}" decoding="sync" '
        f'src="data:image/png;base64,{data}">'
    )


def _pixels(figure: Figure) -> tuple[int, int]:
    """The size in which a figure is shown: 100 pixels to the inch."""
    width, height = figure.get_size_inches()
    return round(100 * width), round(100 * height)


def canvas(width: float = 7.0, height: float = 3.3) -> tuple[Figure, Axes]:
    """An empty figure of `width` x `height` inches, and its axes."""
    figure = Figure(figsize=(width, height), layout="constrained")
    return figure, figure.add_subplot()


def pale(color: str) -> tuple[float, ...]:
    """The color of what is predicted: half white, and opaque, so nothing shines through."""
    return tuple((1 + channel) / 2 for channel in to_rgb(color))


def ink(color: str | tuple[float, ...]) -> str:
    """The color of text on `color`: white if that is dark, by the lightness that the eye sees."""
    red, green, blue = (channel**2.2 for channel in to_rgb(color))
    return "white" if 0.2126 * red + 0.7152 * green + 0.0722 * blue < 0.3 else BLACK


def label_end(axes: Axes, x: float, y: float, text: str, color: str) -> None:
    """Write a line's name to the right of its end, in its color."""
    axes.annotate(
        text,
        (x, y),
        textcoords="offset points",
        xytext=(6, 0),
        va="center",
        color=color,
        annotation_clip=False,
    )


def label_start(axes: Axes, x: float, y: float, text: str, color: str) -> None:
    """Write a line's name above its start, in its color."""
    axes.annotate(text, (x, y), textcoords="offset points", xytext=(0, 4), color=color)


def plain_log_ticks(axes: Axes) -> None:
    """Label a logarithmic y axis with plain numbers at 1, 2 and 5."""
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: plain(value)))
    axes.yaxis.set_minor_formatter(NullFormatter())


def plain(value: float) -> str:
    """12000 -> 12 k, 0.2 -> 0.2: three digits and a unit prefix."""
    for size, prefix in ((1e15, " P"), (1e12, " T"), (1e9, " G"), (1e6, " M"), (1e3, " k")):
        if abs(value) >= size:
            return f"{value / size:.3g}{prefix}"
    return f"{value:.3g}"


def plain_bytes(value: float) -> str:
    """12345678 -> 12.3 MB: three digits."""
    size, unit = byte_unit(value)
    number = abs(value) / size
    digits = 0 if size == 1 or number >= 99.95 else 1 if number >= 9.995 else 2
    return f"{value / size:,.{digits}f} {unit}"


def byte_unit(value: float) -> tuple[float, str]:
    """The unit in which one says `value` bytes; a kB is 1,000 bytes, as in a datasheet."""
    for size, unit in ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if abs(value) >= 0.9995 * size:  # 999.9 kB reads 1.00 MB
            return size, unit
    return 1, "B"


def count_bytes(axis: Axis, top: float, state: str) -> None:
    """Label an axis that ends at `top` bytes, in the unit in which one would say `top`."""
    size, unit = byte_unit(top)
    axis.set_major_locator(MaxNLocator(5))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value / size:g}"))
    axis.set_label_text(f"{unit} {state}")
