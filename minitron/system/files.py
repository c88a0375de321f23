"""Files that others may have written: read without trust.

Nothing here executes what it reads. Sizes, nesting and links are checked before they cost anything.
"""

import json
import stat
from pathlib import Path

MOST_BYTES = 256 * 1024**2  # of JSON: that of a checkpoint of 1,000 ranks has a few million
MOST_LEVELS = 50
MOST_DIGITS = 50


def read_json(path: Path) -> dict:
    """Read the object in a JSON file.

    Raises OSError, or ValueError in a few words, for anything else: no regular file (a pipe would
    block), too large, nested too deeply, a key twice, a number of thousands of digits.
    """
    text = read_text(path, MOST_BYTES)
    try:
        value = json.loads(text, object_pairs_hook=without_repeats, parse_int=short_int)
    except json.JSONDecodeError as error:
        raise ValueError(f"not valid JSON: {error}") from None
    except RecursionError:
        raise ValueError("nested too deeply") from None
    if not isinstance(value, dict):
        raise ValueError(f"holds a {type(value).__name__}, not an object of keys")
    require_shallow(value)
    return value


def read_text(path: Path, most_bytes: int) -> str:
    """Read the text of a regular file; raises OSError, or ValueError in a few words."""
    require_regular(path)
    with path.open("rb") as file:
        content = file.read(most_bytes + 1)
    if len(content) > most_bytes:
        raise ValueError(f"has more than {most_bytes:,} bytes")
    try:
        return content.decode()
    except UnicodeDecodeError:
        raise ValueError("not UTF-8") from None


def file_in(folder: Path, name: str) -> Path:
    """Return the regular file called `name` in `folder`.

    Raises OSError if there is none, and ValueError for a name or a link that leads out of the
    folder. The cache of Hugging Face may link from `snapshots/REVISION` to its `blobs`.
    """
    if not isinstance(name, str) or Path(name).name != name or name in ("", ".."):
        raise ValueError(f"{name!r:.80} is not the name of a file in the folder")
    path, home = folder / name, folder.resolve()
    require_regular(path)
    blobs = [home.parents[1] / "blobs"] if home.parent.name == "snapshots" else []
    target = path.resolve()
    if not any(target.is_relative_to(place) for place in (home, *blobs)):
        raise ValueError(f"{name} is a link to {target}, outside the folder")
    return path


def require_regular(path: Path) -> None:
    """Raise ValueError for a pipe, a device or a folder, OSError if there is nothing."""
    if not stat.S_ISREG(path.stat().st_mode):
        raise ValueError("not a regular file")


def reason(error: Exception) -> str:
    """Say in one line why a file could not be read or written."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return str(error).split("\n")[0] or type(error).__name__


def without_repeats(pairs: list[tuple]) -> dict:
    table = dict(pairs)
    if len(table) < len(pairs):
        raise ValueError("has a key twice")
    return table


def short_int(text: str) -> int:
    if len(text) > MOST_DIGITS:
        raise ValueError(f"has a number of {len(text):,} digits")
    return int(text)


def require_shallow(value: dict | list) -> None:
    """Raise ValueError for more levels than anyone needs: `repr` could not print them either."""
    level = [value]
    for _ in range(MOST_LEVELS):
        level = [
            each
            for outer in level
            for each in (outer.values() if isinstance(outer, dict) else outer)
            if isinstance(each, dict | list)
        ]
        if not level:
            return
    raise ValueError("nested too deeply")
