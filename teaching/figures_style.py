"""What all figures share: colors, fonts, labels, and the way into a notebook or a file.

Figures are drawn without pyplot and so without a screen or global state.
"""

import io
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter

# Okabe and Ito's colors: told apart with every common color blindness.
BLUE, ORANGE, GREEN, VERMILLION = "#0072B2", "#E69F00", "#009E73", "#D55E00"
SKY, PURPLE, YELLOW, BLACK = "#56B4E9", "#CC79A7", "#F0E442", "#000000"
GREY, BAND = "#6B6B6B", "#E3E3E3"
RANK_COLOR = (BLUE, ORANGE, GREEN, VERMILLION, SKY, PURPLE, YELLOW, GREY)  # and its number
ON_DARK = {BLUE, GREEN, VERMILLION, GREY}  # on these a number is white

KIND_COLOR = {
    "forward": SKY, "backward": ORANGE, "optimizer": GREEN, "communication": PURPLE,
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

    The image is plain `image/png`, which JupyterLab, nbconvert and GitHub all show. GitHub drops
    alternative texts, so the same sentence stands below as Markdown, where a screen reader finds
    it. `alt` states the figure's message, not its parts.
    """
    from IPython.display import Markdown, display

    width = round(figure.get_figwidth() * 100)
    bundle = {"image/png": png(figure), "text/plain": alt}
    display(bundle, raw=True, metadata={"image/png": {"alt": alt, "width": width}})
    display(Markdown(f"*{alt}*"))


def canvas(width: float = 7.0, height: float = 3.3) -> tuple[Figure, Axes]:
    """An empty figure of `width` x `height` inches, and its axes."""
    figure = Figure(figsize=(width, height), layout="constrained")
    return figure, figure.add_subplot()


def pale(color: str) -> tuple[float, ...]:
    """The color of what is predicted: half white, and opaque, so nothing shines through."""
    return tuple((1 + channel) / 2 for channel in to_rgb(color))


def label_end(axes: Axes, x: float, y: float, text: str, color: str) -> None:
    """Write a line's name to the right of its end, in its color."""
    axes.annotate(
        text, (x, y), textcoords="offset points", xytext=(6, 0), va="center", color=color,
        annotation_clip=False,
    )


def plain_log_ticks(axes: Axes) -> None:
    """Label a logarithmic y axis with plain numbers at 1, 2 and 5."""
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: plain(value)))
    axes.yaxis.set_minor_formatter(NullFormatter())


def plain(value: float) -> str:
    """12000 -> 12 k, 0.2 -> 0.2: three digits and a unit prefix."""
    for size, prefix in ((1e12, " T"), (1e9, " G"), (1e6, " M"), (1e3, " k")):
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
