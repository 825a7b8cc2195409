"""Numbers that follow from a configuration, worked by hand."""

import tomllib

from megatron_sao.config import derived_numbers, describe, load_config, max_in_flight, num_kept_checkpoints


def test_derived_numbers_worked_by_hand():
    cfg = load_config(
        None,
        [
            "parallel.tp=2",
            "parallel.ep=4",
            "parallel.dp=3",
            "parallel.pp=2",
            "parallel.etp=1",
            "parallel.cp=2",
            "parallel.micro_batch_tokens=500",
            "schedule.batch_trajectories=64",
            "sampling.max_trajectory_tokens=100",
            "engine.count=3",
            "engine.max_num_seqs=200",
            "run.steps=10",
            "value.warmup_steps=5",
            "value.updates_per_step=3",
            "value.pretrain_trajectories=205",
            "value.pretrain_batch_trajectories=60",
            "value.pretrain_epochs=2",
        ],
    )
    numbers = derived_numbers(cfg)
    assert (numbers["trainer_ranks"], numbers["model_copies"], numbers["expert_copies"]) == (
        2 * 3 * 2 * 2,
        3,
        2 * 2 * 3 // 4,
    )
    assert numbers["trajectories_per_model_copy"] == 22  # 64 over 3
    assert numbers["tokens_per_step_bound"] == 6400
    assert numbers["micro_batches_bound"] == 5  # 6400 tokens over 3 copies of 500 each
    assert numbers["max_in_flight"] == 320  # (4 + 1) * 64, below the 600 slots
    assert numbers["pretrain_holdout_trajectories"] == 20
    assert numbers["pretrain_updates"] == 2 * 4  # 185 in batches of 60
    assert numbers["value_updates"] == (5 + 10) * 3
    assert numbers["policy_updates"] == 10
    assert numbers["trajectories_trained"] == 205 + 15 * 64


def test_episodes_in_flight_are_bounded_by_slots_by_freshness_and_by_wish():
    assert max_in_flight(load_config(None)) == 64  # one engine with 64 slots; freshness would allow 640
    assert max_in_flight(load_config(None, ["engine.count=20"])) == 640
    assert max_in_flight(load_config(None, ["schedule.max_staleness=0", "engine.count=20"])) == 128
    assert max_in_flight(load_config(None, ["schedule.max_in_flight=3"])) == 3


def kept(*overrides):
    return num_kept_checkpoints(load_config(None, ["run.steps=200", "value.warmup_steps=10", *overrides]))


def test_the_checkpoints_that_stay_worked_by_hand():
    assert kept() == 2
    assert kept("checkpoint.keep_every=100") == 2 + 2  # of 210 steps: 100, 200
    assert kept("checkpoint.keep_every=1") == 2 + 10  # all that are saved: 20, 40, ... 200
    best = ["checkpoint.keep_best=1", "run.eval_every=20", "checkpoint.keep_last=1"]
    assert kept(*best) == 1 + 1
    assert kept(*best, "checkpoint.keep_every=10") == 1 + 1 + 10 + 10  # and 30, 50, ... 210, after the evaluations
    assert kept(*best, "checkpoint.keep_every=10", "checkpoint.every_steps=0") == 1 + 1 + 10


def test_an_arm_without_a_value_model_makes_no_value_updates():
    numbers = derived_numbers(load_config(None, ["algo.arm=grpo", "value.pretrain_trajectories=512"]))
    assert (numbers["value_updates"], numbers["pretrain_updates"], numbers["prompts_per_step"]) == (0, 0, 16)
    assert numbers["trajectories_trained"] == 120 * 128


def test_a_description_is_a_configuration_too(tmp_path):
    cfg = load_config(None, ["parallel.tp=2", "run.name=described"])
    text = describe(cfg)
    assert "# trainer_ranks                 = 2 " in text
    assert tomllib.loads(text)["run"]["name"] == "described"
    (tmp_path / "described.toml").write_text(text)
    assert load_config(tmp_path / "described.toml") == cfg
