"""`minitron plan`: the best layouts for a config on so many GPUs, as a table.

Read in this order: PlanOptions, read_plan, run_plan, table, compared, next_lines.
"""

import math
import shlex
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tyro.conf import Positional

from minitron.config import Config, ConfigError, command_line, require
from minitron.config.file import load
from minitron.plan.explain import OPTIONS, PARTS, as_it_stands, costs_most, explain
from minitron.plan.hardware import Device, find_device
from minitron.plan.held_out import sharded_rows
from minitron.plan.job import Job, size_of
from minitron.plan.launching import changes, in_layout, launcher
from minitron.plan.money import TYPICAL_PUE, GpuHour, bill
from minitron.plan.search import MOST_GPUS, SAME, Candidate, Search, search
from minitron.plan.systems import MINITRON
from minitron.system.progress import CLOCK, Progress

RARE = {"schedule": ("1f1b", "interleaved"), "replicas": (1,), "unsharded": ("nothing",)}
"""Options whose columns are left out where all layouts have the usual values."""
NUM_REASONS = 6  # for dropping a layout that are listed


@dataclass(frozen=True)
class PlanOptions(Config):
    """Find the fastest layouts for a config, with the memory, time and cost of each.

    The config gives model, sequence length, batch and precision. Its own layout, which --parallel
    options change, is compared with the fastest.
    """

    file: Positional[Path | None] = None
    """TOML file, as for training; must come first."""
    gpus: int | None = None
    """Number of GPUs; required."""
    device: str | None = None
    """GPU: a name in minitron/plan/hardware.csv, or its first letters, such as A100, H200 or B200.
    Default: H100."""
    gpus_per_node: int = 8
    """GPUs that NVLink connects."""
    calibrate: bool = False
    """Measure this machine, and plan for devices like its own."""
    tokens: float | None = None
    """Tokens to train on. Default: those of the config's steps."""
    price: float | None = None
    """Price of a GPU-hour, in --currency."""
    currency: str = "USD"
    """Currency of --price and of the printed cost."""
    watts: float | None = None
    """Average power of a GPU with its share of the node, in watts. Default: the GPU's power in its
    datasheet."""
    pue: float = TYPICAL_PUE
    """Power usage effectiveness: energy of the machine room over that of its computers."""
    top: int = 10
    """Number of layouts to list."""
    explain: bool = False
    """Explain why the best layout is the best, and which resource limits it."""


def read_plan(args: Sequence[str]) -> PlanOptions:
    """Read the command line; raises ConfigError with one line."""
    prog = "minitron plan"
    if {"-h", "--help"} & set(args):
        return command_line.parse(PlanOptions, args, prog)
    require(
        args and not args[0].startswith("-"),
        "no TOML file given",
        "name a TOML file first, as in `minitron plan configs/llama-8b.toml --gpus 512`",
    )
    options = command_line.parse(PlanOptions, args, prog, PlanOptions(**vars(load(Path(args[0])))))
    require(
        options.gpus is not None,
        "--gpus is missing",
        "say how many GPUs there are, as in --gpus 512",
    )
    for name in ("gpus", "gpus_per_node", "top"):
        value = getattr(options, name)
        require(value > 0, f"--{name.replace('_', '-')} {value}: must be 1 or more")
    require(options.gpus <= MOST_GPUS, f"--gpus {options.gpus}: must be {MOST_GPUS:,} or less")
    tokens, device = options.tokens, options.device
    require(
        tokens is None or 0 < tokens < math.inf,
        f"--tokens {tokens}: must be a number greater than 0",
    )
    require(
        device is None or not options.calibrate,
        f"--device {device} with --calibrate, which measures this machine",
        "leave one of them out",
    )
    return options


def asked(options: PlanOptions) -> Config:
    return Config(options.model, options.data, options.train, options.parallel)


def with_vocabulary(config: Config) -> Config:
    """Return the config with the data's vocabulary size, if the file leaves it to the data."""
    if config.model.vocab_size > 0:
        return config
    from minitron.running.starting import with_vocabulary_of_data  # with all that reads data

    try:
        return with_vocabulary_of_data(config)
    except ConfigError as error:
        raise ConfigError(
            error.problem,
            *error.remedies,
            "or say how many tokens it knows with --model.vocab-size",
            field="model.vocab_size",
        ) from None


