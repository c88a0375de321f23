"""The exercises' source, stubs and hints, and the learner's functions in the package."""

import ast
import inspect
import shutil
import sys

import pytest

from minitron import cost
from minitron.config import ConfigError, ModelConfig
from teaching.exercises import (
    BEGIN,
    END,
    HEADER,
    ROOT,
    find,
    is_stub,
    known,
    load,
    make_stub,
    read_exercises,
    replaced,
    select,
)
from teaching.hints import NUM_LEVELS, hint, read_hints
from teaching.reset import reset
from teaching.use import use
from tools.committed import committed_text

SOURCES = sorted((ROOT / "solutions").glob("ch*.py"))
EXERCISES = known()
ONE = "# Exercise 1.1 | A title | 20 min | difficulty 2 | replaces minitron.cost"


@pytest.fixture
def root(tmp_path):
    """A clone of solutions/ and exercises/, as handed out."""
    shutil.copytree(ROOT / "solutions", tmp_path / "solutions")
    (tmp_path / "exercises").mkdir()
    for source in SOURCES:
        stub = make_stub(source.read_text(), source.stem)
        (tmp_path / "exercises" / source.name).write_text(stub)
    return tmp_path


def handed_out(source):
    """The exercises as handed out; a learner has edited the working file."""
    return committed_text(ROOT / "exercises" / source.name)


def solution_lines(text):
    """Stripped lines inside and outside the solution blocks."""
    inside, outside, block = set(), set(), False
    for line in map(str.strip, text.splitlines()):
        if line in (BEGIN, END):
            block = line == BEGIN
        else:
            (inside if block else outside).add(line)
    return inside, outside


@pytest.mark.parametrize("source", SOURCES, ids=lambda path: path.stem)
def test_regenerating_changes_nothing(source):
    assert make_stub(source.read_text(), source.stem) == handed_out(source)


@pytest.mark.parametrize("source", SOURCES, ids=lambda path: path.stem)
def test_no_line_of_a_solution_leaks(source):
    inside, outside = solution_lines(source.read_text())
    secret = {line for line in inside - outside if len(line) >= 20 and not line.startswith("#")}
    assert len(secret) >= 10
    chapters = [path.read_text() for path in (ROOT / "chapters" / "source").glob("*.py")]
    for text in [handed_out(source), *chapters]:
        leaked = secret & set(map(str.strip, text.splitlines()))
        assert not leaked


def stubs_of(answer):
    """A function, or a class's methods, also static ones; its __init__ has a part that is given."""
    if not isinstance(answer, type):
        return [answer]
    methods = [getattr(value, "__func__", value) for value in vars(answer).values()]
    return [m for m in methods if inspect.isfunction(m) and m.__name__ != "__init__"]


@pytest.mark.parametrize("exercise", EXERCISES.values(), ids=str)
def test_every_stub_names_its_exercise(exercise, root):
    assert is_stub(exercise, root)
    answers = load(exercise, root / exercise.file).values()
    for function in [stub for answer in answers for stub in stubs_of(answer)]:
        arguments = [None] * function.__code__.co_argcount
        with pytest.raises(NotImplementedError, match=f"Exercise {exercise.id} - .*hint"):
            function(*arguments)


def test_a_stub_keeps_imports_docstrings_and_neighbors():
    text = "\n".join(
        [
            "import math",
            "",
            ONE,
            "def f(x: int) -> int:",
            '    """Double."""',
            f"    {BEGIN}",
            "    y = 2 * x",
            "    return y",
            f"    {END}",
            "",
        ]
    )
    assert make_stub(text, "ch01") == "\n".join(
        [
            "import math",
            "",
            ONE,
            "def f(x: int) -> int:",
            '    """Double."""',
            '    raise NotImplementedError("Exercise 1.1 - A title.  Hint: minitron hint 1.1")',
            "",
        ]
    )


@pytest.mark.parametrize(
    ("body", "problem"),
    [
        ([BEGIN, "pass"], "line 3 is never closed"),
        (["pass", END], f"4: {END} without"),
        ([BEGIN, "pass", BEGIN, "pass", END, END], "5: .* inside the block that began at line 3"),
        (["pass"], "exercise 1.1 has no"),
    ],
)
def test_unbalanced_markers_are_errors(body, problem):
    text = "\n".join([ONE, "def f():", *(f"    {line}" for line in body)])
    with pytest.raises(ValueError, match=problem):
        make_stub(text, "ch01")


