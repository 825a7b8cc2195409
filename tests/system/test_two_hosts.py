"""A run over two hosts that `launch/node.sh` starts by hand, a cut between them in the middle of a step, the doctor.

The hosts are network namespaces: real torchrun, real connections, and a cable that can be pulled. Host a has trainer
rank 0, the scheduler and the engine; host b has trainer rank 1.
"""

import json
import sys
import time
from pathlib import Path

import pytest

from megatron_sao.cli.trainer_process import rank_log
from megatron_sao.observe.metrics import read_metrics
from tests.support.local_run import CLONE, SMALL_RUN, TRAINER_RANK, MarkedCommand
from tests.support.rank_stack import is_inside
from tests.support.two_hosts import TwoHosts, can_be_made

pytestmark = pytest.mark.skipif(not can_be_made(), reason="needs root and iproute2 to make network namespaces")

STEPS = 5
LOST_AFTER_S = 6
# From the cut to the end of the last process: the watch notices, the scheduler notices that rank 0 is gone and
# finishes its files, the engines' program notices the scheduler's end.
END_WITHIN_S = LOST_AFTER_S + 30
NODE = str(CLONE / "launch" / "node.sh")
RENDEZVOUS = f"{TwoHosts.addresses['a']}:29400"


@pytest.fixture(scope="module")
def hosts():
    with TwoHosts() as hosts:
        yield hosts


class Run:
    """One run, started over and over."""

    def __init__(self, hosts: TwoHosts, tmp_path: Path, model: Path):
        self.hosts, self.tmp_path, self.model = hosts, tmp_path, model
        self.folder = tmp_path / "runs" / "two"
        self.commands: dict[str, MarkedCommand] = {}
        self.number = 0

    def start(self, *switches: str) -> None:
        self.number += 1
        keys = {
            "run.folder": self.folder.parent, "run.name": self.folder.name, "run.steps": STEPS,
            "model.path": self.model, "warm_start.enabled": "false", "task.num_eval_prompts": 4,
            "value.pretrain_trajectories": 0, "value.warmup_steps": 0, "checkpoint.every_steps": 2,
            "parallel.lost_after_s": LOST_AFTER_S, "engine.restarts": 0,
        }  # fmt: skip
        overrides = [word for key, value in keys.items() for word in (f"--{key}", str(value))]
        prepare = self._command("a", "prepare", "prepare", str(SMALL_RUN), *overrides, *switches)
        assert prepare.wait(120) == 0, prepare.output
        folder = prepare.output.splitlines()[-1]
        place = ["--rendezvous", RENDEZVOUS]
        self._command("a", "scheduler", "scheduler", folder)
        self._command("a", "engines", "engines", folder, *place)
        self._command("a", "trainer-a", "trainer", folder, "--nodes", "2", "--node-rank", "0", *place)
        self._command("b", "trainer-b", "trainer", folder, "--nodes", "2", "--node-rank", "1", *place)

    def _command(self, host: str, name: str, *arguments: str) -> MarkedCommand:
        terminal = self.tmp_path / f"{name}.{self.number}.terminal"
        self.commands[name] = self.hosts.start(host, ["bash", NODE, *arguments], terminal)
        return self.commands[name]

    def wait_for_step_after(self, step: int) -> None:
        """Returns in the middle of a step: `step` was reported, and rank 1 is at the next."""
        self.commands["scheduler"].wait_for(f"\ntrain {step}/{STEPS}", timeout_s=300)
        (rank,) = self.commands["trainer-b"].processes(TRAINER_RANK)
        deadline = time.monotonic() + 60
        while not is_inside(rank, rank_log(self.folder, 1), "sao_step"):
            assert time.monotonic() < deadline, "rank 1 does no further step"

    def check_cut(self) -> None:
        """Everything ends in time, and each program that was started says what is wrong."""
        cut_s = time.monotonic()
        codes = {name: command.wait(END_WITHIN_S) for name, command in self.commands.items()}
        print(f"ended {time.monotonic() - cut_s:.1f} s after the cut")  # pytest -rP shows it
        for name, command in self.commands.items():
            print(f"---- {name} ({codes[name]}):\n{command.output}")
            assert command.processes() == [], name
            assert "Traceback" not in command.output
        for host, rank, other, other_rank in (("a", 0, "b", 1), ("b", 1, "a", 0)):
            assert codes[f"trainer-{host}"] == 5
            assert (
                f"\nerror: the trainer failed: rank {other_rank} of the trainer (host node-{other}) cannot be reached"
                f" from rank {rank} of the trainer (host node-{host}): no answer for {LOST_AFTER_S} s"
            ) in self.commands[f"trainer-{host}"].output
        assert codes["scheduler"] == 5
        assert "\nerror: the scheduler failed: the trainer went away" in self.commands["scheduler"].output

    def close(self) -> None:
        for command in self.commands.values():
            command.close()


