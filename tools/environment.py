"""Whether `make` can use the environment that is active: run by that environment's own Python.

Prints its folder of programs if it has what pyproject.toml asks for and this clone's minitron.
Otherwise it prints the reason on stderr and nothing on stdout, and `make` uses .venv.
"""

from __future__ import annotations  # an older Python must get as far as its message

import importlib.metadata
import importlib.util
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def main() -> int:
    problem = missing()
    if problem is None:
        print(Path(sys.prefix) / "bin")
        return 0
    print(f"make uses .venv, not the active {sys.prefix}: {problem}", file=sys.stderr)
    return 1


def missing() -> str | None:
    """The first thing that this environment lacks, or None."""
    if sys.version_info < (3, 11):  # noqa: UP036
        return "its Python is older than 3.11"
    import tomllib  # from 3.11 on

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    for requirement in [*project["dependencies"], *extras["course"], *extras["test"]]:
        found = version_of(re.match(r"[\w-]+", requirement)[0])
        if not satisfies(found, requirement):
            return f"needs {requirement}, has {found or 'none'}"
    spec = importlib.util.find_spec("minitron")
    if spec is None or ROOT not in Path(spec.origin).parents:
        return "minitron is not installed from this folder (`pip install -e .`)"
    return None


def version_of(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def satisfies(version: str | None, requirement: str) -> bool:
    """Whether a version is within the `>=` and `<` of a requirement such as "tyro>=1.0,<2"."""
    if version is None:
        return False
    for sign, bound in re.findall(r"(>=|<)([\d.]+)", requirement):
        if (numbers(version) >= numbers(bound)) != (sign == ">="):
            return False
    return True


def numbers(version: str) -> tuple[int, ...]:
    """2.13.0+cpu -> (2, 13): without the zeros at the end, as 2 and 2.0 are one version."""
    found = [int(part) for part in re.match(r"[\d.]*\d|", version)[0].split(".") if part]
    while found and found[-1] == 0:
        found.pop()
    return tuple(found)


if __name__ == "__main__":
    sys.exit(main())
