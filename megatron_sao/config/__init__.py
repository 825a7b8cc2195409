"""The configuration of a run: one file per section, strict, checked as a whole. Imports nothing heavy."""

from megatron_sao.config.check import (
    check_device,
    check_is_built,
    check_nodes,
    check_num_nodes,
    check_one_machine,
    check_world_size,
)
from megatron_sao.config.config import Config
from megatron_sao.config.derived import (
    checkpoint_bytes,
    derived_numbers,
    describe,
    max_in_flight,
    num_kept_checkpoints,
)
from megatron_sao.config.keys import help_on_keys
from megatron_sao.config.load import load_config
from megatron_sao.config.model_fit import check_model_fits
from megatron_sao.config.resume import Change, changes_since
from megatron_sao.config.write import to_toml

__all__ = [
    "Change",
    "Config",
    "changes_since",
    "check_device",
    "check_is_built",
    "check_model_fits",
    "check_nodes",
    "check_num_nodes",
    "check_one_machine",
    "check_world_size",
    "checkpoint_bytes",
    "derived_numbers",
    "describe",
    "help_on_keys",
    "load_config",
    "max_in_flight",
    "num_kept_checkpoints",
    "to_toml",
]
