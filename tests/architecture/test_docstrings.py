"""The docstring of a public function says what it does: it opens with a verb, "Return the ..."."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
NO_VERBS = set("""
a an the this that these those it its they their our ours we i there here such same other another
what which whether how who whose where when why while in of for from by to with without at on as
about beside between inside under over after before during until since if and or but then also not
all any both each every either few fewer less many more most much no none only several some
one two three four first second third last next lowest highest least smaller larger true false
number latency entropy token shape category hardware mean value size kind pair idle mwh flop
""".split())


def opens_with_a_verb(docstring: str) -> bool:
    """By its first word: a capitalized one, no plural or "Returns", and not of `NO_VERBS`."""
    word = docstring.split()[0].rstrip(".,:;")
    is_plural = word.endswith("s") and not word.endswith("ss")
    is_word = re.fullmatch("[A-Z][a-z]+", word) is not None
    return is_word and not is_plural and word.lower() not in NO_VERBS


def public_functions(node: ast.AST, prefix: str) -> Iterator[tuple[str, ast.FunctionDef]]:
    """Functions of a module and methods of its classes; a property is named like what it is."""
    for child in node.body:
        name = f"{prefix}.{getattr(child, 'name', '')}"
        if isinstance(child, ast.ClassDef) and not child.name.startswith("_"):
            yield from public_functions(child, name)
        elif isinstance(child, ast.FunctionDef) and not child.name.startswith("_"):
            if not any("property" in ast.unparse(each) for each in child.decorator_list):
                yield name, child


@pytest.mark.parametrize("folder", sorted(
    str(path.relative_to(ROOT)) for path in (ROOT / "minitron").iterdir()
    if path.suffix == ".py" or (path / "__init__.py").exists()))
def test_docstrings_of_public_functions_open_with_a_verb(folder):
    path = ROOT / folder
    found = []
    for file in [path] if path.is_file() else path.rglob("*.py"):
        for name, function in public_functions(ast.parse(file.read_text()), file.stem):
            docstring = ast.get_docstring(function)
            if docstring and not opens_with_a_verb(docstring):
                found.append(f"{file.relative_to(ROOT)}:{function.lineno} {name}: {docstring[:60]}")
    assert not found, "\n".join(found)


@pytest.mark.parametrize("docstring, is_right", [
    ("Return the bytes.", True), ("Sum gradients.", True), ("Pass it on.", True),
    ("Returns the bytes.", False), ("The bytes.", False), ("Bytes of a ring.", False),
    ("What is told of a rank.", False), ("(N-1) (alpha + n).", False), ("Whether it fits.", False),
])
def test_a_verb_is_known_by_what_it_is_not(docstring, is_right):
    assert opens_with_a_verb(docstring) == is_right
