"""Pushes that meet a fault: two real vLLM servers, two trainer ranks with the real Pusher, the real scheduler.

The trainer's weights are made from a seed instead of trained: those of version v are `TAGS[v % 2]`. Each test is one
fault, and leaves engines, scheduler and trainer as the next one finds them; servers start three times in all.
Afterwards both engines compute, bit for bit, what they computed after a push without faults, and every token that was
served meanwhile has the log-prob of the weights that it claims.
"""

import asyncio
import itertools
import json
import multiprocessing
import os
import shutil
import signal
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file

import megatron_sao.parallel  # noqa: F401  first: makes megatron.core importable without CUDA
from megatron_sao.config import load_config
from megatron_sao.convert.slices import WeightSlice
from megatron_sao.errors import EngineError, ProtocolError, SaoError
from megatron_sao.records import Ack, Batch, Goodbye, NeedBatch, StepReport, Turn
from megatron_sao.rollout.assemble import assemble
from megatron_sao.rollout.engine_client import EngineClient
from megatron_sao.rollout.engine_pool import EnginePool
from megatron_sao.rollout.engine_process import EngineProcess, EngineSettings
from megatron_sao.schedule.ledger import Ledger
from megatron_sao.schedule.loop import Scheduler, ScheduleSettings
from megatron_sao.schedule.stop import StopWish
from megatron_sao.train.link import SchedulerLink
from megatron_sao.train.push import Pusher
from megatron_sao.transport.channel import SchedulerChannel
from megatron_sao.transport.group import WeightGroup
from tests.schedule.harness import Notes
from tests.schedule.support import make_prompt
from tests.support.local_run import ENGINE_CORE, LocalRun

NUM_TRAINERS = 2
TIMEOUT_S = 8.0  # push.timeout_s
ANSWER_S = 90.0  # for one command of the test to the trainers
BATCH = 4
TAGS = "AB"  # version 0, with which the servers start, is A
PROMPTS = [[5, 40 + i, 41, 30, 60] for i in range(8)]


# ---- two trainer ranks ------------------------------------------------------------------------------------------


class Weights:
    """Stands for an Exporter: attention by halves (tensor parallel), the rest one rank or the other."""

    def __init__(self, by_tag: dict[str, dict[str, torch.Tensor]]):
        self._by_tag = by_tag
        self.tag = TAGS[0]
        self.shapes = {name: tuple(tensor.shape) for name, tensor in by_tag[self.tag].items()}
        self.shape = SimpleNamespace(
            family="qwen3_moe", mla=None, num_kv_groups=2, num_experts=8, num_layers=4, is_tied=False
        )
        self.slices_by_rank: list[list[WeightSlice]] = [[] for _ in range(NUM_TRAINERS)]
        for number, (name, shape) in enumerate(sorted(self.shapes.items())):
            is_cut = "_proj" in name and ".experts." not in name
            dim = 1 if "o_proj" in name else 0
            length = shape[dim] // NUM_TRAINERS if is_cut else shape[dim]
            for rank in range(NUM_TRAINERS) if is_cut else [number % NUM_TRAINERS]:
                start = rank * length if is_cut else 0
                self.slices_by_rank[rank].append(WeightSlice(name, shape, dim, start, length, "float32", name, start))

    def view(self, piece: WeightSlice) -> torch.Tensor:
        return self._by_tag[self.tag][piece.hf_name].narrow(piece.dim, piece.source_start, piece.length)


