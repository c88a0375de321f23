"""The palettes: one color means one thing, for everybody's eyes."""

from itertools import combinations

import numpy as np
import pytest
from matplotlib.colors import to_rgb

from minitron.measure.meter import CATEGORIES
from teaching.figures_plan import PART_STYLE
from teaching.figures_style import BLACK, CATEGORY_COLOR, PALETTES, RANK_COLOR, ink, plain

# Machado, Oliveira and Fernandes 2009, table 1, severity 1.0: what is left of linear RGB
SIGHT = {
    "all cones": np.eye(3),
    "deuteranopia": np.array(
        [
            [0.367322, 0.860646, -0.227968],
            [0.280085, 0.672501, 0.047413],
            [-0.011820, 0.042940, 0.968881],
        ]
    ),
    "protanopia": np.array(
        [
            [0.152286, 1.052583, -0.204868],
            [0.114503, 0.786281, 0.099216],
            [-0.003882, -0.048116, 1.051998],
        ]
    ),
}
TO_XYZ = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]])
WHITE = np.array([0.95047, 1.0, 1.08883])


def lab(color: str, sight: str) -> np.ndarray:
    """Return CIE L*a*b* of a color as seen with `sight`."""
    rgb = np.array(to_rgb(color))
    linear = np.where(rgb <= 0.04045, rgb / 12.92, ((rgb + 0.055) / 1.055) ** 2.4)
    xyz = TO_XYZ @ np.clip(SIGHT[sight] @ linear, 0, 1) / WHITE
    x, y, z = np.where(xyz > 0.008856, np.cbrt(xyz), 7.787 * xyz + 16 / 116)
    return np.array([116 * y - 16, 500 * (x - y), 200 * (y - z)])


def difference(a: str, b: str, sight: str = "all cones") -> float:
    """Return CIE 1976's Delta E: about 2 can just be told apart side by side."""
    return float(np.linalg.norm(lab(a, sight) - lab(b, sight)))


def test_no_color_means_two_things():
    for (one, colors), (other, others) in combinations(PALETTES.items(), 2):
        closest = min((difference(a, b), a, b) for a in colors for b in others)
        assert closest[0] > 12, f"{one} and {other}"


@pytest.mark.parametrize("sight", SIGHT)
@pytest.mark.parametrize("name", PALETTES)
def test_the_colors_of_a_palette_are_told_apart(name, sight):
    closest = min((difference(a, b, sight), a, b) for a, b in combinations(PALETTES[name], 2))
    assert closest[0] > (20 if sight == "all cones" else 12)


def test_what_a_step_does_is_drawn_in_a_color_of_its_own():
    shown = [(to_rgb(color), hatch) for color, hatch, _ in PART_STYLE.values()]
    assert len(set(shown)) == len(shown)


def test_every_category_of_the_meter_has_a_color():
    assert tuple(CATEGORY_COLOR) == CATEGORIES


def test_text_is_white_on_dark_and_black_on_light():
    assert [ink(color) for color in RANK_COLOR[:3]] == ["white", BLACK, "white"]
    assert (ink("#000000"), ink("#FFFFFF")) == ("white", BLACK)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.2, "0.2"),
        (999, "999"),
        (12_000, "12 k"),
        (5e14, "500 T"),
        (1e15, "1 P"),
    ],
)
def test_a_number_has_three_digits_and_a_prefix(value, text):
    assert plain(value) == text