def test_a_malformed_header_is_an_error():
    with pytest.raises(ValueError, match="ch01.py:1: malformed header"):
        read_exercises("# Exercise 1.1 | No minutes\ndef f():\n    pass\n", "ch01")


def test_a_header_says_all_there_is_to_know():
    (exercise,) = read_exercises(f"{ONE}\ndef f():\n    pass\n", "ch01_x")
    assert (exercise.id, exercise.title, exercise.minutes, exercise.difficulty) == (
        "1.1",
        "A title",
        20,
        2,
    )
    assert (exercise.replaces, exercise.names) == ("minitron.cost", ("f",))
    assert exercise.file == "exercises/ch01_x.py"


def test_ids_select_exercises_and_chapters():
    assert [e.id for e in select(["1.2"])] == ["1.2"]
    assert [e.id for e in select(["1.2", "1"])] == ["1.2", "1.1", "1.3", "1.4"]
    assert [e.id for e in select([])] == list(EXERCISES)
    with pytest.raises(ConfigError, match="'9.9' does not exist; choose from 1.1 to 1.4, 2"):
        select(["9.9"])
    with pytest.raises(ConfigError, match="'1' is a whole chapter"):
        find("1")


def test_outside_a_clone_one_line_says_so(tmp_path):
    with pytest.raises(ConfigError, match="clone"):
        known(tmp_path)


def test_comments_leave_a_stub_a_stub_and_code_does_not(root):
    path, exercise = root / EXERCISES["1.2"].file, EXERCISES["1.2"]
    text = path.read_text()
    path.write_text(text.replace("    raise Not", "    # an idea\n    raise Not"))
    assert is_stub(exercise, root)
    path.write_text(text.replace("    raise Not", "    x = 1\n    raise Not"))
    assert not is_stub(exercise, root)
    path.write_text("def learning_rate(:")
    assert not is_stub(exercise, root)


def test_load_reads_the_file_as_it_is_now(root):
    path, exercise = root / EXERCISES["1.2"].file, EXERCISES["1.2"]
    # same size, same second: an import would serve the first from its cache
    for digit in "12":
        path.write_text(f"def learning_rate():\n    return {digit}\n")
        assert load(exercise, path)["learning_rate"]() == int(digit)


# use


def write(root, chapter, text):
    path = root / "exercises" / f"{chapter}.py"
    path.write_text(path.read_text() + text)


MINE = """
def num_parameters(model):
    return 123

def training_flops_per_token(model, sequence_length):
    return 456
"""


def test_use_swaps_and_restores(root, monkeypatch):
    write(root, "ch01_single_gpu", MINE)
    original = cost.num_parameters
    elsewhere = sys.modules["teaching.exercises"]
    monkeypatch.setattr(elsewhere, "copied_name", original, raising=False)
    with use("1.3", root=root):
        assert cost.num_parameters(ModelConfig()) == 123
        assert elsewhere.copied_name(ModelConfig()) == 123
        assert cost.training_flops_per_token(ModelConfig(), 7) == 456
    assert cost.num_parameters is original and elsewhere.copied_name is original


def test_use_restores_after_an_error(root):
    write(root, "ch01_single_gpu", MINE)
    original = cost.num_parameters
    with pytest.raises(KeyError), use("1.3", root=root):
        raise KeyError
    assert cost.num_parameters is original


def test_use_reaches_the_training_loop(root):
    from minitron import step
    from minitron.running import schedule

    write(root, "ch01_single_gpu", "\ndef learning_rate(*arguments):\n    return 7.0\n")
    original = step.learning_rate
    with use("1.2", root=root):
        assert step.learning_rate(0) == schedule.learning_rate(0) == 7.0
    assert step.learning_rate is schedule.learning_rate is original


@pytest.mark.parametrize("exercise", EXERCISES.values(), ids=str)
def test_what_an_exercise_replaces_exists(exercise):
    if exercise.replaces:
        assert replaced(exercise) and all(map(callable, replaced(exercise).values()))


