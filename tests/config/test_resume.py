"""What may change in the configuration of a run that goes on, and what not."""

import pytest

from megatron_sao.checkpoints import CONFIG_FILE
from megatron_sao.config import changes_since, load_config, to_toml
from megatron_sao.config.keys import leaf_keys
from megatron_sao.config.resume import _FIXED
from megatron_sao.errors import ConfigError


@pytest.fixture
def changes(tmp_path):
    """changes(saved, given) -> what is reported, of overrides."""

    def between(saved, given):
        (tmp_path / CONFIG_FILE).write_text(to_toml(load_config(None, saved)))
        return changes_since(tmp_path, load_config(None, given))

    return between


def test_an_equal_configuration_has_no_changes(changes):
    given = ['task.params={"digits" = [2, 3]}', "value.groups.norms.trained=true", "policy.lr=1e-5"]
    assert changes(given, given) == []


def test_layout_engines_rates_and_lengths_may_change_and_are_listed(changes):
    given = [
        "run.steps=500",
        "policy.lr=1e-5",
        "value.groups.head.lr_multiplier=3.0",
        "parallel.dp=2",
        "engine.count=3",
        "schedule.max_staleness=2",
        "checkpoint.keep_last=7",
        "push.attempts=9",
        "warm_start.cache_folder=elsewhere",
    ]
    found = changes([], given)
    assert [change.key for change in found] == sorted((g.split("=")[0] for g in given), key=_place)
    assert str(next(change for change in found if change.key == "run.steps")) == "run.steps = 500, was 120"


def _place(key):
    return [leaf.path for leaf in leaf_keys()].index(key)


@pytest.mark.parametrize(
    "saved, given",
    [
        ([], ["engine.dtype=bfloat16", "model.dtype=bfloat16"]),
        (["warm_start.layers=2"], []),
        ([], ["task.environment=other"]),
        ([], ["run.seed=2"]),
        ([], ["sampling.temperature=0.5"]),
        (["sampling.temperature=0.5"], ["sampling.temperature=0.7"]),
        ([], ["value.groups.attention.trained=true"]),
        ([], ["value.loss=hl_gauss"]),
        (["value.loss=hl_gauss"], ["value.loss=hl_gauss", "value.hl_gauss_bins=7"]),
        ([], ["policy.mtp_loss_weight=0.1"]),
        ([], ["algo.arm=running_mean"]),
    ],
    ids=lambda overrides: ",".join(overrides) or "-",
)
def test_what_makes_the_state_meaningless_is_refused_with_both_values(changes, saved, given):
    with pytest.raises(ConfigError) as caught:
        changes(saved, given)
    first, *lines = str(caught.value).split("\n  ")
    assert "cannot be resumed with these settings" in first
    key, _, value = (given or saved)[-1].partition("=")
    if key == "algo.arm":
        key, value = "algo.baseline", "running_mean"
    (line,) = [line for line in lines if line.startswith(f"{key} = ")]
    assert value.lower() in line.lower() and ", saved with " in line


def test_all_faults_are_reported_together(changes):
    with pytest.raises(ConfigError) as caught:
        changes([], ["run.seed=2", "value.loss=hl_gauss", "run.steps=7"])
    assert [line.split(" ")[0] for line in str(caught.value).split("\n  ")[1:]] == ["run.seed", "value.loss"]


def test_the_weight_of_a_trained_mtp_loss_may_change(changes):
    (change,) = changes(["policy.mtp_loss_weight=0.1"], ["policy.mtp_loss_weight=0.2"])
    assert change.key == "policy.mtp_loss_weight"


@pytest.mark.parametrize("key", ["model.path", "task.prompts_file"])
def test_a_path_may_be_written_in_another_way_but_lead_nowhere_else(changes, tmp_path, monkeypatch, key):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "given").mkdir()
    (tmp_path / "link").symlink_to("given")
    others = ["warm_start.enabled=false"] if key == "model.path" else []
    for other in (tmp_path / "given", "./given/", "link"):
        assert [change.key for change in changes([f"{key}=given", *others], [f"{key}={other}", *others])] == [key]
    with pytest.raises(ConfigError, match=f"{key} = 'elsewhere', saved with 'given'.* leave a link to it where it was"):
        changes([f"{key}=given", *others], [f"{key}=elsewhere", *others])


def test_every_rule_names_keys_that_exist():
    paths = [key.path for key in leaf_keys()]
    for fixed in _FIXED:
        assert any(path == fixed or (fixed.endswith(".") and path.startswith(fixed)) for path in paths), fixed
