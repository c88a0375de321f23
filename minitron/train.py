"""The training loop: how a run is started, logged, stopped and resumed.

Read in this order: `train`, `loop`, `log_rows`, then the command line, `read_options` and `start`.

    minitron train configs/stories.toml
    torchrun --nproc-per-node 4 -m minitron.train configs/stories.toml
"""

import json
import math
import sys
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import tyro

from minitron import command_line, cost
from minitron.checkpoint import checkpoints
from minitron.comm.agreement import (
    Group,
    gathered,
    largest,
    one_fault_ends_all,
    one_fault_fails_all,
)
from minitron.comm.launch import restarts, torchrun_group
from minitron.comm.watchdog import Watchdog
from minitron.config import Config, ConfigError, require
from minitron.config_file import from_dict, load, parsed, to_dict
from minitron.float8 import multiplies_float8
from minitron.hugging_face.config import read_model_config
from minitron.hugging_face.folder import require_same_tokens
from minitron.hugging_face.weights import Weights
from minitron.measure.clock import Clock, Speed, peak_flops
from minitron.measure.loggers import open_log, peak_memory
from minitron.measure.metrics import MetricsLog
from minitron.measure.trace import Trace, open_trace
from minitron.parallel.simulator import simulate
from minitron.precision import PRECISIONS
from minitron.progress import Progress
from minitron.run import Run

SMALLEST_SCALE = 2.0**-24  # of a loss: with it float16 holds gradients of up to 1e12


def train(
    config: Config, folder: Path, resume: bool = False, group: Group = None, restart: bool = False,
    weights: Path | None = None,
) -> Run:
    """Train until `config.train.steps`, or until SIGINT or SIGTERM, and save at the end.

    `folder` receives config.json, metrics.jsonl and checkpoints/. With `resume` the run in it is
    continued bit for bit, with `restart` begun anew if it has no checkpoint; otherwise it must not
    hold one. A new one starts from the parameters in `weights`, a folder of Hugging Face's, if
    there is one. `group` holds all ranks; rank 0 writes what the others read.
    """
    with Watchdog(folder / "hang", group, config.train.hang_timeout) as watchdog:
        with one_fault_ends_all(group):
            run = begin(config, folder, resume, group, restart, weights)
            settings = to_dict(run.config)
            log = open_log(config.log, folder, run.rank, run.step, settings)
            trace = open_trace(config, folder, run.rank, run.step, run.device)
            if run.rank == 0:
                (folder / "config.json").write_text(json.dumps(settings, indent=2) + "\n")

        watchdog.beat()
        if run.rank == 0:
            print(describe(run), end="", file=sys.stderr)
        bar = Progress(total=config.train.steps, initial=run.step, desc="step", leave=True,
                       disable=run.rank != 0)
        with closing(log), run.interruption, bar, trace:
            try:
                loop(run, log, bar, trace, watchdog)
            except ConfigError:  # on which all ranks have agreed: what is being saved is good
                run.saver.wait()
                raise
    return run


def begin(
    config: Config, folder: Path, resume: bool, group: Group, restart: bool, weights: Path | None
) -> Run:
    """A run at its first step, or where its newest checkpoint was written."""
    with one_fault_fails_all(group):
        require(
            resume or restart or not holds_run(folder),
            f"{folder}: already holds a run; add --resume to continue it, or choose another "
            "--run-dir",
        )
        if weights is not None:
            require_same_tokens(weights, config.data.path)
    run = Run(config, folder, group)
    saved = gathered(checkpoints(folder / "checkpoints"), group)[0]
    if resume or (restart and saved):
        run.restore()
    elif weights is not None:
        run.whole.fill(Weights(weights, run.config.model))
    return run


def describe(run: Run) -> str:
    """Lines on what a reader should know of the speed, "" if there is nothing."""
    lines = []
    if run.config.parallel.pp > 1:
        lines.append(describe_pipeline(run))
    if run.config.train.precision == "fp8" and not multiplies_float8(run.device):
        lines.append(f"{run.device} has no products of 8 bits: they are emulated, with their "
                     "roundings and without their speed")
    return "".join(f"{line}\n" for line in lines)


def describe_pipeline(run: Run) -> str:
    """Tell how long the ranks will wait for each other, if a backward pass takes two forward."""
    p, m = run.config.parallel.pp, run.num_micro_batches(run.config.train.global_batch_size)
    schedule = run.parallel.pipeline.make_schedule(p, m)
    idle = simulate(schedule, {"F": 1, "B": 2, "I": 1, "W": 1}).bubble_of_total
    return (f"{schedule.name} on {p} ranks, {m} micro-batch{'es' if m > 1 else ''} a step: ranks "
            f"are idle {100 * idle:.0f} % of the time; a smaller train.micro_batch_size makes more")


