"""From file and command line to a configuration, and every way in which a key or a type can be wrong (CFG-01)."""

import subprocess
import sys

import pytest

from megatron_sao.config import Config, load_config, to_toml
from megatron_sao.config.keys import leaf_keys
from megatron_sao.errors import ConfigError


@pytest.fixture
def write(tmp_path):
    """Writes a TOML file and returns its path."""

    def write_toml(text: str):
        path = tmp_path / "run.toml"
        path.write_text(text, encoding="utf-8")
        return path

    return write_toml


def fault(path, *overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load_config(path, overrides)
    return str(caught.value)


def test_defaults_file_and_command_line_are_layers(write):
    cfg = load_config(write("[run]\nseed = 5\nsteps = 7\n"), ["run.steps=9", "--value.groups.norms.trained=true"])
    assert (cfg.run.seed, cfg.run.steps, cfg.schedule.max_staleness) == (5, 9, 4)
    assert cfg.value.groups.norms.trained and not cfg.value.groups.attention.trained


def test_importing_the_configuration_imports_nothing_heavy():
    heavy = "torch", "transformers", "megatron.core", "vllm", "numpy"
    code = f"import sys, megatron_sao.config, megatron_sao.cli.options; print([m for m in {heavy} if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60).stdout == "[]\n"


# ---- unknown keys ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "toml, expected",
    [
        (
            "[value]\nupdates_per_setp = 2",
            "value.updates_per_setp: there is no such key; did you mean value.updates_per_step?",
        ),
        (
            "[critic]\nupdates_per_setp = 2",
            "critic.updates_per_setp: there is no such key; did you mean value.updates_per_step?",
        ),
        ("[critic]\nlr = 1.0", "did you mean value.lr?"),
        ("lr = 1.0", "lr: there is no such key; did you mean warm_start.lr, policy.lr or value.lr?"),
        ("[run]\nmax_staleness = 1", "did you mean schedule.max_staleness?"),
        ("[policy]\nlearning-rate = 1.0", "policy.learning-rate: there is no such key; did you mean policy.lr?"),
        ("[value]\nupdates-per-step = 2", "without dashes and quotes: value.updates_per_step"),
        (
            "[Run]\nSteps = 2",
            "Run.Steps: names are in lower case, with underscores, without dashes and quotes: run.steps",
        ),
        ('"run.steps" = 2', "without dashes and quotes: run.steps"),
        ("[value.groups.atention]\ntrained = true", "did you mean value.groups.attention.trained?"),
        ("[value.attention]\ntrained = true", "did you mean value.groups.attention.trained?"),
        ("[value.groups.head]\nfrozen = true", "[value.groups.head] has trained, lr_multiplier"),
        ("[algo.bounds.maths]\neps_low = 0.1\neps_high = 0.2", "algo.bounds.maths.eps_low: there is no such key"),
        ("[placement]\ntrainer_node = 2", "did you mean placement.trainer_nodes?"),
        ("[placement]\ngpus_per_node = 8", "placement.gpus_per_node: there is no such key; did you mean placement."),
        ("[parallel]\nrollout_nodes = 2", "did you mean placement.rollout_nodes?"),
        ("[parallel]\nnnodes = 2", "did you mean placement.trainer_nodes?"),
        ("[checkpoint]\nsave_interval = 5", "did you mean checkpoint.every_steps?"),
        ("[checkpoint]\nkeep-last = 5", "without dashes and quotes: checkpoint.keep_last"),
        ("[run]\nkeep_last = 5", "did you mean checkpoint.keep_last?"),
        ("[checkpoints]\nkeep_last = 5", "did you mean checkpoint.keep_last?"),
        ("[colour]\n", "colour: there is no such key; the sections are run, model, "),
    ],
)
def test_an_unknown_key_fails_with_its_nearest_name(write, toml, expected):
    message = fault(write(toml))
    assert expected in message
    assert "run.toml)" in message  # and says where it was written


