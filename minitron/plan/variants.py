"""Variants of a layout with ZeRO that hold more so as to send less along dp.

Read in this order: variants, unsharded.
Reference: Zhao et al. 2023, "PyTorch FSDP" (section 3.2.2: hybrid sharding).
"""

from collections.abc import Iterator
from dataclasses import replace
from itertools import product

from minitron.config.layout import divisors
from minitron.plan.job import Decision


def variants(decision: Decision, gpus_per_node: int) -> Iterator[Decision]:
    """Offer shards on fewer ranks, with replicas, and weights that stay for a step.

    The shards fill nodes, whose links are faster than those between replicas.
    """
    parallel = decision.parallel
    node = max(1, gpus_per_node // parallel.tp)  # ranks of dp that one has
    replicas = [
        count
        for count in divisors(parallel.dp)[:-1]
        if count == 1 or parallel.dp // count % node == 0
    ]
    kept = [{}]
    if parallel.zero == 3:
        kept += [
            {"reshard_each_pass": False, "sync_every_micro_batch": sync} for sync in (True, False)
        ]
    for count, options in [*product(replicas, kept)][1:] if parallel.zero else ():
        yield replace(decision, parallel=replace(parallel, replicas=count, **options))


def is_variant(decision: Decision) -> bool:
    return decision.parallel.replicas > 1 or unsharded(decision) != "nothing"


def unsharded(decision: Decision) -> str:
    """Return what ZeRO-2 or 3 leaves unsharded between the micro-batches of a step."""
    axes = decision.parallel
    if axes.sync_every_micro_batch:
        return "nothing" if axes.reshard_each_pass else "weights"
    return "gradients" if axes.reshard_each_pass else "weights and gradients"
