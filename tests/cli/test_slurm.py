"""What SLURM says about a job (cases LCH-01, LCH-04); tests/system/test_slurm.py compares with SLURM's own words."""

import subprocess
import sys

import pytest

from megatron_sao.cli.slurm import expand_hostlist, gpus_on_node, srun_world
from megatron_sao.errors import ConfigError


@pytest.mark.parametrize(
    "text, hosts",
    [
        ("alpha,beta,gamma", "alpha beta gamma"),
        ("linux[1,2]", "linux1 linux2"),
        ("node[001-004]", "node001 node002 node003 node004"),
        ("nodeA,nodeB[001,003],nodeC", "nodeA nodeB001 nodeB003 nodeC"),
        ("ab-cd-xy810", "ab-cd-xy810"),
        ("rack-1-[09-11],gpu7", "rack-1-09 rack-1-10 rack-1-11 gpu7"),
        ("r[1-2]n[01-02]", "r1n01 r1n02 r2n01 r2n02"),
        ("a[1-2]b[1-2]c[1-2]", "a1b1c1 a1b1c2 a2b1c1 a2b1c2 a1b2c1 a1b2c2 a2b2c1 a2b2c2"),
        ("n[8-11]", "n8 n9 n10 n11"),
        ("n[9-010]", "n9 n10"),
        ("n", "n"),
    ],
)
def test_a_host_list_is_expanded(text, hosts):
    assert expand_hostlist(text) == hosts.split()


@pytest.mark.parametrize(
    "text, expected",
    [
        ("", "names no host"),
        (",", "names no host"),
        ("n[", "bracket without its partner in 'n['"),
        ("a,n[1-2", "bracket without its partner in 'n[1-2'"),
        ("n1]", "bracket without its partner"),
        ("n[[1-2]]", "bracket without its partner"),
        ("n[]", "has '' where a number or a range"),
        ("n[1,]", "has '' where a number or a range"),
        ("n[3-1]", "has '3-1' where a number or a range"),
        ("n[1-a]", "has '1-a' where a number or a range"),
        ("n[1-2]x", "goes on after its last bracket"),
        ("n[1-100000]", "the range 1-100000; 65536 hosts are allowed"),
        ("n[1-999]m[1-999]", "names more than 65536 hosts"),
    ],
)
def test_a_malformed_host_list_is_refused(text, expected):
    with pytest.raises(ConfigError) as caught:
        expand_hostlist(text)
    assert expected in str(caught.value)


def test_the_command_prints_a_host_a_line():
    command = [sys.executable, "-m", "megatron_sao.cli.slurm", "hostnames"]
    done = subprocess.run([*command, "n[1-2],gpu7"], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, "n1\nn2\ngpu7\n")
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2 and done.stderr.startswith("error: usage:")


@pytest.mark.parametrize(
    "on_node, per_node, expected",
    [("4", "a100:4", 4), (None, "a100:4", 4), (None, "8", 8), (None, "gpu:h100:8", 8), ("0", "4", 0)],
)
def test_gpus_on_node(on_node, per_node, expected):
    env = {"SLURM_GPUS_ON_NODE": on_node, "SLURM_GPUS_PER_NODE": per_node}
    assert gpus_on_node({name: value for name, value in env.items() if value is not None}) == expected


@pytest.mark.parametrize(
    "env, expected",
    [
        ({"SLURM_GPUS_PER_NODE": "gpu"}, "SLURM_GPUS_PER_NODE = 'gpu'"),
        ({"SLURM_GPUS_ON_NODE": "", "SLURM_GPUS_PER_NODE": ""}, "neither is set"),
        ({}, "neither is set"),
    ],
)
def test_no_number_of_gpus_is_an_error(env, expected):
    with pytest.raises(ConfigError, match=expected):
        gpus_on_node(env)


def test_a_task_of_srun_finds_its_place_in_the_world():
    env = {"SLURM_NTASKS": "6", "SLURM_PROCID": "4", "SLURM_LOCALID": "0", "SLURM_STEP_NODELIST": "gpu[07-09]"}
    world = srun_world(env | {"SLURM_JOB_ID": "123", "SLURM_STEP_ID": "2"})
    assert world == {
        "RANK": "4", "WORLD_SIZE": "6", "LOCAL_RANK": "0", "MASTER_ADDR": "gpu07", "MASTER_PORT": "27425",
    }  # fmt: skip
    assert world["MASTER_PORT"] != srun_world(env | {"SLURM_JOB_ID": "123", "SLURM_STEP_ID": "3"})["MASTER_PORT"]
    assert srun_world({"SLURM_NTASKS": "1", "SLURM_PROCID": "0"}) == srun_world({"SLURM_NTASKS": "2"}) == {}
