"""The training loop: how a run is started, logged, stopped and resumed.

Read in this order: `train`, `begin`, `loop`, then the command line, `read_options` and `start`.

    minitron train configs/stories.toml
    torchrun --nproc-per-node 4 -m minitron.train configs/stories.toml
"""

import sys
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import tyro

from minitron import cost
from minitron.checkpoint import checkpoints
from minitron.comm.agreement import (
    ALONE,
    Group,
    gathered,
    largest,
    one_fault_ends_all,
    one_fault_fails_all,
)
from minitron.config import Config, ConfigError, command_line, require
from minitron.config.file import from_dict, load, to_dict
from minitron.corpus.contents import Contents, read_contents
from minitron.hugging_face.config import read_model_config
from minitron.hugging_face.folder import require_fits
from minitron.hugging_face.weights import Weights
from minitron.launch import is_torchrun_rank, restarts, torchrun_group
from minitron.launch.process import Interruption
from minitron.launch.watchdog import Watchdog
from minitron.measure.clock import Clock, peak_flops
from minitron.measure.loggers import open_log
from minitron.measure.metrics import MetricsLog
from minitron.measure.trace import Trace, open_trace
from minitron.precision import PRECISIONS
from minitron.run import Run
from minitron.running.folder import Claim, default_folder, require_place
from minitron.system import disk
from minitron.system.files import read_json
from minitron.system.progress import Progress
from minitron.train_log import describe, evaluate, log_rows


def train(
    config: Config, folder: Path, resume: bool = False, group: Group = ALONE, restart: bool = False,
    weights: Path | None = None, interruption: Interruption | None = None,
) -> Run:
    """Train until `config.train.steps`, or until a signal asks to stop, and save at the end.

    `folder` receives config.json, metrics.jsonl and checkpoints/. With `resume` the run in it is
    continued bit for bit, with `restart` begun anew if it has no checkpoint; otherwise it must not
    hold one. A new one starts from the parameters in `weights`, a folder of Hugging Face's, if
    there is one. `group` holds all ranks; rank 0 writes what the others read, and keeps other
    processes out of `folder`. `interruption` hears the signals.
    """
    with one_fault_ends_all(group):  # before the watchdog: the first time, it reads all tokens
        contents = read_contents(config.data.path, group)
    watchdog = Watchdog(folder / "hang", group, config.train.hang_timeout)
    with closing(Claim(folder)) as claim, watchdog:
        with one_fault_ends_all(group):
            run = begin(config, folder, resume, group, restart, weights, claim, contents)
            run.stop.interruption = interruption or run.stop.interruption
            run.next_batch()
            with disk.writing(folder):
                log = open_log(config.log, folder, run.rank, run.step, to_dict(run.config))
                trace = open_trace(config, folder, run.rank, run.step, run.device)
                if run.rank == 0:
                    disk.write_json(folder / "config.json", to_dict(run.config))

        watchdog.beat()
        if run.rank == 0:
            print(describe(run), end="", file=sys.stderr)
        bar = Progress(total=config.train.steps, initial=run.step, desc="step", leave=True,
                       disable=run.rank != 0)
        with closing(log), run.stop.interruption, bar, trace:
            try:
                loop(run, log, bar, trace, watchdog)
            except (ConfigError, OSError):  # all ranks have agreed: what is being saved is good
                run.saver.wait()
                raise
    return run


def begin(
    config: Config, folder: Path, resume: bool, group: Group, restart: bool, weights: Path | None,
    claim: Claim, contents: dict[str, Contents],
) -> Run:
    """Return a run at its first step, or where its newest checkpoint was written."""
    rank = group.rank()
    with one_fault_fails_all(group):
        if rank == 0 and folder.is_dir():
            claim.take(restart)
        require_place(folder, resume, restart)
        if weights is not None:
            require_fits(weights, config)
    run = Run(config, folder, group, contents)
    with one_fault_fails_all(group):
        if rank == 0:  # only now is a folder made
            claim.take(restart)
        require_place(folder, resume, restart)
    saved = gathered(checkpoints(folder / "checkpoints"), group)[0]
    if resume or (restart and saved):
        run.restore()
    elif weights is not None:
        run.parallel.fill(Weights(weights, run.config.model))
    return run