def test_an_unknown_key_on_the_command_line_fails(write):
    assert fault(None, "run.step=3") == "run.step: there is no such key; did you mean run.steps? (on the command line)"
    assert "did you mean run.seed?" in fault(None, "seed=3")


def test_the_open_table_takes_any_key_and_no_other_table_does(write):
    cfg = load_config(write("[task.params]\nanything = 1\n[task.params.deep]\nx = [1]"), ["task.params.deep.y=two"])
    assert cfg.task.params == {"anything": 1, "deep": {"x": [1], "y": "two"}}
    assert "task.anything: there is no such key" in fault(write("[task]\nanything = 1"))


@pytest.mark.parametrize("value", ["nan", "inf", "[1.0, -inf]", "{a = nan}", "2026-01-01", "[07:32:00]"])
def test_the_open_table_takes_only_what_json_can_carry(write, value):
    assert "task.params" in fault(write(f"[task.params]\nx = {value}"))


# ---- types -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "toml, expected",
    [
        ("[run]\nsteps = true", "run.steps = true must be an integer (in "),
        ("[run]\nsteps = '3'", "run.steps = '3' must be an integer"),
        ("[run]\nsteps = 3.0", "run.steps = 3.0 must be an integer"),
        ("[run]\nsteps = [3]", "run.steps = [3] must be an integer"),
        ("[run.steps]\nx = 3", "run.steps = {'x': 3} must be an integer"),
        ("[run]\ndeterministic = 1", "run.deterministic = 1 must be true or false"),
        ("[run]\ndeterministic = 'true'", "run.deterministic = 'true' must be true or false"),
        ("[run]\nname = 7", "run.name = 7 must be text"),
        ("[policy]\nlr = true", "policy.lr = true must be a number"),
        ("[policy]\nlr = '1e-6'", "policy.lr = '1e-6' must be a number"),
        ("[policy]\nlr = nan", "policy.lr = nan must be a finite number"),
        ("[policy]\nlr = inf", "policy.lr = inf must be a finite number"),
        ("[policy]\nlr = 0", "policy.lr = 0 must be greater than 0"),
        ("[value]\nloss = 'mae'", "value.loss = 'mae' must be 'mse' or 'hl_gauss'"),
        ("[algo]\npolicy_lambda = true", "must be 'length_adaptive' or a number from 0 to 1"),
        ("[algo]\npolicy_lambda = 1.5", "must be 'length_adaptive' or a number from 0 to 1"),
        ("[algo]\npolicy_lambda = nan", "must be 'length_adaptive' or a number from 0 to 1"),
        ("[algo]\narm = 'sao_k3'", "must be one of sao, sao_k1, "),
        ("run = 3", "run = 3 must be a table: [run]"),
        ("[[run]]\nsteps = 3", "must be a table: [run]"),
        ("[algo]\nbounds = 3", "algo.bounds = 3 must be a table"),
        ("[task]\nparams = 3", "task.params = 3 must be a table"),
    ],
)
def test_a_wrong_type_is_refused_not_converted(write, toml, expected):
    assert expected in fault(write(toml))


NUMBERS = [key for key in leaf_keys() if key.annotation in (int, float)]


def test_no_number_of_any_section_takes_what_is_none(write):
    """nan, inf, true and text for every number there is, and 1.5 for every whole one: all in one report each."""
    assert {"placement.rollout_gpu_gib", "placement.trainer_nodes", "checkpoint.keep_last", "push.timeout_s"} <= {
        key.path for key in NUMBERS
    }
    for value in ("nan", "inf", "-inf", "true", "'3'", "[3]"):
        refused = fault(None, *(f"{key.path}={value}" for key in NUMBERS)).splitlines()[1:]
        assert {line.split()[0] for line in refused} >= {key.path for key in NUMBERS}, value
    whole = [key.path for key in NUMBERS if key.annotation is int]
    refused = fault(None, *(f"{path}=1.5" for path in whole)).splitlines()[1:]
    assert {line.split()[0] for line in refused} >= set(whole)


