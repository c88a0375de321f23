"""Graders of chapter 8: each exercise has a file of its own."""

from teaching.graders.ch08_gradients import grade_8_2
from teaching.graders.ch08_linear import grade_8_4
from teaching.graders.ch08_pair import grade_8_1
from teaching.graders.ch08_saved import grade_8_3

__all__ = ["grade_8_1", "grade_8_2", "grade_8_3", "grade_8_4"]
