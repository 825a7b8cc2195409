"""The conversion tools as a user calls them."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest
import torch

import megatron_sao.parallel  # noqa: F401  first: makes megatron.core importable without CUDA
from megatron_sao.errors import CheckpointError, ConfigError
from megatron_sao.models import new_folder
from megatron_sao.models.checkpoint import StoredWeights
from megatron_sao.models.conversion import hf_to_megatron
from megatron_sao.rollout.greedy import GREEDY_FILE, GreedyRecord
from tests.support.families import make_family_folder
from tests.support.folders import read_weights, with_fused_experts, write_shards, write_weights

TOOLS = Path(__file__).parents[2] / "tools"


def main_of(tool):
    spec = importlib.util.spec_from_file_location(tool, TOOLS / f"{tool}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.main


@pytest.fixture
def folder(tmp_path):
    return make_family_folder("glm4_moe", tmp_path / "hf", mtp=True, mtp_copies=True, seed=1)


def test_a_round_trip_is_checked_and_leaves_nothing(folder, capsys):
    before = sorted(path.name for path in folder.parent.iterdir())
    count = len(read_weights(folder))
    assert main_of("check_roundtrip")([str(folder), "--dry-run"]) == 0
    said = capsys.readouterr().out
    assert said.startswith(f"dry run, nothing written. {count} tensors of ") and f" below {folder.parent}, " in said
    assert main_of("check_roundtrip")([str(folder)]) == 0
    said = capsys.readouterr().out.splitlines()[-1]
    assert said == f"CHECK roundtrip tensors={count} equal={count} missing=0 added=0 config_equal=True"
    assert sorted(path.name for path in folder.parent.iterdir()) == before


def test_both_tools_say_what_they_did(folder, tmp_path, capsys):
    config = tmp_path / "run.toml"
    config.write_text('[value]\nloss = "hl_gauss"\nhl_gauss_bins = 7\n')
    main_of("hf_to_megatron")([str(folder), str(tmp_path / "value"), "--role", "value", "--config", str(config)])
    said = capsys.readouterr().out
    assert "the value head starts at zero" in said and "left out: lm_head.weight, model.layers.4." in said
    assert StoredWeights(tmp_path / "value").shapes["output_layer.weight"] == (7, 64)
    assert " MB, about 0 s left" in said, "no terminal: lines instead of a bar"
    main_of("megatron_to_hf")([str(tmp_path / "value"), str(tmp_path / "back")])
    assert "HF tensors" in capsys.readouterr().out
    assert list(read_weights(tmp_path / "back")["value_head.weight"].shape) == [7, 64]


def test_a_dry_run_says_what_the_conversion_then_writes(folder, tmp_path, capsys):
    def says(tool, *arguments):
        main_of(tool)([str(argument) for argument in arguments])
        return capsys.readouterr().out.splitlines()[-1]

    def check(said, out, again):
        assert said.startswith(f"dry run, nothing written. {out} would hold ") and said.endswith(" GB are free there")
        assert not out.exists()
        assert f" would hold {again.split(': ')[1].split(' ')[0]} HF tensors, " in said

    there, back = tmp_path / "there", tmp_path / "back"
    count = len(read_weights(folder))
    said = says("hf_to_megatron", folder, there, "--dry-run")
    check(said, there, f": {count} ")
    says("hf_to_megatron", folder, there)
    said = says("megatron_to_hf", there, back, "--dry-run")
    check(said, back, says("megatron_to_hf", there, tmp_path / "again"))
    for tool, source, out in (("hf_to_megatron", folder, there), ("megatron_to_hf", there, tmp_path / "again")):
        with pytest.raises(CheckpointError, match="exists already"):
            main_of(tool)([str(source), str(out), "--dry-run"])


def test_a_dry_run_refuses_what_the_conversion_would(folder, tmp_path):
    """Names and shapes, too; nothing is written."""
    weights, before = read_weights(folder), sorted(tmp_path.iterdir())
    lost, bias = "model.layers.2.mlp.experts.3.up_proj.weight", "model.layers.1.mlp.gate.e_score_correction_bias"
    for changed, message in (
        ({name: tensor for name, tensor in weights.items() if name != lost}, f"lacks the tensor {lost} of shape"),
        (weights | {"model.layers.0.sinks": torch.ones(3)}, "that no model of ours has: model.layers.0.sinks"),
        (weights | {bias: torch.ones(9)}, rf"holds {bias} with shape \[9\], expected \[8\]"),
    ):
        write_weights(folder, changed)
        for options in (["--dry-run"], []):
            with pytest.raises(CheckpointError, match=message):
                main_of("hf_to_megatron")([str(folder), str(tmp_path / "out"), *options])
    assert sorted(tmp_path.iterdir()) == before


def test_a_dry_run_counts_what_a_value_model_holds(folder, tmp_path, capsys):
    main_of("hf_to_megatron")([str(folder), str(tmp_path / "out"), "--role", "value", "--dry-run"])
    said = capsys.readouterr().out.splitlines()[-1]
    main_of("hf_to_megatron")([str(folder), str(tmp_path / "out"), "--role", "value"])
    written = next(line for line in capsys.readouterr().out.splitlines() if line.startswith(f"{tmp_path / 'out'}: "))
    assert f" would hold {written.split(': ')[1].removesuffix(', as a value')};" in said


def test_a_dry_check_of_an_export_wants_all_files_and_starts_nothing(folder, tmp_path, capsys):
    run_folder = tmp_path / "run"
    run_folder.mkdir()
    (run_folder / "config.toml").write_text("")
    with pytest.raises(ConfigError, match="greedy.json cannot be read"):
        main_of("check_export")([str(run_folder), "--dry-run"])
    record = GreedyRecord(policy_version=7, max_tokens=4, stop_token_ids=[0], continuations=[])
    (run_folder / GREEDY_FILE).write_bytes(msgspec.json.encode(record))
    with pytest.raises(CheckpointError, match="export does not exist"):
        main_of("check_export")([str(run_folder), "--dry-run"])
    folder.rename(run_folder / "export")
    (run_folder / "export" / "tokenizer.json").write_text("{}")
    assert main_of("check_export")([str(run_folder), "--dry-run"]) == 0
    assert "would continue 0 prompts of version 7" in capsys.readouterr().out
    assert not (run_folder / "logs").exists()


def test_a_layout_that_the_model_does_not_fit_is_refused(folder, tmp_path):
    config = tmp_path / "run.toml"
    config.write_text("[parallel]\nep = 3\ndp = 3\n")
    with pytest.raises(ConfigError, match="parallel.ep = 3"):
        main_of("hf_to_megatron")([str(folder), str(tmp_path / "out"), "--config", str(config)])
    assert not (tmp_path / "out").exists()


def test_a_missing_shard_is_named_at_once(folder, tmp_path):  # CKP-01
    weights = read_weights(folder)
    names = list(weights)
    _, second = write_shards(folder, weights, [names[:9], names[9:]])
    (folder / second).unlink()
    (folder / "model.safetensors").write_bytes(b"stray")
    with pytest.raises(CheckpointError, match=second):
        main_of("hf_to_megatron")([str(folder), str(tmp_path / "out")])
    done = subprocess.run(
        [sys.executable, str(TOOLS / "hf_to_megatron.py"), str(folder), str(tmp_path / "out")],
        env=os.environ | {"PYTHONPATH": str(TOOLS.parent)}, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == CheckpointError.exit_code and done.stderr.startswith("error: ") and second in done.stderr
    assert not (tmp_path / "out").exists()


def test_tensors_of_all_experts_are_converted_like_those_of_each(folder, tmp_path):
    """A folder with gate_up_proj and down_proj gives the same checkpoint as one with the experts apart."""
    weights = read_weights(folder)
    fused = with_fused_experts(weights)
    other = tmp_path / "fused"
    other.mkdir()
    (other / "config.json").write_text((folder / "config.json").read_text())
    write_shards(other, fused, [list(fused)[::2], list(fused)[1::2]])
    for source in (folder, other):
        main_of("hf_to_megatron")([str(source), str(tmp_path / f"{source.name}-megatron")])
        main_of("megatron_to_hf")([str(tmp_path / f"{source.name}-megatron"), str(tmp_path / f"{source.name}-back")])
    apart, together = (read_weights(tmp_path / f"{name}-back") for name in ("hf", "fused"))
    assert apart.keys() == together.keys() == weights.keys()
    assert all(torch.equal(apart[name], together[name]) for name in apart)
    assert json.loads((other / "config.json").read_text()) == json.loads(
        (tmp_path / "fused-back" / "config.json").read_text()
    )


@pytest.mark.parametrize(
    "tool", ["hf_to_megatron", "megatron_to_hf", "megatron_to_hf --quantize fp8", "check_roundtrip"]
)
def test_a_disk_without_room_is_refused_before_hours_of_work(folder, tmp_path, monkeypatch, tool):
    checkpoint = tmp_path / "checkpoint"
    hf_to_megatron(folder, checkpoint)
    before = sorted(path.name for path in tmp_path.iterdir())
    monkeypatch.setattr(new_folder.shutil, "disk_usage", lambda path: SimpleNamespace(free=1_000_000))
    tool, *options = tool.split()
    arguments = {"hf_to_megatron": [folder, tmp_path / "out"], "megatron_to_hf": [checkpoint, tmp_path / "out"]}
    with pytest.raises(CheckpointError, match=r"needs .* MB, 1.00 MB are free there"):
        main_of(tool)([*map(str, arguments.get(tool, [folder])), *options])
    assert sorted(path.name for path in tmp_path.iterdir()) == before


def test_a_scratch_folder_that_does_not_exist_is_named(folder, tmp_path):
    with pytest.raises(ConfigError, match="--scratch .*nowhere does not exist"):
        main_of("check_roundtrip")([str(folder), "--scratch", str(tmp_path / "nowhere")])


@pytest.mark.parametrize(("text", "message"), [("{", "is not JSON"), ("[]", "holds a JSON list, expected an object")])
def test_a_source_with_a_broken_configuration_is_named(folder, tmp_path, text, message):
    hf_to_megatron(folder, tmp_path / "checkpoint")
    (tmp_path / "source").mkdir()
    (tmp_path / "source" / "config.json").write_text(text)
    with pytest.raises(CheckpointError, match=f"source/config.json {message}"):
        main_of("megatron_to_hf")(
            [str(tmp_path / "checkpoint"), str(tmp_path / "out"), "--source", str(tmp_path / "source")]
        )


def test_a_source_without_the_checkpoints_mtp_layer_is_refused(folder, tmp_path):
    checkpoint, other = tmp_path / "checkpoint", make_family_folder("qwen3", tmp_path / "other", mtp=False, seed=1)
    hf_to_megatron(folder, checkpoint)
    with pytest.raises(CheckpointError, match=r"holds an MTP layer, .*other/config.json counts 0: .*--source"):
        main_of("megatron_to_hf")([str(checkpoint), str(tmp_path / "out"), "--source", str(other)])
