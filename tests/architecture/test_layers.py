"""Imports go one way, the core stays small, the environment is read where it belongs."""

import ast
import tokenize
import tomllib
import warnings
from functools import cache
from itertools import accumulate
from pathlib import Path

import pytest
from importlinter.cli import lint_imports

REPOSITORY = Path(__file__).parents[2]
MODULES = sorted(
    path for package in ("minitron", "teaching") for path in (REPOSITORY / package).rglob("*.py")
)
LONG_FILE = 400
LONGEST_FUNCTION = 50
CORE_TOKENS = 61_000  # of code: words that explain it are not what makes it large
# what the course does not read line by line: instruments, tools, how processes are started, and how
# files of strangers are read
OUTSIDE_THE_CORE = (
    "measure",
    "proof",
    "plan",
    "corpus",
    "hugging_face",
    "launch",
    "system",
    "cli.py",
    "train.py",
    "train_log.py",
    "config/checks.py",
    "config/command_line.py",
    "config/layout.py",
    "pytorch/private.py",
    "running/folder.py",
    "running/memory.py",
    "running/starting.py",
    "checkpoint/storage.py",
    "checkpoint/manifest.py",
)
FSTRING_START, FSTRING_END = (getattr(tokenize, f"FSTRING_{end}", -1) for end in ("START", "END"))
# where a private name of PyTorch may stand, and the private names that are not PyTorch's
PRIVATE_PYTORCH = ("minitron/pytorch/private.py", "minitron/pytorch/__init__.py")
NOT_PYTORCH = {
    "_replace",
    "_asdict",
    "_fields",
    "_exit",
    "_getframe",
    "_current_frames",
    "_forkserver",
    "_forkserver_alive_fd",
    "_repr_mimebundle_",
}
NO_CODE = (
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENCODING,
    tokenize.ENDMARKER,
)
ENVIRONMENT_READERS = (
    "minitron/config/command_line.py",
    "minitron/launch/__init__.py",
    "minitron/launch/rank_process.py",
    "minitron/launch/starting.py",
    "teaching/doctor.py",
)


def name(path: Path) -> str:
    return str(path.relative_to(REPOSITORY))


@cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def test_imports_go_downwards(capfd):
    code = lint_imports(str(REPOSITORY / "pyproject.toml"), no_cache=True)
    assert code == 0, capfd.readouterr().out


def test_no_import_between_layers_is_excused():
    configuration = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())
    for contract in configuration["tool"]["importlinter"]["contracts"]:
        excused = contract.get("ignore_imports", [])
        assert not excused or contract["type"] == "forbidden", f"{contract['name']}: {excused}"


def test_a_file_is_split_by_meaning():
    """No limit: a file that has several subjects is split, and a long one is looked at."""
    for path in MODULES:
        lines = len(path.read_text().splitlines())
        if lines > LONG_FILE:
            warnings.warn(f"{name(path)} has {lines} lines: is it one subject?", stacklevel=1)


def test_a_function_fits_on_a_screen():
    found = [
        f"{name(path)}:{node.lineno} {node.name}: {lines} lines below its docstring"
        for path in MODULES
        for node in ast.walk(parsed(path))
        if isinstance(node, ast.FunctionDef)
        if (lines := lines_below_docstring(node)) > LONGEST_FUNCTION
    ]
    assert not found, "\n".join(found)


def lines_below_docstring(function: ast.FunctionDef) -> int:
    body = function.body[1:] if ast.get_docstring(function) else function.body
    return function.end_lineno - body[0].lineno + 1 if body else 1


def test_the_core_stays_small():
    outside = [REPOSITORY / "minitron" / part for part in OUTSIDE_THE_CORE]
    core = [
        path
        for path in (REPOSITORY / "minitron").rglob("*.py")
        if not {path, *path.parents} & set(outside)
    ]
    assert len(core) > 5
    assert sum(map(count_tokens, core)) <= CORE_TOKENS


