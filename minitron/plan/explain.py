"""Why the best layout is the best, what binds it, and how far a given layout is from it.

Read in this order: as_it_stands, alternatives, with_twice, explain.
"""

import math
from collections.abc import Callable
from dataclasses import replace
from itertools import islice

from minitron.config import Config, require
from minitron.config.layout import data_parallel_size
from minitron.plan.hardware import Device
from minitron.plan.job import Decision, Job, require_gpus
from minitron.plan.search import SAME, Candidate, Search, with_variants
from minitron.plan.variants import is_variant, unsharded

OPTIONS: dict[str, Callable[[Decision], object]] = {
    "tp": lambda decision: decision.parallel.tp,
    "sequence": lambda decision: "on" if decision.parallel.sequence else "off",
    "pp": lambda decision: decision.parallel.pp,
    "schedule": lambda decision: decision.parallel.schedule,
    "chunks": lambda decision: decision.parallel.chunks,
    "ZeRO": lambda decision: decision.parallel.zero,
    "replicas": lambda decision: decision.parallel.replicas,
    "unsharded": unsharded,
    "recompute": lambda decision: decision.recompute,
    "micro-batch": lambda decision: decision.micro_batch_size,
}
RESOURCES = {
    "FLOP/s": ("bf16_flops", "fp8_flops"),
    "memory": ("memory_bytes",),
    "memory bandwidth": ("memory_bandwidth",),
    "NVLink bandwidth": ("nvlink_bandwidth",),
    "network bandwidth": ("nic_bandwidth",),
}
PARTS = {
    "matmul": "matrix multiplications",
    "attention": "the attention kernel",
    "elementwise": "elementwise operations: norms, activation functions, residual sums, the loss",
    "host": "waiting for the host to launch kernels",
    "bubble": "waiting for other pipeline stages",
    "tp": "messages of tensor parallelism",
    "pp": "messages between pipeline stages",
    "optimizer": "the optimizer",
    "dp": "messages of data parallelism",
}
"""What a step's time goes into; of messages, what is not hidden behind computing."""
HELD = {
    "parameter": "the weights that the model computes with",
    "gradient": "their gradients",
    "optimizer state": "AdamW's moments, and float32 master weights if the recipe has them",
    "activation": "what forward passes save for their backward passes",
    "temporary": "buffers that live for part of a step",
}
"""What a GPU's memory goes into."""
NUM_SHOWN = 4  # values of an option


def as_it_stands(config: Config, job: Job) -> Candidate:
    """Return the layout that `config` asks for; raises ConfigError if it cannot run."""
    require_gpus(config, job.num_gpus)
    require(
        config.train.recompute != "sqrt",
        "train.recompute = sqrt: the planner has no formula for it",
        "use none, selective or full",
    )
    readers = data_parallel_size(config, job.num_gpus)
    largest = math.ceil(job.global_batch_size / readers)
    size = min(config.train.micro_batch_size, largest)
    parallel = replace(config.parallel, dp=readers)
    return Candidate(job, Decision(parallel, config.train.recompute, size))


# Every other choice


def alternatives(found: Search) -> dict[str, dict[object, Candidate]]:
    """Return, for each value of each option, the fastest layout with all other options free.

    Where none fits it is the smallest; a value that cannot be trained is left out. An estimate that
    is not trusted stands for its own stage of ZeRO alone.
    """
    best: dict[str, dict[object, Candidate]] = {option: {} for option in OPTIONS}
    for candidate in found.candidates + found.too_large:
        for option, value_of in OPTIONS.items():
            if option == "ZeRO" or found.trusts(candidate):
                best[option].setdefault(value_of(candidate.decision), candidate)
    return best


def option_line(option: str, by_value: dict[object, Candidate], winner: Candidate) -> str:
    """Write a line: "8 is best; 4 +12.0% (bubble), 16 +15.1% (tp); 1, 2 would not fit"."""
    chosen = OPTIONS[option](winner.decision)
    others = {value: each for value, each in by_value.items() if each.fits and value != chosen}
    too_large = [str(value) for value, each in by_value.items() if not each.fits]
    if not others and not too_large:
        return f"{chosen}: there is no other choice"
    phrases = [f"{value} {difference(each, winner)}" for value, each in others.items()]
    is_best = all(each.seconds >= winner.seconds for each in others.values())
    parts = [
        f"{chosen} is best" if is_best else f"{chosen} comes first",
        ", ".join(phrases[:NUM_SHOWN]),
        f"{', '.join(too_large)} would not fit" if too_large else "",
    ]
    return "; ".join(filter(None, parts))


