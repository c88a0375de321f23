"""What the build adds to a chapter's text: links, the way to its neighbors, quoted answers.

A source names what it links to, and the build turns the name into a relative path, which works
on GitHub, in JupyterLab and on a site, from chapters/ and from a learner's copy beside it:

    [`Zero1`](code:minitron.parallel.data.zero.Zero1)   the line that defines it
    [the ring](code:minitron.comm.collectives)          a module
    [chapter 5](chapter:5)     [exercise 6.1](exercise:6.1)     [bucket](word:bucket)

A name that leads nowhere raises LinkError.
"""

import ast
import re
from functools import cache
from pathlib import Path

from nbformat import NotebookNode
from nbformat.v4 import new_markdown_cell

ROOT = Path(__file__).resolve().parent.parent
LINK = re.compile(r"\]\((code|chapter|exercise|word):([^)\s]+)\)")
FOLD = re.compile(r"<details>\s*(<summary>.*?</summary>)(.*?)</details>", re.DOTALL)


class LinkError(Exception):
    """A link of a chapter names what is not there."""


def complete(notebook: NotebookNode, chapter: str) -> None:
    """Resolve the links of a chapter's Markdown cells, quote its folds, link its neighbors."""
    texts = [cell for cell in notebook.cells if cell.cell_type == "markdown"]
    for cell in texts:
        cell.source = FOLD.sub(_quoted, LINK.sub(_target, cell.source))

    way = neighbors(chapter)
    title, *rest = texts[0].source.split("\n", 1)
    texts[0].source = "\n".join([title, "", way, *rest])
    if notebook.cells[-1] is texts[-1]:
        texts[-1].source += f"\n\n{way}"
    else:
        notebook.cells.append(new_markdown_cell(way))


def neighbors(chapter: str) -> str:
    """Return one line of links: the chapter before, exercises, slides, glossary, chapter after."""
    stems = sorted(path.stem for path in (ROOT / "chapters" / "source").glob("ch*.py"))
    links = [
        f"[Exercises](../exercises/{chapter}.py)",
        f"[Slides](../slides/{chapter}.md)",
        "[Glossary](../docs/words.md)",
    ]
    if chapter in stems:
        place = stems.index(chapter)
        if place > 0:
            links.insert(0, f"[← Chapter {place}]({stems[place - 1]}.ipynb)")
        if place + 1 < len(stems):
            links.append(f"[Chapter {place + 2} →]({stems[place + 1]}.ipynb)")
    return " · ".join(links)


def _quoted(fold: re.Match) -> str:
    """Quote what a fold holds: GitHub drops styles, but marks a quotation as JupyterLab does."""
    summary, answer = fold.groups()
    lines = [f"> {line}".rstrip() for line in answer.strip().splitlines()]
    return "\n".join(["<details>" + summary, "", *lines, "", "</details>"])


def _target(match: re.Match) -> str:
    kind, name = match.groups()
    resolve = {"code": code, "chapter": chapter_file, "exercise": exercise, "word": word}[kind]
    return f"]({resolve(name)})"


def code(name: str) -> str:
    """Return the path from a chapter to a module, or to the line that defines a name of it."""
    parts = name.split(".")
    for cut in range(len(parts), 0, -1):
        for path in (Path(*parts[:cut]).with_suffix(".py"), Path(*parts[:cut], "__init__.py")):
            if (ROOT / path).is_file():
                anchor = f"#L{_line(path, parts[cut:])}" if parts[cut:] else ""
                return f"../{path.as_posix()}{anchor}"
    raise LinkError(f"code:{name} is no module of this repository")


def _line(path: Path, names: list[str]) -> int:
    """The line that defines a name, or a member of a class, in a module."""
    body, line = _tree(path).body, 0
    for name in names:
        found = [node for node in body if name in _defined(node)]
        if not found:
            raise LinkError(f"{path} defines no {'.'.join(names)}")
        line, body = found[0].lineno, getattr(found[0], "body", [])
    return line


@cache
def _tree(path: Path) -> ast.Module:
    return ast.parse((ROOT / path).read_text("utf-8"))


def _defined(node: ast.stmt) -> set[str]:
    match node:
        case ast.FunctionDef(name=name) | ast.ClassDef(name=name):
            return {name}
        case ast.Assign(targets=targets):
            return {target.id for target in targets if isinstance(target, ast.Name)}
        case ast.AnnAssign(target=ast.Name(id=name)):
            return {name}
    return set()


def chapter_file(number: str) -> str:
    """Return the file name of the chapter with this number."""
    found = sorted((ROOT / "chapters" / "source").glob(f"ch{int(number):02}_*.py"))
    if not found:
        raise LinkError(f"there is no chapter {number}")
    return f"{found[0].stem}.ipynb"


def exercise(number: str) -> str:
    """Return the path from a chapter to the line where an exercise begins, such as 6.1."""
    chapter = number.split(".")[0]
    stem = Path(chapter_file(chapter)).stem
    path = ROOT / "exercises" / f"{stem}.py"
    for line, text in enumerate(path.read_text("utf-8").splitlines(), 1):
        if re.match(rf"# Exercise {re.escape(number)}\b", text):
            return f"../exercises/{stem}.py#L{line}"
    raise LinkError(f"exercises/{stem}.py has no exercise {number}")


def word(name: str) -> str:
    """Return the path from a chapter to a row of the glossary; `-` stands for a space."""
    anchor = f'<a id="{name}"></a>'
    if anchor not in (ROOT / "docs" / "words.md").read_text("utf-8"):
        raise LinkError(f"docs/words.md has no row {anchor}")
    return f"../docs/words.md#{name}"
