"""Graders of chapter 12: each exercise has a file of its own."""

from teaching.graders.ch12_days import grade_12_1
from teaching.graders.ch12_layout import grade_12_4
from teaching.graders.ch12_memory import grade_12_2
from teaching.graders.ch12_schedule import grade_12_3

__all__ = ["grade_12_1", "grade_12_2", "grade_12_3", "grade_12_4"]
