"""Build every slides/*.md deck into one self-contained HTML file and a PDF under slides/build/.

    python tools/build_slides.py            every deck
    python tools/build_slides.py ch01       the decks whose name starts so
    python tools/build_slides.py --images   also one PNG a slide, to look at them

A deck's figures are those of its chapter, written by build_chapters.py. A line `@source
module:function` puts the package's code on the slide, `@output NAME` what the chapter's cell tagged
"output-NAME" has printed: nothing is copied by hand.

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

ROOT = Path(__file__).resolve().parent.parent
SLIDES = ROOT / "slides"
BUILD = SLIDES / "build"
MARP = SLIDES / "node_modules" / ".bin" / "marp"
BROWSERS = (
    "chromium", "chromium-browser", "google-chrome", "google-chrome-stable",
    "/Applications/Google Chrome.app/Contents/MacOS/Google Chrome",
    "/Applications/Chromium.app/Contents/MacOS/Chromium",
)
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

    decks = [deck for deck in sorted(SLIDES.glob("*.md"))
             if not arguments.names or deck.stem.startswith(tuple(arguments.names))]
    if not decks:
        sys.exit(f"no deck is named {' or '.join(arguments.names)} in {SLIDES.name}/")

    install_marp()
    browser = find_browser()
    BUILD.mkdir(exist_ok=True)
    for deck in decks:
        html = build_deck(deck, browser, arguments.images)
        print(f"{html.relative_to(ROOT)} and .pdf")
    return 0


def build_deck(deck: Path, browser: str, images: bool) -> Path:
    """Write the deck's HTML and PDF, and PNGs if asked; returns the HTML's path."""
    notebook = json.loads((ROOT / "chapters" / f"{deck.stem}.ipynb").read_text())
    markdown = insert_outputs(insert_sources(deck.read_text()), notebook)
    source = inline_images(markdown, deck.parent)
    html = BUILD / f"{deck.stem}.html"
    marp(source, browser, "--output", html)
    marp(source, browser, "--pdf", "--pdf-outlines", "--output", html.with_suffix(".pdf"))
    if images:
        folder = BUILD / deck.stem
        folder.mkdir(exist_ok=True)
        marp(source, browser, "--images", "png", "--output", folder / "slide.png")

    resource = first_remote_resource(html.read_text())
    if resource:
        sys.exit(f"{html.name} would load {resource}: put the file into slides/assets")
    return html


def insert_sources(markdown: str) -> str:
    """Replace each line `@source minitron.step:train_step` by that function's code.

    The docstring is left out: on a slide the speaker says it.
    """

    def insert(match: re.Match) -> str:
        code = textwrap.dedent(inspect.getsource(resolve_name(match[1])))
        docstring = ast.parse(code).body[0].body[0]
        lines = code.splitlines()
        del lines[docstring.lineno - 1 : docstring.end_lineno]
        return "\n".join(["```python", *lines, "```"])

    return re.sub(r"^@source (\S+)$", insert, markdown, flags=re.MULTILINE)


def insert_outputs(markdown: str, notebook: dict) -> str:
    """Replace each line `@output trap` by what the cell tagged "output-trap" has printed."""

    def insert(match: re.Match) -> str:
        for cell in notebook["cells"]:
            if f"output-{match[1]}" in cell["metadata"].get("tags", []):
                printed = "".join(line for o in cell["outputs"] for line in o.get("text", []))
                return "\n".join(["```text", printed.rstrip(), "```"])
        sys.exit(f"the notebook has no cell tagged output-{match[1]}")

    return re.sub(r"^@output (\S+)$", insert, markdown, flags=re.MULTILINE)


def inline_images(markdown: str, folder: Path) -> str:
    """Replace every local PNG of a deck by a data URI, so that the deck is one file."""

    def inline(match: re.Match) -> str:
        path = folder / match[2]
        if not path.is_file():
            sys.exit(f"{path.relative_to(ROOT)} is missing: `make chapters` writes the figures")
        return f"{match[1]}(data:image/png;base64,{base64.b64encode(path.read_bytes()).decode()})"

    return re.sub(r"(!\[[^\]]*\])\(([^):]+\.png)\)", inline, markdown)


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
        [str(part) for part in command], input=source, text=True, env=environment,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=300,
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
