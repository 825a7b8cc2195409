"""One real vLLM server, two real trainer processes, pushes under load. The server starts once for the whole module."""

import asyncio
import base64
import math
import multiprocessing
import os
import shutil
import signal
import time
from pathlib import Path

import msgspec
import psutil
import pytest
import torch
from safetensors.torch import load_file, save_file

from megatron_sao.errors import EngineError, ProtocolError
from megatron_sao.rollout.engine_client import EngineClient
from megatron_sao.rollout.engine_process import EngineProcess, EngineSettings
from megatron_sao.transport.disk import make_sender
from megatron_sao.transport.group import host_store, weight_group
from megatron_sao.transport.plan import WireItem, encode_plan, make_plan

NUM_TRAINERS = 2
TIMEOUT_S = 20.0
PROMPTS = [[5, 40 + i, 41, 30, 60] for i in range(8)]


# ---- two trainer processes --------------------------------------------------------------------------------------


def owned_items(rank: int, weights: dict[str, torch.Tensor]) -> list[WireItem]:
    """Attention by halves (tensor parallel), experts in turn (expert parallel), the rest one rank or the other."""
    items = []
    for number, (name, tensor) in enumerate(sorted(weights.items())):
        shape = tuple(tensor.shape)
        if "_proj" in name and ".experts." not in name:
            dim = 1 if "o_proj" in name else 0
            half = shape[dim] // 2
            items.append(WireItem(name, "float32", shape, dim, rank * half, half))
        elif ".experts." in name:
            if int(name.split(".experts.")[1].split(".")[0]) % NUM_TRAINERS == rank:
                items.append(WireItem(name, "float32", shape))
        elif number % NUM_TRAINERS == rank:
            items.append(WireItem(name, "float32", shape))
    return items


def plan_for(weights: dict[str, torch.Tensor], excluded: tuple[str, ...] = ()):
    sent = {name: tensor for name, tensor in weights.items() if name not in excluded}
    by_rank = [owned_items(rank, sent) for rank in range(NUM_TRAINERS)]
    return make_plan(by_rank, bucket_bytes=200_000, excluded=excluded)


