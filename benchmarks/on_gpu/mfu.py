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
from torch import Tensor, nn
from train_step import our_step, plain_step, their_model, their_step

from minitron import cost
from minitron.comm.mesh import OneRankMesh
from minitron.config import Config, DataConfig, ModelConfig, TrainConfig
from minitron.measure.clock import Clock, peak_flops
from minitron.measure.record import Row
from minitron.model.transformer import Transformer
from minitron.running.training import Training
from minitron.step import make_optimizer
from teaching.lab.gpu_models import STEPS

ROUNDS, WARM_UP = 10, 3
LEAST_MFU = 0.55
"""Of the larger model, on our fastest side."""


def measure(machine: Machine, folder: Path) -> Findings:
    """Measure every model and side; rows have tokens/s, MFU and the speed relative to plain."""
    findings = Findings()
    if find_spec("transformers") is None:
        findings.notes.append("transformers is not installed: it has no rows")
    for name, (config, batch_size, S) in sizes(machine).items():
        for compiled in (False, True):
            case = Case(name, config, batch_size, S, compiled, machine)
            findings.rows += case.rows(case.seconds_by_side())
    set_targets(findings)
    return findings


def sizes(machine: Machine) -> dict[str, tuple[ModelConfig, int, int]]:
    """Return each model by name, with the sequences of a step and S."""
    if not machine.tiny:
        return STEPS
    return {name: (replace(config, vocab_size=256, num_layers=1, width=64, num_heads=4,
                           num_kv_heads=4, ffn_width=128), 2, 32)
            for name, (config, _, _) in STEPS.items()}


@dataclass(frozen=True)
class Case:
    """One model, eager or compiled, on all sides."""

    name: str
    config: ModelConfig
    batch_size: int
    S: int
    compiled: bool
    machine: Machine

    def seconds_by_side(self) -> dict[str, list[float]]:
        """Seconds of each side, round by round. One model is held at a time: three do not fit."""
        device = self.machine.device
        with device:  # random weights are made where they are used
            model = Transformer(self.config)
        steps = [make(model, device, make_optimizer(model, TrainConfig(), device))
                 for make in (our_step, plain_step)]
        ours, plain = self.timed(model.blocks, *steps)
        sides = {"ours": ours, "plain": plain}
        del model, steps
        release(device)

        if find_spec("transformers") is not None:
            with device:
                model = their_model(self.config)
            layers = model.transformer.h if self.config.family == "gpt" else model.model.layers
            [sides["transformers"]] = self.timed(layers, their_step(model, device))
            del model, layers
            release(device)

        training = bf16_training(self.config, self.batch_size, self.S, device)
        update = partial(take_step, training)
        [sides["ours, bf16 weights"]] = self.timed(training.model.blocks, update)
        return sides

    def timed(self, blocks: nn.ModuleList, *steps: Callable) -> list[list[float]]:
        """Seconds of steps that take turns, after their blocks have been compiled if asked."""
        if self.compiled:
            for block in blocks:
                block.compile(backend="aot_eager" if self.machine.tiny else "inductor")
        rounds, device = 2 if self.machine.tiny else ROUNDS, self.machine.device
        seconds = race([partial(step, *self.batch()) for step in steps], device, rounds, WARM_UP)
        if self.compiled:
            torch.compiler.reset()  # what has been compiled keeps its model
        return seconds

    def batch(self) -> tuple[Tensor, Tensor]:
        shape = self.batch_size, self.S + 1
        tokens = torch.randint(0, self.config.vocab_size, shape, device=self.machine.device)
        return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()

    def rows(self, sides: dict[str, list[float]]) -> list[Row]:
        how = "compiled" if self.compiled else "eager"
        device = self.machine.device
        clock = Clock(cost.training_flops_per_token(self.config, self.S),
                      peak_flops(device, torch.bfloat16), device)
        rows = []
        for side, seconds in sides.items():
            speed = self.batch_size * self.S / statistics.median(seconds)
            rows.append({
                "case": f"{self.name}, {how}, {side}", "model": self.name, "side": side,
                "compiled": self.compiled, "parameters": cost.num_parameters(self.config),
                "sequences": self.batch_size, "sequence_length": self.S, **spread(seconds),
                "tokens_per_second": speed, "mfu": clock.mfu(speed),
                "speed_of_plain": statistics.median(sides["plain"]) / statistics.median(seconds),
            })
        return rows


def bf16_training(config: ModelConfig, size: int, S: int, device: torch.device) -> Training:
    """Our training with weights, gradients and activations in bf16, and float32 master weights."""
    train = TrainConfig(precision="bf16", global_batch_size=size, micro_batch_size=size)
    return Training(Config(config, DataConfig(sequence_length=S), train), OneRankMesh(), device)


def take_step(training: Training, inputs: Tensor, targets: Tensor) -> None:
    training.update([(inputs, targets)], 1e-4)


def set_targets(findings: Findings) -> None:
    """Hold our speed to plain PyTorch's, and the larger model's MFU to `LEAST_MFU`."""
    ours = [row for row in findings.rows if row["side"] == "ours"]
    for row in ours:
        findings.at_least(f"{row['case']}: speed of plain PyTorch's",
                          round(row["speed_of_plain"], 2), 1.0)
    larger = max(row["parameters"] for row in ours)
    reached = [row["mfu"] for row in findings.rows
               if row["parameters"] == larger and row["side"].startswith("ours") and row["mfu"]]
    findings.at_least("MFU of our fastest side, larger model", max(reached, default=0.0), LEAST_MFU)
