"""`--dry-run` of every command: says what would be done, and nothing is done."""

import ast
import importlib
from pathlib import Path

import pytest

from megatron_sao.errors import ConfigError

CLONE = Path(__file__).parents[2]
_SOURCES = {path.stem: path.read_text() for path in (CLONE / "megatron_sao" / "cli").glob("*.py")}
ALL = sorted(name for name, text in _SOURCES.items() if "run_command(main)" in text and "parse_options(" in text)
COMMANDS = [name for name in ALL if name not in ("engines", "node")]  # these take the folder of a prepared run
TOOLS = sorted((CLONE / "tools").glob("*.py"))


def test_commands_and_tools_are_found():
    assert {"local", "plan", "scheduler", "train"} <= set(COMMANDS) and len(TOOLS) >= 4


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_prints_the_resolved_configuration_and_leaves_nothing(command, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    main = importlib.import_module(f"megatron_sao.cli.{command}").main
    assert not main([str(CLONE / "configs" / "local.toml"), "--dry-run", "--run.name", "dry"])
    said = capsys.readouterr().out
    assert 'name = "dry"' in said and "# trainer_ranks " in said
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("command", ALL)
def test_a_command_offers_it(command, capsys):
    with pytest.raises(SystemExit):
        importlib.import_module(f"megatron_sao.cli.{command}").main(["--help"])
    assert "  --dry-run " in capsys.readouterr().out


def test_a_dry_node_says_which_host_it_would_be(tmp_path, capsys):
    (tmp_path / "config.toml").write_text("[parallel]\ndp = 2\n")
    main = importlib.import_module("megatron_sao.cli.node").main
    place = ["--nodes", "2", "--node-rank", "1", "--rendezvous", "127.0.0.1:29400"]
    main(["trainer", str(tmp_path), *place, "--dry-run"])
    assert "would be host 1 of 2, at 127.0.0.1 (lo)" in capsys.readouterr().out
    assert [path.name for path in tmp_path.iterdir()] == ["config.toml"]


@pytest.mark.parametrize("command, key", [(["node", "trainer"], "trainer_nodes"), (["engines"], "rollout_nodes")])
def test_other_nodes_than_the_placement_says_are_refused(command, key, tmp_path):
    (tmp_path / "config.toml").write_text(
        "[parallel]\ndp = 2\n[engine]\ncount = 2\n[placement]\ntrainer_nodes = 2\ntrainer_gpus_per_node = 1\n"
        "rollout_nodes = 2\nrollout_gpus_per_node = 1\n"
    )
    module, *role = command
    with pytest.raises(ConfigError, match=f"placement.{key} = 2, but --nodes 1; start it on 2 nodes or change"):
        importlib.import_module(f"megatron_sao.cli.{module}").main([*role, str(tmp_path), "--dry-run"])


@pytest.mark.parametrize("tool", TOOLS, ids=lambda path: path.stem)
def test_a_tool_says_in_its_first_lines_that_it_can(tool):
    """What each of them prints then is tested beside what it does."""
    assert "[--dry-run]" in ast.get_docstring(ast.parse(tool.read_text()))
