"""A conversion's memory is bounded by its largest tensors, not by the model: measured in a process of its own."""

import json
import os
import struct
import subprocess
import sys
from pathlib import Path

import pytest

HIDDEN, VOCAB, EXPERTS = 1024, 65536, 64
GROUP = VOCAB * HIDDEN * 2  # bytes of the largest tensor, the embedding
GB = 10**9

CHILD = """
import json, shutil, sys
import megatron_sao.parallel
from megatron_sao.models import conversion
from torch.distributed.checkpoint import FileSystemWriter

def peak():
    line = next(line for line in open("/proc/self/status") if line.startswith("VmHWM"))
    return int(line.split()[1]) * 1024

root, steps = sys.argv[1], []
conversion.hf_to_megatron(f"{root}/small", f"{root}/small-megatron")
conversion.megatron_to_hf(f"{root}/small-megatron", f"{root}/small-hf")
steps.append(peak())
conversion.hf_to_megatron(f"{root}/large", f"{root}/large-megatron")
steps.append(peak())
conversion.megatron_to_hf(f"{root}/large-megatron", f"{root}/large-hf")
steps.append(peak())
shutil.rmtree(f"{root}/large-megatron")
shutil.rmtree(f"{root}/large-hf")
conversion.OneByOneWriter.write_data = FileSystemWriter.write_data
conversion.hf_to_megatron(f"{root}/large", f"{root}/again")
steps.append(peak())
shutil.rmtree(f"{root}/again")
print(json.dumps(steps))
"""


def sparse_model(folder: Path, layers: int, vocab: int) -> int:
    """A Qwen3-MoE of zeros that takes no disk; -> bytes of its tensors."""
    from megatron_sao.convert.expected import expected_tensors

    config = dict(
        model_type="qwen3_moe", vocab_size=vocab, hidden_size=HIDDEN, num_hidden_layers=layers, num_attention_heads=8,
        num_key_value_heads=2, head_dim=128, intermediate_size=HIDDEN, moe_intermediate_size=HIDDEN,
        num_experts=EXPERTS, num_experts_per_tok=2, norm_topk_prob=True, rms_norm_eps=1e-6, rope_theta=10000.0,
        max_position_embeddings=256, tie_word_embeddings=False,
    )  # fmt: skip
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    header, end = {}, 0
    for name, shape in expected_tensors(config).items():
        size = 2 * shape[0] * (shape[1] if len(shape) > 1 else 1)
        header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [end, end + size]}
        end += size
    encoded = json.dumps(header).encode()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(encoded)) + encoded)
        file.truncate(8 + len(encoded) + end)
    return end


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="the peak is read from /proc (Linux)")
def test_memory_does_not_grow_with_the_model(tmp_path):
    sparse_model(tmp_path / "small", layers=1, vocab=1024)
    model_bytes = sparse_model(tmp_path / "large", layers=4, vocab=VOCAB)
    bound = 3 * GROUP + GB
    assert model_bytes > bound + GB / 4, "or holding it all would pass"
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", CHILD, str(tmp_path)],
        env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=240, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    small, there, back, careless = json.loads(done.stdout.splitlines()[-1])
    print("peaks in GB:", [round(peak / GB, 2) for peak in (small, there, back, careless)], "bound:", bound / GB)
    assert there <= back <= bound
    assert back - small <= 3 * GROUP, "what the model's size adds"
    assert careless > bound + GB / 4, "torch's own writer keeps a file's tensors: the measurement shows it"
