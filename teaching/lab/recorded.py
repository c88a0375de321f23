"""What a GPU was recorded to do, beside what is predicted for it: the sections "On real GPUs".

Where no record is there, each function says so in its sentence and draws the prediction alone.

Read in this order: gpu_records.Shown, gpu_records.newest, then one function a chapter.
"""

from pathlib import Path

from matplotlib.axes import Axes

from minitron import cost
from minitron.measure.record import Record, Row
from teaching.figures import (
    Block,
    crossing,
    curves,
    memory_bars,
    plain_bytes,
    ranges,
    scaling,
    timeline,
)
from teaching.figures_memory import phase_strip
from teaching.figures_style import BAND, GREY
from teaching.lab.allocator import CAPACITY, MIB
from teaching.lab.gpu_models import MEMORY, OVERLAP, PRECISION, SPEED
from teaching.lab.gpu_records import (
    FOLDER,
    Shown,
    device_of,
    low_middle_high,
    newest,
    origin,
    rows_of,
)

# Chapter 1: how near the peak is a step?


def mfu(folder: Path = FOLDER) -> Shown:
    """MFU of whole steps, each side a row; predicted for our eager kernels."""
    record = newest("mfu", folder)
    device = device_of(record)
    predicted = {
        f"{name}, eager, ours": 100 * step.estimate(device, "bf16-autocast").mfu
        for name, step in SPEED.items()
    }
    rows = {
        row["case"]: low_middle_high(row, 100 * row["mfu"] * row["seconds"])
        for row in rows_of(record, lambda row: row["mfu"] is not None)
    }
    if rows:
        best = max(rows, key=lambda name: rows[name][1])
        alt = f"The highest recorded MFU is {rows[best][1]:.0f} %, of {best}."
    else:
        alt = (
            "Predicted MFU: "
            + ", ".join(f"{name} {share:.0f} %" for name, share in predicted.items())
            + "."
        )
    return Shown(origin(record), ranges(rows, predicted, "MFU (%)"), alt)


def matmul_roofline(folder: Path = FOLDER) -> Shown:
    """All recorded matmuls under the roof of peak and bandwidth; names the lowest to its right.

    The sentence has the times of all on the left, and of the lowest on the right.
    """
    record = newest("kernels", folder)
    device = device_of(record)
    rows = rows_of(record, lambda row: row["kind"] == "matmul")
    rows.sort(key=lambda row: row["intensity"])
    peak, bandwidth = (
        (rows[0]["peak"], rows[0]["bandwidth"])
        if rows
        else (device.bf16_flops, device.memory_bandwidth)
    )
    corner = peak / bandwidth
    ends = (rows[0]["intensity"], rows[-1]["intensity"]) if rows else (1.0, 16 * corner)
    x = sorted({ends[0], corner, ends[1]})
    roof = [min(peak, each * bandwidth) for each in x]
    labels = "arithmetic intensity (FLOPs per byte)", "FLOP/s"
    alt = f"The roof bends at {corner:.0f} FLOPs per byte"
    if not rows:
        return Shown(
            origin(record),
            crossing([round(each) for each in x], {"roof": roof}, *labels),
            f"{alt}.",
        )
    figure = scaling(
        [row["intensity"] for row in rows],
        [row["flops_per_second"] for row in rows],
        *labels,
        roof,
        "roof",
        predicted_x=x,
    )
    axes, ticks = figure.axes[0], [row["intensity"] for row in spaced(rows)]
    axes.set_xticks(ticks, [f"{tick:,.0f}" for tick in ticks])

    reached = max(row["flops_per_second"] for row in rows)
    alt += f"; the fastest recorded matmul reaches {reached / peak:.0%} of the peak"
    right = [row for row in rows if row["intensity"] > corner]
    lowest = min(right or rows, key=lambda row: row["flops_per_second"] / row["roof"])
    point = lowest["intensity"], lowest["flops_per_second"]
    axes.annotate(shape_of(lowest), point, (8, -4), textcoords="offset points", color=GREY)
    alt += f", that of {shape_of(lowest)} {point[1] / lowest['roof']:.0%} of its roof."
    left = [row for row in rows if row["intensity"] <= corner and row is not lowest]
    times = ", ".join(time_and_roof(row) for row in (*left, lowest))
    return Shown(f"{origin(record)}\nShortest times (and the roof's) in us: {times}.", figure, alt)


