"""Checking survives whatever a learner's file does, and says it in a sentence."""

import json
import re
import shutil
from dataclasses import asdict

import pytest

from minitron.config import ConfigError
from teaching import check as checking
from teaching import graders, records
from teaching.check import (
    Report,
    Result,
    check,
    run_check,
    run_solution,
    run_status,
    solution,
    status,
)
from teaching.exercises import ROOT, known, make_stub
from teaching.graders import Verdict
from teaching.hints import hint
from teaching.wrapping import fill
from tests.tiers import tiered

REACHES = "teaching/graders", "solutions"  # by name: for tools/affected.py

SOURCE = ROOT / "solutions" / "ch01_single_gpu.py"
FILE = "exercises/ch01_single_gpu.py"
RAISE = re.compile(r'    raise NotImplementedError\("Exercise 1\.4 .*\n')


@pytest.fixture
def root(tmp_path):
    """A clone of solutions/ and exercises/, as handed out."""
    copy_solutions(tmp_path)
    (tmp_path / "exercises").mkdir()
    write(tmp_path, make_stub(SOURCE.read_text(), SOURCE.stem))
    return tmp_path


def grade_here(exercise, root, timeout):
    """What `teaching.check` runs in a process of its own, without the seconds that one takes."""
    verdict = graders.grade_file(exercise, root / exercise.file, timeout)
    return 0, json.dumps(asdict(verdict)), ""


@pytest.fixture
def in_process(monkeypatch):
    monkeypatch.setattr(checking, "_run_grader", grade_here)


@pytest.fixture(scope="module")
def solved_once(tmp_path_factory):
    """A clone whose exercises are all solved, and the report of checking them."""
    folder = tmp_path_factory.mktemp("solved")
    copy_solutions(folder)
    (folder / "exercises").mkdir()
    write(folder, SOURCE.read_text())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checking, "_run_grader", grade_here)
        return folder, check("1", root=folder)


@pytest.fixture
def solved(solved_once, tmp_path):
    """A copy of it, with the record of what passed."""
    return shutil.copytree(solved_once[0], tmp_path / "solved")


def copy_solutions(root):
    """Chapter 1's alone: what the harness does with one chapter it does with all."""
    (root / "solutions").mkdir()
    for path in (ROOT / "solutions").glob("ch01_*"):
        shutil.copy(path, root / "solutions")


def write(root, text):
    (root / FILE).write_text(text)


def answer(root, body):
    """Put `body` where the stub of exercise 1.4 raises."""
    text, count = RAISE.subn(lambda _: f"{body}\n", (root / FILE).read_text())
    assert count == 1
    write(root, text)


def count_processes(monkeypatch):
    started = []
    run_grader = checking._run_grader
    monkeypatch.setattr(
        checking,
        "_run_grader",
        lambda exercise, *rest: started.append(exercise.id) or run_grader(exercise, *rest),
    )
    return started


# Each case: what stands above the solution of 1.4, and on which line of it; all of it is harmless.
HARMLESS = {
    "imports a module for the first time": (
        "import sys\nsys.path.insert(0, 'FOLDER')\nimport never_imported_before",
        "",
    ),
    "warns": ("import warnings", "    warnings.warn('a look at the caller', stacklevel=2)"),
    "shows where it is": ("import traceback", "    traceback.print_stack()"),
    "uses a library's classes": (
        "import abc, contextlib, typing\nfrom dataclasses import dataclass\n"
        "@dataclass(frozen=True)\nclass Plan(typing.Generic[typing.TypeVar('T')], abc.ABC):\n"
        "    size: int",
        "    with contextlib.suppress(KeyError):\n        Plan(1)",
    ),
    "starts threads": (
        "from concurrent.futures import ThreadPoolExecutor",
        "    ThreadPoolExecutor(1).submit(print).result()",
    ),
}


@pytest.mark.usefixtures("in_process")
@pytest.mark.parametrize(("above", "inside"), tiered(HARMLESS.values(), 3), ids=HARMLESS)
def test_a_right_answer_may_use_python(root, tmp_path, monkeypatch, above, inside):
    monkeypatch.delenv("PYTHONDONTWRITEBYTECODE", raising=False)
    (tmp_path / "never_imported_before.py").write_text("VALUE = 1\n")
    text, solution = (root / FILE).read_text(), SOURCE.read_text()
    right = solution[solution.index("def plan_batch(") :].replace("plan_batch", "plan")
    write(
        root,
        text.replace("import math\n", f"import math\n{above}\n", 1).replace("FOLDER", str(tmp_path))
        + f"\n\n{right}",
    )
    answer(
        root,
        f"{inside}\n    return plan(tokens_per_step, sequence_length, num_ranks, "
        "largest_micro_batch)",
    )
    report = check("1.4", root=root)
    assert report.passed, str(report)


