"""The decision tree against every layout of the kinds it knows, by the estimator that it asks."""

import re
from dataclasses import replace
from functools import cache
from itertools import product
from typing import get_args

import pytest

from minitron import cost
from minitron.config import ConfigError, ModelConfig, ParallelConfig
from minitron.cost.compute import published_llama
from minitron.plan.decide import cuts, decide
from minitron.plan.estimate import estimate
from minitron.plan.hardware import DEVICES
from minitron.plan.job import Decision, Job
from minitron.plan.memory import memory_of
from tests.tiers import tiered

H100 = DEVICES["H100-SXM-80GB"]
LLAMA_8B = published_llama(32, 4096, 32, 8, 14336, 128256, 8192)
GPT3 = replace(cost.PUBLISHED["GPT-3 175B"], vocab_size=50304)
GPT2 = ModelConfig("gpt", 50304, 1024, 12, 768, 12, 12, 3072)
MODELS = {  # sequence length and global batch
    "GPT-2 124M": (GPT2, 1024, 512),
    "Llama 1B": (cost.PUBLISHED["Llama 3.2 1B"], 8192, 512),
    "Llama 8B": (LLAMA_8B, 8192, 512),
    "Llama 70B": (cost.PUBLISHED["Llama 3.1 70B"], 8192, 1024),
    "GPT-3 175B": (GPT3, 2048, 1536),
}
GPUS = (1, 8, 64, 1024)
TOO_LARGE = {
    ("Llama 8B", 1),
    ("Llama 70B", 1),
    ("Llama 70B", 8),
    ("GPT-3 175B", 1),
    ("GPT-3 175B", 8),
}
AT_MOST = 1.1
"""Times the seconds of the fastest layout."""
OFF_THE_PATH = {("GPT-3 175B", 1024): 1.11}
"""tp 4 with stages is faster, but the tree fills a node with tp before it tries a stage."""


def job_of(name, num_gpus):
    model, length, batch = MODELS[name]
    return Job(model, num_gpus, H100, length, batch)


def held(job, decision):
    return sum(memory_of(job, decision).values())


def seconds(job, decision):
    return estimate(job, decision).seconds


@cache
def all_that_fit(job):
    """By brute force: every (tp, pp, zero, recompute, micro-batch size) that fits; its seconds."""
    found = {}
    divisors = [n for n in range(1, job.num_gpus + 1) if job.num_gpus % n == 0]
    for tp, pp in product(divisors, repeat=2):
        dp, rest = divmod(job.num_gpus, tp * pp)
        if rest or dp > job.global_batch_size or pp > job.model.num_layers:
            continue
        last_stage = 0 if dp == 1 else 3 if pp == 1 else 1
        kinds = product(range(last_stage + 1), get_args(cost.RecomputeKind), (1, 2, 4, 8, 16, 32))
        for zero, recompute, size in kinds:
            if size * dp > job.global_batch_size:
                continue
            layout = ParallelConfig(dp=dp, tp=tp, sequence=tp > 1, pp=pp, zero=zero)
            decision = Decision(layout, recompute, size)
            try:
                if held(job, decision) <= job.limit:
                    found[decision] = seconds(job, decision)
            except ConfigError:  # does not divide
                break
    return found


@pytest.mark.parametrize(
    ("name", "num_gpus"),
    tiered([case for case in product(MODELS, GPUS) if case not in TOO_LARGE], keep=4),
)
def test_the_tree_is_close_to_the_best_of_all(name, num_gpus):
    job = job_of(name, num_gpus)
    decision = decide(job)
    axes = decision.parallel
    assert axes.tp * axes.pp * axes.dp == num_gpus
    assert axes.tp <= job.gpus_per_node
    assert held(job, decision) <= 0.8 * job.device.memory_bytes
    at_most = OFF_THE_PATH.get((name, num_gpus), AT_MOST)
    assert seconds(job, decision) <= at_most * min(all_that_fit(job).values())


