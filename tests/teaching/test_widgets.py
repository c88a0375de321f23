"""A widget redraws what its controls say, and leaves a plain picture where nobody can drag."""

import re

import nbformat
import pytest
import torch
from nbclient import NotebookClient

from minitron import cost
from minitron.config import ModelConfig
from teaching import drawings, widgets
from teaching.figures import curves
from teaching.figures_numbers import draw_number_line
from teaching.floats import FORMATS
from teaching.widgets import (
    draw_buckets,
    draw_memory,
    draw_ring,
    draw_schedule,
    draw_sequence,
    draw_stages,
    draw_tensor,
    explore,
    is_live,
)
from tests.tiers import exhaustive, tiered

VIEW = "application/vnd.jupyter.widget-view+json"
LLAMA_8B = {"num_layers": 32, "width": 4096, "sequence_length": 8192, "micro_batch": 1}


def draw(height, name):
    return curves([0, 1], {name: [0, height]}, "x", "y"), f"{name} is {height} <high>"


@pytest.fixture
def shown(monkeypatch):
    outputs = []

    def display(what, raw=False, metadata=None):
        outputs.append(what if raw else what.data)

    monkeypatch.setattr("IPython.display.display", display)
    return outputs


def explore_small():
    explore(draw, {"height": (1, 2), "name": ("a", "b")}, {"height": 2, "name": "a"}, "drag it")


def test_without_a_live_notebook_the_default_picture_and_its_sentence_stand_there(shown):
    assert not is_live()
    explore_small()
    image, caption, task = shown
    assert image["image/png"].startswith(b"\x89PNG") and VIEW not in image
    assert image["text/plain"] == "a is 2 <high>"
    assert "a is 2" in caption and task == "**Try:** drag it"


def test_a_live_notebook_gets_controls_that_redraw_once_per_change(shown, monkeypatch):
    import ipywidgets

    boxes, drawn = [], []
    monkeypatch.setattr(widgets, "is_live", lambda: True)
    original = ipywidgets.VBox
    monkeypatch.setattr(ipywidgets, "VBox", lambda *a: boxes.append(original(*a)) or boxes[-1])
    tag = widgets.image_tag
    monkeypatch.setattr(widgets, "image_tag", lambda *args: drawn.append(args) or tag(*args))
    explore_small()

    bundle, _ = shown
    assert VIEW in bundle and "image/png" in bundle, "the picture is what a stale notebook shows"
    height, name, text, image = boxes[0].children  # the sentence above the picture
    assert text.layout.width == "100%"
    assert not height.continuous_update
    assert (height.value, name.value, text.value) == (2, "a", "a is 2 &lt;high&gt;")

    before, picture, size = len(drawn), image.value, 'width="700" height="330"'
    assert size in picture and 'alt="a is 2 &lt;high&gt;"' in picture
    height.value = 1
    assert text.value == "a is 1 &lt;high&gt;" and image.value != picture
    name.value = "b"
    assert text.value == "b is 1 &lt;high&gt;"
    assert len(drawn) == before + 2
    assert size in image.value and 'alt="b is 1 &lt;high&gt;"' in image.value


@pytest.fixture
def controls_of(shown, monkeypatch):
    """A widget's live controls by their labels; pictures are drawn, and not rendered."""
    import ipywidgets

    boxes = []
    monkeypatch.setattr(widgets, "image_tag", lambda figure, sentence: "")
    monkeypatch.setattr(widgets, "png", lambda figure: b"")
    original = ipywidgets.VBox
    monkeypatch.setattr(widgets, "is_live", lambda: True)
    monkeypatch.setattr(ipywidgets, "VBox", lambda *a: boxes.append(original(*a)) or boxes[-1])

    def open_widget(widget):
        widget()
        *handles, text, _ = boxes[-1].children
        return {handle.description: handle for handle in handles}, text

    return open_widget


def test_the_ring_s_slider_ends_at_its_last_step(controls_of):
    controls, text = controls_of(widgets.ring_explorer)
    ranks, step = controls["ranks"], controls["step"]
    assert (step.value, len(step.options)) == (3, 7)
    step.value = 6
    ranks.value = 2
    assert (step.value, len(step.options)) == (2, 3), "2 ranks end after 2 steps"
    assert text.value.startswith("After step 2 of 2")
    ranks.value = 6
    assert (step.value, len(step.options)) == (2, 11)
    assert text.value.startswith("After step 2 of 10")


