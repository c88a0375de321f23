"""What a rank of a pipeline does and holds: no order can stand still, no stage costs too much."""

import random
from collections import defaultdict, deque
from functools import cache
from itertools import combinations, pairwise

import pytest

from minitron.config import ConfigError
from minitron.parallel.pipeline.plan import Message, forwards, rank_program, split_blocks
from minitron.parallel.pipeline.schedule_check import check, topological_order
from minitron.parallel.pipeline.schedules import (
    Action,
    Schedule,
    gpipe,
    interleaved,
    one_forward_one_backward,
    sequential,
    zero_bubble,
)
from minitron.parallel.pipeline.v_schedules import dualpipe_v, zb_v

ONE_STAGE = (sequential, gpipe, one_forward_one_backward, zero_bubble)


def random_schedule(seed):
    """A valid schedule of up to 4 ranks and 9 stages, anywhere, in an order that nobody planned."""
    draw = random.Random(seed)
    p, m = draw.randint(1, 4), draw.randint(1, 6)
    extra = draw.choices(range(p), k=draw.randint(0, 5))
    holders = draw.sample([*range(p), *extra], p + len(extra))

    kinds = [["F", *draw.choice(["B", "IW"])] for _ in holders]
    everything = Schedule(
        "",
        m,
        tuple(
            tuple(
                Action(kind, i, stage)
                for stage, holder in enumerate(holders)
                if holder == rank
                for kind in kinds[stage]
                for i in range(m)
            )
            for rank in range(p)
        ),
    )
    waiting, done = sorted(everything.all_actions), set()
    lists = [[] for _ in range(p)]
    while waiting:
        ready = [action for action in waiting if done.issuperset(everything.needs(action))]
        action = draw.choice(ready)
        waiting.remove(action)
        done.add(action)
        lists[holders[action.stage]].append(action)
    return Schedule(f"random {seed}", m, tuple(map(tuple, lists)))


PLANNED = [make(p, m) for make in ONE_STAGE for p in (1, 2, 3, 4, 8) for m in (1, 3, 8, 16)]
PLANNED += [interleaved(p, m, v) for p in (1, 2, 4) for m in (4, 8) for v in (2, 3)]
PLANNED += [make(p, m) for make in (zb_v, dualpipe_v) for p in (1, 2, 3, 4) for m in (8, 9)]


@cache
def random_schedules():
    return [random_schedule(seed) for seed in range(300)]


def all_schedules():
    return PLANNED + random_schedules()


def test_the_random_schedules_are_valid_and_not_all_alike():
    for schedule in random_schedules():
        check(schedule)
    assert {schedule.num_ranks for schedule in random_schedules()} == {1, 2, 3, 4}
    assert sum(schedule.num_stages > schedule.num_ranks for schedule in random_schedules()) > 100
    turning_back = [
        s
        for s in random_schedules()
        if any(s.rank_of[a] > s.rank_of[a + 1] for a in range(s.num_stages - 1))
    ]
    assert len(turning_back) > 100  # no package schedule has a boundary like that but interleaved


# Messages


def scripts_of(schedule):
    return [rank_program(schedule, rank) for rank in range(schedule.num_ranks)]


def messages(steps, peer):
    return [
        (step.is_send, step.action)
        for step in steps
        if isinstance(step, Message) and step.peer == peer
    ]


def test_a_script_has_the_ranks_own_actions_in_their_own_order():
    for schedule in all_schedules():
        for actions, steps in zip(schedule.actions, scripts_of(schedule), strict=True):
            assert [step for step in steps if isinstance(step, Action)] == list(actions)


def test_what_is_made_for_another_rank_is_sent_at_once_and_all_that_is_needed_is_there():
    for schedule in all_schedules():
        for rank, steps in enumerate(scripts_of(schedule)):
            here = set()
            for before, step in pairwise([None, *steps]):
                if isinstance(step, Action):
                    assert here.issuperset(schedule.needs(step))
                elif step.is_send:
                    assert before == step.action
                else:
                    assert schedule.rank_of[step.action.stage] == step.peer != rank
                here.add(step if isinstance(step, Action) else step.action)


def test_the_two_ends_of_every_pair_list_their_messages_in_the_same_order():
    for schedule in all_schedules():
        scripts = scripts_of(schedule)
        for a, b in combinations(range(schedule.num_ranks), 2):
            there = [(not is_send, action) for is_send, action in messages(scripts[b], a)]
            assert messages(scripts[a], b) == there


def counted(schedule):
    return sum(isinstance(step, Message) for steps in scripts_of(schedule) for step in steps)


@pytest.mark.parametrize("make", ONE_STAGE)
def test_messages_counted_by_hand(make):
    """Both ends, both ways, over 3 boundaries, of 5 micro-batches; the ring of v chunks has 7."""
    assert counted(make(4, 5)) == 2 * 2 * 3 * 5
    assert counted(interleaved(4, 8, 2)) == 2 * 2 * 7 * 8
    assert counted(make(1, 5)) == counted(interleaved(1, 4, 3)) == 0


# Where messages keep their order (NCCL), one that waits for its other end holds up all behind it


