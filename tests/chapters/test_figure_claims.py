"""A figure of a measurement says what it shows under a condition: teaching.claims.claim.

Chapters 1 to 3 so far. A figure without a claim is listed below, with the reason why it needs none.
"""

import ast
import importlib.util
import inspect
import sys
import textwrap
from types import FunctionType, ModuleType

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_notebook, new_output

from teaching.claims import claim
from tools import build_chapters
from tools.committed import committed_text
from tools.imports import without_magics

COMPUTED = "computed from the model's shape or a formula"
RECORDED = "a committed record, whose caption is computed from it"
WITHOUT = {
    "ch01": {
        "figure-schedule": COMPUTED,
        "recorded.matmul_roofline": RECORDED,
        "recorded.mfu": RECORDED,
    },
    "ch02": {
        "figure-question": COMPUTED,
        "figure-calculator": COMPUTED,
        "recorded.two_steps": RECORDED,
    },
    "ch03": {"recorded.recomputation": RECORDED},
}


def figures_without(notebook) -> set[str]:
    """Return the names of the cells with an image in which nothing is claimed."""
    names, found = {}, set()
    for cell in notebook.cells:
        if cell.cell_type != "code":
            continue
        tree = ast.parse(without_magics(cell.source))
        for node in ast.walk(tree):
            if isinstance(node, ast.Import | ast.ImportFrom):
                exec(ast.unparse(node), names)
        if any("image/png" in output.get("data", {}) for output in cell.outputs):
            if not claims(tree, names, set()):
                found.add(name_of(cell, tree))
    return found


def name_of(cell, tree: ast.AST) -> str:
    """Return a figure's tag, or the record that it shows, or its first line."""
    tags = [tag for tag in cell.metadata.get("tags", []) if tag.startswith("figure-")]
    calls = [ast.unparse(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call)]
    records = [call for call in calls if call.startswith("recorded.")]
    return [*tags, *records, cell.source.splitlines()[0]][0]


def claims(tree: ast.AST, names: dict, seen: set) -> bool:
    """Return whether code calls `claim` with a condition, itself or in a teaching helper."""
    for call in ast.walk(tree):
        if not isinstance(call, ast.Call):
            continue
        called = value_of(call.func, names)
        if called is claim and not isinstance(call.args[0], ast.Constant):
            return True
        if isinstance(called, FunctionType) and called.__module__.startswith("teaching."):
            called = inspect.unwrap(called)
            if called is not claim and called not in seen:
                seen.add(called)
                helper = ast.parse(textwrap.dedent(inspect.getsource(called)))
                if claims(helper, called.__globals__, seen):
                    return True
    return False


def value_of(node: ast.AST, names: dict) -> object:
    """Return what a name, or an attribute of a module, stands for; None if that is unknown."""
    if isinstance(node, ast.Name):
        return names.get(node.id)
    if isinstance(node, ast.Attribute):
        module = value_of(node.value, names)
        return getattr(module, node.attr, None) if isinstance(module, ModuleType) else None
    return None


@pytest.mark.parametrize("chapter", WITHOUT)
def test_a_figure_of_a_measurement_claims_under_a_condition(chapter):
    [source] = build_chapters.chapter_sources([chapter])
    text = committed_text(build_chapters.notebook_path(source))
    assert figures_without(nbformat.reads(text, as_version=4)) == set(WITHOUT[chapter])


IMPORTS = "from teaching.claims import claim\nfrom teaching.figures import curves, show\n"
HELPERS = """
from teaching.claims import claim

def outer():
    return inner(1)

def inner(x):
    return claim(x > 0, "It grows.")
"""
DRAW = "show(curves([0, 1], {'a': [1, 2]}, 'x', 'y'), alt="


@pytest.mark.parametrize(
    ("source", "claimed"),
    [
        (f"{IMPORTS}{DRAW}'It grows.')", False),
        (f"{IMPORTS}{DRAW}claim(2 > 1, 'It grows.'))", True),
        (f"{IMPORTS}{DRAW}claim(True, 'It grows.'))", False),
        ("from teaching.lab import ch04\nch04.explained({}, {}, {}, {})", True),
        ("from teaching.two import outer\nouter()", True),
        ("from teaching.lab.ch03 import frontier\nfrontier([1], [1], [1], [1])", False),
    ],
)
def test_a_claim_is_found_in_the_cell_or_in_what_it_calls(source, claimed, tmp_path, monkeypatch):
    helpers = tmp_path / "two.py"
    helpers.write_text(HELPERS)
    spec = importlib.util.spec_from_file_location("teaching.two", helpers)
    monkeypatch.setitem(sys.modules, "teaching.two", importlib.util.module_from_spec(spec))
    spec.loader.exec_module(sys.modules["teaching.two"])
    cell = new_code_cell(source, outputs=[new_output("display_data", {"image/png": ""})])
    cell.metadata["tags"] = ["figure-it"]
    assert figures_without(new_notebook(cells=[cell])) == (set() if claimed else {"figure-it"})
