"""What a run tells while it trains: rows of the log, the validation loss, how fast it is.

Read in this order: describe, log_rows, evaluate, lacks_validation.
"""

import math
import sys
from collections.abc import Callable
from contextlib import suppress

from minitron.comm.agreement import all_gather_objects
from minitron.config import ConfigError
from minitron.measure.clock import Clock, Speed
from minitron.measure.loggers import peak_memory
from minitron.measure.metrics import MetricsLog, read_metrics
from minitron.model.float8 import multiplies_float8
from minitron.parallel.pipeline.simulator import simulate
from minitron.parallelize import make_schedule
from minitron.run import Run
from minitron.system.progress import Progress

SAMPLE_TOKENS = 40
SMALLEST_SCALE = 2.0**-24  # of a loss: with it float16 holds gradients of up to 1e12


def describe(run: Run) -> str:
    """Describe in lines what a reader should know of speed and schedule, "" if it is nothing."""
    lines = []
    if run.config.parallel.pp > 1:
        lines.append(describe_pipeline(run))
    if run.config.train.precision == "fp8" and not multiplies_float8(run.device):
        lines.append(
            f"{run.device} has no 8-bit matmuls: they are emulated, with their "
            "roundings and without their speed"
        )
    if run.schedule.start > 0:
        lines.append(
            f"the learning rate is {run.schedule} (train.continuation = "
            f"{run.schedule.continuation})"
        )
    return "".join(f"{line}\n" for line in lines)


def describe_pipeline(run: Run) -> str:
    """Tell how long the ranks will wait for each other, if a backward pass takes two forward."""
    p, m = run.config.parallel.pp, run.num_micro_batches(run.config.train.global_batch_size)
    schedule = make_schedule(run.config.parallel)(p, m)
    idle = simulate(schedule, {"F": 1, "B": 2, "I": 1, "W": 1}).bubble_of_total
    return (
        f"{schedule.name} on {p} ranks, {m} micro-batch{'es' if m > 1 else ''} a step: ranks "
        f"are idle {100 * idle:.0f} % of the time; a smaller train.micro_batch_size makes more "
        "micro-batches, and less idle time"
    )


def log_rows(run: Run, log: MetricsLog, rows: list[dict], clock: Clock) -> Speed:
    """Write the rows since the last call; only here the host waits for the device."""
    tokens = len(rows) * run.config.train.global_batch_size * run.config.data.sequence_length
    speed = clock.lap(tokens, len(rows))
    require_sound(run)
    for row in rows:
        row |= {"loss": float(row["loss"]), "grad_norm": float(row["grad_norm"])}
        with run.stop.defer_errors():
            log.write(
                **row,
                tokens_per_second=speed.tokens_per_second,
                mfu=speed.mfu,
                **peak_memory(run.device),
            )
    return speed


def evaluate(
    run: Run, log: MetricsLog, bar: Progress, progress: str, go_on: Callable[[], bool]
) -> None:
    """Log the validation loss, and what the model writes; all ranks call it.

    They ask `go_on` after every piece of it: if it says no, nothing is logged.
    """
    val_loss = run.evaluate(go_on)
    if val_loss is None:
        return
    require_sound(run, val_loss)
    [text] = run.sample(1, SAMPLE_TOKENS, go_on) or [""]  # the same on all ranks
    if run.stop.signal is not None:
        return
    with run.stop.defer_errors():
        log.write(step=run.step, tokens=run.tokens, val_loss=val_loss, sample=text)
    if run.rank == 0:
        line = f"step {run.step:>6,}   validation loss {val_loss:.4f}   {progress}".rstrip()
        with suppress(OSError):  # a terminal that is closed
            bar.write(f"{line}\n  {' '.join(text.split())}", file=sys.stderr)


def lacks_validation(run: Run) -> bool:
    """Return whether no validation loss of the run's present step is logged; all ranks call it."""
    rows = read_metrics(run.folder / "metrics.jsonl") if run.rank == 0 else []
    is_logged = any("val_loss" in row and row["step"] == run.step for row in rows)
    return not all_gather_objects(is_logged, run.group)[0]


def require_sound(run: Run, val_loss: float = 0.0) -> None:
    """Raise ConfigError if the weights are lost, or float16 overflows by whatever it is scaled."""
    if not math.isfinite(val_loss):
        raise ConfigError(
            f"the validation loss of step {run.step} is {val_loss}: the run has "
            f"diverged; {run.saver.newest()}",
            "lower train.learning_rate, or clip the gradient with train.clip_norm",
        )
    scale = run.loss_scale.value
    if scale < SMALLEST_SCALE:
        raise ConfigError(
            f"the loss scale has fallen to {scale:.1e} in step {run.step}, and the "
            f"gradient still overflows; {run.saver.newest()}",
            "lower train.learning_rate, or start a new run with train.precision = "
            "bf16, which needs no scale",
        )
