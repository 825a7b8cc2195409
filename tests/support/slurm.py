"""A real SLURM on this machine, for tests: one controller and several nodes that share its address and file system.

    python -m tests.support.slurm      one to try things on, until Ctrl-C

Owns: the Debian packages, the configuration in a folder of its own, the daemons and whatever their jobs started.
Every daemon runs below a guard (`megatron_sao.rollout.process_guard`): it and all that it started ends with this
program, however that ends. Nothing outside the folder is touched: munged has a key and a socket of its own, so that one
of the system, or of another such cluster, is not in the way; all ports are free ones of 127.0.0.1.
"""

import getpass
import os
import secrets
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path

import psutil

from megatron_sao.cli.child import ChildProcess
from megatron_sao.rollout.engine_process import log_excerpt

PACKAGES = ("slurm-wlm", "munge")
PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "scontrol")
INSTALL_TIMEOUT_S = 300.0
START_TIMEOUT_S = 60.0
COMMAND_TIMEOUT_S = 60.0
OVER = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "PREEMPTED", "OUT_OF_MEMORY")
# A job that was queued again has to wait two minutes, and SLURM 22.05 looks for heterogeneous ones only after something
# has changed, which on a cluster without other jobs may be never. So this one is told to start after so long; earlier,
# its nodes would refuse it as one that was killed.
QUEUED_AGAIN_S = 4.0
KILL_WAIT_S = 60  # between SIGTERM and SIGKILL to the processes of a job that is cancelled or requeued
ADMIN_PATH = "/usr/local/sbin:/usr/sbin:/sbin"  # where the daemons lie, and where not every user looks

# Nodes have the processors and GPUs that they are said to have: nothing counts them. A job of the partition "urgent"
# makes room for itself by having those of "batch" queued again, which have GraceTime seconds to end after a SIGTERM.
_CONFIGURATION = """\
ClusterName={name}
SlurmctldHost={hostname}(127.0.0.1)
SlurmctldPort={controller_port}
CommunicationParameters=NoInAddrAny,NoCtldInAddrAny
AuthType=auth/munge
CredType=cred/munge
AuthInfo=socket={folder}/munge.socket
SlurmUser={user}
SlurmdUser={user}
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerType=sched/backfill
SchedulerParameters=bf_interval=1,sched_interval=1,batch_sched_delay=0
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
JobRequeue=1
KillWait={kill_wait_s}
MessageTimeout=30
ReturnToService=2
SlurmdParameters=config_overrides
GresTypes=gpu
NodeName={nodes} NodeHostname={hostname} NodeAddr=127.0.0.1 Port=[{ports}] CPUs=8 RealMemory=100000 \
Gres=gpu:h100:{gpus_per_node} State=UNKNOWN
PartitionName=batch Nodes=ALL Default=YES MaxTime=INFINITE State=UP PriorityTier=1 OverSubscribe=NO \
GraceTime={kill_wait_s}
PartitionName=urgent Nodes=ALL MaxTime=INFINITE State=UP PriorityTier=2 PreemptMode=OFF OverSubscribe=NO
"""


def say(message: str) -> None:
    print(f"[slurm] {message}", flush=True)


def install_slurm() -> None:
    """Effect: the Debian packages are installed. Raises: AssertionError with apt's words."""
    if not (missing := [name for name in PROGRAMS if _program(name) is None]):
        return
    say(f"no {', '.join(missing)}: installing {' and '.join(PACKAGES)}")
    prefix = [] if os.geteuid() == 0 else ["sudo", "-n"]
    env = {**os.environ, "DEBIAN_FRONTEND": "noninteractive", "RUNLEVEL": "1"}  # the second: do not start services
    options = ["-o", "DPkg::Lock::Timeout=120", "-o", "Acquire::Retries=3"]  # another apt may be at work
    for words in (["update"], ["install", "--yes", "--no-install-recommends", *PACKAGES]):
        command = [*prefix, "apt-get", "--quiet", *options, *words]
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=INSTALL_TIMEOUT_S)
        last = "\n".join((done.stdout + done.stderr).splitlines()[-8:])
        assert done.returncode == 0, f"{' '.join(command)} ended with exit code {done.returncode}:\n{last}"
    still = [name for name in PROGRAMS if _program(name) is None]
    assert not still, f"{' and '.join(PACKAGES)} are installed, but there is no {', '.join(still)}"


