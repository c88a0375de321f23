"""The learning rate of every step of a run, and how one that is resumed with other steps goes on.

A cosine's rate depends on where it ends: with more steps it is another one from the first step on,
so a run that is resumed with them jumps from a low rate to a high one. `train.continuation` says
what to do instead.

Read in this order: Schedule, resumed.
"""

from dataclasses import dataclass, replace
from pathlib import Path

from minitron.config import TrainConfig, require
from minitron.step import learning_rate


@dataclass(frozen=True)
class Schedule:
    """The learning rate as a function of the step.

    `start` is the step, from 0, at which `continuation` has begun, and `last_rate` the rate of the
    step before; 0 if the schedule is the one that the run began with, or has been stretched.
    """

    peak: float
    minimum: float
    warmup_steps: int
    steps: int
    continuation: str = "none"
    start: int = 0
    last_rate: float = 0.0

    @classmethod
    def of(cls, train: TrainConfig, start: int = 0, last_rate: float = 0.0) -> "Schedule":
        """Return the schedule that a config asks for."""
        return cls(
            train.learning_rate,
            train.min_learning_rate,
            train.warmup_steps,
            train.steps,
            train.continuation,
            start,
            last_rate,
        )

    @property
    def end(self) -> float:
        """Where a line ends: at the minimum, or at 0 if it does not start above the minimum."""
        return self.minimum if self.minimum < self.last_rate else 0.0

    def rate(self, step: int) -> float:
        """Return the learning rate of `step`, from 0."""
        done, remaining = step - self.start, self.steps - self.start
        is_line = self.start > 0 and self.continuation in ("constant", "linear")
        if done < 0 or (is_line and self.continuation == "constant"):
            return self.last_rate
        if is_line:
            progress = min(1.0, (done + 1) / remaining)
            return (1 - progress) * self.last_rate + progress * self.end
        return learning_rate(done, self.peak, self.minimum, self.warmup_steps, remaining)

    def __str__(self) -> str:
        span = f"in steps {self.start + 1:,} to {self.steps:,}"
        if self.start > 0 and self.continuation == "constant":
            return f"a constant {self.last_rate:.3g} {span}"
        if self.start > 0 and self.continuation == "linear":
            return f"a line from {self.last_rate:.3g} to {self.end:.3g} {span}"
        return (
            f"{self.warmup_steps:,} step{'s' * (self.warmup_steps != 1)} of warm-up to "
            f"{self.peak:.3g}, then a cosine to "
            f"{self.minimum:.3g}, {span}"
        )


def resumed(recorded: Schedule, asked: Schedule, step: int, folder: Path) -> Schedule:
    """Return the schedule of a run in `folder` that is resumed after `step` steps.

    It is the `recorded` one, unless a config has `asked` for other numbers or for another
    continuation. Raises ConfigError if the learning rate would jump and the config does not say how
    to go on, or if it would go on with a rate of 0.
    """
    same = replace(recorded, start=0, last_rate=0.0)
    if asked in (same, replace(same, continuation="none")):
        return recorded
    if asked.steps == step:  # a run that is through takes no step
        return recorded if recorded.start > 0 else asked
    jumps = recorded.start > 0 or asked.rate(step) != recorded.rate(step)
    if asked.continuation == "none" and not jumps:  # in the warm-up, or at a constant rate
        return asked

    last = float(recorded.rate(step - 1))
    line = replace(asked, continuation="linear", start=step, last_rate=last)
    require(
        asked.continuation != "none",
        f"{folder}: at step {step + 1:,} the learning rate would be {asked.rate(step):.3g}, where "
        f"the run's own schedule has {recorded.rate(step):.3g}: the schedule was {recorded}, and "
        f"is now {asked}",
        f"set train.continuation to constant (keep {last:.3g}), linear (go from {last:.3g} to "
        f"{line.end:.3g} at step {asked.steps:,}), restart (warm up again to {asked.peak:.3g}, and "
        "decay over the steps that remain), or stretch (accept the jump to the new cosine)",
        "or leave the schedule as it was",
        field="train.continuation",
    )
    if asked.continuation == "stretch":
        return asked
    require(
        last > 0 or asked.continuation == "restart",
        f"train.continuation = {asked.continuation}, but the last learning rate of {folder} is 0: "
        "nothing would be learned",
        "set it to restart or stretch",
        field="train.continuation",
    )
    return replace(asked, start=step, last_rate=last)
