"""How far the planner's estimates are from published measurements.

    python benchmarks/estimate.py --fit --out benchmarks/results/estimate.md

compares every published step with the estimate, fitted to or not. With `--fit` it also finds the
constants, those of `minitron.plan.operators.Rates` and what nanotron's hosts take for a collective;
and once more without each source, to predict that source.
"""

import argparse
import statistics
import sys
import textwrap
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path

from common import publish

from minitron import cost
from minitron.plan.held_out import sharded_rows, unseen_rows
from minitron.plan.operators import RATES, Rates
from minitron.plan.published import (
    MEGATRON,
    NANOTRON,
    Row,
    error,
    published_layers,
    published_rows,
    table,
)

LAYERS = "Korthikanti et al. 2022, table 4"
LARGEST = 0.3
"""An error counts no more: where something else was slow, the constants shall not follow."""
RATE_NAMES = ("matmul", "memory", "attention")
HOST_NAMES = ("host_seconds", "host_seconds_beside_pipeline")  # of nanotron alone
Constants = dict[str, float]
Errors = dict[str, list[tuple[str, float]]]  # by source: row and error


START = {
    "matmul": 0.9,
    "memory": 0.8,
    "attention": 0.4,
    "host_seconds": 3e-5,
    "host_seconds_beside_pipeline": 1e-4,
}
"""Where the fit begins: what one would guess."""


def stored() -> Constants:
    """Where the fit ends, rounded."""
    return {name: getattr(RATES, name) for name in RATE_NAMES} | {
        name: getattr(NANOTRON, name) for name in HOST_NAMES
    }


def errors(constants: Constants, rows: Iterable[Row]) -> Errors:
    """Errors of all rows, and of the layers, with these constants."""
    rates = Rates(**{name: constants[name] for name in RATE_NAMES})
    hosts = replace(NANOTRON, **{name: constants[name] for name in HOST_NAMES})
    found = defaultdict(list)
    for name, published, estimated in published_layers(rates):
        found[LAYERS].append((name, error(estimated, published)))
    for row in rows:
        predicted = row.predict(rates, hosts if row.system == NANOTRON else None)
        found[row.source].append((row.name, error(predicted.seconds, row.seconds)))
    return found


# The fit


def loss(found: Errors) -> float:
    """Mean error, cut off at LARGEST; a source weighs as the root of its number of rows."""
    weights = {source: len(each) ** 0.5 for source, each in found.items()}
    means = {
        source: statistics.mean(min(abs(value), LARGEST) for _, value in each)
        for source, each in found.items()
    }
    return sum(weights[source] * means[source] for source in found) / sum(weights.values())


def fit(lose: Callable[[Constants], float], constants: Constants) -> Constants:
    """Change one constant at a time, by ever smaller factors, as long as that helps."""
    least = lose(constants)
    for factor in (2, 1.3, 1.1, 1.03, 1.01):
        helped = True
        while helped:
            helped = False
            for name in constants:
                for times in (factor, 1 / factor):
                    tried = constants | {name: constants[name] * times}
                    value = lose(tried)
                    if value < least - 1e-6 and max(tried["matmul"], tried["memory"]) < 1:
                        least, constants, helped = value, tried, True
    return constants


def fitted(rows: list[Row]) -> Constants:
    """Without rows of nanotron its hosts count as those of any other system: 0."""
    start = dict(START)
    if all(row.system != NANOTRON for row in rows):
        start |= dict.fromkeys(HOST_NAMES, 0.0)
    return fit(lambda constants: loss(errors(constants, rows)), start)


def network_of_efa() -> cost.Link:
    """EFA's latency per hop and bandwidth of a node, from all-gathers and reduce-scatters."""
    steps = []
    for row in table("playbook_comm_bandwidth"):
        size = 8 * int(row["nodes"])
        if row["collective"] != "all_reduce" and size > 8:  # of 256 MiB, at the printed bandwidth
            each = 2**28 / size
            steps.append((each, each / (float(row["mean_gb_s"]) * 1e9)))
    return cost.fit_link(*zip(*steps, strict=True))


# The tables


def median(values: Iterable[float]) -> float:
    return statistics.median(map(abs, values))


