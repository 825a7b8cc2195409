"""Reading names and shapes from safetensors headers; broken folders are named before anything starts."""

import json

import numpy as np
import pytest
from safetensors.numpy import save_file

from megatron_sao.errors import CheckpointError
from megatron_sao.transport.hf_shapes import INDEX, check_model_folder, read_shapes


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["Qwen3MoeForCausalLM"]}))
    (tmp_path / "tokenizer.json").write_text("{}")
    save_file({"a": np.zeros((3, 2), np.float32), "b": np.zeros((), np.float32)}, tmp_path / "model.safetensors",
              metadata={"format": "pt"})  # fmt: skip
    return tmp_path


def test_one_file(folder):
    assert check_model_folder(folder) == {"a": (3, 2), "b": ()}


def test_an_index_decides_which_files_count(folder):
    save_file({"c": np.zeros(5, np.float32)}, folder / "two.safetensors")
    save_file({"c": np.zeros(6, np.float32), "unlisted": np.zeros(1, np.float32)}, folder / "unlisted.safetensors")
    index = {"weight_map": {"a": "model.safetensors", "b": "model.safetensors", "c": "two.safetensors"}}
    (folder / INDEX).write_text(json.dumps(index))
    assert read_shapes(folder) == {"a": (3, 2), "b": (), "c": (5,)}
    index["weight_map"]["d"] = "two.safetensors"
    (folder / INDEX).write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match="names d"):
        read_shapes(folder)
    index["weight_map"] = {"a": "model.safetensors", "b": "two.safetensors", "c": "two.safetensors"}
    save_file({"b": np.zeros((), np.float32), "c": np.zeros(5, np.float32)}, folder / "two.safetensors")
    (folder / INDEX).write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match=r"model.safetensors holds b \(and 0 more\)"):
        read_shapes(folder)
    (folder / "two.safetensors").unlink()
    with pytest.raises(CheckpointError, match="two.safetensors is missing"):
        read_shapes(folder)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda f: (f / "config.json").unlink(), "config.json is missing"),
        (lambda f: (f / "config.json").write_text("{"), "cannot be read as JSON"),
        (lambda f: (f / "config.json").write_text("[]"), "holds no JSON object"),
        (lambda f: (f / "config.json").write_text("{}"), "names no architectures"),
        (lambda f: (f / "tokenizer.json").unlink(), "has no tokenizer"),
        (lambda f: (f / "model.safetensors").unlink(), "model.safetensors is missing"),
        (lambda f: _cut(f / "model.safetensors", -1), "is truncated"),
        (lambda f: _cut(f / "model.safetensors", 20), "is truncated"),
        (lambda f: _cut(f / "model.safetensors", 3), "is no safetensors file"),
        (lambda f: (f / "model.safetensors").write_bytes(b"\x04" + b"\0" * 7 + b"text"), "is no safetensors file"),
        (lambda f: (f / INDEX).write_text('{"weight_map": 3}'), "has no weight_map"),
    ],
)
def test_a_broken_folder_is_named(folder, damage, message):
    damage(folder)
    with pytest.raises(CheckpointError, match=message):
        check_model_folder(folder)


def test_a_missing_folder_says_where_to_change_it(tmp_path):
    with pytest.raises(CheckpointError, match="model.path"):
        check_model_folder(tmp_path / "nowhere")


def _cut(path, size):
    content = path.read_bytes()
    path.write_bytes(content[:size])
