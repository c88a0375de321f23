"""Ranks of a dry run that do the same work: one of them is run, and shown for all.

Two ranks of a pipeline are equal if they have as many blocks in each of their stages, both or
neither of them the embedding, or the head, and the same actions and messages in the same order. In
GPipe all inner stages are. In 1F1B a stage holds one micro-batch less than the one before, so that
only stages with room for all of a step's micro-batches are equal. What is shown of an equal stage
may be off by a few bytes sent: those of the gradient norm, of which not all ranks of a ring send as
many.

Read in this order: dry_runs, representatives, signature.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from math import ceil

import torch

from minitron.config import Config
from minitron.config.layout import data_parallel_size
from minitron.model.transformer import Transformer
from minitron.parallel.pipeline.block_costs import count_parameters
from minitron.parallel.pipeline.plan import Message, rank_program, split_blocks
from minitron.parallel.pipeline.schedules import Schedule
from minitron.parallelize import make_schedule
from minitron.plan.dryrun import DryRun, dry_run


def dry_runs(config: Config, num_gpus: int, ranks: Iterable[int]) -> Iterator[DryRun]:
    """Run a step of each of the ranks, of equal ones the first alone: the others took 0 s."""
    per_stage, first_of = num_gpus // config.parallel.pp, representatives(config, num_gpus)
    done: dict[tuple[int, int], DryRun] = {}
    for rank in ranks:
        stage, place = divmod(rank, per_stage)
        same = done.get((first_of[stage], place))
        if same is None:
            same = done[first_of[stage], place] = dry_run(config, num_gpus, rank)
            yield same
        else:
            yield replace(same, rank=rank, place=same.place | {"pp": stage}, seconds=0.0)


def representatives(config: Config, num_gpus: int) -> list[int]:
    """Return, for each rank of a pipeline, the first one that does the same."""
    pp = config.parallel.pp
    if pp == 1:
        return [0]
    num_sequences = ceil(config.train.global_batch_size / data_parallel_size(config, num_gpus))
    schedule = make_schedule(config.parallel)(
        pp, ceil(num_sequences / config.train.micro_batch_size)
    )
    with torch.device("meta"):
        costs, first, last = count_parameters(Transformer(config.model))
    blocks = [len(each) for each in split_blocks(costs, schedule.num_stages, first, last)]
    seen: dict[tuple, int] = {}
    return [seen.setdefault(signature(schedule, blocks, rank), rank) for rank in range(pp)]


def signature(schedule: Schedule, blocks: Sequence[int], rank: int) -> tuple:
    """Return what a rank holds and does, with stages and ranks counted from its own."""
    own = schedule.stages_of(rank)
    steps = []
    for step in rank_program(schedule, rank):
        is_message = isinstance(step, Message)
        action = step.action if is_message else step
        peer = (step.is_send, (step.peer - rank) % schedule.num_ranks) if is_message else ()
        steps.append((action._replace(stage=action.stage - own[0]), *peer))
    ends = (own[0] == 0, own[-1] == schedule.num_stages - 1)
    return (*(blocks[stage] for stage in own), *ends, *steps)
