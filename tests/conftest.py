"""Shared by all tests: the environment of a process that imports torch, Megatron and vLLM, and tiny model folders."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import pytest

WHOLE_RUNS = "tests/system"
PLACE_IN_WORLD = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def pytest_terminal_summary(terminalreporter):
    """What whole runs started and stopped, and how long an end took, is said also when all is well."""
    said = []
    for reports in terminalreporter.stats.values():
        for report in reports:
            if getattr(report, "nodeid", "").startswith(WHOLE_RUNS) and getattr(report, "passed", False):
                lines = [line for line in report.capstdout.splitlines() if line.startswith(("[slurm] ", "ended "))]
                said += [f"{report.nodeid.removeprefix(WHOLE_RUNS + '/')}: {line}" for line in lines]
    if said:
        terminalreporter.section("what whole runs started and stopped")
        for line in dict.fromkeys(said):
            terminalreporter.write_line(line)


@pytest.fixture(autouse=True)
def place_in_world():
    """A test that leaves torchrun's variables behind sends the processes of later tests to a meeting point of its own."""
    before = {name: os.environ.get(name) for name in PLACE_IN_WORLD}
    yield
    left = {name: os.environ.get(name) for name in PLACE_IN_WORLD}
    for name, value in before.items():
        os.environ.pop(name, None) if value is None else os.environ.update({name: value})
    assert left == before, "this test leaves variables of torchrun behind in the test process"


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory):
    """A tiny random Qwen3-MoE folder whose norms are random too, so that a swapped norm shows."""
    import torch
    from safetensors.torch import load_file, save_file

    from megatron_sao.models.tiny import TinyShape, make_tiny_model

    folder = tmp_path_factory.mktemp("tiny") / "model"
    make_tiny_model(folder, TinyShape(), seed=3)
    weights = load_file(folder / "model.safetensors")
    generator = torch.Generator().manual_seed(5)
    for name, tensor in weights.items():
        noise = torch.randn(tensor.shape, generator=generator)
        weights[name] = tensor + (0.3 * noise if "norm" in name else 0.1 * noise)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder
