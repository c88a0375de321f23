"""Layouts that cannot work are told in one line, with both numbers and the nearest that can."""

import dataclasses
from itertools import product

import pytest
import torch

from minitron.config import (
    Config,
    ConfigError,
    DataConfig,
    ModelConfig,
    ParallelConfig,
    TrainConfig,
)
from minitron.config.layout import layouts_that_fit, require_ranks
from minitron.model.transformer import Transformer
from minitron.parallel.tensor.cuts import plan_placements
from tests.tiers import diagonal_of

LLAMA = ModelConfig("llama", 720, 32, 4, 32, 4, 2, 48)
GPT = ModelConfig("gpt", 720, 32, 4, 36, 6, 6, 48)


def config_of(model: ModelConfig, sequences: int = 10, sizes: int = 2, **parallel) -> Config:
    train = TrainConfig(global_batch_size=sequences, micro_batch_size=sizes)
    return Config(model, DataConfig(sequence_length=32), train, ParallelConfig(**parallel))


def message_of(config: Config, size: int) -> str:
    with pytest.raises(ConfigError) as caught:
        require_ranks(config, size)
    assert "\n" not in str(caught.value)
    return str(caught.value)


CHUNKED = {"pp": 2, "schedule": "interleaved", "chunks": 2}


@pytest.mark.parametrize(
    ("config", "size", "what", "remedy"),
    [
        (
            config_of(LLAMA, tp=2),
            1,
            "parallel.tp = 2, but there is 1 rank: start 2, or a multiple of it, with torchrun",
            "with 1 rank --parallel.tp 1 (dp 1) would do",
        ),
        (
            config_of(GPT, tp=4, pp=2),
            6,
            "parallel.tp = 4 and parallel.pp = 2, but there are 6 ranks: start 8, or a multiple",
            "with 6 ranks --parallel.tp 3 (dp 1) or --parallel.tp 3 --parallel.pp"
            " 1 (dp 2) would do",
        ),
        (
            config_of(LLAMA, dp=3, tp=2, pp=2),
            8,
            "parallel.dp = 3 and parallel.tp = 2 and parallel.pp = "
            "2, but there are 8 ranks: start it with torchrun --nproc-per-node 12",
            "with 8 ranks --parallel.dp 2 or --parallel.tp 1 --parallel.dp 4 would do",
        ),
        (
            config_of(GPT, tp=4),
            4,
            "model.num_heads = 6 is not divisible by 4 ranks (parallel.tp); 8 would be",
            "with 4 ranks --parallel.tp 2 (dp 2) or --parallel.tp 1 (dp 4) would do",
        ),
        (
            config_of(LLAMA, sequences=4, tp=2),
            16,
            "train.global_batch_size = 4 leaves some of 8 ranks "
            "without a sequence: raise it to 8, or start fewer",
            "with 16 ranks --parallel.pp 2 (dp 4) or --parallel.tp 4 (dp 4) would do",
        ),
        (
            config_of(LLAMA, **CHUNKED),
            2,
            "5 micro-batches a step (train.micro_batch_size = 2) are "
            "not divisible by parallel.pp = 2 (interleaved)",
            "set train.micro_batch_size to 1 or 3",
        ),
        (
            config_of(LLAMA, sequences=2, **CHUNKED),
            4,
            "1 micro-batch a step (train.micro_batch_size = 2) is not divisible by",
            "raise train.global_batch_size: a rank gets only 1 of its sequences",
        ),
        (
            config_of(LLAMA, cp=4),
            6,
            "parallel.cp = 4, but there are 6 ranks: start 4, or a multiple of it",
            "with torchrun --nproc-per-node 4 -m minitron.train",
        ),
        (
            config_of(LLAMA, dp=3, tp=2, cp=2),
            8,
            "parallel.dp = 3 and parallel.tp = 2 and parallel.cp = "
            "2, but there are 8 ranks: start it with torchrun --nproc-per-node 12",
            "with 8 ranks --parallel.dp 2 or --parallel.tp 1 --parallel.dp 4 would do",
        ),
        (
            config_of(LLAMA, cp=4, context="ulysses"),
            4,
            "parallel.context = ulysses: parallel.cp = 4 does not divide a rank's key-value heads, "
            "2 (model.num_kv_heads = 2 over parallel.tp = 1); use ring or all-gather",
            "or a parallel.cp that divides them",
        ),
        (
            config_of(LLAMA, cp=2, tp=2, context="ulysses"),
            4,
            "parallel.context = ulysses: parallel.cp = 2 does not divide a rank's key-value heads, "
            "1 (model.num_kv_heads = 2 over parallel.tp = 2)",
            "with 4 ranks --parallel.tp 1 (dp 2) or --parallel.tp 1 "
            "--parallel.pp 2 (dp 1) would do",
        ),
        (
            config_of(LLAMA, tp=2, sequence=True),
            5,
            "parallel.tp = 2, but there are 5 ranks",
            "start 2, or a multiple of it, with torchrun --nproc-per-node 2 -m minitron.train",
        ),  # nothing fits 5
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_misfit_names_both_numbers_and_what_fits(config, size, what, remedy):
    message = message_of(config, size)
    assert message.startswith(what) and message.endswith(remedy)


@pytest.mark.parametrize(
    ("model", "what"),
    [
        (
            dataclasses.replace(LLAMA, vocab_size=721),
            "model.vocab_size = 721 is not divisible by 2 ranks (parallel.tp); 722 would be",
        ),
        (dataclasses.replace(LLAMA, ffn_width=49), "model.ffn_width = 49"),
        (ModelConfig("llama", 720, 32, 4, 36, 6, 3, 48), "model.num_kv_heads = 3"),
    ],
)
def test_every_size_that_is_cut_is_looked_at(model, what):
    assert message_of(config_of(model, tp=2), 2).startswith(what)


def test_slow_is_not_refused():
    """Fewer micro-batches than stages, stages of unequal size, ZeRO of one rank, unequal parts."""
    require_ranks(config_of(LLAMA, sequences=1, pp=4), 4)
    require_ranks(config_of(LLAMA, pp=3), 3)
    require_ranks(config_of(LLAMA, zero=3, tp=2), 2)
    require_ranks(config_of(LLAMA, sequences=5), 4)


def test_a_vocabulary_that_is_not_known_yet_is_no_misfit():
    require_ranks(config_of(dataclasses.replace(LLAMA, vocab_size=0), tp=4), 4)


# The pure functions, against what they stand for


def cuts_work(model: ModelConfig, tp: int) -> bool:
    with torch.device("meta"):
        whole = Transformer(model)
    try:
        plan_placements(whole, 0, tp)
    except ConfigError:
        return False
    return True


def test_a_model_is_refused_if_and_only_if_it_cannot_be_cut():
    seen = set()
    for heads, groups, ffn, vocabulary in product((6, 8, 12), (1, 2, 3, 4), (24, 25), (40, 42)):
        if heads % groups:
            continue
        model = ModelConfig("llama", vocabulary, 32, 1, 2 * heads, heads, groups, ffn)
        for tp in range(1, 9):
            config = config_of(model, tp=tp)
            fits = (1, tp, 1) in layouts_that_fit(config, tp)
            assert fits == cuts_work(model, tp), (model, tp)
            seen.add(fits)
    assert seen == {True, False}


@pytest.mark.parametrize(
    "parallel, size",
    diagonal_of(
        [
            {},
            {"tp": 2, "sequence": True},
            {"zero": 3},
            {"pp": 2, "zero": 1},
            CHUNKED,
            {"pp": 2, "schedule": "zero-bubble"},
            {"pp": 2, "schedule": "zero-bubble", "tp": 2},
            {"cp": 2},
            {"cp": 2, "context": "ulysses", "zero": 1},
        ],
        [8, 1, 6, 12],
    ),
    ids=str,
)
def test_the_layouts_that_fit_are_all_of_those_that_are_accepted(parallel, size):
    """Found by trying every dp, tp and pp."""
    config = config_of(GPT, sequences=8, sizes=1, **parallel)
    accepted = set()
    for dp, tp, pp in product(range(1, size + 1), repeat=3):
        try:
            change = dataclasses.replace(config.parallel, dp=dp, tp=tp, pp=pp)
            require_ranks(dataclasses.replace(config, parallel=change), size)
        except ConfigError:
            continue
        accepted.add((dp, tp, pp))
        assert dp * tp * pp * config.parallel.cp == size
        assert GPT.num_heads % tp == 0 and pp <= GPT.num_layers
    offered = layouts_that_fit(config, size)
    assert set(offered) == accepted and len(offered) == len(accepted)


def test_the_nearest_layout_comes_first():
    config = config_of(GPT, tp=3, pp=2)
    assert layouts_that_fit(config, 8)[0] == (2, 2, 2)
    assert layouts_that_fit(config, 12)[0] == (2, 3, 2)
