"""The decision tree against the cost model: every layout there is, timed and weighed."""

import re
from dataclasses import replace
from functools import cache
from itertools import product
from typing import get_args

import pytest

from minitron import cost
from minitron.config import ConfigError, ModelConfig, ParallelConfig
from minitron.cost.compute import published_llama
from minitron.plan.decide import (
    Decision,
    Job,
    cuts,
    decide,
    link,
    link_of,
    memory_of,
    step_seconds,
)
from minitron.plan.hardware import DEVICES

H100, A100 = DEVICES["H100-SXM-80GB"], DEVICES["A100-SXM-80GB"]
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
TOO_LARGE = {("Llama 8B", 1), ("Llama 70B", 1), ("Llama 70B", 8), ("GPT-3 175B", 1),
             ("GPT-3 175B", 8)}
AT_MOST = 1.1
"""Times the seconds of the fastest layout."""
SHORT_OF_WORK = {("GPT-2 124M", 1024): 1.2}
"""More GPUs than sequences: a step of a few milliseconds, most of them latency."""


def job_of(name, num_gpus):
    model, length, batch = MODELS[name]
    return Job(model, num_gpus, H100, length, batch)


def held(job, decision):
    return sum(memory_of(job, decision).values())


def seconds(job, decision):
    return sum(step_seconds(job, decision).values())


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


@pytest.mark.parametrize(("name", "num_gpus"), [
    case for case in product(MODELS, GPUS) if case not in TOO_LARGE])
def test_the_tree_is_close_to_the_best_of_all(name, num_gpus):
    job = job_of(name, num_gpus)
    decision = decide(job)
    axes = decision.parallel
    assert axes.tp * axes.pp * axes.dp == num_gpus
    assert axes.tp <= job.gpus_per_node
    assert held(job, decision) <= 0.8 * 80e9
    at_most = SHORT_OF_WORK.get((name, num_gpus), AT_MOST)
    assert seconds(job, decision) <= at_most * min(all_that_fit(job).values())


@pytest.mark.parametrize(("name", "num_gpus"), sorted(TOO_LARGE))
def test_what_fits_nowhere_is_refused_with_a_remedy(name, num_gpus):
    job = job_of(name, num_gpus)
    assert not all_that_fit(job)
    with pytest.raises(ConfigError) as refusal:
        decide(job)
    message = str(refusal.value)
    assert "\n" not in message and f"each of {num_gpus} GPUs" in message and "64 GB" in message
    needed = int(re.search(r"take about (\d+) GPUs$", message)[1])
    assert needed > num_gpus
    enough = 2 ** needed.bit_length()
    assert decide(replace(job, num_gpus=enough)).steps, "the remedy helps"


# What is asked


def test_the_steps_of_llama_8b_on_a_node():
    steps = decide(job_of("Llama 8B", 8)).steps
    assert steps[0] == "the training state: 16 B x 8.03 G = 128.5 GB; a GPU holds 64 GB"
    for step in steps[1:]:
        assert re.search(r"does it fit\? [\d.]+ GB (<=|>) 64 GB: (yes|no)", step), step
    assert [step.rpartition(" ")[2] for step in steps[2:]] == ["yes", "no"]
    first = re.search(r"; ([\d.]+) s a step$", steps[1])[1]
    compared = [re.search(r"faster\? ([\d.]+) s (<|>=) ([\d.]+) s", step) for step in steps[2:]]
    assert compared[0][3] == first, "what is compared with has been said before"
    assert compared[1][3] == compared[0][1]


def test_a_layout_says_all_that_the_memory_depends_on():
    layout = ParallelConfig(dp=4, tp=2, zero=3)
    assert str(Decision(layout)) == "tp 2, pp 1, dp 4, ZeRO 3"
    assert str(Decision(layout, "full", 2)) == \
        "tp 2, pp 1, dp 4, ZeRO 3, recomputed, 2 sequences at once"
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


def test_groups_of_tensor_parallelism_do_not_straddle_nodes():
    """12 heads, 1536 tokens: in 3, 6 or 12 parts they divide, but a node of 8 does not."""
    job = Job(GPT2, 24, H100, 1536, 512)
    assert [t for t, p in cuts(job) if p == 1] == [1, 2, 4]


def test_a_batch_smaller_than_the_copies_is_refused():
    job = Job(GPT2, 1024, H100, 1024, global_batch_size=4)
    with pytest.raises(ConfigError, match="1024 GPUs are at least .* copies .* 4 sequences"):
        decide(job)


