"""What a push of a model of 200 MB or more costs, between two trainer ranks and a real vLLM engine of one worker.

    python -m tests.bench.push [--layers 4] [--bucket-mib 16] [--repeats 5]

One run measures, in turn, so that other work on the machine hits all alike:
- raw: the same bytes in the same buckets as bare gloo broadcasts from their owners between the same three processes;
- transfer: a push into the engine's receiver that loads nothing: seconds until the last byte has arrived;
- push: the whole thing into vLLM; `load` is what the engine spends in putting tensors together and loading them.
transfer_ratio = transfer / raw, total_ratio = push / max(transfer, load): 1 = the shorter one is hidden completely.
bytes_ratio = bytes that the trainer ranks sent (trailers included) / bytes of the tensors. pause = from the moment the
engine enters the loading state to the moment it may serve again. Each is the median over the repeats.
"""

import argparse
import base64
import os
import statistics
import tempfile
import time
from pathlib import Path

import torch
from safetensors import safe_open

from megatron_sao.transport.group import WeightGroup, host_store, weight_group
from megatron_sao.transport.message import TRAILER_BYTES
from megatron_sao.transport.plan import PushPlan, WireItem, encode_plan, make_plan
from megatron_sao.transport.sender import WeightSender
from tests.support.ranks import run_ranks

TIMEOUT_S = 300.0
NUM_TRAINERS = 2
WORLD = NUM_TRAINERS + 1


