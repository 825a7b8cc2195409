"""Pushes from real Megatron trainers in several layouts into real vLLM servers in several layouts.

Each server starts from the folder NEW, which gives what freshly loaded weights compute. Then trainers push OTHER, which
must differ, and NEW again, which must agree to the last bit.
"""

import asyncio
import base64
import os
import shutil
import signal
import threading
import time

import pytest
import torch
from safetensors.torch import load_file, save_file

import megatron_sao.parallel  # noqa: F401  first: makes megatron.core importable without CUDA
from megatron_sao.config import load_config
from megatron_sao.errors import EngineError, ProtocolError
from megatron_sao.models.hf_folder import HFFolder
from megatron_sao.models.weights import load_weights, policy_shapes
from megatron_sao.parallel.exchange import broadcast_object
from megatron_sao.parallel.init import start_world
from megatron_sao.rollout.engine_client import EngineClient
from megatron_sao.rollout.engine_process import EngineProcess, EngineSettings
from megatron_sao.train.push import Pusher
from megatron_sao.train.setup import build_trainer
from megatron_sao.transport import engine_layout
from megatron_sao.transport.group import host_store, weight_group
from megatron_sao.transport.plan import encode_plan
from megatron_sao.transport.sender import WeightSender
from tests.support.families import make_family_folder
from tests.support.ranks import run_ranks

TIMEOUT_S = 90.0
FAMILY_FIELDS = dict(kv_lora_rank=512, qk_rope_head_dim=64)  # the one size that vLLM's CPU kernel for MLA takes
TP2, PP2, EP2, TP2_EP2 = dict(tp=2), dict(pp=2), dict(dp=2, ep=2), dict(tp=2, dp=2, ep=2)
SERVERS = {  # family, [engine], what trainers push to it
    "1-worker": ("qwen3_moe", {}, (TP2, PP2, EP2, TP2_EP2)),
    "2-workers": ("qwen3_moe", dict(tensor_parallel=2), (TP2, PP2, EP2, TP2_EP2)),
    "4-workers": ("qwen3_moe", dict(tensor_parallel=2, pipeline_parallel=2, expert_parallel=True), (TP2_EP2,)),
    "shared-experts": ("glm4_moe", dict(tensor_parallel=2, expert_parallel=True), (TP2_EP2,)),
    "latent-attention": ("deepseek_v3", dict(tensor_parallel=2, expert_parallel=True), (TP2,)),
}
PROMPTS = [[5, 40 + i, 41, 30, 60, 7 * i + 3] for i in range(4)]


class Server:
    """A running server, what its first weights compute, and the versions it has been given."""

    def __init__(self, process: EngineProcess, name: str, layout: dict, trainers: tuple, folders: dict):
        self.process, self.url, self.name, self.version = process, process.url, name, 0
        self.layout, self.trainers, self.folders = layout, trainers, folders
        self.num_workers = layout.get("tensor_parallel", 1) * layout.get("pipeline_parallel", 1)
        self.fresh = asyncio.run(outputs(process.url))


async def outputs(url: str) -> list:
    """Log-probs of all prompt tokens, and greedy continuations with theirs. One request at a time: equal batches."""
    found = []
    async with EngineClient(url, request_timeout_s=TIMEOUT_S) as client:
        for prompt in PROMPTS:
            body = {"model": "policy", "prompt": prompt, "max_tokens": 1, "prompt_logprobs": 0}
            answer = await client._call("POST", "/v1/completions", body)
            scores = answer["choices"][0]["prompt_logprobs"]
            found.append([step[str(token)]["logprob"] for token, step in zip(prompt[1:], scores[1:], strict=True)])
            sample = await client.generate(prompt, max_tokens=16, temperature=0.0)
            found.append((sample.token_ids, sample.logp))
    return found


