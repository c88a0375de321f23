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
    written = []
    for source in sorted((root / "solutions").glob("ch*.py")):
        target = root / "exercises" / source.name
        target.parent.mkdir(exist_ok=True)
        target.write_text(make_stub(source.read_text("utf-8"), source.stem), "utf-8")
        written.append(target)
    return written


if __name__ == "__main__":
    for path in build():
        print(path.relative_to(ROOT))