def shape_of(row: Row) -> str:
    """matmul 1 x 4096 x 4096 -> 1 x 4096 x 4096."""
    return row["case"].removeprefix("matmul ")


def time_and_roof(row: Row) -> str:
    """Return a matmul's shortest time and the time that its roof allows, in microseconds."""
    took, least = (1e6 * row["flops"] / row[name] for name in ("flops_per_second", "roof"))
    return f"{shape_of(row)} {took:.1f} ({least:.1f})"


def spaced(rows: list[Row]) -> list[Row]:
    """Keep rows, sorted by intensity, of at least 3.5 times that of the last one kept."""
    kept: list[Row] = []
    for row in rows:
        if not kept or row["intensity"] >= 3.5 * kept[-1]["intensity"]:
            kept.append(row)
    return kept


# Chapter 2: the allocator over two steps


def two_steps(folder: Path = FOLDER) -> Shown:
    """Bytes through the first two steps: recorded block by block, or as predicted."""
    record = newest("memory", folder)
    kinds = MEMORY.estimate(device_of(record), "bf16").memory
    # AdamW's moments, which the first step makes at its end
    moments = 8 * cost.num_parameters(MEMORY.model)
    first = kinds | {"optimizer state": kinds["optimizer state"] - moments}
    peaks = sum(first.values()), sum(kinds.values())
    said = f"Predicted peaks: {plain_bytes(peaks[0])} in step 1, {plain_bytes(peaks[1])} in step 2."
    row = next(iter(rows_of(record, lambda row: row["case"] == "two steps")), None)
    if row is None:
        figure = memory_bars({}, {"step 1": first, "step 2": kinds})
        return Shown(f"{origin(record)} {said}", figure, said)
    held = {name: [size / 1e9 for size in row[name]] for name in ("allocated", "reserved")}
    end = row["entries"][0]
    lines = {"predicted peak": [peaks[entry > end] / 1e9 for entry in row["entry"]]}
    figure = curves(row["entry"], held, "entry of the allocator's trace", "GB", lines)
    mark_steps(figure.axes[0], row)
    found = "Recorded peaks: {} in step 1, {} in step 2.".format(
        *map(plain_bytes, row["peak_of_step"])
    )
    said = f"{found} {said}"
    words = [origin(record), said, bytes_after_update(row), *allocator_answers(record)]
    return Shown("\n".join(words), figure, said)


def phases_of(row: Row) -> list[tuple[str, int, int]]:
    """Return the phases of the recorded steps with their first and last entry.

    They are read off the curve: a step's forward pass ends where most is allocated, its backward
    pass where least is allocated after that, and all that follows counts as the optimizer.
    """
    phases, start = [], row["entry"][0]
    for end in row["entries"]:
        points = [
            point
            for point in zip(row["entry"], row["allocated"], strict=True)
            if start <= point[0] <= end
        ]
        highest = max(points, key=lambda point: point[1])[0]
        lowest = min(
            (point for point in points if point[0] >= highest), key=lambda point: point[1]
        )[0]
        phases += [
            ("forward", start, highest),
            ("backward", highest, lowest),
            ("optimizer", lowest, end),
        ]
        start = end
    return phases


def mark_steps(axes: Axes, row: Row) -> None:
    """Name the phases above the axes and the steps within them."""
    phases = phases_of(row)
    phase_strip(axes, phases, {"optimizer": "rest of step"})  # Adam is not all of it
    for name, start, _ in phases[1:]:
        color = GREY if name == "forward" else BAND  # a step begins
        axes.axvline(start, color=color, linewidth=0.8, zorder=0)
    for step, (start, end) in enumerate(
        zip([row["entry"][0], *row["entries"]], row["entries"], strict=False), start=1
    ):
        axes.text(
            (start + end) / 2,
            0.03,
            f"step {step}",
            color=GREY,
            ha="center",
            transform=axes.get_xaxis_transform(),
        )