def test_micro_batches_are_as_large_as_fits_except_in_a_pipeline():
    job = job_of("GPT-2 124M", 8)
    decision = decide(job)
    assert decision.micro_batch_size == 64 and decision.num_micro_batches(job) == 1
    assert held(replace(job, num_gpus=1), replace(decision, micro_batch_size=128)) > job.limit
    assert decide(replace(job, global_batch_size=48)).micro_batch_size == 2, "6 sequences are 3 x 2"
    large = job_of("GPT-3 175B", 1024)
    stages = decide(large)
    assert stages.parallel.pp > 1 and stages.micro_batch_size == 1
    assert held(large, replace(stages, micro_batch_size=2)) <= large.limit


# What it costs, by hand


def test_what_lives_for_a_moment():
    """The loss's two gradients; a replayed block, if larger; in stage 3 the root and two blocks."""
    job, S = job_of("Llama 8B", 8), 8192

    def temporary(precision="bf16", model=LLAMA_8B, recompute="none", **sizes):
        layout = Decision(ParallelConfig(**sizes), recompute)
        return memory_of(replace(job, model=model, precision=precision), layout)["temporary"]

    loss = 2 * 4 * S * 128256
    assert temporary(dp=8) == loss and temporary(dp=4, tp=2, sequence=True) == loss / 2
    block = cost.num_block_parameters(LLAMA_8B)
    assert temporary(dp=8, zero=3) == loss + 2 * 2 * (2 * 128256 * 4096 + 4096 + 2 * block)
    weights = cost.num_parameters(LLAMA_8B)
    assert temporary("bf16-autocast", dp=8) == loss + 2 * weights, "16-bit copies"

    few_words = replace(LLAMA_8B, vocab_size=1024)
    replayed = cost.activation_bytes_per_layer(few_words, 1, S)
    assert temporary(model=few_words, recompute="full", dp=8) == replayed > 2 * 4 * S * 1024


def test_state_of_llama_8b_by_stage():
    """8.03e9 parameters on 8 GPUs: 16; 4 + 12/8; 2 + 14/8; 16/8 bytes each."""
    job, P = job_of("Llama 8B", 8), cost.num_parameters(LLAMA_8B)
    for zero, each in ((0, 16), (1, 4 + 12 / 8), (2, 2 + 14 / 8), (3, 16 / 8)):
        memory = memory_of(job, Decision(ParallelConfig(dp=8, zero=zero)))
        state = memory["parameter"] + memory["gradient"] + memory["optimizer state"]
        assert state == pytest.approx(each * P, rel=1e-6)
    assert memory["parameter"] == 0, "in stage 3 the float32 masters are all that is kept"


def test_a_pipelines_first_stage_holds_as_many_micro_batches_as_there_are_stages():
    job = Job(GPT3, 64, H100, 2048, 1536)
    layer = cost.activation_bytes_per_layer(GPT3, 1, 2048, layout=cost.Layout(8, True))
    memory = memory_of(job, Decision(ParallelConfig(dp=1, tp=8, sequence=True, pp=8)))
    assert memory["activation"] == pytest.approx(96 * layer, rel=0.05)
    assert memory["parameter"] == pytest.approx(2 * cost.num_parameters(GPT3) / 64, rel=0.05)


def test_links_of_a_grid_of_nodes():
    job = Job(GPT3, 1024, H100, 2048, 1536)

    def bandwidth(axis, **sizes):
        return link_of(job, ParallelConfig(**sizes), axis).bandwidth / 1e9

    sizes = {"tp": 8, "pp": 8, "dp": 16}
    assert bandwidth("tp", **sizes) == 450
    assert bandwidth("dp", **sizes) == 50, "one rank of the group in a node: one card"
    assert bandwidth("pp", **sizes) == 50
    assert bandwidth("dp", dp=1024) == 400, "eight rings through eight cards"
    assert bandwidth("dp", dp=512, tp=2) == 200
    assert bandwidth("tp", tp=16, dp=64) == 400
    assert bandwidth("dp", dp=4, tp=2, pp=128) == 450
    assert bandwidth("pp", dp=1, tp=2, pp=2) == 450
    assert bandwidth("pp", dp=4, pp=4) == 50, "a stage sends to one other, through its own card"


def test_latency_of_a_ring_is_the_mean_of_its_hops():
    """NCCL: of the 1,023 hops of 1,024 ranks on 128 nodes 127 are between nodes."""
    job = Job(GPT3, 1024, H100, 2048, 1536)
    hops = 1023 * link(job, size=1024, stride=1).latency
    assert hops == pytest.approx(127 * 14.0e-6 + 896 * 3.4e-6)
    assert link(job, size=16, stride=8).latency == pytest.approx(14.0e-6), "one rank in each node"
    assert link(job, size=8, stride=1).latency == pytest.approx(3.4e-6)
    assert link(job, size=4, stride=4, is_ring=False).latency == pytest.approx(14.0e-6)