def stands_still(schedule, scripts, lane):
    """Run scripts whose messages wait in queues, one for each `lane(peer)` of a rank."""
    left = [deque(steps) for steps in scripts]
    queues, here = defaultdict(deque), [set() for _ in scripts]

    def advance(rank):
        steps, before = left[rank], len(left[rank])
        while steps and (
            isinstance(steps[0], Message) or here[rank].issuperset(schedule.needs(steps[0]))
        ):
            step = steps.popleft()
            if isinstance(step, Message):
                queues[rank, lane(step.peer)].append(step)
            else:
                here[rank].add(step)
        return len(steps) < before

    def meet(rank, queue):
        """Let the message at the head go if its other end is at the head of its queue as well."""
        is_send, action, peer = queue[0]
        other = queues[peer, lane(rank)]
        if not other or other[0] != (not is_send, action, rank):
            return False
        queue.popleft(), other.popleft()
        here[rank].add(action), here[peer].add(action)
        return True

    moved = True
    while moved:
        moved = any([advance(rank) for rank in range(len(scripts))])
        moved |= any([meet(rank, queue) for (rank, _), queue in list(queues.items()) if queue])
    return any(left) or any(queues.values())


one_stream_a_peer, one_stream = (lambda peer: peer), (lambda peer: None)


@pytest.mark.parametrize("lane", [one_stream_a_peer, one_stream])
def test_no_valid_schedule_stands_still_where_messages_keep_their_order(lane):
    for schedule in all_schedules():
        assert not stands_still(schedule, scripts_of(schedule), lane), schedule.name


def receiving_when_needed(schedule, rank):
    """What comes to mind first: post a receive when its tensor is asked for."""
    steps = rank_program(schedule, rank)
    receives = [step for step in steps if isinstance(step, Message) and not step.is_send]
    late = []
    for step in steps:
        if isinstance(step, Action):
            late += [message for message in receives if message.action in schedule.needs(step)]
        if step not in receives:
            late.append(step)
    return late


def test_receives_in_the_order_of_need_do_stand_still():
    """Rank 0 has posted F0 and F1, rank 1 the gradient of F0: each is the other's second."""
    for make in (one_forward_one_backward, zero_bubble):
        schedule = make(2, 4)
        late = [receiving_when_needed(schedule, rank) for rank in (0, 1)]
        assert sorted(late[1], key=str) == sorted(rank_program(schedule, 1), key=str)
        assert stands_still(schedule, late, one_stream_a_peer)
    schedule = gpipe(2, 4)  # all one way, then all the other way
    late = [receiving_when_needed(schedule, rank) for rank in (0, 1)]
    assert not stands_still(schedule, late, one_stream_a_peer)


# An evaluation


def test_an_evaluation_goes_forward_through_the_same_stages():
    for schedule in all_schedules():
        forward = forwards(schedule, 3)
        done = list(topological_order(forward))
        assert sorted(done) == sorted(
            Action("F", i, stage) for i in range(3) for stage in range(schedule.num_stages)
        )
        assert forward.rank_of == schedule.rank_of
        assert not stands_still(forward, scripts_of(forward), one_stream)


# Which blocks a stage has


def cost_of(costs, ranges, first, last):
    """The most expensive stage's."""
    sums = [sum(costs[index] for index in blocks) for blocks in ranges]
    sums[0] += first
    sums[-1] += last
    return max(sums)


def every_split(num_blocks, num_stages):
    for ends in combinations(range(1, num_blocks), num_stages - 1):
        yield [range(a, b) for a, b in pairwise((0, *ends, num_blocks))]


@pytest.mark.parametrize("seed", range(4))
def test_no_other_split_has_a_cheaper_most_expensive_stage(seed):
    """100 cases each: of equal blocks, or any; with a heavy embedding, a heavy head, or neither."""
    draw = random.Random(seed)
    for _ in range(100):
        n = draw.randint(1, 9)
        num_stages = draw.randint(1, n)
        costs = [1.0] * n if draw.random() < 0.3 else [float(draw.randint(0, 9)) for _ in range(n)]
        first, last = (draw.choice([0.0, 1.5, 20.0]) for _ in range(2))
        found = split_blocks(costs, num_stages, first, last)
        options = list(every_split(n, num_stages))
        assert found in options  # neighbors, in order, every block once, no stage empty
        best = min(cost_of(costs, option, first, last) for option in options)
        assert cost_of(costs, found, first, last) == pytest.approx(best)


def test_a_split_counted_by_hand():
    assert split_blocks([1.0] * 8, 4) == [range(0, 2), range(2, 4), range(4, 6), range(6, 8)]
    assert split_blocks([1.0] * 8, 2, last=4.0) == [range(0, 6), range(6, 8)]
    ends_less = split_blocks([1.0] * 6, 3, first=2.0, last=2.0)
    assert cost_of([1.0] * 6, ends_less, 2.0, 2.0) == 4.0
    assert split_blocks([5.0, 1.0, 1.0, 1.0], 2) == [range(0, 1), range(1, 4)]


def test_a_hundred_layers_are_no_effort():
    ranges = split_blocks([1.0] * 96, 64, first=1.0, last=1.0)
    assert len(ranges) == 64
    assert max(map(len, ranges)) == 2


def test_fewer_blocks_than_stages_is_one_line():
    with pytest.raises(
        ConfigError,
        match="^3 blocks do not fill 4 stages of a pipeline: use 3 "
        "stages or fewer, or more layers$",
    ):
        split_blocks([1.0] * 3, 4)
