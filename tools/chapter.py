"""Build one chapter with all that belongs to it, and run every check that concerns it.

    python tools/chapter.py 6

That is its exercise file, its notebook (executed only where its outputs may have changed) and its
deck as HTML, where `make slides` has installed Marp; `make slides` writes the PDF too. The checks
are those of tests/ that are made for each chapter; what they read are the files as they lie here.
"""

import gc
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # run as a script, Python looks in tools/ alone

from tools import build_chapters, build_exercises, build_slides  # noqa: E402
from tools.build_chapters import ChapterError  # noqa: E402
from tools.chapter_links import LinkError  # noqa: E402
from tools.committed import READ_WORKING_FILES  # noqa: E402

CHECKS = ("tests/chapters", "tests/teaching/test_exercises.py")


def main() -> int:
    import psutil

    begin = psutil.Process().create_time()
    chapter = find_chapter(sys.argv[1] if len(sys.argv) == 2 else "")
    if chapter is None:
        return 2
    gc.disable()  # of so many syntax trees nothing is garbage, and looking for it takes seconds
    os.environ[READ_WORKING_FILES] = "1"  # git has them as they were before this build
    try:
        for line in build(chapter):
            print(line, flush=True)
    except (ChapterError, LinkError) as error:
        print(f"{chapter}: {error}", file=sys.stderr)
        return 1
    code = check(chapter)
    print(f"{chapter}: {time.time() - begin:.1f} s in all")
    return code


def find_chapter(number: str) -> str | None:
    """Return the name of the chapter of this number; say so and return None if there is none."""
    chapters = {int(path.stem[2:4]): path.stem for path in build_chapters.chapter_sources([])}
    if number.isdecimal() and int(number) in chapters:
        return chapters[int(number)]
    print(
        f"there is no chapter {number!r}, there are {min(chapters)} to {max(chapters)}: "
        "make chapter CH=6",
        file=sys.stderr,
    )
    return None


def build(chapter: str) -> Iterator[str]:
    """Build the exercises, the notebook, which links into these, and the deck, made from both."""
    exercises = build_exercises.build_one(ROOT / "solutions" / f"{chapter}.py")
    yield f"{exercises.relative_to(ROOT)}: written"
    source = build_chapters.SOURCES / f"{chapter}.py"
    done = build_chapters.build_chapter(source)
    yield f"{build_chapters.notebook_path(source).relative_to(ROOT)}: {done}"

    deck = build_slides.SLIDES / f"{chapter}.md"
    markdown = build_slides.complete(deck)
    if build_slides.MARP.exists():
        html = build_slides.write_html(markdown, deck.stem)
        yield f"{html.relative_to(ROOT)}: written"
    else:
        yield f"slides/{deck.name}: complete; for HTML here, run `make slides` once (it needs Node)"


def check(chapter: str) -> int:
    """Run the tests that are made for each chapter, for this one; return pytest's exit code.

    In this process, which has imported most of what they import. What tests/conftest.py prepares
    is for tests of ranks.
    """
    import pytest

    paths = [str(ROOT / path) for path in CHECKS]
    return int(
        pytest.main(
            [*paths, "-k", chapter, "-q", "--noconftest", "--no-header", "--disable-warnings"]
        )
    )


if __name__ == "__main__":
    sys.exit(main())
