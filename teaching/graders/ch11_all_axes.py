"""Graders of chapter 11: each exercise has a file of its own."""

from teaching.graders.ch11_capstone import grade_11_5
from teaching.graders.ch11_groups import grade_11_2
from teaching.graders.ch11_layouts import grade_11_3
from teaching.graders.ch11_places import grade_11_1
from teaching.graders.ch11_reshard import grade_11_4

__all__ = ["grade_11_1", "grade_11_2", "grade_11_3", "grade_11_4", "grade_11_5"]
