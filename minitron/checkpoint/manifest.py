"""The manifest of a checkpoint: every file's length and checksum, and what the run says of itself.

A checksum has no key: it tells damage, not who has written a file.
"""

import hashlib
import json
from pathlib import Path

from minitron.system.disk import write_json
from minitron.system.files import read_json

MANIFEST = "manifest.json"


def step_of(path: Path) -> int:
    """Return the step that a checkpoint's name states."""
    return int(path.name[5:])


def write_manifest(folder: Path, files: dict[str, dict], facts: dict) -> None:
    content = {"files": files, "facts": facts}
    write_json(folder / MANIFEST, {"sha256": digest(content)} | content)


def read_manifest(path: Path) -> dict:
    """Read the manifest of a checkpoint; raises OSError, or ValueError in a few words.

    What its facts mean is for those to check who have written them, except for the step: a folder
    is not believed by its name.
    """
    try:
        manifest = read_json(path / MANIFEST)
    except ValueError as error:
        raise ValueError(f"{MANIFEST}: {error}") from None
    if manifest.pop("sha256", None) != digest(manifest):
        raise ValueError(f"{MANIFEST} has changed since it was written")
    match manifest:
        case {"files": {".metadata": _}}:
            raise ValueError(
                "of an earlier version, in pickles, which are not read since they can "
                "execute anything; finish or export the run with that version"
            )
        case {"files": dict(files), "facts": {"step": int(step)}}:
            is_complete = all(map(is_entry, files.values()))
        case _:
            is_complete = False
    if not is_complete:
        raise ValueError(f"{MANIFEST} does not describe a checkpoint")
    if step != step_of(path):
        raise ValueError(f"renamed: it holds step {step}; call it step_{step:08d} again")
    return manifest


def is_entry(value) -> bool:
    match value:
        case {"bytes": int(), "sha256": str()}:
            return True
    return False


def has_manifest(path: Path) -> bool:
    """Return whether a folder is a checkpoint of the step it is named after."""
    try:
        read_manifest(path)
    except (OSError, ValueError):
        return False
    return True


def describe(file: Path) -> dict:
    with file.open("rb") as content:
        sha256 = hashlib.file_digest(content, "sha256").hexdigest()
    return {"bytes": file.stat().st_size, "sha256": sha256}


def digest(content: dict) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
