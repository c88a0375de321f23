"""Let the package run a learner's functions: here, and on the ranks that `run` starts."""

import sys
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from minitron import launch
from minitron.config import ConfigError, require
from teaching.exercises import ROOT, Exercise, find, is_stub, load, replaced, variants


@contextmanager
def use(*ids: str, root: Path = ROOT) -> Iterator[None]:
    """Let the package run the learner's functions of these exercises, until the block ends.

        with use("1.1", "1.2"):
            train(config, run_dir)

    Ranks that `run` starts meanwhile do so too. A function need not pass its check. Raises
    ConfigError if one is not written, if its file cannot be executed, or if the package has nothing
    that it could replace.
    """
    swapped = []
    on_ranks = partial(use, *ids, root=root)
    launch.RANK_CONTEXTS.append(on_ranks)
    try:
        for exercise in [find(i, root) for i in ids]:
            require(exercise.replaces is not None, f"exercise {exercise} replaces nothing in "
                    "the package", "leave it out of `use`")
            require(not is_stub(exercise, root), f"exercise {exercise} is not written yet",
                    f"edit {exercise.file}, then minitron check {exercise.id}")
            written = _load_or_explain(exercise, root)
            pairs = [(original, written[name]) for name, original in replaced(exercise).items()]
            for original, mine in pairs + variants(exercise):
                _swap(original, mine)
                swapped.append((original, mine))
        yield
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
            f"try minitron check {exercise.id}"
        ) from None


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