@pytest.fixture(scope="module")
def folders(tiny_folder, tmp_path_factory):
    """family -> NEW and OTHER: a tiny model with all its tensors moved by random amounts."""
    root = tmp_path_factory.mktemp("layouts")
    latent = make_family_folder("deepseek_v3", root / "latent", mtp=False, seed=1, **FAMILY_FIELDS)
    shared = make_family_folder("glm4_moe", root / "shared", mtp=False, seed=2)
    for family in (latent, shared):
        for file in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copy(tiny_folder / file, family / file)
    sources = {"qwen3_moe": tiny_folder, "deepseek_v3": latent, "glm4_moe": shared}
    found: dict[str, dict] = {family: {} for family in sources}
    for family, source in sources.items():
        for name, seed in (("NEW", 11), ("OTHER", 12)):
            found[family][name] = shutil.copytree(source, root / f"{family}-{name}")
            generator = torch.Generator().manual_seed(seed)
            weights = {
                key: tensor + (0.3 if "norm" in key else 0.15) * torch.randn(tensor.shape, generator=generator)
                for key, tensor in load_file(source / "model.safetensors").items()
            }
            save_file(weights, found[family][name] / "model.safetensors", metadata={"format": "pt"})
    return found


@pytest.fixture(scope="module", params=SERVERS)
def server(request, folders):
    family, layout, trainers = SERVERS[request.param]
    folder, log = folders[family]["NEW"], folders[family]["NEW"].parent / f"{request.param}.log"
    settings = EngineSettings(model_folder=folder, log_path=log, max_num_seqs=8, start_timeout_s=480.0, **layout)
    with EngineProcess(settings).start() as engine:
        engine.wait_ready()
        yield Server(engine, request.param, layout, trainers, folders[family])


# ---- what trainer ranks do --------------------------------------------------------------------------------------


def in_thread(call):
    """Run a coroutine of rank 0 beside what the ranks do together. Returns: a function that waits for its result."""
    result: list = []

    def run():
        try:
            result.append(asyncio.run(call))
        except Exception as error:  # noqa: BLE001  handed to the caller
            result.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()

    def wait():
        thread.join(2 * TIMEOUT_S)
        if not result or isinstance(result[0], Exception):
            raise result[0] if result else TimeoutError("an engine does not answer")
        return result[0]

    return wait


async def call(url: str, method: str, *args):
    async with EngineClient(url, request_timeout_s=TIMEOUT_S) as client:
        return await getattr(client, method)(*args)


def connected(trainer, folder: HFFolder, server: Server):
    """A Pusher, and a sender in a weight group with the server."""
    config = trainer.config
    names = policy_shapes(folder, trainer.shape)
    pusher = Pusher(trainer.exporter, names, config, link=None, host="")
    plan, rank = pusher._plan, trainer.world.rank
    store = host_store("127.0.0.1", timeout_s=TIMEOUT_S) if rank == 0 else None
    port = broadcast_object(store.port if store else 0)
    world = trainer.world.size + server.num_workers
    info = {
        "master_address": "127.0.0.1", "master_port": port, "rank_offset": trainer.world.size, "world_size": world,
        "plan": base64.b64encode(encode_plan(plan)).decode(), "plan_hash": plan.hash, "timeout_s": TIMEOUT_S,
    }  # fmt: skip
    joined = in_thread(call(server.url, "init_weight_transfer", info)) if rank == 0 else lambda: None
    group = weight_group("127.0.0.1", port, rank, world, timeout_s=TIMEOUT_S, store=store)
    joined()
    return pusher, WeightSender(group, plan)


def push(pusher, sender, server: Server, version: int, rank: int):
    """One push. Returns: what the server computes afterwards, on rank 0."""
    loaded = lambda: None  # noqa: E731
    if rank == 0:
        asyncio.run(call(server.url, "start_weight_update"))
        update = {"policy_version": version, "plan_hash": pusher._plan.hash}
        loaded = in_thread(call(server.url, "update_weights", update))
    try:
        sender.send(pusher._view, version)
    finally:
        loaded()  # what the engine says tells more than what the sender heard
    if rank == 0:
        asyncio.run(call(server.url, "finish_weight_update", version))
        return asyncio.run(outputs(server.url))


def trainer_of(folder, layout, server: Server):
    overrides = [f"parallel.{key}={value}" for key, value in layout.items()]
    overrides += [f"engine.{key}={str(value).lower()}" for key, value in server.layout.items()]
    config = load_config(None, [*overrides, "push.bucket_bytes=100000"])
    return build_trainer(config, HFFolder(folder), start_world(config))


