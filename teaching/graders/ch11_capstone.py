"""Grader of 11.5: the story model trains on 8 ranks as the answer says, a meter on each of them."""

import math
import random
from collections.abc import Callable
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from minitron.comm.agreement import SINGLE_RANK, Group, all_reduce_max_int
from minitron.config import (
    Config,
    ConfigError,
    DataConfig,
    ModelConfig,
    ParallelConfig,
    TrainConfig,
)
from minitron.corpus.story_grammar import VOCABULARY, sample_story
from minitron.launch import RankError, run
from minitron.measure.meter import Meter
from minitron.model.recompute import RECOMPUTE_POLICIES
from minitron.parallel.tensor.cuts import require_sizes
from minitron.parallelize import build, lay_out
from minitron.step import make_optimizer, train_step
from teaching.graders import Mistake, asked, expect
from teaching.graders.ranks import per_rank

NUM_RANKS, BATCH, LENGTH, STEPS = 8, 8, 64, 4
RATE = 5e-3
MODEL = ModelConfig(
    vocab_size=136, max_sequence_length=LENGTH, num_layers=4, width=64, num_heads=2,
    num_kv_heads=2, ffn_width=192,
)
METERED = 1
"""In the first step AdamW makes its moments; from the second one on all steps hold the same."""
LIMIT = 1_150_000
"""Bytes that a rank may hold at its peak."""
APART = 1e-3
"""Relative: the ranks add in another order than one process does."""
SECONDS = 60.0
REFUSED = "the package does not train this layout"
SLOW = "8 ranks share the cores of this machine: close what else is running. Many small " \
       "micro-batches through many stages take longest"
CPU = torch.device("cpu")

KEYS = {
    "dp": range(1, NUM_RANKS + 1),
    "tp": range(1, NUM_RANKS + 1),
    "pp": range(1, NUM_RANKS + 1),
    "zero": range(4),
    "sequence": (False, True),
    "recompute": tuple(RECOMPUTE_POLICIES),
    "micro_batch_size": range(1, BATCH + 1),
}
REMEDIES = {
    "parameter": "tp and pp split the weights; zero = 3 also shards them over dp",
    "gradient": "tp and pp split the gradients like the weights; zero = 2 or 3 also shards them "
                "over dp",
    "optimizer state": "it is twice the weights: zero = 1, 2 or 3 shards it over dp",
    "activation": "use smaller micro-batches, sequence parallelism with tp, or recomputation; "
                  "the first stages of a pipeline hold several micro-batches",
    "temporary": "intermediate results of a block, the activations it recomputes, and gradients "
                 "before they are sharded: smaller micro-batches and more tp reduce these",
}


class Seen(NamedTuple):
    """What a rank held at its peak, bytes by category, and the losses."""

    peak: dict[str, int]
    losses: list[float]

    @property
    def total(self) -> int:
        return sum(self.peak.values())


def grade_11_5(layout: Callable) -> None:
    """Train with the layout for two steps and check the peak; then train on, check the losses."""
    with asked("layout()"):
        answer = layout()
        _expect_values(answer)
        config = _config_of(answer)
    with asked(f"{STEPS} steps on {NUM_RANKS} ranks, with {answer}"):
        try:  # no code of the learner's runs there, so nobody need watch its collectives
            seen = run(train, NUM_RANKS, config, tokens(), timeout=SECONDS, watch=False)
        except RankError as error:
            raised = next((f.text for f in error.failures.values() if f.error), "")
            raise Mistake(str(error), f"{REFUSED}: {raised}" if raised else SLOW) from None
        _expect_fits(seen)
        _expect_same_losses(seen)


def _expect_values(answer) -> None:
    expect(isinstance(answer, dict), seen=f"it returned {answer!r:.80}", likely="return a dict")
    wrong = sorted(map(str, set(KEYS) ^ set(answer)))
    expect(not wrong, seen=f"its keys are {', '.join(map(str, answer))}",
           likely=f"the keys are {', '.join(KEYS)}: missing or unknown is {', '.join(wrong)}")
    for key, values in KEYS.items():
        fits = type(answer[key]) is type(values[0]) and answer[key] in values
        expect(fits, seen=f"{key} is {answer[key]!r}", likely=f"{key} is "
               + (f"{values[0]} to {values[-1]}" if isinstance(values, range) else
                  " or ".join(map(repr, values))))
    dp, tp, pp = (answer[axis] for axis in ("dp", "tp", "pp"))
    expect(dp * tp * pp == NUM_RANKS, seen=f"dp x tp x pp = {dp} x {tp} x {pp} = {dp * tp * pp}",
           likely=f"the product must be the number of ranks, {NUM_RANKS}")


