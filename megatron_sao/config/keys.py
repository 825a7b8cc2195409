"""The keys that a configuration can have, and what a mistaken key was probably meant to be.

A key is its dotted path ("value.groups.head.trained"). Everything here is read off the section classes, so that
there is no second list to keep.
"""

import difflib
import functools
import json
import typing
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel
from pydantic_core import PydanticUndefined

from megatron_sao.config.config import Config

# What other systems call things.
_OTHER_WORDS = {
    "learning_rate": "lr",
    "critic": "value",
    "actor": "policy",
    "n_rollouts_per_prompt": "rollouts_per_prompt",
    "critic_updates_per_step": "updates_per_step",
    "tensor_parallel_size": "tp",
    "pipeline_parallel_size": "pp",
    "context_parallel_size": "cp",
    "expert_parallel_size": "ep",
    "batch_size": "batch_trajectories",
    "nnodes": "trainer_nodes",
    "nproc_per_node": "trainer_gpus_per_node",
    "save_interval": "every_steps",
    "save_steps": "every_steps",
}
_MANY = 4  # more suggestions than this are no help


@dataclass(frozen=True)
class Key:
    """One leaf key: its annotation, its default (None where it has none) and its description."""

    path: str
    annotation: Any
    default: Any
    description: str


def leaf_keys(section: type[BaseModel] = Config, prefix: str = "") -> Iterator[Key]:
    """Every key that holds a value, in the order of the sections."""
    for name, field in section.model_fields.items():
        if is_section(field.annotation):
            yield from leaf_keys(field.annotation, f"{prefix}{name}.")
        else:
            default = field.get_default(call_default_factory=True)
            default = None if default is PydanticUndefined else default
            yield Key(prefix + name, field.annotation, default, field.description or "")


def table_paths(section: type[BaseModel] = Config, prefix: str = "") -> Iterator[str]:
    """Every table: "run", "value", "value.groups", "value.groups.head", ..."""
    for name, field in section.model_fields.items():
        if is_section(field.annotation):
            yield prefix + name
            yield from table_paths(field.annotation, f"{prefix}{name}.")


def is_section(annotation: Any) -> bool:
    """True if a field of this annotation is a table of its own."""
    return isinstance(annotation, type) and issubclass(annotation, BaseModel)


def unknown_key_fault(path: str) -> str:
    """One sentence on a key that does not exist: its nearest name, or the sections where it does exist."""
    plain = path.replace("-", "_").replace('"', "").lower()
    if plain in _all_paths():
        return f"{path}: names are in lower case, with underscores, without dashes and quotes: {plain}"
    table, _, name = plain.rpartition(".")
    suggestions = _meant(_known_words(table), _OTHER_WORDS.get(name, name))
    if suggestions and len(suggestions) <= _MANY:
        return f"{path}: there is no such key; did you mean {_either(suggestions)}?"
    if table in table_paths():
        return f"{path}: there is no such key; [{table}] has {', '.join(_names_in(table))}"
    return f"{path}: there is no such key; the sections are {', '.join(Config.model_fields)}"


def _known_words(table: str) -> str:
    return ".".join(_OTHER_WORDS.get(word, word) for word in table.split("."))


def _meant(table: str, name: str) -> list[str]:
    """Paths that `table.name` may stand for, by the first rule that finds any."""
    paths = _all_paths()
    tables = _near_tables(table)
    named = [_join(near, name) for near in tables if _join(near, name) in paths]
    close = [_join(near, key) for near in tables for key in difflib.get_close_matches(name, _names_in(near), n=1)]
    elsewhere = [path for path in paths if path.rpartition(".")[2] == name]
    nearest = difflib.get_close_matches(name, [path.rpartition(".")[2] for path in paths], n=1)
    close_elsewhere = [path for path in paths if path.rpartition(".")[2] in nearest]
    return named[:1] or close[:1] or elsewhere or close_elsewhere


def _near_tables(table: str) -> list[str]:
    """The table itself; if there is none, those whose last word is the same, then those of a similar name."""
    tables = ["", *table_paths()]
    if table in tables:
        return [table]
    same_end = [known for known in tables if known.rpartition(".")[2] == table.rpartition(".")[2]]
    return same_end + difflib.get_close_matches(table, tables)


def _names_in(table: str) -> list[str]:
    return [path.rpartition(".")[2] for path in _all_paths() if path.rpartition(".")[0] == table]


@functools.cache
def _all_paths() -> tuple[str, ...]:
    return (*table_paths(), *(key.path for key in leaf_keys()))


def _join(table: str, name: str) -> str:
    return f"{table}.{name}" if table else name


def _either(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} or {names[-1]}"


def help_on_keys() -> str:
    """Every key with its default (or what it may be) and its meaning, one a line, by section."""
    lines: list[str] = []
    for key in leaf_keys():
        table, _, name = key.path.rpartition(".")
        if f"[{table}]" not in lines:
            lines += ["", f"[{table}]"]
        lines.append(f"  {f'{name} = {_default_shown(key)}':<40} {key.description}{_choices_shown(key.annotation)}")
    return "\n".join(lines).strip("\n")


def _default_shown(key: Key) -> str:
    return json.dumps(key.default)


def _choices_shown(annotation: Any) -> str:
    choices = [arg for arg in typing.get_args(annotation) if isinstance(arg, str)]
    return f" [{' | '.join(choices)}]" if choices else ""