def summary(found: Errors) -> list[str]:
    lines = ["| source | rows | median error | within 8 % |", "|---|---:|---:|---:|"]
    for source, each in found.items():
        values = [value for _, value in each]
        near = sum(abs(value) <= 0.08 for value in values)
        lines.append(f"| {source} | {len(each)} | {median(values):.1%} | {near} |")
    return lines


def not_fitted(rows: list[Row], unseen: list[Row]) -> list[str]:
    """The same for what no constant was fitted to: hosts of nanotron are as everybody's."""
    same = stored() | dict.fromkeys(HOST_NAMES, 0.0)
    found = errors(stored(), unseen)
    del found[LAYERS]
    found["all of these"] = [each for listed in found.values() for each in listed]
    found |= errors(stored(), sharded_rows())
    hosts = errors(same, [row for row in rows if row.system == NANOTRON])
    found |= {f"{source}, hosts as others'": hosts[source] for source in hosts if source != LAYERS}
    del found[LAYERS]
    return summary(found)


def steps(rows: list[Row]) -> list[str]:
    """With the slowest of what a source leaves open, too."""
    lines = [
        "| source | row | layout | published | estimated | error | at the slowest |",
        "|---|---|---|---:|---:|---:|---:|",
    ]
    for row in rows:
        options = [replace(row, decisions=(each,)).predict().seconds for each in row.decisions]
        least, most = (
            f"{seconds / row.seconds - 1:+.1%}" for seconds in (min(options), max(options))
        )
        lines.append(
            f"| {row.source} | {row.name} | {row.layout} | {row.seconds:.2f} s | "
            f"{min(options):.2f} s | {least} | {most if len(options) > 1 else ''} |"
        )
    return lines


