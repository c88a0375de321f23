"""Seconds that ranks wait for each other: along tp in the layers, along pp between stages, along dp
once a step.

Inside a node a ring runs over its links. Between nodes it runs through every network card of a
node that has a rank of the group, and each of its steps costs the network's latency.

Read in this order: link_of, layer_seconds, host_seconds, message_seconds, data_seconds.
Reference: Thakur, Rabenseifner & Gropp 2005 (rings under the alpha-beta model); Narayanan et al.
2021, section 3 (what is sent when).
"""

from dataclasses import replace

from minitron import cost
from minitron.config import ParallelConfig
from minitron.plan.decide import Decision, Job
from minitron.plan.systems import System
from minitron.precision import PRECISIONS

ROUNDS = {"all_reduce": 2, "all_gather": 1, "reduce_scatter": 1}
"""Of a ring, each once past all ranks."""


def link_of(job: Job, parallel: ParallelConfig, axis: str) -> cost.Link:
    """What a group along `axis` sends through, in the grid that `parallelize.lay_out` makes."""
    stride = {"tp": 1, "dp": parallel.tp, "pp": parallel.tp * parallel.dp}[axis]
    size, device = getattr(parallel, axis), job.device
    inside = device.nvlink_share * device.nvlink_bandwidth
    together = max(1, min(size, job.gpus_per_node // stride))
    if together == size:
        return cost.Link(device.nvlink_latency, inside)
    cards = 1 if axis == "pp" else together  # a stage sends to one other
    between = cards * device.nic_share * device.nic_bandwidth
    return cost.Link(device.nic_latency, min(between, inside))


# In the layers


def layer_seconds(job: Job, decision: Decision, num_bytes: float) -> dict[str, float]:
    """Seconds that a block waits for its collectives of `num_bytes` along tp, by phase."""
    tp = decision.parallel.tp
    if tp == 1:
        return {"forward": 0.0, "backward": 0.0}
    link = link_of(job, decision.parallel, "tp")
    # What is gathered again travels while the backward pass computes
    calls = cost.tensor_parallel_calls(replace(decision.layout, regather=False))
    return with_replay(decision, {
        phase: sum(count * cost.collective_seconds(op, num_bytes, tp, *link)
                   for op, count in counts.items())
        for phase, counts in calls.items()
    })


def host_seconds(job: Job, decision: Decision, each: float) -> dict[str, float]:
    """Seconds that hosts take for the same, `each` for a collective and rank, by phase."""
    parallel = decision.parallel
    if parallel.tp == 1:
        return {"forward": 0.0, "backward": 0.0}
    if parallel.pp > 1 and job.num_gpus > job.gpus_per_node:
        each = max(each, job.device.proxy_latency)
    return with_replay(decision, {
        phase: parallel.tp * each * sum(ROUNDS[op] * count for op, count in counts.items())
        for phase, counts in cost.tensor_parallel_calls(decision.layout).items()
    })


def with_replay(decision: Decision, seconds: dict[str, float]) -> dict[str, float]:
    """The backward pass has the forward pass's collectives too if it computes all again."""
    if decision.recompute != "full":
        return seconds
    return seconds | {"backward": seconds["forward"] + seconds["backward"]}


# Between stages


def message_seconds(job: Job, decision: Decision, system: System, num_bytes: float) -> float:
    """Seconds that a rank's stages take to send `num_bytes` each to the next one."""
    parallel = decision.parallel
    if parallel.pp == 1:
        return 0.0
    parts = parallel.tp if parallel.sequence or system.scatters_messages else 1
    link = link_of(job, parallel, "pp")
    return parallel.chunks * cost.message_seconds(num_bytes / parts, *link)


# Once a step


def data_seconds(
    job: Job, decision: Decision, system: System, num_elements: int, forward: float,
    backward: float,
) -> float:
    """Seconds of a step that a rank waits along dp for its `num_elements` gradients and weights.

    `forward` and `backward` are those of a micro-batch. Stages 0 and 2 send gradients during the
    backward pass, except in a pipeline; stage 3 sends all while it computes, stage 1 all at the end
    of a step.
    """
    parallel, precision = decision.parallel, PRECISIONS[job.precision]
    m, link = decision.num_micro_batches(job), link_of(job, parallel, "dp")
    if parallel.dp == 1:
        return 0.0

    def seconds(op: str, dtype, num_messages: int = 1) -> float:
        each = num_elements * dtype.itemsize / num_messages
        return num_messages * cost.collective_seconds(op, each, parallel.dp, *link)

    reductions = m if parallel.zero >= 2 and parallel.sync_every_micro_batch else 1
    if parallel.zero == 3:
        num_units = job.model.num_layers + 1
        gather = seconds("all_gather", precision.activations, num_units)
        reduce = seconds("reduce_scatter", precision.reduction, num_units) * reductions / m
        return m * (max(0, gather - forward) + max(0, gather + reduce - backward))

    reduce = seconds("reduce_scatter", precision.reduction)
    gather = seconds("all_gather", precision.parameters if parallel.zero else precision.reduction)
    if system.hides_data:
        return max(0, reduce - backward) + max(0, gather - forward)
    hides = parallel.zero != 1 and parallel.pp == 1 and parallel.data_parallel != "naive"
    hidden = backward if hides else 0
    if parallel.zero == 0:
        return max(0, reduce + gather - hidden)
    return gather + reductions * max(0, reduce - hidden)