def trainer(rank: int, pipe, store: str, folders: dict[str, Path]) -> None:
    """Obeys ("connect", address, version), ("push", version, what happens in the middle), ("ask", message)."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(store, NUM_TRAINERS), rank=rank, world_size=NUM_TRAINERS)
    weights = Weights({tag: load_file(folder / "model.safetensors") for tag, folder in folders.items()})
    config = load_config(None, [f"push.timeout_s={TIMEOUT_S}", "push.bucket_bytes=50000", "engine.start_timeout_s=60"])
    while True:
        command, *arguments = pipe.recv()
        try:
            if command == "connect":
                address, version = arguments
                weights.tag = TAGS[version % 2]
                link = SchedulerLink(address, ANSWER_S)
                pusher = Pusher(weights, weights.shapes, config, link, "127.0.0.1")
                result = pusher.connect(version)
            elif command == "push":
                version, event = arguments
                weights.tag = TAGS[version % 2]
                with middle_of_push(event, pipe):
                    result = pusher.push(version)
            else:
                (message,) = arguments
                result = type(link.request(message, Ack | Batch))
        except Exception as error:  # handed to the test
            result = error if isinstance(error, SaoError) else RuntimeError(repr(error))
        pipe.send(result)


class middle_of_push:
    """While entered, before the eighth message that this rank sends: "die", or "tell" the test and wait for it."""

    def __init__(self, event: str, pipe):
        self._event, self._pipe, self._send = event, pipe, WeightGroup.send
        self._numbers = itertools.count(1)

    def __enter__(self):
        if self._event:
            WeightGroup.send = lambda group, *given: self._counted(group, *given)

    def __exit__(self, *_):
        WeightGroup.send = self._send

    def _counted(self, group, *given):
        if next(self._numbers) == 8:
            if self._event == "die":
                os._exit(1)
            self._pipe.send("in the middle")
            assert self._pipe.recv() == "go on"
        return self._send(group, *given)


class Trainers:
    """Forked processes, one a rank."""

    def __init__(self, folder: Path, folders: dict[str, Path]):
        folder.mkdir()
        context = multiprocessing.get_context("fork")
        self._pipes, self.processes = [], []
        for rank in range(NUM_TRAINERS):
            mine, theirs = context.Pipe()
            arguments = (rank, theirs, str(folder / "store"), folders)
            self.processes.append(context.Process(target=trainer, args=arguments, daemon=True))
            self.processes[-1].start()
            theirs.close()
            self._pipes.append(mine)

    def tell(self, *command) -> None:
        for pipe in self._pipes:
            pipe.send(command)

    def hear(self, rank: int):
        assert self._pipes[rank].poll(ANSWER_S), f"trainer rank {rank} does not answer"
        return self._pipes[rank].recv()

    def hear_all(self) -> list:
        heard = [self.hear(rank) for rank in range(NUM_TRAINERS)]
        for answer in heard:
            if isinstance(answer, Exception):
                raise answer
        return heard

    def do(self, *command) -> list:
        self.tell(*command)
        return self.hear_all()

    def tell_push(self, version: int, *events: str) -> None:
        """events: by rank; "" = none."""
        for pipe, event in itertools.zip_longest(self._pipes, events, fillvalue=""):
            pipe.send(("push", version, event))

    def go_on(self, rank: int) -> None:
        self._pipes[rank].send("go on")

    def stop(self) -> None:
        for process in self.processes:
            process.kill()
            process.join()


# ---- engines, scheduler, and what is looked at --------------------------------------------------------------------


class System:
    """Everything there is. Coroutines run in a thread of its own."""

    def __init__(self, folder: Path, folders: dict[str, Path]):
        self.folder, self.folders = folder, folders
        self.trainers = Trainers(folder / "first", folders)
        self.spare = Trainers(folder / "spare", folders)  # forked now: later this process runs threads
        self.engines = [
            EngineProcess(EngineSettings(model_folder=folders["A"], log_path=folder / f"engine-{number}.log",
                                         max_model_len=512, max_num_seqs=8))
            for number in range(2)
        ]  # fmt: skip
        self.step = 0
        self.version = 0
        self.samples = []
        self._numbers = itertools.count()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()

    def call(self, coroutine, timeout_s: float = ANSWER_S):
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(timeout_s)

    async def _begin(self) -> None:
        urls = [engine.url for engine in self.engines]
        clients = [EngineClient(url, request_timeout_s=ANSWER_S, push_timeout_s=TIMEOUT_S) for url in urls]
        self.pool = EnginePool(clients, wait_timeout_s=ANSWER_S, return_timeout_s=30.0)
        self.channel = SchedulerChannel("127.0.0.1", 0)
        self.plays = asyncio.Event()
        self.scheduler = Scheduler(
            channel=self.channel,
            engines=self.pool,
            prompts=(make_prompt(f"p{number}") for number in self._numbers),
            eval_prompts=[],
            run_episode=self._play,
            ledger=Ledger(self.folder / f"ledger-{self.version}.sqlite"),
            settings=ScheduleSettings(batch_trajectories=BATCH, max_staleness=2, max_in_flight=8, batch_timeout_s=60.0,
                                      push_timeout_s=TIMEOUT_S, push_backend="gloo", trainer_start_timeout_s=900.0,
                                      linger_s=1.0),
            observer=Notes(),
            stop=StopWish(),
        )
        self.run = asyncio.create_task(self.scheduler.run())
        self.players = [asyncio.create_task(self._play_on(number)) for number in range(12)]

    async def _play_on(self, number: int) -> None:
        """Long requests, one after the other, beside those of the scheduler."""
        while True:
            await self.plays.wait()
            await self._sample(PROMPTS[number % len(PROMPTS)], max_tokens=400)

    async def _sample(self, ids: list[int], max_tokens: int):
        sample = await self.pool.generate(ids, max_tokens=max_tokens)
        self.samples.append((ids, sample))
        return sample

    async def _play(self, prompt):
        ids = PROMPTS[int(prompt.prompt_id[1:]) % len(PROMPTS)]
        sample = await self._sample(ids, max_tokens=8)
        turn = Turn(observation_ids=ids, action_ids=sample.token_ids, logp_sampler=sample.logp,
                    version_spans=sample.version_spans, stop_reason=sample.stop_reason)
        return assemble(prompt, [turn], reward=1.0, is_cut=False, started_s=0.0, finished_s=1.0)

    def begin(self) -> None:
        self.call(self._begin())
        self.trainers.do("connect", self.channel.address, self.version)

    async def end(self) -> dict:
        """Wait for the scheduler's end and close everything of it. -> its summary. Raises: what it raises."""
        try:
            await self.run
            return self.scheduler.summary()
        finally:
            for player in self.players:
                player.cancel()
            await asyncio.gather(*self.players, return_exceptions=True)
            await self.channel.close()
            await self.pool.close()

    def take(self) -> None:
        """A step's trajectories."""
        self.step += 1
        need = NeedBatch(step=self.step, phase="train", num_trajectories=BATCH, policy_version=self.version)
        assert self.trainers.do("ask", need) == [Batch, Batch]

    def publish(self, *events: str) -> None:
        """The trainers begin to push the next version."""
        self.version += 1
        self.trainers.tell_push(self.version, *events)

    def published(self) -> dict[str, float]:
        """They have pushed it, and reported their step. -> the push's metrics"""
        metrics = self.trainers.hear_all()[0]
        report = StepReport(step=self.step, phase="train", policy_version=self.version, is_trained=True, metrics={})
        self.trainers.do("ask", report)
        return metrics

    def clean_step(self) -> dict[str, float]:
        self.take()
        self.publish()
        return self.published()

    def greedy(self, number: int) -> list[tuple[list[int], list[float]]]:
        """What an engine computes, to the last bit; nothing else runs there meanwhile."""

        async def ask():
            async with EngineClient(self.engines[number].url, request_timeout_s=30) as client:
                assert await client.weight_version() == self.version
                return await asyncio.gather(*(client.generate(p, max_tokens=24, temperature=0.0) for p in PROMPTS))

        return [(sample.token_ids, sample.logp) for sample in self.call(ask())]

    def state_of(self, number: int) -> tuple[bool, int]:
        """(whether it is paused, the version that it published last)"""

        async def ask():
            async with EngineClient(self.engines[number].url, request_timeout_s=30) as client:
                return await client.is_paused(), await client.weight_version()

        return self.call(ask())

    def stop_requests(self) -> None:
        async def stop():
            self.plays.clear()
            while self.pool.num_running:
                await asyncio.sleep(0.05)

        self.call(stop())

    def start_requests(self) -> None:
        """Effect: many long requests run on both engines, and will run until they are stopped."""
        self._loop.call_soon_threadsafe(self.plays.set)
        deadline = time.monotonic() + 30
        while not all(len(slot.requests) >= 4 for slot in self.pool._slots):
            assert time.monotonic() < deadline, "the engines get no requests"
            time.sleep(0.02)

    def check_equal(self, references: dict[str, list]) -> None:
        """Both engines hold the version, and compute what was computed after a push without faults."""
        self.stop_requests()
        assert self.pool.fenced == {}
        assert [self.greedy(number) for number in range(2)] == [references[TAGS[self.version % 2]]] * 2

    def close(self) -> None:
        for trainers in (self.trainers, self.spare):
            trainers.stop()
        for engine in self.engines:
            engine.stop()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)


