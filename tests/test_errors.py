"""A user's mistake is data: what was wrong, what mends it, where; printed, it is one line."""

import pickle
from collections import Counter
from dataclasses import replace

import pytest

from minitron.config import Config, ConfigError, ModelConfig, ParallelConfig
from minitron.config.layout import WrongNumRanks, require_ranks


def test_a_mistake_has_a_problem_remedies_a_field_and_a_kind():
    with pytest.raises(ConfigError) as caught:
        ModelConfig(num_heads=5)
    error = caught.value
    assert error.problem == "model.width = 128 is not a multiple of model.num_heads = 5"
    assert error.remedy == "try --model.num-heads 4"
    assert error.field == "model.width"
    assert str(error) == f"{error.problem}: {error.remedy}"


def test_a_problem_that_explains_itself_is_told_before_the_remedy():
    error = ConfigError("a = 1: too few", "raise it", "or leave it out")
    assert str(error) == "a = 1: too few; raise it; or leave it out"


def test_it_is_one_line_whatever_a_user_typed():
    text = str(ConfigError("file\nname " + 500 * "x", "choose another"))
    assert "\n" not in text and "(500 characters)" in text


@pytest.mark.parametrize(
    "error",
    [ConfigError("p", "r", "s", field="train.steps", kind="k"), WrongNumRanks("p", "8", "start 8")],
)
def test_it_travels_between_processes(error):
    copy = pickle.loads(pickle.dumps(error))
    assert str(copy) == str(error) and vars(copy) == vars(error)


def test_mistakes_that_differ_in_numbers_are_of_one_kind():
    kinds = Counter()
    for tp in (3, 5):
        with pytest.raises(ConfigError) as caught:
            require_ranks(Config(parallel=ParallelConfig(tp=tp)), tp)
        kinds[caught.value.kind] += 1
    assert kinds == {"tp does not divide model.num_heads": 2}


def test_a_wrong_number_of_ranks_says_how_many_are_needed():
    config = Config(parallel=ParallelConfig(tp=2, pp=2))
    with pytest.raises(WrongNumRanks) as caught:
        require_ranks(config, 6)
    assert caught.value.needed == "a multiple of 4"
    assert "with 6 ranks" in caught.value.remedies[1]
    with pytest.raises(WrongNumRanks, match="torchrun --nproc-per-node 8 "):
        require_ranks(replace(config, parallel=replace(config.parallel, dp=2)), 4)
