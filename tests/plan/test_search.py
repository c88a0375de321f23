"""The search against the package's own checks, and its short cuts against a search anew."""

import re
from collections import Counter
from dataclasses import fields, replace
from functools import cache

import pytest

from minitron import cost
from minitron.config import Config, ConfigError, DataConfig, ModelConfig, TrainConfig
from minitron.config.layout import layouts_that_fit, require_ranks
from minitron.cost.compute import published_llama
from minitron.plan import explain as explain_module
from minitron.plan.decide import decide
from minitron.plan.estimate import estimate
from minitron.plan.explain import (
    OPTIONS,
    PARTS,
    RESOURCES,
    alternatives,
    as_it_stands,
    best_on,
    doubled,
    explain,
    with_twice,
)
from minitron.plan.hardware import DEVICES
from minitron.plan.job import Job
from minitron.plan.search import Candidate, checked, config_of, decisions, search
from minitron.plan.variants import is_variant, variants
from tests.tiers import exhaustive, tiered

H100 = DEVICES["H100-SXM-80GB"]
GPT2 = ModelConfig("gpt", 50304, 1024, 12, 768, 12, 12, 3072)
LLAMA_8B = published_llama(32, 4096, 32, 8, 14336, 128256, 8192)
LLAMA_70B = cost.PUBLISHED["Llama 3.1 70B"]
GPT3 = replace(cost.PUBLISHED["GPT-3 175B"], vocab_size=50304)

SMALL = Job(GPT2, 8, H100, 1024, 512, precision="bf16-autocast")
MIDDLE = Job(LLAMA_8B, 16, H100, 4096, 64)


@cache
def found(job):
    return search(job)


@cache
def middle_with_twice(resource: str) -> Candidate:
    return with_twice(found(MIDDLE), resource)


@pytest.fixture
def searched_once(monkeypatch):
    """An explanation of MIDDLE finds there what another test has asked for."""
    monkeypatch.setattr(
        explain_module, "with_twice", lambda result, resource: middle_with_twice(resource)
    )


# What is enumerated


@pytest.mark.parametrize(
    "job",
    [
        SMALL,
        MIDDLE,
        replace(SMALL, num_gpus=24, gpus_per_node=24),
        replace(SMALL, num_gpus=7, global_batch_size=10),
    ],
)
def test_every_grid_that_a_run_would_accept_is_there_and_no_other(job):
    """Against `run_checks.layouts_that_fit`, which the training offers after a mistake."""
    config = Config(
        job.model,
        DataConfig(sequence_length=job.sequence_length),
        TrainConfig(global_batch_size=job.global_batch_size, micro_batch_size=1),
    )
    accepted = set(layouts_that_fit(config, job.num_gpus))
    there = {
        (each.parallel.dp, each.parallel.tp, each.parallel.pp) for each in decisions(job, Counter())
    }
    assert there == accepted and len(accepted) > 1


def test_every_option_has_every_value_that_can_be_trained():
    every = [*decisions(MIDDLE, Counter())]
    assert len(every) == len(set(every)), "no layout twice"
    values = {option: {value_of(each) for each in every} for option, value_of in OPTIONS.items()}
    assert values["tp"] == values["pp"] == {1, 2, 4, 8, 16}
    assert values["chunks"] == {1, 2, 4, 8, 16}, "of 16 blocks on each of two ranks"
    assert values["schedule"] == {"1f1b", "interleaved", "zero-bubble"}
    assert values["ZeRO"] == {0, 1, 2, 3} and values["sequence"] == {"on", "off"}
    assert values["recompute"] == {"none", "selective", "full"}
    assert values["micro-batch"] == {1, 2, 4, 8, 16, 32, 64}
    assert {each.parallel.zero for each in every if each.parallel.pp > 1} == {0, 1, 2, 3}


@pytest.mark.parametrize("job", [SMALL, replace(MIDDLE, num_gpus=12, global_batch_size=48)])
def test_what_is_found_can_be_trained(job):
    candidates = found(job).candidates
    assert len(candidates) > 100
    for each in candidates:
        require_ranks(config_of(job, each.decision), job.num_gpus)


