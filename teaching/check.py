"""Check exercises: each is graded in a process of its own, so nothing in it can harm this one.

An endless loop, exit(), a crash or a syntax error gives a sentence like any wrong answer does.
In a notebook, `check("1.2")` shows a report; on the command line it is `minitron check 1.2`.

Read in this order: Result, Report, check, status, solution, then the process.
"""

import html
import json
import os
import signal
import subprocess
import sys
import textwrap
import threading
from contextlib import suppress
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

from minitron.config import require
from minitron.launch.descendants import kill_descendants
from teaching import records
from teaching.exercises import (
    BEGIN,
    END,
    ROOT,
    Exercise,
    Text,
    find,
    is_stub,
    read_exercises,
    select,
)
from teaching.graders import LIMIT_SECONDS, Verdict
from teaching.wrapping import fill

LONGEST_SECONDS = 900.0
"""By the wall clock, for the whole of a grading; the limits that matter are of CPU time."""
LONGEST_VERDICT = 100_000
PRINTED_CHARACTERS = 600
WORDS = {"passed": "passed", "failed": "not yet", "unsolved": "to do"}
COLORS = {"passed": "#009E73", "failed": "#D55E00", "unsolved": "#999999"}


@dataclass(frozen=True)
class Result:
    """How one exercise stands, and what to do next."""

    exercise: Exercise
    verdict: Verdict
    printed: str = ""
    is_missing: bool = False
    """Whether there is no file to grade."""
    is_unwritten: bool = False
    """Whether the file still holds the stub."""

    @property
    def passed(self) -> bool:
        return self.verdict.state == "passed"

    @property
    def next(self) -> str:
        number, file = self.exercise.id, self.exercise.file
        if self.is_missing:
            return f"minitron reset {number} brings {file} back, with the stub"
        if self.passed:
            return f"{_how_to_use(self.exercise)}minitron solution {number} shows ours"
        return f"edit {file}, then minitron check {number}; stuck? minitron hint {number}"

    def __str__(self) -> str:
        head = f"Exercise {self.exercise}: {WORDS[self.verdict.state]}"
        rows = {
            "asked": self.verdict.asked,
            "seen": self.verdict.seen,
            "likely": self.verdict.likely,
            "printed": self.printed,
            "next": self.next,
        }
        return "\n".join([head, *(_row(name, text) for name, text in rows.items() if text)])


def _how_to_use(exercise: Exercise) -> str:
    """How the package comes to run what passed, if it replaces anything."""
    if exercise.command:
        mine = "yours" if exercise.trained == exercise.names else f"your {exercise.trained[0]}"
        return f"{exercise.command} trains with {mine}; "
    if exercise.replaces:
        return f'with use("{exercise.id}"): the package calls yours; '
    return ""


def _row(name: str, text: str) -> str:
    wrapped = [fill(line, 86) for line in text.splitlines() if line.strip()]
    return textwrap.indent("\n".join(wrapped), " " * 11).replace(" " * 11, f"  {name:9}", 1)


@dataclass(frozen=True)
class Report:
    """The results of one or several exercises; a notebook shows it in color."""

    results: tuple[Result, ...]

    @property
    def passed(self) -> bool:
        return all(result.passed for result in self.results)

    def __repr__(self) -> str:
        return "\n\n".join(text for _, text in self.parts())

    def _repr_html_(self) -> str:
        return "".join(
            f'<pre style="border-left: 4px solid {COLORS[state]}; '
            f'padding-left: 8px">{html.escape(text)}</pre>'
            for state, text in self.parts()
        )

    def parts(self) -> list[tuple[str, str]]:
        """State and text of each exercise that has been tried; all others share one short list."""
        unwritten = [each for each in self.results if each.is_unwritten]
        if len(unwritten) < 2:
            return [(each.verdict.state, str(each)) for each in self.results]
        tried = [(each.verdict.state, str(each)) for each in self.results if not each.is_unwritten]
        return [*tried, ("unsolved", _to_do(unwritten))]


def _to_do(unwritten: list[Result]) -> str:
    """What is not written yet, a line for each chapter, and where to begin."""
    files = groupby(unwritten, key=lambda result: result.exercise.file)
    lines = [
        f"  {', '.join(each.exercise.id for each in of_file):28}  {file}" for file, of_file in files
    ]
    return "\n".join(["Not written yet:", *lines, _row("next", unwritten[0].next)])


def check(*ids: str, root: Path = ROOT, timeout: float = LIMIT_SECONDS) -> Report:
    """Grade exercises ("1.2"), a chapter ("1"), or all: what the files say now.

    `timeout` is in seconds of CPU time, for each. Raises ConfigError for an unknown id, and nothing
    for whatever the learner's file does.
    """
    selected = select(list(ids), root)
    return Report(
        tuple(_check(exercise, root, timeout, announced=len(selected) > 1) for exercise in selected)
    )


def run_check(ids: list[str], root: Path = ROOT) -> int:
    """`minitron check 1.2`: print the report; exit code 0 if everything passed, else 1."""
    report = check(*ids, root=root)
    print(report)
    return 0 if report.passed else 1


def status(root: Path = ROOT) -> Text:
    """List every exercise with how it stands, read from the files; only edited ones are graded.

    Each one that is graded is named on standard error, for that takes seconds.
    """
    results = [_result(exercise, root) for exercise in select([], root)]
    lines = [
        f"{r.exercise.id:5} {WORDS[r.verdict.state]:8} {r.exercise.title:32} "
        f"{r.exercise.minutes} min, difficulty {r.exercise.difficulty}"
        for r in results
    ]
    lines.append(f"{sum(r.passed for r in results)} of {len(results)} passed")
    todo = [r for r in results if not r.passed]
    if todo and todo[0].is_missing:
        lines.append(f"next: {todo[0].next}")
    elif todo:
        first = todo[0].exercise
        lines.append(f"next: {first.file}, then minitron check {first.id}")
    return Text("\n".join(lines))


