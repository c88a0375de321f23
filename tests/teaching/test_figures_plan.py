"""The figures of planning say what they are given: parts, layouts, errors, the sliders' plan."""

import pytest
from matplotlib.colors import to_rgb

from minitron import cost
from minitron.config import ConfigError
from minitron.plan.hardware import DEVICES
from minitron.plan.job import Job
from minitron.plan.search import search
from teaching import widgets_plan
from teaching.figures import png
from teaching.figures_plan import (
    PART_STYLE,
    errors,
    landscape,
    step_bars,
    time_and_memory,
)
from teaching.widgets_plan import JOBS, best_of, draw_plan
from tests.tiers import tiered

PARTS = {"matmul": 6.0, "attention": 1.0, "bubble": 2.0, "tp": 0.9, "dp": 0.1}


def texts(figure):
    return [text.get_text() for axes in figure.axes for text in axes.texts]


def test_a_bar_is_as_long_as_its_parts_in_their_order():
    figure = step_bars({"a": PARTS, "b": {"matmul": 3.0}})
    bars = [bar for bar in figure.axes[0].patches if bar.get_width() > 0]
    assert [bar.get_width() for bar in bars] == pytest.approx([6, 1, 2, 0.9, 0.1, 3])
    assert [bar.get_x() for bar in bars] == pytest.approx([0, 6, 7, 9, 9.9, 0])
    assert [label.get_text() for label in figure.axes[0].get_yticklabels()] == ["a", "b"]
    assert {"10 s", "3 s", "60%", "100%"} <= set(texts(figure))
    named = [text.get_text() for text in figure.legends[0].get_texts()]
    assert named == ["matmuls", "attention", "bubble", "tp", "dp"]


def test_every_part_of_an_estimate_has_a_color_of_its_own():
    best = best_of("GPT-3 175B, 1,024 A100s", 8, 8, 1)
    assert set(best.estimate.parts) == set(PART_STYLE)
    assert len({(to_rgb(color), hatch) for color, hatch, _ in PART_STYLE.values()}) == 9
    assert PART_STYLE["bubble"][1], "idle is hatched"


def test_the_landscape_has_every_layout_and_a_band_where_none_fits():
    fitting, too_large = [(10, 2.0), (20, 1.0)], [(90, 0.9), (200, 0.5), (300, 4.0)]
    figure = landscape(fitting, too_large, 64, {"fastest": (20, 1.0)})
    large, small, marked = figure.axes[0].lines
    assert sorted(zip(*large.get_data(), strict=True)) == sorted(too_large)
    assert sorted(zip(*small.get_data(), strict=True)) == sorted(fitting)
    assert (*marked.get_xdata(), *marked.get_ydata()) == (20, 1.0)
    (band,) = figure.axes[0].patches
    assert band.get_x() == 64
    assert {"fastest", "does not fit"} <= set(texts(figure))


def test_every_error_is_a_dot_in_its_sources_row_and_its_groups_color():
    figure = errors({"fitted": {"a": [0.05, 0.03], "b": [-0.002]}, "not": {"c": [0.1, -0.2]}})
    dots = [line for line in figure.axes[0].lines if line.get_marker() == "o"]
    assert [tuple(dot.get_xdata()) for dot in dots] == [(0.05, 0.03), (-0.002,), (0.1, -0.2)]
    assert [set(dot.get_ydata()) for dot in dots] == [{0}, {1}, {2}]
    assert [label.get_text() for label in figure.axes[0].get_yticklabels()] == ["a", "b", "c"]
    assert dots[0].get_color() == dots[1].get_color() != dots[2].get_color()
    assert {"+5%", "0%", "-20%", "fitted", "not"} <= set(texts(figure)), "the furthest of each"
    assert not {"+3%", "+10%", "-0%"} & {text.get_text() for text in figure.axes[0].texts}
    (band,) = figure.axes[0].patches
    assert (band.get_x(), band.get_width()) == pytest.approx((-0.1, 0.2))
    assert figure.axes[0].get_xlim()[0] < -0.25, "room for the label"


