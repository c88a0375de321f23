"""Which layout for a model on so many GPUs: a decision tree that asks the cost model.

The tree cuts the model as little as it can: not at all, then layers over the GPUs of a node, then
stages over nodes. Of each cut it asks: what must be divided or recomputed so that it fits? And is a
step faster than with the cut before?

A step's seconds are those of its FLOPs at a stated share of the peak, and of the communication
that nothing hides. Small kernels run as fast as large ones, and nobody else uses the network: good
enough to tell layouts apart, not to promise a time. What could travel while a rank computes is
free here; of ZeRO-3 with one sequence a GPU it was not (Narayanan et al. 2021, table 2).

Read in this order: job.py; decide, remedy, memory_of, step_seconds, link.
Reference: Narayanan et al. 2021, section 3 (takeaways 1 to 3).
"""

import math
from dataclasses import replace

from minitron import cost
from minitron.config import ConfigError, ParallelConfig, require
from minitron.config.layout import divisors
from minitron.cost.precision import PRECISIONS
from minitron.cost.sharding import FULLY_SHARDED
from minitron.plan.hardware import NIC_LATENCY, NVLINK_LATENCY
from minitron.plan.job import USABLE, Decision, Job, size_of

__all__ = ["PEAK_SHARE", "USABLE", "Decision", "Job", "decide", "link", "link_of", "memory_of",
           "step_seconds"]

PEAK_SHARE = 0.5
"""Of the dense peak, what a GPU reaches that waits for nobody."""


# The tree


def decide(job: Job) -> Decision:
    """Choose a layout; raises ConfigError if the model fits in none."""
    parameters, each = cost.num_parameters(job.model) / 1e9, PRECISIONS[job.precision].cost.total
    steps = [f"the training state: {each} B x {parameters:.3g} G = {each * parameters:.1f} GB; "
             f"a GPU holds {job.limit / 1e9:.0f} GB"]
    best, fastest, least = None, math.inf, math.inf
    for tp, pp in cuts(job):
        if best is not None and tp > job.gpus_per_node:
            break  # over the network only if nothing else fits
        option = remedy(job, tp, pp)
        held, parts = total_bytes(job, option), step_seconds(job, option)
        least, seconds = min(least, held), sum(parts.values())
        steps.append(f"{option}: does it fit? {compared(held / 1e9, job)}")
        if held > job.limit:
            continue
        answer = "< {:.3g} s: yes" if seconds < fastest else ">= {:.3g} s: no"
        compare = f"; faster? {seconds:.3g} s {answer.format(fastest)}"
        steps[-1] += f"; {seconds:.3g} s a step" if best is None else compare
        if seconds < fastest:
            best, fastest = option, seconds
        elif option.recompute == "none" and parts["dp"] < 0.05 * seconds:
            break  # what a further cut could save is nearly gone

    require(best is not None, f"{size_of(job.model)} parameters need {least / 1e9:.0f} GB on each "
            f"of {job.num_gpus} GPUs, and {job.limit / 1e9:.0f} GB are usable: take about "
            f"{math.ceil(job.num_gpus * least / job.limit)} GPUs")
    return replace(best, steps=tuple(steps))


def compared(gigabytes: float, job: Job) -> str:
    limit = job.limit / 1e9
    answer = f"<= {limit:.0f} GB: yes" if gigabytes <= limit else f"> {limit:.0f} GB: no"
    return f"{gigabytes:.1f} GB {answer}"


