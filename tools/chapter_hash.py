"""Hash what a chapter's outputs come from: its code cells, and what they import.

The build keeps both hashes in a notebook's metadata and executes where one has changed. What is
imported is every module of this repository that the cells reach, with the tables that those read.
Comments, docstrings and blank lines of a module count only inside a function or class whose source
a cell prints: nowhere else can they change an output.
"""

import ast
import hashlib
import io
import re
import tokenize
from collections.abc import Iterable
from functools import cache
from pathlib import Path

from nbformat import NotebookNode

from tools.imports import closure, import_graph, imported, imported_directly

ROOT = Path(__file__).resolve().parent.parent
WITH_TABLES = ("minitron", "teaching")
TABLES = {".csv", ".json", ".toml"}
READS = {
    "teaching.lab.gpu_records": "benchmarks/results/gpu",
    "teaching.lab.large_plans": "benchmarks/results/plans",
}
"""Modules that read tables from outside of the packages, and the folder of these."""


def execution_hashes(notebook: NotebookNode) -> dict[str, str]:
    """Return the hash of a notebook's code "cells", and that of what they import ("imports")."""
    return {"cells": hash_of_cells(notebook), "imports": hash_of_imports(notebook)}


def hash_of_cells(notebook: NotebookNode) -> str:
    return _hash(_code(notebook))


def hash_of_imports(notebook: NotebookNode) -> str:
    """Hash all that the cells reach: modules, printed definitions, tables."""
    cells = _code(notebook)
    printed = {
        word for cell in cells if "show_source(" in cell for word in re.findall(r"\w+", cell)
    }
    modules = reached(name for cell in cells for name in imported(cell))
    parts = _tables(modules)
    for module in sorted(modules):
        shown = _definitions(module)
        parts += [module, _program(module), *(shown[word] for word in sorted(printed & set(shown)))]
    return _hash(parts)


def _code(notebook: NotebookNode) -> list[str]:
    return [cell.source for cell in notebook.cells if cell.cell_type == "code"]


def reached(names: Iterable[str]) -> set[str]:
    """Return the modules of this repository that importing `names` can import, at any depth.

    Imports inside functions count, and so do the packages that a module is in.
    """
    modules = import_graph().modules
    return closure(set(names) & modules, imported_directly) & modules


def _hash(parts: list[str]) -> str:
    # Of hashes, so that no part can pass for the end of another
    each = [hashlib.sha256(part.encode()).digest() for part in parts]
    return hashlib.sha256(b"".join(each)).hexdigest()


def _tables(modules: set[str]) -> list[str]:
    folders = [package for package in WITH_TABLES if package in modules]
    folders += [folder for module, folder in READS.items() if module in modules]
    files = sorted(file for folder in folders for file in (ROOT / folder).rglob("*"))
    return [file.read_text("utf-8") for file in files if file.suffix in TABLES]


@cache
def _read(module: str) -> tuple[str, ast.Module]:
    path = ROOT.joinpath(*module.split("."))
    path = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    text = path.read_text("utf-8")
    return text, ast.parse(text)


@cache
def _program(module: str) -> str:
    """A module's text without comments, docstrings and blank lines.

    Unlike ast.dump, it is the same in every version of Python.
    """
    text, tree = _read(module)
    lines, dropped = text.split("\n"), set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        row, column = token.start
        if token.type == tokenize.COMMENT:
            lines[row - 1] = lines[row - 1][:column].rstrip()
        elif token.type == tokenize.NL and not lines[row - 1].strip():
            dropped.add(row)  # a blank line inside a string is no NL
    for node in ast.walk(tree):
        match node:
            case ast.Expr(value=ast.Constant(), lineno=first, end_lineno=last):
                if not lines[first - 1][: node.col_offset].strip():
                    dropped |= set(range(first, last + 1))
    return "\n".join(line for row, line in enumerate(lines, 1) if row not in dropped)


@cache
def _definitions(module: str) -> dict[str, str]:
    """The whole text of each function and class of a module, by name."""
    text, tree = _read(module)
    lines, found = text.split("\n"), {}
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            own = "\n".join(lines[node.lineno - 1 : node.end_lineno])
            found[node.name] = found.get(node.name, "") + own
    return found
