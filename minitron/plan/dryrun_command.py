"""`minitron dryrun`: what the ranks of a run would hold and send, before there is a GPU."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tyro.conf import Positional

from minitron.config import Config, command_line, require
from minitron.config.file import load
from minitron.config.layout import data_parallel_size
from minitron.plan.hardware import find_device
from minitron.plan.job import size_of
from minitron.plan.search import MOST_GPUS
from minitron.system.progress import CLOCK, Progress


@dataclass(frozen=True)
class DryRunOptions(Config):
    """Run a training step of single ranks without a GPU: what they hold, send and compute.

    By default, it runs one rank each of the pipeline's first, middle and last stage.
    """

    file: Positional[Path | None] = None
    """TOML file, as for training; must come first."""
    gpus: int | None = None
    """Number of GPUs; required."""
    rank: int | None = None
    """Run only this rank. Ranks count along tp first, then cp, dp and pp."""
    every_stage: bool = False
    """Cover every pipeline stage; identical stages are run only once, and share the result."""
    device: str | None = None
    """Report whether ranks fit on this GPU: a name in minitron/plan/hardware.csv, such as H100."""


def read_dry_run(args: Sequence[str]) -> DryRunOptions:
    """Read the command line; raises ConfigError with one line."""
    prog = "minitron dryrun"
    if {"-h", "--help"} & set(args):
        return command_line.parse(DryRunOptions, args, prog)
    require(
        args and not args[0].startswith("-"),
        "no TOML file given",
        "name a TOML file first, as in `minitron dryrun configs/gpt3-175b.toml --gpus 1024`",
    )
    default = DryRunOptions(**vars(load(Path(args[0]))))
    options = command_line.parse(DryRunOptions, args, prog, default)
    rank, gpus = options.rank, options.gpus
    require(gpus is not None, "--gpus is missing", "say how many GPUs there are, as in --gpus 1024")
    require(gpus > 0, f"--gpus {gpus}: must be 1 or more")
    require(gpus <= MOST_GPUS, f"--gpus {gpus}: must be {MOST_GPUS:,} or less")
    require(
        rank is None or not options.every_stage,
        f"--rank {rank} with --every-stage",
        "leave one of them out",
    )
    require(
        rank is None or 0 <= rank < gpus, f"--rank {rank} of {gpus} GPUs", f"use 0 to {gpus - 1}"
    )
    return options


def ranks_of(options: DryRunOptions) -> list[int]:
    """Return the ranks to run: the first of each stage that is asked for."""
    if options.rank is not None:
        return [options.rank]
    pp = options.parallel.pp
    stages = range(pp) if options.every_stage else sorted({0, pp // 2, pp - 1})
    return [stage * (options.gpus // pp) for stage in stages]


def run_dry_run(args: Sequence[str]) -> int:
    """Print what the command line asks for."""
    options = read_dry_run(args)
    device = None if options.device is None else find_device(options.device)
    with Progress(desc="loading PyTorch", bar_format=CLOCK):
        from minitron.plan.dryrun import prepared
        from minitron.plan.dryrun_table import describe
        from minitron.plan.stage_dedup import dry_runs

        config = Config(options.model, options.data, options.train, options.parallel)
        config = prepared(config, options.gpus)
    print(f"{heading(options, config)}\n", flush=True)  # it takes minutes to the next line
    with Progress(total=len(ranks_of(options)), desc="ranks") as bar:
        runs = []
        for run in dry_runs(config, options.gpus, ranks_of(options)):
            runs.append(run)
            bar.update()
    print(describe(runs, device))
    return 0


def heading(options: DryRunOptions, config: Config) -> str:
    """Describe the model, the layout and a step in words."""
    axes, train, gpus = config.parallel, config.train, options.gpus
    chunks = f" x {axes.chunks}" if axes.chunks > 1 else ""
    sequence = " + sequence" if axes.sequence else ""
    context = f"cp {axes.cp} ({axes.context}), " if axes.cp > 1 else ""
    left_out = ", not compiled" if options.train.compile else ""
    return (
        f"{options.file.stem}: {size_of(config.model)} parameters on "
        f"{gpus:,} GPUs, dp {data_parallel_size(config, gpus)}, pp {axes.pp}{chunks}, "
        f"{context}tp {axes.tp}{sequence}, ZeRO-{axes.zero}\n"
        f"A step: {train.global_batch_size:,} sequences of {config.data.sequence_length:,} "
        f"tokens, {train.micro_batch_size} per micro-batch, in {train.precision}, recomputation: "
        f"{train.recompute}{left_out}"
    )
