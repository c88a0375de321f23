"""Every layout, the same training: the oracle over all combinations on up to 8 ranks.

    python tools/grid.py --count
    python tools/grid.py --shard 1/4 | tee grid.1      # one line per case; hours
    python tools/grid.py --shard 1/4 --start 512       # go on at the 512th line

Each case trains by SGD and by AdamW, with clipping, in float64, and is compared with one process.
The exit code is 1 if one differs. `tests/test_grid.py` runs cases in which all pairs occur.

Read in this order: Case, why_refused, config_of, divide, records_of, differences.
"""

import argparse
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from functools import lru_cache, partial
from itertools import groupby, product
from textwrap import indent
from typing import NamedTuple

import torch
from torch import nn

from minitron.comm.agreement import SINGLE_RANK, Group
from minitron.config import Config, DataConfig, ModelConfig, ParallelConfig, TrainConfig
from minitron.launch import RankError, run
from minitron.model.transformer import Transformer, fill, initial_value
from minitron.parallel.interface import ParallelModel
from minitron.parallel.one_device import OneDevice
from minitron.parallelize import lay_out, parallelize
from minitron.proof.difference import Moment, first_difference
from minitron.proof.oracle import OPTIMIZERS, sample_batches, trainings

MOST_RANKS = 8
Records = dict[str, list[Moment]]  # by optimizer
Optimizers = tuple[str, ...]
BOTH = tuple(OPTIMIZERS)

CPU = torch.device("cpu")
CLIP_NORM = 0.1  # below the gradient's norm
SECONDS_PER_CASE = 60
BATCH = 8  # cases for which ranks are started once

FAMILIES = "gpt", "llama"
DATA = {
    "bucketed": {},
    "zero1": {"zero": 1},
    "zero2": {"zero": 2},
    "zero2 once a step": {"zero": 2, "sync_every_micro_batch": False},
    "zero3": {"zero": 3},
    "zero3 once a step": {"zero": 3, "sync_every_micro_batch": False},
    "zero3 kept": {"zero": 3, "reshard_each_pass": False},
}
RECOMPUTE = "none", "full", "selective", "sqrt"
SCHEDULES = "1f1b", "gpipe", "interleaved", "zero-bubble"
MICRO_BATCHES = "one", "2 pp", "2 pp + 1"


class Case(NamedTuple):
    """One combination; a case trains with every optimizer that it is tried with."""

    dp: int
    tp: int
    pp: int
    family: str
    data: str
    sequence: bool
    recompute: str
    schedule: str
    micro_batches: str

    @property
    def num_ranks(self) -> int:
        return self.dp * self.tp * self.pp

    @property
    def num_micro_batches(self) -> int:
        return {"one": 1, "2 pp": 2 * self.pp, "2 pp + 1": 2 * self.pp + 1}[self.micro_batches]

    def __str__(self) -> str:
        sequence = " sequence" if self.sequence else ""
        return (
            f"dp {self.dp} tp {self.tp} pp {self.pp} {self.family}, {self.data}{sequence}, "
            f"recompute {self.recompute}, {self.schedule}, {self.micro_batches}"
        )


def all_cases(layouts: Iterable[tuple[int, int, int]]) -> list[Case]:
    """Every combination on the given (dp, tp, pp), also those that are refused."""
    choices = FAMILIES, DATA, (False, True), RECOMPUTE, SCHEDULES, MICRO_BATCHES
    return [Case(*layout, *choice) for layout in layouts for choice in product(*choices)]


def layouts_of(num_ranks: int) -> list[tuple[int, int, int]]:
    """All (dp, tp, pp) of exactly so many ranks."""
    sizes = range(1, num_ranks + 1)
    return [(dp, tp, pp) for dp, tp, pp in product(sizes, repeat=3) if dp * tp * pp == num_ranks]


def why_refused(case: Case) -> str | None:
    """What the message says of a combination that is not offered; None: it is."""
    reasons = {
        "it divides what tensor parallelism replicates": case.sequence and case.tp == 1,
        "there is no pipeline": case.schedule != "1f1b" and case.pp == 1,
        "a step (train.micro_batch_size = 1)": case.schedule == "interleaved"
        and case.num_micro_batches % case.pp > 0,
    }
    return next((reason for reason, applies in reasons.items() if applies), None)


