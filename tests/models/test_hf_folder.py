"""A model folder is opened whole or refused, by the name of what is wrong."""

import json

import pytest
import torch
from safetensors.torch import save_file

from megatron_sao.errors import CheckpointError
from megatron_sao.models.hf_folder import HFFolder
from megatron_sao.transport.hf_shapes import read_shapes
from tests.support.folders import write_shards, write_weights

WEIGHTS = {"a": torch.arange(12.0).view(4, 3), "b": torch.arange(4.0), "c": torch.ones(2, 2)}
FIRST, SECOND = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
INDEX = "model.safetensors.index.json"


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "qwen3"}')
    return tmp_path


@pytest.fixture
def sharded(folder):
    assert write_shards(folder, WEIGHTS, [["a"], ["b", "c"]]) == [FIRST, SECOND]
    return folder


def test_one_file_and_shards_read_alike(folder):
    for write in (write_weights, lambda *what: write_shards(*what, [["a"], ["b", "c"]])):
        write(folder, WEIGHTS)
        opened = HFFolder(folder)
        assert sorted(opened.names()) == ["a", "b", "c"] and opened.config == {"model_type": "qwen3"}
        assert opened.shape("a") == (4, 3) and opened.has("b") and not opened.has("d")
        assert torch.equal(opened.read("a", (4, 3), 0, 0, 4), WEIGHTS["a"])


def test_rows_and_columns_of_a_tensor(sharded):
    opened = HFFolder(sharded)
    assert torch.equal(opened.read("a", (4, 3), 0, 1, 2), WEIGHTS["a"][1:3])
    assert torch.equal(opened.read("a", (4, 3), 1, 2, 1), WEIGHTS["a"][:, 2:])
    assert opened.read("b", (4,), 0, 3, 1).tolist() == [3]


