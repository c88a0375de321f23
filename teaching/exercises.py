"""The exercises: where each one lives, what it replaces, and how its stub is made.

`solutions/chNN_topic.py` is the only source. One header line starts an exercise,

    # Exercise 3.1 | Recompute a function | 30 min | difficulty 3 | replaces minitron.model
    # Train with yours: --train.recompute full

and the functions or classes up to the next header belong to it. Everything else has its place
by name: the learner's file `exercises/chNN_topic.py`, the hints `solutions/chNN_topic.hints.toml`,
the grader `grade_1_1` in `teaching/graders/chNN_topic.py`. The last field names the
module whose functions of the same names `use` replaces (see `teaching.use`). The second line is
there if training calls them: with these options, and where it says so, on several ranks. An
exercise that is another version of what training runs by default says which takes its place:

    # Train with yours on 2 ranks: apply_naive_data_parallel for apply_bucketed_data_parallel

Read in this order: Exercise, known, make_stub, load.
"""

import ast
import linecache
import re
import sys
import types
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache, partial
from importlib import import_module
from itertools import groupby
from pathlib import Path

from minitron.config import require

ROOT = Path(__file__).resolve().parents[1]
BEGIN, END = "### BEGIN SOLUTION", "### END SOLUTION"
HEADER = re.compile(
    r"# Exercise (?P<id>\d+\.\d+) \| (?P<title>[^|]+?) \| (?P<minutes>\d+) min"
    r" \| difficulty (?P<difficulty>[123])(?: \| replaces (?P<replaces>[\w.]+))?$"
)


class Text(str):
    """A string that a notebook shows as it reads, with its line breaks."""

    __repr__ = str.__str__


TRAINING = re.compile(
    r"# Train with (?:yours|your (?P<name>\w+))(?: on (?P<ranks>\d) ranks)?"
    r"(?:: (?:(?P<options>--.+)|(?P<variant>\w+) for (?P<default>\w+)))?$"
)


@dataclass(frozen=True)
class Exercise:
    id: str
    title: str
    minutes: int
    difficulty: int
    """1: a few lines once you see it; 2: one trap; 3: several parts that must fit."""
    replaces: str | None
    """The module of the package whose functions of the same names can be replaced, if any."""
    chapter: str
    """The file's name without its ending, ch01_single_gpu."""
    names: tuple[str, ...]
    """The functions or classes to write."""
    trained: tuple[str, ...] = ()
    """Those that training calls."""
    num_ranks: int = 1
    """On how many ranks it does."""
    options: tuple[str, ...] = ()
    """With which options of the command line it does."""
    variant: str | None = None
    """The function of the module that calls them, if training calls another one by default."""
    default: str | None = None
    """That other one."""

    @property
    def file(self) -> str:
        return f"exercises/{self.chapter}.py"

    @property
    def solution_file(self) -> str:
        return f"solutions/{self.chapter}.py"

    @property
    def command(self) -> str | None:
        """The command that trains with the learner's functions, if training calls them."""
        if not self.trained:
            return None
        start = (
            "minitron"
            if self.num_ranks == 1
            else f"torchrun --nproc-per-node {self.num_ranks} -m minitron.cli"
        )
        return " ".join([start, "train configs/stories.toml", *self.options, "--use", self.id])

    def __str__(self) -> str:
        return f"{self.id}, {self.title}"


def replaced(exercise: Exercise) -> dict[str, Callable]:
    """The package's functions of the same names; an exercise may have more than it replaces."""
    package = import_module(exercise.replaces)
    return {name: getattr(package, name) for name in exercise.names if hasattr(package, name)}


def variants(exercise: Exercise) -> list[tuple[Callable, Callable]]:
    """The function that training calls by default, and what calls the learner's in its place."""
    if exercise.variant is None:
        return []
    package = import_module(exercise.replaces)
    # A new object each time, so that it can be told from the variant itself when it is swapped back
    return [(getattr(package, exercise.default), partial(getattr(package, exercise.variant)))]


def known(root: Path = ROOT) -> dict[str, Exercise]:
    """All exercises by id, in order. Raises ConfigError outside a clone of the repository."""
    require(
        (root / "solutions").is_dir() and (root / "exercises").is_dir(),
        f"{root}: there is no exercises/ folder here; the exercises come with a clone of the "
        "repository: clone it and run `make setup` in it",
    )
    found = {}
    for path in sorted((root / "solutions").glob("ch*.py")):
        for exercise in read_exercises(path.read_text(encoding="utf-8"), path.stem):
            assert exercise.id not in found, f"{path}: exercise {exercise.id} exists twice"
            found[exercise.id] = exercise
    return found


def select(ids: list[str], root: Path = ROOT) -> list[Exercise]:
    """The exercises that `ids` name: "1.2" is one, "1" is chapter 1's, no ids are all.

    Raises ConfigError, which lists the known ids, for an unknown one.
    """
    exercises = known(root)
    selected = {} if ids else dict(exercises)
    for wanted in map(str, ids):
        matching = {i: e for i, e in exercises.items() if wanted in (i, i.split(".")[0])}
        require(
            bool(matching),
            f"exercise {wanted!r} does not exist; choose from {by_chapter(exercises)} "
            "(or a whole chapter: 1)",
        )
        selected |= matching
    return list(selected.values())


