"""Let the package run a learner's functions: here, and on the ranks that `run` starts."""

import re
import sys
import traceback
import types
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial, wraps
from pathlib import Path

import torch

from minitron import launch
from minitron.config import ConfigError, require
from teaching.exercises import ROOT, Exercise, find, is_stub, load, replaced, variants

STUB = re.compile(r"Exercise (\d+\.\d+) - ")


@contextmanager
def use(*ids: str, root: Path = ROOT) -> Iterator[Counter]:
    """Let the package run the learner's functions of these exercises, until the block ends.

        with use("1.1", "1.2"):
            train(config, run_dir)

    Ranks that `run` starts meanwhile do so too. A function need not pass its check. Yields how
    often this process has called each, by (id, name). Raises ConfigError if one is not written, or
    only in part, if its file cannot be executed, or if the package has nothing that it could
    replace.
    """
    swapped, calls = [], Counter()
    on_ranks = partial(use, *ids, root=root)
    launch.RANK_CONTEXTS.append(on_ranks)
    try:
        for exercise in [find(i, root) for i in ids]:
            require(
                exercise.replaces is not None,
                f"exercise {exercise} replaces nothing in the package",
                "leave it out of `use`",
            )
            require(
                not is_stub(exercise, root),
                f"exercise {exercise} is not written yet",
                f"edit {exercise.file}, then minitron check {exercise.id}",
            )
            written = _load_or_explain(exercise, root)
            originals = replaced(exercise)
            calls.update({(exercise.id, name): 0 for name in originals})
            pairs = [
                (original, _counted(written[name], exercise, name, calls))
                for name, original in originals.items()
            ]
            for original, mine in pairs + variants(exercise):
                _swap(original, mine)
                swapped.append((original, mine))
        yield calls
    except NotImplementedError as error:
        if STUB.match(str(error)) is None:
            raise
        raise _in_one_line(error) from None
    finally:
        launch.RANK_CONTEXTS.remove(on_ranks)
        for original, mine in reversed(swapped):
            _swap(mine, original)


def _load_or_explain(exercise: Exercise, root: Path) -> dict[str, Callable]:
    try:
        return load(exercise, root / exercise.file)
    except (Exception, SystemExit) as error:
        raise ConfigError(
            f"{exercise.file} cannot be executed: {type(error).__name__}: {error}",
            f"try minitron check {exercise.id}",
        ) from None


def _counted(mine: Callable, exercise: Exercise, name: str, calls: Counter) -> Callable:
    """The learner's function, which counts its calls; a class counts its objects, or forwards."""
    if isinstance(mine, type):  # the same object: others may have it as their base
        is_function = issubclass(mine, torch.autograd.Function)
        method = "forward" if is_function else "__init__"
        counted = _counted(getattr(mine, method), exercise, name, calls)
        setattr(mine, method, staticmethod(counted) if is_function else counted)
        return mine

    @wraps(mine)
    def count(*args, **kwargs):
        if torch.compiler.is_compiling():  # a graph would be compiled anew for each count
            return mine(*args, **kwargs)
        calls[exercise.id, name] += 1
        return mine(*args, **kwargs)

    return count


def _in_one_line(error: NotImplementedError) -> ConfigError:
    """What to say of an exercise of which a part still holds the stub, which has been called."""
    file, line, name, _ = traceback.extract_tb(error.__traceback__)[-1]
    traceback.clear_frames(error.__traceback__)  # they may hold a group, which ends with the run
    number = STUB.match(str(error))[1]
    return ConfigError(
        f"exercise {number} is not complete: {name}, in line {line} of "
        f"{Path(file).name}, still holds the stub",
        f"write it, then minitron check {number}",
    )


def _swap(old: Callable, new: Callable) -> None:
    # `from minitron.cost import f` has copied the name: replace it in every module that holds it,
    # but for the learner's own, where it may be the package's that theirs calls.
    for module_name, module in list(sys.modules.items()):
        if isinstance(module, types.ModuleType) and not module_name.startswith("exercises."):
            tables = [vars(module)]
            if module_name.startswith("minitron."):  # VOLUMES of minitron.cost holds functions
                tables += [value for value in vars(module).values() if type(value) is dict]
            for table in tables:
                for name, value in list(table.items()):
                    if value is old:
                        table[name] = new
