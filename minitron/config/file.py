"""Read and write a `Config` as TOML or JSON tables: unknown and ill-typed keys are one line."""

import dataclasses
import difflib
import tomllib
from collections.abc import Iterable
from pathlib import Path

from minitron.config import Config, ConfigError, ModelConfig, require
from minitron.config.checks import LARGEST_INT
from minitron.system.files import read_text

LARGEST_FILE = 10_000_000  # bytes


def load(path: Path, model: ModelConfig | None = None) -> Config:
    """Read a `Config` from a TOML file; what it leaves out keeps its default, or that of `model`.

    Raises ConfigError if the file is missing, is not TOML, or holds an unknown or ill-typed key.
    """
    if not path.exists():
        near = difflib.get_close_matches(path.name, [p.name for p in path.parent.glob("*.toml")])
        hint = f"; did you mean {path.parent / near[0]}?" if near else ""
        raise ConfigError(f"{path}: there is no such file{hint}")
    try:
        text = read_text(path, LARGEST_FILE)
    except ValueError as error:  # no regular file, too large, or not UTF-8
        raise ConfigError(f"{path}: {error}") from None
    try:
        tables = tomllib.loads(text)
    except RecursionError:
        raise ConfigError(f"{path}: nested too deeply") from None
    except ValueError as error:  # also a number of thousands of digits
        raise ConfigError(f"{path}: not valid TOML: {error}") from None
    return from_dict(tables, where=str(path), model=model)


def from_dict(tables: dict, where: str = "config", model: ModelConfig | None = None) -> Config:
    """Build a `Config` from nested dictionaries, the inverse of `to_dict`."""
    sections = {f.name: f.default_factory() for f in dataclasses.fields(Config)}
    sections["model"] = model or sections["model"]
    require_known(tables, sections, where)
    return Config(
        **{
            name: _section(default, tables.get(name, {}), f"{where}: {name}")
            for name, default in sections.items()
        }
    )


def to_dict(config: Config) -> dict:
    """Return nested dictionaries of plain values, ready for JSON."""
    tables = dataclasses.asdict(config)
    tables["data"]["path"] = str(config.data.path)
    return tables


def _section(default, table: dict, where: str):
    require(isinstance(table, dict), f"{where} = {table!r}: must be a table of keys")
    fields = {f.name: f for f in dataclasses.fields(default)}
    require_known(table, fields, where)
    return dataclasses.replace(
        default,
        **{
            key: _converted(fields[key].type, value, f"{where}.{key}")
            for key, value in table.items()
        },
    )


def _converted(expected, value, where: str):
    """Convert what TOML and JSON write otherwise: a path as text, a float as an int."""
    if expected is Path and type(value) is str:
        return Path(value)
    if expected is float and type(value) is int:
        require(abs(value) <= LARGEST_INT, f"{where} = {value}: must be less than 2**63")
        return float(value)
    return value


def require_known(given: Iterable[str], known: Iterable[str], where: str, what="key") -> None:
    """Raise ConfigError for the first of `given` that is not in `known`, with the nearest name."""
    for key in given:
        near = difflib.get_close_matches(key, known, n=1)
        hint = f"did you mean {near[0]}?" if near else f"choose from {', '.join(known)}"
        require(key in known, f"{where}: unknown {what} {key!r}; {hint}")
