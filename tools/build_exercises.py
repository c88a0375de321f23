"""Write exercises/chNN_topic.py, what learners fill in, from solutions/chNN_topic.py.

    python tools/build_exercises.py

Everything between the solution markers becomes one NotImplementedError; nothing else changes,
so a second run changes no byte. A file that a learner has edited is overwritten: learners have
`minitron reset`, this is for maintainers.
"""

from pathlib import Path

from teaching.exercises import ROOT, make_stub


def build(root: Path = ROOT) -> list[Path]:
    """Write every exercises file and return the paths."""
    return [build_one(source) for source in sorted((root / "solutions").glob("ch*.py"))]


def build_one(source: Path) -> Path:
    """Write the exercises file of one solutions file and return its path."""
    target = source.parent.parent / "exercises" / source.name
    target.parent.mkdir(exist_ok=True)
    target.write_text(make_stub(source.read_text("utf-8"), source.stem), "utf-8")
    return target


if __name__ == "__main__":
    for path in build():
        print(path.relative_to(ROOT))
