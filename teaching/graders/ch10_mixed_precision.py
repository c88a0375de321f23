"""Graders of chapter 10: each exercise has a file of its own."""

from teaching.graders.ch10_agreement import grade_10_4
from teaching.graders.ch10_float8 import grade_10_5
from teaching.graders.ch10_masters import grade_10_3
from teaching.graders.ch10_scaler import grade_10_2
from teaching.graders.ch10_underflow import grade_10_1

__all__ = ["grade_10_1", "grade_10_2", "grade_10_3", "grade_10_4", "grade_10_5"]