def test_axes_in_another_order_reach_other_links():
    """tp 8 as the middle axis of dp, tp, pp = 8, 8, 4: two of its ranks in a node, two cards."""
    job = Job(GPT3, 256, H100, 2048, 1536)
    assert link(job, size=8, stride=4).bandwidth == 2 * 50e9
    assert link(job, size=8, stride=8).bandwidth == link(job, size=8, stride=32).bandwidth == 50e9
    assert link(job, size=8, stride=1).bandwidth == 450e9


def test_seconds_of_a_layer_by_hand():
    """GPT-3 with tp 8: 8 gathers and scatters a block, of which 7 eighths cross each link."""
    job = Job(GPT3, 8, H100, 2048, 1)
    parts = step_seconds(job, Decision(ParallelConfig(dp=1, tp=8, sequence=True)))
    each = 7 * 3.4e-6 + 7 / 8 * 2048 * 12288 * 2 / 450e9
    assert parts["tp"] == pytest.approx((96 + 0.5) * 8 * each)
    flops = 2048 * cost.training_flops_per_token(GPT3, 2048)
    assert parts["compute"] == pytest.approx(flops / 8 / (0.5 * 989.4e12))
    assert parts["bubble"] == parts["pp"] == parts["dp"] == 0


def test_seconds_of_data_parallelism_by_hand():
    """Llama 8B on 8 nodes, 2 micro-batches: a rank sends 63/64 of the bytes through 8 cards."""
    P, blocks = cost.num_parameters(LLAMA_8B), 32
    short, long = (Job(LLAMA_8B, 64, H100, S, global_batch_size=128) for S in (64, 8192))
    hops = 7 * 14.0e-6 + 56 * 3.4e-6  # from node to node, and inside of nodes
    one = 63 / 64 * 2 * P / 400e9 + hops  # a reduce-scatter or all-gather of all
    units = one + blocks * hops  # of each block, and of what is outside of blocks

    def waiting(job, zero):
        parts = step_seconds(job, Decision(ParallelConfig(dp=64, zero=zero)))
        return parts["dp"], parts["compute"] / 2

    _, compute = waiting(short, 0)
    for zero, seconds in ((0, 2 * one - compute * 2 / 3), (1, 2 * one),
                          (2, one + 2 * (one - compute * 2 / 3)), (3, 2 * (3 * units - compute))):
        assert waiting(short, zero)[0] == pytest.approx(seconds), zero
    assert [waiting(long, zero)[0] for zero in range(4)] == pytest.approx([0, 2 * one, one, 0])

    pipeline = step_seconds(long, Decision(ParallelConfig(dp=32, pp=2)))
    assert pipeline["dp"] > 0, "gradients are whole until all micro-batches are through"


def test_bubble_and_recomputation():
    job = Job(GPT3, 64, H100, 2048, 96)
    whole = Decision(ParallelConfig(dp=1, tp=8, sequence=True, pp=8))
    parts = step_seconds(job, whole)
    work = parts["compute"] + parts["tp"] + parts["pp"]
    assert parts["bubble"] == pytest.approx(7 / 96 * work)
    message = 14.0e-6 + 2048 / 8 * 12288 * 2 / 50e9  # of a rank's own tokens
    assert parts["pp"] == pytest.approx(96 * 2 * message)
    again = step_seconds(job, replace(whole, recompute="full"))
    assert again["compute"] / parts["compute"] == pytest.approx(4 / 3, rel=0.01)
    assert again["tp"] / parts["tp"] == pytest.approx(3 / 2)


PUBLISHED_RUNS = [  # heads, width, layers, tp, pp, dp, global and micro-batch, chunks, seconds
    (24, 2304, 24, 1, 1, 32, 512, 16, 1, 3.53),  # 1.7B
    (32, 4096, 36, 4, 1, 32, 512, 16, 1, 3.70),  # 7.5B
    (64, 8192, 48, 8, 2, 32, 1536, 4, 1, 14.45),  # 39.1B
    (96, 12288, 80, 8, 8, 24, 2304, 2, 2, 24.82),  # 145.6B
]
"""Narayanan et al. 2021, table 1, on A100s, all recomputed; seconds by its equation 3 from the
table's FLOP/s, micro-batches and chunks from Megatron-LM's examples/academic_paper_scripts/sc21."""


@pytest.mark.parametrize("row", PUBLISHED_RUNS, ids=lambda row: f"width {row[1]}")
def test_published_steps_are_met_within_a_fifth(row):
    heads, width, layers, tp, pp, dp, batch, size, chunks, published = row
    model = ModelConfig("gpt", 51200, 2048, layers, width, heads, heads, 4 * width)
    job = Job(model, tp * pp * dp, A100, 2048, batch)
    parts = step_seconds(job, Decision(ParallelConfig(dp=dp, tp=tp, pp=pp), "full", size))
    predicted = sum(parts.values()) - parts["bubble"] * (1 - 1 / chunks)
    assert predicted == pytest.approx(published, rel=0.2)