def loop(run: Run, log: MetricsLog, bar: Progress, trace: Trace, watchdog: Watchdog) -> None:
    """Train, log, evaluate and save until the steps are done or a signal asks to stop."""
    config = run.config.train
    flops = cost.training_flops_per_token(run.config.model, run.config.data.sequence_length)
    dtype = PRECISIONS[config.precision].activations
    clock = Clock(flops, peak_flops(run.device, dtype), run.device, run.size)
    rows: list[dict] = []

    while run.step < config.steps:
        rows.append(run.train_step())
        with run.stop.telling():
            trace.step()
            if run.step < config.steps:
                run.next_batch()
        watchdog.beat()
        is_stopped = run.stop.agreed() is not None

        def due(every: int) -> bool:
            return run.step == config.steps or (every > 0 and run.step % every == 0)

        everies = config.log_every, config.eval_every, config.checkpoint_every
        if is_stopped or any(map(due, everies)):
            progress = f"{log_rows(run, log, rows, clock)}{run.loss_scale}"
            bar.set_postfix_str(f"loss {float(rows[-1]['loss']):.3f}, {progress}")
            bar.update(len(rows))
            rows = []
        if is_stopped:  # first what must not be lost: whoever has sent the signal may not wait long
            run.save()
            run.saver.wait()
        if due(config.eval_every):
            evaluate(run, log, bar, progress)
            watchdog.beat()
        if due(config.checkpoint_every) and not is_stopped:
            run.save()
            watchdog.beat()
        if due(config.eval_every) or due(config.checkpoint_every):
            clock.start()  # evaluating and saving are not training
        if is_stopped:
            break
    run.saver.wait()
    run.stop.agreed()  # for one that has come to a single rank since


@dataclass(frozen=True)
class TrainOptions(Config):
    """Train a model as a TOML file says, with any field overridden."""

    file: tyro.conf.Positional[Path | None] = None
    """TOML file with the tables [model], [data], [train]; must come first."""
    run_dir: Path | None = None
    """Where the run is kept. Default: runs/NAME of the file, numbered if it is taken."""
    resume: bool = False
    """Continue the run bit for bit from its newest checkpoint."""
    restart: bool = False
    """Continue the run in --run-dir if it has a checkpoint, else begin it: the same command, again
    and again, until it is done."""
    weights: Path | None = None
    """Start from a folder of Hugging Face's, a Llama or GPT-2: its config.json fills in [model]."""


def read_options(args: list[str], kind: type[TrainOptions] = TrainOptions) -> TrainOptions:
    """Read the command line of a training run; raises ConfigError with one line."""
    for word in args[1:]:
        require(
            not word.endswith(".toml"),
            f"{word}: the TOML file must come first, as in `minitron train {word} ...`",
        )
    words = [part for word in args for part in word.split("=", 1)]  # --run-dir=x too
    model = None
    if "--weights" in words[:-1]:
        require("--resume" not in words, "--weights with --resume: a resumed run has weights of "
                "its own", "leave one of them out")
        model = read_model_config(Path(words[words.index("--weights") + 1]))

    if args and not args[0].startswith("-"):
        config = load(Path(args[0]), model)
    elif "--resume" in words and "--run-dir" in words[:-1]:
        config = load_saved(Path(words[words.index("--run-dir") + 1]))
    else:
        config = from_dict({}, model=model)
    return command_line.parse(kind, args, "minitron train", kind(**vars(config)))


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
        "which run is meant", "name its folder with --run-dir",
    )
    with torchrun_group() as group:
        # a node that has replaced another counts from 0
        restart = options.restart or largest(count, group) > 0
        folder = options.run_dir or default_folder(options.file, options.resume)
        folder = gathered(folder, group)[0]  # rank 0 may have made it before another has looked
        interruption = Interruption(launcher=is_torchrun_rank(), until_exit=True)
        run = train(
            config, folder, options.resume, group, restart, options.weights, interruption
        )
        if run.stop.signal is None:
            conclude(run)
    if run.stop.signal is not None and run.rank == 0:
        command = "minitron train" if run.size == 1 else "torchrun [as before] -m minitron.train"
        print(f"\nStopped by {run.stop.signal.name} at step {run.step:,}; saved. "
              f"Continue:\n  {command} --resume --run-dir {folder}")
    return run


def exit_code(run: Run) -> int:
    """Return 0, or 128 plus the signal's number if one has stopped the run."""
    return 0 if run.stop.signal is None else 128 + run.stop.signal


if __name__ == "__main__":  # for torchrun: the command itself, with the report at the end
    from minitron import cli

    command_line.run(cli.train)
