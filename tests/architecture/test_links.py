"""Every relative link leads to a file of the repository, and every anchor to a place in it."""

import json
import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)|<(?:a|img)[^>]*?(?:href|src)=\"([^\"]+)\"")


def pages() -> list[Path]:
    """Return the Markdown files and notebooks that git knows."""
    listed = subprocess.run(
        ["git", "ls-files", "*.md", "*.ipynb"], cwd=ROOT, check=True, capture_output=True, text=True
    ).stdout.split()
    return [ROOT / name for name in listed]


def markdown_of(page: Path) -> str:
    """Return a page's Markdown; a notebook's is in its text cells and in what code displays."""
    if page.suffix == ".md":
        return page.read_text("utf-8")
    cells = json.loads(page.read_text("utf-8"))["cells"]
    parts = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "markdown"]
    parts += [
        "".join(output["data"]["text/markdown"])
        for cell in cells
        for output in cell.get("outputs", ())
        if "text/markdown" in output.get("data", ())
    ]
    return "\n\n".join(parts)


def without_code(markdown: str) -> str:
    """Leave out fenced blocks, code between backticks and comments: a link there is none."""
    return re.sub(r"^```.*?^```|`[^`\n]+`|<!--.*?-->", "", markdown, flags=re.DOTALL | re.MULTILINE)


def anchors(page: Path) -> set[str]:
    """Return what can stand after # in a link to this file."""
    text = page.read_text("utf-8")
    if page.suffix != ".md":
        return {f"L{number}" for number in range(1, len(text.splitlines()) + 1)}
    titles = re.findall(r"^#+ (.+)$", re.sub(r"^```.*?^```", "", text, flags=re.S | re.M), re.M)
    slugs = {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}
    return slugs | set(re.findall(r'<a id="([^"]+)">', text))


def broken_links(page: Path) -> list[str]:
    """Return the relative links of a page that lead nowhere."""
    found = []
    for target in (one or other for one, other in LINK.findall(without_code(markdown_of(page)))):
        if re.match(r"[a-z]+:|teaching\.slides\.\w+:|#$", target):
            continue  # an address, a data URL, or a drawing (test_slides.py makes it)
        name, _, anchor = target.partition("#")
        path = (page.parent / name).resolve() if name else page
        if not path.exists() or (anchor and anchor not in anchors(path)):
            found.append(target)
    return found


@pytest.mark.parametrize("page", pages(), ids=lambda page: page.relative_to(ROOT).as_posix())
def test_every_link_leads_somewhere(page):
    assert broken_links(page) == []


def test_a_link_that_leads_nowhere_is_found(tmp_path):
    (tmp_path / "there.md").write_text('# A `b`, c\n\n<a id="d"></a>\n')
    (tmp_path / "code.py").write_text("one\ntwo\n")
    page = tmp_path / "page.md"
    page.write_text(
        "[1](there.md) [2](there.md#a-b-c) [3](there.md#d) [4](code.py#L2) [5](#x)\n"
        "[6](gone.md) [7](there.md#e) [8](code.py#L3) ![9](gone.png) `[10](gone.md)`\n"
        '[11](https://gone.org) <a href="gone.html">12</a>\n\n# X\n'
    )
    assert broken_links(page) == ["gone.md", "there.md#e", "code.py#L3", "gone.png", "gone.html"]
