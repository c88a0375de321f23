"""What the chapters' cells call to set up and time their measurements: one module a chapter."""

import inspect
import textwrap
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from minitron.proof.oracle import Apply, assert_same_training
from teaching.exercises import ROOT
from teaching.wrapping import fill

MEASURING = 300.0
"""The timeout of a measurement in seconds: a busy machine must not end it."""


def show_text(text: object) -> None:
    """Print a message in lines of at most 78 characters."""
    for line in str(text).splitlines():
        print(fill(line, 78, indent="  ", subsequent_indent="    "))


def show_source(*objects: object, first: str = "", last: str = "") -> None:
    """Show the code of functions, methods or classes, in color, with file and line above each.

    With `first` and `last` a part of it: from the first line that contains `first` to the next one
    that contains `last`.
    """
    from IPython.display import Markdown, display

    for each in map(inspect.unwrap, objects):
        lines, number = inspect.getsourcelines(each)
        path = Path(inspect.getsourcefile(each)).relative_to(ROOT).as_posix()
        part = ""
        if first:
            begin = next(i for i, line in enumerate(lines) if first in line)
            end = next(i for i, line in enumerate(lines) if i >= begin and last in line)
            lines, number, part = lines[begin : end + 1], number + begin, f", of {each.__name__}"
        code = textwrap.dedent("".join(lines)).rstrip()
        place = f"[{path}, line {number}{part}](../{path}#L{number})"
        display(Markdown(f"{place}\n\n```python\n{code}\n```"))


def counting_rows(step: int, num_rows: int, length: int, vocabulary: int) -> Tensor:
    """Return samples (num_rows, length) of a task with an answer: each token is the last plus 7."""
    own = torch.Generator().manual_seed(step)
    first = torch.randint(vocabulary, (num_rows, 1), generator=own)
    return (first + 7 * torch.arange(length)) % vocabulary


def loss_of(model: nn.Module, rows: Tensor) -> Tensor:
    """Return the mean loss over the targets of `rows` (B, S+1), nats per token."""
    return F.cross_entropy(model(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten())


def verdict(apply: Apply, num_ranks: int = 4, *model, **sizes) -> str:
    """Return what the oracle says of `apply`: "the same training", or the first difference."""
    try:
        assert_same_training(apply, num_ranks, *model, **sizes)
        return "the same training"
    except AssertionError as error:
        return str(error)