def test_no_number_but_a_value_and_its_bin_may_be_negative():
    refused = fault(None, *(f"{key.path}=-1" for key in NUMBERS)).splitlines()[1:]
    allowed = {key.path for key in NUMBERS} - {line.split()[0] for line in refused}
    assert allowed == {"value.hl_gauss_min", "value.hl_gauss_max"}


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", "-x", "a b", "a\\nb", "é"])
def test_a_run_name_is_a_plain_folder_name(write, name):
    assert "run.name" in fault(write(f'[run]\nname = "{name}"'))


def test_an_integer_is_a_number(write):
    lr = load_config(write("[policy]\nlr = 1")).policy.lr
    assert lr == 1.0 and isinstance(lr, float)


# ---- the command line ------------------------------------------------------------------------------------------


def test_a_command_line_value_is_read_as_toml_and_text_needs_no_quotes():
    cfg = load_config(
        None,
        [
            "run.steps=1_000",
            "policy.lr=3e-4",
            "run.deterministic=true",
            "value.loss=hl_gauss",
            "algo.policy_lambda=0.95",
            "algo.bounds.coding={eps_low = 0.1, eps_high = 0.2}",
            "task.prompts_file=a = b.jsonl",
        ],
    )
    assert (cfg.run.steps, cfg.policy.lr, cfg.run.deterministic, cfg.value.loss) == (1000, 3e-4, True, "hl_gauss")
    assert (cfg.algo.policy_lambda, cfg.algo.bounds.coding.eps_high) == (0.95, 0.2)
    assert cfg.task.prompts_file == "a = b.jsonl"


@pytest.mark.parametrize(
    "raw, name", [("7", "7"), ("true", "true"), ("2026-01-01", "2026-01-01"), ('"7"', "7"), ("1e3", "1e3")]
)
def test_a_text_field_takes_its_value_as_it_stands(raw, name):
    assert load_config(None, [f"run.name={raw}"]).run.name == name


def test_types_are_strict_on_the_command_line_too():
    assert fault(None, 'run.steps="3"') == "run.steps = '3' must be an integer (on the command line)"
    assert fault(None, "run.deterministic=True").startswith("run.deterministic = 'True' must be true or false")
    for raw in ("1\nrun.seed=2", 5000 * "9", 5000 * "[", "", " "):
        assert "must be an integer" in fault(None, f"run.steps={raw}")


@pytest.mark.parametrize(
    "overrides",
    [["run.seed=1", "run.seed=2"], ["task.params.a=1", "task.params.a.b=2"], ["task.params={a=1}", "task.params.a=1"]],
)
def test_the_same_key_twice_on_the_command_line_is_refused(overrides):
    assert "is given twice on the command line" in fault(None, *overrides)


@pytest.mark.parametrize("override", ["run.seed", "=3", "run.=3", ".seed=3", "run..seed=3", ""])
def test_a_malformed_override_is_refused(override):
    assert "write --section.key value" in fault(None, override)


# ---- the file --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "toml, expected",
    [
        ("[run]\nseed = 1\nseed = 2\n", "run.toml line 3 column 9: a key or table is given twice"),
        ("[run]\nseed = 1\n[run]\nsteps = 2\n", "run.toml line 3 column 5: a key or table is given twice"),
        ("run.seed = 1\nrun.seed = 2\n", "run.toml line 2 column 13: a key or table is given twice"),
        ("[task]\nparams = {a = 1, a = 2}\n", "a key or table is given twice"),
        ("[run\n", "run.toml line 1 column 5: "),
        ("[run]\nname = 'x", "run.toml at its end: "),
        ("run:\n  seed: 1\n", "run.toml line 1 column 4: "),
        pytest.param("[run]\nseed = " + 5000 * "9", "run.toml", id="many-digits"),
        pytest.param("[task.params]\nx = " + 5000 * "[", "run.toml", id="many-brackets"),
    ],
)
def test_a_broken_file_fails_with_file_and_line(write, toml, expected):
    assert expected in fault(write(toml))


