"""The figures of the course: one visual language for chapters, slides and README.

Every function returns a matplotlib `Figure`. Solid is measured, dashed is predicted, a grey band
is a limit, hatching is idle. Labels stand beside what they name, every axis has its unit. `show`
puts a figure into a notebook, `save` into a file.

Here are scaling and loss; `figures_memory` draws bytes, `figures_ranks` what ranks do and send,
`figures_ring` the ring, `figures_cut` matrices and who holds them, `figures_pipeline` schedules,
`figures_numbers` what a float can hold, `figures_precision` what low precision loses,
`figures_grid` ranks in their nodes; `figures_style` is what all share.
"""

from collections.abc import Sequence

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter, NullLocator

from teaching.figures_cut import Matrix, cut
from teaching.figures_memory import Held, holdings, memory_bars, skyline
from teaching.figures_pipeline import measured_timeline, pipeline
from teaching.figures_ranks import (
    Block,
    rank_lanes,
    timeline,
    wire,
)
from teaching.figures_ring import ring_frame, ring_frames
from teaching.figures_style import (
    BAND,
    BLACK,
    GREY,
    SERIES,
    STYLE,
    canvas,
    image_tag,
    is_live,
    label_end,
    label_start,
    plain,
    plain_bytes,
    plain_log_ticks,
    png,
    save,
    show,
)

__all__ = [
    "Block",
    "Held",
    "Matrix",
    "crossing",
    "curves",
    "cut",
    "holdings",
    "image_tag",
    "is_live",
    "loss_curve",
    "measured_timeline",
    "memory_bars",
    "pipeline",
    "plain_bytes",
    "png",
    "ranges",
    "rank_lanes",
    "ring_frame",
    "ring_frames",
    "save",
    "scaling",
    "show",
    "skyline",
    "timeline",
    "wire",
]


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
    predicted_x: Sequence[float] | None = None,
) -> Figure:
    """Draw measured points on log-log axes, the predicted line dashed, the limit as a grey band.

    `predicted` is over `x` unless `predicted_x` says where. The band lies above `limit` (a roof,
    such as peak FLOP/s) or below it (a floor).
    """
    figure, axes = canvas()
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
        along = predicted_x or x
        axes.plot(along, predicted, "--", color=BLACK, linewidth=1.5)
        label_end(axes, along[-1], predicted[-1], predicted_label, BLACK)
    axes.plot(x, measured, "o", color=SERIES[0], markersize=7)
    rises = predicted is not None and predicted[1] > predicted[0]  # its line is above the name
    axes.annotate(
        "measured",
        (x[0], measured[0]),
        textcoords="offset points",
        xytext=(8, -14 if rises else 6),
        color=SERIES[0],
    )
    plain_log_ticks(axes)
    axes.set_xticks(x, [f"{value:,}" for value in x])
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xlabel(x_label)
    axes.set_ylabel(y_label)
    return figure


@rc_context(STYLE)
def crossing(
    x: Sequence[float],
    predicted: dict[str, Sequence[float]],
    x_label: str,
    y_label: str,
    measured: dict[str, Sequence[float]] | None = None,
    limit: float | None = None,
    limit_label: str = "limit",
) -> Figure:
    """Draw several predictions on log-log axes, dashed, and dots where there is a measurement.

    Each line is named at the end at which the lines are further apart; a measurement has the
    color of the line of its name. What lies above `limit` is a grey band.
    """
    figure, axes = canvas()
    axes.set_xscale("log")
    axes.set_yscale("log")
    measured = measured or {}
    colors = dict(zip(predicted, SERIES, strict=False))

    lowest = min(min(y) for y in predicted.values())
    highest = max(max(y) for y in predicted.values())
    gap, last = (highest / lowest) ** 0.07, 0.0
    at_left = _closest(predicted, 0) > _closest(predicted, -1)
    for name, y in sorted(predicted.items(), key=lambda line: line[1][-1]):
        axes.plot(x, y, "--", color=colors[name])
        last = max(y[-1], gap * last)  # names of lines that meet are pushed apart
        if at_left:
            label_start(axes, x[0], y[0], name, colors[name])
        else:
            label_end(axes, x[-1], last, name, colors[name])
        if name in measured:
            axes.plot(x, measured[name], "o", color=colors[name], markersize=6)

    if limit is not None:
        top = 2 * max(highest, limit)
        axes.set_ylim(top=top)
        axes.axhspan(limit, top, color=BAND, zorder=0)
        axes.text(0.01, 0.97, limit_label, color=GREY, va="top", transform=axes.transAxes)
    plain_log_ticks(axes)
    if highest > 1000 * lowest:
        axes.yaxis.set_major_locator(LogLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: plain(value)))
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.set_xlabel(x_label)
    axes.set_ylabel(y_label)
    return figure


def _closest(lines: dict[str, Sequence[float]], place: int) -> float:
    """Return the smallest ratio of two lines' values at `place`."""
    values = sorted(y[place] for y in lines.values())
    return min((above / below for below, above in zip(values, values[1:], strict=False)), default=1)


MOST_POINTS = 16
"""Measured values that are drawn one by one beside a prediction."""


