"""The first divergence of N ranks from one process, and its likely cause.

Read in this order: first_difference, largest_difference, explain, and what it calls.
"""

import math
from dataclasses import dataclass

import numpy as np

TOLERANCE = 1e-12

Values = dict[str, np.ndarray | None]  # by the parameter's global name


@dataclass(frozen=True)
class Moment:
    """The values of one kind at one point of a training."""

    step: int
    kind: str  # of weights: initial, kept (unchanged by the backward pass), updated; loss, gradient
    values: Values


def first_difference(expected: list[Moment], by_rank: list[list[Moment]]) -> str | None:
    """Say in words where the ranks' records first leave those of one process; None: nowhere."""
    for moment, *seen in zip(expected, *by_rank, strict=True):
        largest = largest_value(moment)
        wrong = {}
        for name, want in moment.values.items():
            got = [other.values.get(name) for other in seen]
            if not all(agree(value, want, largest) for value in got):
                wrong[name] = got, want
        if wrong:
            name, (got, want) = next(iter(wrong.items()))
            message = explain(moment.kind, name, got, want, largest)
            return f"{message}\n(step {moment.step}; {len(wrong)} of {len(moment.values)} differ)"
    return None


def largest_difference(expected: list[Moment], by_rank: list[list[Moment]]) -> float:
    """Return the largest `relative_difference` of any rank's record; infinity if one is missing."""
    return max(
        relative_difference(other.values.get(name), want, largest_value(moment))
        for moment, *seen in zip(expected, *by_rank, strict=True)
        for name, want in moment.values.items()
        for other in seen
    )


def largest_value(moment: Moment) -> float:
    return max((np.abs(v).max() for v in moment.values.values() if v is not None), default=0)


def relative_difference(got: np.ndarray | None, want: np.ndarray | None, largest: float) -> float:
    """Return how far two tensors are apart, relative to their largest value.

    Or to a thousandth of the largest value of all tensors: some gradients are zero but for
    rounding, that of a key's bias for one. Infinity if they cannot be compared: one is missing, has
    another shape, or is not finite.
    """
    if got is None or want is None:
        return 0.0 if got is want else math.inf
    if got.shape != want.shape or not (np.isfinite(got).all() and np.isfinite(want).all()):
        return math.inf
    scale = max(np.abs(want).max(), 1e-3 * largest, np.finfo(float).tiny)
    return float(np.abs(got - want).max()) / float(scale)


def agree(got: np.ndarray | None, want: np.ndarray | None, largest: float) -> bool:
    """Return whether two tensors agree to TOLERANCE."""
    return relative_difference(got, want, largest) <= TOLERANCE


def explain(kind: str, name: str, got: list, want: np.ndarray | None, largest: float) -> str:
    """Say in one line which tensor differs, how, on which ranks, and the likeliest cause."""
    wrong = [rank for rank, value in enumerate(got) if not agree(value, want, largest)]
    where, first = which(wrong, got), got[wrong[0]]
    if kind == "initial":
        return f"{name}: initial weights differ {where}: no broadcast from rank 0?"
    if want is None:
        return f"{name}: {kind} {where}, one process has none: AdamW would let it decay"
    missing = [rank for rank in wrong if got[rank] is None]
    if missing:
        return (
            f"{name}: {kind} missing (None) {which(missing, got)}: not set after the communication?"
        )
    if any(got[rank].shape != want.shape for rank in wrong):
        return f"{name}: {kind} of shape {first.shape} {where}, not {want.shape}: not unsharded?"

    size, cause = compare_sizes(first, want, len(got))
    if kind == "kept":
        return (
            f"{name}: the backward pass made the parameter itself {size} {where}: does a hook "
            "reduce its argument, the parameter, instead of .grad?"
        )
    if kind == "updated":
        return (
            f"{name}: after the update the parameter is {size} {where}, though the gradients "
            "agree: the optimizer, or its state?"
        )
    if not all(agree(value, got[0], largest) for value in got):
        return f"{name}: {kind} differs between ranks, {split_between(got, want, largest)}"
    return f"{name}: {kind} {size} {where}{cause}"


def which(ranks: list[int], got: list) -> str:
    if len(ranks) == len(got):
        return "on all ranks"
    return f"on rank {', '.join(map(str, ranks))} alone"


def compare_sizes(got: np.ndarray, want: np.ndarray, num_ranks: int) -> tuple[str, str]:
    """Say how `got` relates to `want`, and what would do that; a factor by least squares."""
    if not got.any():
        return "zero", ": overwritten, or left out of the communication?"
    error = np.abs(got - want).max() / max(np.abs(want).max(), np.finfo(float).tiny)
    if error < 1e-3:
        return f"off by {error:.0e} of its largest value", ": float32 somewhere?"
    factor = np.vdot(want, got) / max(np.vdot(want, want), np.finfo(float).tiny)
    if factor <= 0 or np.abs(got - factor * want).max() > 1e-6 * np.abs(got).max():
        return "not proportional to that of one process", ""

    ratio = max(factor, 1 / factor)
    is_num_ranks = abs(ratio - num_ranks) < 1e-6 * num_ranks
    cause = ": summed instead of averaged?" if factor > 1 else ": divided twice?"
    size = f"{round(ratio, 2)}x too {'large' if factor > 1 else 'small'}"
    return size, cause if is_num_ranks else ""


def split_between(got: list[np.ndarray], want: np.ndarray, largest: float) -> str:
    """Say why the ranks' gradients differ from each other."""
    if agree(sum(got), want, largest) or agree(sum(got) / len(got), want, largest):
        return "together they are right: never reduced?"
    right = [str(rank) for rank, value in enumerate(got) if agree(value, want, largest)]
    if right:
        return f"right on rank {', '.join(right)} alone: has every rank received the result?"
    return "right on none: sent before it was complete, or read before it had arrived?"


def hidden_by_adamw(reference: dict[str, list[Moment]], by_rank: list[dict]) -> str:
    """Return a line for the message if AdamW's losses hardly show what SGD's do."""
    error = {}
    for optimizer, expected in reference.items():
        losses = [
            [moment.values["model"] for moment in record if moment.kind == "loss"]
            for record in (expected, *(records[optimizer] for records in by_rank))
        ]
        error[optimizer] = np.abs(np.array(losses[1:]) / losses[0] - 1).max()
    if not error["AdamW"] < 0.01 * error["SGD"]:
        return ""
    return (
        f"\nThe losses would not show it under AdamW: they differ by {error['AdamW']:.0e}, "
        f"under SGD by {error['SGD']:.0e}. AdamW divides a gradient's scale away."
    )