def make_model(folder: Path, layers: int) -> None:
    """A random Qwen3-MoE of 50 MB a layer in float32, and 33 MB of embedding and output layer."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=8192, hidden_size=512, intermediate_size=1024, moe_intermediate_size=1024, num_hidden_layers=layers,
        num_attention_heads=8, num_key_value_heads=4, head_dim=64, num_experts=8, num_experts_per_tok=2,
        norm_topk_prob=True, max_position_embeddings=512, tie_word_embeddings=False, eos_token_id=1, pad_token_id=0,
    )  # fmt: skip
    Qwen3MoeForCausalLM(config).save_pretrained(folder)


def owned(rank: int, shapes: dict[str, tuple[int, ...]]) -> list[WireItem]:
    """As tensor and expert parallel 2: halves of what is cut, every other expert and every other small tensor."""
    items = []
    for number, (name, shape) in enumerate(sorted(shapes.items())):
        if ".experts." not in name and ("_proj" in name or "embed" in name or "lm_head" in name):
            dim = 1 if "o_proj" in name else 0
            half = shape[dim] // 2
            items.append(WireItem(name, "float32", shape, dim, rank * half, half))
        elif number % NUM_TRAINERS == rank:
            items.append(WireItem(name, "float32", shape))
    return items


def raw_broadcast_s(group: WeightGroup, plan: PushPlan, buffer: torch.Tensor) -> float:
    """Seconds from the first to the last byte. Collective: everybody."""
    group.gather([0])
    started = time.monotonic()
    for bucket in plan.buckets:
        group.broadcast(buffer[: bucket.num_bytes], bucket.src_rank)
    seconds = time.monotonic() - started
    group.gather([0])
    return seconds


def trainer(
    rank: int, group: WeightGroup, raw: WeightGroup, plan: PushPlan, file: Path, repeats: int
) -> tuple[int, float]:
    """Returns: bytes sent in one push, seconds that filling the first buffers takes before the pause."""
    with safe_open(file, "pt") as opened:
        weights = {name: opened.get_tensor(name) for name in opened.keys()}

    def view(item: WireItem) -> torch.Tensor:
        whole = weights[item.name]
        return whole if item.dim < 0 else whole.narrow(item.dim, item.start, item.length)

    sender, buffer, prepare_s = WeightSender(group, plan), torch.ones(plan.max_bucket_bytes, dtype=torch.uint8), []
    for version in range(1, 2 * repeats + 3):
        if version % 2:
            raw_broadcast_s(raw, plan, buffer)
        began = time.monotonic()
        sender.prepare(view, version)
        prepare_s.append(time.monotonic() - began)
        raw.gather([0])  # as the scheduler lets the engines pause only when the ranks are ready
        sent = sender.send(view, version)
    num_messages = sum(bucket.src_rank == rank for bucket in plan.buckets)
    return sent.sent_bytes + num_messages * TRAILER_BYTES, statistics.median(prepare_s)


def engine(ports: tuple[int, int], raw: WeightGroup, plan: PushPlan, folder: Path, repeats: int) -> dict[str, float]:
    """Returns: medians of the seconds."""
    os.environ.update(VLLM_ENABLE_V1_MULTIPROCESSING="0", TORCH_COMPILE_DISABLE="1", VLLM_CPU_OMP_THREADS_BIND="nobind")
    from vllm import LLM

    import megatron_sao.transport.vllm_plugin  # noqa: F401  registers the backend

    llm = LLM(
        str(folder), skip_tokenizer_init=True, dtype="float32", enforce_eager=True, max_model_len=64, max_num_seqs=4,
        distributed_executor_backend="uni", kv_cache_memory_bytes=16 << 20, weight_transfer_config={"backend": "sao"},
    )  # fmt: skip
    info = {
        "master_address": "127.0.0.1", "master_port": ports[0], "rank_offset": NUM_TRAINERS, "world_size": WORLD,
        "plan": base64.b64encode(encode_plan(plan)).decode(), "plan_hash": plan.hash, "timeout_s": TIMEOUT_S,
    }  # fmt: skip
    llm.init_weight_transfer_engine({"init_info": info})
    (receiver,) = llm.collective_rpc(lambda worker: worker.weight_transfer_engine._receiver)
    buffer = torch.ones(plan.max_bucket_bytes, dtype=torch.uint8)
    found: dict[str, list[float]] = {name: [] for name in ("raw", "transfer", "arrival", "load", "push", "pause")}
    for version in range(1, 2 * repeats + 3, 2):
        found["raw"].append(raw_broadcast_s(raw, plan, buffer))
        raw.gather([0])
        receiver.receive(version, load=lambda tensors: None)
        found["transfer"].append(receiver.statistics.arrival_s)
        raw.gather([0])
        began = time.monotonic()
        llm.start_weight_update()
        llm.update_weights({"update_info": {"policy_version": version + 1, "plan_hash": plan.hash}})
        llm.finish_weight_update(str(version + 1))
        found["pause"].append(time.monotonic() - began)
        measured = receiver.statistics
        found["arrival"].append(measured.arrival_s)
        found["load"].append(measured.load_s)
        found["push"].append(measured.total_s)
    return {name: statistics.median(values[1:]) for name, values in found.items()}  # the first warms up


def rank_of_the_run(folder: Path, plan: PushPlan, repeats: int):
    rank = int(os.environ["RANK"])
    ports = folder.parent / "ports"
    stores = [host_store("127.0.0.1", timeout_s=TIMEOUT_S) for _ in range(2)] if rank == 0 else [None, None]
    if rank == 0:
        ports.with_suffix(".new").write_text(" ".join(str(store.port) for store in stores))
        ports.with_suffix(".new").rename(ports)
    while not ports.exists():
        time.sleep(0.05)
    numbers = tuple(map(int, ports.read_text().split()))
    raw = weight_group("127.0.0.1", numbers[1], rank, WORLD, timeout_s=TIMEOUT_S, store=stores[1])
    if rank == NUM_TRAINERS:
        return engine(numbers, raw, plan, folder, repeats)
    group = weight_group("127.0.0.1", numbers[0], rank, WORLD, timeout_s=TIMEOUT_S, store=stores[0])
    return trainer(rank, group, raw, plan, folder / "model.safetensors", repeats)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--bucket-mib", type=int, default=16)
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as root:
        folder = Path(root) / "model"
        make_model(folder, options.layers)
        with safe_open(folder / "model.safetensors", "pt") as opened:
            shapes = {name: tuple(opened.get_slice(name).get_shape()) for name in opened.keys()}
        plan = make_plan([owned(rank, shapes) for rank in range(NUM_TRAINERS)], bucket_bytes=options.bucket_mib << 20)
        *sent, seconds = run_ranks(WORLD, rank_of_the_run, folder, plan, options.repeats, timeout_s=2 * TIMEOUT_S)
    needed = sum(4 * torch.Size(shape).numel() for shape in shapes.values())
    sent_bytes = [num_bytes for num_bytes, _ in sent]
    print(
        f"BENCH push transfer_ratio={seconds['transfer'] / seconds['raw']:.3f}"
        f" total_ratio={seconds['push'] / max(seconds['transfer'], seconds['load']):.3f}"
        f" bytes_ratio={sum(sent_bytes) / needed:.4f}"
        f" most_loaded={max(sent_bytes) * NUM_TRAINERS / sum(sent_bytes):.3f}"
        f" model_mb={needed / 1e6:.0f} buckets={len(plan.buckets)}"
        + "".join(f" {name}_s={value:.3f}" for name, value in seconds.items())
        + f" prepare_s={max(s for _, s in sent):.3f}"
    )


if __name__ == "__main__":
    main()