# Each case: what the learner wrote for 1.4, and what the report must say.
DEADLY = {
    "os._exit(0)": ("    import os\n    os._exit(0)", ["exit code 0", "before the grading did"]),
    "endless loop": ("    while True:\n        pass", ["still running", "at line ", "loop"]),
    "crash": ("    import faulthandler\n    faulthandler._sigsegv()", ["SIGSEGV", "at line "]),
    "flood": ("    while True:\n        print('flood' * 1000)", ["still running", "and more"]),
    "interrupt": ("    raise KeyboardInterrupt", ["your code raised KeyboardInterrupt"]),
    "killed": ("    import signal\n    signal.raise_signal(9)", ["SIGKILL", "out of memory"]),
    "reads input": ("    return input()", ["EOFError", "return input()"]),
}
WRONG = {
    "exit": ("    exit()", ["SystemExit", "exit() ends Python"]),
    "syntax error": ("    return (1,", ["SyntaxError", "line "]),
    "error": (
        "    return {}[tokens_per_step]",
        ["KeyError: 65536", "return {}[tokens_per_step]", "tokens_per_step=65536"],
    ),
    "recursion": ("    return plan_batch(1, 1, 1, 1)", ["RecursionError"]),
    "wrong type": ("    return None", ["it returned None", "a tuple of two integers"]),
}


@pytest.mark.parametrize(("body", "says"), tiered(DEADLY.values(), 0), ids=DEADLY)
def test_what_ends_or_blocks_the_process_gives_a_sentence(root, body, says):
    answer(root, body)
    report = check("1.4", root=root, timeout=2)
    assert not report.passed
    assert_one_screen(repr(report), says)


@pytest.mark.parametrize(("body", "says"), tiered(WRONG.values(), 2), ids=WRONG)
def test_what_raises_or_is_wrong_gives_a_sentence(root, body, says):
    answer(root, body)
    exercise = known(root)["1.4"]
    result = checking.Result(exercise, graders.grade_file(exercise, root / FILE))
    assert not result.passed
    assert_one_screen(str(result), says)


def assert_one_screen(text, says):
    assert all(part in text for part in says), text
    assert text.startswith("Exercise 1.4, Planning the batch: not yet")
    assert "minitron hint 1.4" in text
    assert len(text.splitlines()) <= 24
    # the learner's own lines only
    assert "site-packages" not in text and "teaching" not in text


@pytest.mark.usefixtures("in_process")
def test_an_error_at_import_names_the_line(root):
    write(root, "import math\nmath.cosine\n")
    text = repr(check("1.4", root=root))
    assert "ch01_single_gpu.py, line 2" in text and "AttributeError" in text


@pytest.mark.usefixtures("in_process")
def test_a_missing_function_and_a_missing_file(root):
    write(root, "import math\n")
    text = str(check("1.4", root=root))
    assert "defines no plan_batch" in text and "minitron reset 1.4" in text
    (root / FILE).unlink()
    for text in str(check("1.4", root=root)), str(status(root)).splitlines()[-1]:
        assert re.search(r"next:?\s+minitron reset 1\.\d brings exercises/ch01_\w+.py back", text)
        assert "edit" not in text
    assert f"there is no file {FILE}" in str(check("1.4", root=root))


def test_a_stub_is_recognised_without_a_process(root, monkeypatch):
    started = count_processes(monkeypatch)
    report = check("1", root=root)
    assert not report.passed and len(report.results) == 4
    assert started == []
    assert str(report).splitlines() == [
        "Not written yet:",
        f"  {'1.1, 1.2, 1.3, 1.4':28}  {FILE}",
        f"  next     edit {FILE}, then minitron check 1.1; stuck? minitron hint 1.1",
    ]
    assert "Not written yet" in report._repr_html_()
    assert "Exercise 1.4, Planning the batch: to do" in str(check("1.4", root=root))


@pytest.mark.usefixtures("in_process")
def test_what_has_been_tried_is_shown_before_what_is_not_written(root):
    answer(root, "    return 1, 1")
    text = str(check(root=root))
    assert text.startswith("Exercise 1.4, Planning the batch: not yet\n  asked ")
    assert text.count("Exercise 1.") == 1
    assert f"\n\nNot written yet:\n  {'1.1, 1.2, 1.3':28}  {FILE}\n  next " in text


