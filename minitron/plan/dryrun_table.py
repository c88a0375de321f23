"""Dry runs as text: what ranks hold, compute and send, side by side.

Read in this order: describe, held, sent, largest, verdict.
"""

import re
import textwrap
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence

from minitron.measure.live import CATEGORIES, LiveTensor
from minitron.plan.dryrun import DryRun
from minitron.plan.hardware import Device

NUM_LARGEST = 8  # kinds of tensors
WIDTH = 96  # characters, of the widest line


def describe(runs: Sequence[DryRun], device: Device | None = None) -> str:
    """Tabulate what the ranks hold and send, and the largest tensors of the one that holds most.

    With a `device`, whether that rank fits.
    """
    most = fullest(runs)
    parts = [held(runs), sent(runs), largest(most), how(runs)]
    return "\n\n".join(parts if device is None else [*parts, verdict(most, device)])


def fullest(runs: Sequence[DryRun]) -> DryRun:
    return max(runs, key=lambda run: run.peak.total)


def held(runs: Sequence[DryRun]) -> str:
    """Tabulate, for each rank, the bytes by category at its peak, and the FLOPs of its step."""
    unit, size = unit_of(run.peak.total for run in runs)
    flop_unit, flop_size = unit_of((run.flops for run in runs), "FLOP")
    rows = [["rank", *runs[0].place, *CATEGORIES, "in all", flop_unit]]
    for run in runs:
        held = [*(run.peak.bytes[kind] for kind in CATEGORIES), run.peak.total]
        rows.append(
            [
                f"{run.rank:,}",
                *map(str, run.place.values()),
                *(shown(number, size) for number in held),
                shown(run.flops, flop_size),
            ]
        )
    return f"{unit} held at the peak, and {flop_unit} of a step\n{aligned(rows)}"


def sent(runs: Sequence[DryRun]) -> str:
    """Tabulate, for each rank, the bytes that it sends in a step by op and axis."""
    keys = {key: None for run in runs for key, count in run.bytes_sent.items() if count}
    if not keys:
        return "Nothing is sent."
    unit, size = unit_of(run.bytes_sent.get(key, 0) for run in runs for key in keys)
    rows = [["rank", *(f"{op} {axis}" for op, axis in keys)]]
    rows += [
        [f"{run.rank:,}", *(shown(run.bytes_sent.get(key, 0), size) for key in keys)]
        for run in runs
    ]
    return f"{unit} sent in a step\n{aligned(rows)}"


def largest(run: DryRun) -> str:
    """List the kinds of tensors that hold most at the peak, over all blocks and micro-batches."""
    total, count = defaultdict(int), Counter()
    for tensor in run.peak.tensors:
        kind = kind_of(tensor)
        total[kind] += tensor.bytes
        count[kind] += 1
    unit, size = unit_of(total.values())
    most = sorted(total, key=lambda kind: -total[kind])[:NUM_LARGEST]
    rows = [[unit, "category", "count", "shape", "what"]]
    rows += [[shown(total[kind], size), kind[0], f"{count[kind]:,}", *kind[1:]] for kind in most]
    title = f"Rank {run.rank:,} holds the most in the {run.peak.phase} phase:"
    return f"{title}\n{aligned(rows, left=4)}"


def kind_of(tensor: LiveTensor) -> tuple[str, str, str]:
    """Return category, shape and dtype, and a name without numbers."""
    made = (
        tensor.name
        if tensor.category in CATEGORIES[:3]
        else f"{tensor.name} in {tensor.module or 'the step'}"
    )
    dtype = str(tensor.dtype).removeprefix("torch.").replace("float", "fp").replace("bfp", "bf")
    return tensor.category, f"{dtype} {tuple(tensor.shape)}", re.sub(r"\.\d+", ".*", made)


def how(runs: Sequence[DryRun]) -> str:
    """Say how much of the step was run, and how long it took."""
    m, num_run = runs[0].num_micro_batches, max(run.num_run for run in runs)
    part = f", {num_run:,} of them run at most: the others are like them" if num_run < m else ""
    num_equal = sum(run.seconds == 0 for run in runs)
    equal = f" Not run, but equal to a rank above: {num_equal}." if num_equal else ""
    seconds = sum(run.seconds for run in runs)
    return f"A step has {m:,} micro-batch{'es' * (m != 1)}{part}.{equal} Took {seconds:.0f} s."


def verdict(run: DryRun, device: Device) -> str:
    """Say whether what a rank holds fits, and what is left or missing."""
    gigabytes, limit = run.peak.total / 1e9, device.memory_bytes / 1e9
    if gigabytes > limit:
        return (
            f"Does not fit on {device.name}: rank {run.rank:,} holds {gigabytes:.1f} GB, "
            f"{gigabytes - limit:.1f} GB more than its {limit:.0f} GB."
        )
    return (
        f"Fits on {device.name}: of {limit:.0f} GB, {limit - gigabytes:.1f} GB are left for "
        "CUDA, NCCL, and fragmentation."
    )


def unit_of(amounts: Iterable[float], name: str = "B") -> tuple[str, float]:
    """Return a unit in which the largest of the amounts is easy to read, and its size."""
    most = max(amounts, default=0)
    letters = {"B": "GMk", "FLOP": "TGM"}[name]
    sizes = {"T": 1e12, "G": 1e9, "M": 1e6, "k": 1e3}
    letter = next((letter for letter in letters if most >= sizes[letter]), letters[-1])
    return f"{letter}{name}", sizes[letter]


def shown(amount: float, size: float) -> str:
    return f"{amount / size:,.2f}"


def aligned(rows: list[list[str]], left: int | None = None) -> str:
    """Align columns to one width each; those from `left` on begin at the left.

    No line is wider than WIDTH: numbers beyond it go into a table below, with the first column
    again, and a last column of words goes on in the next line.
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    if left is None:
        return "\n\n".join(
            _lines([[row[column] for column in part] for row in rows], len(part))
            for part in _column_groups(widths)
        )
    before = sum(widths[:-1]) + 2 * (len(widths) - 1)
    folded = []
    for *cells, last in rows:
        first, *others = textwrap.wrap(last, max(20, WIDTH - before)) or [""]
        folded.append([*cells, first])
        folded += [[*("" for _ in cells), other] for other in others]
    return _lines(folded, left)


def _column_groups(widths: Sequence[int]) -> list[list[int]]:
    """Return the columns of each table: the first one, and as many others as fit beside it."""
    groups = [[0]]
    for column in range(1, len(widths)):
        if sum(widths[other] + 2 for other in groups[-1]) + widths[column] > WIDTH:
            groups.append([0])
        groups[-1].append(column)
    return groups


def _lines(rows: list[list[str]], left: int) -> str:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(
            cell.rjust(width) if index < left else cell.ljust(width)
            for index, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    )