@pytest.mark.parametrize(
    ("widget", "name", "other", "on", "off"),
    [
        (widgets.schedule_explorer, "chunks per rank", "schedule", "interleaved 1F1B", "1F1B"),
        (widgets.tensor_explorer, "link", "ranks", 2, 1),
    ],
)
def test_a_control_that_does_nothing_is_disabled(widget, name, other, on, off, controls_of):
    controls, _ = controls_of(widget)
    for value, disabled in ((on, False), (off, True), (on, False)):
        controls[other].value = value
        assert controls[name].disabled is disabled


def test_the_micro_batches_are_as_many_as_the_schedule_needs(controls_of):
    controls, text = controls_of(widgets.schedule_explorer)
    schedule, ranks, count = (controls[name] for name in ("schedule", "ranks", "micro-batches"))
    ranks.value = 8
    assert (count.value, len(count.options)) == (8, 8)
    schedule.value = "DualPipeV"
    assert (count.value, len(count.options)) == (16, 7), "2 for each of 8 ranks, and no more"
    assert text.value.startswith("DualPipeV, 8 ranks, 16 micro-batches")
    ranks.value = 4
    assert (count.value, len(count.options)) == (16, 8)
    count.value = 8
    ranks.value = 8
    assert count.value == 16
    schedule.value = "ZB-V"
    assert len(count.options) == 8


def test_labels_are_words_with_units(controls_of):
    from teaching import widgets_plan

    labels = []
    for module in (widgets, widgets_plan):
        for name in (
            "memory_calculator",
            "bucket_explorer",
            "ring_explorer",
            "zero_explorer",
            "tensor_explorer",
            "sequence_explorer",
            "schedule_explorer",
            "number_line_explorer",
            "planner",
        ):
            if hasattr(module, name):
                labels += controls_of(getattr(module, name))[0]
    assert len(labels) > 25
    assert not [
        label
        for label in labels
        if "_" in label or label.endswith((" MB", " us", " s")) and ", " not in label
    ]
    assert {"bandwidth, GB/s", "latency, µs", "bucket size, MB", "pipeline stages"} <= set(labels)


@pytest.mark.parametrize(
    ("parent", "live"),
    [
        ({"metadata": {"cellId": "a1"}}, True),  # what JupyterLab sends
        ({"metadata": {}}, False),  # nbclient, nbval
        ({}, False),
    ],
)
def test_a_front_end_names_the_cell_it_runs(monkeypatch, parent, live):
    shell = type("Shell", (), {"get_parent": lambda self: parent})()
    monkeypatch.setattr("IPython.get_ipython", lambda: shell)
    assert is_live() is live


@exhaustive  # every chapter's notebook is executed, and may hold no widget
def test_an_executed_notebook_holds_a_picture_and_no_widget():
    code = "from teaching.widgets import memory_calculator\nmemory_calculator()"
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(code)])
    NotebookClient(notebook, kernel_name="python3", timeout=60).execute()
    outputs = [output.get("data", {}) for output in notebook.cells[0].outputs]
    assert sum("image/png" in data for data in outputs) == 1
    assert not any(VIEW in data for data in outputs)
    assert "widgets" not in notebook.metadata


@pytest.mark.parametrize("recipe", cost.RECIPES)
def test_the_calculator_draws_and_says_what_the_formulas_count(recipe):
    model = ModelConfig(
        vocab_size=128_256,
        max_sequence_length=8192,
        num_layers=32,
        width=4096,
        num_heads=32,
        num_kv_heads=8,
        ffn_width=14_336,
        tied_embedding=False,
    )
    parts = cost.RECIPES[recipe]
    expected = (
        parts.total * cost.num_parameters(model)
        + cost.activation_bytes(model, 1, 8192, parts.parameter)
        + 2 * 4 * 8192 * 128_256
    )  # two float32 tensors of the logits' shape

    figure, sentence = draw_memory(**LLAMA_8B, recipe=recipe)
    bars = [bar for bar in figure.axes[0].patches if bar.get_height() == pytest.approx(0.7)]
    assert sum(bar.get_width() for bar in bars) == pytest.approx(expected)
    assert {bar.get_linestyle() for bar in bars} == {"--"}, "a formula is drawn dashed"
    assert "8.03 billion" in sentence
    assert f"{expected / (81559 * 2**20):.0%} of an H100's memory" in sentence


def test_every_setting_of_the_calculator_is_a_model(shown, monkeypatch):
    asked = {}
    monkeypatch.setattr(widgets, "explore", lambda draw, **given: asked.update(given))
    widgets.memory_calculator()
    for name, values in asked["controls"].items():
        assert asked["start"][name] in values
        for value in values:
            figure, _ = draw_memory(**{**asked["start"], name: value})
            assert tuple(figure.get_size_inches()) == (7.0, 1.8), "nothing may jump"


