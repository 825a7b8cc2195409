"""The command line that all commands share."""

import subprocess
import sys

import pytest

from megatron_sao.cli.options import parse_options
from megatron_sao.errors import ConfigError


def parse(*argv: str, **options):
    return parse_options(argv, about="Does something.", **options)


def fault(*argv: str, **options) -> str:
    with pytest.raises(ConfigError) as caught:
        parse(*argv, **options)
    return str(caught.value)


def test_config_overrides_switches_and_values_in_any_order():
    options = parse(
        "--run.seed",
        "3",
        "run.toml",
        "--dry-run",
        "--port=5",
        "--policy.lr=1e-4",
        "--run.name",
        "-x",
        values={"port": "where"},
    )
    assert options.config_path == "run.toml"
    assert options.overrides == ("run.seed=3", "policy.lr=1e-4", "run.name=-x")
    assert options.switches == {"dry-run"}
    assert options.values == {"port": "5"}


def test_without_arguments_the_default_configuration_is_used():
    assert parse().config_path is None
    assert parse("mine.toml").config_path == "mine.toml"


def test_a_value_may_hold_an_equals_sign_or_be_empty():
    assert parse("--task.prompts_file=a=b", "--model.path=").overrides == ("task.prompts_file=a=b", "model.path=")


@pytest.mark.parametrize(
    "argv, expected",
    [
        (["--run.seed"], "--run.seed has no value; write --run.seed VALUE or --run.seed=VALUE"),
        (["--run.seed", "--dry-run"], "--run.seed has no value"),
        (["--dryrun"], "--dryrun: there is no such option; did you mean --dry-run?"),
        (["--dry_run"], "did you mean --dry-run?"),
        (["--dry-run=true"], "--dry-run takes no value"),
        (["a.toml", "b.toml"], "'b.toml': only one configuration file can be given"),
        (["-n", "--dry-run"], "-n: options begin with two dashes"),
    ],
)
def test_a_command_line_that_cannot_be_read_is_refused(argv, expected):
    assert expected in fault(*argv)


def test_a_commands_own_value_is_given_once():
    assert "--port is given twice" in fault("--port=1", "--port", "2", values={"port": "where"})


def test_a_key_without_its_section_is_left_to_the_configuration():
    with pytest.raises(ConfigError, match="did you mean run.seed?"):
        parse("--seed", "3").load_config()


def test_help_lists_options_and_every_key(capsys):
    with pytest.raises(SystemExit) as ended:
        parse("--help", values={"port": "where it listens"})
    text = capsys.readouterr().out
    assert ended.value.code == 0
    assert (
        "--port" in text
        and "[value.groups.head]" in text
        and "updates_per_step = 2" in text
        and "[mse | hl_gauss]" in text
    )


@pytest.mark.parametrize(
    "body, code, stderr",
    [
        ("raise ConfigError('run.steps = -1 is bad')", 2, "error: run.steps = -1 is bad\n"),
        ("raise EngineError('gone')", 6, "error: gone\n"),
        ("raise KeyboardInterrupt", 130, "interrupted\n"),
        ("return None", 0, ""),
        ("return 9", 9, ""),
    ],
)
def test_a_foreseen_error_ends_with_its_message_and_exit_code(body, code, stderr):
    program = (
        "from megatron_sao.cli.options import run_command\nfrom megatron_sao.errors import *\n"
        f"def main(argv):\n    {body}\nrun_command(main)"
    )
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert (ended.returncode, ended.stderr) == (code, stderr)


def test_an_error_that_was_not_foreseen_keeps_its_traceback():
    program = "from megatron_sao.cli.options import run_command\nrun_command(lambda argv: 1 / 0)"
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert ended.returncode == 1 and "Traceback" in ended.stderr and "ZeroDivisionError" in ended.stderr
