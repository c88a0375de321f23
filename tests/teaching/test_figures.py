"""The figures say what their numbers say, and the same numbers give the same picture."""

import sys

import pytest

from minitron.launch import run
from minitron.measure.meter import CATEGORIES, Moment, Snapshot
from teaching import figures_style
from teaching.figures import (
    Block,
    Held,
    curves,
    holdings,
    loss_curve,
    memory_bars,
    plain_bytes,
    png,
    ranges,
    save,
    scaling,
    show,
    skyline,
    timeline,
)
from teaching.figures_style import CATEGORY_COLOR
from tests.tiers import tiered

STEP = [Block("forward", 0, 4), Block("backward", 4, 12), Block("optimizer", 12, 12.5)]
ROWS = [
    {"step": step, "tokens": 100 * step, "loss": 4 / step, "grad_norm": 1.0}
    for step in range(1, 11)
] + [{"step": 5, "val_loss": 0.9}, {"step": 10, "val_loss": 0.5, "sample": "Once"}]
MEMORY = [
    Moment(phase, "mm", {"parameter": 4e6, "activation": held, "gradient": gradient}, 1e-3 * i)
    for i, (phase, held, gradient) in enumerate(
        [
            *[("forward", i * 1e6, 0) for i in range(10)],
            *[("backward", (10 - i) * 1e6, i * 4e5) for i in range(11)],
            *[("optimizer", 0, 4e6)] * 3,
        ]
    )
]
PEAK = Snapshot(MEMORY[10].bytes, "backward", [])
STATE = {"parameter": 16e9, "gradient": 16e9, "optimizer state": 96e9}


def texts(axes):
    return [text.get_text() for text in axes.texts]


@pytest.mark.parametrize(
    "draw",
    tiered(
        [
            lambda: timeline({"rank 0": STEP}, {"plan": STEP[:2]}),
            lambda: skyline(MEMORY, PEAK, predicted=15e6),
            lambda: scaling([1, 2, 4], [8, 4, 2], "B", "variance", predicted=[8, 4, 2], limit=3),
            lambda: curves([0, 1, 2], {"a": [1, 2, 3]}, "step", "loss"),
            lambda: loss_curve(ROWS, floor=0.3),
            lambda: memory_bars({"8B": STATE}, limit=80e9),
            lambda: holdings({"rank 0": {"parameter": Held(4e9, 0.25)}}),
        ],
        keep=2,
    ),
    ids=["timeline", "skyline", "scaling", "curves", "loss_curve", "memory_bars", "holdings"],
)
def test_the_same_numbers_give_the_same_bytes(draw, tmp_path):
    image = png(draw())
    assert image.startswith(b"\x89PNG")
    save(draw(), tmp_path / "figure.png")
    assert (tmp_path / "figure.png").read_bytes() == image


def picture_without_pyplot(group):
    for name in list(sys.modules):
        if name.startswith(("teaching.", "matplotlib.pyplot", "IPython")):
            del sys.modules[name]
    sys.modules["matplotlib.pyplot"] = sys.modules["IPython"] = None  # to import them is an error
    from teaching import figures

    return figures.png(figures.curves([0, 1], {"a": [1, 2]}, "x", "y"))


def test_no_figure_needs_pyplot_or_a_notebook():
    (picture,) = run(picture_without_pyplot, 1)  # in a process that nothing else uses
    assert picture.startswith(b"\x89PNG")


def test_timeline_puts_predicted_lanes_dashed_above_measured_ones():
    axes = timeline({"measured": STEP}, {"predicted": STEP[:2]}).axes[0]
    assert [label.get_text() for label in axes.get_yticklabels()] == ["predicted", "measured"]

    dashed = {
        round(bar.get_y() + bar.get_height() / 2): bar.get_linestyle()
        for bar in axes.patches
        if bar.get_hatch() is None
    }
    assert dashed == {0: "--", 1: "-"}
    top, bottom = axes.get_ylim()[1], axes.get_ylim()[0]
    assert top < 0 < 1 < bottom, "lane 0 must be the upper one"


def test_timeline_hatches_exactly_the_gaps():
    lanes = {
        "rank 0": [Block("forward", 0, 4), Block("communication", 6, 10)],
        "rank 1": [Block("forward", 1, 10)],
    }
    idle = [
        (bar.get_y() + 0.35, bar.get_x(), bar.get_x() + bar.get_width())
        for bar in timeline(lanes).axes[0].patches
        if bar.get_hatch()
    ]
    assert idle == [(0, 4, 6), (1, 0, 1)]


def test_timeline_names_even_a_block_too_narrow_for_its_label():
    assert texts(timeline({"rank 0": STEP}).axes[0]) == ["forward", "backward", "optimizer"]