@pytest.mark.parametrize(
    ("ranks", "step", "sentence"),
    [
        (
            4,
            0,
            "After step 0 of 6, each of 4 ranks has sent 0/4 of the tensor and holds 0 of its 4",
        ),
        (
            4,
            3,
            "After step 3 of 6, each of 4 ranks has sent 3/4 of the tensor and holds 1 of its 4",
        ),
        (
            4,
            6,
            "After step 6 of 6, each of 4 ranks has sent 6/4 of the tensor and holds 4 of its 4",
        ),
        (
            2,
            9,
            "After step 2 of 2, each of 2 ranks has sent 2/2 of the tensor and holds 2 of its 2",
        ),
    ],
)
def test_the_ring_is_drawn_up_to_its_last_step(ranks, step, sentence):
    figure, said = draw_ring(ranks, step)
    assert said == f"{sentence} sums."
    assert tuple(figure.get_size_inches()) == (7.0, 3.6), "nothing may jump"


def test_the_ring_explorer_starts_at_one_of_its_settings(monkeypatch):
    asked = {}
    monkeypatch.setattr(widgets, "explore", lambda draw, **given: asked.update(given))
    widgets.ring_explorer()
    for name, values in asked["controls"].items():
        assert asked["start"][name] in values
        for value in values:
            draw_ring(**{**asked["start"], name: value})


def test_the_buckets_of_a_published_model_are_predicted_whole():
    figure, sentence = draw_buckets(25, 10, 50, 8192)
    gradients = 2 * cost.num_parameters(cost.PUBLISHED["Llama 3.2 1B"])
    assert sentence.startswith(f"{gradients / 1e9:.2f} GB of gradients in ")

    alone = cost.ring_all_reduce_seconds(gradients, 64, 10e-6, 50e9)
    _, one_bucket = draw_buckets(2500, 10, 50, 8192)  # and the small one that goes first
    assert "in 2 buckets: " in one_bucket
    assert f"{1e3 * alone:.0f} ms are exposed" in one_bucket, "nothing overlaps with one bucket"
    assert {bar.get_linestyle() for bar in figure.axes[0].patches if not bar.get_hatch()} == {"--"}


def test_buckets_wait_for_the_head_and_one_size_exposes_least(monkeypatch):
    lanes = []
    monkeypatch.setattr(drawings, "timeline", lambda measured, predicted: lanes.append(predicted))
    exposed = {}
    for size in (25, 50, 100, 250, 500):
        draw_buckets(size, 10, 50, 8192)
        compute, network = lanes[-1].values()
        exposed[size] = network[-1].end - compute[-1].end
    assert min(exposed, key=exposed.get) == 100 and exposed[500] > exposed[250] > exposed[100]

    model = cost.PUBLISHED["Llama 3.2 1B"]
    head = 1e3 * 8192 * 4 * model.vocab_size * model.width / (0.4 * drawings.H100.bf16_flops)
    assert network[0].start == pytest.approx(compute[0].end + head, rel=1e-3)


def test_latency_or_tokens_hide_buckets_of_1_MB_but_bandwidth_does_not():
    faster, fewer, wider = (
        int(re.search(r"which (\d+) ms are exposed", draw_buckets(1, *rest)[1])[1])
        for rest in ((1, 50, 8192), (10, 50, 32_768), (10, 450, 8192))
    )
    assert max(faster, fewer) < 30 < wider


@exhaustive
def test_every_setting_of_the_bucket_explorer_is_drawn_in_one_size(monkeypatch):
    asked = {}
    monkeypatch.setattr(widgets, "explore", lambda draw, **given: asked.update(given))
    widgets.bucket_explorer()
    sizes = set()
    for name, values in asked["controls"].items():
        assert asked["start"][name] in values
        for value in values:
            figure, _ = draw_buckets(**{**asked["start"], name: value})
            sizes.add(tuple(figure.get_size_inches()))
    assert len(sizes) == 1, "nothing may jump"


