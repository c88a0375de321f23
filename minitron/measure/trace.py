"""What every process does when: a profiler's trace of a few steps.

    minitron train configs/stories.toml --log.trace-steps 3

writes `traces/rank0.json.gz` into the folder of the run. Drop it onto https://ui.perfetto.dev: one
track for each thread and each stream of the GPU. Beside PyTorch's own, its ranges have the names
that `minitron.pytorch.spans.span` gives: "tensor parallel all_reduce", "ZeRO-3 gather blocks.3",
"pipeline F2 stage 1". Each step is a "ProfilerStep".
"""

import sys
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile, schedule

from minitron.config import Config, ConfigError, require
from minitron.system import disk

WARM_UP = 5
"""Steps before the profiler starts: the first allocate memory, compile, and order the buckets."""


class Trace(AbstractContextManager):
    """Entered around a run; call `step` after each step. Costs little while nothing is traced."""

    def __init__(self, profiler: profile | None = None):
        self.profiler = profiler

    def __enter__(self) -> "Trace":
        (self.profiler or nullcontext()).__enter__()
        return self

    def __exit__(self, *error) -> None:
        try:
            if self.profiler is not None:
                self.profiler.__exit__(*error)
        except ConfigError as fault:  # the run itself is saved
            print(f"minitron: {fault}", file=sys.stderr)

    def step(self) -> None:
        """Tell that a step is over; raises ConfigError if the disk refuses the trace."""
        if self.profiler is not None:
            self.profiler.step()


def open_trace(config: Config, folder: Path, rank: int, step: int, device: torch.device) -> Trace:
    """Open the trace of a rank in a run at `step`: of rank 0 if asked, of the others if asked too.

    A run that is resumed too near to its end has none. Raises ConfigError if it is too short.
    """
    num_steps, steps = config.log.trace_steps, config.train.steps
    require(
        num_steps == 0 or steps >= WARM_UP + num_steps,
        f"log.trace_steps = {num_steps}, after {WARM_UP} steps of warm-up, with train.steps = "
        f"{steps}",
        f"raise the last to {WARM_UP + num_steps}",
    )
    is_asked = num_steps > 0 and (rank == 0 or config.log.all_ranks)
    if not is_asked or steps - step < WARM_UP + num_steps:
        return Trace()
    path = folder / "traces" / f"rank{rank}.json.gz"
    path.parent.mkdir(parents=True, exist_ok=True)
    activities = [ProfilerActivity.CPU]
    if device.type == "cuda":
        activities.append(ProfilerActivity.CUDA)
    # The last step of the warm-up is the profiler's own.
    when = schedule(skip_first=WARM_UP - 1, wait=0, warmup=1, active=num_steps, repeat=1)
    return Trace(
        profile(
            activities=activities,
            schedule=when,
            on_trace_ready=partial(export, path),
        )
    )


def export(path: Path, profiler: profile) -> None:
    with disk.writing(path):
        profiler.export_chrome_trace(str(path))
