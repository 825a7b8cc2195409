"""The configurations that come with the project."""

import json
import re
from pathlib import Path

import pytest

from megatron_sao.config import check_model_fits, load_config
from megatron_sao.config.arms import ARMS
from megatron_sao.config.keys import leaf_keys

CONFIGS = Path(__file__).parents[2] / "configs"


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.toml")), ids=lambda path: path.stem)
def test_each_configuration_loads_and_says_on_what_hardware(path):
    assert load_config(path).run.name == path.stem
    assert path.read_text().startswith("# Hardware: ")
    assert f"`{path.name}`" in (CONFIGS / "README.md").read_text()


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.toml")), ids=lambda path: path.stem)
def test_what_was_not_run_says_so_and_how_many_gpus_it_takes(path):
    first, config = path.read_text().splitlines()[0], load_config(path)
    if not config.model.path:
        assert first.startswith("# Hardware: run on ")
        return
    planned = re.match(r"# Hardware: planned, not run\. (\d+) GPUs of 80 GB for the trainer", first)
    assert int(planned[1]) == config.parallel.world_size
    shape = json.loads((CONFIGS.parent / config.model.path / "config.json").read_text())
    check_model_fits(config, shape)
    assert config.push.backend == "nccl" and config.model.dtype == "bfloat16"
    assert config.placement.trainer_gpus == config.parallel.world_size
    assert f" for {config.engine.count} engines" in first and f" {config.placement.rollout_gpus} " in first


@pytest.mark.parametrize("arm", ARMS)
def test_each_arm_is_one_field_away_from_the_main_job(arm):
    cfg = load_config(CONFIGS / "local.toml", [f"algo.arm={arm}"])
    assert cfg.algo.arm == arm


def test_every_key_is_described():
    assert [key.path for key in leaf_keys() if not key.description] == []
