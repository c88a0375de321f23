"""The exercises of chapter 3: their examples."""

import torch

from minitron import cost
from minitron.config import ModelConfig
from teaching.exercises import ROOT, load
from tests.exercises.common import Chapter
from tests.exercises.grading import Grading

CHAPTER = Chapter("ch03_recompute")
EXERCISES = CHAPTER.exercises


class TestGrading(Grading):
    chapter = CHAPTER


def test_the_examples_in_the_docstrings_are_true():
    path = ROOT / EXERCISES["3.1"].solution_file
    recompute = load(EXERCISES["3.1"], path)["recompute"]
    w, x = torch.tensor(3.0, requires_grad=True), torch.tensor(2.0, requires_grad=True)
    result = recompute(lambda x: w * x * x, x)
    result.backward()
    assert (result.item(), x.grad.item(), w.grad.item()) == (12, 12, 4)

    choose = load(EXERCISES["3.2"], path)["segments_for_budget"]
    assert choose([10] * 4, 1, 40) == []
    assert choose([10] * 4, 1, 21) == [2]

    flops = load(EXERCISES["3.3"], path)["recompute_flops_per_token"]
    model = ModelConfig(
        family="llama",
        vocab_size=10,
        width=4,
        num_heads=2,
        num_kv_heads=2,
        ffn_width=6,
        num_layers=1,
    )
    assert cost.training_flops_per_token(model, 3) == 1200
    assert [flops(model, 3, kind) for kind in ("none", "selective", "full")] == [0, 48, 320]

    assert load(EXERCISES["3.4"], path)["best_segment_length"](7, 4, 2) == (2, 12)