def by_chapter(ids: Iterable[str]) -> str:
    """1.1 to 1.4, 2.1 to 2.3, ..."""
    chapters = [list(of_one) for _, of_one in groupby(ids, key=lambda id: id.split(".")[0])]
    return ", ".join(f"{of_one[0]} to {of_one[-1]}" for of_one in chapters)


def find(exercise_id: str, root: Path = ROOT) -> Exercise:
    """The one exercise called `exercise_id`. Raises ConfigError if it is not exactly one."""
    exercises = select([exercise_id], root)
    require(
        exercises[0].id == str(exercise_id),
        f"{exercise_id!r} is a whole chapter; name one exercise: "
        f"{', '.join(e.id for e in exercises)}",
    )
    return exercises[0]


# The source: headers and markers


@cache
def read_exercises(text: str, chapter: str) -> tuple[Exercise, ...]:
    """Read the exercises from a solutions file. Raises ValueError for a malformed header."""
    lines = text.splitlines()
    starts = [n for n, line in enumerate(lines, 1) if line.startswith("# Exercise")]
    definitions = [n for n in ast.parse(text).body if isinstance(n, DEFINITIONS)]
    exercises = []
    for start, stop in zip(starts, [*starts[1:], len(lines) + 1], strict=True):
        header = HEADER.match(lines[start - 1])
        names = tuple(node.name for node in definitions if start < node.lineno < stop)
        if not header or not names:
            raise ValueError(f"{chapter}.py:{start}: malformed header, or nothing defined under it")
        fields = header.groupdict()
        fields |= {key: int(fields[key]) for key in ("minutes", "difficulty")}
        training = TRAINING.match(lines[start])
        if training:
            fields["trained"] = (training["name"],) if training["name"] else names
            fields["num_ranks"] = int(training["ranks"] or 1)
            fields["options"] = tuple((training["options"] or "").split())
            fields |= {key: training[key] for key in ("variant", "default")}
        exercises.append(Exercise(**fields, chapter=chapter, names=names))
    return tuple(exercises)


DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)


def make_stub(text: str, chapter: str) -> str:
    """What learners get: every solution block replaced by a NotImplementedError that names it.

    Raises ValueError, with file and line, for markers that do not pair up.
    """
    stub, header, begin, filled = [], None, None, set()

    def demand(condition, problem: str) -> None:
        if not condition:
            raise ValueError(f"{chapter}.py:{number}: {problem}")

    for number, line in enumerate(text.splitlines(), 1):
        marker = line.strip()
        if marker == BEGIN:
            demand(begin is None, f"{BEGIN} inside the block that began at line {begin}")
            demand(header, f"{BEGIN} before the first exercise header")
            begin = number
            filled.add(header["id"])
            stub.append(line.replace(BEGIN, _unsolved(header["id"], header["title"])))
        elif marker == END:
            demand(begin is not None, f"{END} without {BEGIN}")
            begin = None
        elif begin is None:
            header = HEADER.match(line) or header
            stub.append(line)

    demand(begin is None, f"{BEGIN} at line {begin} is never closed")
    for exercise in read_exercises(text, chapter):
        demand(exercise.id in filled, f"exercise {exercise.id} has no {BEGIN}")
    return "\n".join(stub) + "\n"


def _unsolved(exercise_id: str, title: str) -> str:
    message = f"Exercise {exercise_id} - {title}.  Hint: minitron hint {exercise_id}"
    return f'raise NotImplementedError("{message}")'


def read_stub(exercise: Exercise, root: Path = ROOT) -> str:
    """The text of the exercise's file as it was handed out."""
    solution = (root / exercise.solution_file).read_text(encoding="utf-8")
    return make_stub(solution, exercise.chapter)


def is_stub(exercise: Exercise, root: Path = ROOT) -> bool:
    """Whether none of the exercise has been written; comments and layout do not count."""
    path = root / exercise.file
    if not path.is_file():
        return False
    try:
        mine = _definitions(path.read_bytes())
    except (SyntaxError, ValueError):
        return False
    handed_out = _definitions(read_stub(exercise, root))
    return all(mine.get(name) == handed_out[name] for name in exercise.names)


def _definitions(source: str | bytes) -> dict[str, str]:
    tree = ast.parse(source)
    return {node.name: ast.dump(node) for node in tree.body if isinstance(node, DEFINITIONS)}


# The learner's functions


def load(exercise: Exercise, path: Path, builtins: dict | None = None) -> dict[str, Callable]:
    """Execute the file at `path` as it is now and return the exercise's functions by name.

    It is compiled afresh: an import could serve the version from before the last edit. `builtins`
    are the functions that it finds everywhere, Python's own if None. Raises whatever the file
    raises, and LookupError if one of the names is gone.
    """
    module = types.ModuleType(f"exercises.{exercise.chapter}")
    if builtins is not None:
        vars(module)["__builtins__"] = builtins
    module.__file__ = str(path)
    sys.modules[module.__name__] = module  # a dataclass in the file looks its module up here
    linecache.checkcache(str(path))
    exec(compile(path.read_bytes(), str(path), "exec", dont_inherit=True), vars(module))

    for name in exercise.names:
        if name not in vars(module):
            raise LookupError(f"{exercise.file} defines no {name}")
    return {name: vars(module)[name] for name in exercise.names}
