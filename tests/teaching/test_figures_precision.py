"""The pictures of low precision show the numbers that a format holds, and nothing else."""

from itertools import combinations

import pytest
import torch
from matplotlib.colors import to_hex
from matplotlib.patches import Rectangle

from teaching.figures_numbers import draw_number_line, number_line, ranges
from teaching.figures_precision import CLASSES, exponent_histogram, one_weight
from teaching.figures_style import BAND, BLACK, GREY, NUMBER_COLOR, SERIES, pale, png
from teaching.floats import FORMATS, exponents, layout_of, representable
from tests.tiers import tiered

ALL = tuple(FORMATS)
torch.manual_seed(0)
GRADIENTS = torch.randn(2000) * torch.logspace(-12, -1, 2000)
HISTORIES = {"bf16 alone": [1.0, 1.0, 1.0], "fp32 master": [1.0, 1.01, 1.02]}


def texts(axes):
    return [text.get_text() for text in axes.texts]


def ticks(figure):
    """The x of every number drawn, lane by lane."""
    return [
        [segment[0][0] for segment in lines.get_segments()] for lines in figure.axes[0].collections
    ]


def bars(axes):
    """(color, left, right, middle) of every bar."""
    return [
        (
            to_hex(bar.get_facecolor()).upper(),
            bar.get_x(),
            bar.get_x() + bar.get_width(),
            bar.get_y() + bar.get_height() / 2,
        )
        for bar in axes.patches
    ]


def marks(figure):
    """(color, x, lane) of every dot and ring."""
    return [
        (line.get_color(), line.get_xdata()[0], line.get_ydata()[0] - 0.5)
        for line in figure.axes[0].lines
        if line.get_marker() == "o"
    ]


@pytest.mark.parametrize(
    "draw",
    tiered(
        [
            lambda: number_line(ALL, 0, 4, at=1.0, plus=0.3),
            ranges,
            lambda: exponent_histogram({"all": GRADIENTS}, loss_scale=1024.0),
            lambda: one_weight(HISTORIES, grid="bf16"),
        ]
    ),
    ids=["number_line", "ranges", "exponent_histogram", "one_weight"],
)
def test_the_same_numbers_give_the_same_bytes(draw):
    assert png(draw()) == png(draw())


# The number line


def test_every_number_that_can_be_told_apart_is_a_tick():
    figure = number_line(["e5m2", "bf16"], 1.0, 1.3)
    expected = [representable(FORMATS[name], 1.0, 1.3).tolist() for name in ("e5m2", "bf16")]
    assert len(expected[1]) == 39 and len(expected[0]) == 2
    assert sorted(filter(None, ticks(figure)), key=len) == expected
    assert bars(figure.axes[0]) == []


def test_denser_numbers_are_a_band_that_says_so_and_ends_where_ticks_begin():
    figure = number_line(["fp16"], 240, 272, at=256)
    ((color, left, right, _),) = bars(figure.axes[0])
    assert (color, left, right) == (to_hex(pale(NUMBER_COLOR["normal"])).upper(), 240, 256)
    drawn = sorted({x for lane in ticks(figure) for x in lane})
    assert drawn == representable(torch.float16, 256, 272).tolist()
    assert " too dense to draw " in texts(figure.axes[0])

    full = number_line(["fp32"], 0, 4)
    assert [bar[1:3] for bar in bars(full.axes[0])] == [(0, 4)] and not any(ticks(full))


def test_zero_has_a_band_on_both_sides():
    figure = number_line(["e4m3"], -1, 1)
    ((_, left, right, _),) = bars(figure.axes[0])
    assert left == -right and 0 < right < 0.2
    drawn = {x for lane in ticks(figure) for x in lane}
    expected = representable(torch.float8_e4m3fn, -1, 1).tolist()
    assert drawn == {x for x in expected if abs(x) >= right}


def test_beyond_the_largest_number_is_a_grey_band():
    figure = number_line(["e4m3"], 300, 600, at=512)
    assert bars(figure.axes[0]) == [(BAND, 448, 600, 0.5)]
    assert "too large" in texts(figure.axes[0]) and marks(figure) == []


def test_beside_a_lane_stand_its_bits_and_its_spacing():
    said = texts(number_line(ALL, 240, 272, at=256.0).axes[0])
    for bits in ("1 + 8 + 23", "1 + 8 + 7", "1 + 5 + 10", "1 + 4 + 3", "1 + 5 + 2"):
        assert said.count(f"{bits} bits") == 1
    spacings = [layout_of(FORMATS[name]).spacing(256) for name in ALL]
    assert spacings == [2.0**-15, 2, 0.25, 32, 64]
    for spacing in ("$2^{-15}$", "2", "0.25", "32", "64", "spacing at\n256"):
        assert spacing in said