def _config_of(answer: dict) -> Config:
    """What a run of this layout is told. Raises Mistake with the package's own words."""
    dp, tp, pp = (answer[axis] for axis in ("dp", "tp", "pp"))
    try:
        require_sizes(MODEL, tp)
        return Config(
            MODEL,
            DataConfig(sequence_length=LENGTH),
            TrainConfig(
                steps=STEPS, global_batch_size=BATCH, micro_batch_size=answer["micro_batch_size"],
                recompute=answer["recompute"], learning_rate=RATE,
            ),
            ParallelConfig(dp=dp, tp=tp, pp=pp, sequence=answer["sequence"],
                           zero=answer["zero"]),
        )
    except ConfigError as error:
        raise Mistake(str(error), f"{REFUSED}: try another one for the 8 ranks") from None


@cache
def tokens() -> Tensor:
    """The stories of all steps, (STEPS, BATCH, LENGTH + 1)."""
    rng, number = random.Random(11), {word: index for index, word in enumerate(VOCABULARY)}
    shape = STEPS, BATCH, LENGTH + 1
    words: list[int] = []
    while len(words) < torch.Size(shape).numel():
        words += [number[word] for word in sample_story(rng)]
    return torch.tensor(words[:torch.Size(shape).numel()]).view(shape)


def train(group: Group, config: Config, batches: Tensor, limit: float = LIMIT) -> Seen:
    """Train one rank's part, the second step under a meter; go on if no rank is over the limit."""
    mesh = lay_out(config.parallel, group.size(), CPU)
    model, parallel = build(config, mesh, CPU)
    optimizer = make_optimizer(model, config.train, CPU)
    parallel.shard(optimizer)
    rank, size = parallel.data_part

    def step(batch: Tensor) -> float:
        parts = batch[rank::size].split(config.train.micro_batch_size)
        micro_batches = [(part[:, :-1], part[:, 1:]) for part in parts]
        clip_norm = config.train.clip_norm
        return float(train_step(model, optimizer, micro_batches, RATE, clip_norm, parallel)[0])

    losses = [step(batch) for batch in batches[:METERED]]
    with Meter(model, optimizer) as meter:
        losses.append(step(batches[METERED]))
    peak = meter.peak
    if not all_reduce_max_int(peak.total > limit, group):
        losses += [step(batch) for batch in batches[METERED + 1:]]
    return Seen(peak.bytes, losses)


def _expect_fits(seen: list[Seen]) -> None:
    texts = {rank: in_words(mine.peak) for rank, mine in enumerate(seen) if mine.total > LIMIT}
    if texts:
        worst = max(seen, key=lambda mine: mine.total).peak
        kind = max(worst, key=worst.get)
        raise Mistake(f"over {LIMIT / 1e6:.2f} MB at the peak of a step: {per_rank(texts)}",
                      f"the largest part is {kind}: {REMEDIES[kind]}")


def in_words(peak: dict[str, int]) -> str:
    """Such as "1.9 MB: 0.9 activation, 0.5 gradient ..."; the largest category first."""
    kinds = sorted(peak, key=lambda kind: -peak[kind])
    parts = ", ".join(f"{peak[kind] / 1e6:.2f} {kind}" for kind in kinds)
    return f"{sum(peak.values()) / 1e6:.2f} MB ({parts})"


def _expect_same_losses(seen: list[Seen]) -> None:
    losses = losses_of_one_process()
    wrong = {rank: f"the losses are {', '.join(f'{loss:.3f}' for loss in mine.losses)}"
             for rank, mine in enumerate(seen)
             if not torch.allclose(torch.tensor(mine.losses), torch.tensor(losses), rtol=APART)}
    expect(not wrong, seen=f"{per_rank(wrong)}; one process has "
           f"{', '.join(f'{loss:.3f}' for loss in losses)}",
           likely="every layout trains the same model, so this should not happen; please report it")


@cache
def losses_of_one_process() -> list[float]:
    layout = dict(dp=1, tp=1, pp=1, zero=0, sequence=False, recompute="none",
                  micro_batch_size=BATCH)
    return train(SINGLE_RANK, _config_of(layout), tokens(), limit=math.inf).losses