def test_a_missing_folder_or_configuration(tmp_path):
    with pytest.raises(CheckpointError, match="absent does not exist; name .model.path. a folder"):
        HFFolder(tmp_path / "absent")
    with pytest.raises(CheckpointError, match="no config.json"):
        HFFolder(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(CheckpointError, match="config.json is not JSON"):
        HFFolder(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(CheckpointError, match="config.json holds a JSON list, expected an object"):
        HFFolder(tmp_path)


@pytest.mark.parametrize("absent", [FIRST, SECOND])
def test_a_shard_that_is_not_on_disk_is_named(sharded, absent):
    (sharded / absent).unlink()
    with pytest.raises(CheckpointError, match=f"lacks {absent}"):
        HFFolder(sharded)


def test_all_missing_shards_are_named_at_once(sharded):
    (sharded / FIRST).unlink()
    (sharded / SECOND).unlink()
    with pytest.raises(CheckpointError, match=f"{FIRST}, {SECOND}"):
        HFFolder(sharded)


def test_without_any_weights(folder):
    with pytest.raises(CheckpointError, match="lacks model.safetensors"):
        HFFolder(folder)


def test_a_stray_file_beside_an_index_is_not_read(sharded):
    save_file({"a": torch.full((4, 3), -1.0), "z": torch.ones(1)}, sharded / "model.safetensors")
    opened = HFFolder(sharded)
    assert not opened.has("z") and torch.equal(opened.read("a", (4, 3), 0, 0, 4), WEIGHTS["a"])


def test_a_tensor_that_its_shard_does_not_hold_is_named(sharded):
    index = json.loads((sharded / INDEX).read_text())
    index["weight_map"]["d"] = SECOND
    (sharded / INDEX).write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match=f"d is in {SECOND}"):
        HFFolder(sharded)


@pytest.mark.parametrize(("stray", "said"), [("d", "does not name it"), ("a", f"puts it into {FIRST}")])
def test_a_tensor_that_the_index_does_not_place_where_it_stands_is_named(sharded, stray, said):
    """transformers and vLLM load every tensor of a file that the index names."""
    held = {name: WEIGHTS[name] for name in ("b", "c")}
    save_file(held | {stray: torch.full((4, 3), -1.0)}, sharded / SECOND)
    with pytest.raises(CheckpointError, match=f"{SECOND} holds {stray}, but {INDEX} {said}"):
        HFFolder(sharded)


@pytest.mark.parametrize("weight_map", ["{}", "null", '["a"]', '{"a": 1}', '{"a": null, "b": "model.safetensors"}'])
@pytest.mark.parametrize("read", [HFFolder, read_shapes])
def test_an_index_without_a_weight_map_is_refused_and_no_other_file_tried(sharded, weight_map, read):
    save_file(WEIGHTS, sharded / "model.safetensors")
    for text in ("{}", f'{{"weight_map": {weight_map}}}'):
        (sharded / INDEX).write_text(text)
        with pytest.raises(CheckpointError, match="has no weight_map from tensor names to file names"):
            read(sharded)


@pytest.mark.parametrize("keep_bytes", [0, 5, 100, -8])
def test_a_truncated_shard_is_named(sharded, keep_bytes):
    raw = (sharded / SECOND).read_bytes()
    (sharded / SECOND).write_bytes(raw[:keep_bytes])
    with pytest.raises(CheckpointError, match=f"{SECOND} cannot be read"):
        HFFolder(sharded)


def test_a_tensor_of_another_shape_says_both(sharded):
    opened = HFFolder(sharded)
    with pytest.raises(CheckpointError, match=r"a has shape \[4, 3\], expected \[8, 3\]"):
        opened.read("a", (8, 3), 0, 0, 4)
    with pytest.raises(CheckpointError, match=r"lacks the tensor d of shape \[2\]"):
        opened.read("d", (2,), 0, 0, 2)


def test_tensors_of_all_experts_are_shown_one_by_one(folder):
    gate_up, down = torch.arange(3 * 8 * 5.0).view(3, 8, 5), torch.arange(3 * 5 * 4.0).view(3, 5, 4).bfloat16()
    place = "model.layers.1.mlp.experts."
    write_weights(folder, {place + "gate_up_proj": gate_up, place + "down_proj": down})
    opened = HFFolder(folder)
    assert len(opened.names()) == 9
    for expert in range(3):
        parts = {"gate": gate_up[expert, :4], "up": gate_up[expert, 4:], "down": down[expert]}
        for part, whole in parts.items():
            name, shape = f"{place}{expert}.{part}_proj.weight", tuple(whole.shape)
            assert opened.shape(name) == shape and opened.dtype(name) == whole.dtype
            assert torch.equal(opened.read_whole(name), whole)
            assert torch.equal(opened.read(name, shape, 0, 1, 3), whole[1:4])
            assert torch.equal(opened.read(name, shape, 1, 2, 2), whole[:, 2:4])
    with pytest.raises(CheckpointError, match=r"0.up_proj.weight has shape \[4, 5\], expected \[8, 5\]"):
        opened.read(f"{place}0.up_proj.weight", (8, 5), 0, 0, 8)


@pytest.mark.parametrize(
    ("stored", "message"),
    [
        ({"gate_up_proj": (2, 4, 3), "0.gate_proj.weight": (2, 3)},
         "0.gate_proj.weight is there twice: in .*experts.0.gate_proj.weight and in .*experts.gate_up_proj"),
        ({"down_proj": (2, 4, 3), "down_proj.weight": (2, 4, 3)},
         "0.down_proj.weight is there twice: in .*experts.down_proj and in .*experts.down_proj.weight"),
        ({"gate_up_proj": (2, 5, 3)}, r"gate_up_proj of shape \[2, 5, 3\] has 5 rows: no gate and up projection"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("read", [HFFolder, read_shapes])
def test_experts_that_are_there_twice_or_in_no_two_halves_are_refused(folder, stored, message, read):
    write_weights(folder, {f"model.layers.1.mlp.experts.{name}": torch.ones(shape) for name, shape in stored.items()})
    with pytest.raises(CheckpointError, match=f"model folder .*: model.layers.1.mlp.experts.{message}"):
        read(folder)


def test_the_engines_side_lists_a_folder_as_the_trainer_does(folder):
    place = "model.layers.1.mlp.experts."
    fused = {place + "gate_up_proj": torch.ones(3, 8, 5), place + "down_proj": torch.ones(3, 5, 4)}
    write_weights(folder, WEIGHTS | fused)
    opened, listed = HFFolder(folder), read_shapes(folder)
    assert listed == {name: opened.shape(name) for name in opened.names()}
    assert listed["a"] == (4, 3) and listed[f"{place}2.up_proj.weight"] == (4, 5) and len(listed) == 12