def push_both(layout, server: Server):
    """Returns: what the server computes with OTHER and with NEW, on rank 0."""
    folders = server.folders
    trainer = trainer_of(folders["OTHER"], layout, server)
    rank = trainer.world.rank
    pusher, sender = connected(trainer, HFFolder(folders["OTHER"]), server)
    other = push(pusher, sender, server, server.version + 1, rank)
    load_weights(trainer.models.policy.chunks, HFFolder(folders["NEW"]), trainer.shape, trainer.world)
    return other, push(pusher, sender, server, server.version + 2, rank)


def test_pushed_weights_compute_what_freshly_loaded_ones_do(server):
    for layout in server.trainers:
        world_size = layout.get("tp", 1) * layout.get("pp", 1) * layout.get("dp", 1)
        results = run_ranks(world_size, push_both, layout, server, timeout_s=2 * TIMEOUT_S)
        server.version += 2
        other, new = results[0]
        assert other != server.fresh, layout
        assert new == server.fresh, layout


def push_with_a_wrong_table(layout, server: Server):
    """The table gives each worker the KV heads of the other one. Returns: what was heard; and after a right push."""
    trainer = trainer_of(server.folders["NEW"], layout, server)
    rank = trainer.world.rank
    right = engine_layout._kv_heads
    messages = []
    for kv_heads in (lambda size, of: engine_layout.Parts(0, ((size // 2, size), (0, size // 2))), right):
        engine_layout._kv_heads = kv_heads
        pusher, sender = connected(trainer, HFFolder(server.folders["NEW"]), server)
        try:
            last = push(pusher, sender, server, server.version + 1, rank)
        except Exception as error:  # noqa: BLE001  its text is the result
            messages.append(str(error))
            if rank == 0:
                with pytest.raises(EngineError, match="without a matching start_weight_update"):
                    asyncio.run(call(server.url, "finish_weight_update", server.version + 1))
    return messages, last


def test_a_table_that_gives_a_worker_other_rows_is_refused_and_a_right_push_recovers(server):
    if server.name != "2-workers":
        pytest.skip("one server is enough")
    first, second = run_ranks(2, push_with_a_wrong_table, TP2, server, timeout_s=2 * TIMEOUT_S)
    server.version += 1
    assert len(first[0]) == len(second[0]) == 1
    assert "hold NaN" in first[0][0] and "layers.0.self_attn.qkv_proj" in first[0][0]
    assert "engine worker 0 refused" in second[0][0] and "engine worker 1 refused" in second[0][0]
    assert first[1] == server.fresh


def push_while_a_worker_dies(layout, server: Server, pid: int):
    """Rank 0 kills a worker of the server before its third message. Returns: what was heard, and after how long."""
    trainer = trainer_of(server.folders["OTHER"], layout, server)
    rank = trainer.world.rank
    pusher, sender = connected(trainer, HFFolder(server.folders["OTHER"]), server)
    send, sent = sender._group.send, []

    def send_or_kill(*given):
        sent.append(given)
        if rank == 0 and len(sent) == 3:
            os.kill(pid, signal.SIGKILL)
        return send(*given)

    sender._group.send = send_or_kill
    began_s = time.monotonic()
    with pytest.raises((ProtocolError, EngineError)) as heard:
        push(pusher, sender, server, server.version + 1, rank)
    return str(heard.value), time.monotonic() - began_s


def test_a_server_of_which_one_worker_is_killed_in_the_middle_of_a_push_starts_again_and_takes_a_whole_one(server):
    if server.name != "2-workers":
        pytest.skip("one server is enough")
    (worker,) = [worker for worker, name in server.process._workers.items() if name.startswith("VLLM::Worker_TP1")]
    results = run_ranks(2, push_while_a_worker_dies, TP2, server, worker.pid, timeout_s=2 * TIMEOUT_S)
    assert all(seconds < TIMEOUT_S for _, seconds in results), results
    assert "died or does not take part" in results[1][0]
    with pytest.raises(EngineError, match="VLLM::.* has ended|was killed|ended with exit code"):
        server.process.check_alive()
    server.process.start_again(server.folders["NEW"].parent / "2-workers.again.log")
    server.process.wait_ready()
    server.version = 0
    other, new = run_ranks(2, push_both, TP2, server, timeout_s=2 * TIMEOUT_S)[0]
    assert other != server.fresh and new == server.fresh
