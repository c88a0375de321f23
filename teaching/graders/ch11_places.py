"""Grader of 11.1: every rank of grids of one to four axes, there and back; and what is outside."""

import re
from collections.abc import Callable
from itertools import product
from math import prod

from teaching.graders import Mistake, asked, expect
from teaching.graders.arguments import call_unchanged

Axes = dict[str, int]

GRIDS: list[Axes] = [
    {"pp": 2, "dp": 3, "tp": 2},
    {"dp": 3, "tp": 4},
    {"pp": 2, "dp": 2, "tp": 2},
    {"tp": 2, "pp": 3},
    {"pp": 3, "dp": 1, "tp": 5},
    {"dp": 1},
    {"dp": 6},
    {"pp": 2, "dp": 2, "cp": 3, "tp": 1},
]
CALLERS = "the dict belongs to the caller: read it, or modify a copy"
OUTSIDE: dict[str, int] = {"pp": 2, "dp": 3, "tp": 2}


def grade_11_1(place_of: Callable, rank_at: Callable) -> None:
    """Ask for every rank and every place, then for some that do not exist."""
    for axes in GRIDS:
        for rank, right in enumerate(places(axes)):
            with asked(f"place_of({rank}, {axes})"):
                seen = call_unchanged(place_of, rank, axes, names="rank, axes", likely=CALLERS)
                _expect_place(seen, right, axes)
    for axes in GRIDS:
        for rank, place in enumerate(places(axes)):
            for names in (list(axes), sorted(axes), list(reversed(axes))):
                given = {name: place[name] for name in names}
                with asked(f"rank_at({given}, {axes})"):
                    seen = call_unchanged(rank_at, given, axes, names="place, axes",
                                          likely=CALLERS)
                    _expect_rank(seen, rank, given, axes)

    num_ranks = prod(OUTSIDE.values())
    for rank in (num_ranks + 1, num_ranks, -1):
        with asked(f"place_of({rank}, {OUTSIDE})"):
            _expect_refused(place_of, rank, num_ranks, rank)
    for axis, place in (("tp", 2), ("dp", 3), ("pp", 2), ("dp", -1)):
        given = dict.fromkeys(OUTSIDE, 0) | {axis: place}
        with asked(f"rank_at({given}, {OUTSIDE})"):
            _expect_refused(rank_at, given, OUTSIDE[axis], place)


def places(axes: Axes) -> list[dict[str, int]]:
    """The place of every rank in turn: `product` varies the last one fastest."""
    return [dict(zip(axes, place, strict=True)) for place in product(*map(range, axes.values()))]


def _expect_place(seen, right: dict[str, int], axes: Axes) -> None:
    expect(isinstance(seen, dict), seen=f"it returned {seen!r:.80}",
           likely="return a dict from the name of each axis to the place along it")
    if seen == right:
        whole = all(isinstance(where, int) for where in seen.values())
        expect(whole, seen=f"{seen}", likely="return Python ints: divide with // instead of /, and "
               "call int(...) on what NumPy or torch returns")
        return
    rank = places(axes).index(right)
    names = list(axes)
    other_way = places({name: axes[name] for name in reversed(names)})[rank]
    likely = "start at the last axis: rank % size is the place along it, and rank // size is the " \
             "rank to continue with on the axis before"
    if set(seen) != set(right):
        likely = f"the axes here are {', '.join(names)}: take their names from `axes`"
    elif seen == other_way:
        likely = "here the first axis varies fastest; it should be the last: ranks 0 and 1 " \
                 "differ only there"
    elif seen in ({name: rank % size for name, size in axes.items()},
                  {name: rank // size % size for name, size in axes.items()}):
        likely = "one step along an axis skips as many ranks as the product of the axes " \
                 "after it: divide by that first, not by the axis's own size"
    elif seen == {name: place + 1 for name, place in right.items()}:
        likely = "places are numbered from 0"
    elif any(not 0 <= seen[name] < axes[name] for name in names):
        likely = "a place is less than the axis's size: take the remainder with %"
    raise Mistake(f"{seen}, not {right}", likely)


def _expect_rank(seen, right: int, place: dict[str, int], axes: Axes) -> None:
    if seen == right and isinstance(seen, int):
        return
    names = list(axes)
    likely = "rank = rank * size + place, axis by axis, starting with the first"
    if not isinstance(seen, int):
        likely = "return an int"
    elif list(place) != names and seen == _rank_in_order(place, axes):
        likely = "the order of the axes is the order of `axes`, whatever the order of `place`"
    elif seen == _rank_in_order({name: place[name] for name in reversed(names)}, axes):
        likely = "here the first axis varies fastest; it should be the last: ranks 0 and 1 " \
                 "differ only there"
    elif seen == sum(place.values()):
        likely = "one step along an axis skips as many ranks as the product of the axes after it"
    elif seen == sum(place[name] * axes[name] for name in names):
        likely = "multiply by the product of the axes after it, not by the axis's own size"
    raise Mistake(f"{seen!r:.60}, not {right}", likely)


def _rank_in_order(place: dict[str, int], axes: Axes) -> int:
    """The rank if the axes came in the order of `place`."""
    return places({name: axes[name] for name in place}).index(place)


def _expect_refused(function: Callable, given, size: int, outside: int) -> None:
    try:
        answer = function(given, dict(OUTSIDE))
    except ValueError as error:
        numbers = re.findall(r"-?\d+", str(error))
        expect({str(size), str(outside)} <= set(numbers), seen=f"ValueError: {error}",
               likely=f"the message must contain both numbers, {outside} and {size}")
    else:
        raise Mistake(f"it returned {answer!r:.80}", f"{outside} is outside 0 to {size - 1}: raise "
                      "a ValueError, or the wrong rank gets the message")
