"""What is true of every schedule that can run: complete, and in an order that lets all go on.

Read in this order: check, topological_order, peak_activations.
"""

from collections import Counter
from collections.abc import Iterator
from typing import get_args

from minitron.config import require
from minitron.parallel.pipeline.schedules import Action, Kind, Schedule


def check(schedule: Schedule) -> None:
    """Raise ConfigError, with the first thing that is wrong, if a schedule cannot run.

    Every rank has something to do, every stage is on one rank and runs every micro-batch once each
    way, and no rank hangs.
    """
    require(
        isinstance(schedule, Schedule),
        f"{type(schedule).__name__} is not a Schedule",
        "give it a name, the number of micro-batches and a list of actions for each rank",
    )
    m = schedule.num_micro_batches
    require(type(m) is int and m > 0, f"a schedule of {m} micro-batches: there must be 1 or more")
    holders: dict[int, int] = {}
    for rank, actions in enumerate(schedule.actions):
        require(
            isinstance(actions, (list, tuple)),
            f"rank {rank} has a {type(actions).__name__} of actions",
            "write a list",
        )
        require(
            len(actions) > 0, f"rank {rank} runs nothing", "give it a stage, or use fewer ranks"
        )
        for action in actions:
            require_known(action, rank, schedule.num_micro_batches)
            holder = holders.setdefault(action.stage, rank)
            require(
                holder == rank,
                f"stage {action.stage} is on rank {holder} and on rank {rank}: "
                "one rank must hold it and run all of its actions",
            )

    counts = Counter(action for actions in schedule.actions for action in actions)
    for stage in range(schedule.num_stages):
        for i in range(schedule.num_micro_batches):
            require_once(counts, stage, i)
    for _ in topological_order(schedule):
        pass


def require_known(action: Action, rank: int, num_micro_batches: int) -> None:
    """Require of a list's entry an Action with a kind, a micro-batch and a stage that exist."""
    require(
        isinstance(action, Action),
        f"rank {rank} runs {action!r}",
        "write Action(kind, micro_batch, stage)",
    )
    kind, i, stage = action
    require(kind in get_args(Kind), f"rank {rank} runs {kind!r}: a pass is F, B, I or W")
    require(
        type(i) is int and type(stage) is int,
        f"rank {rank} runs {tuple(action)}: micro-batch and stage are integers",
    )
    require(stage >= 0, f"rank {rank} runs {action} of stage {stage}: stages are numbered from 0")
    require(
        0 <= i < num_micro_batches,
        f"stage {stage} runs {action}, but there are only "
        f"{num_micro_batches} micro-batches, numbered from 0",
    )


def require_once(counts: Counter, stage: int, i: int) -> None:
    """Require that each micro-batch passes a stage once: F, and B or its two halves."""
    runs = {kind: counts[Action(kind, i, stage)] for kind in ("F", "B", "I", "W")}
    for kind, count in runs.items():
        require(count <= 1, f"stage {stage} runs {kind}{i} {count} times: once is enough")
    require(runs["F"] == 1, f"stage {stage} never runs F{i}: every stage needs every micro-batch")
    backward = "".join(kind for kind in "BIW" if runs[kind])
    reasons = {
        "": f"never runs B{i}: its weights would miss a gradient",
        "I": f"runs I{i} without W{i}: its weights would miss a gradient",
        "W": f"runs W{i} without I{i}, which it needs",
    }
    if backward not in ("B", "IW"):
        require(
            False,
            f"stage {stage} "
            + reasons.get(backward, f"runs B{i} and a half of it again: B is I and W"),
        )


def topological_order(schedule: Schedule) -> Iterator[Action]:
    """Yield all actions, each after what it needs; raises ConfigError for a deadlock."""
    done: set[Action] = set()
    left = [list(reversed(actions)) for actions in schedule.actions]
    while any(left):
        ready = [
            actions for actions in left if actions and done.issuperset(schedule.needs(actions[-1]))
        ]
        if not ready:
            stuck = {rank: actions[-1] for rank, actions in enumerate(left) if actions}
            require(False, describe_deadlock(schedule, stuck, done))
        for actions in ready:
            done.add(actions[-1])
            yield actions.pop()


def describe_deadlock(schedule: Schedule, stuck: dict[int, Action], done: set[Action]) -> str:
    """Name the ranks that wait for each other in a circle, and for what.

    `stuck` is the next action of every rank that has one left.
    """
    rank, waits = next(iter(stuck)), {}
    while rank not in waits:
        action = stuck[rank]
        missing = next(need for need in schedule.needs(action) if need not in done)
        other = schedule.rank_of.get(missing.stage)
        if other not in stuck or missing not in schedule.all_actions:
            return (
                f"stage {action.stage} waits for {missing} from stage {missing.stage}, "
                "which no rank runs"
            )
        waits[rank] = wait(action, missing, stuck[other], is_own=other == rank)
        rank = other
    circle = list(waits)[list(waits).index(rank) :]
    return "; ".join(waits[rank] for rank in circle) + ": a deadlock"


def wait(action: Action, missing: Action, before: Action, is_own: bool) -> str:
    """Say that `action` waits for `missing`, whose rank wants to run `before` first."""
    if is_own:
        whose = "" if missing.stage == action.stage else f" of stage {missing.stage}"
        return f"stage {action.stage} runs {action} before {missing}{whose}, which it needs"
    whose = "" if missing.stage == before.stage else f" of stage {before.stage}, on the same rank"
    return (
        f"stage {action.stage} waits for {missing} from stage {missing.stage}, "
        f"which stage {missing.stage} runs after {before}{whose}"
    )


def peak_activations(schedule: Schedule) -> list[int]:
    """Return the most micro-batches whose activations a rank holds at once, counted for each stage.

    From F on until the gradients of the weights are there.
    """
    peaks = []
    for actions in schedule.actions:
        held = peak = 0
        for action in actions:
            held += {"F": 1, "I": 0, "B": -1, "W": -1}[action.kind]
            peak = max(peak, held)
        peaks.append(peak)
    return peaks