@pytest.mark.parametrize("above", [True, False])
def test_scaling_shades_a_roof_above_its_limit_and_a_floor_below(above):
    figure = scaling([1, 2, 4], [8, 4, 2], "B", "variance", limit=3, limit_is_above=above)
    axes = figure.axes[0]
    assert axes.get_xscale() == axes.get_yscale() == "log"
    (band,) = axes.patches
    edge = axes.get_ylim()[1 if above else 0]
    assert (band.get_y(), band.get_y() + band.get_height()) == pytest.approx((3, edge))


def test_scaling_draws_points_for_the_measured_and_dashes_for_the_predicted():
    axes = scaling([1, 2], [8, 4], "B", "variance", predicted=[8, 5], predicted_label="1/B").axes[0]
    predicted, measured = axes.lines
    assert (predicted.get_linestyle(), list(predicted.get_ydata())) == ("--", [8, 5])
    assert (measured.get_linestyle(), list(measured.get_ydata())) == ("None", [8, 4])
    assert texts(axes) == ["1/B", "measured"]


def test_curves_keep_the_labels_of_lines_that_meet_apart():
    axes = curves([0, 1], {"a": [1, 5.0], "b": [2, 5.01], "c": [0, 1]}, "step", "loss").axes[0]
    heights = {text.get_text(): text.xy[1] for text in axes.texts}
    assert heights["c"] == 1
    assert heights["b"] - heights["a"] >= 0.3


def test_curves_draw_the_predicted_dashed():
    axes = curves([0, 1], {"a": [3, 1]}, "step", "loss", predicted={"plan": [2, 2]}).axes[0]
    styles = {tuple(line.get_ydata()): line.get_linestyle() for line in axes.lines}
    assert styles == {(3, 1): "None", (2, 2): "--"}, "few measured values are points"

    many = [0.0] * 17
    axes = curves(range(17), {"a": many}, "step", "loss", predicted={"plan": [1.0] * 17}).axes[0]
    styles = {tuple(line.get_ydata()): line.get_linestyle() for line in axes.lines}
    assert styles[tuple(many)] == "-"


def test_ranges_show_repeats_and_what_was_predicted_for_each():
    axes = ranges({"a": (1, 2, 5), "b": (3, 4, 6)}, {"a": 2.5, "b": 3.5}, "step (ms)").axes[0]
    seen = [(list(map(float, line.get_xdata())), line.get_linestyle()) for line in axes.lines]
    assert seen == [
        ([1, 5], "-"),
        ([2], "None"),
        ([2.5, 2.5], "--"),
        ([3, 6], "-"),
        ([4], "None"),
        ([3.5, 3.5], "--"),
    ]
    assert [label.get_text() for label in axes.get_yticklabels()] == ["a", "b"]


def test_loss_curve_places_validation_at_the_tokens_of_its_step():
    axes = loss_curve(ROWS, floor=0.3).axes[0]
    train, val, floor = axes.lines
    assert list(train.get_xdata()) == [100 * step for step in range(1, 11)]
    assert list(zip(val.get_xdata(), val.get_ydata(), strict=True)) == [(500, 0.9), (1000, 0.5)]
    assert list(floor.get_ydata()) == [0.3, 0.3] and floor.get_linestyle() == "--"
    assert axes.get_ylim()[0] < 0.3, "the floor must be in the picture"


def test_loss_curve_of_a_run_without_validation_or_floor():
    axes = loss_curve(ROWS[:10]).axes[0]
    assert len(axes.lines) == 1 and texts(axes) == ["training"]


def test_curves_draw_the_predicted_over_the_measured_it_agrees_with():
    axes = curves([0, 1], {"a": [3, 1]}, "step", "loss", predicted={"plan": [3, 1]}).axes[0]
    above = max(axes.lines, key=lambda line: line.get_zorder())
    assert above.get_linestyle() == "--"


@pytest.mark.parametrize(
    ("draw", "units"),
    [
        (lambda: timeline({"rank 0": STEP}), ["(ms)"]),
        (lambda: loss_curve(ROWS), ["tokens", "nats"]),
        (lambda: skyline(MEMORY, PEAK), ["MB", "ms"]),
        (lambda: memory_bars({"8B": STATE}), ["GB"]),
    ],
)
def test_every_axis_has_its_unit(draw, units):
    axes = draw().axes[0]
    label = axes.get_xlabel() + axes.get_ylabel()
    assert all(unit in label for unit in units)


def test_the_kinds_of_bytes_are_the_meters_and_stacked_in_their_order():
    assert tuple(CATEGORY_COLOR) == CATEGORIES
    assert len(set(CATEGORY_COLOR.values())) == len(CATEGORIES)


def test_skyline_stacks_every_byte_and_marks_the_peak():
    axes = skyline(MEMORY, PEAK, predicted=15e6, predicted_label="plan").axes[0]
    stacked = max(layer.get_paths()[0].vertices[:, 1].max() for layer in axes.collections)
    assert stacked == PEAK.total == 14e6

    mark = next(line for line in axes.lines if line.get_marker() == "v")
    assert (list(mark.get_xdata()), list(mark.get_ydata())) == ([pytest.approx(10)], [14e6])
    dashed = [line for line in axes.lines if line.get_linestyle() == "--"]
    assert [list(line.get_ydata()) for line in dashed] == [[15e6, 15e6]]
    assert "plan 15.0 MB" in texts(axes) and "peak 14.0 MB" in texts(axes)
    assert axes.get_ylim()[1] > 15e6