@pytest.mark.parametrize(
    ("billions", "ranks", "sentence"),
    [
        # 16, 4 + 12/8, 2 + 14/8 and 16/8 bytes for each of 13 billion
        (13, 8, "ZeRO-0 208 GB, ZeRO-1 71.5 GB, ZeRO-2 48.8 GB, ZeRO-3 26.0 GB; ZeRO-1 is"),
        (175, 4096, "ZeRO-0 2.80 TB, ZeRO-1 701 GB, ZeRO-2 351 GB, ZeRO-3 684 MB; ZeRO-3 is"),
        (1, 1, "ZeRO-0 16.0 GB, ZeRO-1 16.0 GB, ZeRO-2 16.0 GB, ZeRO-3 16.0 GB; ZeRO-0 is"),
        (30, 1, "ZeRO-0 480 GB, ZeRO-1 480 GB, ZeRO-2 480 GB, ZeRO-3 480 GB; none of them fits."),
    ],
)
def test_the_stages_are_drawn_as_the_formula_counts_them(billions, ranks, sentence):
    figure, said = draw_stages(billions, ranks, "bf16")
    assert sentence in said and said.startswith(f"{billions:,} billion parameters on {ranks:,}")
    bars = [bar for bar in figure.axes[0].patches if bar.get_height() == pytest.approx(0.7)]
    stages = (16, 4 + 12 / ranks, 2 + 14 / ranks, 16 / ranks)
    assert sum(bar.get_width() for bar in bars) == pytest.approx(1e9 * billions * sum(stages))


def test_every_setting_of_the_zero_explorer_is_drawn_in_one_size(monkeypatch):
    asked = {}
    monkeypatch.setattr(widgets, "explore", lambda draw, **given: asked.update(given))
    widgets.zero_explorer()
    sizes = set()
    for name, values in asked["controls"].items():
        assert asked["start"][name] in values
        for value in values:
            figure, _ = draw_stages(**{**asked["start"], name: value})
            sizes.add(tuple(figure.get_size_inches()))
    assert len(sizes) == 1, "nothing may jump"


@pytest.mark.parametrize(
    ("explorer", "draw"),
    tiered(
        [
            pytest.param(widgets.tensor_explorer, draw_tensor, id="tensor"),
            pytest.param(widgets.number_line_explorer, draw_number_line, id="number_line"),
            pytest.param(widgets.sequence_explorer, draw_sequence, id="sequence"),
            pytest.param(widgets.schedule_explorer, draw_schedule, id="schedule"),
        ]
    ),
)
def test_every_setting_of_chapters_7_to_10_is_drawn_in_one_size(explorer, draw, monkeypatch):
    asked = {}
    monkeypatch.setattr(widgets, "explore", lambda draw, **given: asked.update(given, draw=draw))
    explorer()
    assert asked["draw"] is draw and 2 <= len(asked["controls"]) <= 4
    sizes = set()
    for name, values in asked["controls"].items():
        assert asked["start"][name] in values
        for value in values:
            figure, _ = draw(**{**asked["start"], name: value})
            sizes.add(tuple(figure.get_size_inches()))
    assert len(sizes) == 1, "nothing may jump"


@pytest.mark.parametrize(
    ("name", "first"),
    tiered(
        [
            ("bf16", 257),
            ("fp16", 2049),
            ("e4m3", 17),
            ("e5m2", 9),
            ("fp32", 2**24 + 1),
        ],
        keep=4,
    ),
)
def test_the_number_line_explorer_reaches_the_first_integer_that_a_format_cannot_hold(
    name, first, monkeypatch
):
    asked = {}
    monkeypatch.setattr(widgets, "explore", lambda draw, **given: asked.update(given))
    widgets.number_line_explorer()
    controls, start = asked["controls"], asked["start"]
    assert tuple(FORMATS) == controls["format"] and 1 in controls["plus"]

    said = {
        position: draw_number_line(name, position, 1, start["zoom"])[1]
        for position in controls["position"]
        if 1 <= position < first
    }
    assert [position for position, text in said.items() if "nothing changed" in text] == [first - 1]
    assert torch.tensor(float(first - 1)).to(FORMATS[name]).double() == first - 1
    assert torch.tensor(first, dtype=torch.float64).to(FORMATS[name]).double() != first


def test_the_number_line_explorer_finds_the_smallest_update_that_a_weight_of_1_keeps(monkeypatch):
    asked = {}
    monkeypatch.setattr(widgets, "explore", lambda draw, **given: asked.update(given))
    widgets.number_line_explorer()
    assert (asked["start"]["format"], asked["start"]["position"]) == ("bf16", 1)
    kept = [
        plus
        for plus in asked["controls"]["plus"]
        if "nothing changed" not in draw_number_line("bf16", 1, plus, 16)[1]
    ]
    assert kept[0] == 0.004, "half of the spacing is 0.0039"
