"""Chapter 12's helpers: layouts in words, estimates of published steps, claims and what is so."""

from collections.abc import Sequence
from dataclasses import replace

from minitron import cost
from minitron.plan.estimate import estimate
from minitron.plan.hardware import Device
from minitron.plan.published import Row
from minitron.plan.search import Candidate
from teaching.lab.large_plans import cut

__all__ = ["brief", "cut", "errors_by_source", "fact", "label", "saved", "seconds_on"]

# Layouts


def brief(candidate: Candidate) -> str:
    """Return the layout in few words; b is the number of sequences in a micro-batch."""
    words = str(candidate).replace("micro-batches of", "b").replace(" + sequence", "")
    words = words.replace(", weights and gradients kept unsharded", " (unsharded)")
    words = words.replace("zero-bubble", "ZB")
    return words.replace("full recomputation", "recomputed").replace(" recomputation", "")


# Published steps


def label(row: Row) -> str:
    """Return the first author, or the system, and the model."""
    first = row.source.split()[0]
    return row.name if row.name.startswith(first) else f"{first} {row.name}"


def seconds_on(device: Device, row: Row) -> float:
    """Return the estimate on a device; where a source leaves something open, the fastest."""
    given = replace(row.job, device=device)
    return min(estimate(given, each, row.system).seconds for each in row.decisions)


def errors_by_source(rows: Sequence[Row]) -> dict[str, list[float]]:
    """Return the relative errors of the estimates, by the first word of the source."""
    found: dict[str, list[float]] = {}
    for row in rows:
        error = row.predict().seconds / row.seconds - 1
        found.setdefault(label(row).split()[0], []).append(error)
    return found


# Claims


def fact(number: int, what: str, claimed: float, computed: float, unit: str) -> str:
    """Return a line with a claimed and a computed number; within 5 % it counts as right."""
    ratio = computed / claimed
    verdict = "right" if abs(ratio - 1) < 0.05 else f"{ratio:,.3g} x"
    return f"{number:>2} {what:36} {claimed:>7,.6g} {computed:>10,.4g} {unit:7} {verdict}"


def saved(stage: int, num_ranks: int) -> float:
    """Return the bytes of the training state without ZeRO over those with a stage of it."""
    full, sharded = (
        sum(cost.zero_holdings(2**30, num_ranks, each).values()) for each in (0, stage)
    )
    return full / sharded
