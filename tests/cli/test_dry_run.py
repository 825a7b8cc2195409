"""`--dry-run` of every command: says what would be done, and nothing is done."""

import ast
import importlib
from pathlib import Path

import pytest

CLONE = Path(__file__).parents[2]
COMMANDS = sorted(p.stem for p in (CLONE / "megatron_sao" / "cli").glob("*.py") if "run_command(main)" in p.read_text())
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


@pytest.mark.parametrize("tool", TOOLS, ids=lambda path: path.stem)
def test_a_tool_says_in_its_first_lines_that_it_can(tool):
    """What each of them prints then is tested beside what it does."""
    assert "[--dry-run]" in ast.get_docstring(ast.parse(tool.read_text()))
