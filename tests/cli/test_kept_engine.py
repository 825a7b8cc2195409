"""An engine that is started again when it dies, and how often."""

from types import SimpleNamespace

import pytest

from megatron_sao.cli.kept_engine import KeptEngine
from megatron_sao.errors import EngineError


class Server:
    """An EngineProcess that dies when told to and needs some looks until it is ready."""

    def __init__(self, tmp_path):
        self.settings = SimpleNamespace(log_path=tmp_path / "engine-0.log")
        self.url, self.is_dead, self.logs = "http://127.0.0.1:1", False, []
        self.num_looks = 0

    def check_alive(self):
        if self.is_dead:
            raise EngineError("the engine has ended:\n  because")

    def is_ready(self):
        self.check_alive()
        self.num_looks += 1
        return self.num_looks == 3

    def start_again(self, log_path):
        self.is_dead, self.num_looks = False, 0
        self.logs.append(log_path.name)


def test_an_engine_is_started_again_so_often_and_no_more(tmp_path):
    server = Server(tmp_path)
    told = []
    engine = KeptEngine(server, 2, told.append)
    for _ in range(3):
        assert not engine.is_ready
        engine.check()
    assert engine.is_ready and "http://127.0.0.1:1 ready after" in told[0]
    for _ in range(2):
        server.is_dead = True
        for _ in range(4):
            engine.check()
    said = "\n".join(told)
    assert "the engine has ended; starting it again (1 of 2)" in said and "(2 of 2)" in said
    assert said.count("is back; the next push takes it in") == 2
    assert server.logs == ["engine-0.1.log", "engine-0.2.log"]
    server.is_dead = True
    with pytest.raises(EngineError, match="because"):
        engine.check()


def test_an_engine_that_never_was_ready_is_not_started_again(tmp_path):
    server = Server(tmp_path)
    server.is_dead = True
    with pytest.raises(EngineError):
        KeptEngine(server, 2, print).check()
    assert server.logs == []
