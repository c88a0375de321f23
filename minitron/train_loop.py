"""The training loop: how a run is begun or resumed, logged, evaluated, saved and stopped.

Read in this order: train, begin, loop. `minitron.train` is the command that starts it.
"""

import sys
from contextlib import closing
from functools import partial
from pathlib import Path

from minitron import cost
from minitron.checkpoint import checkpoints
from minitron.comm.agreement import (
    SINGLE_RANK,
    Group,
    all_gather_objects,
    exit_on_all_ranks,
    raise_on_all_ranks,
)
from minitron.config import Config, ConfigError
from minitron.config.file import to_dict
from minitron.corpus.contents import Contents, read_contents
from minitron.hugging_face.folder import require_fits
from minitron.hugging_face.weights import Weights
from minitron.launch.process import StopSignals
from minitron.launch.watchdog import Watchdog
from minitron.measure.clock import Clock, peak_flops
from minitron.measure.loggers import open_log
from minitron.measure.metrics import MetricsLog
from minitron.measure.trace import Trace, open_trace
from minitron.precision import PRECISIONS
from minitron.run import Run
from minitron.running.folder import (
    RunLock,
    has_begun,
    keep_origin,
    keep_tokenizer,
    require_place,
    start_over,
)
from minitron.system import disk
from minitron.system.progress import Progress
from minitron.train_log import describe, evaluate, lacks_validation, log_rows

STEADY_SECONDS = 2.0  # over which speed and MFU are read: a single step is no measurement


def train(
    config: Config,
    folder: Path,
    resume: bool = False,
    group: Group = SINGLE_RANK,
    restart: bool = False,
    weights: Path | None = None,
    interruption: StopSignals | None = None,
) -> Run:
    """Train until `config.train.steps`, or until a signal asks to stop, and save at the end.

    `folder` receives config.json, tokenizer.json, metrics.jsonl and checkpoints/. With `resume` the
    run in it is continued bit for bit, or starts over if it was killed before its first checkpoint;
    with `restart` it may also not have begun; otherwise there must be none. A new one starts from
    the parameters in `weights`, a folder of Hugging Face's, if there is one. `group` holds all
    ranks; rank 0 writes what the others read, and keeps other processes out of `folder`.
    `interruption` hears the signals.
    """
    with exit_on_all_ranks(group):  # before the watchdog: the first time, it reads all tokens
        contents = read_contents(config.data.path, group)
    watchdog = Watchdog(folder / "hang", group, config.train.hang_timeout)
    with closing(RunLock(folder)) as claim, watchdog:
        with exit_on_all_ranks(group):
            run = begin(config, folder, resume, group, restart, weights, claim, contents, watchdog)
            run.stop.interruption = interruption or run.stop.interruption
            run.next_batch()
            with disk.writing(folder):
                log = open_log(config.log, folder, run.rank, run.step, to_dict(run.config))
                trace = open_trace(config, folder, run.rank, run.step, run.device)
                if run.rank == 0:
                    disk.write_json(folder / "config.json", to_dict(run.config))
                    keep_tokenizer(folder, run.tokenizer)
                    if run.step == 0:
                        keep_origin(folder, weights)

        watchdog.beat()
        if run.rank == 0:
            print(describe(run), end="", file=sys.stderr)
        bar = Progress(
            total=config.train.steps,
            initial=run.step,
            desc="step",
            leave=True,
            disable=run.rank != 0,
        )
        with closing(log), run.stop.interruption, bar, trace:
            try:
                loop(run, log, bar, trace, watchdog)
            except (ConfigError, OSError):  # all ranks have agreed: what is being saved is good
                run.saver.wait()
                raise
    return run


def begin(
    config: Config,
    folder: Path,
    resume: bool,
    group: Group,
    restart: bool,
    weights: Path | None,
    claim: RunLock,
    contents: dict[str, Contents],
    watchdog: Watchdog,
) -> Run:
    """Return a run at its first step, or where its newest checkpoint was written."""
    rank = group.rank()
    with raise_on_all_ranks(group):
        if rank == 0 and folder.is_dir():
            claim.take(restart)
        require_place(folder, resume, restart)
        if weights is not None:
            require_fits(weights, config)
    run = Run(config, folder, group, contents)
    watchdog.beat()
    with raise_on_all_ranks(group):
        if rank == 0:  # only now is a folder made
            claim.take(restart)
        require_place(folder, resume, restart)
    saved = all_gather_objects(checkpoints(folder / "checkpoints"), group)[0]
    if saved:  # or `require_place` would have refused a new run
        run.restore(watchdog.beat)
        return run
    with raise_on_all_ranks(group):
        if rank == 0 and has_begun(folder) and (resume or restart):
            start_over(folder, weights)
    if weights is not None:
        run.parallel.fill(Weights(weights, run.config.model))
    return run


def start_clock(run: Run) -> Clock:
    """Start the clock of a run; measures the device's peak first, where it is not known."""
    flops = cost.training_flops_per_token(run.config.model, run.config.data.sequence_length)
    dtype = PRECISIONS[run.config.train.precision].activations
    return Clock(flops, peak_flops(run.device, dtype), run.device, run.size, STEADY_SECONDS)


def is_due(run: Run, every: int) -> bool:
    """Return whether what is done after every so many steps (0: none) and after the last is due."""
    return run.step == run.config.train.steps or (every > 0 and run.step % every == 0)


def loop(run: Run, log: MetricsLog, bar: Progress, trace: Trace, watchdog: Watchdog) -> None:
    """Train, log, save and evaluate until the steps are done or a signal asks to stop.

    It saves first: neither a long evaluation nor a fault in it may cost what has been trained. What
    takes long is done in pieces, between which the watchdog sees a beat and the signal is heard.
    """
    config = run.config.train
    due = partial(is_due, run)

    def go_on() -> bool:
        watchdog.beat()
        return run.stop.agreed() is None

    if run.step > 0 and due(config.eval_every) and lacks_validation(run):
        evaluate(run, log, bar, "", go_on)  # it was interrupted, after its step was saved

    clock = start_clock(run)
    rows: list[dict] = []
    while run.step < config.steps and run.stop.signal is None:
        rows.append(run.train_step())
        watchdog.beat()
        with run.stop.defer_errors():
            trace.step()
            if run.step < config.steps:
                run.next_batch()
        is_stopped = not go_on()

        everies = config.log_every, config.eval_every, config.checkpoint_every
        if is_stopped or any(map(due, everies)):
            progress = f"{log_rows(run, log, rows, clock)}{run.loss_scale}"
            bar.set_postfix_str(f"loss {float(rows[-1]['loss']):.3f}, {progress}")
            bar.update(len(rows))
            rows = []
        if due(config.checkpoint_every):
            run.save()
            watchdog.beat()
        if due(config.eval_every) and not is_stopped:
            evaluate(run, log, bar, progress, go_on)
        if due(config.eval_every) or due(config.checkpoint_every):
            clock.start()  # evaluating and saving are not training
    if run.stop.signal is not None and not due(config.checkpoint_every):
        run.save()
        watchdog.beat()
    run.saver.wait()
    run.stop.agreed()  # for one that has come to a single rank since