def sharded() -> list[str]:
    """ZeRO-3 as it ran, and as if a block's weights traveled while another one computed."""
    lines = [
        "| row | published | as DeepSpeed | error | hidden | error |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    for row, hidden in zip(sharded_rows(), sharded_rows(MEGATRON), strict=True):
        cells = [row.name, f"{row.seconds:.1f} s"]
        for each in (row, hidden):
            seconds = each.predict().seconds
            cells += [f"{seconds:.1f} s", f"{seconds / row.seconds - 1:+.0%}"]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def layers() -> list[str]:
    lines = ["| pass of a layer | published | estimated | error |", "|---|---:|---:|---:|"]
    return lines + [
        f"| {name} | {1e3 * published:.1f} ms | {1e3 * estimated:.1f} ms | "
        f"{estimated / published - 1:+.1%} |"
        for name, published, estimated in published_layers()
    ]


def memory(rows: list[Row]) -> list[str]:
    """By number of stages, for they are what makes the estimate harder."""
    found = defaultdict(list)
    for row in rows:
        if row.memory is not None:
            held = sum(row.predict().memory.values())
            found[row.decisions[0].parallel.pp].append(error(held, row.memory))
    lines = ["| stages | rows | median error | within 5 % |", "|---:|---:|---:|---:|"]
    for pp, values in [*sorted(found.items()), ("all", sum(found.values(), []))]:
        near = sum(abs(value) <= 0.05 for value in values)
        lines.append(f"| {pp} | {len(values)} | {median(values):.1%} | {near} |")
    return lines


def described(constants: Constants) -> str:
    return ", ".join(f"{name} {value:.3g}" for name, value in constants.items())


def held_out(rows: list[Row]) -> list[str]:
    """Each source, and the largest runs of nanotron, predicted by constants fitted without them."""
    groups = {
        source: [row for row in rows if row.source == source]
        for source in dict.fromkeys(row.source for row in rows)
    }
    groups["nanotron on 8 nodes"] = [row for row in rows if row.name.startswith("8 nodes")]
    lines = [
        "| held out | rows | median error | constants from the others |",
        "|---|---:|---:|---|",
    ]
    for name, group in groups.items():
        constants = fitted([row for row in rows if row not in group])
        found = errors(constants, group)
        values = [value for row in group[:1] for _, value in found[row.source]]
        lines.append(f"| {name} | {len(group)} | {median(values):.1%} | {described(constants)} |")
    return [*lines, "", textwrap.fill(f"Fitted to all: {described(fitted(rows))}.", 100)]


NOTES = """# The planner's estimates against published measurements

`{command}`

An error is estimated over published, less one; medians are of the logarithm's absolute value. The
constants (`minitron/plan/operators.py` says what each is; the last two are nanotron's hosts alone):

{constants}

## Fitted to these rows
{summary}

## Not fitted
{not_fitted}

The target is a median of 8 %. Fitted rows meet it; of those not fitted, Korthikanti's two largest
models and MT-NLG do not, nor do nanotron's largest runs if held out. Where a source does not state
micro-batches or chunks, the fastest that fits counts (of all, where none fits: Llama 3, whose
system holds less than this package); how much that may matter, the last column of the steps says.

- Errors rise with the model: within a source, from too fast for narrow ones to too slow for wide
  ones (Korthikanti: 22B to 1T). Probably wide products come closer to the device's fastest one;
  the estimate gives all of them the same share of it.
- MT-NLG took 21 to 26 % longer; the same cut of as large a model (Narayanan) did not.
- nanotron's median rests on two constants for its hosts, which no other source shows. Without them
  it is the last row. They are no part of an estimate for minitron, whose hosts nobody has measured.

Inputs, by source: which attention, which kernels are fused, how stages are divided, what is hidden
(`minitron/plan/published.py`, `held_out.py`); by device: the fastest matmul, the bandwidths
reached (`minitron/plan/hardware.csv`); EFA's, from the playbook: {network}.

Of nanotron's rows about one in five takes twice as long as the estimate or longer, and no formula
says why. ZeRO-0 over several nodes with a pipeline takes up to 40 times as long as the same with
ZeRO-1; runs near 80 GB allocate again and again; one layout, measured twice, took 19 and 89 s. They
count in the median, but an error above 30 % pulls at no constant.

## ZeRO-3 (Narayanan et al. 2021, table 2)
{sharded}

DeepSpeed's stage 3 of 2021 gathers each matrix on its own, when it is needed, and waits (with
overlap_comm off, its default, which is assumed here). That explains most of the time, without any
constant of its own: in a ring of 1,536 GPUs each message has as many latencies. "Hidden" is the
estimate for a system that gathers a block at a time while another one computes, as minitron does:
{overlap:.0%} of a message's time for what computing loses to it, the rest for nothing. Measured
runs took up to {worst:.1f} times as long, and no published one confirms it at this scale. What no
estimate here sees: other jobs on the network, late hosts, a slow GPU.

## Each source, by constants that were fitted without it
{held_out}

## Memory
Published by nanotron alone. Korthikanti et al. 2022, table 2, has formulas, which `tests/cost`
checks exactly. The target, a median of 5 %, is missed by a hair; half of the rows are further off.
How many copies of a block's input nanotron keeps, and that it does where tp > 1, was chosen where
this error is least: that is fitted. Against minitron's own dry run the same formulas are within 5 %
(tests/plan/test_planned_memory.py).

{memory}

## One layer of a 22B model (Korthikanti et al. 2022, table 4)
{layers}

## Steps, not fitted
{unseen}

## Steps, fitted
{steps}
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--fit", action="store_true", help="fit the constants too: half a minute")
    parser.add_argument("--out", type=Path, help="write the tables here as Markdown too")
    options = parser.parse_args()
    rows, unseen, network = published_rows(), unseen_rows(), network_of_efa()
    worst = max(row.seconds / row.predict().seconds for row in sharded_rows(MEGATRON))
    sections = {
        "summary": summary(errors(stored(), rows)),
        "not_fitted": not_fitted(rows, unseen),
        "held_out": held_out(rows) if options.fit else ["(run with `--fit`)"],
        "memory": memory(rows),
        "layers": layers(),
        "sharded": sharded(),
        "unseen": steps(unseen),
        "steps": steps(rows),
    }
    text = NOTES.format(
        command=" ".join(["python", *sys.argv]),
        constants=textwrap.fill(described(stored()), 100),
        overlap=RATES.overlap,
        worst=worst,
        network=f"{1e6 * network.latency:.1f} us per hop, "
        f"{network.bandwidth / 8e9:.1f} GB/s a card",
        **{name: "\n".join(lines) for name, lines in sections.items()},
    )
    publish([text.rstrip()], options.out)


if __name__ == "__main__":
    main()
