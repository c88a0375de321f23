"""A model's size in words."""

import pytest

from minitron import cost
from minitron.config import ConfigError, ModelConfig, ParallelConfig
from minitron.plan import job


@pytest.mark.parametrize(
    ("model", "words"),
    [
        (ModelConfig("gpt", 50257, 1024, 12, 768, 12, 12, 3072), "124 M"),
        (cost.PUBLISHED["GPT-3 175B"], "175 G"),
        (ModelConfig("gpt", 51200, 2048, 128, 25600, 160, 160, 4 * 25600), "1.01 T"),
    ],
)
def test_the_size_of_a_model(model, words):
    assert job.size_of(model) == words


@pytest.mark.parametrize(
    ("number", "words"),
    [(12, "0.012 k"), (999_400, "999 k"), (999_600, "1 M"), (999.6e9, "1 T"), (2e15, "2e+03 T")],
)
def test_the_prefix_is_that_of_the_rounded_number(monkeypatch, number, words):
    monkeypatch.setattr(cost, "num_parameters", lambda model: number)
    assert job.size_of(ModelConfig()) == words


def test_context_parallelism_has_no_formula_yet():
    with pytest.raises(ConfigError, match="parallel.cp = 2: the planner has no formula .* measure"):
        job.Decision(ParallelConfig(cp=2))


def test_a_schedule_without_a_formula_is_refused():
    with pytest.raises(ConfigError, match="zb-v: the planner has no formula .* `minitron dryrun`"):
        job.Decision(ParallelConfig(pp=2, schedule="zb-v", chunks=2))