def test_a_batch_that_divides_by_nothing_is_read_whole_or_in_powers_of_two():
    """11 sequences on 2 ranks: one of them reads 6."""
    job = replace(SMALL, num_gpus=2, global_batch_size=11)
    sizes = {each.micro_batch_size for each in decisions(job, Counter()) if each.parallel.dp == 2}
    assert sizes == {1, 2, 4, 6}


# What drops out


def test_every_layout_is_counted_once():
    result, refused = found(MIDDLE), Counter()
    accepted = [*decisions(MIDDLE, refused)]
    plain = [each for each in result.candidates if not is_variant(each.decision)]
    assert len(plain) + len(result.too_large) == len(accepted)
    assert result.refused == refused
    assert result.num_layouts == len(result.candidates) + len(result.too_large) + refused.total()
    assert sum(count for count, _ in result.dropped()) == result.num_layouts - len(
        result.candidates
    )


def test_reasons_are_told_most_frequent_first_and_alike_ones_together():
    reasons = found(replace(SMALL, num_gpus=16)).dropped()
    assert [count for count, _ in reasons] == sorted((count for count, _ in reasons), reverse=True)
    shapes = [re.sub(r"\d+", "#", reason) for _, reason in reasons]
    assert len(shapes) == len(set(shapes)), "8 and 16 ranks, by which heads do not divide"
    text = "\n".join(reason for _, reason in reasons)
    assert "model.num_heads = 12 is not divisible by 8 ranks (parallel.tp); 16 would be" in text
    assert "parallel.zero" not in text, "every stage of ZeRO trains in a pipeline"
    assert "fit in 68 GB, the usable part of 86" in text
    assert "use stage" not in text and "lower them" not in text, "remedies are for runs"


def test_what_fits_fits_and_the_fastest_is_first():
    result = found(MIDDLE)
    limit = 0.8 * H100.memory_bytes
    assert all(each.total_bytes <= limit for each in result.candidates)
    assert result.too_large and all(each.total_bytes > limit for each in result.too_large)
    order = [(each.seconds, each.total_bytes) for each in result.candidates]
    assert order == sorted(order) and order[0] < order[-1]
    assert result.too_large[0].total_bytes < result.too_large[-1].total_bytes


def test_what_weighs_and_what_times_agree():
    for each in (found(MIDDLE).candidates + found(MIDDLE).too_large)[::50]:
        assert each.estimate == estimate(MIDDLE, each.decision)


def test_groups_of_tensor_parallelism_do_not_span_nodes():
    """12 heads in 3 or 6 parts divide, but a node of 8 does not."""
    refused = Counter()
    widths = {
        each.parallel.tp
        for each in decisions(replace(SMALL, num_gpus=24, sequence_length=960), refused)
    }
    assert widths == {1, 2, 4}
    assert any("straddle nodes of 8 GPUs" in reason.problem for reason in refused)


# Nothing fits