@rc_context(STYLE)
def curves(
    x: Sequence[float],
    measured: dict[str, Sequence[float]],
    x_label: str,
    y_label: str,
    predicted: dict[str, Sequence[float]] | None = None,
) -> Figure:
    """Draw up to four solid lines over a common x, and dashed ones, each named at its right end.

    A few measured values beside a prediction are points: a line would hide under the dashes.
    """
    figure, axes = canvas()
    style = "o" if predicted and len(x) <= MOST_POINTS else "-"
    lines = [
        (name, y, color, style) for (name, y), color in zip(measured.items(), SERIES, strict=False)
    ]
    lines += [(name, y, BLACK, "--") for name, y in (predicted or {}).items()]

    gap = 0.07 * max(max(y) for _, y, _, _ in lines)
    last_label = -gap
    for name, y, color, style in sorted(lines, key=lambda line: line[1][-1]):
        width, order = (1.2, 3) if style == "--" else (2, 2)  # dashes stay visible where lines meet
        axes.plot(
            x, y, style, color=color, linewidth=width, zorder=order, clip_on=style != "o"
        )  # whole dots, at the edges too
        last_label = max(y[-1], last_label + gap)  # labels of lines that meet are pushed apart
        label_end(axes, x[-1], last_label, name, color)

    axes.set_xlim(x[0], x[-1])
    axes.set_ylim(bottom=0)
    axes.set_xlabel(x_label)
    axes.set_ylabel(y_label)
    return figure


@rc_context(STYLE)
def ranges(
    rows: dict[str, tuple[float, float, float]], predicted: dict[str, float], x_label: str
) -> Figure:
    """Draw repeats of several variants, one row each: a line from low to high, the median a dot.

    `rows` maps a name to (low, median, high); a dashed tick is what was `predicted` for it. Either
    may lack a name that the other has.
    """
    every = list(dict.fromkeys([*rows, *predicted]))
    figure, axes = canvas(height=1.0 + 0.42 * len(every))
    for y, name in enumerate(every):
        if name in rows:
            low, middle, high = rows[name]
            axes.plot([low, high], [y, y], color=SERIES[0], linewidth=2, solid_capstyle="butt")
            axes.plot([middle], [y], "o", color=SERIES[0], markersize=7)
        if name in predicted:
            axes.plot([predicted[name]] * 2, [y - 0.35, y + 0.35], "--", color=BLACK, linewidth=1.5)
    _name_both(axes, rows, predicted, every)
    axes.set_yticks(range(len(every)), every)
    axes.set_ylim(len(every) - 0.5, -0.9)
    values = [*predicted.values(), *(value for row in rows.values() for value in row)]
    margin = 0.15 * (max(values) - min(values)) or 0.5
    axes.set_xlim(max(0, min(values) - margin), max(values) + margin)
    axes.tick_params(axis="y", length=0, labelcolor=BLACK)
    axes.spines["left"].set_visible(False)
    axes.set_xlabel(x_label)
    return figure


def _name_both(axes: Axes, rows: dict, predicted: dict[str, float], every: list[str]) -> None:
    """Say at the first row that has both which is which; each name on its outer side."""
    both = [name for name in every if name in rows and name in predicted]
    y = every.index(both[0]) if both else 0
    tick = [(predicted[every[y]], "predicted", BLACK)] if every[y] in predicted else []
    dot = [(rows[every[y]][1], "measured", SERIES[0])] if every[y] in rows else []
    for (x, text, color), side in zip(sorted(tick + dot), ("right", "left"), strict=False):
        axes.annotate(
            text,
            (x, y - 0.4),
            ha=side,
            color=color,
            textcoords="offset points",
            xytext=(-3 if side == "right" else 3, 3),
        )


@rc_context(STYLE)
def loss_curve(rows: list[dict], floor: float | None = None) -> Figure:
    """Draw training loss over tokens from the rows of metrics.jsonl, in nats on a log axis.

    Rows with "val_loss" become points. `floor` is the entropy no model can beat, drawn dashed.
    """
    train = [(row["tokens"], row["loss"]) for row in rows if "loss" in row]
    tokens_at = {row["step"]: row["tokens"] for row in rows if "loss" in row}
    val = [
        (tokens_at[row["step"]], row["val_loss"])
        for row in rows
        if "val_loss" in row and row["step"] in tokens_at
    ]  # a damaged log may lack some
    figure, axes = canvas()
    axes.set_yscale("log")

    axes.plot(*zip(*train, strict=True), color=SERIES[0], linewidth=1.2)
    label_end(axes, *train[-1], "training", SERIES[0])
    if val:
        axes.plot(*zip(*val, strict=True), "o", color=SERIES[1], markersize=6)
        axes.annotate(
            "validation", val[0], textcoords="offset points", xytext=(5, 7), color=SERIES[1]
        )
    if floor is not None:
        axes.axhspan(floor / 2, floor, color=BAND, zorder=0)
        axes.axhline(floor, color=BLACK, linestyle="--", linewidth=1.2)
        axes.annotate(
            f"entropy of the text: {floor:.3f}",
            (0.01, floor),
            color=GREY,
            va="top",
            xycoords=("axes fraction", "data"),
            textcoords="offset points",
            xytext=(0, -4),
        )
        axes.set_ylim(bottom=0.7 * floor)

    plain_log_ticks(axes)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: plain(value)))
    axes.set_xlim(left=0)
    axes.set_xlabel("tokens seen")
    axes.set_ylabel("loss (nats per token)")
    return figure
