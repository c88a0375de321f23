"""Command lines from dataclasses, by tyro, with every mistake told in one line."""

import contextlib
import io
import os
import re
import sys
import time
from collections.abc import Callable, Sequence
from typing import TypeVar
from unittest import mock

import tyro

from minitron.config import ConfigError, require
from minitron.system import disk
from minitron.system.errors import UNPRINTABLE

Options = TypeVar("Options")
SECONDS_ALONE = 10.0  # after which a mistake is this rank's own: torchrun would have ended it
SECONDS_TO_TELL = 2.0  # for the first rank: torchrun ends all as soon as one has left


def parse(
    options: type[Options], args: Sequence[str], prog: str, default: Options | None = None
) -> Options:
    """Read a dataclass from the command line's words; `default` holds what they leave out.

    `--help` prints the fields and exits with 0. Raises ConfigError, one line, for a mistake.
    """
    given = {} if default is None else {"default": default}
    if {"-h", "--help"} & set(args):
        return tyro.cli(options, args=args, prog=prog, **given)
    complaint = io.StringIO()
    wide = mock.patch.dict(os.environ, COLUMNS="2000")  # or tyro would wrap its sentences
    try:
        with wide, contextlib.redirect_stderr(complaint):
            return tyro.cli(options, args=args, prog=prog, **given)
    except SystemExit:
        raise ConfigError(f"{_first_sentence(complaint.getvalue())} (see {prog} --help)") from None


def _first_sentence(box: str) -> str:
    """What tyro wrote into its framed box, up to the first rule, and its first suggestion."""
    lines = [line.strip("│ ") for line in box.splitlines()[1:-1]]
    rules = [index for index, line in enumerate(lines) if line and not line.strip("─-")]
    if rules and rules[0] == 0:  # below the title, instead of a frame, if the terminal is ASCII
        lines, rules = lines[1:], [index - 1 for index in rules[1:]]
    message = " ".join(lines[: rules[0]] if rules else lines)
    message = re.sub(r"^Error parsing \w+: (?=\w+\.\w+ )", "", message)  # our own ConfigError
    suggestion = [lines[i + 1] for i, line in enumerate(lines) if line.startswith("Perhaps you")]
    if suggestion:
        message += f"; did you mean {suggestion[0].split()[0]}?"
    return message


def require_text(words: Sequence[str]) -> None:
    """Raise ConfigError for a word with control characters, or bytes that are not UTF-8."""
    for word in words:
        require(not UNPRINTABLE.search(word), f"'{word}' is no text that can be printed: "
                "libraries that read files stop at it; use another name")


def run(main: Callable[[list[str]], int]) -> None:
    """Run a program's `main` on the command line's words and exit with the code it returns."""
    for stream in (sys.stdout, sys.stderr):  # a name may hold what a terminal cannot show
        with contextlib.suppress(AttributeError):  # a notebook's
            stream.reconfigure(errors="backslashreplace")
    try:
        require_text(sys.argv[1:])
        code = main(sys.argv[1:])
        sys.stdout.flush()  # here, where what goes wrong is told
    except ConfigError as error:
        if os.environ.get("LOCAL_RANK", "0") != "0":
            time.sleep(SECONDS_ALONE)  # a node's ranks mostly make the same mistake
        print(f"minitron: {error}", file=sys.stderr)
        code = 2
    except SystemExit:  # the ranks have agreed: the first one tells it
        if os.environ.get("LOCAL_RANK", "0") != "0":
            time.sleep(SECONDS_TO_TELL)
        raise
    except KeyboardInterrupt:
        print("minitron: interrupted", file=sys.stderr)
        code = 130
    except BrokenPipeError:  # the reader of our output, such as `head`, has left
        sys.stdout = None
        code = 0
    except Exception as error:
        code = refused(error)
        if code is None:
            raise
    raise SystemExit(code)


def refused(error: Exception) -> int | None:
    """Tell in one line what a disk has refused; returns the exit code, None for another fault."""
    number, name = disk.refusal(error), getattr(error, "filename", None)
    if number is None:
        return None
    if name is None:
        sys.stdout = None  # or what it could not write is tried again at exit
    remedy = "make room" if number in disk.NO_ROOM else "choose another path"
    told = ConfigError(f"{name or 'the output'}: {os.strerror(number)}; {remedy}")  # on one line
    print(f"minitron: {told}", file=sys.stderr)
    return 2
