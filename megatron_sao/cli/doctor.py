"""What runs here, what is missing, and what to do about it:

    python -m megatron_sao.cli.doctor [CONFIG] [--role trainer|engine|scheduler] [--section.key value ...] [--dry-run]

One line a finding, each with a verdict; exit code 1 if one of them is a fault. Without a role it looks for all three.
It ends with the bandwidth between processes: a sum over ranks and a push of dummy buckets. Started on several hosts at
once, by srun, by torchrun, or with RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT set, it measures between
them, and rank 0 prints the lines of its own host and those in which the others differ:

    srun --nodes 3 --ntasks-per-node 1 python -m megatron_sao.cli.doctor CONFIG
    torchrun --nnodes 3 --nproc-per-node 1 --node-rank K --rdzv-endpoint HOST:29400 -m megatron_sao.cli.doctor CONFIG
"""

import os
import re
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
from rich.markup import escape
from rich.table import Table

from megatron_sao.cli.doctor_checks import (
    CHECKS,
    COMMAND_TIMEOUT_S,
    ENGINE,
    FAULT,
    MISSING,
    NOTE,
    OK,
    ROLES,
    SCHEDULER,
    TRAINER,
    VERDICTS,
    Finding,
    Host,
)
from megatron_sao.cli.network import INTERFACE_VARIABLES, interface_of, own_address, resolve, take_interface
from megatron_sao.cli.options import DRY_RUN, hush_libraries, parse_options, run_command
from megatron_sao.cli.slurm import srun_world
from megatron_sao.cli.tables import MIB, Report
from megatron_sao.config import describe
from megatron_sao.config.devices import device_index
from megatron_sao.errors import ConfigError, ProtocolError

if TYPE_CHECKING:  # torch is imported where it is used
    from megatron_sao.transport.group import WeightGroup
    from megatron_sao.transport.trial import Trial

TRIAL_TIMEOUT_S = 60.0  # of the local trial, with the start of its processes
MEETING_TIMEOUT_S = 120.0  # for hosts that are not started at the same moment
SEEN_WITHIN_S = 5.0  # a shared file system may show a new file late
MAX_SKEW_S = 0.5
SLOW_NCCL = 5e9  # bytes a second
STYLES = {OK: "green", NOTE: "yellow", MISSING: "cyan", FAULT: "bold red"}

_ABOUT = "What runs on this host, what is missing, and what to do about it."
_VALUES = {"role": f"{', '.join(ROLES[:-1])} or {ROLES[-1]}: look at what this one needs (default: all)"}


class Examined(msgspec.Struct, frozen=True):
    """The findings of one host."""

    host: str
    findings: list[Finding]


def main(argv: Sequence[str]) -> int:
    options = parse_options(argv, about=_ABOUT, values=_VALUES)
    config, role = options.load_config(), options.values.get("role")
    if role not in (None, *ROLES):
        raise ConfigError(f"--role {role!r} does not exist; use {', '.join(ROLES)}, or leave it out for all")
    if "dry-run" in options.switches:
        print(describe(config))
        print(f"would look at: {', '.join(check.__name__ for check in CHECKS)}, bandwidth")
        return 0
    hush_libraries()
    _take_place_in_step()
    host = Host(config, (role,) if role else ROLES)
    if int(os.environ.get("WORLD_SIZE", 1)) > 1:
        return _examine_hosts(host)
    started_s = time.monotonic()
    with _LocalTrial(host) as trial:
        findings = [*_examine(host), *trial.findings()]
    _print(host, [Examined(socket.gethostname(), findings)], time.monotonic() - started_s)
    return _exit_code(findings)


def _examine(host: Host) -> list[Finding]:
    found = [finding for check in CHECKS for finding in check(host)]
    return [finding for finding in found if set(finding.roles) & set(host.roles)]


def _exit_code(findings: Sequence[Finding]) -> int:
    return int(any(finding.verdict == FAULT for finding in findings))


# ---- bandwidth on one host -------------------------------------------------------------------------------------


