"""The command that trains: its options, how a run is started, and what it says at the end.

    minitron train configs/stories.toml
    torchrun --nproc-per-node 4 -m minitron.train configs/stories.toml

Read in this order: TrainOptions, read_options, start, run_train. The loop is in `train_loop`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import tyro

from minitron.comm.agreement import all_gather_objects, all_reduce_max_int
from minitron.config import Config, ConfigError, command_line, require
from minitron.config.file import from_dict, load
from minitron.hugging_face.config import read_model_config
from minitron.launch import is_torchrun_rank, restarts, torchrun_group
from minitron.launch.process import StopSignals
from minitron.run import Run
from minitron.running.folder import default_folder
from minitron.system.files import read_json
from minitron.train_loop import train


@dataclass(frozen=True)
class TrainOptions(Config):
    """Train a model as configured in a TOML file; options override its fields."""

    file: tyro.conf.Positional[Path | None] = None
    """TOML file with any of the tables [model], [data], [train], [parallel], [log]; must come
    first."""
    run_dir: Path | None = None
    """Folder of the run. Default: runs/NAME, after the TOML file, or runs/NAME-2, ... if taken."""
    resume: bool = False
    """Continue the run bit for bit from its newest checkpoint."""
    restart: bool = False
    """Resume the run in --run-dir if it has a checkpoint, otherwise start it: a command that a
    scheduler can repeat until the run is done."""
    weights: Path | None = None
    """Start from the weights in this folder: a Llama or GPT-2 in Hugging Face's format, whose
    config.json fills in [model]."""
    use: tuple[str, ...] = ()
    """Exercises, such as 1.1 1.2: train with your functions instead of the package's."""


def read_options(args: list[str]) -> TrainOptions:
    """Read the command line of a training run; raises ConfigError with one line."""
    for word in args[1:]:
        require(
            not word.endswith(".toml"),
            f"{word}: the TOML file must come first, as in `minitron train {word} ...`",
        )
    words = [part for word in args for part in word.split("=", 1)]  # --run-dir=x too
    model = None
    if "--weights" in words[:-1]:
        require(
            "--resume" not in words,
            "--weights with --resume: a resumed run has weights of its own",
            "leave one of them out",
        )
        model = read_model_config(Path(words[words.index("--weights") + 1]))

    if args and not args[0].startswith("-"):
        config = load(Path(args[0]), model)
    elif "--resume" in words and "--run-dir" in words[:-1]:
        config = load_saved(Path(words[words.index("--run-dir") + 1]))
    else:
        config = from_dict({}, model=model)
    return command_line.parse(TrainOptions, args, "minitron train", TrainOptions(**vars(config)))


def load_saved(folder: Path) -> Config:
    """Read the config of the run in `folder`; raises ConfigError if there is none."""
    saved = folder / "config.json"
    require(saved.exists(), f"{saved}: there is no run to resume", "check --run-dir")
    try:
        return from_dict(read_json(saved), where=str(saved))
    except (OSError, ValueError) as error:  # a ConfigError, or not JSON
        raise ConfigError(f"{saved}: damaged ({error})", "give the run's TOML file too") from None


def start(options: TrainOptions, conclude: Callable[[Run], None] = lambda run: None) -> Run:
    """Start or resume the run that `options` ask for, and say how to continue a stopped one.

    All ranks call `conclude` for a run that is through.
    """
    config = Config(options.model, options.data, options.train, options.parallel, options.log)
    count, most = restarts()
    require(
        options.run_dir is not None or not (options.restart or most),
        f"{'--restart' if options.restart else f'torchrun --max-restarts {most}'} needs to know "
        "which run is meant",
        "name its folder with --run-dir",
    )
    with torchrun_group() as group:
        # a node that has replaced another counts from 0
        restart = options.restart or all_reduce_max_int(count, group) > 0
        folder = options.run_dir or default_folder(options.file, options.resume)
        folder = all_gather_objects(folder, group)[
            0
        ]  # rank 0 may have made it before another has looked
        interruption = StopSignals(launcher=is_torchrun_rank(), until_exit=True)
        run = train(config, folder, options.resume, group, restart, options.weights, interruption)
        if run.stop.signal is None:
            conclude(run)
    if run.stop.signal is not None and run.rank == 0:
        command = "minitron train" if run.size == 1 else "torchrun [as before] -m minitron.train"
        print(
            f"\nStopped by {run.stop.signal.name} at step {run.step:,}; saved. "
            f"Continue:\n  {command} --resume --run-dir {folder}"
        )
    return run


def exit_code(run: Run) -> int:
    """Return 0, or 128 plus the signal's number if one has stopped the run."""
    return 0 if run.stop.signal is None else 128 + run.stop.signal


def run_train(args: list[str]) -> int:
    """Train, with the learner's functions if asked, and report."""
    from teaching.report import report, report_use
    from teaching.use import use

    options = read_options(args)
    with torchrun_group(), use(*options.use) as calls:  # within a group, all ranks end in order

        def conclude(run: Run) -> None:
            report_use(run, calls)
            report(run)

        run = start(options, conclude)
    if run.stop.signal is not None and run.rank == 0 and options.use:
        print(f"  and add --use {' '.join(options.use)} to go on with your functions")
    return exit_code(run)


if __name__ == "__main__":
    command_line.run(run_train)
