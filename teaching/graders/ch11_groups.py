"""Grader of 11.2: groups of grids, axes of events, and the norm on 4 real ranks, four grids."""

from collections.abc import Callable
from itertools import product
from math import prod, sqrt

import torch
import torch.distributed as dist
from torch import Tensor

from minitron.comm.mesh import make_mesh
from minitron.measure.ledger import Call, Ledger
from teaching.graders import Mistake, asked, expect
from teaching.graders.arguments import call_unchanged
from teaching.graders.ch07_toy import scattered
from teaching.graders.ch11_places import CALLERS, GRIDS, places
from teaching.graders.ranks import on_ranks, per_rank

Axes = dict[str, int]
Gradients = dict[str, Tensor]

NUM_RANKS = 4
MESHES: list[Axes] = [{"pp": 1, "dp": 2, "tp": 2}, {"pp": 2, "dp": 1, "tp": 2},
                      {"pp": 2, "dp": 2, "tp": 1}, {"pp": 1, "dp": 1, "tp": 4}]
CUT = {"wide.weight", "narrow.weight"}
MOST_BYTES = 8
CLOSE = 1e-5
STUCK = "every rank must make the same calls in the same order, even if it has no gradients"

EVENTS = ("matrix", "norm", "embedding", "clip", "loss", "weights")
TOO_MANY = {
    ("pp", "matrix"): "other stages have other matrices",
    ("pp", "norm"): "other stages have other norms",
    ("pp", "weights"): "other stages have other matrices",
    ("tp", "matrix"): "each tp rank has a different shard of the matrix and the full gradient of "
                      "that shard",
    ("tp", "norm"): "without sequence parallelism every tp rank has seen all tokens there: a sum "
                    "would make the gradient tp times too large",
    ("tp", "embedding"): "its vocabulary is sharded over tp: each rank has its own rows",
    ("tp", "loss"): "it is the same on all tp ranks: a sum would count it tp times",
    ("tp", "weights"): "each tp rank updates its own shard of a matrix, which no other tp rank "
                       "needs",
    ("dp", "clip"): "without ZeRO, averaged gradients are the same on all dp ranks: a sum would "
                    "count each dp times",
    ("dp", "weights"): "without ZeRO each dp rank has updated all of its parameters itself",
}
TOO_FEW = {
    ("dp", "matrix"): "dp ranks read different samples: their gradients must be averaged",
    ("dp", "norm"): "dp ranks read different samples: their gradients must be averaged",
    ("dp", "embedding"): "dp ranks read different samples: their gradients must be averaged",
    ("dp", "loss"): "dp ranks read different samples: the batch is all of these",
    ("dp", "clip"): "with ZeRO a rank keeps the averaged gradient of its own shard only",
    ("dp", "weights"): "with ZeRO each dp rank has updated only its own shard",
    ("tp", "norm"): "with sequence parallelism each tp rank has seen only its part of the tokens: "
                    "its gradient is a partial sum",
    ("tp", "clip"): "the other shards of the matrices count too",
    ("pp", "clip"): "the other stages' gradients count too",
    ("pp", "embedding"): "the first stage has the gradient of the lookup, the last one that of the "
                         "head: add the two",
    ("pp", "loss"): "only the last stage has the loss, and rank 0 is on the first",
}


def grade_11_2(groups_along: Callable, axes_of: Callable, gradient_norm: Callable) -> None:
    """Ask for groups and events, then let 4 ranks find the norm of gradients that are known."""
    for axes in GRIDS:
        for axis in sorted(axes):  # dp first: with one axis before it and one behind
            with asked(f"groups_along({axis!r}, {axes})"):
                seen = call_unchanged(groups_along, axis, axes, names="axis, axes",
                                      likely=CALLERS)
                _expect_groups(seen, axis, axes)
    for event, zero, sequence in product(EVENTS, (0, 1), (False, True)):
        with asked(f"axes_of({event!r}, zero={zero}, sequence={sequence})"):
            _expect_axes(axes_of(event, zero, sequence), event, zero, sequence)
    with asked(f"gradient_norm on {NUM_RANKS} ranks, {len(MESHES)} grids, with ZeRO and without"):
        seen = on_ranks(find_norms, gradient_norm, sizes=(NUM_RANKS,), stuck=STUCK)[NUM_RANKS]
    for number, (axes, zero) in enumerate(product(MESHES, (0, 1))):
        grid = " x ".join(f"{axis} {size}" for axis, size in axes.items())
        with asked(f"gradient_norm on {grid} ranks, zero={zero}"):
            _expect_calls([mine[number][1] for mine in seen], axes, zero)
            expect(all(mine[number][2] for mine in seen),
                   seen="the call modified the gradients, or the set cut",
                   likely="they belong to the caller: use square(), not square_(), and remove "
                          "nothing from the dict or the set")
            _expect_norm([mine[number][0] for mine in seen], axes, zero)