def trainer(rank: int, commands) -> None:
    """Obeys ("listen",), ("join", port, plan), ("push", file, version, what to do wrong) until it is killed."""
    torch.set_num_threads(1)
    store = sender = group = plan = None
    while True:
        command, *arguments = commands.recv()
        try:
            if command == "listen":
                store = host_store("127.0.0.1", timeout_s=TIMEOUT_S)
                result = store.port
            elif command == "join":
                port, plan = arguments
                group = weight_group("127.0.0.1", port, rank, NUM_TRAINERS + 1, timeout_s=TIMEOUT_S, store=store)
                sender = make_sender(group, plan)
                result = None
            else:
                file, version, fault = arguments
                weights = load_file(file)
                if fault == "lacks a tensor":
                    del weights["model.norm.weight"]
                if fault == "dies":
                    die_in_the_middle(group, len(plan.buckets) // 2)
                sender.send(lambda item: view_of(weights, item), version)
                result = "sent"
        except Exception as error:  # handed to the test
            result = error
        commands.send(result)


def view_of(weights: dict[str, torch.Tensor], item: WireItem) -> torch.Tensor:
    whole = weights[item.name]
    return whole if item.dim < 0 else whole.narrow(item.dim, item.start, item.length)


def die_in_the_middle(group, number: int) -> None:
    send = group.send

    def send_or_die(tensor, dst_rank, tag):
        if tag >= number:
            os._exit(1)
        return send(tensor, dst_rank, tag)

    group.send = send_or_die


class Trainers:
    """Two forked processes; `tell` sends one command to both and waits for both answers."""

    def __init__(self):
        context = multiprocessing.get_context("fork")
        self._pipes, self._processes = [], []
        for rank in range(NUM_TRAINERS):
            mine, theirs = context.Pipe()
            process = context.Process(target=trainer, args=(rank, theirs), daemon=True)
            process.start()
            theirs.close()
            self._pipes.append(mine)
            self._processes.append(process)

    def tell(self, rank: int, *command):
        self._pipes[rank].send(command)

    def answer(self, rank: int):
        if not self._pipes[rank].poll(3 * TIMEOUT_S):
            raise TimeoutError(f"trainer {rank} does not answer")
        return self._pipes[rank].recv()

    async def tell_all(self, *command) -> list:
        for rank in range(NUM_TRAINERS):
            self.tell(rank, *command)
        return [await asyncio.to_thread(self.answer, rank) for rank in range(NUM_TRAINERS)]

    def stop(self):
        for process in self._processes:
            process.kill()
            process.join()


# ---- the server -------------------------------------------------------------------------------------------------


def perturbed(source: Path, target: Path, seed: int) -> Path:
    """A copy of a model folder with every tensor changed strongly."""
    shutil.copytree(source, target)
    generator = torch.Generator().manual_seed(seed)
    weights = {}
    for name, tensor in load_file(source / "model.safetensors").items():
        noise = torch.randn(tensor.shape, generator=generator)
        weights[name] = tensor + (0.3 if "norm" in name else 0.15) * noise
    save_file(weights, target / "model.safetensors", metadata={"format": "pt"})
    return target


class Setup:
    """The running server, two model folders (it started from A) and the trainers."""

    def __init__(self, engine: EngineProcess, folders: dict[str, Path], trainers: Trainers, spare: Trainers):
        self.engine, self.folders, self.trainers, self.spare = engine, folders, trainers, spare
        self.plan = plan_for(load_file(folders["A"] / "model.safetensors"))
        self.version = 0

    def client(self) -> EngineClient:
        return EngineClient(self.engine.url, request_timeout_s=3 * TIMEOUT_S)

    async def connect(self, client: EngineClient, plan=None) -> None:
        """Engine and trainers join a new weight group."""
        plan = plan or self.plan
        self.trainers.tell(0, "listen")
        port = await asyncio.to_thread(self.trainers.answer, 0)
        joining = asyncio.create_task(self.trainers.tell_all("join", port, plan))
        await client.init_weight_transfer(init_info(port, plan))
        assert await joining == [None, None]

    async def push(self, client: EngineClient, tag: str, version: int, fault: str | None = None) -> list:
        """One push without pause; returns the trainers' answers. Raises what the engine raises."""
        await client.start_weight_update()
        sending = asyncio.create_task(self.trainers.tell_all("push", self.file(tag), version, fault))
        try:
            await client.update_weights({"policy_version": version, "plan_hash": self.plan.hash})
        finally:
            answers = await sending
        await client.finish_weight_update(version)
        return answers

    def file(self, tag: str) -> str:
        return str(self.folders[tag] / "model.safetensors")

    def next_version(self) -> int:
        self.version += 1
        return self.version


def init_info(port: int, plan) -> dict:
    return {
        "master_address": "127.0.0.1", "master_port": port, "rank_offset": NUM_TRAINERS, "world_size": NUM_TRAINERS + 1,
        "plan": base64.b64encode(encode_plan(plan)).decode(), "plan_hash": plan.hash, "timeout_s": TIMEOUT_S,
    }  # fmt: skip


@pytest.fixture(scope="module")
def setup(tiny_folder, tmp_path_factory):
    folder = tmp_path_factory.mktemp("push")
    folders = {tag: perturbed(tiny_folder, folder / tag, seed) for tag, seed in (("A", 1), ("B", 2))}
    trainers, spare = Trainers(), Trainers()  # forked here: later this process runs threads
    settings = EngineSettings(
        model_folder=folders["A"], log_path=folder / "engine.log", max_model_len=512, max_num_seqs=16
    )
    try:
        with EngineProcess(settings).start() as engine:
            engine.wait_ready()
            made = Setup(engine, folders, trainers, spare)

            async def connect():
                async with made.client() as client:
                    made.fresh = await greedy(client)
                    await made.connect(client)

            asyncio.run(connect())
            yield made
    finally:
        trainers.stop()
        spare.stop()


async def greedy(client: EngineClient) -> list[tuple[list[int], list[float]]]:
    """Greedy continuations with their log-probs: what the weights compute, to the last bit."""
    samples = await asyncio.gather(*(client.generate(p, max_tokens=24, temperature=0.0) for p in PROMPTS))
    return [(sample.token_ids, sample.logp) for sample in samples]


def reference_logp(folder: Path, prompt: list[int], token_ids: list[int]) -> list[float]:
    """Log-prob of each sampled token by transformers, from the weights in a folder."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        logits = model(torch.tensor([prompt + token_ids])).logits[0, len(prompt) - 1 : -1]
    return logits.log_softmax(-1).gather(-1, torch.tensor(token_ids)[:, None])[:, 0].tolist()


def worst(a: list[float], b: list[float]) -> float:
    return max((abs(x - y) for x, y in zip(a, b, strict=True)), default=0.0)


def run(scenario, setup):
    async def with_client():
        async with setup.client() as client:
            return await scenario(client)

    return asyncio.run(with_client())


# ---- tests, in the order in which they use the server -----------------------------------------------------------


def test_an_engine_that_was_never_pushed_calls_its_weights_default(setup):
    async def scenario(client):
        return await client._call("GET", "/weight_info"), await client.weight_version(), await client.generate(
            PROMPTS[0], max_tokens=3
        )

    info, version, sample = run(scenario, setup)
    assert info == {"weight_version": "default"} and version == 0
    assert [(s.start, s.end, s.policy_version) for s in sample.version_spans] == [(0, 3, 0)]


def test_requests_in_flight_continue_over_a_push_and_each_token_is_scored_by_the_weights_that_wrote_it(setup):
    version = setup.next_version()

    async def scenario(client):
        for delay_s in (0.8, 0.4, 0.2, 0.1):  # on a quick machine all is over after the longer ones
            asked = [asyncio.create_task(client.generate(p, max_tokens=400, seed=i)) for i, p in enumerate(PROMPTS)]
            await asyncio.sleep(delay_s)
            await client.pause()
            if unfinished := sum(not request.done() for request in asked):
                break
            await client.resume()
        assert await client.is_paused()
        answers = await setup.push(client, "B", version)
        assert await client.weight_version() == version
        await client.resume()
        return unfinished, answers, await asyncio.gather(*asked)

    unfinished, answers, samples = run(scenario, setup)
    assert answers == ["sent", "sent"] and unfinished > 0
    num_mixed = 0
    for prompt, sample in zip(PROMPTS, samples, strict=True):
        assert sample.stop_reason in ("stop", "length")
        cut = next((s.start for s in sample.version_spans if s.policy_version == version), len(sample.token_ids))
        num_mixed += 0 < cut < len(sample.token_ids)
        before = reference_logp(setup.folders["A"], prompt, sample.token_ids)
        after = reference_logp(setup.folders["B"], prompt, sample.token_ids)
        assert worst(sample.logp[:cut], before[:cut]) < 1e-4
        assert worst(sample.logp[cut:], after[cut:]) < 1e-4
        if len(sample.token_ids) - cut > 10:  # the two weights differ visibly, so the lines above can fail
            assert worst(sample.logp[cut:], before[cut:]) > 0.1
    assert num_mixed > 0


def test_pushed_weights_compute_what_freshly_loaded_ones_do_bit_for_bit(setup):
    async def scenario(client):
        pushed_b = await greedy(client)
        await setup.push(client, "A", setup.next_version())
        return pushed_b, await greedy(client)

    pushed_b, pushed_a = run(scenario, setup)
    assert pushed_a == setup.fresh
    assert pushed_b != setup.fresh
    for prompt, (token_ids, logp) in zip(PROMPTS, pushed_b, strict=True):
        # Greedy log-probs are those of the temperature-1 distribution: argmax leaves the logits as they are.
        assert worst(logp, reference_logp(setup.folders["B"], prompt, token_ids)) < 1e-4


def test_weights_pushed_through_files_compute_what_freshly_loaded_ones_do_bit_for_bit(setup, tmp_path):
    async def scenario(client):
        over_network, setup.plan = setup.plan, msgspec.structs.replace(setup.plan, folder=str(tmp_path / "push"))
        try:
            await setup.connect(client, setup.plan)
            answers = await setup.push(client, "B", setup.next_version())
            pushed_b = await greedy(client)
            answers += await setup.push(client, "A", setup.next_version())
        finally:
            setup.plan = over_network
        pushed_a, version = await greedy(client), await client.weight_version()
        await setup.connect(client)
        return answers, version, pushed_b, pushed_a

    answers, version, pushed_b, pushed_a = run(scenario, setup)
    assert answers == ["sent"] * 4 and version == setup.version
    assert pushed_b != setup.fresh and pushed_a == setup.fresh
    assert not list((tmp_path / "push").rglob("*"))


def test_a_plan_without_one_tensor_is_refused_by_name_when_the_engine_joins(setup):
    weights = load_file(setup.folders["A"] / "model.safetensors")
    lost = "model.layers.1.mlp.experts.5.up_proj.weight"
    lacking = {name: tensor for name, tensor in weights.items() if name != lost}
    extra = weights | {"model.layers.9.mlp.gate.weight": torch.zeros(2, 2)}

    async def scenario(client):
        with pytest.raises(EngineError, match=f"{lost} is in the model folder but no rank sends it"):
            await client.init_weight_transfer(init_info(1, plan_for(lacking)))
        with pytest.raises(EngineError, match=r"layers\.9\.mlp\.gate\.weight is sent but not in the model folder"):
            await client.init_weight_transfer(init_info(1, plan_for(extra)))
        with pytest.raises(EngineError, match="before init_weight_transfer_engine"):
            await client.start_weight_update()
        await setup.connect(client)
        return await greedy(client)

    assert run(scenario, setup) == setup.fresh


@pytest.mark.parametrize(
    ("excluded", "message"),
    [
        ("model.norm.weight", r"model\.norm received none"),
        ("model.layers.2.self_attn.o_proj.weight", r"o_proj received none"),
        ("model.layers.2.self_attn.k_proj.weight", r"qkv_proj received \d+ of \d+"),
    ],
)
def test_an_exclusion_that_leaves_a_module_with_old_weights_is_refused(setup, excluded, message):
    plan = plan_for(load_file(setup.folders["A"] / "model.safetensors"), excluded=(excluded,))
    version = setup.next_version()

    async def scenario(client):
        await setup.connect(client, plan)
        await client.start_weight_update()
        sending = asyncio.create_task(setup.trainers.tell_all("push", setup.file("B"), version, None))
        with pytest.raises(EngineError, match=message):
            await client.update_weights({"policy_version": version, "plan_hash": plan.hash})
        assert all("engine worker 0 refused" in str(answer) for answer in await sending)
        assert await client.weight_version() == version - 1
        await setup.connect(client)
        await setup.push(client, "A", version)
        return await greedy(client)

    assert run(scenario, setup) == setup.fresh


def test_a_tensor_that_a_trainer_lacks_stops_the_push_no_version_is_published_and_a_full_push_recovers(setup):
    version = setup.next_version()

    async def scenario(client):
        with pytest.raises(EngineError, match="refused"):
            await setup.push(client, "B", version, "lacks a tensor")
        with pytest.raises(EngineError, match="without a matching start_weight_update"):
            await client.finish_weight_update(version)
        assert await client.weight_version() == version - 1
        answers = await setup.push(client, "A", version)
        return answers, await client.weight_version(), await greedy(client)

    assert run(scenario, setup) == (["sent", "sent"], version, setup.fresh)


def test_finish_without_a_push_publishes_nothing(setup):  # WSY-09
    version = setup.next_version()

    async def scenario(client):
        await client.start_weight_update()
        with pytest.raises(EngineError, match="no whole push has arrived"):
            await client.finish_weight_update(version)
        assert await client.weight_version() == version - 1
        sending = asyncio.create_task(setup.trainers.tell_all("push", setup.file("A"), version, None))
        await client.update_weights({"policy_version": version, "plan_hash": setup.plan.hash})
        await sending
        await client.finish_weight_update(version)
        return await client.weight_version(), await greedy(client)

    assert run(scenario, setup) == (version, setup.fresh)


@pytest.mark.parametrize("has_arrived", [False, True], ids=["started", "received"])
def test_an_update_that_nobody_ends_does_not_stand_in_the_way_of_the_next(setup, has_arrived):
    """Another engine failed to start, or the trainer died between its last byte and the publication."""
    abandoned, version = setup.next_version(), setup.next_version()

    async def scenario(client):
        await client.start_weight_update()
        if has_arrived:
            sending = asyncio.create_task(setup.trainers.tell_all("push", setup.file("B"), abandoned, None))
            await client.update_weights({"policy_version": abandoned, "plan_hash": setup.plan.hash})
            await sending
        assert await client.weight_version() == abandoned - 1
        answers = await setup.push(client, "A", version)
        return answers, await client.weight_version(), await greedy(client)

    assert run(scenario, setup) == (["sent", "sent"], version, setup.fresh)


def test_a_version_that_falls_is_refused(setup):  # WSY-10
    async def scenario(client):
        with pytest.raises(EngineError, match="policy_version must not fall"):
            await setup.push(client, "B", setup.version - 1)
        await setup.push(client, "A", setup.next_version())
        return await greedy(client)

    assert run(scenario, setup) == setup.fresh


def test_a_trainer_that_dies_in_the_middle_is_recovered_from_by_new_trainers(setup):
    version = setup.next_version()

    async def scenario(client):
        started = time.monotonic()
        await client.start_weight_update()
        setup.trainers.tell(0, "push", setup.file("B"), version, None)
        setup.trainers.tell(1, "push", setup.file("B"), version, "dies")
        with pytest.raises(EngineError, match="died or does not take part"):
            await client.update_weights({"policy_version": version, "plan_hash": setup.plan.hash})
        assert isinstance(await asyncio.to_thread(setup.trainers.answer, 0), ProtocolError)
        assert time.monotonic() - started < TIMEOUT_S + 5
        assert await client.weight_version() == version - 1
        setup.trainers.stop()
        setup.trainers = setup.spare
        await setup.connect(client)
        await setup.push(client, "A", version)
        return await greedy(client)

    assert run(scenario, setup) == setup.fresh


def test_log_probs_are_those_of_the_sampling_temperature(setup):
    async def scenario(client):
        return await client.generate(PROMPTS[0], max_tokens=40, temperature=0.5, seed=1)

    from transformers import AutoModelForCausalLM

    sample = run(scenario, setup)
    model = AutoModelForCausalLM.from_pretrained(setup.folders["A"], dtype=torch.float32).eval()
    with torch.no_grad():
        logits = model(torch.tensor([PROMPTS[0] + sample.token_ids])).logits[0, len(PROMPTS[0]) - 1 : -1]
    expected = (logits / 0.5).log_softmax(-1).gather(-1, torch.tensor(sample.token_ids)[:, None])[:, 0].tolist()
    assert worst(sample.logp, expected) < 1e-4
    assert math.isfinite(sum(sample.logp))


def test_an_engine_that_dies_is_reported_with_its_log_and_leaves_nothing_behind(setup):
    setup.engine.check_alive()
    group = setup.engine.pid
    core = [p for p in members(group) if "EngineCore" in " ".join(p.cmdline())]
    assert len(core) == 1
    os.kill(core[0].pid, signal.SIGKILL)
    deadline = time.monotonic() + 30
    with pytest.raises(EngineError) as caught:
        while time.monotonic() < deadline:
            setup.engine.check_alive()
            time.sleep(0.2)
    assert f"(pid {core[0].pid})" in str(caught.value) and "engine.log" in str(caught.value)
    setup.engine.stop()
    assert members(group) == []


def members(group: int) -> list[psutil.Process]:
    """Living processes of a process group."""
    found = []
    for process in psutil.process_iter():
        try:
            if os.getpgid(process.pid) == group and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except (ProcessLookupError, psutil.NoSuchProcess):
            pass
    return found
