"""Pipeline schedules against `torch.distributed.pipelining` in one run.

    python benchmarks/pipeline.py             # CPU: gloo, 2 and 4 ranks
    torchrun --nproc-per-node 8 --local-ranks-filter 0 benchmarks/pipeline.py --ranks 8

Both sides run the same stages of the same GPT from the same weights on the same micro-batches:
forward, loss, backward, AdamW. They take turns, round by round, so that a noisy machine disturbs
all alike; a ratio is the median over the rounds, of the slowest rank. A side whose loss differs
from the first one's is an error. Bytes are counted in separate steps, as in the other benchmarks.

The second table compares the bubble with the simulator's. On the CPU a stage's passes are emulated:
each sleeps, so that ranks do not fight for cores; messages are real. The simulator gets how long
the passes of each kind have really taken: a late waking is not idle time.
"""

import statistics
import time
from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist
from common import (
    Step,
    compare,
    conditions,
    publish,
    read_options,
)
from torch import Tensor, nn
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
)

from minitron.config import ModelConfig
from minitron.launch import run
from minitron.model.transformer import Transformer, initialize
from minitron.parallel.pipeline.plan import as_full_backward
from minitron.parallel.pipeline.schedules import (
    gpipe,
    interleaved,
    one_forward_one_backward,
    zero_bubble,
)
from minitron.parallel.pipeline.simulator import simulate
from minitron.parallel.pipeline.stages import ScheduleExecutor, apply_pipeline_parallel
from minitron.step import summed_loss

SIZES = {  # model, sequences per micro-batch, S, micro-batches
    "cpu": (ModelConfig("gpt", 2048, 128, 8, 256, 4, 4, 1024, tied_embedding=False), 2, 64, 8),
    "cuda": (
        ModelConfig("gpt", 50304, 1024, 32, 2048, 16, 16, 8192, tied_embedding=False),
        2,
        1024,
        16,
    ),
}
SCHEDULES = {
    "GPipe": (gpipe, ScheduleGPipe),
    "1F1B": (one_forward_one_backward, Schedule1F1B),
    "interleaved 1F1B": (partial(interleaved, num_chunks=2), ScheduleInterleaved1F1B),
}
RIVALS = {name: f"torch {name}" for name in SCHEDULES}
SECONDS = {"F": 0.1, "B": 0.2, "I": 0.1, "W": 0.1}  # of an emulated pass

make_optimizer = partial(torch.optim.AdamW, lr=1e-3, fused=True)


# A step of each side


def make_step(side: str, group: dist.ProcessGroup, device: torch.device) -> Step:
    config, num_sequences, S, m = SIZES[device.type]
    model = Transformer(config).to(device)
    initialize(model, seed=0)
    generator = torch.Generator().manual_seed(0)  # the same samples on every rank
    tokens = torch.randint(config.vocab_size, (m * num_sequences, S + 1), generator=generator)
    inputs, targets = tokens[:, :-1].to(device), tokens[:, 1:].to(device)

    name = side.removeprefix("torch ")
    make_schedule, rival = SCHEDULES[name]
    pipeline = apply_pipeline_parallel(model, group, make_schedule)
    optimizer = make_optimizer(model.parameters())
    if side == name:
        pairs = list(zip(inputs.chunk(m), targets.chunk(m), strict=True))
        compute = partial(pipeline.run, pairs, summed_loss, targets.numel())
    else:
        compute = theirs(pipeline, rival, inputs, targets, m)

    def step() -> Tensor:
        optimizer.zero_grad()
        loss = compute()
        optimizer.step()
        return loss

    return step


def theirs(pipeline, rival, inputs: Tensor, targets: Tensor, m: int) -> Callable[[], Tensor]:
    """A step of PyTorch's schedule with the stages that `pipeline` holds."""
    device, num_stages = inputs.device, pipeline.last_stage + 1
    stages = [
        PipelineStage(Stage(pipeline, number), number, num_stages, device, group=pipeline.group)
        for number in pipeline.stages
    ]
    schedule = rival(
        stages[0] if len(stages) == 1 else stages,
        m,
        scale_grads=False,
        loss_fn=lambda logits, target: summed_loss(logits, target) / targets.numel(),
    )

    def compute() -> Tensor:
        losses: list[Tensor] = []
        if pipeline.last_stage in pipeline.stages:
            schedule.step(
                *([inputs] if 0 in pipeline.stages else []), target=targets, losses=losses
            )
        else:
            schedule.step(*([inputs] if 0 in pipeline.stages else []))
        total = sum(loss.detach() for loss in losses) if losses else None
        return pipeline.from_last(total, torch.zeros((), device=device))

    return compute


class Stage(nn.Module):
    """One stage of a pipeline as PyTorch wants it: tokens or x in, x or logits out."""

    def __init__(self, pipeline, number: int):
        super().__init__()
        self.whole, self.blocks = [pipeline.model], pipeline.ranges[number]  # a list: no submodule
        self.is_first, self.is_last = number == 0, number == pipeline.last_stage
        self.layers = pipeline.model.blocks[self.blocks.start : self.blocks.stop]

    def forward(self, x: Tensor) -> Tensor:
        (model,) = self.whole
        if self.is_first:
            x = model.embed(x, torch.arange(x.shape[1], device=x.device))
        x = model.run_blocks(self.layers, x, None)
        return model.predict(x) if self.is_last else x


