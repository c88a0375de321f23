"""The figures of the course: one visual language for chapters, slides and README.

Every function returns a matplotlib `Figure`, drawn without pyplot and so without a screen or
global state. Solid is measured, dashed is predicted, a grey band is a limit, hatching is idle.
Labels stand beside what they name, every axis has its unit. `show` puts a figure into a notebook,
`save` into a file.
"""

import io
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter, NullLocator

# Okabe and Ito's colours: told apart with every common colour blindness.
BLUE, ORANGE, GREEN, VERMILLION = "#0072B2", "#E69F00", "#009E73", "#D55E00"
SKY, PURPLE, BLACK = "#56B4E9", "#CC79A7", "#000000"
GREY, BAND = "#6B6B6B", "#E3E3E3"

KIND_COLOUR = {
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


@dataclass(frozen=True)
class Block:
    """A stretch of time in one lane; `kind` is a key of `KIND_COLOUR`."""

    kind: str
    start: float
    end: float
    label: str = ""


@rc_context(STYLE)
def timeline(
    measured: dict[str, list[Block]],
    predicted: dict[str, list[Block]] | None = None,
    unit: str = "ms",
) -> Figure:
    """Draw one lane per rank, predicted lanes above measured ones, gaps hatched as idle.

    Times are in `unit`, from the start of the step; a lane's name is its label.
    """
    steps = [lanes for lanes in (predicted, measured) if lanes]
    names = [name for lanes in steps for name in lanes]
    span = max(_end(lanes) for lanes in steps)
    figure, axes = _canvas(height=0.9 + 0.55 * len(names))

    row = 0
    for lanes in steps:
        for blocks in lanes.values():
            _draw_idle(axes, row, blocks, _end(lanes))
            for block in blocks:
                _draw_block(axes, row, block, lanes is predicted, span)
            row += 1

    axes.set_xlim(0, span)
    axes.set_ylim(len(names) - 0.45, -0.62)
    axes.set_yticks(range(len(names)), names)
    axes.tick_params(axis="y", length=0, labelcolor=BLACK)
    axes.spines["left"].set_visible(False)
    axes.set_xlabel(f"time in one step ({unit})")
    return figure


def _end(lanes: dict[str, list[Block]]) -> float:
    return max(block.end for blocks in lanes.values() for block in blocks)


def _draw_idle(axes: Axes, row: int, blocks: list[Block], end: float) -> None:
    edges = [0.0]
    for block in sorted(blocks, key=lambda block: block.start):
        edges += [block.start, block.end]
    edges.append(end)
    for left, right in zip(edges[::2], edges[1::2], strict=True):
        if right - left > 0.005 * end:
            axes.barh(row, right - left, 0.7, left, color="white", edgecolor=BAND, hatch="///")


def _draw_block(axes: Axes, row: int, block: Block, is_predicted: bool, span: float) -> None:
    width = block.end - block.start
    axes.barh(
        row, width, 0.7, block.start, color=KIND_COLOUR[block.kind],
        alpha=0.45 if is_predicted else 1.0, edgecolor=BLACK if is_predicted else "white",
        linestyle="--" if is_predicted else "-", linewidth=1,
    )
    label = block.label or block.kind
    fits = width > 0.012 * len(label) * span  # a letter is about 1.2 % of the axis wide
    if fits:
        axes.text(block.start + width / 2, row, label, ha="center", va="center")
    else:
        axes.text(block.end, row - 0.37, label, ha="right", va="bottom", size=9, color=GREY)


@rc_context(STYLE)
def scaling(
    x: Sequence[float],
    measured: Sequence[float],
    x_label: str,
    y_label: str,
    predicted: Sequence[float] | None = None,
    predicted_label: str = "predicted",
    limit: float | None = None,
    limit_label: str = "limit",
    limit_is_above: bool = True,
) -> Figure:
    """Draw measured points on log-log axes, the predicted line dashed, the limit as a grey band.

    The band lies above `limit` (a roof, such as peak FLOP/s) or below it (a floor).
    """
    figure, axes = _canvas()
    values = [*measured, *(predicted or []), *([limit] if limit else [])]
    bottom, top = min(values) / 2, max(values) * 2
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_ylim(bottom, top)

    if limit is not None:
        edge, place, anchor = (top, 0.97, "top") if limit_is_above else (bottom, 0.03, "bottom")
        axes.axhspan(limit, edge, color=BAND, zorder=0)
        axes.text(0.01, place, limit_label, color=GREY, va=anchor, transform=axes.transAxes)
    if predicted is not None:
        axes.plot(x, predicted, "--", color=BLACK, linewidth=1.5)
        _label_end(axes, x[-1], predicted[-1], predicted_label, BLACK)
    axes.plot(x, measured, "o", color=BLUE, markersize=7)
    axes.annotate(
        "measured", (x[0], measured[0]), textcoords="offset points", xytext=(8, 6), color=BLUE
    )
    _plain_log_ticks(axes)
    axes.set_xticks(x, [f"{value:,}" for value in x])
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xlabel(x_label)
    axes.set_ylabel(y_label)
    return figure


@rc_context(STYLE)
def curves(
    x: Sequence[float],
    measured: dict[str, Sequence[float]],
    x_label: str,
    y_label: str,
    predicted: dict[str, Sequence[float]] | None = None,
) -> Figure:
    """Draw up to four solid lines over a common x, and dashed ones, each named at its right end."""
    figure, axes = _canvas()
    colours = (BLUE, VERMILLION, GREEN, PURPLE)
    lines = [(name, y, colour, "-")
             for (name, y), colour in zip(measured.items(), colours, strict=False)]
    lines += [(name, y, BLACK, "--") for name, y in (predicted or {}).items()]

    gap = 0.07 * max(max(y) for _, y, _, _ in lines)
    last_label = -gap
    for name, y, colour, style in sorted(lines, key=lambda line: line[1][-1]):
        axes.plot(x, y, style, color=colour, linewidth=2 if style == "-" else 1.2)
        last_label = max(y[-1], last_label + gap)  # labels of lines that meet are pushed apart
        _label_end(axes, x[-1], last_label, name, colour)

    axes.set_xlim(x[0], x[-1])
    axes.set_ylim(bottom=0)
    axes.set_xlabel(x_label)
    axes.set_ylabel(y_label)
    return figure


@rc_context(STYLE)
def loss_curve(rows: list[dict], floor: float | None = None) -> Figure:
    """Draw training loss over tokens from the rows of metrics.jsonl, in nats on a log axis.

    Rows with "val_loss" become points. `floor` is the entropy no model can beat, drawn dashed.
    """
    train = [(row["tokens"], row["loss"]) for row in rows if "loss" in row]
    tokens_at = {row["step"]: row["tokens"] for row in rows if "loss" in row}
    val = [(tokens_at[row["step"]], row["val_loss"]) for row in rows if "val_loss" in row]
    figure, axes = _canvas()
    axes.set_yscale("log")

    axes.plot(*zip(*train, strict=True), color=BLUE, linewidth=1.2)
    _label_end(axes, *train[-1], "training", BLUE)
    if val:
        axes.plot(*zip(*val, strict=True), "o", color=VERMILLION, markersize=6)
        axes.annotate(
            "validation", val[0], textcoords="offset points", xytext=(5, 7), color=VERMILLION
        )
    if floor is not None:
        axes.axhspan(floor / 2, floor, color=BAND, zorder=0)
        axes.axhline(floor, color=BLACK, linestyle="--", linewidth=1.2)
        axes.annotate(
            f"entropy of the text: {floor:.3f}", (0.01, floor), color=GREY, va="top",
            xycoords=("axes fraction", "data"), textcoords="offset points", xytext=(0, -4),
        )
        axes.set_ylim(bottom=0.7 * floor)

    _plain_log_ticks(axes)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: _plain(value)))
    axes.set_xlim(left=0)
    axes.set_xlabel("tokens seen")
    axes.set_ylabel("loss (nats per token)")
    return figure


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


def _canvas(width: float = 7.0, height: float = 3.3) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(width, height), layout="constrained")
    return figure, figure.add_subplot()


def _label_end(axes: Axes, x: float, y: float, text: str, colour: str) -> None:
    axes.annotate(
        text, (x, y), textcoords="offset points", xytext=(6, 0), va="center", color=colour,
        annotation_clip=False,
    )


def _plain_log_ticks(axes: Axes) -> None:
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: _plain(value)))
    axes.yaxis.set_minor_formatter(NullFormatter())


def _plain(value: float) -> str:
    """12000 -> 12 k, 0.2 -> 0.2: three digits and a unit prefix."""
    for size, prefix in ((1e12, " T"), (1e9, " G"), (1e6, " M"), (1e3, " k")):
        if abs(value) >= size:
            return f"{value / size:.3g}{prefix}"
    return f"{value:.3g}"
