"""A configuration as TOML that `load_config` reads back to an equal one."""

import json
from typing import Any

from megatron_sao.config.config import Config


def to_toml(cfg: Config) -> str:
    """Every key with its value, one table per section."""
    return "\n\n".join(_table(name, values) for name, values in cfg.model_dump().items()) + "\n"


def _table(path: str, values: dict[str, Any]) -> str:
    is_open = path == "task.params"
    leaves = [f"{_key(k)} = {_value(v)}" for k, v in values.items() if is_open or not isinstance(v, dict)]
    tables = [] if is_open else [_table(f"{path}.{k}", v) for k, v in values.items() if isinstance(v, dict)]
    head = ["\n".join([f"[{path}]", *leaves])] if leaves or is_open else []
    return "\n\n".join([*head, *tables])


def _key(name: str) -> str:
    is_bare = name != "" and all(c.isascii() and (c.isalnum() or c in "_-") for c in name)
    return name if is_bare else _value(name)


def _value(value: Any) -> str:
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, dict):
        return "{" + ", ".join(f"{_key(k)} = {_value(v)}" for k, v in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(_value, value)) + "]"
    return json.dumps(value)
