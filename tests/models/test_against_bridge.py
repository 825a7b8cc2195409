"""A converted checkpoint holds what Megatron-Bridge, NVIDIA's own converter, makes of the same folder, and back."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import megatron_sao.parallel  # noqa: F401  first: makes megatron.core importable without CUDA
from megatron_sao.models.conversion import hf_to_megatron, megatron_to_hf
from tests.support import bridge_oracle
from tests.support.families import FAMILIES, FAMILIES_WITH_MTP, make_family_folder
from tests.support.folders import read_weights

bridge = bridge_oracle.bridge_folder()
pytestmark = pytest.mark.skipif(not bridge.exists(), reason=f"Megatron-Bridge is not in {bridge} (launch/env.sh)")


def test_bridge_reads_and_writes_the_same_bits(tmp_path):
    cases = []
    for family in FAMILIES:
        folder = make_family_folder(family, tmp_path / family, mtp=family in FAMILIES_WITH_MTP, seed=6)
        hf_to_megatron(folder, tmp_path / f"{family}-megatron")
        megatron_to_hf(tmp_path / f"{family}-megatron", tmp_path / f"{family}-hf")
        cases.append((str(folder), str(tmp_path / f"{family}-megatron"), str(tmp_path / f"{family}.safetensors")))
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "tests.support.bridge_oracle", json.dumps(cases)],
        env=os.environ | {"PYTHONPATH": f"{bridge}{os.pathsep}{root}"},
        cwd=root, capture_output=True, text=True, timeout=240, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    assert json.loads(done.stdout.splitlines()[-1]) == [[]] * len(FAMILIES), "the same Megatron tensors"
    for family, (_, _, exported) in zip(FAMILIES, cases, strict=True):
        theirs, ours = load_file(exported), read_weights(tmp_path / f"{family}-hf")
        assert theirs.keys() == ours.keys() and len(ours) > 40
        assert all(torch.equal(theirs[name], ours[name]) for name in ours)