def loop(run: Run, log: MetricsLog, bar: Progress, trace: Trace, watchdog: Watchdog) -> None:
    """Step, log, evaluate and save until the steps are done or a signal asks to stop."""
    config = run.config.train
    flops = cost.training_flops_per_token(run.config.model, run.config.data.sequence_length)
    dtype = PRECISIONS[config.precision].activations
    clock = Clock(flops, peak_flops(run.device, dtype), run.device, run.size)
    rows: list[dict] = []

    while run.step < config.steps:
        rows.append(run.train_step())
        trace.step()
        watchdog.beat()
        last = run.stop_signal() is not None or run.step == config.steps

        def due(every: int, last=last) -> bool:
            return last or (every > 0 and run.step % every == 0)

        if due(config.log_every) or due(config.eval_every) or due(config.checkpoint_every):
            progress = f"{log_rows(run, log, rows, clock)}{describe_scale(run)}"
            bar.set_postfix_str(f"loss {float(rows[-1]['loss']):.3f}, {progress}")
            bar.update(len(rows))
            rows = []
        if due(config.eval_every):
            val_loss = run.evaluate()
            require_sound(run, val_loss)
            [text] = run.sample(num_texts=1, num_tokens=40) or [""]  # of the same seed everywhere
            log.write(step=run.step, tokens=run.tokens, val_loss=val_loss, sample=text)
            if run.rank == 0:
                line = f"step {run.step:>6,}   validation loss {val_loss:.4f}   {progress}"
                bar.write(f"{line}\n  {' '.join(text.split())}", file=sys.stderr)
            watchdog.beat()
        if due(config.checkpoint_every):
            run.save()
            watchdog.beat()
        if due(config.eval_every) or due(config.checkpoint_every):
            clock.start()  # evaluating and saving are not training
        if last:
            break
    run.saver.wait()


def log_rows(run: Run, log: MetricsLog, rows: list[dict], clock: Clock) -> Speed:
    """Write the rows since the last call; only here the host waits for the device."""
    tokens = len(rows) * run.config.train.global_batch_size * run.config.data.sequence_length
    speed = clock.lap(tokens, len(rows))
    require_sound(run)
    for row in rows:
        row |= {"loss": float(row["loss"]), "grad_norm": float(row["grad_norm"])}
        log.write(**row, tokens_per_second=speed.tokens_per_second, mfu=speed.mfu,
                  **peak_memory(run.device))
    return speed


def require_sound(run: Run, val_loss: float = 0.0) -> None:
    """Raise ConfigError if the weights are lost, or float16 overflows by whatever it is scaled."""
    require(
        math.isfinite(val_loss),
        f"the validation loss of step {run.step} is {val_loss}: the run has diverged; its "
        f"checkpoints are kept in {run.folder}; lower train.learning_rate or clip the gradient",
    )
    scale = math.inf if run.loss_scale is None else run.loss_scale.value
    require(
        scale >= SMALLEST_SCALE,
        f"the loss scale has fallen to {scale:.1e} in step {run.step}, and the gradient still "
        f"overflows; checkpoints are kept in {run.folder}; lower train.learning_rate, or start "
        "again with train.precision = bf16, which needs no scale",
    )


def describe_scale(run: Run) -> str:
    """By what the loss is multiplied, and how many steps that has cost; "" if it is not."""
    scale = run.loss_scale
    if scale is None:
        return ""
    return f", loss scale 2^{math.log2(scale.value):.0f}, {scale.skipped:,} skipped"


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
                "its own; leave one of them out")
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
    require(saved.is_file(), f"{saved}: there is no run to resume; check --run-dir")
    try:
        return from_dict(parsed(saved), where=str(saved))
    except ConfigError as error:
        raise ConfigError(f"{saved}: damaged ({error}); give the run's TOML file too") from None


def start(options: TrainOptions) -> Run:
    """Start or resume the run that `options` ask for, and say how to continue a stopped one."""
    config = Config(options.model, options.data, options.train, options.parallel, options.log)
    count, most = restarts()
    require(
        options.run_dir is not None or not (options.restart or most),
        f"{'--restart' if options.restart else f'torchrun --max-restarts {most}'} needs to know "
        "which run is meant: name its folder with --run-dir",
    )
    with torchrun_group() as group:
        # a node that has replaced another counts from 0
        restart = options.restart or largest(count, group) > 0
        folder = options.run_dir or default_folder(options.file, options.resume)
        folder = gathered(folder, group)[0]  # rank 0 may have made it before another has looked
        run = train(config, folder, options.resume, group, restart, options.weights)
    if run.interruption.signal is not None and run.rank == 0:
        command = "minitron train" if run.size == 1 else "torchrun [as before] -m minitron.train"
        print(f"\nStopped by {run.interruption.signal.name} at step {run.step:,}; saved. "
              f"Continue:\n  {command} --resume --run-dir {folder}")
    return run


def holds_run(folder: Path) -> bool:
    """Whether a run has got somewhere there; one that failed before leaves the folder free."""
    log = folder / "metrics.jsonl"
    has_rows = log.exists() and log.stat().st_size > 0
    return has_rows or bool(checkpoints(folder / "checkpoints"))


def default_folder(file: Path | None, resume: bool) -> Path:
    """runs/NAME, runs/NAME-2, ...: the newest one there to resume, else the first one free."""
    name = file.stem if file else "train"
    folders = [Path("runs") / name]
    while holds_run(folders[-1]):
        folders.append(Path("runs") / f"{name}-{len(folders) + 1}")
    return folders[-2] if resume and folders[1:] else folders[-1]


def main(args: list[str]) -> int:
    """Train; returns 0, or 128 plus the signal's number if one stopped the run."""
    run = start(read_options(args))
    if run.rank == 0:
        print(f"{run.step:,} steps done; the run is kept in {run.folder}")
    return exit_code(run)


def exit_code(run: Run) -> int:
    return 0 if run.interruption.signal is None else 128 + run.interruption.signal


if __name__ == "__main__":
    command_line.run(main)