def test_a_file_that_cannot_be_read_fails_with_its_name(tmp_path):
    assert fault(tmp_path / "absent.toml").endswith("absent.toml: No such file or directory")
    assert "Is a directory" in fault(tmp_path)
    (tmp_path / "latin.toml").write_bytes(b"[run]\nname = '\xe9'\n")
    assert "latin.toml is not UTF-8 text" in fault(tmp_path / "latin.toml")


def test_a_byte_order_mark_and_crlf_are_read(tmp_path):
    (tmp_path / "run.toml").write_bytes(b"\xef\xbb\xbf[run]\r\nseed = 3\r\n")
    assert load_config(tmp_path / "run.toml").run.seed == 3


def test_all_faults_are_reported_together(write):
    path = write("[run]\nstep = 3\nseed = -1\n[parallel]\nep = 2\n[critic]\nlr = 1.0\n")
    lines = fault(path, "sampling.top_p=0.9", "run.seed").splitlines()
    assert lines[0] == f"6 faults in the configuration ({path} with the command line):"
    keys = "'run.seed'", "run.step", "critic.lr", "run.seed", "sampling.top_p", "parallel.ep"
    assert all(any(line.strip().startswith(key) for line in lines[1:]) for key in keys)


# ---- arms ------------------------------------------------------------------------------------------------------


def test_an_arm_sets_its_values():
    cfg = load_config(None, ["algo.arm=sao_dis_only"])
    assert cfg.value.updates_per_step == 1 and cfg.value.groups.attention.trained and cfg.algo.loss == "dis"


def test_an_arm_on_the_command_line_overrides_the_file(write):
    path = write('[algo]\narm = "sao"\ngae = "skip_observation"\n[value]\nupdates_per_step = 2\n')
    assert load_config(path, ["algo.arm=sao_k1"]).value.updates_per_step == 1
    assert load_config(path, ["algo.arm=sao_plain_gae"]).algo.gae == "plain"


def test_nothing_is_left_of_the_files_arm_when_the_command_line_names_another(write):
    path = write('[algo]\narm = "sao_k1"\n')
    assert load_config(path).value.updates_per_step == 1
    assert load_config(path, ["algo.arm=sao"]).value.updates_per_step == 2


def test_a_value_beside_an_arm_must_agree_with_it(write):
    expected = "algo.arm = 'sao_k1' means value.updates_per_step = 1, but it is 2"
    assert expected in fault(write('[algo]\narm = "sao_k1"\n[value]\nupdates_per_step = 2'))
    assert expected in fault(write('[algo]\narm = "sao_k1"'), "value.updates_per_step=2")
    assert "but it is 'ppo_clip'" in fault(None, "algo.loss=ppo_clip")
    assert load_config(None, ["algo.arm=grpo", "sampling.rollouts_per_prompt=4"]).algo.baseline == "group"
    assert "means sampling.rollouts_per_prompt = 8, but it is 1" in fault(
        None, "algo.arm=grpo", "sampling.rollouts_per_prompt=1"
    )


# ---- writing ---------------------------------------------------------------------------------------------------


def test_what_is_written_reads_back_equal(tmp_path):
    cfg = load_config(
        None,
        [
            "algo.arm=grpo",
            "algo.policy_lambda=0.95",
            "policy.lr=1e-22",
            r'task.params={"a b" = "q\"\\\n\u0001\u007f é", empty = "", list = [1, 2.0, {x = true}], "é" = {}}',
            r"task.prompts_file='C:\new'",
        ],
    )
    (tmp_path / "resolved.toml").write_text(to_toml(cfg), encoding="utf-8")
    assert load_config(tmp_path / "resolved.toml") == cfg
    assert cfg.task.params["list"] == [1, 2.0, {"x": True}]


def test_every_key_is_written():
    assert load_config(None) == Config()
    text = to_toml(Config())
    assert text.startswith('[run]\nname = "local"\n')
    assert "[value.groups.attention]\ntrained = false\n" in text and "[task.params]\n" in text