def other_weights(source: Path, target: Path, seed: int) -> Path:
    """A copy of a model folder with every tensor changed strongly."""
    shutil.copytree(source, target)
    generator = torch.Generator().manual_seed(seed)
    weights = {}
    for name, tensor in load_file(source / "model.safetensors").items():
        noise = torch.randn(tensor.shape, generator=generator)
        weights[name] = tensor + (0.3 if "norm" in name else 0.15) * noise
    save_file(weights, target / "model.safetensors", metadata={"format": "pt"})
    return target


@pytest.fixture(scope="module")
def system(tiny_folder, tmp_path_factory):
    folder = tmp_path_factory.mktemp("faults")
    made = System(folder, {tag: other_weights(tiny_folder, folder / tag, seed) for seed, tag in enumerate(TAGS)})
    try:
        yield made
    finally:
        made.close()


def core_of(engine: EngineProcess) -> psutil.Process:
    (core,) = [p for p in psutil.Process(engine.pid).children(recursive=True) if p.name() == ENGINE_CORE]
    return core


@pytest.fixture(scope="module")
def references(system):
    """What an engine computes after pushes of A and of B without faults; engine 1 is not there yet."""
    system.engines[0].start().wait_ready()
    system.engines[1].start()  # it imports for much longer than the two pushes take
    system.begin()
    found = {}
    system.initial = system.greedy(0)
    for _ in range(2):
        metrics = system.clean_step()
        assert {"push/pause_s", "push/transfer_s", "push/load_s", "push/resume_s", "push/stopped_s"} <= metrics.keys()
        system.stop_requests()
        found[TAGS[system.version % 2]] = system.greedy(0)
    assert found["A"] == system.initial, "pushed weights compute something else than loaded ones"
    assert found["A"] != found["B"]
    return found


