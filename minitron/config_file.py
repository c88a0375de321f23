"""Read and write a `Config` as TOML or JSON tables: unknown and ill-typed keys are one line."""

import dataclasses
import difflib
import tomllib
from collections.abc import Iterable
from pathlib import Path

from minitron.config import Config, ConfigError, ModelConfig, require


def load(path: Path, model: ModelConfig | None = None) -> Config:
    """Read a `Config` from a TOML file; what it leaves out keeps its default, or that of `model`.

    Raises ConfigError if the file is missing, is not TOML, or holds an unknown or ill-typed key.
    """
    if not path.is_file():
        near = difflib.get_close_matches(path.name, [p.name for p in path.parent.glob("*.toml")])
        hint = f"; did you mean {path.parent / near[0]}?" if near else ""
        raise ConfigError(f"{path}: there is no such file{hint}")
    try:
        tables = tomllib.loads(path.read_text())
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: not valid TOML: {error}") from None
    return from_dict(tables, where=str(path), model=model)


def from_dict(tables: dict, where: str = "config", model: ModelConfig | None = None) -> Config:
    """Build a `Config` from nested dictionaries, the inverse of `to_dict`."""
    sections = {f.name: f.default_factory() for f in dataclasses.fields(Config)}
    sections["model"] = model or sections["model"]
    require_known(tables, sections, where)
    return Config(**{name: _section(default, tables.get(name, {}), f"{where}: {name}")
                     for name, default in sections.items()})


def to_dict(config: Config) -> dict:
    """Nested dictionaries of plain values, ready for JSON."""
    tables = dataclasses.asdict(config)
    tables["data"]["path"] = str(config.data.path)
    return tables


def _section(default, table: dict, where: str):
    require(isinstance(table, dict), f"{where} = {table!r}: must be a table of keys")
    fields = {f.name: f for f in dataclasses.fields(default)}
    require_known(table, fields, where)
    return dataclasses.replace(default, **{key: _typed(fields[key].type, value, f"{where}.{key}")
                                           for key, value in table.items()})


def _typed(expected, value, where: str):
    if expected is Path and isinstance(value, str):
        return Path(value)
    if expected is float and type(value) is int:
        return float(value)
    choices = getattr(expected, "__args__", None)  # a Literal's
    if choices is not None:
        known = ", ".join(map(str, choices))
        require(value in choices, f"{where} = {value!r}: must be one of {known}")
    else:
        require(
            type(value) is expected,
            f"{where} = {value!r}: must be of type {expected.__name__}, not {type(value).__name__}",
        )
    return value


def require_known(given: Iterable[str], known: Iterable[str], where: str, what="key") -> None:
    """Raise ConfigError for the first of `given` that is not in `known`, with the nearest name."""
    for key in given:
        near = difflib.get_close_matches(key, known, n=1)
        hint = f"did you mean {near[0]}?" if near else f"known are {', '.join(known)}"
        require(key in known, f"{where}: unknown {what} {key!r}; {hint}")
