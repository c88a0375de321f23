"""Seconds that ranks wait for each other: along tp in the layers, along pp between stages, along dp
once a step.

Inside a node a ring runs over its links. Between nodes it runs through every network card of a
node that has a rank of the group, and each of its steps costs the network's latency.

What travels while the device computes is not free: it lengthens the computation by a share of its
own time, `Rates.overlap`.

Read in this order: link_of, link, layer_seconds, host_seconds, message_seconds, data_seconds.
Reference: Thakur, Rabenseifner & Gropp 2005 (rings under the alpha-beta model); Narayanan et al.
2021, section 3 (what is sent when).
"""

import math
from dataclasses import replace

from minitron import cost
from minitron.config import ParallelConfig
from minitron.cost.precision import PRECISIONS
from minitron.plan.job import Decision, Job
from minitron.plan.systems import System

ROUNDS = {"all_reduce": 2, "all_gather": 1, "reduce_scatter": 1}
"""Of a ring, each once past all ranks."""


def link_of(job: Job, parallel: ParallelConfig, axis: str) -> cost.Link:
    """Return the link of a group along `axis`, in the grid that `parallelize.lay_out` makes."""
    tp, num_shards = parallel.tp, parallel.dp // parallel.replicas
    size, stride = {
        "tp": (tp, 1),
        "dp": (num_shards, tp),
        "replicas": (parallel.replicas, tp * num_shards),
        "pp": (parallel.pp, tp * parallel.dp),
    }[axis]
    return link(job, size, stride, is_ring=axis != "pp")


