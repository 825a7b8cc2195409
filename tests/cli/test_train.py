"""A trainer rank as its command runs it, from the prepared folder on."""

import json

import megatron_sao.parallel  # noqa: F401  first: makes megatron.core importable without CUDA
from megatron_sao.cli.run_folder import RunStart, announce_ready
from megatron_sao.cli.train import run_trainer
from megatron_sao.config import load_config
from tests.support.ranks import run_ranks


def trained(run_folder, model):
    run_trainer(load_config(None, ["parallel.dp=2"]), run_folder, RunStart(model, resume=None), "127.0.0.1")


def test_a_trainer_that_is_ready_only_after_the_run_was_stopped_ends_well(tmp_path, tiny_folder):
    """The scheduler has not waited for it: it would find nobody at that address."""
    announce_ready(tmp_path, "tcp://127.0.0.1:9")
    (tmp_path / "scheduler_summary.json").write_text(json.dumps({"outcome": "stopped"}))
    run_ranks(2, trained, tmp_path, tiny_folder, timeout_s=120)
    assert not (tmp_path / "result.json").exists()