def test_a_dot_is_what_is_held_and_a_ring_what_an_addition_makes_of_it():
    figure = number_line(ALL, 240, 272, at=256.0, plus=1.0)
    assert [mark for mark in marks(figure) if mark[0] == BLACK] == [
        (BLACK, 256, row) for row in range(5)
    ]
    rings = [x for color, x, _ in marks(figure) if color == SERIES[1]]
    assert rings == [257, 256, 257, 256, 256]

    nearest = number_line(["e4m3"], 200, 300, at=263.0, plus=10.0)
    assert [x for _, x, _ in marks(nearest)] == [256, 256], "from the number held, not from `at`"


def test_lanes_out_of_focus_are_grey():
    axes = number_line(ALL, 0, 4, focus="bf16").axes[0]
    names = {text.get_text(): text.get_color() for text in axes.texts if text.get_text() in ALL}
    assert names == {name: NUMBER_COLOR["normal"] if name == "bf16" else GREY for name in ALL}


@pytest.mark.parametrize(
    ("low", "high", "at", "plus"),
    [
        (0, 4, 1.0, None),
        (240, 272, 256.0, 1.0),
        (2.0**24 - 16, 2.0**24 + 16, 2.0**24, 1.0),
        (0.99, 1.01, 1.0, 0.001),
        (1 - 4e-7, 1 + 4e-7, 1.0, 1e-7),
    ],
)
def test_everything_is_on_the_page_and_no_text_lies_on_another(low, high, at, plus):
    figure = number_line(ALL, low, high, at, plus)
    figure.draw_without_rendering()
    axes, page = figure.axes[0], figure.bbox
    labels = [tick for tick in axes.get_xticklabels() if low <= tick.get_position()[0] <= high]
    boxes = [text.get_window_extent() for text in [*axes.texts, *labels] if text.get_text()]
    for box in boxes:
        assert page.x0 <= box.x0 and box.x1 <= page.x1 and page.y0 <= box.y0 and box.y1 <= page.y1
    assert not any(one.overlaps(other) for one, other in combinations(boxes, 2))


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        (
            ("bf16", 256, 1, 8),
            "bf16 holds 256, then 258, a spacing of 2. 256 + 1 becomes 256: nothing changed.",
        ),
        (("bf16", 128, 1, 8), "bf16 holds 128, then 129, a spacing of 1. 128 + 1 becomes 129."),
        (
            ("e4m3", 0.1, 1, 8),
            "e4m3 holds 0.1015625 for 0.1, then 0.109375, a spacing of 0.0078125. "
            "0.1015625 + 1 becomes 1.125.",
        ),
        (("e4m3", 512, 1, 8), "e4m3 ends at 448: 512 is beyond it."),
        (
            ("e4m3", 448, 10, 8),
            "e4m3 holds 448, its largest number. 448 + 10 becomes 448: nothing changed.",
        ),
        (
            ("fp16", 65504, 100, 8),
            "fp16 holds 65,504, its largest number. 65,504 + 100 becomes too large.",
        ),
        (
            ("e5m2", 1e-7, 1, 8),
            "e5m2 holds 0 for 1e-07, then 1.52587891e-05, a spacing of "
            "1.52587891e-05. 0 + 1 becomes 1.",
        ),
    ],
)
def test_the_sentence_says_what_the_format_makes_of_it(given, sentence):
    figure, said = draw_number_line(*given)
    assert said == sentence
    low, high = figure.axes[0].get_xlim()
    spacing = layout_of(FORMATS[given[0]]).spacing(given[1])
    assert high - given[1] == pytest.approx(given[1] - low) == pytest.approx(8 * spacing)


# Ranges


def test_a_format_reaches_from_its_smallest_number_to_its_largest():
    bits, axes = ranges().axes
    drawn = bars(axes)
    for row, name in enumerate(ALL):
        (weak, lowest, normal, _), (full, start, highest, _) = [b for b in drawn if b[3] == row]
        layout = layout_of(FORMATS[name])
        assert (weak, full) == (NUMBER_COLOR["subnormal"], NUMBER_COLOR["normal"])
        assert 2.0**lowest == layout.smallest_subnormal
        assert 2.0**normal == 2.0**start == layout.smallest_normal
        assert 2.0 ** (highest - 64) == pytest.approx(layout.largest * 2.0**-64)
    assert [len([b for b in bars(bits) if b[3] == row]) for row in range(5)] == [32, 16, 16, 8, 8]
    assert {"$2^{-9}$, normal from $2^{-6}$ ", " 448", " 65,504", " 3.4e+38"} <= set(texts(axes))