def link(job: Job, size: int, stride: int, is_ring: bool = True) -> cost.Link:
    """Return the link of `size` ranks, each `stride` after the one before.

    Between nodes a ring runs through as many network cards as it has ranks in a node; a stage of a
    pipeline sends to one other rank, through one. Every hop of such a ring takes a network card's
    latency, also those inside nodes: so the measured rings of hardware.csv count theirs. NCCL's own
    model takes the mean of both kinds (src/graph/tuning.cc: nInterSteps), and those rings were
    slower than that.
    """
    device, together = job.device, max(1, min(size, job.gpus_per_node // stride))
    inside = device.nvlink_share * device.nvlink_bandwidth
    if together == size:
        return cost.Link(device.nvlink_latency, inside)
    cards = together if is_ring else 1
    between = cards * device.nic_share * device.nic_bandwidth
    return cost.Link(device.nic_latency, min(between, inside))


# In the layers


def layer_seconds(
    job: Job, decision: Decision, system: System, num_bytes: float, overlap: float
) -> dict[str, float]:
    """Return by how many seconds tp's collectives of `num_bytes` lengthen a block, by phase.

    What is gathered again travels while the backward pass computes; all may, in some systems.
    """
    tp = decision.parallel.tp
    if tp == 1:
        return {"forward": 0.0, "backward": 0.0}
    link = link_of(job, decision.parallel, "tp")

    def travel(layout: cost.Layout) -> dict[str, float]:
        return {
            phase: sum(
                count * cost.collective_seconds(op, num_bytes, tp, *link)
                for op, count in counts.items()
            )
            for phase, counts in cost.tensor_parallel_calls(layout).items()
        }

    every = travel(decision.layout)
    waits = travel(replace(decision.layout, regather=False))
    alone = 0 if system.hides_tensor else 1 - overlap
    return with_recompute(
        decision, {phase: overlap * every[phase] + alone * waits[phase] for phase in every}
    )


def host_seconds(job: Job, decision: Decision, system: System, kernel: float) -> dict[str, float]:
    """Return the seconds that the hosts take for the same, `kernel` to start one, by phase."""
    parallel = decision.parallel
    if parallel.tp == 1:
        return {"forward": 0.0, "backward": 0.0}
    each = system.host_seconds
    if parallel.pp > 1 and job.num_gpus > job.gpus_per_node:
        each = max(each, system.host_seconds_beside_pipeline)
    return with_recompute(
        decision,
        {
            phase: sum(
                count * (kernel + parallel.tp * ROUNDS[op] * each) for op, count in counts.items()
            )
            for phase, counts in cost.tensor_parallel_calls(decision.layout).items()
        },
    )


def with_recompute(decision: Decision, seconds: dict[str, float]) -> dict[str, float]:
    """Add the forward pass's collectives to the backward pass, if that recomputes everything."""
    if decision.recompute != "full":
        return seconds
    return seconds | {"backward": seconds["forward"] + seconds["backward"]}


# Between stages


def message_seconds(job: Job, decision: Decision, system: System, num_bytes: float) -> float:
    """Return the seconds that a rank's stages take to send `num_bytes` each to the next one."""
    parallel = decision.parallel
    if parallel.pp == 1:
        return 0.0
    parts = parallel.tp if parallel.sequence or system.scatters_messages else 1
    link = link_of(job, parallel, "pp")
    return parallel.chunks * cost.message_seconds(num_bytes / parts, *link)


# Once a step


def data_seconds(
    job: Job,
    decision: Decision,
    system: System,
    num_elements: float,
    passes: tuple[float, float],
    overlap: float,
) -> float:
    """Return by how many seconds `num_elements` gradients and weights along dp lengthen a step.

    `passes` are the seconds of a micro-batch forward and backward. Stages 0 to 2 send gradients
    during the backward pass, but not what a pipeline sends once a step; stage 3 sends all while it
    computes. The shards of gradients are then summed over the replicas, in the same time.
    """
    parallel, precision = decision.parallel, PRECISIONS[job.precision]
    link, calls = link_of(job, parallel, "dp"), decision.collectives(job)
    forward, backward = passes
    if parallel.dp == 1:
        return 0.0
    if parallel.zero == 3:
        return shard_seconds(job, decision, system, num_elements, passes, calls, overlap)

    def seconds(op: str, dtype) -> float:
        num_bytes = num_elements * dtype.itemsize
        return cost.collective_seconds(op, num_bytes, decision.num_shards, *link)

    reduce = seconds("reduce_scatter", precision.reduction)
    across = replica_seconds(job, decision, num_elements)
    gather = seconds("all_gather", precision.parameters if parallel.zero else precision.reduction)
    if system.hides_data:
        return exposed_seconds(reduce + across, backward, overlap) + exposed_seconds(
            gather, forward, overlap
        )
    hides = parallel.pp == 1 or calls.reduce_scatters > 1
    if parallel.zero == 0:
        hides = hides and system.overlaps_gradients
    elif parallel.zero == 1:
        hides = hides and not system.reduces_last
    hidden = backward if hides else 0
    if parallel.zero == 0:
        return exposed_seconds(reduce + gather, hidden, overlap)
    num_within = calls.reduce_scatters - calls.all_reduces  # that stay within a replica
    return (
        gather
        + num_within * exposed_seconds(reduce, hidden, overlap)
        + calls.all_reduces * exposed_seconds(reduce + across, hidden, overlap)
    )


def replica_seconds(job: Job, decision: Decision, num_elements: float) -> float:
    """Return the seconds to sum the shards of `num_elements` gradients over the replicas once."""
    parallel, precision = decision.parallel, PRECISIONS[job.precision]
    shard = num_elements * precision.reduction.itemsize / decision.num_shards
    link = link_of(job, parallel, "replicas")
    return cost.collective_seconds("all_reduce", shard, parallel.replicas, *link)


def shard_seconds(
    job: Job,
    decision: Decision,
    system: System,
    num_elements: float,
    passes: tuple[float, float],
    calls: cost.StepCollectives,
    overlap: float,
) -> float:
    """Return the same for stage 3, which gathers and reduces as often as `calls` say.

    A unit's weights are gathered while the one before it computes, its gradients reduced while the
    next one does: the first gather of a forward pass and the last reduction of a backward pass are
    beside nothing, in each stage of a pipeline. There the first gather of a backward pass is too:
    another micro-batch's pass comes before it. Weights that stay unsharded for the step are
    gathered by its first forward pass.
    """
    parallel, precision, (forward, backward) = decision.parallel, PRECISIONS[job.precision], passes
    m, link = decision.num_micro_batches(job), link_of(job, parallel, "dp")
    per_block = 1 if system.shards_ahead else 4 if job.model.family == "gpt" else 7  # matrices
    num_units = per_block * math.ceil(job.model.num_layers / parallel.pp) + 1

    def unit(op: str, dtype) -> float:
        each = num_elements * dtype.itemsize / num_units
        return cost.collective_seconds(op, each, decision.num_shards, *link)

    gather = unit("all_gather", precision.activations)
    reduce = unit("reduce_scatter", precision.reduction) * calls.reduce_scatters / m
    reduce += replica_seconds(job, decision, num_elements / num_units) * calls.all_reduces / m
    if not system.shards_ahead:
        gathers = 3 if decision.recompute == "full" else 2
        return m * num_units * (gathers * gather + reduce)
    gather_forward = gather * min(1, calls.all_gathers / m)
    gather_backward = gather * max(0, calls.all_gathers / m - 1)
    first = parallel.chunks  # units: one of each stage
    alone = first * (gather_forward + reduce + gather_backward * (parallel.pp > 1))
    others = num_units - first
    again = (num_units if parallel.pp == 1 else others) * gather_backward
    return m * (
        alone
        + exposed_seconds(others * gather_forward, forward, overlap)
        + exposed_seconds(again + others * reduce, backward, overlap)
    )


def exposed_seconds(travels: float, computes: float, overlap: float) -> float:
    """Return by how many seconds what `travels` lengthens what `computes` meanwhile."""
    return max(0.0, travels - computes) + overlap * min(travels, computes)
