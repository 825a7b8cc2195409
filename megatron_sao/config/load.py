"""From a TOML file and the command line to a checked `Config`.

Layers, later ones win: defaults < the file's arm < the file < the command line's arm < the command line. Every
fault of every layer is reported in one ConfigError; nothing is dropped, guessed or converted.
"""

import re
import tomllib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError

from megatron_sao.config.arms import ARMS
from megatron_sao.config.check import cross_field_faults
from megatron_sao.config.config import Config
from megatron_sao.config.keys import is_section, leaf_keys, unknown_key_fault
from megatron_sao.errors import ConfigError

Tree = dict[str, Any]

# tomllib lets two errors of its own making through: a number of thousands of digits, and brackets nested as deep.
_NOT_TOML = (ValueError, RecursionError)


def load_config(path: str | Path | None, overrides: Iterable[str] = ()) -> Config:
    """Reads, merges and checks a configuration.

    Args:
        path: TOML file; None = defaults only.
        overrides: "section.key=value", leading "--" allowed. A value is read as TOML (`3`, `true`, `"text"`); what is
            not TOML is text, and the value of a text field is taken as it stands.
    Raises:
        ConfigError: with every fault found, one a line.
    """
    faults: list[str] = []
    file_tree = _read_toml(Path(path)) if path is not None else {}
    command_tree, command_paths = _parse_overrides(overrides, faults)
    if _arm(command_tree) is None:  # else the file's arm is replaced as a whole
        file_tree = _with_arm(file_tree)
    tree = _merge(file_tree, _with_arm(command_tree))
    origin = _Origin(path, command_paths)
    faults += [f"{unknown_key_fault(key)} ({origin(key)})" for key in _unknown_keys(tree, Config, "")]
    sections, value_faults = _build_sections(tree, origin)
    faults += value_faults
    faults += cross_field_faults(sections)
    if faults:
        raise ConfigError(_report(path, faults))
    return Config(**sections)


def _report(path: str | Path | None, faults: list[str]) -> str:
    if len(faults) == 1:
        return faults[0]
    where = f"{path} with the command line" if path is not None else "the command line"
    return "\n  ".join([f"{len(faults)} faults in the configuration ({where}):", *faults])


# ---- the file --------------------------------------------------------------------------------------------------


def _read_toml(path: Path) -> Tree:
    try:
        return tomllib.loads(path.read_bytes().decode("utf-8-sig"))
    except OSError as error:
        raise ConfigError(f"cannot read the configuration file {path}: {error.strerror or error}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not UTF-8 text: {error.reason} at byte {error.start}") from None
    except _NOT_TOML as error:
        raise ConfigError(_toml_fault(path, str(error))) from None


def _toml_fault(path: Path, message: str) -> str:
    place = re.search(r"\(at line (\d+), column (\d+)\)", message)
    where = f"{path} line {place[1]} column {place[2]}" if place else f"{path} at its end"
    what = message.split(" (at ")[0]
    if what.startswith(("Cannot overwrite", "Cannot declare", "Duplicate", "Cannot mutate")):
        what = f"a key or table is given twice ({what})"
    return f"{where}: {what}"


# ---- the command line ------------------------------------------------------------------------------------------


def _parse_overrides(overrides: Iterable[str], faults: list[str]) -> tuple[Tree, set[str]]:
    """The overrides as a tree, and their dotted paths. Adds a fault for each that cannot be read or is given twice."""
    annotations = {key.path: key.annotation for key in leaf_keys()}
    tree: Tree = {}
    paths: set[str] = set()
    for override in overrides:
        path, equals, raw = override.removeprefix("--").partition("=")
        if not equals or not all(path.split(".")):
            faults.append(f"{override!r} on the command line: write --section.key value or --section.key=value")
        elif path in paths or not _insert(tree, path.split("."), _parse_value(raw, annotations.get(path))):
            faults.append(f"{path} is given twice on the command line")
        paths.add(path)
    return tree, paths


def _parse_value(raw: str, annotation: Any) -> Any:
    """A TOML value if it is one, else the text itself; for a text field always text (a run may be named 7)."""
    try:
        parsed = tomllib.loads(f"value = {raw}")
    except _NOT_TOML:
        return raw
    if parsed.keys() != {"value"} or (annotation is str and not isinstance(parsed["value"], str)):
        return raw
    return parsed["value"]


def _insert(tree: Tree, names: list[str], value: Any) -> bool:
    """Puts a value at a path; False if something else already stands there or on the way."""
    *tables, leaf = names
    for name in tables:
        tree = tree.setdefault(name, {})
        if not isinstance(tree, dict):
            return False
    if leaf in tree:
        return False
    tree[leaf] = value
    return True