def test_time_stands_above_memory_and_what_cannot_run_says_so():
    figure = time_and_memory(
        PARTS,
        {"parameter": 3, "activation": 5},
        64,
        {"parameter": "#0072B2", "activation": "#56B4E9"},
    )
    assert "8 GB" in texts(figure) and "10 s" in texts(figure)
    assert "cannot run" in texts(time_and_memory({}, {}, 64, {}))


@pytest.mark.parametrize(
    "figure",
    tiered(
        [
            lambda: step_bars({"a": PARTS}),
            lambda: errors({"a": {"b": [0.1]}}),
            lambda: landscape([(1, 2)], [(70, 1)], 64, {}),
        ]
    ),
    ids=["steps", "errors", "landscape"],
)
def test_the_same_numbers_give_the_same_bytes(figure):
    assert png(figure()) == png(figure())


# The planner


@pytest.fixture
def job_of_8(monkeypatch):
    """One more job, which is searched in a second."""
    job = Job(cost.PUBLISHED["Llama 3.2 1B"], 8, DEVICES["H100-SXM-80GB"], 8192, 128)
    monkeypatch.setitem(JOBS, "8 H100s", (job, 1e12))


@pytest.mark.parametrize("name", tiered(["8 H100s", *JOBS]))
def test_the_planner_finds_what_the_search_finds(name, job_of_8):
    """Over all settings of the sliders, the best is as good as the best with these settings."""
    controls = asked()["controls"]
    found = search(JOBS[name][0])
    shown = next(
        each
        for each in found.candidates
        if each.decision.parallel.tp in controls["tp"]
        and each.decision.parallel.pp in controls["pp"]
        and each.decision.micro_batch_size in controls["micro_batch"]
    )
    axes, size = shown.decision.parallel, shown.decision.micro_batch_size
    assert best_of(name, axes.tp, axes.pp, size).seconds <= shown.seconds
    if name in asked()["start"]["job"]:
        assert shown is found.candidates[0], "the search's winner can be set"


def asked():
    given = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(widgets_plan, "explore", lambda draw, **more: given.update(more, draw=draw))
        widgets_plan.planner()
    return given


def test_every_setting_of_the_planner_is_drawn_in_one_size():
    given = asked()
    assert given["draw"] is draw_plan and len(given["controls"]) == 4
    sizes = set()
    for name, values in given["controls"].items():
        assert given["start"][name] in values
        for value in values:
            figure, sentence = draw_plan(**{**given["start"], name: value})
            sizes.add(tuple(figure.get_size_inches()))
            assert sentence.endswith(".")
    assert len(sizes) == 1, "nothing may jump"


def test_the_sentence_says_what_is_drawn():
    best = best_of("GPT-3 175B, 1,024 A100s", 8, 8, 1)
    _, sentence = draw_plan("GPT-3 175B, 1,024 A100s", 8, 8, 1)
    steps = 300e9 / (1536 * 2048)
    days = steps * best.seconds / 86_400
    assert f"{best}: {best.seconds:.3g} s a step" in sentence
    assert f"{days:,.0f} days for 0.3 T tokens" in sentence and "which fits" in sentence


def test_a_layout_that_cannot_run_or_fit_is_told():
    _, refused = draw_plan("Llama 2 7B, 64 H100s", 16, 8, 1)
    assert refused == "It cannot run: 64 GPUs are not divisible by tp 16 x pp 8."
    with pytest.raises(ConfigError, match="leaves some of 16384 ranks without a sequence"):
        best_of("Llama 3.1 405B, 16,384 H100s", 1, 1, 1)
    _, large = draw_plan("GPT-3 175B, 1,024 A100s", 1, 2, 16)
    assert "does not fit in 69 GB" in large