def test_the_labels_of_the_ranges_do_not_meet():
    figure = ranges()
    figure.draw_without_rendering()
    boxes = [text.get_window_extent() for axes in figure.axes for text in axes.texts]
    assert all(figure.bbox.x0 <= box.x0 and box.x1 <= figure.bbox.x1 for box in boxes)
    assert not any(one.overlaps(other) for one, other in combinations(boxes, 2))


# Gradients


@pytest.mark.parametrize("scale", [1.0, 2.0**20])
def test_a_bar_per_power_of_two_in_the_color_of_what_fp16_makes_of_it(scale):
    figure = exponent_histogram({"all": GRADIENTS}, loss_scale=scale)
    _, axes = figure.axes
    counts, _ = exponents(GRADIENTS.double() * scale)
    drawn = [patch for patch in axes.patches if isinstance(patch, Rectangle)]  # no outline
    heights = {bar.get_x(): bar.get_height() for bar in drawn}
    assert heights == pytest.approx({e: 100 * n / 2000 for e, n in counts.items()})

    for exponent in counts:
        held = torch.tensor(1.5 * 2.0**exponent, dtype=torch.float64).half().item()
        fate = (
            "zero"
            if held == 0
            else "subnormal"
            if held < 2.0**-14
            else "inf"
            if held == float("inf")
            else "normal"
        )
        (bar,) = [bar for bar in drawn if bar.get_x() == exponent]
        assert to_hex(bar.get_facecolor()).upper() == NUMBER_COLOR[fate], exponent


def test_the_ranges_above_are_the_legend_of_the_colors():
    lanes, rows = exponent_histogram({"all": GRADIENTS}).axes
    fp16 = {color: (left, right) for color, left, right, row in bars(lanes) if row == 0}
    left, right = rows.get_xlim()
    assert fp16 == {
        NUMBER_COLOR["zero"]: (left, -25),
        NUMBER_COLOR["subnormal"]: (-25, -14),
        NUMBER_COLOR["normal"]: (-14, 16),
        NUMBER_COLOR["inf"]: (16, right),
    }
    assert texts(lanes) == [*CLASSES, "from $2^{-133}$ to $2^{128}$"]
    assert lanes.get_xlim() == (left, right)


def test_a_title_says_what_is_lost_and_zeros_are_told_apart():
    tensor = torch.tensor([0.0, 2.0**-30, 2.0**-24, 1.0, 1e5])
    plain, scaled = (exponent_histogram({"w": tensor}, scale).axes[1] for scale in (1.0, 64.0))
    assert plain.get_title("left") == "w: fp16 makes 25.0% zero and 25.0% infinite"
    assert scaled.get_title("left") == "w: fp16 makes 0.0% zero and 25.0% infinite"
    assert texts(plain) == texts(scaled) == [" 20.0% are 0 already"]
    assert scaled.get_xlabel() == "magnitude x 64" and plain.get_xlabel() == "magnitude"
    assert len(scaled.patches) == 5 and len(plain.patches) == 4, "and an outline"


def test_a_tensor_of_zeros_has_no_bars():
    figure = exponent_histogram({"zeros": torch.zeros(3), "ones": torch.ones(3)}, 2.0)
    assert texts(figure.axes[1]) == [" 100.0% are 0 already"]
    assert png(figure)


# One weight


def test_every_recipe_has_its_line_and_its_name():
    axes = one_weight(HISTORIES).axes[0]
    drawn = {line.get_color(): list(line.get_ydata()) for line in axes.lines}
    named = {text.get_text(): text.get_color() for text in axes.texts}
    assert {name: drawn[color] for name, color in named.items()} == HISTORIES


def test_grey_lines_are_the_numbers_of_the_format():
    axes = one_weight(HISTORIES, grid="bf16").axes[0]
    low, high = axes.get_ylim()
    grey = [line.get_ydata()[0] for line in axes.lines if line.get_color() == GREY]
    assert grey == representable(torch.bfloat16, low, high).tolist() and len(grey) == 3
    assert "gray lines: the numbers of bf16" in texts(axes)


def test_names_of_lines_that_meet_are_pushed_apart():
    figure = one_weight({"a": [1.0, 2.0], "b": [1.5, 2.0], "c": [1.2, 1.999], "d": [1.0, 1.0]})
    figure.draw_without_rendering()
    boxes = [text.get_window_extent() for text in figure.axes[0].texts]
    assert not any(one.overlaps(other) for one, other in combinations(boxes, 2))


def test_a_weight_that_never_moves_is_drawn_too():
    assert png(one_weight({"bf16 alone": [1.0, 1.0]}, grid="bf16"))