# ---- layers ----------------------------------------------------------------------------------------------------


def _arm(tree: Tree) -> Any:
    algo = tree.get("algo")
    return algo.get("arm") if isinstance(algo, dict) else None


def _with_arm(tree: Tree) -> Tree:
    """The tree on top of the values that its own algo.arm stands for (the field itself reports an unknown arm)."""
    arm = _arm(tree)
    below: Tree = {}
    for path, value in ARMS.get(arm, {}).items() if isinstance(arm, str) else ():
        _insert(below, path.split("."), value)
    return _merge(below, tree)


def _merge(below: Tree, above: Tree) -> Tree:
    merged = dict(below)
    for name, value in above.items():
        both_tables = isinstance(value, dict) and isinstance(below.get(name), dict)
        merged[name] = _merge(below[name], value) if both_tables else value
    return merged


# ---- building and its faults -----------------------------------------------------------------------------------


def _unknown_keys(tree: Tree, section: type[BaseModel], prefix: str) -> Iterator[str]:
    for name, value in tree.items():
        field = section.model_fields.get(name)
        if field is None:
            yield from _leaf_paths(prefix + _as_written(name), value)
        elif is_section(field.annotation) and isinstance(value, dict):
            yield from _unknown_keys(value, field.annotation, f"{prefix}{name}.")


def _leaf_paths(path: str, value: Any) -> list[str]:
    """The keys inside an unknown table, so that each gets its own suggestion; a value is its own only leaf."""
    if not isinstance(value, dict) or not value:
        return [path]
    return [leaf for name, entry in value.items() for leaf in _leaf_paths(f"{path}.{_as_written(name)}", entry)]


def _as_written(name: str) -> str:
    """A name with a dot in it was written in quotes."""
    return f'"{name}"' if "." in name else name


class _Origin:
    """Says where a value, or a part of a table, was written."""

    def __init__(self, path: str | Path | None, command_paths: set[str]) -> None:
        self._path, self._command_paths = path, command_paths

    def __call__(self, key: str) -> str:
        is_from_command = any(
            key == given or key.startswith(given + ".") or given.startswith(key + ".") for given in self._command_paths
        )
        return "on the command line" if is_from_command or self._path is None else f"in {self._path}"


def _build_sections(tree: Tree, origin: _Origin) -> tuple[dict[str, BaseModel], list[str]]:
    """Every section that is sound, and the faults of the others."""
    sections: dict[str, BaseModel] = {}
    faults: list[str] = []
    for name, field in Config.model_fields.items():
        values = tree.get(name, {})
        if not isinstance(values, dict):
            faults.append(f"{name} = {values!r} must be a table: [{name}] ({origin(name)})")
            continue
        try:
            sections[name] = field.annotation(**values)
        except ValidationError as error:
            faults += [fault for entry in error.errors() if (fault := _value_fault(name, entry, origin))]
    return sections, faults


_PLAIN_WORDS = {
    "int_type": "must be an integer",
    "float_type": "must be a number",
    "bool_type": "must be true or false",
    "string_type": "must be text",
    "finite_number": "must be a finite number",
    "model_type": "must be a table",
    "dict_type": "must be a table",
}


def _value_fault(section: str, entry: Any, origin: _Origin) -> str | None:
    """One pydantic error in our words; None for unknown keys, which are reported with their nearest name."""
    if entry["type"] == "extra_forbidden":
        return None
    key = ".".join([section, *map(str, entry["loc"])])
    if entry["type"] == "missing":
        return f"{key} is missing: it must be given together with {_siblings(key)} ({origin(key.rpartition('.')[0])})"
    if entry["type"] == "string_pattern_mismatch":
        rule = "may hold letters, digits, dots, dashes and underscores, and begins with a letter or digit"
    elif entry["type"] == "value_error":
        rule = str(entry["ctx"]["error"])
    else:
        rule = _PLAIN_WORDS.get(entry["type"]) or re.sub("^(Input|String) should", "must", entry["msg"])
    return f"{key} = {_shown(entry['input'])} {rule} ({origin(key)})"


def _shown(value: Any) -> str:
    """A value as it is written in TOML, shortened."""
    text = str(value).lower() if isinstance(value, bool) else repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _siblings(path: str) -> str:
    table = path.rpartition(".")[0]
    return ", ".join(key.path for key in leaf_keys() if key.path.rpartition(".")[0] == table and key.path != path)
