"""The planner with sliders: a layout of a job, its seconds, its bytes, and whether it fits.

Read in this order: planner, draw_plan, best_of.
"""

from collections import Counter
from dataclasses import replace
from functools import cache
from typing import get_args

from minitron import cost
from minitron.config import ConfigError
from minitron.plan.hardware import DEVICES
from minitron.plan.job import Decision, Job
from minitron.plan.money import training_days
from minitron.plan.search import Candidate, checked, grid_of, layouts, with_variants
from teaching.drawings import Drawing
from teaching.figures_plan import time_and_memory
from teaching.figures_style import CATEGORY_COLOR
from teaching.widgets import explore

A100, H100 = DEVICES["A100-SXM-80GB"], DEVICES["H100-SXM-80GB"]
GPT3 = replace(cost.PUBLISHED["GPT-3 175B"], vocab_size=51_200)  # so that 8 divide it
JOBS = {
    "Llama 2 7B, 64 H100s": (Job(cost.PUBLISHED["Llama 2 7B"], 64, H100, 4096, 1024), 2e12),
    "Llama 3.1 70B, 512 H100s": (
        Job(cost.PUBLISHED["Llama 3.1 70B"], 512, H100, 8192, 1024),
        15e12,
    ),
    "GPT-3 175B, 1,024 A100s": (
        Job(GPT3, 1024, A100, 2048, 1536, precision="bf16-fp32-grads"),
        300e9,
    ),
    "Llama 3.1 405B, 16,384 H100s": (
        Job(cost.PUBLISHED["Llama 3.1 405B"], 16_384, H100, 8192, 2048),
        15.6e12,
    ),
}
"""Each with the tokens that the model was trained on."""


def planner() -> None:
    """Ask for the fastest layout of a job; what is not on a slider is chosen by search."""
    explore(
        draw_plan,
        controls={
            "job": tuple(JOBS),
            "tp": (1, 2, 4, 8, 16),
            "pp": (1, 2, 4, 8, 16, 32),
            "micro_batch": (1, 2, 4, 8),
        },
        start={"job": "GPT-3 175B, 1,024 A100s", "tp": 8, "pp": 8, "micro_batch": 1},
        task="find the fastest layout of GPT-3. Which slider costs most when it stands one notch "
        "too low, and which when it stands one too high? Then take another job, and guess "
        "before you drag.",
    )


def draw_plan(job: str, tp: int, pp: int, micro_batch: int) -> Drawing:
    """Draw the step and the memory of a job's best layout with these three given.

    `job` is a key of `JOBS`.
    """
    given, tokens = JOBS[job]
    limit = given.limit / 1e9
    try:
        best = best_of(job, tp, pp, micro_batch)
    except ConfigError as error:
        return time_and_memory({}, {}, limit, CATEGORY_COLOR), f"It cannot run: {error}."
    estimate = best.estimate
    kinds = {kind: size / 1e9 for kind, size in estimate.memory.items()}
    flops = tokens / given.sequence_length / given.global_batch_size * estimate.model_flops
    days = training_days(flops, given.num_gpus, estimate.mfu * given.device.bf16_flops)
    fits = "fits" if best.fits else f"does not fit in {limit:.0f} GB"
    sentence = (
        f"{best}: {best.seconds:.3g} s a step, {estimate.mfu:.0%} MFU, {days:,.0f} days for "
        f"{tokens / 1e12:g} T tokens; {best.total_bytes / 1e9:.0f} GB, which {fits}."
    )
    return time_and_memory(estimate.parts, kinds, limit, CATEGORY_COLOR), sentence


@cache
def best_of(job: str, tp: int, pp: int, micro_batch: int) -> Candidate:
    """The fastest layout that fits, else the smallest; raises ConfigError if none can run."""
    given, _ = JOBS[job]
    found, refused = [], Counter()
    for sizes in layouts(given):
        if (sizes["tp"], sizes["pp"]) != (tp, pp):
            continue
        for recompute in get_args(cost.RecomputeKind):
            try:
                decision = checked(given, Decision(grid_of(given, sizes), recompute, micro_batch))
            except ConfigError as error:
                refused[str(error)] += 1
            else:
                found.append(Candidate(given, decision))
    if not found:
        raise ConfigError(
            refused.most_common(1)[0][0]
            if refused
            else f"{given.num_gpus} GPUs are not divisible by tp {tp} x pp {pp}"
        )
    fitting = [each for each in found if each.fits]
    return with_variants(fitting)[0] if fitting else min(found, key=lambda each: each.total_bytes)