def cuts(job: Job) -> list[tuple[int, int]]:
    """Pairs (tp, pp) in the order of the tree; tp beyond a node comes last.

    Raises ConfigError if the global batch has too few sequences for any.
    """
    widths = [t for t in divisors(job.num_gpus) if divides(job, t)]
    widest = max(t for t in widths if t <= job.gpus_per_node)
    path = [(t, 1) for t in widths if t <= widest]
    path += [(widest, p) for p in divisors(job.num_gpus)
             if job.num_gpus // widest % p == 0 and 1 < p <= job.model.num_layers]
    path += [(t, 1) for t in widths if t > widest]

    fewest = job.num_gpus // max(t * p for t, p in path)
    require(fewest <= job.global_batch_size, f"{job.num_gpus} GPUs are at least {fewest} copies of "
            f"the model, for {job.global_batch_size} sequences a step: raise the global batch, or "
            "take fewer GPUs")
    return [(t, p) for t, p in path if job.num_gpus // (t * p) <= job.global_batch_size]


def divides(job: Job, tp: int) -> bool:
    """Whether the model can be cut in `tp` equal parts, and nodes in such groups."""
    try:
        cost.activation_bytes(job.model, 1, job.sequence_length, layout=cost.Layout(tp, tp > 1))
    except ConfigError:
        return False
    node = min(job.gpus_per_node, job.num_gpus)
    return node % tp == 0 or tp % node == 0


def remedy(job: Job, tp: int, pp: int) -> Decision:
    """The first that fits of ZeRO 0, 1, 2, 3, and the same with recomputation; else the last."""
    dp = job.num_gpus // (tp * pp)
    last_stage = 0 if dp == 1 else 3 if pp == 1 else 1
    for recompute in ("none", "full"):
        for zero in range(last_stage + 1):
            parallel = ParallelConfig(dp=dp, tp=tp, sequence=tp > 1, pp=pp, zero=zero)
            option = Decision(parallel, recompute)
            if total_bytes(job, option) <= job.limit:
                return enlarged(job, option)
    return option


def enlarged(job: Job, option: Decision) -> Decision:
    """Double the micro-batches while they fit; a pipeline wants many, and so small ones."""
    larger = replace(option, micro_batch_size=2 * option.micro_batch_size)
    divides_batch = option.num_micro_batches(job) % 2 == 0
    if option.parallel.pp > 1 or not divides_batch or total_bytes(job, larger) > job.limit:
        return option
    return enlarged(job, larger)


# What a layout costs


def total_bytes(job: Job, decision: Decision) -> float:
    return sum(memory_of(job, decision).values())


def memory_of(job: Job, decision: Decision) -> dict[str, float]:
    """Bytes of the rank that holds most, by the meter's kinds, when the backward pass begins.

    Coarse: a rank with most blocks, both ends and most micro-batches under way, which none has.
    `plan.memory.memory_of` is within 5 % of a real step, and what a search asks.
    """
    parallel, part = decision.parallel, decision.part_of(job.model)
    tp, zero, precision = parallel.tp, parallel.zero, PRECISIONS[job.precision]
    num_parameters = cost.tensor_parallel_parameters(part, tp)
    recipe = FULLY_SHARDED if zero == 3 else precision.cost
    state = cost.zero_holdings(num_parameters, parallel.dp, zero, recipe)

    value, m = precision.activations.itemsize, decision.num_micro_batches(job)
    sizes = part, decision.micro_batch_size, job.sequence_length, value
    options = {"recompute": decision.recompute, "layout": decision.layout}
    layers = part.num_layers * cost.activation_bytes_per_layer(*sizes, **options)
    waiting = cost.activations_held("1F1B", parallel.pp, m, rank=0) - 1
    activations = waiting * layers + cost.activation_bytes(*sizes, **options)

    tokens = decision.micro_batch_size * job.sequence_length
    temporary = 2 * 4 * tokens * job.model.vocab_size // tp  # two float32 gradients at the loss
    if decision.recompute == "full":
        replayed = cost.activation_bytes_per_layer(*sizes, layout=decision.layout)
        temporary = max(temporary, replayed)
    if zero == 3:  # the root and two blocks are whole, weights and gradients
        units = replace(job.model, num_layers=min(2, part.num_layers))
        temporary += 2 * value * cost.tensor_parallel_parameters(units, tp)
    elif precision.autocasts:
        temporary += value * num_parameters  # 16-bit copies of the weights
    return state | {"activation": activations, "temporary": temporary}


def step_seconds(job: Job, decision: Decision) -> dict[str, float]:
    """Seconds of a step: "compute", "bubble", and for "tp", "pp" and "dp" what nothing hides."""
    parallel, part = decision.parallel, decision.part_of(job.model)
    pp, m, S = parallel.pp, decision.num_micro_batches(job), job.sequence_length
    tokens = decision.micro_batch_size * S
    flops = cost.training_flops_per_token(part, S) \
        + cost.recompute_flops_per_token(part, S, decision.recompute)
    compute = tokens * flops / parallel.tp / (PEAK_SHARE * job.device.bf16_flops)

    hidden = tokens * job.model.width * PRECISIONS[job.precision].activations.itemsize
    tensor = tensor_seconds(job, decision, hidden)
    link = link_of(job, parallel, "pp")
    parts = parallel.tp if parallel.sequence else 1
    messages = 0 if pp == 1 else 2 * cost.message_seconds(hidden / parts, *link)
    return {
        "compute": m * compute,
        "bubble": cost.pipeline_bubble(pp, m, 0, compute + tensor + messages).seconds,
        "tp": m * tensor,
        "pp": m * messages,
        "dp": data_seconds(job, decision, compute),
    }


def tensor_seconds(job: Job, decision: Decision, num_bytes: float) -> float:
    """Seconds of a micro-batch's sums over tp, of `num_bytes` each: every one is waited for."""
    # What is gathered again travels while the backward pass computes
    calls = cost.tensor_parallel_calls(replace(decision.layout, regather=False))
    link, tp = link_of(job, decision.parallel, "tp"), decision.parallel.tp
    again = {"forward": 2 if decision.recompute == "full" else 1, "backward": 1}
    block = sum(again[phase] * count * cost.collective_seconds(op, num_bytes, tp, *link)
                for phase, counts in calls.items() for op, count in counts.items())
    return (decision.part_of(job.model).num_layers + 0.5) * block  # half a block: the vocabulary


def data_seconds(job: Job, decision: Decision, compute: float) -> float:
    """Seconds of a step that ranks wait along dp; `compute` are those of a micro-batch.

    Stages 0 and 2 send gradients during the backward pass, except in a pipeline; stage 3 sends all
    while it computes, stage 1 all at the end of a step.
    """
    parallel, part = decision.parallel, decision.part_of(job.model)
    precision, link = PRECISIONS[job.precision], link_of(job, parallel, "dp")
    m, backward = decision.num_micro_batches(job), 0 if parallel.pp > 1 else compute * 2 / 3
    num_messages = part.num_layers + 1 if parallel.zero == 3 else 1
    num_elements = cost.tensor_parallel_parameters(part, parallel.tp) / num_messages

    def seconds(op: str, dtype) -> float:
        each = cost.collective_seconds(op, num_elements * dtype.itemsize, parallel.dp, *link)
        return num_messages * each

    reduce = seconds("reduce_scatter", precision.reduction)
    if parallel.zero == 0:
        return max(0, 2 * reduce - backward)
    if parallel.zero == 3:
        return m * max(0, 2 * seconds("all_gather", precision.activations) + reduce - compute)
    gather = seconds("all_gather", precision.parameters)
    return gather + (reduce if parallel.zero == 1 else m * max(0, reduce - backward))


def link_of(job: Job, parallel: ParallelConfig, axis: str) -> cost.Link:
    """What a group along `axis` sends through, in the grid that `parallelize.lay_out` makes."""
    stride = {"tp": 1, "dp": parallel.tp, "pp": parallel.tp * parallel.dp}[axis]
    return link(job, getattr(parallel, axis), stride, is_ring=axis != "pp")


def link(job: Job, size: int, stride: int, is_ring: bool = True) -> cost.Link:
    """What `size` ranks send through, of which each is `stride` after the one before.

    A group in one node has NVLink. Between nodes a ring runs through as many network cards as the
    group has ranks in a node, and most of its hops may still be inside nodes: the latency is the
    mean of all hops (NCCL's src/graph/tuning.cc: nInterSteps). A stage sends to one other.
    """
    device, together = job.device, max(1, min(size, job.gpus_per_node // stride))
    if together == size:
        return cost.Link(NVLINK_LATENCY, device.nvlink_bandwidth)
    if not is_ring:
        return cost.Link(NIC_LATENCY, device.nic_bandwidth)
    share = (math.ceil(size / together) - 1) / (size - 1)  # of the hops, those between nodes
    latency = share * NIC_LATENCY + (1 - share) * NVLINK_LATENCY
    return cost.Link(latency, min(together * device.nic_bandwidth, device.nvlink_bandwidth))