def table(num_ranks: int, rounds: int) -> list[str]:
    """One row per side; sent also in units of b s h for each boundary, way and micro-batch."""
    config, num_sequences, S, m = SIZES["cuda" if torch.cuda.is_available() else "cpu"]
    unit = 4 * num_sequences * S * config.width * m * 2 * max(1, num_ranks - 1) / num_ranks
    return compare(make_step, RIVALS, num_ranks, rounds, unit)


# The bubble


class Emulated(ScheduleExecutor):
    """A passage whose passes sleep instead of computing; tensors travel as ever."""

    def __init__(self, pipeline, micro_batches, slept: list[tuple[str, float]]):
        super().__init__(pipeline, micro_batches, None)
        self.slept = slept

    def sleep(self, kind: str) -> None:
        start = time.perf_counter()
        time.sleep(SECONDS[kind])
        self.slept.append((kind, time.perf_counter() - start))

    def forward(self, action) -> None:
        stage, last = action.stage, self.pipeline.last_stage
        if stage > 0:
            self.take(action._replace(stage=stage - 1))
        self.sleep("F")
        if stage < last:
            self.made[action] = self.empty(action)

    def backward(self, action) -> None:
        if action.stage < self.pipeline.last_stage:
            self.take(as_full_backward(action._replace(stage=action.stage + 1)))
        self.sleep(action.kind)
        if action.stage > 0:
            self.made[as_full_backward(action)] = self.empty(action)

    def weights(self, action) -> None:
        self.sleep("W")

    def empty(self, action) -> Tensor:
        tokens = self.micro_batches[action.micro_batch][0]
        return torch.zeros(self.pipeline.shape_between(tokens), device=self.device)


def emulate(
    group: dist.ProcessGroup, make_schedule, m: int, rounds: int
) -> tuple[list[float], list[tuple[str, float]]]:
    """Seconds of each emulated step on this rank, and of each pass of them, by kind."""
    config = SIZES["cpu"][0]
    pipeline = apply_pipeline_parallel(Transformer(config), group, make_schedule)
    tokens = torch.zeros(1, 16, dtype=torch.long)
    seconds, slept = [], []
    for _ in range(rounds + 1):
        dist.barrier(group)
        start = time.perf_counter()
        Emulated(pipeline, [(tokens, tokens)] * m, slept).run(pipeline.program(m))
        dist.barrier(group)
        seconds.append(time.perf_counter() - start)
    return seconds[1:], slept


def bubble_rows(num_ranks: int, rounds: int) -> list[str]:
    """Measured against simulated bubble, as a share of the ideal time."""
    rows = []
    for name, make_schedule in {
        **{k: v[0] for k, v in SCHEDULES.items()},
        "ZB-H1": zero_bubble,
    }.items():
        m = 2 * num_ranks
        by_rank = run(emulate, num_ranks, make_schedule, m, rounds, timeout=300)
        steps, slept = zip(*by_rank, strict=True)
        measured = statistics.median(map(max, zip(*steps, strict=True)))
        passes = [each for of_rank in slept for each in of_rank]
        means = {
            kind: statistics.mean(seconds for name, seconds in passes if name == kind)
            for kind in {name for name, _ in passes}
        }
        timeline = simulate(make_schedule(num_ranks, m), means)
        ideal = timeline.busy_seconds(0)
        rows.append(
            f"| {num_ranks} | {name} | {m} | {1e3 * ideal:.0f} | {1e3 * timeline.seconds:.0f} "
            f"| {1e3 * measured:.0f} | {100 * (timeline.seconds / ideal - 1):.1f} % "
            f"| {100 * (measured / ideal - 1):.1f} % "
            f"| {(measured - ideal) / (timeline.seconds - ideal):.2f} |"
        )
    return rows


def main() -> None:
    options = read_options(__doc__, rounds=12, sizes=SIZES)
    if options.small:
        SECONDS.update({kind: seconds / 20 for kind, seconds in SECONDS.items()})
    on_gpu = torch.cuda.is_available()
    lines = [
        conditions("float32"),
        "",
        "| ranks | version | ms per step | peak MB | sent MB | sent, b s h per boundary "
        "| against | time, ours / theirs | peak, ours / theirs |",
        "|---|---|---|---|---|---|---|---|---|",
        *(row for num_ranks in options.ranks for row in table(num_ranks, options.rounds)),
    ]
    if not on_gpu:
        lines += [
            "",
            f"Bubble, with passes that sleep: F, I and W {1e3 * SECONDS['F']:.0f} ms, "
            f"B {1e3 * SECONDS['B']:.0f} ms:",
            "",
            "| ranks | schedule | micro-batches | work, ms | simulated, ms | measured, ms "
            "| bubble of ideal, simulated | measured | bubble, measured / simulated |",
            "|---|---|---|---|---|---|---|---|---|",
            *(
                row
                for num_ranks in options.ranks
                for row in bubble_rows(num_ranks, min(3, options.rounds))
            ),
        ]
    publish(lines, options.out)


if __name__ == "__main__":
    main()
