"""Whole training steps in bf16: ours against plain PyTorch and `transformers`, eager and compiled.

Ours and plain train the same model with the same optimizer, turn by turn: plain is the loop that
calls forward, loss, backward, clipping and AdamW one after the other. `transformers` has a model of
its own, of the same shapes. All three keep float32 weights and compute under bf16 autocast. A last
side is ours with bf16 weights and float32 master weights, which leaves autocast nothing to cast.

Compiled means each block by torch.compile, as torchtitan does it: all blocks share one graph, so
that compiling takes seconds. Head and loss stay eager on every side.
"""

import statistics
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import torch
from common import race
from on_gpu.findings import Findings, Machine, release, spread
from torch import nn
from train_step import our_step, plain_step, random_micro_batches, their_model, their_step

from minitron import cost
from minitron.comm.mesh import OneRankMesh
from minitron.config import Config, DataConfig, TrainConfig
from minitron.measure.clock import Clock, peak_flops
from minitron.measure.record import Row
from minitron.model.transformer import Transformer
from minitron.running.training import Training
from minitron.step import make_optimizer
from teaching.lab.gpu_models import SPEED, MeasuredStep

TINY = {
    "vocab_size": 256,
    "max_sequence_length": 32,
    "num_layers": 1,
    "width": 64,
    "num_heads": 4,
    "num_kv_heads": 4,
    "ffn_width": 128,
}
ROUNDS, WARM_UP = 6, 2
LEAST_MFU = 0.55
"""Of the larger model, on our fastest side."""


def measure(machine: Machine, folder: Path) -> Findings:
    """Measure every model and side; rows have tokens/s, MFU and the speed relative to plain."""
    findings = Findings()
    if find_spec("transformers") is None:
        findings.notes.append("transformers is not installed: it has no rows")
    for name, step in steps(machine).items():
        for compiled in (False, True):
            case = Case(name, step, compiled, machine)
            findings.rows += case.rows(case.seconds_by_side())
    set_targets(findings)
    return findings


def steps(machine: Machine) -> dict[str, MeasuredStep]:
    """Return each measured step, by its model's name."""
    if not machine.tiny:
        return SPEED
    return {name: MeasuredStep(replace(step.model, **TINY), 4, 2) for name, step in SPEED.items()}


@dataclass(frozen=True)
class Case:
    """One model, eager or compiled, on all sides."""

    name: str
    step: MeasuredStep
    compiled: bool
    machine: Machine

    def seconds_by_side(self) -> dict[str, list[float]]:
        """Seconds of each side, round by round. One model is held at a time: three do not fit."""
        device = self.machine.device
        with device:  # random weights are made where they are used
            model = Transformer(self.step.model)
        steps = [
            make(model, device, make_optimizer(model, TrainConfig(), device))
            for make in (our_step, plain_step)
        ]
        ours, plain = self.timed(model.blocks, *steps)
        sides = {"ours": ours, "plain": plain}
        del model, steps
        release(device)

        if find_spec("transformers") is not None:
            with device:
                model = their_model(self.step.model)
            layers = model.transformer.h if self.step.model.family == "gpt" else model.model.layers
            [sides["transformers"]] = self.timed(layers, their_step(model, device))
            del model, layers
            release(device)

        training = bf16_training(self.step, device)
        [sides["ours, bf16 weights"]] = self.timed(
            training.model.blocks, partial(training.update, rate=1e-4)
        )
        return sides

    def timed(self, blocks: nn.ModuleList, *steps: Callable) -> list[list[float]]:
        """Seconds of steps that take turns, after their blocks have been compiled if asked."""
        if self.compiled:
            for block in blocks:
                block.compile(backend="aot_eager" if self.machine.tiny else "inductor")
        rounds, device = 2 if self.machine.tiny else ROUNDS, self.machine.device
        micro_batches = random_micro_batches(self.step, device)
        seconds = race([partial(step, micro_batches) for step in steps], device, rounds, WARM_UP)
        if self.compiled:
            torch.compiler.reset()  # what has been compiled keeps its model
        return seconds

    def rows(self, sides: dict[str, list[float]]) -> list[Row]:
        how = "compiled" if self.compiled else "eager"
        device, model, S = self.machine.device, self.step.model, self.step.sequence_length
        clock = Clock(
            cost.training_flops_per_token(model, S), peak_flops(device, torch.bfloat16), device
        )
        rows = []
        for side, seconds in sides.items():
            speed = self.step.num_tokens / statistics.median(seconds)
            rows.append(
                {
                    "case": f"{self.name}, {how}, {side}",
                    "model": self.name,
                    "side": side,
                    "compiled": self.compiled,
                    "parameters": cost.num_parameters(model),
                    "sequences": self.step.sequences,
                    "sequence_length": S,
                    "micro_batch_size": self.step.micro_batch_size,
                    **spread(seconds),
                    "tokens_per_second": speed,
                    "mfu": clock.mfu(speed),
                    "speed_of_plain": statistics.median(sides["plain"])
                    / statistics.median(seconds),
                }
            )
        return rows


def bf16_training(step: MeasuredStep, device: torch.device) -> Training:
    """Our training with weights, gradients and activations in bf16, and float32 master weights."""
    train = TrainConfig(
        precision="bf16", global_batch_size=step.sequences, micro_batch_size=step.micro_batch_size
    )
    config = Config(step.model, DataConfig(sequence_length=step.sequence_length), train)
    return Training(config, OneRankMesh(), device)


def set_targets(findings: Findings) -> None:
    """Hold our speed to plain PyTorch's, and the larger model's MFU to `LEAST_MFU`."""
    ours = [row for row in findings.rows if row["side"] == "ours"]
    for row in ours:
        findings.at_least(
            f"{row['case']}: speed of plain PyTorch's", round(row["speed_of_plain"], 2), 1.0
        )
    larger = max(row["parameters"] for row in ours)
    reached = [
        row["mfu"]
        for row in findings.rows
        if row["parameters"] == larger and row["side"].startswith("ours") and row["mfu"]
    ]
    findings.at_least("MFU of our fastest side, larger model", max(reached, default=0.0), LEAST_MFU)