# Groups


def right_groups(axis: str, axes: Axes) -> list[list[int]]:
    """By what the members of a group have in common."""
    together: dict[tuple, list[int]] = {}
    for rank, place in enumerate(places(axes)):
        others = tuple(where for name, where in place.items() if name != axis)
        together.setdefault(others, []).append(rank)
    return list(together.values())


def _expect_groups(seen, axis: str, axes: Axes) -> None:
    right = right_groups(axis, axes)
    if seen == right:
        return
    fits = isinstance(seen, list) and all(isinstance(group, list) for group in seen)
    expect(fits, seen=f"it returned {seen!r:.120}", likely="return a list of lists of ranks")
    others = {name: right_groups(name, axes) for name in axes}
    backwards = right_groups(axis, {name: axes[name] for name in reversed(axes)})
    members = sorted(rank for group in seen for rank in group)
    likely = "the stride between ranks of a group is the product of the axes after this one"
    if sorted(map(sorted, seen)) == right:
        likely = "sort the ranks of each group, and the groups by their first rank"
    elif members != list(range(prod(axes.values()))):
        likely = "each rank is in exactly one group"
    elif not all(seen):
        likely = f"one group is empty: each has {axes[axis]} ranks"
    elif seen == backwards:
        likely = "here the first axis varies fastest; it should be the last"
    elif any(seen == groups for groups in others.values()):
        name = next(name for name, groups in others.items() if groups == seen)
        likely = f"those ranks differ along {name}"
    elif len(seen) == axes[axis]:
        likely = "those ranks share the place along the axis; a group has one rank of each place " \
                 "along it, and they share the places along all other axes"
    elif all(group == list(range(group[0], group[0] + len(group))) for group in seen):
        likely = f"a group's ranks are neighbors only if no axis comes after {axis}"
    raise Mistake(f"{seen}, not {right}", likely)


# Axes


def right_axes(event: str, zero: int, sequence: bool) -> set[str]:
    """Where the ranks hold parts of a sum, or where one has what another lacks."""
    over_dp = event in ("matrix", "norm", "embedding", "loss") or zero > 0
    over_pp = event in ("embedding", "clip", "loss")
    over_tp = event == "clip" or event == "norm" and sequence
    needed = {"dp": over_dp, "pp": over_pp, "tp": over_tp}
    return {axis for axis, is_needed in needed.items() if is_needed}


def _expect_axes(seen, event: str, zero: int, sequence: bool) -> None:
    expect(isinstance(seen, set | frozenset) and seen <= {"pp", "dp", "tp"},
           seen=f"it returned {seen!r:.80}", likely='return a set of names out of "pp", "dp" and '
                                                    '"tp"')
    right = right_axes(event, zero, sequence)
    for axis in ("dp", "tp", "pp"):
        expect(axis in right or axis not in seen, seen=f"{axis} is in {_named(seen)}",
               likely=TOO_MANY.get((axis, event), ""))
        expect(axis not in right or axis in seen, seen=f"{axis} is not in {_named(seen)}",
               likely=TOO_FEW.get((axis, event), ""))


def _named(axes: set[str]) -> str:
    return "{" + ", ".join(sorted(axes)) + "}"


# The norm


def find_norms(group: dist.ProcessGroup, gradient_norm: Callable) -> list[tuple]:
    """The norm and the calls of this rank, for every grid, without and with ZeRO."""
    found = []
    for axes in MESHES:
        mesh = make_mesh("cpu", **axes)
        place = {axis: mesh.rank(axis) for axis in axes}
        groups = {axis: mesh.group(axis) for axis in axes}
        for zero in (0, 1):
            gradients = gradients_at(place, axes, zero)
            cut = set(CUT)
            with Ledger() as ledger:
                norm = gradient_norm(gradients, cut, zero, groups)
            for own in groups.values():
                dist.barrier(own)  # meets the call that another rank has left out, at once
            same = gradients_at(place, axes, zero)
            is_same = gradients.keys() == same.keys() and cut == CUT and all(
                torch.equal(gradients[name], same[name]) for name in same)
            found.append((norm, ledger.calls, is_same))
    return found


def stage_gradients(stage: int, axes: Axes) -> Gradients:
    """The whole gradients of a stage's parameters; in one of the grids the last stage is frozen."""
    if stage == 1 and axes["tp"] > 1:
        return {}
    generator = torch.Generator().manual_seed(stage)
    shapes = {"wide.weight": (8, 3), "norm.weight": (3,), "narrow.weight": (4, 2), "bias": (1,)}
    return {name: (1 + number) * torch.randn(shape, generator=generator)
            for number, (name, shape) in enumerate(shapes.items())}


