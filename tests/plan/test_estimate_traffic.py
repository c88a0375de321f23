"""What travels between ranks, beside computation or alone, and what their hosts take for it."""

import statistics
from dataclasses import replace

import pytest

from minitron import cost
from minitron.config import ParallelConfig
from minitron.cost.compute import published_llama
from minitron.plan.estimate import MINITRON, RATES, estimate
from minitron.plan.hardware import DEVICES
from minitron.plan.job import Decision, Job
from minitron.plan.published import (
    EFA,
    MEGATRON,
    MEGATRON_CORE,
    NANOTRON,
    error,
    published_rows,
    table,
)
from minitron.plan.systems import System
from minitron.plan.traffic import host_seconds, link, link_of, shard_seconds

H100 = DEVICES["H100-SXM-80GB"]
LLAMA_8B = published_llama(32, 4096, 32, 8, 14336, 128256, 8192)


def job_of(layout, **changes):
    axes = layout.parallel
    return replace(Job(LLAMA_8B, axes.dp * axes.tp * axes.pp, H100, 4096, 256), **changes)


def test_gradients_travel_while_a_bucketed_backward_pass_computes():
    layout = Decision(ParallelConfig(dp=64), "none", 4)
    alone = estimate(job_of(layout), layout, System(overlaps_gradients=False)).parts["dp"]
    num_bytes = 2 * cost.num_parameters(LLAMA_8B)
    ring = 0.7 * 8 * 50e9  # eight cards, but no faster than NVLink inside
    assert alone == pytest.approx(2 * 63 / 64 * num_bytes / min(ring, 249.8e9) + 126 * 14e-6)
    beside = estimate(job_of(layout), layout).parts["dp"]
    assert beside == pytest.approx(0.16 * alone), "the products get slower meanwhile"


@pytest.mark.parametrize("nodes", ["2", "4", "8", "16", "32", "64"])
def test_an_all_gather_takes_as_long_as_somebody_has_measured(nodes):
    """256 MiB along dp, on 16 to 512 GPUs with EFA (Ultra-Scale Playbook): its two numbers are
    fitted to six sizes, from 185 to 11 GB/s."""
    (row,) = (
        row
        for row in table("playbook_comm_bandwidth")
        if (row["collective"], row["nodes"]) == ("all_gather", nodes)
    )
    parallel = ParallelConfig(dp=8 * int(nodes))
    job = Job(LLAMA_8B, parallel.dp, EFA, 4096, parallel.dp)
    seconds = cost.collective_seconds(
        "all_gather", 2**28, parallel.dp, *link_of(job, parallel, "dp")
    )
    bus = 2**28 * (parallel.dp - 1) / parallel.dp / seconds
    assert float(row["mean_gb_s"]) / 2 < bus / 1e9 < 2 * float(row["mean_gb_s"])


def exposed(parallel, micro_batch_size=1):
    """Seconds that nothing hides where the network is next to nothing."""
    slow = replace(H100, nic_bandwidth=1e8)
    layout = Decision(parallel, "none", micro_batch_size)
    return estimate(job_of(layout, device=slow), layout).parts["dp"]


def test_stage_2_sends_gradients_after_each_micro_batch_or_once():
    often, once = (
        ParallelConfig(dp=64, zero=2, sync_every_micro_batch=sync) for sync in (True, False)
    )
    assert exposed(ParallelConfig(dp=64, zero=1)) == pytest.approx(exposed(once), rel=0.1)
    assert exposed(often) == pytest.approx(exposed(once) * 5 / 2, rel=0.1)  # 4 and a gather, of 1


def test_stage_3_gathers_weights_twice_for_each_micro_batch():
    """As many bytes as stage 2 sends once, times 3 for each of 4 micro-batches, of 2."""
    often, once = (
        ParallelConfig(dp=64, zero=3, sync_every_micro_batch=sync) for sync in (True, False)
    )
    whole = exposed(ParallelConfig(dp=64, zero=1))
    assert exposed(often) == pytest.approx(whole * 4 * 3 / 2, rel=0.1)
    assert exposed(once) == pytest.approx(whole * (4 * 2 + 1) / 2, rel=0.1)
    assert exposed(often, 4) == pytest.approx(whole * 3 / 2, rel=0.1)