def difference(other: Candidate, winner: Candidate) -> str:
    """Say by how much it is slower and what costs most of that; or what it holds, if as fast."""
    slower = other.seconds / winner.seconds - 1
    if abs(slower) < SAME:
        more = (other.total_bytes - winner.total_bytes) / 1e9
        return f"as fast, {abs(more):.1f} GB {'more' if more > 0 else 'less'}"
    longer, shorter = (other, winner) if slower > 0 else (winner, other)
    return f"{slower:+.1%} ({costs_most(longer, shorter)})"


def costs_most(other: Candidate, winner: Candidate) -> str:
    """Return the part of a step that grows most."""
    parts = other.estimate.parts
    return max(parts, key=lambda part: parts[part] - winner.estimate.parts.get(part, 0))


# Other hardware


def with_twice(found: Search, resource: str) -> Candidate:
    """Return the best layout if the device had twice as much of one of RESOURCES."""
    return best_on(doubled(found.job.device, resource), found)


def doubled(device: Device, resource: str) -> Device:
    values = {name: getattr(device, name) for name in RESOURCES[resource]}
    return replace(device, **{name: 2 * value for name, value in values.items() if value})


def best_on(device: Device, found: Search) -> Candidate:
    """Return the fastest of the trusted layouts on another device, where other ones fit."""
    job = replace(found.job, device=device)
    fitting = (
        each
        for each in found.candidates + found.too_large
        if found.trusts(each) and each.total_bytes <= job.limit and not is_variant(each.decision)
    )
    return with_variants([Candidate(job, each.decision) for each in fitting])[0]


# In words


def explain(found: Search, standing: Candidate | None = None) -> str:
    """Say where the winner's time and memory go, what other choices cost, and what binds it.

    `standing` is a layout to set beside it.
    """
    winner = found.trusted
    lines = [
        f"best: {winner}",
        *columns(winner, standing),
        "",
        "The fastest layout for each value of an option; in parentheses, what causes most of the "
        "difference:",
        "",
    ]
    lines += [
        f"  {option:<12} {option_line(option, by_value, winner)}"
        for option, by_value in alternatives(found).items()
    ]
    lines += ["", "The fastest layout with twice as much of one resource:", ""]

    faster = {}
    for resource in RESOURCES:
        other = with_twice(found, resource)
        faster[resource] = 1 - other.seconds / winner.seconds
        changed = f"  {other}" if other.decision != winner.decision else "  the same layout"
        lines.append(f"  {resource:<18}{other.seconds:>9.3f} s {-faster[resource]:>+7.1%}{changed}")
    return "\n".join([*lines, "", what_binds(faster)])


def columns(winner: Candidate, standing: Candidate | None) -> list[str]:
    """Tabulate seconds and GB of the winner's parts, beside those of another layout."""
    shown = [cells(winner)]
    title = f"\n  {'':<17}{'the best':>17}"
    if standing is not None and standing.decision != winner.decision:
        shown.append(cells(standing))
        title += f"{'as it stands':>17}"
    legend = PARTS | HELD
    lines = [
        f"  {name:<17}"
        + "".join(f"{column[name]:>17}" for column in shown)
        + (f"   {legend[name]}" if name in legend else "")
        for name in shown[0]
    ]
    return [title, *lines]


def cells(candidate: Candidate) -> dict[str, str]:
    """Return, by its name, each part with its share of the total."""
    texts = {}
    for whole, parts, unit, symbol in (
        ("a step", candidate.estimate.parts, 1, "s"),
        ("a GPU", candidate.estimate.memory, 1e9, "GB"),
    ):
        total = sum(parts.values())
        for name, value in [*parts.items(), (whole, total)]:
            texts[name] = f"{value / unit:.3f} {symbol:<2} {value / total:>4.0%}"
    return texts


def what_binds(faster: dict[str, float]) -> str:
    """Say in a sentence what binds: the share of a step that twice each resource would save."""
    first, second = islice(sorted(faster, key=faster.get, reverse=True), 2)
    if faster[first] < SAME:
        return "No resource is a bottleneck: twice as much of any one would not make it faster."
    also = f"; next is {second} ({faster[second]:.0%})" if faster[second] > SAME else ""
    return (
        f"The bottleneck is {first}: twice as much would save {faster[first]:.0%} of a step{also}."
    )
