"""FP8 folders: the values that the matrices had, in the form that vLLM's loader takes."""

import contextlib
import importlib.util
import io
import json
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import megatron_sao.parallel  # noqa: F401  first: makes megatron.core importable without CUDA
from megatron_sao.errors import CheckpointError, ConfigError
from megatron_sao.models import quantize
from megatron_sao.models.hf_folder import HFFolder
from megatron_sao.models.quantize import BLOCK, FP8, LARGEST, SCALE, dequantize, fp8_names, quantize_folder
from megatron_sao.models.tiny import TinyShape, make_tiny_model
from tests.support.ranks import run_ranks

if importlib.util.find_spec("modelopt") is None:  # not imported here: see block_quantizer
    pytest.skip("nvidia-modelopt is not installed", allow_module_level=True)
CLONE = Path(__file__).parents[2]
ZEROS = "model.layers.0.mlp.experts.1.gate_proj.weight"
DOWN = "model.layers.1.mlp.experts.0.down_proj.weight"  # its columns end with a block, its rows begin two
O_PROJ = "model.layers.0.self_attn.o_proj.weight"


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """(source, FP8): experts and output projections fit the blocks, k and v (64 rows each) do not."""
    root = tmp_path_factory.mktemp("fp8")
    shape = TinyShape(layers=2, hidden=256, heads=4, kv_heads=2, head_dim=32, experts=4, expert_ffn=128)
    source = make_tiny_model(root / "source", shape, seed=1)
    weights = load_file(source / "model.safetensors")
    weights[ZEROS].zero_()
    weights[O_PROJ][:, :] *= torch.logspace(-3, 2, 256)[:, None]  # blocks of very different size
    save_file(weights, source / "model.safetensors", metadata={"format": "pt"})
    (printed,) = run_ranks(1, convert_by_tool, source, root, timeout_s=240)  # a fork: modelopt stays out of pytest
    num_fp8 = 2 * (1 + 4 * 3)
    assert len(fp8_names(HFFolder(source))) == num_fp8
    assert printed.splitlines()[-1] == f"{root / 'fp8'}: {len(weights)} HF tensors, {num_fp8} of them in FP8"
    assert sorted(path.name for path in root.iterdir()) == ["checkpoint", "fp8", "source"]
    return source, root / "fp8"


def convert_by_tool(source, root):
    """HF -> distributed checkpoint -> FP8, the last step by tools/megatron_to_hf.py; -> what that printed."""
    from megatron_sao.models.conversion import hf_to_megatron

    hf_to_megatron(source, root / "checkpoint")
    spec = importlib.util.spec_from_file_location("megatron_to_hf", CLONE / "tools" / "megatron_to_hf.py")
    tool = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tool)
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        tool.main([str(root / "checkpoint"), str(root / "fp8"), "--quantize", "fp8"])
    return printed.getvalue()


def test_each_value_is_the_nearest_one_of_its_block(folders):
    """By an independent route: scale = largest magnitude of the block / 448, and torch's own rounding to FP8."""
    source, fp8 = (load_file(folder / "model.safetensors") for folder in folders)
    assert LARGEST == 448
    for name in fp8_names(HFFolder(folders[0])):
        weight, found, scale = source[name], fp8[name], fp8[name + SCALE]
        assert found.dtype == FP8 and scale.dtype == torch.float32
        rows, columns = (size // BLOCK for size in weight.shape)
        assert tuple(scale.shape) == (rows, columns)
        for row in range(rows):
            for column in range(columns):
                part = (slice(BLOCK * row, BLOCK * (row + 1)), slice(BLOCK * column, BLOCK * (column + 1)))
                largest = weight[part].abs().max()
                assert scale[row, column] == pytest.approx(float(largest / 448), rel=1e-6, abs=1e-30)
                expected = (weight[part] / scale[row, column]).to(FP8).float()
                assert torch.equal(found[part].float(), expected)
        back = dequantize(found, scale)
        blocks = scale.repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)
        # 3 bits behind the leading one: at most 1/16 of the value away, or half the smallest step of the block (2^-10).
        assert ((back - weight).abs() <= torch.maximum(weight.abs() / 16, blocks * 2**-10) * (1 + 1e-6)).all()
        assert not torch.equal(back, weight) or name == ZEROS


def test_a_block_of_zeros_stays_zero(folders):
    fp8 = load_file(folders[1] / "model.safetensors")
    assert not fp8[ZEROS].float().any() and (fp8[ZEROS + SCALE] > 0).all()


def test_what_does_not_fit_or_is_delicate_keeps_every_bit_and_is_named_to_the_engine(folders):
    source, fp8 = (load_file(folder / "model.safetensors") for folder in folders)
    chosen = fp8_names(HFFolder(folders[0]))
    for name in source.keys() - chosen:
        assert fp8[name].dtype == source[name].dtype and torch.equal(fp8[name], source[name])
    assert fp8.keys() == source.keys() | {name + SCALE for name in chosen}
    config = json.loads((folders[1] / "config.json").read_text())
    settings = config.pop("quantization_config")
    assert config == json.loads((folders[0] / "config.json").read_text())
    assert settings["quant_method"] == "fp8" and settings["weight_block_size"] == [128, 128]
    kept = [f"model.layers.{layer}.{name}" for layer in range(2)
            for name in ("mlp.gate", "self_attn.k_proj", "self_attn.q_proj", "self_attn.v_proj")]  # fmt: skip
    assert settings["modules_to_not_convert"] == ["lm_head", "model.embed_tokens", *kept]
    assert (folders[1] / "tokenizer.json").exists()


