"""Starting, watching and ending a server process. Small stand-in servers inject the faults; the real one is started in
tests/transport/test_push_to_vllm.py."""

import gc
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import textwrap
import time
import types
from dataclasses import replace
from pathlib import Path

import numpy as np
import psutil
import pytest
from safetensors.numpy import save_file

import megatron_sao
from megatron_sao.errors import CheckpointError, ConfigError, EngineError
from megatron_sao.rollout import engine_process
from megatron_sao.rollout.engine_process import (
    SERVER,
    EngineProcess,
    EngineSettings,
    engine_command,
    engine_environment,
)

HEALTHY = """
    import http.server, subprocess, sys
    subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])  # a worker
    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(200); self.end_headers()
    http.server.ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""


@pytest.fixture
def settings(tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"architectures": ["X"]}))
    (folder / "tokenizer.json").write_text("{}")
    save_file({"a": np.zeros(2, np.float32)}, folder / "model.safetensors")
    return EngineSettings(model_folder=folder, log_path=tmp_path / "logs" / "engine.log", start_timeout_s=30)


def run_instead(monkeypatch, program: str) -> None:
    """Start a Python program with the port as its argument where vLLM would start."""
    command = [sys.executable, "-c", textwrap.dedent(program)]
    monkeypatch.setattr(engine_process, "engine_command", lambda settings, port: [*command, str(port)])


def living(group: int) -> list[int]:
    found = []
    for process in psutil.process_iter():
        try:
            if os.getpgid(process.pid) == group and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process.pid)
        except (ProcessLookupError, psutil.NoSuchProcess):
            pass
    return found


def wait_until(condition, limit_s: float = 20.0) -> bool:
    deadline = time.monotonic() + limit_s
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.05)
    return condition()


def test_a_server_comes_up_and_stop_ends_its_whole_tree(settings, monkeypatch):
    run_instead(monkeypatch, HEALTHY)
    with EngineProcess(settings) as engine:
        engine.start()
        assert engine.wait_ready() < settings.start_timeout_s
        assert engine.url == f"http://127.0.0.1:{engine.port}" and engine.port > 0
        engine.check_alive()
        assert len(living(engine.pid)) == 3  # guard, server, its worker
    assert living(engine.pid) == []
    engine.stop()  # again: harmless
    with pytest.raises(EngineError, match="was killed by SIGTERM|was killed by SIGKILL"):
        engine.check_alive()


def test_a_server_that_dies_while_starting_is_reported_with_its_own_words(settings, monkeypatch):
    run_instead(monkeypatch, "print('loading'); raise ValueError('max_model_len 1000 exceeds 512')")
    engine = EngineProcess(settings).start()
    with pytest.raises(EngineError, match="exit code 1(.|\n)*ValueError: max_model_len 1000 exceeds(.|\n)*engine.log"):
        engine.wait_ready()


def test_a_server_that_never_answers_is_stopped_after_the_limit(settings, monkeypatch):
    run_instead(monkeypatch, "import time; print('still loading', flush=True); time.sleep(600)")
    engine = EngineProcess(replace(settings, start_timeout_s=1)).start()
    with pytest.raises(EngineError, match="engine.start_timeout_s = 1"):
        engine.wait_ready()
    assert living(engine.pid) == []


def test_stop_does_not_wait_for_a_server_that_ignores_it(settings, monkeypatch):
    run_instead(monkeypatch, """
        import signal, time
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        print('ignoring', flush=True)
        time.sleep(600)
    """)
    engine = EngineProcess(settings).start()
    assert wait_until(lambda: "ignoring" in Path(settings.log_path).read_text())
    engine.stop(grace_s=0.2)
    assert living(engine.pid) == []


def test_a_killed_server_is_noticed(settings, monkeypatch):
    run_instead(monkeypatch, HEALTHY)
    with EngineProcess(settings).start() as engine:
        engine.wait_ready()
        (server,) = psutil.Process(engine.pid).children()
        server.kill()

        def is_dead():
            try:
                engine.check_alive()
            except EngineError as error:
                return "SIGKILL" in str(error)
            return False

        assert wait_until(is_dead)


def test_a_killed_worker_is_noticed_and_its_server_not_waited_for(settings, monkeypatch):
    run_instead(monkeypatch, """
        import http.server, signal, subprocess, sys
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        named = "open('/proc/self/comm', 'w').write('VLLM::Worker'); print(flush=True); import time; time.sleep(600)"
        subprocess.Popen([sys.executable, "-c", named], stdout=subprocess.PIPE).stdout.readline()
        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self):
                self.send_response(200); self.end_headers()
        http.server.ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
    """)
    engine = EngineProcess(settings).start()
    engine.wait_ready()
    (worker,) = [p for p in psutil.Process(engine.pid).children(recursive=True) if p.name() == "VLLM::Worker"]
    engine.check_alive()
    worker.kill()
    worker_gone = rf"VLLM::Worker \(pid {worker.pid}\) of the engine at {engine.url} has ended"
    with pytest.raises(EngineError, match=worker_gone):
        wait_until(engine.check_alive)
    began_s = time.monotonic()
    engine.stop(grace_s=60)
    assert time.monotonic() - began_s < 30
    assert living(engine.pid) == []


def test_a_program_that_is_killed_leaves_no_server_behind(settings, tmp_path):
    parent = textwrap.dedent(f"""
        import sys, time
        from megatron_sao.rollout import engine_process as e
        program = {textwrap.dedent(HEALTHY)!r}
        e.engine_command = lambda settings, port: [sys.executable, "-c", program, str(port)]
        settings = e.EngineSettings(model_folder={str(settings.model_folder)!r}, log_path={str(settings.log_path)!r})
        engine = e.EngineProcess(settings).start()
        engine.wait_ready()
        print(engine.pid, flush=True)
        time.sleep(600)
    """)
    with subprocess.Popen([sys.executable, "-c", parent], stdout=subprocess.PIPE, text=True) as process:
        group = int(process.stdout.readline())
        assert len(living(group)) == 3
        process.kill()
    assert wait_until(lambda: living(group) == [])


def test_a_port_in_use_is_named_before_anything_starts(settings):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        engine = EngineProcess(replace(settings, port=port))
        with pytest.raises(EngineError, match=f"127.0.0.1:{port}: Address already in use; set engine.port"):
            engine.start()
    assert engine.pid is None and not Path(settings.log_path).exists()


def test_the_port_is_held_while_the_server_starts(settings, monkeypatch):
    run_instead(monkeypatch, "import time; time.sleep(600)")
    with EngineProcess(settings).start() as engine, socket.socket() as other, socket.socket() as server:
        with pytest.raises(OSError, match="in use"):
            other.bind(("127.0.0.1", engine.port))
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as vLLM binds
        server.bind(("127.0.0.1", engine.port))
        server.listen()


def test_a_wrong_model_folder_is_named_before_anything_starts(settings):
    (Path(settings.model_folder) / "model.safetensors").write_bytes(b"short")
    engine = EngineProcess(settings)
    with pytest.raises(CheckpointError, match="model.safetensors"):
        engine.start()
    assert engine.pid is None


def test_nothing_of_the_model_folder_may_shape_the_samples_and_log_probs_are_processed(settings):
    command = engine_command(settings, 1234)
    pairs = dict(zip(command, command[1:]))
    assert pairs["--generation-config"] == "vllm"
    assert pairs["--logprobs-mode"] == "processed_logprobs"
    assert pairs["--port"] == "1234" and pairs["--host"] == "127.0.0.1"
    assert json.loads(pairs["--weight-transfer-config"]) == {"backend": "sao"}


@pytest.mark.parametrize("name", ["__main__", "__mp_main__"])
def test_the_garbage_collector_rests_for_the_imports_of_a_server_alone(name, monkeypatch):
    """vLLM itself is too slow to import for this: here stands who asks, at an import and when the server runs."""
    asked = []

    class Stub(types.ModuleType):
        def __getattr__(self, attribute):
            if attribute == "main":
                asked.append(("imported", gc.isenabled()))
                return lambda: asked.append(("runs", gc.isenabled()))
            raise AttributeError(attribute)

    for module in ("vllm.entrypoints.launchers.api_server.entry", "vllm.v1.engine.core"):
        words = module.split(".")
        for number in range(1, len(words) + 1):
            monkeypatch.setitem(sys.modules, ".".join(words[:number]), Stub(".".join(words[:number])))
    try:
        runpy.run_module(SERVER, run_name=name)
        assert gc.isenabled()
    finally:
        gc.enable()
        gc.unfreeze()
    assert asked == ([("imported", False), ("runs", True)] if name == "__main__" else [])


def test_weights_are_quantised_on_arrival_only_where_vllm_can(settings, monkeypatch):
    assert "--quantization" not in engine_command(settings, 1234)
    fp8 = replace(settings, quantization="fp8_per_block")
    command = engine_command(fp8, 1234)
    assert command[command.index("--quantization") + 1] == "fp8_per_block"
    monkeypatch.setattr(engine_process, "is_cpu_build", lambda: True)
    with pytest.raises(ConfigError, match='engine.quantization = "fp8_per_block" needs vLLM for CUDA'):
        EngineProcess(fp8).start()


def test_what_replicas_need_is_asked_for_only_where_vllm_can(settings, monkeypatch):
    wide = replace(settings, tensor_parallel=2, pipeline_parallel=2, data_parallel=2, expert_parallel=True)
    command = engine_command(wide, 1234)
    pairs = dict(zip(command, command[1:]))
    assert [pairs[f"--{axis}-parallel-size"] for axis in ("tensor", "pipeline", "data")] == ["2"] * 3
    assert "--enable-expert-parallel" in command and pairs["--distributed-executor-backend"] == "mp"
    one = engine_command(settings, 1234)
    assert "--enable-expert-parallel" not in one and one[one.index("--distributed-executor-backend") + 1] == "uni"
    monkeypatch.setattr(engine_process, "is_cpu_build", lambda: True)
    with pytest.raises(ConfigError, match="engine.data_parallel = 2 needs vLLM for CUDA, here is its CPU build; use 1"):
        EngineProcess(wide).start()


def test_the_environment_finds_this_clone_first_and_never_the_network(settings, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", "/somewhere")
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "40")
    env = engine_environment(settings)
    clone = str(Path(megatron_sao.__file__).resolve().parent.parent)
    assert env["PYTHONPATH"] == f"{clone}{os.pathsep}/somewhere"
    assert env["HF_HUB_OFFLINE"] == "1" and env["OMP_NUM_THREADS"] == "1"
    assert "PYTHONDONTWRITEBYTECODE" not in env
    if engine_process.is_cpu_build():
        assert "VLLM_CPU_KVCACHE_SPACE" not in env


def test_the_log_excerpt_prefers_errors_and_copes_with_a_missing_log(tmp_path):
    log = tmp_path / "log"
    log.write_text("\n".join(["start", "(EngineCore pid=1) ValueError: too long", *(f"line {i}" for i in range(50))]))
    assert "ValueError: too long" in engine_process.log_excerpt(log)
    assert "line 1" in engine_process.log_excerpt(log) and "line 49" not in engine_process.log_excerpt(log)
    log.write_text("\n".join(["ValueError: survived", *(f"line {i}" for i in range(200))]))
    assert "survived" not in engine_process.log_excerpt(log) and "line 199" in engine_process.log_excerpt(log)
    log.write_text("only\nlines\n")
    assert "only" in engine_process.log_excerpt(log) and "lines" in engine_process.log_excerpt(log)
    assert "whole log" in engine_process.log_excerpt(tmp_path / "none")


def test_a_server_that_died_is_started_again_on_its_address_with_a_log_of_its_own(settings, monkeypatch, tmp_path):
    run_instead(monkeypatch, HEALTHY)
    with EngineProcess(settings) as engine:
        engine.start().wait_ready()
        url = engine.url
        os.kill(engine.pid, signal.SIGKILL)
        assert wait_until(lambda: not living(engine.pid) or engine._process.poll() is not None)
        with pytest.raises(EngineError, match="was killed by SIGKILL"):
            engine.check_alive()
        engine.start_again(tmp_path / "logs" / "engine.1.log")
        assert engine.url == url
        assert wait_until(engine.is_ready)
        engine.check_alive()
    assert living(engine.pid) == []
    assert sorted(path.name for path in (tmp_path / "logs").iterdir()) == ["engine.1.log", "engine.log"]


def test_a_port_that_another_server_took_meanwhile_ends_the_attempt(settings, monkeypatch):
    monkeypatch.setattr(engine_process, "PORT_TIMEOUT_S", 0.3)
    run_instead(monkeypatch, HEALTHY)
    with EngineProcess(settings) as engine:
        engine.start().wait_ready()
        engine.stop()
        with socket.create_server(("127.0.0.1", engine.port)):
            with pytest.raises(EngineError, match=f"cannot listen on 127.0.0.1:{engine.port}"):
                engine.start_again(settings.log_path)