def bytes_after_update(row: Row) -> str:
    """Say what is allocated after the second update, without what was there before training."""
    before = max(row["allocated"]) - max(row["peak_of_step"])
    held, parameters = row["allocated"][-1] - before, cost.num_parameters(MEMORY.model)
    return (
        f"After the update of step 2, {plain_bytes(held)} are allocated: {held / parameters:.1f} "
        f"bytes for each of {parameters / 1e9:.2f} billion parameters."
    )


def allocator_answers(record: Record) -> list[str]:
    """Say how the allocator answered this chapter's two requests, and a limit between the peaks."""
    words = []
    for row in rows_of(record, lambda row: row["case"].startswith("fragmentation")):
        reserved = 10 * MIB * sum(row["picture"].count(each) for each in "#.")
        answer = "fails"
        if row["succeeds"]:
            answer = (
                "succeeds: the device had room for one more segment"
                if reserved + 40 * MIB <= CAPACITY + MIB
                else "succeeds: free segments were returned to the device"
            )
        words.append(f"With the segments {row['picture']} a request for 40 MiB {answer}.")
        if "had room" in answer:
            words[-1] += " So it does not test whether free segments are returned."
    out = record.row("out of memory in the second step")
    if out is not None and out["failed_in_step"] is not None:
        words.append(
            f"Step 1 reserves {plain_bytes(out['reserved_of_step'][0])}, and step 2 "
            f"allocates {plain_bytes(out['allocated_of_step'][1])} at its peak: with at "
            f"most {plain_bytes(out['limit_bytes'])} of memory, the same training runs "
            f"out of it in step {out['failed_in_step']}."
        )
    return words


# Chapter 3: what recomputation saves


def recomputation(folder: Path = FOLDER) -> Shown:
    """The peak of a step by policy: recorded by the meter, and predicted."""
    record = newest("memory", folder)
    predicted = {
        f"{kind}, predicted": MEMORY.estimate(device_of(record), "bf16", kind).memory
        for kind in ("none", "selective", "full")
    }
    rows = rows_of(record, lambda row: "recompute" in row)
    measured = {f"{row['recompute']}, recorded": meter_kinds(row) for row in rows}
    sentence = origin(record)
    if rows:
        off = max(
            abs(row[name] / row["allocated_bytes"] - 1)
            for row in rows
            for name in ("meter_bytes", "dry_run_bytes")
        )
        sentence += f" Meter and dry run are within {off:.1%} of what the allocator counted."
    bars = measured or predicted
    alt = (
        "Peak of a step: "
        + ", ".join(f"{name} {plain_bytes(sum(kinds.values()))}" for name, kinds in bars.items())
        + "."
    )
    return Shown(sentence, memory_bars(measured, predicted), alt)


def meter_kinds(row: Row) -> dict[str, float]:
    """Return the bytes that the meter saw at the peak, by kind."""
    kinds = ("parameter", "gradient", "optimizer state", "activation", "temporary")
    return {kind: row[f"meter_{kind.replace(' ', '_')}"] for kind in kinds}


# Chapters 4 and 6: what happens when


def one_step(folder: Path = FOLDER) -> Shown:
    """Forward, backward and optimizer of a step that sends nothing: what can hide messages."""
    record = newest("overlap", folder)
    guess = OVERLAP.estimate(device_of(record), "bf16-autocast")
    update = 1e3 * guess.parts["optimizer"]
    compute = 1e3 * guess.seconds - update
    predicted = {"predicted": phases(0.0, compute / 3, compute, compute + update)}
    row = next(iter(rows_of(record, lambda row: row["case"] == "plain step")), None)
    ends = (
        [row[name] for name in ("forward_end_ms", "update_start_ms", "update_end_ms")]
        if row is not None
        else [None]
    )
    # a trace may lack a name: then there is nothing to draw
    recorded = {} if None in ends else {"recorded": phases(0.0, *ends)}
    figure = timeline(recorded, predicted)
    lanes = recorded or predicted
    backward = next(iter(lanes.values()))[1]
    alt = (
        f"The backward pass takes {backward.end - backward.start:.1f} ms: only so much of an "
        "all-reduce of the gradients can be hidden behind it."
    )
    return Shown(origin(record), figure, alt)


def phases(start: float, forward_end: float, update_start: float, end: float) -> list[Block]:
    return [
        Block("forward", start, forward_end),
        Block("backward", forward_end, update_start),
        Block("optimizer", update_start, end),
    ]


