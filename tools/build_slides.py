"""Build every slides/*.md deck into one self-contained HTML file and a PDF under slides/build/.

    python tools/build_slides.py            every deck
    python tools/build_slides.py ch01       the decks whose name starts so
    python tools/build_slides.py --images   also one PNG a slide, to look at them

A deck's figures are those of its chapter, written by build_chapters.py, and
`![w:900 alt](teaching.slides.ch02:function)`, which that function draws. A line `@source
module:function` puts the package's code on the slide, `@output NAME` what the chapter's cell tagged
"output-NAME" has printed: nothing is copied by hand. Chapters are read as git has them, since
somebody may have run or cleared the working notebooks in JupyterLab.

Needs Node 18 or newer (Marp is installed into slides/node_modules on first use) and a Chromium for
the PDF: CHROME_PATH, else one found on the system, else Debian's package when run as root there.
"""

import argparse
import ast
import base64
import inspect
import json
import os
import re
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path
from pkgutil import resolve_name

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # run as a file, not with -m

from teaching.figures_style import png  # noqa: E402
from tools.committed import text_in_git  # noqa: E402

ROOT = Path(__file__).resolve().parent.parent
SLIDES = ROOT / "slides"
BUILD = SLIDES / "build"
MARP = SLIDES / "node_modules" / ".bin" / "marp"
BROWSERS = (
    "chromium",
    "chromium-browser",
    "google-chrome",
    "google-chrome-stable",
    "/Applications/Google Chrome.app/Contents/MacOS/Google Chrome",
    "/Applications/Chromium.app/Contents/MacOS/Chromium",
)
CODE_COLUMNS = 66
"""What fits on a slide at theme.css's size for code, which is legible from the last row."""
# What a browser would fetch; a link to click on (a paper, say) is none of these.
LOADED = re.compile(
    r"""<(?:img|script|iframe|source|video|image)\b[^>]*?\b(?:src|href)\s*=\s*["']?https?:[^\s>]*"""
    r"""|<link\b[^>]*?\bhref\s*=\s*["']?https?:[^\s>]*"""
    r"""|url\(\s*["']?https?:[^)]*|@import\s+["']https?:[^"']*""",
    re.IGNORECASE,
)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", help="beginnings of deck names; none: every deck")
    parser.add_argument("--images", action="store_true", help="also write one PNG a slide")
    arguments = parser.parse_args()

    decks = [
        deck
        for deck in sorted(SLIDES.glob("*.md"))
        if not arguments.names or deck.stem.startswith(tuple(arguments.names))
    ]
    if not decks:
        sys.exit(f"no deck is named {' or '.join(arguments.names)} in {SLIDES.name}/")

    install_marp()
    browser = find_browser()
    for deck in decks:
        html = build_deck(deck, browser, arguments.images)
        print(f"{html.relative_to(ROOT)} and .pdf")
    return 0


class SlideError(Exception):
    """A slide asks for what its chapter or the package does not have; the message says which."""


def build_deck(deck: Path, browser: str, images: bool) -> Path:
    """Write the deck's HTML and PDF, and PNGs if asked; returns the HTML's path."""
    source = complete(deck)
    html = write_html(source, deck.stem, browser)
    marp(source, browser, "--pdf", "--pdf-outlines", "--output", html.with_suffix(".pdf"))
    if images:
        folder = BUILD / deck.stem
        folder.mkdir(exist_ok=True)
        marp(source, browser, "--images", "png", "--output", folder / "slide.png")
    return html


def complete(deck: Path) -> str:
    """Return the deck's Markdown with sources, outputs and images in it."""
    try:
        notebook = read_notebook(ROOT / "chapters" / f"{deck.stem}.ipynb")
        markdown = insert_outputs(insert_sources(deck.read_text()), notebook)
    except SlideError as error:
        sys.exit(f"slides/{deck.name}: {error}")
    return inline_images(markdown, deck.parent)


def write_html(source: str, name: str, browser: str = "") -> Path:
    """Write a completed deck's HTML, which no browser is needed for, and return its path."""
    BUILD.mkdir(exist_ok=True)
    html = BUILD / f"{name}.html"
    marp(source, browser, "--output", html)
    resource = first_remote_resource(html.read_text())
    if resource:
        sys.exit(f"{html.name} would load {resource}: put the file into slides/assets")
    return html


def read_notebook(path: Path) -> dict:
    """The notebook as git has it; says so where the working file, or no git, makes a difference."""
    name = path.relative_to(ROOT)
    text, working = text_in_git(path), path.read_text() if path.is_file() else None
    if text is None and working is None:
        raise SlideError(f"{name} is missing: run `make chapters`")
    if text is None:
        print(f"{name}: not in git, so the working file is used", file=sys.stderr)
    elif text != working:
        print(
            f"{name}: the committed version is used, not the changed working file "
            "(`git add` it to use that one)",
            file=sys.stderr,
        )
    try:
        return json.loads(working if text is None else text)
    except ValueError as error:
        raise SlideError(f"{name} is no notebook: {error}") from None


def insert_sources(markdown: str) -> str:
    """Replace each line `@source minitron.step:train_step` by that function's code.

    The docstring is left out, and so are the types and defaults of its parameters: on a slide the
    speaker says what they are. Raises SlideError.
    """

    def insert(match: re.Match) -> str:
        try:
            code = textwrap.dedent(inspect.getsource(resolve_name(match[1])))
        except (ImportError, AttributeError, ValueError) as error:
            raise SlideError(f"{_slide(match)}: no source of {match[1]}: {error}") from None
        function = ast.parse(code).body[0]
        lines = code.splitlines()
        if ast.get_docstring(function) is not None:
            names = names_of(function.args)
            lines[: function.body[0].end_lineno] = [f"def {function.name}({names}):"]
        return "\n".join(["```python", *narrow(lines), "```"])

    return re.sub(r"^@source (\S+)$", insert, markdown, flags=re.MULTILINE)