@pytest.fixture
def run(hosts, tmp_path, tiny_folder):
    run = Run(hosts, tmp_path, tiny_folder)
    yield run
    run.close()


def test_a_run_over_two_hosts_survives_a_cut(run):
    run.start()
    run.wait_for_step_after(3)
    run.hosts.pull_cable()
    run.check_cut()

    run.hosts.mend()
    run.start("--resume")
    codes = {name: command.wait(300) for name, command in run.commands.items()}
    assert set(codes.values()) == {0}, {name: command.output for name, command in run.commands.items()}
    for host in "ab":
        assert run.commands[f"trainer-{host}"].output.splitlines()[-1] == "[trainer] the run is finished"
    assert json.loads((run.folder / "result.json").read_text())["steps"] == STEPS
    steps = [record["step"] for record in read_metrics(run.folder / "metrics.jsonl") if record["phase"] == "train"]
    assert steps == list(range(1, STEPS + 1))


# ---- the trainer's ranks alone -------------------------------------------------------------------------------------

RANK = f"""
import torch, torch.distributed as dist
from megatron_sao.cli.options import run_command
from megatron_sao.cli.rank_end import RankEnd
from megatron_sao.config import load_config

def main(argv):
    config = load_config(None, ["parallel.tp=2", "parallel.lost_after_s={LOST_AFTER_S}"])
    with RankEnd() as end:
        end.watch(config, "{TwoHosts.addresses['a']}")
        dist.init_process_group("gloo")
        while True:
            dist.all_reduce(torch.ones(1))
            if dist.get_rank() == 0:
                print("reduced", flush=True)

run_command(main)
"""


def test_packets_that_vanish_are_noticed_in_a_collective(hosts, tmp_path):
    """Nothing on either host says that the way is cut: packets leave and do not arrive."""
    (tmp_path / "rank.py").write_text(RANK)
    address, port = RENDEZVOUS.split(":")
    ranks = []
    try:
        for number, host in enumerate("ab"):
            torchrun = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--node-rank", str(number),
                        "--master-addr", address, "--master-port", port, str(tmp_path / "rank.py")]  # fmt: skip
            setting = f"GLOO_SOCKET_IFNAME={hosts.interfaces[host]}"
            ranks.append(hosts.start(host, ["env", setting, *torchrun], tmp_path / f"{host}.terminal"))
        ranks[0].wait_for("reduced", timeout_s=120)
        hosts.drop_packets()
        for number, command in enumerate(ranks):
            assert command.wait(END_WITHIN_S) == 1, command.output  # torchrun's
            other = f"rank {1 - number} of the trainer (host node-{'ba'[number]})"
            assert f"error: {other} cannot be reached" in command.output
            assert command.processes() == []
    finally:
        hosts.mend()
        for command in ranks:
            command.close()


def test_the_doctor_looks_at_both_hosts_and_measures_what_connects_them(hosts, tmp_path):
    place = ["WORLD_SIZE=2", "LOCAL_RANK=0", f"MASTER_ADDR={hosts.addresses['a']}", "MASTER_PORT=29500"]
    doctor = [sys.executable, "-m", "megatron_sao.cli.doctor", "configs/local.toml", f"--run.folder={tmp_path}"]
    started = [
        hosts.start(
            host, ["env", "-u", "GLOO_SOCKET_IFNAME", f"RANK={rank}", *place, *doctor], tmp_path / f"{host}.terminal"
        )
        for rank, host in enumerate("ab")
    ]
    first, second = started
    assert [command.wait(120) for command in started] == [0, 0], first.output + second.output
    assert "sum over ranks" not in second.output, "one host speaks for all"
    said = " ".join(first.output.split())
    assert "ok sum over ranks T+E 2 ranks between hosts, gloo: 64 MiB in " in said, first.output
    assert "ok push T+E trainer rank to engine worker between hosts, gloo: 256 MiB in " in said, first.output
    assert f"ok shared folder all {tmp_path} is the same on all hosts" in said, first.output
    assert f"between hosts gloo and NCCL take {hosts.interfaces['a']} " in said, first.output
    assert "node-b: what differs from node-a" in said and " 2 host(s): " in said and " 0 fault; " in said, first.output