class _LocalTrial:
    """Processes that stand for trainer ranks and an engine's worker, one a GPU; they start while others are checked.

    A context manager: nothing that it started outlives it.
    """

    def __init__(self, host: Host):
        self._host = host
        self._processes: list[subprocess.Popen] = []
        self._is_wanted = host.roles != (SCHEDULER,) and host.has_torch

    def __enter__(self) -> "_LocalTrial":
        if not self._is_wanted:
            return self
        from megatron_sao.transport.group import host_store

        self._backend = "nccl" if self._host.num_gpus > 1 else "gloo"
        world_size = max(self._host.num_gpus, 2)
        self._store = host_store("127.0.0.1", timeout_s=TRIAL_TIMEOUT_S)
        self._errors = tempfile.TemporaryFile()
        env = os.environ | dict.fromkeys(INTERFACE_VARIABLES, "lo")
        env["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
        for rank in range(world_size):
            command = [sys.executable, "-m", "megatron_sao.transport.trial", "127.0.0.1", str(self._store.port)]
            command += [str(rank), str(world_size), self._backend, str(TRIAL_TIMEOUT_S)]
            process = subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=self._errors)
            self._processes.append(process)
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._processes:
            process.kill()
            process.communicate()

    def findings(self) -> list[Finding]:
        """Waits for what the ranks measured."""
        from megatron_sao.transport.trial import Trial

        if not self._is_wanted:
            return []
        deadline = time.monotonic() + TRIAL_TIMEOUT_S
        try:
            said = [process.communicate(timeout=max(deadline - time.monotonic(), 1))[0] for process in self._processes]
        except subprocess.TimeoutExpired:
            return [_failed(f"no end within {TRIAL_TIMEOUT_S:.0f} s")]
        if any(process.returncode for process in self._processes):
            self._errors.seek(0)
            lines = self._errors.read().decode(errors="replace").strip().splitlines()
            return [_failed(lines[-1] if lines else "a process ended without a word")]
        where = "on this host" if self._host.num_gpus != 1 else "on this host (one GPU, so on the CPU)"
        return _measured(msgspec.json.decode(said[0], type=Trial), where)


def _failed(why: str) -> Finding:
    return Finding("bandwidth", FAULT, f"processes cannot talk to each other: {why}", (TRAINER, ENGINE))


def _measured(trial: "Trial", where: str) -> list[Finding]:
    parts = (
        ("sum over ranks", trial.sum_bytes, trial.sum_s, trial.sum_bytes_per_s, f"{trial.num_ranks} ranks {where}"),
        ("push", trial.push_bytes, trial.push_s, trial.push_bytes_per_s, f"trainer rank to engine worker {where}"),
    )
    found = []
    for what, num_bytes, seconds, speed, who in parts:
        is_slow = trial.backend == "nccl" and speed < SLOW_NCCL
        advice = "; slow: NCCL_DEBUG=INFO tells the way that it takes" if is_slow else ""
        moved = f"{num_bytes / MIB:,.0f} MiB in {seconds:.3f} s, {speed / 1e9:.2f} GB/s"
        text = f"{who}, {trial.backend}: {moved}{advice}"
        found.append(Finding(what, NOTE if is_slow else OK, text, (TRAINER, ENGINE)))
    return found


# ---- several hosts ---------------------------------------------------------------------------------------------


def _take_place_in_step() -> None:
    """Effect: a task of srun gets the variables that torchrun would set, unless they are set."""
    if "WORLD_SIZE" in os.environ:
        return
    for name, value in srun_world(os.environ).items():
        os.environ.setdefault(name, _node_address(value) if name == "MASTER_ADDR" else value)