def test_skyline_names_every_phase_and_every_kind_with_its_bytes_at_the_peak():
    axes = skyline(MEMORY, PEAK).axes[0]
    shown = texts(axes)
    assert [text for text in shown if text in ("forward", "backward", "optimizer")] == [
        "forward",
        "backward",
        "optimizer",
    ]
    assert {"activation\n10.0 MB", "parameter\n4.00 MB", "temporary\n0 B"} <= set(shown)

    strips = [patch for patch in axes.patches if patch.get_y() == pytest.approx(1.02)]
    seen = [number for strip in strips for number in (strip.get_x(), strip.get_width())]
    assert seen == pytest.approx([0, 10, 10, 11, 21, 2])


def test_memory_bars_stack_the_kinds_predicted_dashed_above_measured():
    axes = memory_bars({"run": STATE}, {"plan": {"parameter": 20e9}}).axes[0]
    assert [label.get_text() for label in axes.get_yticklabels()] == ["plan", "run"]
    bars = [
        (round(bar.get_y() + 0.35), bar.get_x(), bar.get_width(), bar.get_linestyle())
        for bar in axes.patches
    ]
    assert bars == [
        (0, 0, 20e9, "--"),
        (1, 0, 16e9, "-"),
        (1, 16e9, 16e9, "-"),
        (1, 32e9, 96e9, "-"),
    ]
    assert {"20.0 GB", "128 GB", "96.0 GB"} <= set(texts(axes))


def test_memory_bars_name_the_kinds_that_occur_and_shade_beyond_the_limit():
    axes = memory_bars({"run": STATE}, limit=80e9, limit_label="no more").axes[0]
    named = [text.get_text() for text in axes.get_legend().get_texts()]
    assert named == ["parameter", "gradient", "optimizer state"]
    band = axes.patches[0]
    assert (band.get_x(), band.get_x() + band.get_width()) == (80e9, axes.get_xlim()[1])
    assert "no more" in texts(axes)


def test_holdings_fill_a_cell_up_to_its_share_and_leave_the_rest_empty():
    rows = {
        "rank 0": {"parameter": Held(4e9, 0.25), "gradient": Held(16e9)},
        "rank 1": {"parameter": Held(0, 0.0)},
    }
    axes = holdings(rows).axes[0]
    boxes, filled = axes.patches[::2], axes.patches[1::2]
    shares = [f.get_width() / b.get_width() for b, f in zip(boxes, filled, strict=True)]
    assert shares == pytest.approx([0.25, 1, 0, 0])
    assert texts(axes) == ["4.00 GB", "16.0 GB", "-", "-"]
    assert [label.get_text() for label in axes.get_xticklabels()] == ["parameter", "gradient"]
    assert axes.get_ylim()[0] > axes.get_ylim()[1], "the first row must be the upper one"


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "1.00 kB"),
        (12_345_678, "12.3 MB"),
        (999.4e6, "999 MB"),
        (999.96e6, "1.00 GB"),
        (9.996e9, "10.0 GB"),
        (80e9, "80.0 GB"),
        (99.96e9, "100 GB"),
        (6494e9, "6.49 TB"),
        (6494e12, "6,494 TB"),
    ],
)
def test_bytes_are_said_in_three_digits(value, text):
    assert plain_bytes(value) == text


def test_show_carries_its_message_as_alternative_text_and_as_caption(monkeypatch):
    shown = []
    monkeypatch.setattr("IPython.display.display", lambda *what, **how: shown.append((*what, how)))
    show(curves([0, 1], {"a": [1, 2]}, "step", "loss"), alt="The loss doubles.")

    (image, how), (caption, _) = shown
    assert how["metadata"]["image/png"]["alt"] == image["text/plain"] == "The loss doubles."
    assert image["image/png"].startswith(b"\x89PNG")
    assert caption.data == "*The loss doubles.*"


def test_in_a_live_notebook_the_image_itself_has_its_alternative_text(monkeypatch):
    shown = []
    monkeypatch.setattr("IPython.display.display", lambda *what, **how: shown.append(what[0]))
    monkeypatch.setattr(figures_style, "is_live", lambda: True)
    show(curves([0, 1], {"a": [1, 2]}, "step", "loss"), alt='Loss < 2 "doubles".')

    image, caption = shown
    assert set(image) == {"text/html", "text/plain"}, "JupyterLab would choose another image"
    assert '<img alt="Loss &lt; 2 &quot;doubles&quot;." width="700"' in image["text/html"]
    assert caption.data == '*Loss < 2 "doubles".*'