# ---- one fault after the other --------------------------------------------------------------------------------------


def test_an_engine_that_joins_late_is_taken_in_by_the_next_push(system, references):
    late = system.engines[1]
    assert list(system.pool.fenced) == [late.url]
    late.wait_ready()
    assert list(system.pool.fenced) == [late.url], "it serves before it was pushed to"
    metrics = system.clean_step()
    assert metrics["push/attempts"] == 1
    system.check_equal(references)


def test_an_engine_that_is_killed_in_the_middle_of_a_push_is_left_out(system, references):
    system.take()
    system.start_requests()
    taken_out = system.pool.num_taken_out
    system.publish("tell")
    assert system.trainers.hear(0) == "in the middle"
    core_of(system.engines[1]).kill()
    system.trainers.go_on(0)
    metrics = system.published()
    assert metrics["push/attempts"] == 2
    assert list(system.pool.fenced) == [system.engines[1].url]
    assert system.pool.num_taken_out == taken_out + 1
    assert system.pool.num_reissued > 0
    system.stop_requests()
    assert system.greedy(0) == references[TAGS[system.version % 2]]
    # Requests that were with the healthy engine went on: they were written by both versions.
    assert any(len(sample.version_spans) > 1 for _, sample in system.samples)


def test_an_engine_started_again_on_its_address_serves_after_a_whole_push_only(system, references):
    engine = system.engines[1]
    url = engine.url
    engine.start_again(system.folder / "engine-1.again.log")
    assert engine.url == url
    engine.wait_ready()
    system.take()
    assert list(system.pool.fenced) == [url], "it serves with its first weights"
    system.publish()
    assert system.published()["push/attempts"] == 1
    system.check_equal(references)