@pytest.mark.parametrize(("name", "num_gpus"), sorted(TOO_LARGE))
def test_what_fits_nowhere_is_refused_with_a_remedy(name, num_gpus):
    job = job_of(name, num_gpus)
    assert not all_that_fit(job)
    with pytest.raises(ConfigError) as refusal:
        decide(job)
    message = str(refusal.value)
    assert "\n" not in message and f"each of {num_gpus} GPUs" in message and "68 GB" in message
    needed = int(re.search(r"take about (\d+) GPUs$", message)[1])
    assert needed > num_gpus
    enough = 2 ** needed.bit_length()
    assert decide(replace(job, num_gpus=enough)).steps, "the remedy helps"


# What is asked


def test_the_steps_of_llama_8b_on_a_node():
    steps = decide(job_of("Llama 8B", 8)).steps
    assert steps[0] == "the training state: 16 B x 8.03 G = 128.5 GB; a GPU holds 68 GB"
    for step in steps[1:]:
        assert re.search(r"does it fit\? [\d.]+ GB (<=|>) 68 GB: (yes|no)", step), step
    assert [step.rpartition(" ")[2] for step in steps[2:]] == ["yes", "no"]
    first = re.search(r"; ([\d.]+) s a step$", steps[1])[1]
    compared = [re.search(r"faster\? ([\d.]+) s (<|>=) ([\d.]+) s", step) for step in steps[2:]]
    assert compared[0][3] == first, "what is compared with has been said before"
    assert compared[1][3] == compared[0][1]


def test_a_layout_says_all_that_the_memory_depends_on():
    layout = ParallelConfig(dp=4, tp=2, zero=3)
    assert str(Decision(layout)) == "tp 2, pp 1, dp 4, ZeRO-3"
    assert (
        str(Decision(layout, "full", 2))
        == "tp 2, pp 1, dp 4, ZeRO-3, recomputed, 2 sequences at once"
    )
    kinds = {str(Decision(layout, kind)) for kind in get_args(cost.RecomputeKind)}
    assert len(kinds) == len(get_args(cost.RecomputeKind))


def test_nodes_of_one_gpu_are_left_by_tensor_parallelism_only_if_nothing_else_fits():
    wide = replace(LLAMA_8B, num_layers=1, width=16384, num_heads=128, ffn_width=65536)
    alone = Job(wide, 4, H100, 8192, global_batch_size=1, gpus_per_node=1)
    assert all(layout.parallel.tp > 1 for layout in all_that_fit(alone))
    assert decide(alone).parallel.tp > 1

    shared = replace(alone, model=LLAMA_8B, num_gpus=8, global_batch_size=64)
    assert decide(shared).parallel.tp == 1
    sends_most_along_dp = Job(replace(GPT2, num_layers=1), 8, H100, 64, 8, gpus_per_node=1)
    best = min(all_that_fit(sends_most_along_dp).items(), key=lambda item: item[1])[0]
    assert best.parallel.tp > 1 and decide(sends_most_along_dp).parallel.tp == 1


def test_groups_of_tensor_parallelism_do_not_span_nodes():
    """12 heads, 1536 tokens: in 3, 6 or 12 parts they divide, but a node of 8 does not."""
    job = Job(GPT2, 24, H100, 1536, 512)
    assert [t for t, p in cuts(job) if p == 1] == [1, 2, 4]


def test_a_batch_smaller_than_the_copies_is_refused():
    job = Job(GPT2, 1024, H100, 1024, global_batch_size=4)
    with pytest.raises(ConfigError, match="1024 GPUs hold at least .* copies .* 4 sequences"):
        decide(job)


def test_micro_batches_are_as_large_as_fits_except_in_a_pipeline():
    job = job_of("GPT-2 124M", 8)
    decision = decide(job)
    assert decision.micro_batch_size == 64 and decision.num_micro_batches(job) == 1
    assert held(replace(job, num_gpus=1), replace(decision, micro_batch_size=128)) > job.limit
    assert decide(replace(job, global_batch_size=48)).micro_batch_size == 2, "6 sequences are 3 x 2"
    large = job_of("GPT-3 175B", 512)
    stages = decide(large)
    assert stages.parallel.pp > 1 and stages.micro_batch_size == 1
    assert held(large, replace(stages, micro_batch_size=2)) <= large.limit