def _node_address(node: str) -> str:
    """Where SLURM says that a node is; its name, where SLURM says nothing."""
    command = ["scontrol", "--oneliner", "show", "node", node]
    try:
        said = subprocess.run(command, capture_output=True, text=True, timeout=COMMAND_TIMEOUT_S, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return node
    found = re.search(r"\bNodeAddr=(\S+)", said)
    return found[1] if found else node


def _examine_hosts(host: Host) -> int:
    """Collective: every process of the world, with torchrun's variables."""
    from megatron_sao.transport.trial import gather_texts

    rank, world_size, local_rank = (int(os.environ.get(name, 0)) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"))
    started_s = time.monotonic()
    address, port = resolve(os.environ.get("MASTER_ADDR", "127.0.0.1")), _meeting_port()
    take_interface(interface_of(own_address(address)), host.config.parallel.interface)
    findings = _examine(host) if local_rank == 0 else []
    group = _meet(address, port, rank, world_size)
    findings += _together(group, host, address, local_rank)
    own = msgspec.json.encode(Examined(socket.gethostname(), findings)).decode()
    hosts = [msgspec.json.decode(text, type=Examined) for text in gather_texts(group, own)]
    hosts = [examined for examined in hosts if examined.findings]
    if rank == 0:
        _print(host, hosts, time.monotonic() - started_s)
    group.gather([0])  # rank 0 may hold the store
    group.close()
    return _exit_code([finding for examined in hosts for finding in examined.findings])


def _meet(address: str, port: int, rank: int, world_size: int) -> "WeightGroup":
    """One gloo group of all processes. torchrun's agent holds a store already."""
    from megatron_sao.transport.group import host_store, weight_group

    store = None
    if rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        store = host_store(address, port=port, timeout_s=MEETING_TIMEOUT_S)
    return weight_group(address, port, rank, world_size, timeout_s=MEETING_TIMEOUT_S, store=store)


def _meeting_port() -> int:
    said = os.environ.get("MASTER_PORT", "")
    if not said.isdecimal() or not 0 < int(said) < 2**16:
        raise ConfigError(
            f"MASTER_PORT = {said!r} is no port at which several processes could meet; set one that is free on the"
            " first host, or under srun unset it: then it follows from the numbers of job and step"
        )
    return int(said)


def _together(group: "WeightGroup", host: Host, address: str, local_rank: int) -> list[Finding]:
    """What only all hosts together can find out; on rank 0. Collective: every process."""
    from megatron_sao.transport.group import host_store, weight_group
    from megatron_sao.transport.trial import gather_texts, run_trial

    num_hosts = len(set(gather_texts(group, socket.gethostname())))
    found = [_clocks(group), _shared_folder(group, host)]
    has_gpu = all(count for (count,) in group.gather([host.num_gpus]))
    backend = "nccl" if has_gpu and host.config.push.backend == "nccl" else "gloo"
    if backend == "nccl":
        import torch

        torch.cuda.set_device(device_index(local_rank, host.num_gpus))
    store = host_store(address, timeout_s=TRIAL_TIMEOUT_S) if group.rank == 0 else None
    ((port,), *_) = group.gather([store.port if store else 0])
    try:
        trial_group = weight_group(
            address, port, group.rank, group.world_size, backend=backend, timeout_s=TRIAL_TIMEOUT_S, store=store
        )
        found += _measured(run_trial(trial_group, backend), "between hosts" if num_hosts > 1 else "on this host")
        trial_group.close()
    except ProtocolError as error:
        found.append(_failed(str(error)))
    return found if group.rank == 0 else [finding for finding in found if finding.verdict == FAULT]


def _clocks(group: "WeightGroup") -> Finding:
    group.gather([0])  # all at the same moment, but for the network
    times = [nanoseconds / 1e9 for (nanoseconds,) in group.gather([time.time_ns()])]
    skew = max(times) - min(times)
    text = f"{skew:.2f} s apart at most, over all hosts"
    return Finding("clocks", OK if skew < MAX_SKEW_S else NOTE, text + ("" if skew < MAX_SKEW_S else ": use NTP"))


def _shared_folder(group: "WeightGroup", host: Host) -> Finding:
    """Whether all hosts see what one of them writes where the run folders lie."""
    folder = Path(host.config.run.folder).absolute()
    parent = next(place for place in (folder, *folder.parents) if place.exists())
    name = f".doctor-{os.environ.get('MASTER_PORT')}-{os.environ.get('TORCHELASTIC_RUN_ID', '')}"
    probe = parent / name
    if group.rank == 0:
        probe.touch()
    try:
        group.gather([0])
        deadline = time.monotonic() + SEEN_WITHIN_S
        while not probe.exists() and time.monotonic() < deadline:
            time.sleep(0.1)
        blind = sum(not seen for (seen,) in group.gather([int(probe.exists())]))
    finally:
        if group.rank == 0:
            probe.unlink(missing_ok=True)
    text = f"{parent} is the same on all hosts"
    if blind:
        text = f"{blind} process(es) do not see what rank 0 writes in {parent}: run.folder must be shared by all hosts"
    return Finding("shared folder", FAULT if blind else OK, text)


# ---- the table -------------------------------------------------------------------------------------------------


def _print(host: Host, hosts: Sequence[Examined], seconds: float) -> None:
    report, first = Report(), hosts[0]
    findings: list[Finding] = []
    for number, examined in enumerate(hosts):
        differing = [finding for finding in examined.findings if number == 0 or finding not in first.findings]
        if differing:
            title = examined.host if number == 0 else f"{examined.host}: what differs from {first.host}"
            report.console.print(_table(title, differing))
        findings += differing
    counts = {verdict: sum(finding.verdict == verdict for finding in findings) for verdict in VERDICTS}
    faults = {role for finding in findings if finding.verdict == FAULT for role in finding.roles}
    missing = dict.fromkeys(finding.what for finding in findings if finding.verdict == MISSING)
    able = [role for role in host.roles if role not in faults]
    device = f"{host.num_gpus} GPU(s)" if host.num_gpus else "the CPU"
    hindered = f"; faults stand in the way of: {', '.join(r for r in host.roles if r in faults)}" if faults else ""
    report.say(f"runs here, on {device}: {', '.join(able) or 'nothing'}{hindered}")
    if missing:
        report.say(f"missing for a GPU node: {', '.join(missing)}")
    counted = ", ".join(f"{count} {verdict}" for verdict, count in counts.items())
    report.say(f"{len(hosts)} host(s): {counted}; {seconds:.0f} s")


def _table(title: str, findings: Sequence[Finding]) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold", box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for column in ("verdict", "what", "for"):
        table.add_column(column, no_wrap=True)
    table.add_column("found; what to do", overflow="fold")
    for finding in findings:
        roles = "all" if set(finding.roles) == set(ROLES) else "+".join(role[:1].upper() for role in finding.roles)
        verdict = f"[{STYLES[finding.verdict]}]{finding.verdict}[/]"
        table.add_row(verdict, finding.what, roles, escape(finding.found))
    return table


if __name__ == "__main__":
    run_command(main)