def chosen_device(options: PlanOptions) -> Device:
    if not options.calibrate:
        return find_device(options.device or "H100")
    from minitron.plan.calibrate import calibrate

    return calibrate()


def run_plan(args: Sequence[str]) -> int:
    """Print the plan that the command line asks for."""
    options = read_plan(args)
    first = "measuring this machine" if options.calibrate else "reading the config"
    with Progress(desc=first, bar_format=CLOCK):
        device, config = chosen_device(options), with_vocabulary(asked(options))
    watts = options.watts if options.watts is not None else device.watts or None
    gpu_hour = GpuHour(watts, options.pue, options.price, options.currency)
    job = job_of(config, options.gpus, device, options.gpus_per_node)
    tokens = options.tokens or config.train.steps * tokens_per_step(job)
    try:
        standing = as_it_stands(config, job)
    except ConfigError as error:
        if any(word.startswith("--parallel.") for word in args):
            raise  # a layout that is asked for has to work; the file's is one to compare with
        standing = error

    start = time.perf_counter()
    with Progress(desc="weighing layouts", bar_format=CLOCK):
        found = search(job)
    print(f"{heading(options.file.stem, job)}\n")
    print(counted(found, time.perf_counter() - start))
    best = found.trusted
    shown = [best, *(each for each in found.candidates if each is not best)][: options.top]
    print(f"\n{table(shown, tokens, gpu_hour)}\n")
    print(paid(tokens, gpu_hour))
    if any(each.decision.parallel.zero == 3 for each in shown):
        print(of_stage_3(found))
    print(f"{options.file} as it stands: {compared(standing, found)}")
    if options.explain:
        with Progress(desc="weighing other hardware", bar_format=CLOCK):
            text = explain(found, standing if isinstance(standing, Candidate) else None)
        print(f"\n{text}\n")
    print(next_lines(options, best))
    return 0


def job_of(config: Config, num_gpus: int, device: Device, gpus_per_node: int = 8) -> Job:
    """Describe what `config` trains, on so many GPUs."""
    train = config.train
    return Job(
        config.model,
        num_gpus,
        device,
        config.data.sequence_length,
        train.global_batch_size,
        gpus_per_node,
        train.precision,
    )


def tokens_per_step(job: Job) -> int:
    return job.global_batch_size * job.sequence_length


# What is printed


def heading(name: str, job: Job) -> str:
    limit, memory = job.limit / 1e9, job.device.memory_bytes / 1e9
    return (
        f"{name}: {size_of(job.model)} parameters on {job.num_gpus:,} x {job.device.name}, "
        f"{limit:.0f} of {memory:.0f} GB usable; a step is {job.global_batch_size:,} sequences "
        f"of {job.sequence_length:,} tokens in {job.precision}"
    )


def counted(found: Search, seconds: float) -> str:
    """Say how many layouts there are, and why most are not in the table."""
    reasons = [(len(found.candidates), "fit"), *found.dropped()[:NUM_REASONS]]
    lines = [
        f"{found.num_layouts:,} layouts in {seconds:.1f} s. Those that fit, and those "
        "rejected, by reason, with one example each:",
        *(f"{count:>9,}  {reason}" for count, reason in reasons),
    ]
    return "\n".join(lines)


def table(candidates: Sequence[Candidate], tokens: float, gpu_hour: GpuHour) -> str:
    """Write a row for each layout: its options, then what it holds, takes and costs.

    Options that few layouts have get a column only if one of these has it.
    """
    rare = [
        name
        for name, default in RARE.items()
        if any(OPTIONS[name](each.decision) not in default for each in candidates)
    ]
    names = [
        "tp",
        "seq",
        "pp",
        "chunks",
        "dp",
        "ZeRO",
        *rare,
        "recompute",
        "micro",
        "GB",
        "s/step",
        "MFU",
        "bubble",
        "comm",
        "days",
        "GPU-hours",
        *[gpu_hour.currency] * (gpu_hour.price is not None),
        *["MWh"] * (gpu_hour.watts is not None),
    ]
    rows = [names, *(row(candidate, tokens, gpu_hour, rare) for candidate in candidates)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(cell.rjust(width) for cell, width in zip(cells, widths, strict=True))
        for cells in rows
    )


