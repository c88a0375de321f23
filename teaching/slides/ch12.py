"""Drawings of deck 12: GPT-3 by hand, a rank that pretends, two traps, and layouts compared."""

from dataclasses import replace

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from minitron import cost
from minitron.plan.explain import doubled
from minitron.plan.money import training_days
from minitron.plan.published import published_rows
from minitron.plan.search import Candidate
from teaching.figures import memory_bars, wire
from teaching.figures_plan import errors
from teaching.figures_style import BAND, BLACK, GREY, RANK_COLOR, SERIES, STYLE, canvas, ink, pale
from teaching.lab import ch12 as lab
from teaching.lab import large_plans as plans
from teaching.slides.models import A100, H100
from teaching.slides.shapes import PREDICTED, WIDE, arrow, box, name_rows, page, write

JOB, LAYOUT = plans.GPT3_JOB, plans.GPT3_LAYOUT
"""GPT-3 175B on 1,024 A100s, in its paper's layout."""
GPT3, S, TOKENS, GB = JOB.model, JOB.sequence_length, 300e9, 1e9


@rc_context(WIDE)
def by_hand() -> Figure:
    """Draw GPT-3's training state in memories of A100s, and its FLOPs in years of them."""
    figure, axes = page(10, 4.3)
    parameters = cost.num_parameters(GPT3)
    state = 16 * parameters
    years = training_days(6 * parameters * TOKENS, 1, 0.5 * A100.bf16_flops) / 365
    write(axes, (0.2, 0.3), f"training state: {state / 1e12:.1f} TB", weight="bold")
    side, left, memory = 0.42, 0.2, A100.memory_bytes
    full, rest = divmod(state / memory, 1)
    for index in range(int(full) + 1):
        corner = (left + side * (index % 11), 0.6 + side * (index // 11))
        share = 1.0 if index < full else rest
        box(axes, (*corner, side, side), color="white", edge=GREY)
        box(axes, (*corner, share * side, side), color=SERIES[0], edge=GREY)
    write(axes, (0.2, 2.45), f"a square: the {memory / GB:.0f} GB of one A100", GREY)

    write(axes, (5.6, 0.3), f"compute: {6 * parameters * TOKENS:.2g} FLOPs", weight="bold")
    for y, gpus, words in (
        (0.65, 1, f"{years:.0f} years"),
        (1.55, 1024, f"{365 * years / 1024:.0f} days"),
    ):
        box(axes, (5.6, y, 3.9 if gpus == 1 else 0.05, 0.5), color=SERIES[1])
        text = f"{gpus:,} A100{'s' * (gpus > 1)} at half of the peak: {words}"
        write(axes, (5.6, y + 0.68), text)
    dollars = 2 * 365 * 24 * years
    write(axes, (5.6, 2.75), f"{365 * 24 * years / 1e3:,.0f} thousand GPU-hours", weight="bold")
    write(axes, (5.6, 3.1), f"at 2 dollars: {dollars / 1e6:.1f} million dollars")
    write(axes, (0.2, 3.85), "Not yet known: which layout fits, and how long its step takes.", GREY)
    return figure


TRAINED = {  # parameters, tokens, device, GPU-hours as published (chapter 12, section 2)
    "LLaMA 65B": (65.2e9, 1.4e12, A100, 1_022_362),
    "Llama 2 70B": (69.0e9, 2.0e12, A100, 1_720_320),
    "BLOOM 176B": (176.2e9, 366e9, A100, 1_082_990),
    "Llama 3.1 70B": (70.6e9, 15e12, H100, 7_000_000),
    "Llama 3.1 405B": (405.9e9, 15.6e12, H100, 30_840_000),
}


@rc_context(WIDE)
def shares_of_the_peak() -> Figure:
    """Draw five runs' shares of the peak by 6 P T, and GPT-3's days by 6 and by 8 P T."""
    figure = Figure(figsize=(10, 3.9), layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=(1.7, 1))
    for y, (number, read, device, hours) in enumerate(TRAINED.values()):
        share = 6 * number * read / (3600 * hours * device.bf16_flops)
        left.barh(y, 100 * share, 0.6, color=SERIES[0])
        write(left, (1, y), f"{share:.0%}", ink(SERIES[0]))
    left.axvline(40, color=BLACK, linestyle="--", linewidth=1.3)
    write(left, (41, 4.62), "assumed: 40%", size=13)
    name_rows(left, list(TRAINED))
    left.set_xlim(0, 60)
    left.set_ylim(4.9, -0.5)
    left.set_title("6 P T over published GPU-hours")
    left.set_xlabel("share of the peak (%)")

    for y, each in enumerate((6, 8)):
        days = training_days(each * 175e9 * TOKENS, 1024, 140e12)
        right.barh(y, days, 0.5, color=pale(SERIES[1]), **PREDICTED)
        write(right, (days + 1, y), f"{days:.0f} days")
    name_rows(right, ("6 P T", "8 P T"))
    right.set_xlim(0, 48)
    right.set_ylim(2.2, -0.6)
    right.set_title("GPT-3 at 140 TFLOP/s")
    right.set_xlabel("days on 1,024 A100s")
    return figure


@rc_context(WIDE)
def real_and_fake() -> Figure:
    """Draw four processes with tensors, and one with shapes alone, whose other ranks are not."""
    figure, axes = page(10, 4.5)
    width, tokens, ranks = 512, 64, 4
    sent = cost.collective_volume("all_reduce", tokens * width, 4, ranks, 3).sent
    held = 2 * 4 * width * (width // ranks + tokens)  # weight, input, and their gradients
    shape = f"weight {width // ranks} x {width}\nx {tokens} x {width}"
    for left, title, is_fake in ((0.2, "four processes", False), (5.2, "one process", True)):
        write(axes, (left, 0.3), title, weight="bold")
        for rank in range(ranks):
            corner = (left + 2.35 * (rank % 2), 0.65 + 1.45 * (rank // 2))
            _draw_process(axes, corner, rank, shape, is_fake)
        text = f"rank 3 sends {sent:,} B,\nholds {held:,} B"
        write(axes, (left, 3.95), text, linespacing=1.3)
    return figure


def _draw_process(
    axes: Axes, corner: tuple[float, float], rank: int, shape: str, is_fake: bool
) -> None:
    """Draw a rank with its tensors; a fake is dashed: with shapes alone, or not there at all."""
    bounds = (*corner, 2.15, 1.25)
    if not is_fake:
        box(axes, bounds, f"rank {rank}\n{shape}", RANK_COLOR[rank], 13)
    elif rank == 3:
        text = f"rank {rank}, shapes only\n{shape}"
        box(axes, bounds, text, "white", 13, RANK_COLOR[rank], linestyle="--", linewidth=2.5)
    else:
        text = f"rank {rank}\ndoes not exist"
        box(axes, bounds, text, "white", 13, BAND, linestyle="--", linewidth=2)


@rc_context(STYLE)
def spreadsheet() -> Figure:
    """Draw the memory of 8 samples per micro-batch: by a plausible formula, and by a dry run."""
    t, p, d = 8, 8, 16
    parameters, layout = cost.num_parameters(GPT3), cost.Layout(8, sequence_parallel=True)
    block = cost.activation_bytes_per_layer(GPT3, 1, S, layout=layout)
    formula = {
        "parameter": 2 * parameters / (t * p),
        "gradient": 4 * parameters / (t * p),
        "optimizer state": 12 * parameters / (t * p * d),
        "activation": 8 * block * GPT3.num_layers / p,
    }
    eight = plans.counted(JOB, lab.cut(d, tp=t, pp=p, micro_batch=8), rank=0)
    return memory_bars(
        {"dry run, rank 0": eight.peak.bytes},
        {"spreadsheet": formula},
        A100.memory_bytes,
        f"beyond {A100.memory_bytes / GB:.0f} GB",
    )


@rc_context(STYLE)
def datasheets() -> Figure:
    """Draw errors of step times on A100s, with dense peaks and with the numbers as printed."""
    sold = doubled(doubled(A100, "FLOP/s"), "NVLink bandwidth")
    rows = [row for row in published_rows() if row.job.device == A100]
    groups = {}
    for name, device in (("312 TFLOP/s, 300 GB/s", A100), ("624 TFLOP/s, 600 GB/s", sold)):
        found: dict[str, list[float]] = {}
        for row in rows:
            error = lab.seconds_on(device, row) / row.seconds - 1
            found.setdefault(lab.label(row).split()[0], []).append(error)
        groups[name] = found
    return errors(groups)


@rc_context(STYLE)
def dry_wire() -> Figure:
    """Draw what a middle rank of GPT-3 sends along each axis, by a dry run and by formula."""
    t, p, d, m = 8, 8, 16, 1536 // 16
    layers = GPT3.num_layers // p
    two, one = (cost.tensor_parallel_parameters(replace(GPT3, num_layers=n), t) for n in (2, 1))
    own, width = layers * (two - one), GPT3.width
    between = cost.tensor_parallel_volume(1, S, width, 2, 0, cost.Layout(t, True)).sent
    formula = {
        "tp": m * layers * between,
        "dp": cost.collective_volume("reduce_scatter", own, 4, d, 0).sent
        + cost.collective_volume("all_gather", own, 2, d, 0).sent,
        "pp": cost.pipeline_volume(1, S // t, width, 2, p, m, rank=4).sent,
    }
    sent = plans.counted(JOB, LAYOUT, rank=512).bytes_sent
    counted = {axis: sum(size for (_, on), size in sent.items() if on == axis) for axis in formula}
    figure = wire(
        {axis: [size, size] for axis, size in counted.items()},
        {axis: [size, size] for axis, size in formula.items()},
    )
    for text in figure.axes[0].texts:
        text.set_text(text.get_text().replace("each rank", "rank 512"))
    figure.axes[0].set_xlabel("GB sent (bar: dry run, tick: formula)")
    return figure


def compared() -> dict[str, tuple[Candidate, Candidate]]:
    """Return each paper's layout, and the best that the package can train (section 7)."""
    return {
        name: (Candidate(job, layout), plans.chosen(job).best)
        for name, (job, layout) in plans.PUBLISHED.items()
    }


@rc_context(WIDE)
def papers_and_best() -> Figure:
    """Draw the estimated MFU of four jobs in the paper's layout and in the best that fits."""
    figure, axes = canvas(10, 4.4)
    for y, (paper, best) in enumerate(compared().values()):
        shares = [100 * each.estimate.mfu for each in (paper, best)]
        arrow(axes, (shares[0], y), (shares[1], y), shrinkA=8, shrinkB=8)
        for share, each, color, place in zip(
            shares, (paper, best), (GREY, SERIES[0]), (-0.27, 0.29), strict=True
        ):
            axes.plot([share], [y], "o", color=color, markersize=12)
            fits = "" if each.total_bytes <= each.job.limit else ", does not fit"
            words = f"{share:.1f}%: {_cut_of(each)}{fits}"
            write(axes, (share, y + place), words, color, 13, ha="center")
    name_rows(axes, list(compared()))
    axes.set_xlim(25, 66)
    axes.set_ylim(3.6, -0.6)
    axes.set_xlabel("MFU, estimated (%): gray the paper's layout, teal the best that fits")
    return figure


def _cut_of(candidate: Candidate) -> str:
    """Return a layout's tp and pp, and whether everything is recomputed."""
    words = lab.brief(candidate).split(", ")
    return ", ".join([*words[:2], *(word for word in words if word == "recomputed")])