def test_a_slow_engine_is_waited_for_then_left_out_and_taken_in_later(system, references):
    system.take()
    system.start_requests()
    core = core_of(system.engines[1])
    system.publish("tell")
    assert system.trainers.hear(0) == "in the middle"
    core.send_signal(signal.SIGSTOP)
    began_s = time.monotonic()
    try:
        system.trainers.go_on(0)
        metrics = system.published()
        assert time.monotonic() - began_s > TIMEOUT_S / 2
        assert metrics["push/attempts"] == 2
        assert list(system.pool.fenced) == [system.engines[1].url]
        system.take()  # the other one plays on
    finally:
        core.send_signal(signal.SIGCONT)
    assert system.state_of(1) == (True, system.version - 1), "it would serve weights that are half-updated"
    system.publish()
    system.published()
    system.check_equal(references)


def test_after_a_trainer_that_died_in_the_middle_nothing_serves_until_a_new_one_has_pushed(system, references):
    system.take()
    system.start_requests()
    held = system.version
    system.publish("", "die")
    assert isinstance(system.trainers.hear(0), Exception)
    system.trainers.stop()  # as torchrun does
    with pytest.raises(ProtocolError, match="the trainer went away"):
        system.call(system.end())
    assert [system.state_of(number) for number in range(2)] == [(True, held)] * 2

    async def ask(url):
        async with EngineClient(url, request_timeout_s=1.0) as client:
            with pytest.raises(EngineError, match="did not answer within 1 s"):
                await client.generate(PROMPTS[0], max_tokens=1)

    for engine in system.engines:
        system.call(ask(engine.url))

    system.trainers, system.version = system.spare, held
    system.begin()  # a new scheduler, too; the trainer comes back with the version of its checkpoint
    system.check_equal(references)
    assert system.clean_step()["push/attempts"] == 1
    system.check_equal(references)


def test_no_token_was_served_with_other_weights_than_it_claims(system, references):
    from transformers import AutoModelForCausalLM

    system.stop_requests()
    assert len(system.samples) > 30
    versions = set()
    for tag in TAGS:
        model = AutoModelForCausalLM.from_pretrained(system.folders[tag], dtype=torch.float32).eval()
        for prompt, sample in system.samples:
            with torch.no_grad():
                logits = model(torch.tensor([prompt + sample.token_ids])).logits[0, len(prompt) - 1 : -1]
            expected = logits.log_softmax(-1).gather(-1, torch.tensor(sample.token_ids)[:, None])[:, 0].tolist()
            for span in sample.version_spans:
                if TAGS[span.policy_version % 2] == tag:
                    versions.add(span.policy_version)
                    pairs = zip(sample.logp[span.start : span.end], expected[span.start : span.end], strict=True)
                    assert max(abs(a - b) for a, b in pairs) < 1e-4, (prompt, span)
    assert len(versions) >= 6


def test_the_run_ends_well_and_no_request_was_lost(system, references):
    system.trainers.do("ask", Goodbye(reason="finished"))
    summary = system.call(system.end())
    assert summary["requests_lost_by_pushes"] == 0
    assert summary["policy_version"] == system.version
    assert summary["issued"] == summary["trained"] + summary["dropped"] + summary["in_flight"]


# ---- the launcher ---------------------------------------------------------------------------------------------------


def test_a_local_run_starts_its_only_engine_again_and_goes_on(tiny_folder, tmp_path):
    run = LocalRun(tmp_path, "--model.path", str(tiny_folder), "--warm_start.enabled", "false", "--run.steps", "4",
                   "--task.num_eval_prompts", "4", "--value.pretrain_trajectories", "0", "--value.warmup_steps", "0")
    try:
        run.wait_for("\ntrain 2/4", timeout_s=240)
        (core,) = [process for process in run.processes() if process.name() == ENGINE_CORE]
        core.kill()
        run.wait_for("is back", timeout_s=240)
        assert run.wait(240) == 0, run.output
        assert run.processes() == []
    finally:
        run.close()
    assert "starting it again (1 of 3)" in run.output
    summary = json.loads((run.folder / "scheduler_summary.json").read_text())
    assert summary["policy_version"] == 4 and summary["trained"] == 4 * 16
    assert summary["engines_taken_out"] >= 1 and summary["requests_lost_by_pushes"] == 0
