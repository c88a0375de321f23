"""Imports go one way, files stay small, the environment is read where it belongs."""

import ast
import tokenize
from pathlib import Path

import pytest
from importlinter.cli import lint_imports

REPOSITORY = Path(__file__).parents[2]
MODULES = sorted(path for package in ("minitron", "teaching")
                 for path in (REPOSITORY / package).rglob("*.py"))
LONGEST_FILE = 300
LONGEST_FUNCTION = 40
CORE_LINES = 4880  # of code: words that explain it are not what makes it large
# what the course does not read line by line: instruments, tools, how processes are started, and how
# files of strangers are read
OUTSIDE_THE_CORE = ("measure", "proof", "plan", "corpus", "hugging_face", "launch", "system",
                    "cli.py", "train_log.py", "config/checks.py", "config/command_line.py",
                    "config/layout.py", "running/folder.py", "running/memory.py",
                    "running/starting.py", "checkpoint/storage.py", "checkpoint/manifest.py")
NO_CODE = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT,
           tokenize.ENCODING, tokenize.ENDMARKER)
ENVIRONMENT_READERS = (
    "minitron/config/command_line.py", "minitron/launch/__init__.py",
    "minitron/launch/rank_process.py", "teaching/doctor.py",
)


def name(path: Path) -> str:
    return str(path.relative_to(REPOSITORY))


def test_imports_go_downwards(capfd):
    code = lint_imports(str(REPOSITORY / "pyproject.toml"), no_cache=True)
    assert code == 0, capfd.readouterr().out


@pytest.mark.parametrize("path", MODULES, ids=name)
def test_a_file_is_read_in_one_sitting(path):
    tree = ast.parse(path.read_text())
    assert len(path.read_text().splitlines()) <= LONGEST_FILE
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef):
            body = node.body[1:] if ast.get_docstring(node) else node.body
            lines = node.end_lineno - body[0].lineno + 1 if body else 1
            assert lines <= LONGEST_FUNCTION, f"{node.name}: {lines} lines under its docstring"


def test_the_core_stays_small():
    outside = [REPOSITORY / "minitron" / part for part in OUTSIDE_THE_CORE]
    core = [path for path in (REPOSITORY / "minitron").rglob("*.py")
            if not {path, *path.parents} & set(outside)]
    assert len(core) > 5
    assert sum(map(count_code_lines, core)) <= CORE_LINES


def count_code_lines(path: Path) -> int:
    """Lines without docstrings, comments and blank lines."""
    tree = ast.parse(path.read_text())
    docstrings = [range(node.lineno, node.end_lineno + 1) for node in ast.walk(tree)
                  if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)]
    with path.open("rb") as file:
        tokens = [token for token in tokenize.tokenize(file.readline) if token.type not in NO_CODE]
    lines = {line for token in tokens for line in range(token.start[0], token.end[0] + 1)}
    return len(lines.difference(*docstrings) - {0})


@pytest.mark.parametrize("path", MODULES, ids=name)
def test_no_hidden_state(path):
    """No default process group and no environment below the command line, no star imports."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Attribute):
            called = ast.unparse(node)
            assert called.split(".")[-1] not in ("get_rank", "get_world_size", "getenv")
            if called == "os.environ":
                assert name(path) in ENVIRONMENT_READERS
        if isinstance(node, ast.ImportFrom):
            assert not {alias.name for alias in node.names} & {"*", "get_rank", "get_world_size"}