@pytest.mark.parametrize(("model", "num_gpus"), tiered([(LLAMA_8B, 1), (GPT3, 7)]))
def test_what_fits_nowhere_is_refused_with_remedies_that_help(model, num_gpus):
    job = Job(model, num_gpus, H100, 2048, 1536)
    with pytest.raises(ConfigError) as refusal:
        search(job)
    message = str(refusal.value)
    assert "\n" not in message and "none of" in message and "68 GB are usable" in message
    held = float(re.search(r"needs (\d+) GB on each of", message)[1])
    enough, each = map(int, re.search(r"; (\d+) GPUs or (\d+) GB each would do", message).groups())
    assert held > 64 and each == pytest.approx(held / 0.8, abs=1)
    assert search(replace(job, num_gpus=enough)).candidates
    larger = replace(H100, memory_bytes=1.01 * each * 1e9)
    assert search(replace(job, device=larger)).candidates
    with pytest.raises(ConfigError):
        search(replace(job, num_gpus=enough // 2))


def test_gpus_that_no_layout_can_use():
    """13 is neither a number of parts nor of stages, and there is one sequence."""
    with pytest.raises(ConfigError, match="none of .* layouts for 13 GPUs can be trained"):
        search(replace(SMALL, num_gpus=13, global_batch_size=1))
    with pytest.raises(ConfigError, match="0 GPUs"):
        search(replace(SMALL, num_gpus=0))


# Variants


@pytest.mark.parametrize(
    "job", tiered([MIDDLE, replace(MIDDLE, num_gpus=32, global_batch_size=128)])
)
def test_no_variant_is_faster_than_what_was_found(job):
    """Tried with all that fit, also where the search has seen that it need not."""
    winner, tried = found(job).candidates[0], 0
    for each in found(job).candidates:
        for decision in () if is_variant(each.decision) else variants(each.decision, 8):
            other, tried = Candidate(job, checked(job, decision)), tried + 1
            assert not other.fits or other.seconds >= 0.999 * winner.seconds
            assert other.total_bytes >= 0.999 * each.total_bytes, "it holds more"
            assert other.seconds >= each.seconds - each.estimate.parts["dp"]
    assert tried > 100


@exhaustive  # a search of 512 GPUs
def test_hybrid_sharding_is_found_where_shards_over_all_ranks_wait_for_the_network():
    job = Job(LLAMA_8B, 512, H100, 4096, 1024)
    winner = found(job).candidates[0]
    axes = winner.decision.parallel
    assert axes.zero == 3 and 1 < axes.replicas < axes.dp
    assert axes.dp // axes.replicas % 8 == 0, "the shards fill nodes"
    alone = next(
        each
        for each in found(job).candidates
        if each.decision == replace(winner.decision, parallel=replace(axes, replicas=1))
    )
    assert alone.seconds > 1.05 * winner.seconds


# Why


def test_the_best_of_each_value_with_the_others_free():
    result = found(MIDDLE)
    everything = result.candidates + result.too_large
    for option, by_value in alternatives(result).items():
        compared = [each for each in everything if option == "ZeRO" or result.trusts(each)]
        values = [OPTIONS[option](each.decision) for each in compared]
        assert set(by_value) == set(values)
        for value, best in by_value.items():
            same = [each for each, own in zip(compared, values, strict=True) if own == value]
            fitting = [each.seconds for each in same if each.fits]
            assert best.fits == bool(fitting)
            if fitting:
                assert best.seconds == min(fitting)
            else:
                assert best.total_bytes == min(each.total_bytes for each in same)


TWICE = {
    "FLOP/s": {"bf16_flops", "fp8_flops"},
    "memory": {"memory_bytes"},
    "memory bandwidth": {"memory_bandwidth"},
    "NVLink bandwidth": {"nvlink_bandwidth"},
    "network bandwidth": {"nic_bandwidth"},
}


@pytest.mark.parametrize("resource", tiered(RESOURCES))
def test_twice_as_much_of_a_resource_is_as_good_as_a_search_anew(resource):
    result = found(MIDDLE)
    device = doubled(H100, resource)
    changed = {
        field.name
        for field in fields(H100)
        if getattr(H100, field.name) != getattr(device, field.name)
    }
    assert changed == TWICE[resource]
    best, anew = middle_with_twice(resource), search(replace(MIDDLE, device=device)).trusted
    assert best.decision == anew.decision and best.seconds == anew.seconds
    assert best.seconds <= result.trusted.seconds, "more is never slower"


def test_half_of_the_memory_is_slower_or_nothing_fits():
    result = found(MIDDLE)
    best = best_on(replace(H100, memory_bytes=40e9), result)
    assert best.total_bytes <= 32e9 and best.seconds > result.candidates[0].seconds


def test_an_explanation_names_the_winner_every_option_and_what_binds(searched_once):
    text = explain(found(MIDDLE))
    winner = found(MIDDLE).trusted
    assert text.startswith(f"best: {winner}\n")
    assert "as it stands" not in text
    for name, seconds in winner.estimate.parts.items():
        share = seconds / winner.seconds
        meaning = re.escape(PARTS[name])
        assert re.search(rf"^  {name} +{seconds:.3f} s +{share:.0%}   {meaning}$", text, re.M)
    assert re.search(rf"^  a GPU +{winner.total_bytes / 1e9:.3f} GB +100%$", text, re.M)
    by_option = alternatives(found(MIDDLE))
    for option, value_of in OPTIONS.items():
        others = [each.seconds for each in by_option[option].values()]
        first = (
            ": there is no other choice"
            if len(others) == 1
            else " is best"
            if min(others) >= winner.seconds
            else " comes first"
        )  # before ZeRO 3
        assert re.search(rf"^  {option} +{value_of(winner.decision)}{first}", text, re.M)
    gains = {
        resource: 1 - middle_with_twice(resource).seconds / winner.seconds for resource in RESOURCES
    }
    most = max(gains, key=gains.get)
    assert f"The bottleneck is {most}: twice as much would save {gains[most]:.0%}" in text


# A layout that is given


def test_a_config_as_it_stands():
    config = config_of(MIDDLE, found(MIDDLE).candidates[7].decision)
    assert as_it_stands(config, MIDDLE) == found(MIDDLE).candidates[7]
    free = replace(config, parallel=replace(config.parallel, dp=0))
    assert as_it_stands(free, MIDDLE) == found(MIDDLE).candidates[7], "dp follows from the GPUs"
    large = replace(config, train=replace(config.train, micro_batch_size=4096))
    standing = as_it_stands(large, MIDDLE).decision
    assert standing.micro_batch_size == -(-64 // standing.parallel.dp), "no more than there are"


def test_an_explanation_sets_a_layout_beside_the_best(searched_once):
    other = found(MIDDLE).candidates[-1]
    text = explain(found(MIDDLE), other)
    assert re.search(r"^ +the best +as it stands$", text, re.M)
    both = [found(MIDDLE).trusted.seconds, other.seconds]
    assert re.search(r"^  a step +{:.3f} s +100% +{:.3f} s +100%$".format(*both), text, re.M)


def test_a_config_that_cannot_run_says_so():
    config = config_of(MIDDLE, found(MIDDLE).candidates[0].decision)
    wide = replace(config, parallel=replace(config.parallel, dp=0, tp=16))
    with pytest.raises(ConfigError, match="parallel.tp = 16, but there are 8 ranks"):
        as_it_stands(wide, replace(MIDDLE, num_gpus=8))
    unknown = replace(config, train=replace(config.train, recompute="sqrt"))
    with pytest.raises(ConfigError, match="recompute = sqrt"):
        as_it_stands(unknown, MIDDLE)


# The decision tree of chapter 11


AT_MOST = 1.1
"""Times the seconds of the fastest layout, to 64 GPUs."""
LOSES_MORE = {"GPT-3 on 1,024": 1.13, "Llama 405B on 16,384": 1.81}
"""The same on thousands."""


@pytest.mark.parametrize(
    ("model", "num_gpus", "length", "batch"),
    tiered(
        [
            (GPT2, 8, 1024, 512),
            (cost.PUBLISHED["Llama 3.2 1B"], 8, 8192, 128),
            (LLAMA_8B, 8, 8192, 128),
            (LLAMA_8B, 64, 8192, 512),
            (LLAMA_70B, 64, 8192, 256),
            (GPT3, 64, 2048, 1536),
        ],
        keep=2,
    ),
)
def test_the_decision_tree_is_not_far_from_the_best_on_a_few_nodes(model, num_gpus, length, batch):
    job = Job(model, num_gpus, H100, length, batch)
    chosen = Candidate(job, decide(job))
    assert chosen.fits
    assert chosen.seconds <= AT_MOST * search(job).candidates[0].seconds


@exhaustive
@pytest.mark.parametrize("name", LOSES_MORE)
def test_the_decision_tree_is_far_from_the_best_on_thousands(name):
    """It knows no schedule but 1F1B, and leaves a node with tensor parallelism only if it must."""
    if name.startswith("GPT-3"):
        model = replace(cost.PUBLISHED["GPT-3 175B"], vocab_size=51200)
        job = Job(model, 1024, DEVICES["A100-SXM-80GB"], 2048, 1536)
    else:
        job = Job(cost.PUBLISHED["Llama 3.1 405B"], 16_384, H100, 8192, 2048)
    chosen = Candidate(job, decide(job))
    loses = chosen.seconds / search(job).candidates[0].seconds
    assert loses == pytest.approx(LOSES_MORE[name], rel=0.02)


def test_reasons_are_counted_by_kind_not_by_their_words():
    refused = Counter()
    list(decisions(replace(SMALL, num_gpus=24, sequence_length=960), refused))
    assert all(reason.kind != reason.problem for reason in refused), "a reason without a kind"
    assert len({reason.kind for reason in refused}) < len(refused)