def narrow(lines: list[str]) -> list[str]:
    """Break code and comments as `ruff format` would if lines had CODE_COLUMNS columns."""
    wrapped = []
    for line in lines:
        indent, mark, comment = line.partition("# ")
        if mark and not indent.strip():
            options = {"initial_indent": f"{indent}# ", "subsequent_indent": f"{indent}# "}
            wrapped += textwrap.wrap(comment, CODE_COLUMNS, **options)
        else:
            wrapped.append(line)
    command = [sys.executable, "-m", "ruff", "format", "--line-length", str(CODE_COLUMNS), "-"]
    done = subprocess.run(
        command, input="\n".join(wrapped), text=True, capture_output=True, check=True
    )
    return done.stdout.splitlines()


def names_of(parameters: ast.arguments) -> str:
    """Write parameters without types and defaults: "model, *tensors"."""
    parameters.defaults, parameters.kw_defaults = [], [None] * len(parameters.kwonlyargs)
    for node in ast.walk(parameters):
        if isinstance(node, ast.arg):
            node.annotation = None
    return ast.unparse(parameters)


def insert_outputs(markdown: str, notebook: dict) -> str:
    """Replace each line `@output trap` by what the cell tagged "output-trap" has printed.

    Raises SlideError for a cell that is missing, failed or has printed nothing.
    """

    def insert(match: re.Match) -> str:
        tag = f"output-{match[1]}"
        for position, cell in enumerate(notebook["cells"]):
            if tag in cell["metadata"].get("tags", []):
                place = f"{_slide(match)}: the chapter's cell {position}, tagged {tag},"
                return "\n".join(["```text", _printed(cell, place), "```"])
        raise SlideError(f"{_slide(match)}: the chapter has no cell tagged {tag}")

    return re.sub(r"^@output (\S+)$", insert, markdown, flags=re.MULTILINE)


def _printed(cell: dict, place: str) -> str:
    for output in cell.get("outputs", []):
        if output.get("output_type") == "error":
            raise SlideError(f"{place} failed with {output['ename']}: run `make chapters`")
    printed = "".join(part for output in cell.get("outputs", []) for part in output.get("text", []))
    if not printed.strip():
        raise SlideError(f"{place} has printed nothing: run `make chapters`")
    return printed.rstrip()


def _slide(match: re.Match) -> str:
    """On which slide of its deck a match is; the first two rulers enclose the front matter."""
    return f"slide {len(re.findall('^---$', match.string[: match.start()], re.MULTILINE)) - 1}"


def inline_images(markdown: str, folder: Path) -> str:
    """Replace every local PNG and every drawing of a deck by a data URI: a deck is one file."""

    def inline(match: re.Match) -> str:
        image = draw(match[2]) if ":" in match[2] else read_figure(folder / match[2])
        return f"{match[1]}(data:image/png;base64,{base64.b64encode(image).decode()})"

    return re.sub(r"(!\[[^\]]*\])\(([^):]+\.png|[\w.]+:\w+)\)", inline, markdown)


def read_figure(path: Path) -> bytes:
    if not path.is_file():
        sys.exit(f"{path.relative_to(ROOT)} is missing: `make chapters` writes the figures")
    return path.read_bytes()


def draw(name: str) -> bytes:
    """The PNG of a figure that a function draws: "teaching.slides.ch02:second_step"."""
    try:
        function = resolve_name(name)
    except (ImportError, AttributeError, ValueError) as error:
        sys.exit(f"there is no drawing {name}: {error}")
    return png(function())


def first_remote_resource(html: str) -> str | None:
    """The first thing a browser would fetch from the network to show `html`."""
    found = LOADED.search(html)
    return found[0] if found else None


def marp(source: str, browser: str, *arguments: str | Path) -> None:
    """Run Marp over `source`, handed over on its standard input."""
    environment = {**os.environ, "CHROME_PATH": browser}
    if hasattr(os, "geteuid") and os.geteuid() == 0:
        environment["CHROME_NO_SANDBOX"] = "1"  # Chromium refuses to sandbox for root
    command = [MARP, "--no-config-file", "--theme", SLIDES / "theme.css", *arguments]
    done = subprocess.run(
        [str(part) for part in command],
        input=source,
        text=True,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        timeout=300,
    )
    if done.returncode != 0:
        sys.exit(f"marp failed:\n{done.stdout}")


def install_marp() -> None:
    """Install the pinned Marp into slides/node_modules unless it is there."""
    if MARP.exists():
        return
    npm = shutil.which("npm")
    if npm is None:
        sys.exit("npm is missing: slides need Node.js 18 or newer (nodejs.org); chapters do not")
    command = [npm, "install", "--no-audit", "--no-fund", "--no-package-lock"]
    if subprocess.run(command, cwd=SLIDES).returncode != 0:
        sys.exit("npm install failed in slides/: see its message above")


def find_browser() -> str:
    """Path of a Chromium, installed through apt-get where this runs as root on Debian."""
    for candidate in (os.environ.get("CHROME_PATH", ""), *BROWSERS):
        found = shutil.which(candidate) if candidate else None
        if found:
            return found
    if Path("/etc/debian_version").is_file() and os.geteuid() == 0:
        subprocess.run(["apt-get", "update", "-qq"], check=True)
        subprocess.run(["apt-get", "install", "-y", "-qq", "chromium"], check=True)
        return shutil.which("chromium") or "chromium"
    sys.exit("no Chromium found for the PDF: install one, or set CHROME_PATH to its program")


if __name__ == "__main__":
    sys.exit(main())
