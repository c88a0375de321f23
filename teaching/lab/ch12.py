"""Chapter 12's helpers: layouts in words, estimates of published steps, claims and what is so."""

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from minitron import cost
from minitron.plan.estimate import estimate
from minitron.plan.hardware import DEVICES, Device
from minitron.plan.money import energy, training_days
from minitron.plan.published import Row
from minitron.plan.search import Candidate
from teaching.lab.large_plans import GPT3_JOB, cut

__all__ = ["FACTS_HEADER", "brief", "cut", "errors_by_source", "facts", "label", "seconds_on"]

A100, H100 = DEVICES["A100-SXM-80GB"], DEVICES["H100-SXM-80GB"]

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


class Fact(NamedTuple):
    """A claimed and a computed number; within 5 % the claim counts as right."""

    number: int
    what: str
    claimed: float
    computed: float
    unit: str

    def __str__(self) -> str:
        ratio = self.computed / self.claimed
        verdict = "right" if abs(ratio - 1) < 0.05 else f"{ratio:,.3g} x"
        return (
            f"{self.number:>2} {self.what:36} {self.claimed:>7,.6g} {self.computed:>10,.4g} "
            f"{self.unit:7} {verdict}"
        )


FACTS_HEADER = "   claim                                claimed   computed         ratio"


def facts(first: int, last: int) -> list[Fact]:
    """Return what is computed for the claims `first` to `last` of the chapter's list."""
    listed = *energy_and_size(), *speed_and_stages(), *shards_and_activations()
    return [each for each in listed if first <= each.number <= last]


def energy_and_size() -> list[Fact]:
    inside, network = cost.Link(0, 450e9), cost.Link(0, 50e9)
    patterson, bloom = energy(10_000 * 14.8 * 24, 330), energy(1_082_990, 400, 1.1)
    in_ring = cost.ring_all_reduce_seconds(200e9, 16, *inside)
    hierarchical = cost.hierarchical_all_reduce_seconds(200e9, 8, 2, inside, network)
    flops = 6 * cost.num_parameters(GPT3_JOB.model) * 300e9
    return [
        Fact(1, "GPT-3's energy, as Patterson counts", 1287, patterson, "MWh"),
        Fact(1, "BLOOM's, with a PUE like GPT-3's", 433, bloom, "MWh"),
        Fact(2, "FLOPs of GPT-3", 300, flops / 1e18, "exaFLOP"),
        Fact(3, "two float32 moments / bf16 weights", 1, (4 + 4) / 2, "times"),
        Fact(3, "with the float32 master weights", 1, (4 + 4 + 4) / 2, "times"),
        Fact(4, "H100s for 16 B x 100 G parameters", 15, 16 * 100e9 / H100.memory_bytes, "GPUs"),
        Fact(5, "ring of 16, 450 GB/s each way", 0.22, in_ring, "s"),
        Fact(5, "two nodes of 8, hierarchical", 0.22, hierarchical, "s"),
    ]


def speed_and_stages() -> list[Fact]:
    held = cost.activations_held("1F1B", 4, 32, rank=0) * 25 / 100
    at_40, as_published = (
        training_days(flops * 175e9 * 1.5e12, 1024, rate)
        for flops, rate in ((6, 0.4 * A100.bf16_flops), (8, 140e12))
    )
    years = training_days(6e25, 1, 0.4 * H100.bf16_flops) / 365
    plain, sharded = (estimate(GPT3_JOB, cut(1024, zero=zero)).hardware_flops for zero in (0, 3))
    sent, sent_sharded = (cost.zero_volume(2**30, 2, 64, 0, zero).sent for zero in (0, 3))
    return [
        Fact(6, "weights of a stage", 1 / 4, 25 / 100, "of all"),
        Fact(6, "activations of the first stage", 1 / 4, held, "of all"),
        Fact(7, "6 P T at 40 % of the peak", 120, at_40, "days"),
        Fact(7, "8 P T at 140 TFLOP/s", 120, as_published, "days"),
        Fact(8, "dense bf16: 6e25 FLOPs at 40 %", 400, years, "years"),
        Fact(9, "FLOPs, ZeRO-3 / no ZeRO", 1.5, sharded / plain, "times"),
        Fact(9, "bytes sent, ZeRO-3 / no ZeRO", 1.5, sent_sharded / sent, "times"),
    ]


def shards_and_activations() -> list[Fact]:
    model, S = replace(GPT3_JOB.model, dropout=0.1), GPT3_JOB.sequence_length
    kept, selective = (
        cost.activation_bytes_per_layer(model, 1, S, recompute=kind, attention="materialized")
        for kind in ("none", "selective")
    )
    again = cost.recompute_flops_per_token(model, S, "selective")
    added = 100 * again / cost.training_flops_per_token(model, S)
    return [
        Fact(10, "16 B / 1,024 of 1e12 parameters", 16, 16e12 / 1024 / 1e9, "GB"),
        *(
            Fact(11, f"ZeRO-{stage} on {ranks:,} ranks", 4 * stage, saved(stage, ranks), "times")
            for stage in (1, 2)
            for ranks in (8, 1024)
        ),
        Fact(12, "activations, materialized attention", 70, 100 * (1 - selective / kept), "%"),
        Fact(12, "added FLOPs (2.7 % in the paper)", 2.7, added, "%"),
    ]


def saved(stage: int, num_ranks: int) -> float:
    """Return the bytes of the training state without ZeRO over those with a stage of it."""
    full, sharded = (
        sum(cost.zero_holdings(2**30, num_ranks, each).values()) for each in (0, stage)
    )
    return full / sharded