def test_the_list_of_what_is_not_written_has_a_line_for_each_chapter():
    unwritten = tuple(
        Result(each, Verdict("unsolved"), is_unwritten=True) for each in known().values()
    )
    lines = str(Report(unwritten)).splitlines()
    assert len(lines) == 14
    assert len({line.index("  exercises/") for line in lines[1:-1]}) == 1  # one column


@pytest.mark.parametrize("exercise", known().values(), ids=str)
def test_a_command_is_never_cut_in_two(exercise):
    """At any width, so at every place in a line."""
    passed, todo = (Result(exercise, Verdict(state)).next for state in ("passed", "unsolved"))
    commands = [
        f"minitron hint {exercise.id}",
        f"minitron check {exercise.id}",
        f"minitron solution {exercise.id}",
        *filter(None, [exercise.command]),
    ]
    text = f"{passed}; {todo}; `make lab --now`"
    for width in range(12, 100):
        lines = fill(text, width).splitlines()
        assert all(any(command in line for line in lines) for command in commands)
        assert any("`make lab --now`" in line for line in lines)
        assert " ".join(lines) == text


def test_one_of_two_functions_written(root):
    text = (root / FILE).read_text()
    write(root, text + "\n\ndef num_parameters(model):\n    return 5\n")
    exercise = known(root)["1.3"]
    assert "5 parameters, not" in graders.grade_file(exercise, root / FILE).seen

    ours, stubs = SOURCE.read_text(), text
    start = "def training_flops_per_token"
    write(root, ours[: ours.index(start)] + stubs[stubs.index(start) :])
    verdict = graders.grade_file(exercise, root / FILE)
    assert verdict.state == "unsolved"
    assert verdict.seen == "training_flops_per_token is still the stub"


def test_a_chapter_of_right_answers_passes(solved_once, monkeypatch):
    root, report = solved_once
    assert report.passed and [r.exercise.id for r in report.results] == ["1.1", "1.2", "1.3", "1.4"]
    assert "--use 1.1" in str(report.results[0]) and "--use" not in str(report.results[3])

    started = count_processes(monkeypatch)
    assert "4 of 4 passed" in status(root) and "next" not in status(root)
    assert started == []


def test_a_report_shows_in_a_notebook_what_the_learner_printed_before_the_end(root):
    body, says = DEADLY["os._exit(0)"]
    answer(root, f"    print('<b>sizes</b>')\n{body}")
    report = check("1.4", root=root)
    assert not report.passed
    assert_one_screen(repr(report), ["<b>sizes</b>", *says])
    page = report._repr_html_()
    assert "&lt;b&gt;sizes" in page and "<b>" not in page and "<pre" in page


@pytest.mark.usefixtures("in_process")
def test_status_is_derived_from_the_files(root, monkeypatch):
    assert "0 of 4 passed" in status(root)
    started = count_processes(monkeypatch)
    answer(root, "    return 1, 1")
    for _ in range(2):
        assert "1.4   not yet" in status(root)
    assert started == ["1.4"]  # the second time from the record of the first

    (root / ".minitron" / "checks.json").write_text("{not json")
    assert "0 of 4 passed" in status(root)
    assert started == ["1.4", "1.4"]


RECORD = {"key": "0" * 64, "state": "passed"}


@pytest.mark.parametrize(
    "text",
    [
        "[]",
        "null",
        "7",
        '{"1.4": []}',
        '{"1.4": {}}',
        '{"1.4": {"key": [], "state": "passed"}}',
        json.dumps({"1.4": RECORD}),
        json.dumps({"1.4": {**RECORD, "state": "excellent"}}),
        '{"1.4": ' * 5000,
        "[" * 100_000,
        "\ud800",
        "1" * 5000,
    ],
)
def test_a_record_that_does_not_fit_is_none(root, monkeypatch, text):
    answer(root, "    return 1, 1")
    (root / ".minitron").mkdir()
    for name in ("checks", "hints"):
        (root / ".minitron" / f"{name}.json").write_text(text, errors="surrogatepass")
    monkeypatch.setattr(checking, "_run_grader", lambda *_: (0, '{"state": "failed"}', ""))
    assert "0 of 4 passed" in status(root)
    assert str(hint("1.4", root=root)).splitlines()[0].endswith("hint 1 of 3")


