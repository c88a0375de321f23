"""The figures say what their numbers say, and the same numbers give the same picture."""

import subprocess
import sys

import pytest

from minitron.course.figures import Block, curves, loss_curve, png, save, scaling, show, timeline

STEP = [Block("forward", 0, 4), Block("backward", 4, 12), Block("optimizer", 12, 12.5)]
ROWS = [
    {"step": step, "tokens": 100 * step, "loss": 4 / step, "grad_norm": 1.0}
    for step in range(1, 11)
] + [{"step": 5, "val_loss": 0.9}, {"step": 10, "val_loss": 0.5, "sample": "Once"}]


def texts(axes):
    return [text.get_text() for text in axes.texts]


@pytest.mark.parametrize("draw", [
    lambda: timeline({"rank 0": STEP}, {"plan": STEP[:2]}),
    lambda: scaling([1, 2, 4], [8, 4, 2], "B", "variance", predicted=[8, 4, 2], limit=3),
    lambda: curves([0, 1, 2], {"a": [1, 2, 3]}, "step", "loss"),
    lambda: loss_curve(ROWS, floor=0.3),
], ids=["timeline", "scaling", "curves", "loss_curve"])
def test_the_same_numbers_give_the_same_bytes(draw, tmp_path):
    image = png(draw())
    assert image.startswith(b"\x89PNG")
    save(draw(), tmp_path / "figure.png")
    assert (tmp_path / "figure.png").read_bytes() == image


def test_no_figure_needs_pyplot_or_a_notebook():
    program = (
        "import sys; from minitron.course import figures\n"
        "figures.png(figures.curves([0, 1], {'a': [1, 2]}, 'x', 'y'))\n"
        "print([m for m in ('matplotlib.pyplot', 'IPython') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout == "[]\n", done.stderr


def test_timeline_puts_predicted_lanes_dashed_above_measured_ones():
    axes = timeline({"measured": STEP}, {"predicted": STEP[:2]}).axes[0]
    assert [label.get_text() for label in axes.get_yticklabels()] == ["predicted", "measured"]

    dashed = {round(bar.get_y() + bar.get_height() / 2): bar.get_linestyle()
              for bar in axes.patches if bar.get_hatch() is None}
    assert dashed == {0: "--", 1: "-"}
    top, bottom = axes.get_ylim()[1], axes.get_ylim()[0]
    assert top < 0 < 1 < bottom, "lane 0 must be the upper one"


def test_timeline_hatches_exactly_the_gaps():
    lanes = {
        "rank 0": [Block("forward", 0, 4), Block("communication", 6, 10)],
        "rank 1": [Block("forward", 1, 10)],
    }
    idle = [(bar.get_y() + 0.35, bar.get_x(), bar.get_x() + bar.get_width())
            for bar in timeline(lanes).axes[0].patches if bar.get_hatch()]
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
    assert styles == {(3, 1): "-", (2, 2): "--"}


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


def test_every_axis_has_its_unit():
    for figure in (timeline({"rank 0": STEP}), loss_curve(ROWS)):
        label = figure.axes[0].get_xlabel() + figure.axes[0].get_ylabel()
        assert "(ms)" in label or ("tokens" in label and "nats" in label)


def test_show_carries_its_message_as_alternative_text_and_as_caption(monkeypatch):
    shown = []
    monkeypatch.setattr("IPython.display.display", lambda *what, **how: shown.append((*what, how)))
    show(curves([0, 1], {"a": [1, 2]}, "step", "loss"), alt="The loss doubles.")

    (image, how), (caption, _) = shown
    assert how["metadata"]["image/png"]["alt"] == image["text/plain"] == "The loss doubles."
    assert image["image/png"].startswith(b"\x89PNG")
    assert caption.data == "*The loss doubles.*"
