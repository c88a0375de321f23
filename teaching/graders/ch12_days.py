"""Grader of 12.1: made-up models whose parts differ, and trainings that have been published."""

import math
from collections.abc import Callable
from itertools import product
from typing import NamedTuple

from minitron.cost import PUBLISHED, num_parameters
from teaching.graders import Mistake, asked, expect
from teaching.graders.numbers import ROUNDED, apart, is_rounded

RECOMPUTE = ("none", "selective", "full")
A100, H100 = 312e12, 989.4e12
DAY, TERA = 86400, 1e12


class Shape(NamedTuple):
    """What a token's FLOPs follow from."""

    num_parameters: int
    num_layers: int
    width: int
    sequence_length: int

    @property
    def attention(self) -> int:
        """FLOPs forward of a token's two products with the others, in all layers."""
        return 2 * 2 * self.sequence_length * self.width * self.num_layers

    @property
    def forward(self) -> int:
        return 2 * self.num_parameters + self.attention


def published(name: str) -> Shape:
    model = PUBLISHED[name]
    return Shape(num_parameters(model), model.num_layers, model.width, model.max_sequence_length)


GPT3, LLAMA = published("GPT-3 175B"), published("Llama 3.1 405B")
MT_NLG = Shape(530_000_000_000, 105, 20480, 2048)
HUGE = Shape(10**17 + 3, 3, 64, 999)
"""More than a float holds exactly."""
SHAPES = [Shape(10, 1, 2, 3), Shape(1_000_003, 5, 64, 999), GPT3, LLAMA, HUGE]


class Run(NamedTuple):
    """What `days_and_mfu` is asked."""

    text: str
    flops: tuple[int, int]
    num_tokens: float
    num_gpus: int
    peak_flops: float
    known: str
    value: float


def right_flops(shape: Shape, recompute: str) -> tuple[int, int]:
    again = {"none": 0, "selective": shape.attention, "full": shape.forward}[recompute]
    return 3 * shape.forward, 3 * shape.forward + again


def runs() -> list[Run]:
    """Made-up runs reported in four ways, with recomputation and without; then published ones.

    GPT-3: Narayanan et al. 2021, section 5.1. MT-NLG: Smith et al. 2022, section 2.4. BLOOM:
    Luccioni et al. 2022. Llama: its model card; sequences of 8192 tokens, most of the time.
    """
    reports = [("HFU", 0.5), ("MFU", 0.375), ("TFLOP/s", 50.0), ("GPU-hours", 38400.0)]
    made_up = 864e9, 120, 1e14
    return [
        *(Run("a made-up model", (6 * 10**9, 8 * 10**9), *made_up, *row) for row in reports),
        *(Run("a made-up model, not recomputed", (6 * 10**9, 6 * 10**9), *made_up, *row)
          for row in reports),
        Run("GPT-3 175B on A100s", right_flops(GPT3, "full"), 300e9, 1024, A100, "TFLOP/s", 140.0),
        Run("MT-NLG 530B on A100s", right_flops(MT_NLG, "full"), 270e9, 2240, A100, "TFLOP/s",
            126.0),
        Run("BLOOM 176B on A100s", right_flops(Shape(176_247_271_424, 70, 14336, 2048), "full"),
            366e9, 384, A100, "GPU-hours", 1_082_990.0),
        Run("Llama 3.1 405B on H100s", right_flops(LLAMA, "none"), 15.6e12, 16384, H100,
            "GPU-hours", 30.84e6),
    ]


def right_answer(run: Run) -> tuple[float, float]:
    """Days, and the share of the peak that model FLOPs are."""
    of_model, of_hardware = (run.num_tokens * flops for flops in run.flops)
    at_peak = of_model / (run.num_gpus * run.peak_flops)  # seconds
    seconds = {
        "MFU": at_peak / run.value,
        "HFU": at_peak * of_hardware / of_model / run.value,
        "TFLOP/s": of_hardware / run.num_gpus / run.value / TERA,
        "GPU-hours": run.value / run.num_gpus * 3600,
    }[run.known]
    return seconds / DAY, at_peak / seconds


def grade_12_1(flops_per_token: Callable, days_and_mfu: Callable) -> None:
    """Compare FLOPs exactly, days and MFU to 9 digits."""
    for recompute, shape in product(RECOMPUTE, SHAPES):
        words = ", ".join(f"{name}={value}" for name, value in shape._asdict().items())
        with asked(f"flops_per_token({words}, recompute={recompute!r})"):
            _expect_flops(flops_per_token(*shape, recompute), shape, recompute)

    for run in runs():
        words = ", ".join(f"{name}={value!r}" for name, value in run._asdict().items()
                          if name != "text")
        with asked(f"{run.text}: days_and_mfu({words})"):
            _expect_days(days_and_mfu(*run[1:]), run)


# FLOPs


