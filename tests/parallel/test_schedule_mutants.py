"""The proof of a schedule against ranks that pass numbers on: it accepts exactly what trains."""

import random
from collections import defaultdict

import pytest

from minitron.config import ConfigError
from minitron.parallel.pipeline.schedule_check import check
from minitron.parallel.pipeline.schedules import Action, Schedule
from tests.parallel.test_schedule_check import BROKEN, generated
from tests.tiers import tiered


def trains(schedule):
    """Whether ranks that run their lists come to an end, with the gradients of one process.

    Stage s multiplies by s + 2, micro-batch i is the number i + 1. A rank knows its own list and
    what has been sent to it; it runs an action as soon as that needs nothing more.
    """
    last, sent = schedule.num_stages - 1, defaultdict(list)
    saved, halves, gradients = defaultdict(list), defaultdict(list), defaultdict(int)
    for i in range(schedule.num_micro_batches):
        sent["F", i, 0].append(i + 1)

    def attempt(rank, action):
        kind, i, stage = action
        here = saved[rank, i, stage]
        arrived = sent["F" if kind == "F" else "B", i, stage]
        if kind == "W":
            if not (here and halves[rank, i, stage]):
                return False
            gradients[rank, stage] += here.pop() * halves[rank, i, stage].pop()
            return True
        if not arrived or (kind != "F" and not here):
            return False
        value = arrived.pop()
        if kind == "F":
            here.append(value)
            goes_on = (
                ("B", i, stage, 1) if stage == last else ("F", i, stage + 1, value * (stage + 2))
            )
        else:
            halves[rank, i, stage].append(value)
            goes_on = ("B", i, stage - 1, value * (stage + 2))
            if kind == "B":
                gradients[rank, stage] += here.pop() * halves[rank, i, stage].pop()
        sent[goes_on[:3]].append(goes_on[3])
        return True

    left = [list(actions) for actions in schedule.actions]
    while any(
        [
            attempt(rank, actions[0]) and actions.pop(0)
            for rank, actions in enumerate(left)
            if actions
        ]
    ):
        pass
    unread = [key for key, values in sent.items() if values and key[2] >= 0]
    if any(left) or unread or any(saved.values()) or any(halves.values()):
        return False
    return sorted((stage, total) for (_, stage), total in gradients.items()) == one_process(
        schedule.num_stages, schedule.num_micro_batches
    )


def one_process(num_stages, num_micro_batches):
    totals = [0] * num_stages
    for i in range(num_micro_batches):
        for stage in range(num_stages):
            product = i + 1
            for other in range(num_stages):
                product *= other + 2 if other != stage else 1
            totals[stage] += product
    return list(enumerate(totals))


@pytest.mark.parametrize(("p", "m"), [(1, 3), (2, 4), (3, 3), (4, 8), (4, 2)])
def test_every_schedule_of_the_package_trains(p, m):
    assert all(map(trains, generated(p, m)))


WOULD_TRAIN = ("a rank without work", "no micro-batches", "a plain tuple")
"""Refused all the same: somebody forgot something."""


@pytest.mark.parametrize("name", [name for name in BROKEN if name not in WOULD_TRAIN])
def test_no_broken_schedule_trains(name):
    schedule, _ = BROKEN[name]
    assert not trains(schedule)


def swap(actions, position, random_rank):
    actions[position : position + 2] = reversed(actions[position : position + 2])


def drop(actions, position, random_rank):
    del actions[position]


def double(actions, position, random_rank):
    actions.insert(position + 1, actions[position])


def move_along(actions, position, random_rank):
    action = actions.pop(position)
    actions.insert(max(0, position - 3), action)


def move_away(actions, position, random_rank):
    random_rank.append(actions.pop(position))


def split(actions, position, random_rank):
    """B becomes I, with its W at the end."""
    kind, i, stage = actions[position]
    if kind == "B":
        actions[position] = Action("I", i, stage)
        actions.append(Action("W", i, stage))


def join(actions, position, random_rank):
    """I becomes B, which takes its W along."""
    kind, i, stage = actions[position]
    if kind == "I":
        actions[position] = Action("B", i, stage)
        actions.remove(Action("W", i, stage))


MUTATIONS = (swap, drop, double, move_along, move_away, split, join)


def mutant(seed, mutate):
    """A schedule of the package with one mutation, or two, somewhere."""
    draw = random.Random(seed)
    p, m = draw.choice([(1, 3), (2, 2), (2, 4), (3, 3), (3, 5), (4, 4)])
    schedule = draw.choice(generated(p, m))
    lists = [list(actions) for actions in schedule.actions]
    for _ in range(draw.choice([1, 2])):
        actions = draw.choice([actions for actions in lists if actions])
        mutate(actions, draw.randrange(len(actions)), draw.choice(lists))
    return Schedule("mutant", m, tuple(map(tuple, lists)))


def is_accepted(schedule):
    try:
        check(schedule)
    except ConfigError as error:
        assert "\n" not in str(error)
        return False
    return True


@pytest.mark.parametrize("seeds", tiered([range(100), range(100, 300)]), ids=str)
@pytest.mark.parametrize("mutate", MUTATIONS, ids=lambda mutate: mutate.__name__)
def test_it_accepts_a_mutant_exactly_if_ranks_train_with_it(mutate, seeds):
    verdicts = []
    for seed in seeds:
        schedule = mutant(seed, mutate)
        verdicts.append(is_accepted(schedule))
        assert verdicts[-1] == trains(schedule), (seed, schedule)
    can_be_valid, can_be_broken = any(verdicts), not all(verdicts)
    assert can_be_valid == (mutate not in (drop, double))
    assert can_be_broken == (mutate not in (split, join))