def test_use_refuses_in_one_line(root):
    with pytest.raises(ConfigError, match="1.1, Gradient accumulation is not written yet"):
        use("1.1", root=root).__enter__()
    with pytest.raises(ConfigError, match="1.4, .* replaces nothing"):
        use("1.4", root=root).__enter__()
    for text in ("exit()", "def learning_rate(:", "import learning_rates_module"):
        (root / EXERCISES["1.2"].file).write_text(text)
        with pytest.raises(ConfigError, match="cannot be executed"):
            use("1.2", root=root).__enter__()


# reset


def edit(root, old, new):
    path = root / EXERCISES["1.1"].file
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))
    return path


RAISE_1_2 = (
    '    raise NotImplementedError("Exercise 1.2 - Learning-rate schedule.  '
    'Hint: minitron hint 1.2")'
)
RAISE_1_4 = RAISE_1_2.replace("1.2", "1.4").replace("Learning-rate schedule", "Planning the batch")


def test_reset_restores_one_and_keeps_the_neighbors(root):
    edit(root, RAISE_1_4, "    return 1, 2")
    path = edit(root, "import math", "import math\nimport random")
    before = path.read_text()
    edit(root, RAISE_1_2, "    if step:\n        return peak\n\n    return minimum")
    broken = path.read_text()

    said = reset("1.2", root)

    assert path.read_text() == before
    backup = root / said.split(" is ")[-1]
    assert backup.read_text() == broken


@pytest.mark.parametrize("damage", ["    return (peak", "    return 1 +\n  x = 2", "    '''"])
def test_reset_mends_a_file_that_does_not_parse(root, damage):
    edit(root, RAISE_1_4, "    return 1, 2")
    path = root / EXERCISES["1.2"].file
    before = path.read_text()
    edit(root, RAISE_1_2, damage)
    reset("1.2", root)
    assert path.read_text() == before


def test_reset_brings_back_a_deleted_function_and_a_deleted_file(root):
    path = root / EXERCISES["1.2"].file
    handed_out = path.read_text()
    path.write_text(handed_out.replace("def learning_rate(", "def rate("))
    reset("1.2", root)
    assert is_stub(EXERCISES["1.2"], root)
    ast.parse(path.read_text())

    path.unlink()
    assert "was missing" in reset("1.2", root)
    assert path.read_text() == handed_out


def test_reset_of_a_chapter_restores_its_file_and_no_backup_is_overwritten(root):
    path = root / EXERCISES["1.2"].file
    handed_out = path.read_text()
    for text in ("first", "second"):
        path.write_text(text)
        reset("1", root)
    assert path.read_text() == handed_out
    backups = sorted((root / ".minitron" / "backups").iterdir())
    assert [b.read_text() for b in backups] == ["first", "second"]


# hints


@pytest.mark.parametrize("exercise", EXERCISES.values(), ids=str)
def test_every_exercise_has_three_different_hints(exercise):
    hints = read_hints(exercise)
    assert len(set(hints)) == len(hints) == NUM_LEVELS
    assert all(len(text.strip()) > 80 for text in hints)
    assert max(len(line) for text in hints for line in text.splitlines()) <= 100


def test_hints_are_shown_one_more_at_a_time(root):
    shown = [hint("1.2", root=root) for _ in range(4)]
    assert ["hint 1 of 3" in shown[0], "hint 2 of 3" in shown[1], "hint 3 of 3" in shown[2]] == [
        True
    ] * 3
    assert shown[3] == shown[2] and "--give-up" in shown[3]
    assert "hint 1 of 3" in hint("1.1", root=root)
    assert "hint 1 of 3" in hint("1.2", level=1, root=root)
    with pytest.raises(ConfigError, match="hint level 4"):
        hint("1.2", level=4, root=root)


def test_the_hints_hold_no_line_of_the_solution():
    for source in SOURCES:
        inside, outside = solution_lines(source.read_text())
        secret = {line for line in inside - outside if line.startswith(("return", "raise"))}
        text = source.with_suffix(".hints.toml").read_text()
        assert not secret & set(map(str.strip, text.splitlines()))


def test_header_titles_leave_room_for_the_stub_line():
    for source in SOURCES:
        stub = make_stub(source.read_text(), source.stem)
        assert all(len(line) <= 100 for line in stub.splitlines())
        assert any(HEADER.match(line) for line in stub.splitlines())
