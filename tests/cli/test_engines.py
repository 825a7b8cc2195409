"""The engines of one rollout host: which, on which GPUs, what is refused. tests/system/test_slurm.py runs them."""

import json
import socket
import threading
import time

import pytest

from megatron_sao.cli import engines, heartbeat
from megatron_sao.cli.engines import devices_of_engines, engines_of_host
from megatron_sao.cli.files import CONFIG_FILE, ENGINES_FOLDER, RUN_FILE, SUMMARY_FILE
from megatron_sao.cli.run_folder import announce_scheduler, register_engine
from megatron_sao.errors import CheckpointError, ConfigError, ProtocolError


def test_each_host_has_as_many_engines_in_order():
    assert [list(engines_of_host(6, 3, host)) for host in range(3)] == [[0, 1], [2, 3], [4, 5]]
    with pytest.raises(ConfigError, match="--nodes 2 does not divide engine.count = 3"):
        engines_of_host(3, 2, 0)


@pytest.mark.parametrize(
    "env, expected",
    [
        ({"CUDA_VISIBLE_DEVICES": "4,5,6,7"}, ["4,5", "6,7"]),
        ({"CUDA_VISIBLE_DEVICES": "Ga,Gb,Gc,Gd", "SLURM_GPUS_ON_NODE": "8"}, ["Ga,Gb", "Gc,Gd"]),
        ({"SLURM_GPUS_ON_NODE": "8"}, ["0,1", "2,3"]),  # a SLURM that counts GPUs and shows them all
        ({}, ["0,1", "2,3"]),
    ],
)
def test_engines_share_the_gpus_that_they_are_shown(env, expected):
    assert devices_of_engines(env, 2, 2, is_cpu_build=False) == expected


def test_too_few_gpus_are_refused_unless_none_is_needed():
    for env in ({"CUDA_VISIBLE_DEVICES": "0,1,2"}, {"SLURM_GPUS_ON_NODE": "3"}):
        with pytest.raises(ConfigError, match=r"needs the GPUs 2 to 3 .* these are 3 \(0,1,2\)"):
            devices_of_engines(env, 2, 2, is_cpu_build=False)
        assert devices_of_engines(env, 2, 2, is_cpu_build=True) == ["", ""]


def test_an_engine_registers_with_a_whole_file(tmp_path):
    register_engine(tmp_path, 3, "http://10.0.0.7:8003")
    (file,) = (tmp_path / ENGINES_FOLDER).iterdir()
    assert file.name == "engine-3.json"
    assert json.loads(file.read_text()) == {"url": "http://10.0.0.7:8003"}


class NoStop:
    def check(self):
        pass


def test_hosts_of_engines_end_when_the_scheduler_does_not_come_or_falls_silent(tmp_path, monkeypatch):
    monkeypatch.setattr(heartbeat, "BEAT_S", 0.05)
    monkeypatch.setattr(engines, "SILENT_S", 1.0)
    with pytest.raises(ProtocolError, match=r"no scheduler has begun in .* within parallel.join_timeout_s = 0 s"):
        engines.keep([], tmp_path, NoStop(), start_timeout_s=0.1)
    hearts = []

    def begin():
        announce_scheduler(tmp_path, "tcp://127.0.0.1:9")
        time.sleep(0.5)  # it is announced before it beats
        hearts.append(heartbeat.Heart(tmp_path))

    beginning = threading.Timer(2.0, begin)  # later than a scheduler that is there may be silent
    ending = threading.Timer(4.0, lambda: hearts[0].close())
    beginning.start()
    ending.start()
    with pytest.raises(ProtocolError, match=rf"scheduler on the host {socket.gethostname()} gave no sign of life"):
        engines.keep([], tmp_path, NoStop(), start_timeout_s=30.0)
    assert ending.finished.is_set()  # as long as it beat, they stayed
    (tmp_path / SUMMARY_FILE).write_text("{}")
    engines.keep([], tmp_path, NoStop(), start_timeout_s=0.1)


@pytest.fixture
def run_folder(tmp_path):
    (tmp_path / CONFIG_FILE).write_text("[engine]\ncount = 4\n")
    return tmp_path


def test_a_dry_run_says_which_engines_it_would_start(run_folder, monkeypatch, capsys):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    place = ["--nodes", "2", "--node-rank", "1", "--rendezvous", "127.0.0.1:29400"]
    engines.main([str(run_folder), *place, "--dry-run"])
    said = capsys.readouterr().out
    assert "would start engine 2 at 127.0.0.1 (lo), GPUs: 0" in said
    assert "would start engine 3 at 127.0.0.1 (lo), GPUs: 1" in said
    assert [path.name for path in run_folder.iterdir()] == [CONFIG_FILE]


def test_a_folder_that_was_not_prepared_is_refused(run_folder):
    with pytest.raises(ConfigError, match="is no prepared run folder"):
        engines.main([str(run_folder)])


def test_a_missing_model_is_said_before_anything_starts(run_folder, monkeypatch):
    monkeypatch.setattr(engines, "StopOnSignal", lambda *_: None)  # would change what signals mean to this process
    (run_folder / RUN_FILE).write_text(json.dumps({"model": str(run_folder / "absent"), "resume": None}))
    with pytest.raises(CheckpointError, match="absent does not exist"):
        engines.main([str(run_folder)])
