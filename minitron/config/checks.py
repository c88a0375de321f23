"""What any field of a config must be: of its type, a number that computers have, on one line.

Read in this order: ConfigError, require, require_types, require_positive, require_at_most,
other_heads.
"""

import dataclasses
import math
import re
from pathlib import Path
from typing import get_args

LARGEST_INT = 2**63 - 1
MOST_HEADS_TRIED = 4096
LONGEST_WORD = 400  # of a message; a path may have 255 characters between two slashes
UNPRINTABLE = re.compile(r"[\x00-\x1f\x7f-\x9f\ud800-\udfff]")  # a name may hold a new line


class ConfigError(ValueError):
    """Something the user typed cannot work. The command line prints it as one line, exit code 2."""

    def __init__(self, message: str):
        escaped = UNPRINTABLE.sub(lambda found: ascii(found[0])[1:-1], str(message))
        super().__init__(re.sub(rf"\S{{{LONGEST_WORD},}}", _shortened, escaped))


def _shortened(word: re.Match) -> str:
    return f"{word[0][:20]}...{word[0][-20:]} ({len(word[0]):,} characters)"


def require(condition: bool, message: str) -> None:
    """Raise `ConfigError(message)` unless `condition` holds."""
    if not condition:
        raise ConfigError(message)


def require_types(section: str, config) -> None:
    """Raise ConfigError unless each field of a dataclass holds what its annotation says.

    A bool is no int, an int is no bool, and a float is finite; it may be written as an int.
    """
    for field in dataclasses.fields(config):
        value, expected = getattr(config, field.name), field.type
        where = f"{section}.{field.name} = {value!r}"
        choices = get_args(expected)  # a Literal's
        if choices:
            known = ", ".join(map(str, choices))
            require(any(type(value) is type(each) and value == each for each in choices),
                    f"{where}: must be one of {known}")
        elif expected is Path:
            require(isinstance(value, Path), f"{where}: must be a path, not {type(value).__name__}")
            require("\0" not in str(value), f"{where}: a path cannot hold a null character")
        else:
            require(type(value) is expected or (expected is float and type(value) is int),
                    f"{where}: must be of type {expected.__name__}, not {type(value).__name__}")
        if type(value) is int:
            require(abs(value) <= LARGEST_INT, f"{where}: must be less than 2**63")
        if type(value) is float:
            require(math.isfinite(value), f"{where}: must be a finite number")


def require_positive(section: str, config, *names: str) -> None:
    for name in names:
        value = getattr(config, name)
        require(value > 0, f"{section}.{name} = {value}: must be greater than 0")


def require_at_most(section: str, config, **limits: float) -> None:
    for name, limit in limits.items():
        value = getattr(config, name)
        require(value <= limit, f"{section}.{name} = {value}: must be {limit:,} or less")


# What to type instead


def round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def other_heads(model) -> str:
    """The nearest number of heads that divides the width: each of even width, none of them left
    over by the kv heads; else the next width that these heads divide."""
    width, num_heads, num_kv_heads = model.width, model.num_heads, model.num_kv_heads
    numbers = range(num_kv_heads, width, num_kv_heads)[:MOST_HEADS_TRIED]
    fitting = [number for number in numbers if width % (2 * number) == 0]
    if not fitting:
        return f"--model.width {round_up(width, 2 * num_heads)}"
    return f"--model.num-heads {min(fitting, key=lambda each: abs(each - num_heads))}"
