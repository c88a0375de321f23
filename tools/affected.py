"""Print the files of tests that the changes since a commit can reach, exhaustive tests included.

    python tools/affected.py                since the merge base with the upstream branch; without
                                            an upstream, since the last commit
    python tools/affected.py --since REV    since a commit
    python tools/affected.py --files a b    as if these files had changed

`make affected` runs what this prints. A test is reached by what it imports, directly or not, and
by what it names: see `edges`. A change of how tests are run reaches all of them.
"""

import argparse
import ast
import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from tools.imports import (  # noqa: E402
    closure,
    import_graph,
    imported,
    imported_directly,
    packages_of,
    parse_cell,
)

REACHES_ALL = {"pyproject.toml", "requirements.txt", "environment.yml"}
SHARED_BY_CHAPTER = ("teaching/graders", "solutions", "exercises", "tests/exercises/mutants")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--since", metavar="REV", help="a commit; default: see above")
    parser.add_argument("--files", nargs="+", help="take these files as changed")
    arguments = parser.parse_args()
    try:
        changed = set(arguments.files or changed_files(arguments.since or default_base()))
    except subprocess.CalledProcessError as error:
        print(f"affected: {error.stderr.strip().splitlines()[0]}", file=sys.stderr)
        return 2
    print("\n".join(affected(changed, edges())))
    return 0


def git(*words: str) -> str:
    done = subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=True)
    return done.stdout.strip()


def default_base() -> str:
    try:
        return git("merge-base", "HEAD", "@{upstream}")
    except subprocess.CalledProcessError:
        return "HEAD"


def changed_files(base: str) -> list[str]:
    """Return what differs from `base` in the working tree, files git does not track included."""
    untracked = git("ls-files", "--others", "--exclude-standard")
    changed = git("diff", "--name-only", "--no-renames", base, "--")
    return [*changed.splitlines(), *untracked.splitlines()]


def affected(changed: set[str], graph: dict[str, set[str]]) -> list[str]:
    """Return the files of tests, chapters among them, from which an edge leads to a change."""
    tests = sorted(file for file in graph if is_test(file))
    if changed & REACHES_ALL:
        return tests
    return [test for test in tests if reached(test, graph) & changed]


def reached(test: str, graph: dict[str, set[str]]) -> set[str]:
    return closure([test], lambda file: graph.get(file, ()))


def is_test(file: str) -> bool:
    return file.endswith(".ipynb") or file.startswith("tests/") and "/test_" in file


def edges() -> dict[str, set[str]]:
    """Return what each file depends on directly, as paths from the repository's root.

    - a module: what it imports, the packages it lies in, the data in its folder;
    - a test: also the files, folders and modules that its strings name, every conftest.py above
      it, and for an exercise's test the grader, solution, stub, hints and wrong answers;
    - a notebook: its source, what its code cells import, and the files that they name.
    """
    known = git("ls-files", "--cached", "--others", "--exclude-standard").splitlines()
    files = [file for file in dict.fromkeys(known) if (ROOT / file).is_file()]
    modules = {module_name(file): file for file in files if file.endswith(".py")}
    places = {file: {file} for file in files}  # and, of a folder, all that lies in it
    for file in files:
        for folder in Path(file).parents[:-1]:
            places.setdefault(str(folder), set()).add(file)

    graph = {}
    packages = {str(Path(file).parent) for file in modules.values()}
    for module, file in modules.items():
        code = (ROOT / file).read_text()
        needed = imported_directly(module) if module in import_graph().modules else imported(code)
        graph[file] = {modules[name] for name in needed if name in modules}
        if file.startswith(("minitron/", "teaching/")):
            package = str(Path(file).parent)
            graph[file] |= {
                data
                for data in places[package]
                if not data.endswith(".py")
                and package
                == next(str(folder) for folder in Path(data).parents if str(folder) in packages)
            }
        if is_test(file):
            graph[file] |= named(code, places, modules) | beside(file, files)
    for notebook in filter(lambda file: file.endswith(".ipynb"), files):
        cells = json.loads((ROOT / notebook).read_text())["cells"]
        code = "\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "code")
        names = imported(code).union(*map(packages_of, imported(code)))
        graph[notebook] = {modules[name] for name in names if name in modules}
        graph[notebook] |= named(code, places, modules)
        graph[notebook].add(f"chapters/source/{Path(notebook).stem}.py")
    return graph


def module_name(file: str) -> str:
    return file.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def named(code: str, places: dict[str, set[str]], modules: dict[str, str]) -> set[str]:
    """Return the files that a string in `code` names: by path, by folder, or as a module."""
    strings = {
        node.value.rstrip("/")
        for node in ast.walk(parse_cell(code))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    }
    return {modules[name] for name in strings & set(modules) if "." in name}.union(
        *(places[name] for name in strings & set(places))
    )


def beside(test: str, files: list[str]) -> set[str]:
    """Return the conftest.py above a test, and what belongs to the exercises it is about."""
    shared = {str(folder / "conftest.py") for folder in Path(test).parents}
    chapter = Path(test).stem.removeprefix("test_")[:4]
    if "exercises" in Path(test).parts and chapter.startswith("ch"):
        shared |= {
            file
            for file in files
            if Path(file).name.startswith(chapter) and file.startswith(SHARED_BY_CHAPTER)
        }
    return shared & set(files)


if __name__ == "__main__":
    sys.exit(main())