def gradients_at(place: dict[str, int], axes: Axes, zero: int) -> Gradients:
    """What the rank at a place has: its stage's, cut over tp, and with ZeRO its shard of each."""
    own = {}
    for name, whole in stage_gradients(place["pp"], axes).items():
        part = whole.chunk(axes["tp"])[place["tp"]] if name in CUT else whole
        if zero:
            length = -(-part.numel() // axes["dp"])
            part = part.flatten()[place["dp"] * length:][:length]
        if part.numel():
            own[name] = scattered(part) if part.dim() > 1 else part.clone()
    return own


def right_norm(axes: Axes) -> float:
    squares = [gradient.double().square().sum() for stage in range(axes["pp"])
               for gradient in stage_gradients(stage, axes).values()]
    return sqrt(sum(squares))


def _expect_calls(calls: list[list[Call]], axes: Axes, zero: int) -> None:
    needed = ["pp", "tp", "dp"] if zero else ["pp", "tp"]
    texts = [_in_words(mine) for mine in calls]
    right = " and ".join(f"one over {axis}" for axis in needed if axes[axis] > 1)
    seen = f"{per_rank(texts)}; expected: {right or 'nothing'}"
    for call in (call for mine in calls for call in mine):
        expect(call.axis in axes, seen=seen, likely="without group=groups[...] it runs over all "
               "ranks, including those that hold the same values")
        expect(call.op == "all_reduce", seen=seen, likely="one all-reduce of the sum of squares is "
               "enough")
        expect(call.payload <= MOST_BYTES, seen=seen, likely="do not send gradients: send "
               "the sum of their squares, one number for all parameters")
    for axis, size in axes.items():
        counts = {sum(call.axis == axis for call in mine) for mine in calls}
        if size > 1 and axis in needed:
            expect(0 not in counts, seen=seen, likely=TOO_FEW[axis, "clip"])
        expect(axis in needed or size == 1 or counts == {0}, seen=seen,
               likely=TOO_MANY.get((axis, "clip"), ""))
        expect(max(counts) <= 1, seen=seen, likely="one call for all parameters: add up the "
               "squares on the rank first")


def _in_words(calls: list[Call]) -> str:
    return ", ".join(f"{call.op} of {call.payload} bytes over {call.axis}" for call in calls) \
        or "nothing is sent"


def _expect_norm(norms: list, axes: Axes, zero: int) -> None:
    for norm in norms:
        fits = isinstance(norm, Tensor) and norm.shape == ()
        expect(fits, seen=f"it returned {norm!r:.80}", likely="return a tensor of shape ()")
    seen, right = [float(norm) for norm in norms], right_norm(axes)
    if all(_is_close(value, right) for value in seen):
        return
    likely = "each rank sums the squares of its gradients, those of replicated ones divided by " \
             "the number of replicas; then sum over the axes; then take the root"
    for why, wrong in faults(axes, zero).items():
        if all(_is_close(value, wrong) for value in seen):
            likely = why
            break
    raise Mistake(f"{per_rank([f'{value:.8g}' for value in seen])}; expected: {right:.8g}", likely)


def faults(axes: Axes, zero: int) -> dict[str, float]:
    """What is found if one thing is wrong, by what to say then."""
    ranks = [place for place in places(axes) if zero or place["dp"] == 0]  # one of each copy
    tp = axes["tp"]

    def root_of_sum(cut: float, copied: float, power: int = 2) -> float:
        total = 0.0
        for place in ranks:
            squares = [(cut if name in CUT else copied) * float(part.double().square().sum())
                       for name, part in gradients_at(place, axes, zero).items()]
            total += sqrt(sum(squares)) ** power
        return total

    return {
        f"replicated gradients are on all {tp} tp ranks, so they count {tp} times":
            sqrt(root_of_sum(1, 1)),
        "you also divide the sharded gradients, but each rank has a different shard of these":
            sqrt(root_of_sum(1 / tp, 1 / tp)),
        "divide the squares of replicated gradients by tp, not those of sharded ones":
            sqrt(root_of_sum(1 / tp, 1)),
        "divide the squares of replicated gradients by tp, not the gradients themselves":
            sqrt(root_of_sum(1, 1 / tp**2)),
        "that is the square of the norm: take the root": root_of_sum(1, 1 / tp),
        "norms do not add up, but their squares do: take the root last": root_of_sum(1, 1 / tp, 1),
        "replicated gradients are missing: they count once": sqrt(root_of_sum(1, 0)),
    }


def _is_close(value: float, right: float) -> bool:
    return abs(value - right) <= CLOSE * abs(right)