def _expect_flops(answer, shape: Shape, recompute: str) -> None:
    expect(isinstance(answer, tuple) and len(answer) == 2, seen=f"it returned {answer!r:.80}",
           likely="return two numbers: model FLOPs, then hardware FLOPs")
    expect(all(type(n) is int for n in answer), seen=f"it returned {answer!r:.80}",
           likely="return exact integers: use // where you divide, and 2 instead of 2.0")
    right = right_flops(shape, recompute)
    faults = _model_faults(shape), _hardware_faults(shape, recompute)
    for name, seen, wanted, known in zip(("model", "hardware"), answer, right, faults, strict=True):
        if seen == wanted:
            continue
        likely = known.get(seen, "forward is 2 P + 4 S D L and backward twice as much; "
                                 "hardware FLOPs add what is recomputed")
        if answer == right[::-1]:
            likely = "the two are swapped: model FLOPs, never the larger number, come first"
        elif math.isclose(seen, wanted, rel_tol=1e-14):
            likely = "only the rounding is wrong: a float has 16 digits. Count in integers: " \
                     "write 2 instead of 2.0, and // instead of /"
        raise Mistake(f"{seen:,} {name} FLOPs, not {wanted:,}", likely)


def _model_faults(shape: Shape) -> dict[int, str]:
    P, attention, forward = shape.num_parameters, shape.attention, shape.forward
    return {
        forward: "that is only the forward pass: backward costs twice as much on top",
        2 * forward: "backward costs twice as much as forward, so together they cost 3 x forward",
        3 * forward // 2: "a multiply-add counts as 2 FLOPs",
        6 * P: "that is 6 P: attention's two matmuls, which have no parameters, are missing",
        6 * P + attention: "backward costs twice as much for attention's matmuls too",
        6 * P + 3 * attention // 2: "attention has two matmuls of 2 S D each, and the causal "
                                    "mask is ignored: the whole square counts",
        6 * P + 3 * attention // shape.num_layers: "attention is counted once: every layer has it",
        4 * forward: "that includes recomputation: model FLOPs never do",
        3 * forward + attention: "that includes recomputation: model FLOPs never do",
    }


def _hardware_faults(shape: Shape, recompute: str) -> dict[int, str]:
    model, P = 3 * shape.forward, shape.num_parameters
    if recompute == "none":
        return {model + again: "without recomputation, hardware FLOPs equal model FLOPs"
                for again in (shape.attention, shape.forward)}
    return {
        model: "the recomputed FLOPs are missing",
        model + 3 * shape.forward: "only the forward pass is recomputed, not the backward pass",
        model + 3 * shape.attention:
            "only the forward of attention's matmuls is recomputed, not their backward",
        model + 2 * P: "full recomputes the whole forward pass, with attention: "
                       "2 P + 4 S D L" if recompute == "full" else
                       "selective recomputes attention's two matmuls, which have no parameters",
        model + shape.forward: "selective recomputes attention's two matmuls and nothing else",
        model + shape.attention: "full recomputes the whole forward pass, not only attention",
    }


# Days


def _expect_days(answer, run: Run) -> None:
    fits = isinstance(answer, tuple) and len(answer) == 2 and all(
        isinstance(n, int | float) for n in answer)
    expect(fits, seen=f"it returned {answer!r:.80}", likely="return two numbers: days and MFU")
    right, names = right_answer(run), ("days", "for the MFU")
    faults = _day_faults(run, right[0]), _mfu_faults(run, right[1])
    for seen, wanted, name, known in zip(answer, right, names, faults, strict=True):
        if math.isclose(seen, wanted, rel_tol=1e-9):
            continue
        causes = [why for why, value in known.items() if math.isclose(seen, value, rel_tol=1e-6)]
        if is_rounded(seen, wanted):
            causes.append(ROUNDED)
        causes.append("seconds are FLOPs / (GPUs x FLOP/s of each); the MFU is model FLOPs, "
                      "divided by what all GPUs could do at peak in that time")
        shown, right_shown = apart(seen, wanted, digits=6)
        raise Mistake(f"{shown} {name}, not {right_shown}", causes[0])


def _day_faults(run: Run, right: float) -> dict[str, float]:
    model, hardware = run.flops
    faults = {
        "MFU counts model FLOPs: recomputation does not count as progress":
            right * hardware / model if run.known == "MFU" else math.nan,
        f"{run.known} counts hardware FLOPs, including recomputation":
            right * model / hardware if run.known in ("HFU", "TFLOP/s") else math.nan,
        "GPU-hours are summed over all GPUs: divide by num_gpus":
            right * run.num_gpus if run.known == "GPU-hours" else math.nan,
        "that is how long a single GPU would take: there are num_gpus of them":
            right * run.num_gpus,
        "that is in seconds: a day has 86,400": right * DAY,
        "that is in hours: a day has 24": right * 24,
        "that is in minutes: a day has 1,440": right * 1440,
        "a TFLOP is 10^12 FLOPs": right * TERA,
        "a TFLOP is 10^12 FLOPs, not 10^9": right * 1e3,
    }
    if run.known in ("MFU", "HFU"):
        faults["that assumes peak FLOP/s: GPUs sustain only the fraction `value` of it"] = (
            right * run.value)
    return faults


def _mfu_faults(run: Run, right: float) -> dict[str, float]:
    model, hardware = run.flops
    return {
        "that is the HFU: the MFU leaves out recomputed FLOPs": right * hardware / model,
        "return a fraction from 0 to 1, not a percentage": right * 100,
        "that is relative to the peak of one GPU: use the peak of all num_gpus":
            right * run.num_gpus,
        "multiply the HFU by model FLOPs / hardware FLOPs only once":
            right * (hardware / model) ** 2,
        "that is in FLOP/s: divide by the peak": right * run.peak_flops,
    }