def test_the_first_gather_and_the_last_reduction_of_stage_3_are_beside_nothing():
    """However long a micro-batch takes; and if it takes no time, all 33 units' messages are."""
    layout = Decision(ParallelConfig(dp=64, zero=3))  # 4 micro-batches
    job = job_of(layout)
    each = [
        cost.collective_seconds(op, 33e9 * 2 / 33, 64, *link_of(job, layout.parallel, "dp"))
        for op in ("all_gather", "reduce_scatter")
    ]

    def alone(seconds, reshards, accumulation):
        calls = cost.step_collectives(3, 4, reshards, accumulation)
        return shard_seconds(job, layout, MINITRON, 33e9, (seconds, seconds), calls, overlap=0)

    assert alone(1e9, True, "sharded") == pytest.approx(4 * sum(each))
    assert alone(0, True, "sharded") == pytest.approx(4 * 33 * (2 * each[0] + each[1]))
    assert alone(1e9, False, "unsharded") == pytest.approx(sum(each)), "once for the step"
    assert alone(0, False, "unsharded") == pytest.approx(33 * sum(each))
    assert alone(0, True, "unsharded") == pytest.approx(33 * (8 * each[0] + each[1]))


def test_a_stage_of_a_pipeline_begins_each_pass_with_a_gather_that_nothing_hides():
    """Two chunks of 16 blocks on each of two ranks: forward, backward, and the last reduction."""
    parallel = ParallelConfig(dp=64, pp=2, zero=3, schedule="interleaved", chunks=2)
    layout = Decision(parallel)
    job = job_of(layout)
    each = [
        cost.collective_seconds(op, 17e9 * 2 / 17, 64, *link_of(job, parallel, "dp"))
        for op in ("all_gather", "reduce_scatter")
    ]

    def alone(seconds, decision):
        return shard_seconds(
            job, decision, MINITRON, 17e9, (seconds, seconds), decision.collectives(job), overlap=0
        )

    assert alone(1e9, layout) == pytest.approx(4 * 2 * (2 * each[0] + each[1]))
    assert alone(0, layout) == pytest.approx(4 * 17 * (2 * each[0] + each[1]))
    kept = Decision(replace(parallel, reshard_each_pass=False))
    assert alone(1e9, kept) == pytest.approx(2 * each[0] + 4 * 2 * each[1])
    assert alone(0, kept) == pytest.approx(17 * (each[0] + 4 * each[1]))


@pytest.mark.parametrize("zero", [1, 2, 3])
def test_shards_travel_inside_nodes_and_their_sums_between_replicas(zero):
    """Of 64 ranks 8 shards each: NVLink carries them, and 8 replicas sum an eighth by the network,
    in as many all-reduces as the formulas of hybrid sharding say."""
    slow = replace(H100, nic_bandwidth=1e8, nvlink_bandwidth=1e15, nvlink_latency=0.0)
    shard = 2 * cost.num_parameters(LLAMA_8B) / 8
    link = cost.Link(H100.nic_latency, slow.nic_share * 1e8)
    often = dict(sync_replicas_every_micro_batch=True) if zero > 1 else {}
    for options, times in (({}, 1), (often, 4 if often else 1)):
        layout = Decision(ParallelConfig(dp=64, zero=zero, replicas=8, **options))
        job = job_of(layout, device=slow)
        assert link_of(job, layout.parallel, "replicas") == link
        assert layout.collectives(job).all_reduces == times
        across = cost.collective_seconds("all_reduce", shard, 8, *link)
        assert estimate(job, layout).parts["dp"] == pytest.approx(times * across, rel=0.05)


def test_a_replica_within_one_node_sends_less_over_the_network_than_shards_over_all():
    whole, hybrid = (
        exposed(ParallelConfig(dp=64, zero=3, replicas=replicas)) for replicas in (1, 8)
    )
    assert hybrid < whole / 5


# Links


def test_links_of_a_grid_of_nodes():
    """Of an H100's 450 and 50 GB/s as much as a collective has reached."""
    job = Job(LLAMA_8B, 1024, replace(H100, nvlink_share=0.5, nic_share=0.6), 4096, 1024)

    def bandwidth(axis, **sizes):
        return link_of(job, ParallelConfig(**sizes), axis).bandwidth / 1e9

    sizes = {"tp": 8, "pp": 8, "dp": 16}
    assert bandwidth("tp", **sizes) == 225
    assert bandwidth("dp", **sizes) == 30, "one rank of the group in a node: one card"
    assert bandwidth("pp", **sizes) == 30
    assert bandwidth("dp", dp=512, tp=2) == 120, "four rings through four cards"
    assert bandwidth("dp", dp=1024) == bandwidth("tp", tp=16, dp=64) == 225, "8 x 30, but NVLink"
    assert bandwidth("dp", dp=4, tp=2, pp=128) == 225
    assert bandwidth("pp", dp=1, tp=2, pp=2) == 225
    assert bandwidth("pp", dp=4, pp=4) == 30, "a stage sends to one other, through its own card"


