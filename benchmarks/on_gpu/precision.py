"""The same 200 steps in every precision, ours and `torch.amp`'s: speed, memory and the last loss.

All sides train the same Llama from the same weights on the same stories; a side's loss is the mean
over its last steps. The two float32 sides add in different orders, and already end at different
losses, so a precision has lost something only where its loss is above both. TF32 is float32 whose
matmuls round their operands to 10 mantissa bits. fp8 is `_scaled_mm` where the device has it.
`torch.amp` keeps float32 weights, so our recipes that do not meet its autocast to the same 16 bits.
"""

import random
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.nn.functional as F
from on_gpu.findings import Findings, Machine, spread
from torch import Tensor, nn

from minitron import cost
from minitron.comm.mesh import OneRankMesh
from minitron.config import Config, DataConfig, ModelConfig, TrainConfig
from minitron.corpus.story_grammar import VOCABULARY, sample_story
from minitron.measure.clock import synchronize
from minitron.measure.record import Row
from minitron.model.float8 import multiplies_float8
from minitron.model.transformer import Transformer, initialize
from minitron.running.training import Training
from minitron.step import learning_rate, make_optimizer
from teaching.lab.gpu_models import PRECISION, STORYTELLER

TINY = replace(
    STORYTELLER,
    max_sequence_length=64,
    num_layers=1,
    width=32,
    num_heads=2,
    num_kv_heads=2,
    ffn_width=64,
)
STORIES = PRECISION.sequences
STEPS, RATE, CLIP_NORM = 200, 6e-4, 1.0
LAST = 20
"""Steps whose mean is the loss."""
MOST_ABOVE = 0.02
"""Of the loss, relative to float32's."""

Update = Callable[[Tensor, Tensor, float], Tensor]  # inputs, targets, learning rate -> loss


@dataclass(frozen=True)
class Side:
    """A way to train: a precision of ours or theirs, and what torch does with float32 matmuls."""

    precision: str
    is_ours: bool = True
    float32: str = "highest"
    against: str | None = None


SIDES = {
    "fp32": Side("fp32", against="torch, fp32"),
    "tf32": Side("fp32", float32="high", against="torch, tf32"),
    "bf16-autocast": Side("bf16-autocast", against="torch.amp, bf16"),
    "bf16": Side("bf16", against="torch.amp, bf16"),
    "bf16-fp32-grads": Side("bf16-fp32-grads", against="torch.amp, bf16"),
    "fp16": Side("fp16", against="torch.amp, fp16"),
    "fp8": Side("fp8", against="torch.amp, bf16"),
    "torch, fp32": Side("float32", is_ours=False),
    "torch, tf32": Side("float32", is_ours=False, float32="high"),
    "torch.amp, bf16": Side("bfloat16", is_ours=False),
    "torch.amp, fp16": Side("float16", is_ours=False),
}


def measure(machine: Machine, folder: Path) -> Findings:
    """Train with every side, one after the other; rows have seconds, bytes and the loss."""
    findings, model = Findings(), TINY if machine.tiny else PRECISION.model
    steps = 4 if machine.tiny else STEPS
    batches = list(story_batches(model.max_sequence_length, steps, machine.device))
    for name, side in SIDES.items():
        findings.rows.append(train(name, side, model, batches, machine))
    by_case = {row["case"]: row for row in findings.rows}
    for name, side in SIDES.items():
        row = by_case[name]
        if side.against:
            row["speed_of_theirs"] = by_case[side.against]["seconds"] / row["seconds"]
    set_targets(findings)
    if not multiplies_float8(machine.device):
        findings.notes.append("this device has no fp8 matmuls: they were emulated")
    return findings


def set_targets(findings: Findings) -> None:
    """Hold our losses to the higher one of the two float32 sides'."""
    by_case = {row["case"]: row for row in findings.rows}
    float32 = max(by_case[name]["loss"] for name in ("fp32", "torch, fp32"))
    for name, row in by_case.items():
        if row["is_ours"]:
            above = max(0.0, row["loss"] / float32 - 1)
            findings.at_most(f"{name}: loss above float32's by", above, MOST_ABOVE)


def story_batches(S: int, steps: int, device: torch.device) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield inputs and targets (STORIES, S) of as many steps, from stories told one by one."""
    number = {word: index for index, word in enumerate(VOCABULARY)}
    generator, tokens = random.Random(0), []
    for _ in range(steps):
        while len(tokens) < STORIES * (S + 1):
            tokens += [number[word] for word in sample_story(generator)]
        used, tokens = tokens[: STORIES * (S + 1)], tokens[STORIES * (S + 1) :]
        batch = torch.tensor(used, device=device).view(STORIES, S + 1)
        yield batch[:, :-1].contiguous(), batch[:, 1:].contiguous()


def train(
    name: str,
    side: Side,
    model: ModelConfig,
    batches: list[tuple[Tensor, Tensor]],
    machine: Machine,
) -> Row:
    """Train on all batches; the row has the seconds of a step after the first few."""
    device, steps = machine.device, len(batches)
    with float32_matmuls(side.float32):
        make = our_update if side.is_ours else their_update
        update = make(side.precision, model, device)
        if machine.on_gpu:
            torch.cuda.reset_peak_memory_stats(device)
        losses, seconds = [], []
        for step, (inputs, targets) in enumerate(batches):
            rate = learning_rate(step, RATE, RATE / 10, steps // 10, steps)
            synchronize(device)
            start = time.perf_counter()
            losses.append(update(inputs, targets, rate))
            synchronize(device)
            seconds.append(time.perf_counter() - start)
        peak = torch.cuda.max_memory_allocated(device) if machine.on_gpu else None
    losses = torch.stack(losses).tolist()
    median = statistics.median(seconds[steps // 4 :])
    return {
        "case": name,
        "is_ours": side.is_ours,
        "against": side.against,
        "steps": steps,
        **spread(seconds[steps // 4 :]),
        "tokens_per_second": batches[0][0].numel() / median,
        "peak_bytes": peak,
        "loss": statistics.mean(losses[-LAST:]),
        "losses": [round(x, 4) for x in losses],
        "parameters": cost.num_parameters(model),
    }


@contextmanager
def float32_matmuls(kind: str) -> Iterator[None]:
    """Let float32 matmuls be exact ("highest") or round their operands as TF32 does ("high")."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(kind)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def our_update(precision: str, model: ModelConfig, device: torch.device) -> Update:
    train = TrainConfig(
        precision=precision,
        global_batch_size=STORIES,
        clip_norm=CLIP_NORM,
        micro_batch_size=STORIES,
    )
    data = DataConfig(sequence_length=model.max_sequence_length)
    training = Training(Config(model, data, train), OneRankMesh(), device)
    return lambda inputs, targets, rate: training.update([(inputs, targets)], rate)[0]


def their_update(precision: str, config: ModelConfig, device: torch.device) -> Update:
    """What everybody writes: autocast, and a GradScaler for float16."""
    dtype = getattr(torch, precision)
    model = Transformer(config).to(device)
    initialize(model, seed=0)
    optimizer = make_optimizer(model, TrainConfig(), device)
    scaler = torch.amp.GradScaler(device.type, enabled=dtype == torch.float16)

    def update(inputs: Tensor, targets: Tensor, rate: float) -> Tensor:
        optimizer.zero_grad()
        with torch.autocast(device.type, dtype, enabled=dtype != torch.float32):
            logits = model(inputs)
        loss = F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), CLIP_NORM)
        for group in optimizer.param_groups:
            group["lr"] = rate
        scaler.step(optimizer)
        scaler.update()
        return loss.detach()

    return update