class SlurmCluster:
    """A running cluster. Use as a context manager: entering starts it and waits for its nodes, leaving ends it.

    Args:
        folder: new or empty; holds configuration, logs and state.
        num_nodes: how many, called n1, n2 and so on.
        gpus_per_node: files that SLURM counts, hands out and names in CUDA_VISIBLE_DEVICES as if they were GPUs.
    """

    def __init__(self, folder: Path, num_nodes: int = 3, gpus_per_node: int = 4):
        self.folder = folder.absolute()
        self.nodes = [f"n{number}" for number in range(1, num_nodes + 1)]
        self.configuration = self.folder / "slurm.conf"  # the path must be absolute
        self._gpus_per_node = gpus_per_node
        self._running = ExitStack()
        self._daemons: list[ChildProcess] = []

    @property
    def env(self) -> dict[str, str]:
        """What a client command of this cluster needs in its environment."""
        return {"SLURM_CONF": str(self.configuration)}

    def __enter__(self) -> "SlurmCluster":
        install_slurm()
        self._write_configuration()
        try:
            self._start()
        except BaseException:
            self._running.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        """Effect: cancels all jobs and ends all daemons, and whatever the jobs started."""
        say(f"stopping {', '.join(daemon.name for daemon in self._daemons)}")
        self._running.close()
        say("all of them have ended")

    def command(self, *words: str, cwd: Path | None = None) -> str:
        """What a client command prints, `scontrol show jobs` for example. Raises: AssertionError with its message."""
        done = self._try(*words, cwd=cwd)
        assert done.returncode == 0, f"{' '.join(words)} ended with exit code {done.returncode}:\n{done.stderr}"
        return done.stdout

    def submit(self, *words: str, cwd: Path) -> str:
        """`sbatch` with these words in a folder. Returns: the number of the job, or of its first component."""
        number = self.command("sbatch", "--parsable", *words, cwd=cwd).strip()
        say(f"job {number}: sbatch {' '.join(words)}")
        return number

    def job(self, number: str) -> dict[str, str]:
        """What `scontrol` knows about a job or its first component: JobState, ExitCode, Restarts and so on."""
        text = self.command("scontrol", "--oneliner", "show", "job", number).splitlines()[0]
        return dict(word.partition("=")[::2] for word in text.split() if "=" in word)

    def wait_for(
        self, number: str, is_so: Callable[[dict[str, str]], bool], what: str, timeout_s: float
    ) -> dict[str, str]:
        """Wait until something is so for a job, given as by `job`. Raises: AssertionError after `timeout_s`."""
        deadline = time.monotonic() + timeout_s
        pending_since = None
        while not is_so(job := self.job(number)):
            now = time.monotonic()
            if now > deadline:
                state = self.command("squeue") + self.command("sinfo") + self.command("scontrol", "show", "job", number)
                raise AssertionError(f"{what} did not come within {timeout_s:.0f} s:\n{state}")
            if job["JobState"] != "PENDING" or job["Restarts"] == "0":
                pending_since = None
            elif pending_since is None:
                pending_since = now
            elif now > pending_since + QUEUED_AGAIN_S:
                self._try("scontrol", "update", f"JobId={number}", "StartTime=now")
                pending_since = now
            time.sleep(0.3)
        return job

    def wait_for_end(self, number: str, timeout_s: float) -> dict[str, str]:
        """Wait until a job is over. Returns: as `job`. Raises: AssertionError after `timeout_s`."""
        return self.wait_for(number, lambda job: job["JobState"] in OVER, f"the end of job {number}", timeout_s)

    def wait_until_idle(self) -> None:
        """Wait until every node is free, which takes a moment after the end of a job. Raises: AssertionError."""
        self._wait("idle nodes", self._is_idle)

    def processes(self) -> list[psutil.Process]:
        """The living processes that jobs of this cluster started."""
        found = []
        for process in psutil.process_iter():
            try:
                env = process.environ()
                if env.get("SLURM_CONF") == str(self.configuration) and "SLURM_JOB_ID" in env:
                    found.append(process)
            except psutil.Error:
                pass  # ended meanwhile, or another user's
        return found

    def _write_configuration(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        (self.folder / "state").mkdir()
        key = self.folder / "munge.key"
        key.touch(mode=0o600)
        key.write_bytes(secrets.token_bytes(128))
        for number in range(self._gpus_per_node):
            (self.folder / f"gpu{number}").symlink_to(os.devnull)
        (self.folder / "gres.conf").write_text(
            f"Name=gpu Type=h100 File={self.folder}/gpu[0-{self._gpus_per_node - 1}]\n" if self._gpus_per_node else ""
        )
        (self.folder / "cgroup.conf").write_text("")
        controller_port, *ports = _free_ports(1 + len(self.nodes))
        self.configuration.write_text(
            _CONFIGURATION.format(
                name=f"test{os.getpid()}",
                hostname=socket.gethostname().split(".")[0],
                user=getpass.getuser(),
                folder=self.folder,
                controller_port=controller_port,
                nodes=",".join(self.nodes),
                ports=",".join(map(str, ports)),
                gpus_per_node=self._gpus_per_node,
                kill_wait_s=KILL_WAIT_S,
            )
        )

    def _start(self) -> None:
        started_s = time.monotonic()
        socket_path = self.folder / "munge.socket"
        munged = ["--foreground", "--force", f"--socket={socket_path}", f"--key-file={self.folder}/munge.key"]
        munged += [f"--{name}={self.folder}/munged.{name[:-5]}" for name in ("log-file", "pid-file", "seed-file")]
        self._start_daemon("munged", *munged)
        self._wait("munged", socket_path.exists)
        self._start_daemon("slurmctld", "-D", "-f", str(self.configuration))
        for node in self.nodes:
            self._start_daemon("slurmd", "-D", "-f", str(self.configuration), "-N", node)
        self.wait_until_idle()
        self._running.callback(self._cancel_all)
        say(
            f"started in {time.monotonic() - started_s:.1f} s on 127.0.0.1, in {self.folder}: "
            + ", ".join(f"{daemon.name} (below pid {daemon.pid})" for daemon in self._daemons)
        )

    def _start_daemon(self, program: str, *arguments: str) -> None:
        name = f"{program} {arguments[-1]}" if program == "slurmd" else program
        log_path = self.folder / f"{name.replace(' ', '-')}.out"
        daemon = ChildProcess(name, [_program(program), *arguments], log_path, self.env)
        self._running.callback(daemon.stop)
        self._daemons.append(daemon)

    def _wait(self, what: str, is_so: Callable[[], bool]) -> None:
        deadline = time.monotonic() + START_TIMEOUT_S
        while not is_so():
            for daemon in self._daemons:
                code = daemon.exit_code
                assert code is None, f"{daemon.name} ended with exit code {code}:\n{log_excerpt(daemon.log_path)}"
            if time.monotonic() > deadline:
                state = self._try("squeue").stdout + self._try("sinfo", "--long", "--Node").stdout
                raise AssertionError(f"no {what} within {START_TIMEOUT_S:.0f} s; logs are in {self.folder}\n{state}")
            time.sleep(0.1)

    def _is_idle(self) -> bool:
        states = self._try("sinfo", "--noheader", "--Node", "--format=%N %t", "--partition=batch").stdout.splitlines()
        return sorted(states) == sorted(f"{node} idle" for node in self.nodes)

    def _cancel_all(self) -> None:
        """Effect: jobs that still run are killed; what would survive even that ends with the daemon of its node."""
        self._try("scancel", "--full", "--signal=KILL", f"--user={getpass.getuser()}")

    def _try(self, *words: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
        env = {**os.environ, **self.env}
        return subprocess.run(words, cwd=cwd, env=env, capture_output=True, text=True, timeout=COMMAND_TIMEOUT_S)


def _program(name: str) -> str | None:
    return shutil.which(name, path=os.pathsep.join([os.environ.get("PATH", ""), ADMIN_PATH]))


def _free_ports(number: int) -> list[int]:
    """So many ports of 127.0.0.1, all different, that nothing listens on."""
    with ExitStack() as probes:
        sockets = [probes.enter_context(socket.socket()) for _ in range(number)]
        for probe in sockets:
            probe.bind(("127.0.0.1", 0))
        return [probe.getsockname()[1] for probe in sockets]


def main() -> None:
    with tempfile.TemporaryDirectory(prefix="slurm-") as folder, SlurmCluster(Path(folder)) as cluster:
        say(f"in another shell: export SLURM_CONF={cluster.configuration}; Ctrl-C here ends it")
        with suppress(KeyboardInterrupt):
            while True:
                time.sleep(1)


if __name__ == "__main__":
    main()