def test_a_record_counts_for_what_was_graded(root, monkeypatch):
    """Comments, docstrings and layout do not decide; code, the solution and the package do."""
    answer(root, "    return 1, 1")
    started = count_processes(monkeypatch)
    monkeypatch.setattr(
        checking,
        "_run_grader",
        lambda exercise, *rest: started.append(exercise.id) or (0, '{"state": "failed"}', ""),
    )
    text = (root / FILE).read_text()
    status(root)
    write(root, text.replace("return 1, 1", "return (1,\n        1)  # a guess"))
    write(root, (root / FILE).read_text().replace("Split a step's tokens", "Cut a step's tokens"))
    status(root)
    assert started == ["1.4"]

    write(root, text.replace("return 1, 1", "return 1, 2"))
    status(root)
    write(root, text.replace("import math", "import math as math_"))
    status(root)
    assert started == ["1.4"] * 3

    solution_file = root / "solutions" / SOURCE.name
    solution_file.write_text(solution_file.read_text() + "\nx = 1\n")
    status(root)
    assert started == ["1.4"] * 4
    monkeypatch.setattr(records, "_package", lambda: b"another version")
    status(root)
    assert started == ["1.4"] * 5
    monkeypatch.setattr(records, "version", lambda name: "another torch")
    status(root)
    assert started == ["1.4"] * 6


def test_a_failure_within_a_shorter_limit_is_not_kept(root, monkeypatch):
    answer(root, "    return 1, 1")
    verdicts = ["failed", "passed"]
    monkeypatch.setattr(
        checking, "_run_grader", lambda *_: (0, json.dumps({"state": verdicts.pop(0)}), "")
    )
    assert not check("1.4", root=root, timeout=1).passed
    status(root)
    assert verdicts == [], "it was graded again, with all the time there is"


@pytest.mark.parametrize(
    "part",
    [
        "minitron/plan/search.py",
        "minitron/corpus/text.py",
        "teaching/graders/__init__.py",
        "teaching/graders/guard.py",
        "teaching/graders/ch02_memory.py",
        "minitron/config/schema.py",
        "minitron/precision.py",
        "minitron/pytorch/private.py",
        "teaching/exercises.py",
        "minitron/plan/hardware.csv",
    ],
)
def test_every_module_and_table_decides(part, monkeypatch):
    contents = records._contents
    before = records._package()
    records._hash_of.cache_clear()
    monkeypatch.setattr(
        records, "_contents", lambda path: contents(path) + b" " * str(path).endswith(part)
    )
    assert records._package() != before
    records._hash_of.cache_clear()


def test_status_names_what_it_grades(root, monkeypatch, capsys):
    monkeypatch.setattr(checking, "_run_grader", lambda *_: (0, '{"state": "failed"}', ""))
    answer(root, "    return 1, 1")
    status(root)
    assert capsys.readouterr().err == "checking 1.4, Planning the batch ...\n"
    status(root)
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("verdict", ["", "[]", "{}", '{"state": "passed", "more": 1}', "[" * 10**5])
def test_a_grader_that_dies_passes_nothing(root, monkeypatch, verdict):
    monkeypatch.setattr(checking, "_run_grader", lambda *_: (1, verdict, ""))
    answer(root, "    return 1, 1")
    assert "ended with exit code 1" in str(check("1.4", root=root))


@pytest.mark.usefixtures("in_process")
def test_a_record_of_a_pass_is_worthless_after_an_edit(solved):
    root = solved
    assert "1.4   passed" in status(root)
    write(root, make_stub(SOURCE.read_text(), SOURCE.stem))
    assert "1.4   to do" in status(root)
    answer(root, "    return 1, 1")
    assert "1.4   not yet" in status(root)


def test_the_solution_is_withheld_until_a_pass(root, solved):
    with pytest.raises(ConfigError, match="1.4, .* has not passed: .*--give-up"):
        solution("1.4", root=root)
    given = solution("1.4", give_up=True, root=root)
    assert given.startswith("# Exercise 1.4 |") and "per_rank =" in given
    assert "SOLUTION" not in given and "learning_rate" not in given

    assert solution("1.4", root=solved) == given
    assert solution("1.2", root=solved).count("# Exercise") == 1


@pytest.mark.parametrize("grader", tiered([grade_here, checking._run_grader]))
def test_exit_codes(grader, root, solved, capsys, monkeypatch):
    monkeypatch.setattr(checking, "_run_grader", grader)
    assert run_check(["1.4"], root=root) == 1
    assert run_check(["1.4"], root=solved) == 0
    assert run_solution("1.4", root=solved) == 0
    printed = capsys.readouterr().out
    assert ": to do" in printed and "Exercise 1.4, Planning the batch: passed" in printed
    with pytest.raises(ConfigError, match="choose from"):
        run_check(["7.7"], root=root)


def test_run_status_prints_every_exercise(root, capsys):
    assert run_status(root) == 0
    printed = capsys.readouterr().out
    assert all(exercise.title in printed for exercise in known(root).values())
    assert "next: exercises/ch01_single_gpu.py" in printed
