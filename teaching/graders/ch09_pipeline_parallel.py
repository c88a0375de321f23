"""Graders of chapter 9: each exercise has a file of its own."""

from teaching.graders.ch09_bubble import grade_9_2
from teaching.graders.ch09_cut import grade_9_3
from teaching.graders.ch09_schedules import grade_9_1
from teaching.graders.ch09_stage import grade_9_4

__all__ = ["grade_9_1", "grade_9_2", "grade_9_3", "grade_9_4"]