def row(candidate: Candidate, tokens: float, gpu_hour: GpuHour, rare: Sequence[str]) -> list[str]:
    decision, job = candidate.decision, candidate.job
    axes = decision.parallel
    total = bill(tokens, tokens_per_step(job), candidate.seconds, job.num_gpus, gpu_hour)
    return [
        str(axes.tp),
        "yes" if axes.sequence else "no",
        str(axes.pp),
        str(axes.chunks),
        str(axes.dp),
        str(axes.zero),
        *(str(OPTIONS[name](decision)).replace(" and ", "+") for name in rare),
        decision.recompute,
        str(decision.micro_batch_size),
        f"{candidate.total_bytes / 1e9:.1f}",
        f"{candidate.seconds:.4g}",
        f"{candidate.estimate.mfu:.1%}",
        f"{candidate.bubble:.1%}",
        f"{candidate.communication:.1%}",
        f"{total.days:.3g}",
        f"{total.gpu_hours:,.0f}",
        *([] if total.price is None else [f"{total.price:,.0f}"]),
        *([] if total.megawatt_hours is None else [f"{total.megawatt_hours:,.3g}"]),
    ]


def paid(tokens: float, gpu_hour: GpuHour) -> str:
    """Say what the table's last columns are for."""
    energy = "" if gpu_hour.watts is None else f", {gpu_hour.watts:g} W a GPU, PUE {gpu_hour.pue:g}"
    price = "" if gpu_hour.price is None else f", {gpu_hour.price:g} {gpu_hour.currency} a GPU-hour"
    return (
        "seq: sequence parallelism; micro: sequences of a micro-batch; GB: on the fullest GPU;\n"
        "bubble, comm: share of a step in which GPUs wait for the pipeline, and for messages;\n"
        f"days and what follows: for {tokens:.3g} tokens{energy}{price}"
    )


def of_stage_3(found: Search) -> str:
    """Say what the seconds of ZeRO-3 rest on, and why another layout may come first."""
    times = max(row.seconds / row.predict().seconds for row in sharded_rows(MINITRON))
    basis = (
        "ZeRO-3: the estimate assumes that communication overlaps with compute; steps measured "
        f"with DeepSpeed took up to {times:.1f} times as long (Narayanan et al. 2021, table 2)"
    )
    gain = 1 - found.candidates[0].seconds / found.trusted.seconds
    if gain < SAME:
        return basis
    return (
        f"{basis}. So the fastest layout without ZeRO-3 is listed first, although the fastest "
        f"estimate is {gain:.1%} lower"
    )


def compared(standing: Candidate | ConfigError, found: Search) -> str:
    """Say how far a layout is from the best, or what is wrong with it."""
    if isinstance(standing, ConfigError):
        return f"cannot run on {found.job.num_gpus} GPUs: {standing}"
    if not standing.fits:
        return (
            f"{standing}: does not fit, {standing.total_bytes / 1e9:.1f} GB where "
            f"{found.job.limit / 1e9:.0f} GB are usable"
        )
    best = found.trusted
    times = standing.seconds / best.seconds
    num_faster = sum(
        found.trusts(each) and each.seconds < standing.seconds for each in found.candidates
    )
    kind = "" if found.trusts(standing) else " without ZeRO-3"
    if num_faster == 0:
        return f"{standing}: no layout{kind} is faster"
    faster = f"1 layout{kind} is" if num_faster == 1 else f"{num_faster:,} layouts{kind} are"
    return (
        f"{standing}: {standing.seconds:.4g} s a step, {times:.2f} times that of the best, "
        f"most of the difference in {PARTS[costs_most(standing, best)]}; {faster} faster"
    )


# What to type next


def next_lines(options: PlanOptions, best: Candidate) -> str:
    """Write the command lines that train in the best layout, and that dry-run a step of it."""
    wanted = in_layout(asked(options), best.decision)
    words = shlex.join([str(options.file), *changes(load(options.file), wanted)])
    device = "" if options.calibrate else f" --device {best.job.device.name}"
    return (
        f"The best: {launcher(best)} {words}\n"
        f"What its ranks hold: minitron dryrun {words} --gpus {best.job.num_gpus}{device}"
    )