def count_tokens(path: Path) -> int:
    """Tokens of Python without docstrings and comments: names, numbers, operators, strings."""
    docstrings = {
        (node.lineno, node.col_offset)
        for node in ast.walk(parsed(path))
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    }
    with path.open("rb") as file:
        tokens = [
            token
            for token in tokenize.tokenize(file.readline)
            if token.type not in NO_CODE and token.start not in docstrings
        ]
    # From Python 3.12 on an f-string is many tokens: count the outermost one as one, as before.
    depths = accumulate(
        (token.type == FSTRING_START) - (token.type == FSTRING_END) for token in tokens
    )
    return sum(depth == 0 for depth in depths)


def test_no_hidden_state():
    """No default process group and no environment below the command line, no star imports."""
    found = [
        f"{name(path)}: {word}"
        for path in MODULES
        for word in hidden_state(parsed(path))
        if word != "os.environ" or name(path) not in ENVIRONMENT_READERS
    ]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    "code",
    [
        "dist.get_rank()",
        "world = torch.distributed.get_world_size",
        "os.getenv('RANK')",
        "os.environ['RANK']",
        "from torch.distributed import get_rank",
        "from minitron.cost import *",
    ],
)
def test_hidden_state_is_found(code):
    assert hidden_state(ast.parse(code))


def hidden_state(tree: ast.AST) -> list[str]:
    found = []
    for node in ast.walk(tree):
        match node:
            case ast.Attribute(attr="get_rank" | "get_world_size" | "getenv"):
                found.append(ast.unparse(node))
            case ast.Attribute(value=ast.Name(id="os"), attr="environ"):
                found.append("os.environ")
            case ast.ImportFrom():
                names = {alias.name for alias in node.names}
                found += names & {"*", "get_rank", "get_world_size"}
    return found


def test_private_names_of_pytorch_are_used_in_one_module():
    found = {
        name(path): names
        for path in MODULES
        if name(path) not in PRIVATE_PYTORCH
        if (names := private_names(parsed(path)))
    }
    assert found == {}, "ask minitron.pytorch.private"


@pytest.mark.parametrize(
    "code",
    [
        "from torch._subclasses.fake_tensor import FakeTensor",
        "import torch._dynamo as dynamo",
        "from torch.utils._pytree import tree_leaves",
        "import torch.distributed.distributed_c10d",
        "from torch.testing._internal import common_utils",
        "x = dist.distributed_c10d.all_reduce",
        "torch._foreach_mul_(grads, 2)",
        "c10d._allgather_base_.default",
        "node._sequence_nr()",
        "importlib.import_module('torch._dynamo')",
        "from torch.distributed import _tensor",
        "def _should_skip_dynamo(cls): return False",
        "torch.ops.inductor.resize_storage_bytes_",
    ],
)
def test_a_private_name_is_found(code):
    assert private_names(ast.parse(code))


def test_own_private_names_and_those_of_python_are_none():
    code = "self._exits; cls._made; action._replace(stage=1); os._exit(1); x.__class__"
    assert not private_names(ast.parse(code))


def private_names(tree: ast.AST) -> list[str]:
    """What a module uses that PyTorch may change, as far as its text tells."""
    found = []
    for node in ast.walk(tree):
        match node:
            case ast.ImportFrom(module=str(module)):
                names = [f"{module}.{alias.name}" for alias in node.names]
                found += [name for name in names if is_private_path(name)]
            case ast.Import():
                found += [alias.name for alias in node.names if is_private_path(alias.name)]
            case ast.Constant(value=str(text)) if " " not in text and is_private_path(text):
                found.append(text)
            case ast.Attribute(attr="distributed_c10d" | "inductor"):
                found.append(ast.unparse(node))
            case ast.Attribute(value=ast.Name(id="self" | "cls")):
                pass
            case ast.Attribute(attr=attr) if is_private(attr) and attr not in NOT_PYTORCH:
                found.append(ast.unparse(node))
            case ast.FunctionDef(name="_should_skip_dynamo" | "_source_rank"):
                found.append(node.name)
    return found


def is_private(word: str) -> bool:
    return word.startswith("_") and not word.startswith("__") or word == "distributed_c10d"


def is_private_path(path: str) -> bool:
    root, *words = path.split(".")
    return root == "torch" and any(map(is_private, words))
