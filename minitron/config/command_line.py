"""Command lines from dataclasses, by tyro, with every mistake reported in one line."""

import contextlib
import dataclasses
import difflib
import os
import sys
import time
from collections.abc import Callable, Sequence
from typing import TypeVar, get_args

import tyro
from tyro import _errors as errors  # its hook for mistakes: documented there, not promised

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

    def refuse(event: errors.ParseErrorEvent) -> None:
        own = own_error(sys.exception())
        if own is not None:
            raise own
        problem, *remedy = in_words(event, options)
        remedy = f"{remedy[0]} (see {prog} --help)" if remedy else f"see {prog} --help"
        raise ConfigError(problem, remedy, kind=type(event).__name__)

    with errors.on_parse_error(refuse):
        return tyro.cli(options, args=args, prog=prog, **given)


def own_error(error: BaseException | None) -> ConfigError | None:
    """Return our own ConfigError that tyro met while building the dataclass, if that was it."""
    while error is not None and not isinstance(error, ConfigError):
        error = error.__context__
    return error


def in_words(event: errors.ParseErrorEvent, options: type) -> list[str]:
    """Say what tyro could not read, and what it would have read."""
    match event:
        case errors.UnrecognizedArgs(tokens=tokens):
            near = difflib.get_close_matches(tokens[0], names_of(options), n=1)
            remedy = [f"did you mean {name}?" for name in near]
            return [f"unrecognized options {', '.join(tokens)}", *remedy]
        case errors.InvalidChoice(argument=argument, value=value, choices=choices):
            return [
                f"invalid choice '{value}' for argument '{argument.display_name()}'",
                f"must be one of {', '.join(choices)}",
            ]
        case errors.BadValue(argument=argument):
            return [f"missing value for argument '{argument.display_name()}'"]
        case errors.MissingArgs(missing_arguments=missing):
            names = (each.arg.display_name() for each in missing)
            return [f"missing {', '.join(names)}"]
        case errors.MissingSubcommand(subcommand_spec=spec):
            return ["missing subcommand", f"expected one of {', '.join(spec.parser_from_name)}"]
        case errors.InstantiationFailure(argument=None, message=message):
            return [message]
        case errors.InstantiationFailure(argument=argument, message=message):
            return [f"{argument.display_name()}: {message}"]
    return [f"these options cannot be read ({type(event).__name__})"]


def names_of(options: type, prefix: str = "--") -> list[str]:
    """Return the options that a dataclass of dataclasses makes, or any of a union of them."""
    if not dataclasses.is_dataclass(options):
        return [name for each in get_args(options) for name in names_of(each, prefix)]
    names = []
    for field in dataclasses.fields(options):
        name = prefix + field.name.replace("_", "-")
        inner = dataclasses.is_dataclass(field.type)
        names += names_of(field.type, f"{name}.") if inner else [name]
    return names


def require_text(words: Sequence[str]) -> None:
    """Raise ConfigError for a word with control characters, or bytes that are not UTF-8."""
    for word in words:
        require(
            not UNPRINTABLE.search(word),
            f"'{word}' contains a control character or bytes that are not UTF-8, and libraries "
            "that open files reject such names",
            "use another name",
        )


def run(main: Callable[[list[str]], int]) -> None:
    """Run a program's `main` on the command line's words and exit with the code it returns."""
    for stream in (sys.stdout, sys.stderr):  # a name may hold what a terminal cannot show
        with contextlib.suppress(AttributeError):  # a notebook's
            stream.reconfigure(errors="backslashreplace")
    try:
        require_text(sys.argv[1:])
        code = main(sys.argv[1:])
        sys.stdout.flush()  # here, where what goes wrong is reported
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
    error = ConfigError(f"{name or 'the output'}: {os.strerror(number)}; {remedy}")  # on one line
    print(f"minitron: {error}", file=sys.stderr)
    return 2
