"""What any field of a config must be: of its type, a number that computers have.

Read in this order: require_types, require_positive, require_at_most, other_heads.
"""

import dataclasses
import math
from pathlib import Path
from typing import get_args

from minitron.system.errors import require

LARGEST_INT = 2**63 - 1
MOST_HEADS_TRIED = 4096


def require_types(section: str, config) -> None:
    """Raise ConfigError unless each field of a dataclass holds what its annotation says.

    A bool is no int, an int is no bool, and a float is finite; it may be written as an int.
    """
    for each in dataclasses.fields(config):
        value, expected, field = getattr(config, each.name), each.type, f"{section}.{each.name}"
        problem, is_of_type = f"{field} = {value!r}", type(value) is expected
        choices = get_args(expected)  # a Literal's
        if choices:
            known = ", ".join(map(str, choices))
            require(
                any(type(value) is type(choice) and value == choice for choice in choices),
                problem,
                f"must be one of {known}",
                field=field,
            )
        elif expected is Path:
            require(
                isinstance(value, Path),
                problem,
                f"must be a path, not {type(value).__name__}",
                field=field,
            )
            require(
                "\0" not in str(value), problem, "a path cannot hold a null character", field=field
            )
        else:
            require(
                is_of_type or (expected is float and type(value) is int),
                problem,
                f"must be of type {expected.__name__}, not {type(value).__name__}",
                field=field,
            )
        if type(value) is int:
            require(abs(value) <= LARGEST_INT, problem, "must be less than 2**63", field=field)
        if type(value) is float:
            require(math.isfinite(value), problem, "must be a finite number", field=field)


def require_positive(section: str, config, *names: str) -> None:
    for name in names:
        value, field = getattr(config, name), f"{section}.{name}"
        require(value > 0, f"{field} = {value}", "must be greater than 0", field=field)


def require_at_least(section: str, config, **limits: float) -> None:
    for name, limit in limits.items():
        value, field = getattr(config, name), f"{section}.{name}"
        require(value >= limit, f"{field} = {value}", f"must be {limit} or more", field=field)


def require_below_1(section: str, config, *names: str) -> None:
    for name in names:
        value, field = getattr(config, name), f"{section}.{name}"
        require(0 <= value < 1, f"{field} = {value}", "must be from 0 to less than 1", field=field)


def require_at_most(section: str, config, **limits: float) -> None:
    for name, limit in limits.items():
        value, field = getattr(config, name), f"{section}.{name}"
        require(value <= limit, f"{field} = {value}", f"must be {limit:,} or less", field=field)


# What to type instead


def round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def other_heads(model) -> str:
    """Return the nearest number of heads that gives even head widths and is a multiple of the kv
    heads; else the next width that these heads divide."""
    width, num_heads, num_kv_heads = model.width, model.num_heads, model.num_kv_heads
    numbers = range(num_kv_heads, width, num_kv_heads)[:MOST_HEADS_TRIED]
    fitting = [number for number in numbers if width % (2 * number) == 0]
    if not fitting:
        return f"--model.width {round_up(width, 2 * num_heads)}"
    return f"--model.num-heads {min(fitting, key=lambda each: abs(each - num_heads))}"
