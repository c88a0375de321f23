"""The exercises of chapter 2: their examples, and what their graders rest on."""

import pytest
import torch
from torch import nn

from minitron.config import ModelConfig
from teaching.exercises import ROOT, load
from teaching.graders import ch02_leak
from tests.exercises.common import Chapter
from tests.exercises.grading import Grading

CHAPTER = Chapter("ch02_memory")
GPT = dict(family="gpt", vocab_size=9, num_layers=1, max_sequence_length=64)


class TestGrading(Grading):
    chapter = CHAPTER


def solution(exercise_id):
    exercise = CHAPTER.exercises[exercise_id]
    return load(exercise, ROOT / exercise.solution_file)


def test_the_examples_in_the_docstrings_are_true():
    states = solution("2.1")
    mixed = dict(
        parameter=torch.bfloat16,
        gradient=torch.float32,
        master=torch.float32,
        moments=torch.float32,
    )
    assert list(states["state_bytes"](nn.Linear(4, 5), mixed).values()) == [50, 100, 100, 200]

    with torch.device("meta"):
        model = nn.Linear(10_000, 100_000, bias=False)
    plans = {
        name: dict.fromkeys(mixed, dtype) | {"master": None}
        for name, dtype in (("full", torch.float32), ("half", torch.bfloat16))
    }
    assert states["plans_that_fit"](model, plans, 15.0) == ["half"]
    assert states["plans_that_fit"](model, plans, 16.0) == ["half", "full"]

    blocks = solution("2.2")
    sizes = dict(width=4, num_heads=2, num_kv_heads=2, ffn_width=16)
    for dropout, materialized, fused in ((0.0, 272, 256), (0.1, 312, 272)):
        config = ModelConfig(**GPT, **sizes, dropout=dropout)
        assert blocks["materialized_block_bytes"](config, 1, 2, 2) == materialized
        assert blocks["fused_block_bytes"](config, 1, 2, 2) == fused


@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_the_formula_is_the_published_one(dropout):
    config = ModelConfig(
        **GPT, width=12, num_heads=3, num_kv_heads=3, ffn_width=48, dropout=dropout
    )
    functions = solution("2.2")
    masks, wide, square = dropout > 0, 5 * 7 * 12, 5 * 3 * 7 * 7
    assert functions["materialized_block_bytes"](config, 5, 7, 2) == wide * (
        32 + 2 * masks
    ) + square * (2 + 3 * masks)
    assert functions["fused_block_bytes"](config, 5, 7, 2) == wide * (32 + 2 * masks)


def test_the_leaking_loop_leaks_at_every_step():
    watch, clean = ch02_leak.loops()
    growth = {b - a for a, b in zip(watch.peaks[1:], watch.peaks[2:], strict=False)}
    assert min(growth) > clean.peaks[1]
    assert watch.graphs == [0, 4, 8, 12, 16, 20]
    assert len(set(clean.peaks[1:])) == 1


def test_the_leaking_loop_is_told_so():
    verdict = CHAPTER.grade("train", ch02_leak.leaking_loop)
    assert verdict.state == "failed" and "still has its graph" in verdict.likely
