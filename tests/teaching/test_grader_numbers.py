"""Numbers in a grader's message differ to the eye when they differ, and not otherwise."""

import math

import pytest

from teaching.graders.numbers import a_not_b, apart, is_rounded


@pytest.mark.parametrize(
    ("seen", "right", "text"),
    [
        (35.0312, 35.0308, "35.0312, not 35.0308"),
        (3.0, 1.0, "3, not 1"),
        (1e-9, 2e-9, "1e-09, not 2e-09"),
        (math.nan, 1.0, "nan, not 1"),
        (1.0, math.inf, "1, not inf"),
    ],
)
def test_as_many_digits_are_shown_as_it_takes(seen, right, text):
    assert a_not_b(seen, right) == text


def test_what_differs_by_rounding_alone_is_shown_alike():
    assert apart(0.1 + 0.2, 0.3) == ("0.3", "0.3")


def test_a_rounded_number_is_told_from_the_right_one_and_from_others():
    assert is_rounded(0.167, 1 / 6) and is_rounded(0.2, 1 / 6)
    assert not is_rounded(1 / 6, 1 / 6) and not is_rounded(0.168, 1 / 6)
    assert not is_rounded(0.375, 0.375)
