"""One host's place in the trainer, from the command line; and what is said when hosts do not find each other."""

import json
import os
import socket
import subprocess
import sys

import pytest

from megatron_sao.cli import node
from megatron_sao.cli.child import hosts_missing
from megatron_sao.cli.network import HostPlace, interface_of, own_address, resolve, split_endpoint, take_interface
from megatron_sao.config import load_config, to_toml
from megatron_sao.errors import ConfigError

TWO_RANKS = load_config(None, ["parallel.tp=2"])


def test_one_machine_needs_nothing():
    assert node.trainer_host({}, TWO_RANKS) == HostPlace()


def test_a_host_finds_its_address_and_interface():
    values = {"nodes": "2", "node-rank": "1", "rendezvous": "localhost:29400"}
    assert node.trainer_host(values, TWO_RANKS) == HostPlace(("127.0.0.1", 29400), 1, 2, "127.0.0.1", "lo")


def test_the_interface_of_the_configuration_counts_before_that_of_the_environment_and_that_before_the_one_found(
    monkeypatch,
):
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "=ib0,ib1")
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    take_interface("eth0", "")
    assert (os.environ["NCCL_SOCKET_IFNAME"], os.environ["GLOO_SOCKET_IFNAME"]) == ("=ib0,ib1", "eth0")
    take_interface("eth0", "bond0")
    assert (os.environ["NCCL_SOCKET_IFNAME"], os.environ["GLOO_SOCKET_IFNAME"]) == ("bond0", "bond0")


def test_a_name_that_means_this_host_alone_is_no_meeting_point():
    with pytest.raises(ConfigError, match=r"at 127\.0\.1\.1, but this host.* no other host reaches that one"):
        node.trainer_host({"rendezvous": "127.0.1.1:29400"}, TWO_RANKS)


def test_the_interface_can_be_said():
    config = load_config(None, ["parallel.tp=2", "parallel.interface=ib0"])
    assert node.trainer_host({}, config).interface == "ib0"
    assert node.trainer_host({"rendezvous": "127.0.0.1:29400"}, config).interface == "ib0"


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"nodes": "3", "rendezvous": "127.0.0.1:29400"}, ["--nodes 3 does not divide", "= 2, the trainer's ranks"]),
        ({"nodes": "0"}, ["--node-rank 0: with --nodes 0 hosts"]),
        ({"nodes": "two"}, ["--nodes two is no whole number"]),
        ({"nodes": "2", "node-rank": "2"}, ["--node-rank 2", "numbered 0 to 1"]),
        ({"nodes": "2"}, ["--rendezvous is missing", "HOST:PORT"]),
        ({"rendezvous": "localhost"}, ["'localhost' is not HOST:PORT"]),
        ({"rendezvous": "localhost:70000"}, ["'localhost:70000' is not HOST:PORT"]),
        ({"rendezvous": "no such host:29400"}, ["'no such host' cannot be resolved"]),
        ({"nodes": "2", "rendezvous": "192.0.2.1:29400"}, ["192.0.2.1"]),  # reserved for documentation
    ],
)  # fmt: skip
def test_a_wrong_place_is_refused(values, words):
    with pytest.raises(ConfigError) as caught:
        node.trainer_host(values, TWO_RANKS)
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "trainer or scheduler"),
        (["engine"], "'engine' is neither"),
        (["trainer"], "the run folder is missing"),
        (["trainer", "runs/x", "--policy.lr", "1"], "policy.lr=1: a prepared run has its configuration"),
        (["scheduler", "runs/x", "--nodes", "2"], "nodes"),
        (["trainer", "runs/absent"], "runs/absent"),
    ],
)
def test_a_command_that_makes_no_sense_is_refused(arguments, words):
    with pytest.raises(ConfigError, match=words):
        node.main(arguments)


def test_the_end_of_a_scheduler_that_could_not_begin_is_written_down(tmp_path):
    """The hosts with engines wait for this file."""
    (tmp_path / "config.toml").write_text(to_toml(TWO_RANKS))
    command = [sys.executable, "-m", "megatron_sao.cli.node", "scheduler", str(tmp_path)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert ended.returncode == ConfigError.exit_code
    outcome = json.loads((tmp_path / "scheduler_summary.json").read_text())["outcome"]
    assert outcome.startswith("the scheduler failed: ")
    assert ended.stderr == f"error: {outcome}\n"


def test_an_absent_host_0_is_named():
    with socket.create_server(("127.0.0.1", 0)) as server:
        address, port = server.getsockname()
        node._wait_for_host_0(address, port, timeout_s=5.0)
    with pytest.raises(ConfigError, match=rf"no trainer host 0 answers at 127\.0\.0\.1:{port} within"):
        node._wait_for_host_0(address, port, timeout_s=0.3)


def test_hosts_that_stay_away_are_counted():
    log = "torch.distributed.DistStoreError: Timed out after 9 seconds waiting for clients. 1/2 clients joined.\n"
    assert hosts_missing(log).startswith("only 1 of 2 trainer hosts came within 9 s (parallel.join_timeout_s)")
    assert hosts_missing("all is well") == ""


def test_addresses():
    assert split_endpoint("[::1]:80", "--x") == ("::1", 80)
    assert resolve("127.0.0.1") == own_address("127.0.0.1") == "127.0.0.1"
    assert interface_of("127.0.0.1") == "lo"
    with pytest.raises(ConfigError, match=r"192\.0\.2\.9; set parallel\.interface"):
        interface_of("192.0.2.9")