def run_status(root: Path = ROOT) -> int:
    """`minitron status`: print the list; exit code 0."""
    print(status(root))
    return 0


def solution(exercise_id: str, give_up: bool = False, root: Path = ROOT) -> Text:
    """The course's own answer: after a pass, or to one who gives up. Raises ConfigError before."""
    exercise = find(exercise_id, root)
    require(
        give_up or _result(exercise, root).passed,
        f"exercise {exercise} has not passed: run minitron check {exercise.id}, get a hint with "
        f"minitron hint {exercise.id}, or give up with minitron solution {exercise.id} --give-up",
    )
    text = (root / exercise.solution_file).read_text(encoding="utf-8")
    starts = {e.id: text.index(f"# Exercise {e.id} |") for e in read_exercises(text, "")}
    stop = min((s for s in starts.values() if s > starts[exercise.id]), default=len(text))
    lines = text[starts[exercise.id] : stop].rstrip().splitlines()
    return Text("\n".join(line for line in lines if line.strip() not in (BEGIN, END)))


def run_solution(exercise_id: str, give_up: bool = False, root: Path = ROOT) -> int:
    """`minitron solution 1.2 [--give-up]`: print the answer; exit code 0."""
    print(solution(exercise_id, give_up, root))
    return 0


# What is known already: results by the hash of all that decides them


def _result(exercise: Exercise, root: Path) -> Result:
    record = records.read("checks", _is_record, root).get(exercise.id)
    is_known = record is not None and not is_stub(exercise, root)
    if is_known and record["key"] == records.key_of(exercise, root):
        return Result(exercise, Verdict(record["state"]))
    return _check(exercise, root, LIMIT_SECONDS, announced=True)


def _is_record(value) -> bool:
    return (
        isinstance(value, dict)
        and isinstance(value.get("key"), str)
        and value.get("state") in ("passed", "failed", "unsolved")
    )


def _keep(exercise: Exercise, key: str, state: str, root: Path) -> None:
    known = records.read("checks", _is_record, root)
    records.write("checks", known | {exercise.id: {"key": key, "state": state}}, root)


# The process


def _check(exercise: Exercise, root: Path, timeout: float, announced: bool = False) -> Result:
    root = root.resolve()  # the process runs in another folder
    if not (root / exercise.file).is_file():
        return Result(
            exercise,
            Verdict("failed", seen=f"there is no file {exercise.file}", likely="moved or deleted"),
            is_missing=True,
        )
    if is_stub(exercise, root):
        return Result(
            exercise, Verdict("unsolved", seen=f"{exercise.file} holds the stub"), is_unwritten=True
        )
    if announced:
        print(f"checking {exercise} ...", file=sys.stderr, flush=True)
    key = records.key_of(exercise, root)
    code, verdict, printed = _run_grader(exercise, root, timeout)
    try:
        verdict = Verdict(**json.loads(verdict))
    except (TypeError, ValueError, RecursionError):
        return Result(exercise, _verdict_on_death(code), printed)
    if verdict.state == "passed" or timeout >= LIMIT_SECONDS:  # or more time may let it pass
        _keep(exercise, key, verdict.state, root)
    return Result(exercise, verdict, printed)


def _run_grader(exercise: Exercise, root: Path, timeout: float) -> tuple[int | None, str, str]:
    """The grader's exit code, None if it took too long; its verdict; what the learner printed."""
    command = [sys.executable, "-m", "teaching.judge", exercise.id, str(root), str(timeout)]
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )
    verdict, printed = bytearray(), bytearray()
    readers = [
        threading.Thread(target=_drain, args=row, daemon=True)
        for row in (
            (process.stdout, verdict, LONGEST_VERDICT),
            (process.stderr, printed, 4 * PRINTED_CHARACTERS),
        )
    ]
    for reader in readers:
        reader.start()
    code = None
    try:
        code = process.wait(LONGEST_SECONDS)
    except subprocess.TimeoutExpired:
        pass
    finally:  # also after Ctrl-C
        _end(process)
        for reader in readers:
            reader.join(timeout=5)
    return code, verdict.decode(errors="replace"), _shorten(bytes(printed))


def _end(process: subprocess.Popen) -> None:
    """Kill the process and whatever the learner's code has started in it."""
    if hasattr(os, "killpg"):
        with suppress(ProcessLookupError, PermissionError):  # macOS says the second of a zombie
            os.killpg(process.pid, signal.SIGKILL)
    else:
        kill_descendants(process.pid)  # Windows has no process groups of this kind
        process.kill()
    process.wait()


def _drain(pipe, kept: bytearray, most: int) -> None:
    # keep the beginning, read on to the end: a flood of prints must neither block nor fill memory
    while chunk := pipe.read1(1 << 16):
        kept += chunk[: most - len(kept)]
    pipe.close()


def _shorten(printed: bytes) -> str:
    text = printed.decode(errors="replace").strip()
    shown = "\n".join(text[:PRINTED_CHARACTERS].splitlines()[:8])
    return shown if shown == text else f"{shown}\n... and more"


def _verdict_on_death(code: int | None) -> Verdict:
    """What to say when the grader ended, or was ended, without a verdict."""
    if code is None:
        return Verdict(
            "failed",
            seen=f"not graded within {LONGEST_SECONDS:g} s",
            likely="this machine is too busy, or the grader hangs: run it again",
        )
    return Verdict(
        "failed",
        seen=f"the grader itself ended with exit code {code}",
        likely="out of memory, or a fault in the course: what it printed says more",
    )