def prefetch(folder: Path = FOLDER) -> Shown:
    """Milliseconds of FSDP's gathers and of compute, and how much of the gathers is hidden."""
    record = newest("overlap", folder)
    device = device_of(record)
    guess = OVERLAP.estimate(device, "bf16")
    # a gather of one rank reads and writes each 16-bit parameter once; twice a step
    copied = 2 * 2 * 2 * cost.num_parameters(OVERLAP.model)
    predicted = {
        "compute": 1e3 * guess.seconds,
        "copies": 1e3 * copied / device.memory_bandwidth,
        "copies, hidden": 1e3 * copied / device.memory_bandwidth,
    }
    row = next(iter(rows_of(record, lambda row: row["case"] == "FSDP step")), None)
    recorded, sentence = {}, origin(record)
    alt = f"Predicted: {predicted['copies']:.1f} ms of copies beside {predicted['compute']:.0f} ms."
    if row is not None and "busy_ms" in row:
        for name, key in (
            ("compute", "busy_ms"),
            ("copies", "other_streams_ms"),
            ("copies, hidden", "hidden_ms"),
        ):
            recorded[name] = (row[key],) * 3
        alt = (
            f"{row['hidden_ms']:.1f} of {row['other_streams_ms']:.1f} ms of copies are hidden "
            "behind compute."
        )
        sentence += (
            f" {alt} The step takes {row['step_ms']:.1f} ms; without FSDP it takes "
            f"{record.row('plain step')['step_ms']:.1f} ms."
        )
    return Shown(sentence, ranges(recorded, predicted, "ms in one step"), alt)


# Chapter 10: what a precision is worth


def precisions(folder: Path = FOLDER) -> Shown:
    """Tokens per second of each recipe, and its loss after the same steps."""
    record = newest("precision", folder)
    device = device_of(record)
    recipes = ("fp32", "bf16-autocast", "bf16", "bf16-fp32-grads", "fp16", "fp8")
    predicted = {
        recipe: PRECISION.num_tokens / PRECISION.estimate(device, recipe).seconds
        for recipe in recipes
    }
    rows = rows_of(record)
    recorded = {
        row["case"]: low_middle_high(row, row["tokens_per_second"] * row["seconds"]) for row in rows
    }
    sentence, alt = origin(record), "Predicted tokens per second of each recipe."
    if rows:
        losses = {row["case"]: row["loss"] for row in rows}
        sentence += (
            f" Losses after {rows[0]['steps']} steps: {min(losses.values()):.3f} to "
            f"{max(losses.values()):.3f}. Float32 ends at {losses['fp32']:.3f} with our "
            f"step and at {losses['torch, fp32']:.3f} with PyTorch's, which only adds in a "
            "different order. With one run of each, nobody can tell how much of the rest is "
            "precision and how much is chance."
        )
        medians = {name: middle for name, (_, middle, _) in recorded.items()}
        slowest = min(medians, key=medians.get)
        alt = (
            f"Medians of {medians[slowest]:,.0f} tokens per second ({slowest}) to "
            f"{max(medians.values()):,.0f}."
        )
    return Shown(sentence, ranges(recorded, predicted, "tokens/s"), alt)


# Chapter 12: estimates and clock


def estimates(folder: Path = FOLDER) -> Shown:
    """Seconds of the steps of chapter 1's models, estimated and recorded."""
    record = newest("mfu", folder)
    device = device_of(record)
    recipes = {"ours": "bf16-autocast", "ours, bf16 weights": "bf16"}
    predicted = {
        f"{name}, eager, {side}": 1e3 * step.estimate(device, recipe).seconds
        for name, step in SPEED.items()
        for side, recipe in recipes.items()
    }
    rows = {
        row["case"]: tuple(1e3 * row[name] for name in ("seconds_least", "seconds", "seconds_most"))
        for row in rows_of(record)
        if row["case"] in predicted
    }
    alt = "Estimated: " + ", ".join(f"{name} {ms:.0f} ms" for name, ms in predicted.items()) + "."
    if rows:
        errors = [predicted[name] / rows[name][1] - 1 for name in rows]
        alt = f"The estimates are off by {min(errors):+.0%} to {max(errors):+.0%}."
    return Shown(origin(record), ranges(rows, predicted, "ms per step"), alt)
