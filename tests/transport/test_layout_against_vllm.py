"""Each worker of an engine is sent the elements that vLLM's own model classes load there, and no others."""

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file

import megatron_sao.parallel  # noqa: F401  first: makes megatron.core importable without CUDA
from megatron_sao.config.engine import Engine
from megatron_sao.convert.family import read_shape
from megatron_sao.models.hf_folder import HFFolder
from megatron_sao.transport.engine_layout import WHOLE, engine_layout
from megatron_sao.transport.plan import WireItem, make_plan
from tests.support.families import make_family_folder

SCRIPT = Path(__file__).parents[1] / "support" / "layouts_in_vllm.py"
FULL = dict(tensor_parallel=2, pipeline_parallel=2, expert_parallel=True)
CASES = {  # family, fields of its config, [engine]
    "qwen3": ("qwen3", {}, dict(tensor_parallel=2, pipeline_parallel=2)),
    "qwen3-tied-uneven": ("qwen3", dict(tie_word_embeddings=True), dict(pipeline_parallel=3)),
    "qwen3-shared-heads": ("qwen3", {}, dict(tensor_parallel=4)),
    "qwen3_moe": ("qwen3_moe", {}, dict(tensor_parallel=2)),
    "qwen3_moe-full": ("qwen3_moe", {}, FULL),
    "glm4_moe-full": ("glm4_moe", dict(n_shared_experts=2), FULL),
    "glm4_moe-replicas": ("glm4_moe", {}, dict(data_parallel=2, expert_parallel=True)),
    "deepseek_v3-full": ("deepseek_v3", {}, FULL),
    "deepseek_v3-replicas": ("deepseek_v3", {}, FULL | dict(pipeline_parallel=1, data_parallel=2)),
    "glm_moe_dsa-full": ("glm_moe_dsa", {}, FULL),
}


@pytest.fixture(scope="module")
def loaded(tmp_path_factory):
    """case -> (folder, whether each worker loads each element)."""
    root, given = tmp_path_factory.mktemp("layouts"), []
    for name, (family, fields, engine) in CASES.items():
        folder = make_family_folder(family, root / name, mtp=False, seed=1, vocab_size=130, **fields)
        given.append([str(folder), {OPTIONS[key]: value for key, value in engine.items()}])
    done = subprocess.run(
        [sys.executable, str(SCRIPT), json.dumps(given), str(root / "out")], capture_output=True, text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"}, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    masks = torch.load(root / "out")
    return {name: (folder, mask) for name, (folder, _), mask in zip(CASES, given, masks, strict=True)}


OPTIONS = {
    "tensor_parallel": "tensor_parallel_size", "pipeline_parallel": "pipeline_parallel_size",
    "data_parallel": "data_parallel_size", "expert_parallel": "enable_expert_parallel",
}  # fmt: skip


def sent_to(kind: int, plan, weights: dict[str, torch.Tensor]) -> torch.Tensor:
    """Whether each element of the folder, in the order of the names, is sent to workers of a kind."""
    masks = {name: torch.zeros(tensor.shape, dtype=torch.bool) for name, tensor in sorted(weights.items())}
    for bucket in plan.buckets:
        for item in bucket.items if bucket.is_for(kind) else ():
            mask = masks[item.name]
            (mask if item.dim == WHOLE else mask.narrow(item.dim, item.start, item.length)).fill_(True)
    return torch.cat([mask.flatten() for mask in masks.values()])


@pytest.mark.parametrize("case", CASES)
def test_a_worker_is_sent_what_it_loads(loaded, case):
    folder, masks = loaded[case]
    # Not from a file: the check of a whole configuration refuses what Megatron could not do.
    config = SimpleNamespace(engine=Engine(**CASES[case][2]))
    layout = engine_layout(config, read_shape(HFFolder(folder).config))
    weights = load_file(f"{folder}/model.safetensors")
    items = [WireItem(name, "float32", tuple(tensor.shape)) for name, tensor in weights.items()]
    plan = make_plan([items], bucket_bytes=1 << 16, engine=layout)
    assert len(masks) == layout.num_workers
    for kind, is_loaded in enumerate(masks):
        is_sent = sent_to(kind, plan, weights)
        wrong = (is_sent != is_loaded).nonzero().flatten().tolist()
        assert not wrong, f"worker {kind}: {names_of(wrong, weights)}"
        assert is_sent.any() and (layout.num_workers == 1 or not is_sent.all())


def names_of(elements: list[int], weights: dict[str, torch.Tensor]) -> list[str]:
    """The tensors that these elements belong to."""
    ends = torch.tensor([tensor.numel() for _, tensor in sorted(weights.items())]).cumsum(0)
    names = sorted(weights)
    return sorted({names[int(torch.searchsorted(ends, element, right=True))] for element in elements})
