"""Names of code that slides, exercise statements and hints quote, and that do not exist.

    python tools/quoted_code.py ch06      list them

A name is quoted in backticks, or stands bare and looks like code: with an underscore, with empty
parentheses, or as a member of a module. It must be one of the chapter's code, of the exercises'
solutions (of their code, not of what they say), of the package, of PyTorch or Python, or of an
example that comes with it.
"""

import ast
import re
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import nbformat

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # run as a script, Python looks in tools/ alone

from tools.build_chapters import chapter_sources, notebook_path  # noqa: E402
from tools.chapter_prose import CITED, exists, outputs, paragraphs  # noqa: E402

TICKED = re.compile(r"`([^`\n]+)`")
BARE = re.compile(
    r"(?<![\w./`-])(?:(?:minitron|teaching|torch|nn|F|dist)(?:\.\w+)+"
    r"|(?:[A-Za-z_]\w*\.)*(?:[A-Za-z_]\w*_\w+|[A-Za-z_]\w*(?=\(\)))(?:\.\w+)*)(?:\(\))?"
)
"""In text: segments_for_budget, torch.compile, meter.peak.by_kind, loss.backward()."""
NO_PROSE = re.compile(
    r"```.*?```|\$\$.*?\$\$|\$[^$\n]*\$|^!\[.*?$|^@.*?$", re.DOTALL | re.MULTILINE
)
INTRODUCED = re.compile(
    r"((?:\w+, )*\w+) [-+*/|]?=(?!=)|\bfor ((?:\w+, )*\w+) in\b|\b(?:def|class) (\w+)[(:]"
    r"|\blambda (\w+)|\bas (\w+):|^ {4,}.*?\w\((\w+)\)",
    re.MULTILINE,
)
"""What an example assigns, loops over, defines, or calls a function with."""


def main() -> int:
    problems = 0
    for source in chapter_sources(sys.argv[1:]):
        for problem in unknown_everywhere(source.stem):
            print(f"{source.stem}: {problem}")
            problems += 1
    return problems > 0


def unknown_everywhere(chapter: str) -> Iterator[str]:
    """Yield "where: name" for each name that the chapter's deck, statements and hints make up."""
    solutions = ROOT / "solutions" / f"{chapter}.py"
    own = code_of_chapter(chapter) + code_of(solutions.read_text("utf-8"))
    deck = (ROOT / "slides" / f"{chapter}.md").read_text("utf-8")
    hints = tomllib.loads(solutions.with_suffix(".hints.toml").read_text("utf-8"))

    yield from (f"slides: {name}" for name in unknown_of_deck(deck, own))
    yield from (
        f"statement: {name}"
        for text in statements(solutions.read_text("utf-8"))
        for name in unknown(text, own)
    )
    yield from (
        f"hint {exercise}: {name}"
        for exercise, levels in hints.items()
        for name in unknown("\n".join(levels), own)
    )


def code_of_chapter(chapter: str) -> str:
    """Return a notebook's code, and what it prints."""
    [source] = chapter_sources([chapter])
    notebook = nbformat.read(notebook_path(source), as_version=4)
    return "\n".join(
        f"{cell.source}\n{''.join(outputs(cell))}\n"
        for cell in notebook.cells
        if cell.cell_type == "code"
    )


def code_of(text: str) -> str:
    """Return a module's code without its docstrings and comments."""
    tree = ast.parse(text)
    for node in ast.walk(tree):
        if documented(node):
            node.body = node.body[1:] or [ast.Pass()]
    return ast.unparse(tree)


def documented(node: ast.AST) -> bool:
    return (
        isinstance(node, ast.FunctionDef | ast.ClassDef | ast.Module)
        and ast.get_docstring(node) is not None
    )


def statements(text: str) -> Iterator[str]:
    """Yield what a module says to a learner: a class's docstring with those of its methods."""
    for node in ast.parse(text).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield "\n\n".join(
                ast.get_docstring(each) for each in ast.walk(node) if documented(each)
            )


def unknown_of_deck(deck: str, own: str) -> list[str]:
    """Return the unknown names of a deck's slides and notes; its code blocks count as known."""
    own += "\n".join(re.findall(r"```.*?```", deck, re.DOTALL))
    prose = NO_PROSE.sub("", deck.split("---", 2)[2])
    return [
        name
        for paragraph in paragraphs(prose)
        if not CITED.search(paragraph)  # with a citation, it may be a name of the cited code
        for name in unknown(paragraph, own)
    ]


def unknown(text: str, own: str) -> list[str]:
    """Return the names in a text that neither `own` code nor its own example nor `exists` knows."""
    introduced = set(re.findall(r"\w+", str(INTRODUCED.findall(text))))
    return [
        name
        for name in quoted(text)
        if name not in own and re.split(r"\W", name)[0] not in introduced and not exists(name)
    ]


def quoted(text: str) -> list[str]:
    """Return the names of code in a text, first those in backticks."""
    rest = re.sub(r"`[^`\n]*`|\]\([^)]*\)|https?://\S+", " ", text)
    return [*TICKED.findall(text), *BARE.findall(rest)]


if __name__ == "__main__":
    sys.exit(main())