# From a case to a training


def config_of(case: Case) -> Config:
    """What a run is told; raises ConfigError for what the config alone can refuse.

    Sizes are the nearest to small ones that tp ranks divide. Stages are not equal.
    """
    heads, vocabulary, S, ffn_width = (tp_times(case.tp, size) for size in (6, 40, 12, 40))
    groups = 2 if case.tp % 2 == 0 else 1
    chunks = 2 if case.schedule == "interleaved" else 1
    model = ModelConfig(
        case.family,
        vocabulary,
        S,
        case.pp * chunks + 1,
        4 * heads,
        heads,
        heads if case.family == "gpt" else groups,
        ffn_width,
        case.family == "gpt",
    )
    parallel = ParallelConfig(
        tp=case.tp,
        pp=case.pp,
        sequence=case.sequence,
        schedule=case.schedule,
        chunks=chunks,
        **DATA[case.data],
    )
    train = TrainConfig(
        global_batch_size=case.dp * case.num_micro_batches,
        micro_batch_size=1,
        recompute=case.recompute,
    )
    return Config(model, DataConfig(sequence_length=S), train, parallel)


def tp_times(tp: int, size: int) -> int:
    return tp * max(1, size // tp)


# The training of a case, by the oracle


def model_on(device: str, config: Config) -> nn.Module:
    """A model with a frozen parameter, before it is given weights."""
    with torch.device(device):
        model = Transformer(config.model)
    model.blocks[0].mlp_norm.weight.requires_grad_(False)
    return model


def divide(config: Config, model: nn.Module, group: Group) -> ParallelModel:
    """Do what `parallelize.build` does on each rank."""
    parallel = parallelize(model, lay_out(config.parallel, group.size(), CPU), config, CPU)
    parallel.fill(initial(config))
    parallel.make_optimizer = clipping(parallel.make_optimizer, parallel.clip)
    return parallel


def leave_undivided(config: Config, model: nn.Module, group: Group) -> ParallelModel:
    """Do the same for one process, with nothing of parallelism."""
    fill(model, initial(config))
    parallel = OneDevice(model)
    parallel.make_optimizer = clipping(parallel.make_optimizer, nn.utils.clip_grad_norm_)
    return parallel


def initial(config: Config) -> Callable:
    return partial(initial_value, seed=0, num_layers=config.model.num_layers)


def clipping(make_optimizer: Callable, clip: Callable) -> Callable:
    """`make_optimizer`, of optimizers that clip before each step, as a run does."""

    def before_step(optimizer: torch.optim.Optimizer, *_) -> None:
        norm = clip([p for group in optimizer.param_groups for p in group["params"]], CLIP_NORM)
        assert norm > CLIP_NORM, f"a norm of {norm}: nothing is clipped"

    def make(factory: Callable) -> torch.optim.Optimizer:
        optimizer = make_optimizer(factory)
        optimizer.register_step_pre_hook(before_step)
        return optimizer

    return make


on_meta, on_cpu = partial(model_on, "meta"), partial(model_on, "cpu")


def train_all(group, cases: list[Case], optimizers: Optimizers = BOTH) -> list[Records]:
    """What the oracle records of each case, on one rank."""
    return [
        records_of(group, case, divide, on_meta, case.num_micro_batches, optimizers)
        for case in cases
    ]


@lru_cache(maxsize=64)
def of_one_process(case: Case, optimizers: Optimizers) -> Records:
    return records_of(SINGLE_RANK, case, leave_undivided, on_cpu, 1, optimizers)


def records_of(
    group, case: Case, apply, make_model, num_micro_batches: int, optimizers: Optimizers
) -> Records:
    config = config_of(case)
    least = config.train.global_batch_size  # a sequence for each micro-batch
    sizes = least + 1, least + case.dp - 1  # and not as many for each rank
    batches = sample_batches(sizes, config.model.vocab_size, config.data.sequence_length)
    apply, make_model = partial(apply, config), partial(make_model, config)
    return trainings(group, apply, make_model, batches, num_micro_batches, optimizers)


def differences(case: Case, by_rank: list[Records]) -> list[str]:
    """Where the ranks leave one process, for each optimizer; [] if nowhere."""
    schedule = case.schedule if case.schedule == "interleaved" else "1f1b"  # it counts the layers
    alike = case._replace(data="bucketed", sequence=False, recompute="none", schedule=schedule)
    found = {
        name: first_difference(moments, [records[name] for records in by_rank])
        for name, moments in of_one_process(alike, tuple(by_rank[0])).items()
    }
    return [f"{name}: {what}" for name, what in found.items() if what] + apart(by_rank)


def apart(by_rank: list[Records]) -> list[str]:
    """Weights whose bits are not those of the first rank: such part further with every step."""
    return [
        f"{optimizer}: {name} has other bits on another rank after step {first.step}"
        for optimizer in by_rank[0]
        for first, *others in zip(*(records[optimizer] for records in by_rank), strict=True)
        if first.kind == "updated"
        for name, value in first.values.items()
        if any((other.values[name] != value).any() for other in others)
    ]


def try_all(
    cases: list[Case], optimizers: Optimizers = BOTH, watch: bool = False
) -> list[list[str]]:
    """What is wrong with each case; all have as many ranks, which are started once."""
    timeout = SECONDS_PER_CASE * len(cases)
    by_rank = run(train_all, cases[0].num_ranks, cases, optimizers, timeout=timeout, watch=watch)
    return [
        differences(case, [records[index] for records in by_rank])
        for index, case in enumerate(cases)
    ]


# The command


def try_each(cases: list[Case], optimizers: Optimizers = BOTH) -> list[list[str]]:
    """The same for cases of which one may bring down the ranks."""
    try:
        return try_all(cases, optimizers, watch=len(cases) == 1)
    except RankError as error:
        if len(cases) == 1:
            return [[str(error)]]
    return [try_each([case], optimizers)[0] for case in cases]


def in_batches(cases: list[Case]) -> Iterator[list[Case]]:
    """Neighbors with as many ranks, BATCH at most."""
    for _, alike in groupby(cases, key=lambda case: case.num_ranks):
        alike = list(alike)
        yield from (alike[first : first + BATCH] for first in range(0, len(alike), BATCH))


def report(cases: list[Case], start: int) -> int:
    """Try `cases` from the one number `start`, print a line for each; returns how many differ."""
    number, num_wrong = start, 0
    for batch in in_batches(cases[start - 1 :]):
        for case, wrong in zip(batch, try_each(batch), strict=True):
            print(f"{number:>6}/{len(cases)}", "FAILED" if wrong else "ok    ", case, flush=True)
            for message in wrong:
                print(indent(message, "    "), flush=True)
            number, num_wrong = number + 1, num_wrong + bool(wrong)
    return num_wrong


def shard(words: str) -> slice:
    index, step = map(int, words.split("/"))
    if not 1 <= index <= step:
        raise ValueError
    return slice(index - 1, None, step)


def main() -> int:
    parser = argparse.ArgumentParser(description="Every layout, the same training.")
    parser.add_argument("--count", action="store_true", help="tell how many cases there are")
    parser.add_argument(
        "--shard", type=shard, default="1/1", metavar="I/N", help="every N-th case, from the I-th"
    )
    parser.add_argument("--start", type=int, default=1, help="the first line to print")
    arguments = parser.parse_args()

    layouts = (layout for size in range(1, MOST_RANKS + 1) for layout in layouts_of(size))
    refused = {case: why_refused(case) for case in all_cases(layouts)}
    cases = [case for case, why in refused.items() if why is None][arguments.shard]
    if not arguments.count:
        return 1 if report(cases, arguments.start) else 0

    print(f"{len(cases)} cases, each with SGD and AdamW. Refused of {len(refused)} combinations:")
    for why, number in Counter(why for why in refused.values() if why is not None).items():
        print(f"{number:>8}  {why}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
