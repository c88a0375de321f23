"""What imports what in this repository, found by reading: nothing is imported to find out."""

import ast
import re
from collections.abc import Callable, Iterable
from functools import cache

import grimp

PACKAGES = ("minitron", "teaching", "tests", "tools")


@cache
def import_graph() -> grimp.ImportGraph:
    """Return the modules of PACKAGES and the imports among them, those inside functions too."""
    return grimp.build_graph(*PACKAGES, cache_dir=None)


def imported(code: str) -> set[str]:
    """Return the modules that code or a notebook's cell imports; of `from a import b` a and a.b."""
    found = set()
    for node in ast.walk(parse_cell(code)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return found


def parse_cell(source: str) -> ast.Module:
    """Parse a cell without its magics and shell commands."""
    return ast.parse(without_magics(source))


def without_magics(source: str) -> str:
    return re.sub(r"^[%!].*$", "pass", source, flags=re.MULTILINE)


def packages_of(module: str) -> set[str]:
    """Return the packages that Python imports before `module`."""
    parts = module.split(".")
    return {".".join(parts[:length]) for length in range(1, len(parts))}


def imported_directly(module: str) -> set[str]:
    """Return what a module of PACKAGES imports, with the packages it is in."""
    return import_graph().find_modules_directly_imported_by(module) | packages_of(module)


def closure(starts: Iterable[str], edges: Callable[[str], Iterable[str]]) -> set[str]:
    """Return the starts and all that can be reached from them."""
    found: set[str] = set()
    pending = list(starts)
    while pending:
        name = pending.pop()
        if name not in found:
            found.add(name)
            pending += edges(name)
    return found
