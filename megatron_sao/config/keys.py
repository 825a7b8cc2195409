"""The keys that a configuration can have, and what a mistaken key was probably meant to be.

A key is its dotted path ("value.groups.head.trained"). Everything here is read off the section classes, so that there is no second
list to keep.
"""

import difflib
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
    "policy_loss": "loss",
    "n_rollouts_per_prompt": "rollouts_per_prompt",
    "critic_updates_per_step": "updates_per_step",
    "tensor_parallel_size": "tp",
    "pipeline_parallel_size": "pp",
    "context_parallel_size": "cp",
    "expert_parallel_size": "ep",
    "batch_size": "batch_trajectories",
}


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


def is_section(annotation: Any) -> bool:
    return isinstance(annotation, type) and issubclass(annotation, BaseModel)


def section_paths(section: type[BaseModel] = Config, prefix: str = "") -> Iterator[str]:
    """Every table: "run", "value", "value.groups", "value.groups.head", ..."""
    for name, field in section.model_fields.items():
        if is_section(field.annotation):
            yield prefix + name
            yield from section_paths(field.annotation, f"{prefix}{name}.")


def unknown_key_fault(path: str) -> str:
    """One sentence on a key that does not exist: its nearest name, or the sections where it does exist."""
    hint = _dash_hint(path) or _suggestion(path.replace("-", "_").lower())
    return f"{path}: there is no such key; {hint}"


def _dash_hint(path: str) -> str:
    plain = path.replace("-", "_").lower()
    if plain == path or plain not in _all_paths():
        return ""
    return f"names are in lower case, with underscores instead of dashes: {plain}"


def _suggestion(path: str) -> str:
    table, _, name = path.rpartition(".")
    name = _OTHER_WORDS.get(name, name)
    table = _OTHER_WORDS.get(table, table)
    paths = _all_paths()
    if (moved := f"{table}.{name}".lstrip(".")) in paths:
        return f"did you mean {moved}?"
    neighbours = [known.rpartition(".")[2] for known in paths if known.rpartition(".")[0] == table]
    if near := difflib.get_close_matches(name, neighbours, n=1):
        return f"did you mean {'.'.join(filter(None, (table, near[0])))}?"
    if elsewhere := [known for known in paths if known.rpartition(".")[2] == name]:
        return f"did you mean {_either(elsewhere)}?"
    if near := difflib.get_close_matches(name, {known.rpartition(".")[2] for known in paths}, n=1):
        return f"did you mean {_either([known for known in paths if known.rpartition('.')[2] == near[0]])}?"
    if neighbours:
        return f"{f'[{table}]' if table else 'the top level'} has {', '.join(neighbours)}"
    return f"the sections are {', '.join(Config.model_fields)}"


def _all_paths() -> list[str]:
    return [*section_paths(), *(key.path for key in leaf_keys())]


def _either(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} or {names[-1]}"
