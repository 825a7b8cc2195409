"""The trainer's ranks on one host: torchrun with its command line, its environment and its log, as a child process.

Invariants: torchrun restarts nothing (a restart is a resume, by whoever started the run); SIGTERM does not reach it, so
that SLURM, which signals every process of a job, does not make it end its ranks before they have saved; each rank has
a log file of its own beside torchrun's.
"""

import sys
from pathlib import Path

from megatron_sao.cli.child import ChildProcess
from megatron_sao.cli.files import CONFIG_FILE, LOGS_FOLDER
from megatron_sao.cli.network import INTERFACE_VARIABLES, HostPlace, take_interface
from megatron_sao.config import Config


# Runs the command that follows it. `env --block-signal` would do, but coreutils have it from 8.31 on, RHEL 8 has 8.30.
WITHOUT_SIGTERM = (
    sys.executable,
    "-c",
    "import os, signal, sys; signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM]);"
    " os.execvp(sys.argv[1], sys.argv[1:])",
)


def start_trainer(config: Config, run_folder: Path, host: HostPlace = HostPlace()) -> ChildProcess:
    """Start this host's share of the ranks; `num_hosts` divides their number.

    Effect: with several hosts, the environment of this process names the network interface too.
    """
    host_0 = host.rendezvous[0] if host.rendezvous else host.address
    command = [*WITHOUT_SIGTERM, sys.executable, "-m", "torch.distributed.run", *_place(config, host)]
    command += ["--max-restarts", "0", "--signals-to-handle", "SIGINT,SIGHUP,SIGQUIT"]
    command += ["--nproc-per-node", str(config.parallel.world_size // host.num_hosts)]
    command += ["-m", "megatron_sao.cli.train", str(run_folder / CONFIG_FILE)]
    command += ["--run-folder", str(run_folder), "--host", host_0, "--own-log"]
    env = {
        "OMP_NUM_THREADS": str(config.run.threads_per_process),
        "PYTHONWARNINGS": "ignore",  # Megatron's notes on each package that a CPU does not have
    }
    if host.rendezvous is None:
        env |= dict.fromkeys(INTERFACE_VARIABLES, host.interface)
    else:
        take_interface(host.interface, config.parallel.interface)
    name = "trainer.log" if host.num_hosts == 1 else f"trainer-host-{host.number}.log"
    return ChildProcess("trainer", command, run_folder / LOGS_FOLDER / name, env)


def rank_log(run_folder: Path, rank: int) -> Path:
    """The log file of one rank."""
    return run_folder / LOGS_FOLDER / f"trainer-rank-{rank}.log"


def _place(config: Config, host: HostPlace) -> list[str]:
    if host.rendezvous is None:
        return ["--standalone"]
    address, port = host.rendezvous
    place = ["--nnodes", str(host.num_hosts), "--node-rank", str(host.number)]
    place += ["--master-addr", address, "--master-port", str(port)]
    return [*place, "--rdzv-conf", f"timeout={config.parallel.join_timeout_s:.0f}"]
