"""Calls that must leave their arguments as they were: those belong to the caller."""

from collections.abc import Callable
from copy import deepcopy

import torch

from teaching.graders.bench import apart
from teaching.graders.plain import encode
from teaching.graders.verdicts import expect


def call_unchanged(answer: Callable, *args, likely: str, names: str = ""):
    """Call the answer on the bench, and return what it returns; Mistake if an argument changes.

    `names` are the arguments' in a message, separated by commas.
    """
    result, after = apart(call_and_look, answer, *args)
    for name, old, new in zip(names.split(", "), args, after, strict=False):
        if encode(old) != encode(new):  # which tells NaN from NaN no more than from itself
            expect(False, seen=f"{name} was {_shown(old)}, and is {_shown(new)} afterwards",
                   likely=likely)
    return result


def call_and_look(answer: Callable, *args) -> tuple:
    """On the bench: what the answer returns, and what its arguments are afterwards."""
    mine = tuple(map(copy_of, args))
    return answer(*mine), mine


def copy_of(value):
    """A copy; a tensor's keeps the strides, which its pickle or `clone` may not."""
    if isinstance(value, torch.Tensor):
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype).copy_(value)
    if isinstance(value, dict):
        return {key: copy_of(each) for key, each in value.items()}
    return deepcopy(value)


def _shown(value) -> str:
    text = str(value)
    return text if len(text) <= 90 else f"{text[:87]}..."