def test_vllm_loads_every_tensor_where_it_belongs(folders, tmp_path):
    """Its own model, quantisation config and loader; q, k and v as one matrix, experts as two tensors a layer."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    command = [sys.executable, "-m", "tests.support.load_in_vllm", str(folders[1]), port, str(tmp_path / "out")]
    done = subprocess.run(command, cwd=CLONE, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr[-3000:]
    result = torch.load(tmp_path / "out")
    held, fp8 = result["parameters"], load_file(folders[1] / "model.safetensors")
    of_attention = ("q_scale", "k_scale", "v_scale", "prob_scale")  # have defaults where a folder brings none
    assert set(result["loaded"]) == {name for name in held if not name.endswith(of_attention)}
    for layer in range(2):
        at = f"model.layers.{layer}."
        for end in ("weight", "weight" + SCALE):
            assert same(held[f"{at}self_attn.o_proj.{end}"], fp8[f"{at}self_attn.o_proj.{end}"])
            for expert in range(4):
                gate, up, down = (fp8[f"{at}mlp.experts.{expert}.{p}_proj.{end}"] for p in ("gate", "up", "down"))
                experts = f"{at}mlp.experts.routed_experts."
                assert same(held[experts + end.replace("weight", "w13_weight", 1)][expert], torch.cat([gate, up]))
                assert same(held[experts + end.replace("weight", "w2_weight", 1)][expert], down)
        qkv = torch.cat([fp8[f"{at}self_attn.{p}_proj.weight"] for p in "qkv"])
        assert same(held[f"{at}self_attn.qkv_proj.weight"], qkv.bfloat16())


def same(a, b):
    return a.dtype == b.dtype and torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


def shapes_of(monkeypatch, tmp_path, **shapes):
    """Which of these matrices become FP8; names as in layer 0."""
    folder = HFFolder.__new__(HFFolder)
    folder.path, folder.config = tmp_path, {}
    held = {f"model.layers.0.{name.replace('__', '.')}.weight": shape for name, shape in shapes.items()}
    monkeypatch.setattr(folder, "names", lambda: list(held), raising=False)
    monkeypatch.setattr(folder, "shape", held.__getitem__, raising=False)
    return {name.removeprefix("model.layers.0.").removesuffix(".weight") for name in fp8_names(folder)}


def test_matrices_that_are_computed_as_one_become_fp8_all_or_none(monkeypatch, tmp_path):
    """The shapes of GLM-5: its latents end within a block (2048 + 576 rows), which the last of a group may."""
    found = shapes_of(
        monkeypatch, tmp_path,
        self_attn__q_a_proj=(2048, 6144), self_attn__kv_a_proj_with_mqa=(576, 6144), self_attn__o_proj=(6144, 16384),
        self_attn__indexer__wk=(128, 6144), mlp__gate=(256, 6144), mlp__experts__0__gate_proj=(128, 256),
        mlp__experts__0__up_proj=(128, 256), mlp__experts__0__down_proj=(256, 128),
        mlp__experts__1__gate_proj=(96, 256),
        mlp__shared_experts__gate_proj=(128, 256), mlp__shared_experts__up_proj=(128, 256),
        mlp__shared_experts__down_proj=(256, 96),
    )  # fmt: skip
    assert found == {
        "self_attn.q_a_proj", "self_attn.kv_a_proj_with_mqa", "self_attn.o_proj",
        "mlp.shared_experts.gate_proj", "mlp.shared_experts.up_proj",
    }  # fmt: skip


def test_a_quantization_of_null_is_none(tmp_path):
    shape = TinyShape(layers=1, hidden=128, expert_ffn=128, experts=2)
    folder = HFFolder(make_tiny_model(tmp_path / "source", shape, seed=1))
    expected = fp8_names(folder)
    folder.config["quantization_config"] = None
    assert fp8_names(folder) == expected


def test_what_cannot_be_quantised_is_refused_and_leaves_no_folder(folders, tmp_path, monkeypatch):
    small = make_tiny_model(tmp_path / "small", TinyShape(), seed=1)
    broken = make_tiny_model(tmp_path / "broken", TinyShape(layers=1, hidden=128, expert_ffn=128, experts=2), seed=1)
    weights = load_file(broken / "model.safetensors")
    name = "model.layers.0.mlp.experts.0.up_proj.weight"
    weights[name][3, 5] = float("inf")
    save_file(weights, broken / "model.safetensors", metadata={"format": "pt"})
    monkeypatch.setattr(quantize, "block_quantizer", lambda: lambda weight: (weight.to(FP8), torch.ones(1, 1)))
    for source, reason in ((small, "no matrix of this model"), (folders[1], "quantised already"), (broken, name)):
        with pytest.raises(CheckpointError, match=reason):
            quantize_folder(source, tmp_path / "out")
    assert not list(tmp_path.glob("out*"))


def test_without_modelopt_it_says_what_to_install(folders, tmp_path, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="FP8 needs the package nvidia-modelopt"):
        quantize_folder(folders[0], tmp_path / "out")