def test_axes_in_another_order_reach_other_links():
    """tp 8 as the middle axis of dp, tp, pp = 8, 8, 4: two of its ranks in a node, two cards."""
    job = Job(LLAMA_8B, 256, replace(H100, nvlink_share=1.0, nic_share=1.0), 2048, 1536)
    assert link(job, size=8, stride=4).bandwidth == 2 * 50e9
    assert link(job, size=8, stride=8).bandwidth == link(job, size=8, stride=32).bandwidth == 50e9
    assert link(job, size=8, stride=1).bandwidth == 450e9


def test_latency_of_a_ring_is_that_of_the_network_once_it_leaves_a_node():
    job = Job(LLAMA_8B, 1024, H100, 2048, 1536)
    assert link(job, size=1024, stride=1).latency == H100.nic_latency == 14.0e-6
    assert link(job, size=8, stride=1).latency == H100.nvlink_latency == 3.4e-6
    assert link(job, size=4, stride=4, is_ring=False).latency == H100.nic_latency


def test_seconds_of_a_layer_by_hand():
    """Llama 8B, tp 8: 8 gathers and scatters a block, of which 7 eighths cross each link.

    Two more gathers travel while the backward pass computes, and lengthen it by 16 %.
    """
    layout = Decision(ParallelConfig(dp=1, tp=8, sequence=True))
    parts = estimate(job_of(layout, global_batch_size=1), layout).parts
    bandwidth = H100.nvlink_share * 450e9
    each = 7 * 3.4e-6 + 7 / 8 * 4096 * 4096 * 2 / bandwidth
    assert parts["tp"] == pytest.approx((32 + 0.5) * (8 + 0.16 * 2) * each)
    assert parts["bubble"] == parts["pp"] == parts["dp"] == 0


def test_a_message_between_stages_by_hand():
    """Of a rank's own tokens, forward and back, for each of 256 micro-batches."""
    layout = Decision(ParallelConfig(dp=1, tp=8, sequence=True, pp=8))
    parts = estimate(job_of(layout), layout).parts
    message = 14.0e-6 + 4096 / 8 * 4096 * 2 / (H100.nic_share * 50e9)
    assert parts["pp"] == pytest.approx(256 * 2 * message)


# Hosts


def test_small_micro_batches_wait_for_the_hosts():
    """One that starts kernels, and collectives as well, is busy as long with any shape."""
    small = Decision(ParallelConfig(dp=1, tp=8, sequence=True))
    job = Job(replace(LLAMA_8B, width=1024), 8, H100, 512, 8)
    step = estimate(job, small)
    assert step.parts["host"] > 0.5 * step.seconds
    shorter = estimate(replace(job, sequence_length=256), small)
    assert shorter.seconds == pytest.approx(step.seconds, rel=0.1)
    slow = estimate(job, small, rates=replace(RATES, kernel=2 * RATES.kernel))
    assert slow.seconds == pytest.approx(2 * step.seconds, rel=0.1)


def test_a_host_starts_a_collective_as_it_starts_a_kernel():
    """Of a block: two gathers and two scatters forward, the same and two gathers again backward."""
    cut, whole = (Decision(ParallelConfig(dp=1, tp=tp, sequence=tp > 1)) for tp in (8, 1))
    assert host_seconds(job_of(cut), cut, MINITRON, 1.0) == {"forward": 4, "backward": 6}
    assert host_seconds(job_of(whole), whole, MINITRON, 1.0) == {"forward": 0, "backward": 0}


def test_nobody_but_nanotron_has_hosts_that_take_long():
    """Its 176 rows show them: without, the median error is more than three times as large."""
    assert MINITRON.host_seconds == MINITRON.host_seconds_beside_pipeline == 0
    assert MEGATRON.host_seconds == MEGATRON_CORE.host_seconds == 0
    rows = [row for row in published_rows() if row.system == NANOTRON]
    alike = replace(NANOTRON, host_seconds=0, host_seconds_beside_pipeline=0)
    median = statistics.median(
        abs(error(row.predict(system=alike).seconds, row.seconds)) for row in rows
    )
    assert 0.2 < median < 0.3
