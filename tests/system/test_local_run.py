"""The whole system once, as a user starts it: real vLLM, real torchrun, five policy steps. Then many looks at it."""

import json
import re
import sqlite3
import subprocess
import sys
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import pytest

from megatron_sao.config import load_config
from megatron_sao.observe.metrics import read_metrics
from megatron_sao.observe.trajectories import read_trajectories
from tests.support.local_run import CLONE, SMALL_RUN, LocalRun

NUM_STEPS = 5
NUM_EVAL_PROMPTS = 32
BATCH = 16
MAX_STALENESS, MAX_IN_FLIGHT = 8, 128  # more than the run trains: the engine always has work, also where it is quick


@dataclass
class FinishedRun:
    folder: Path
    start_folder: Path  # the model that it began with
    overrides: list[str]
    exit_code: int
    terminal: str
    left_behind: list

    def json(self, name: str) -> dict:
        return json.loads((self.folder / name).read_text())

    @cached_property
    def summary(self) -> dict:
        return self.json("scheduler_summary.json")

    @cached_property
    def metrics(self) -> list[dict]:
        return read_metrics(self.folder / "metrics.jsonl")

    def metrics_of(self, phase: str) -> list[dict]:
        return [record for record in self.metrics if record["phase"] == phase]

    def trajectories(self, pattern: str) -> dict[str, list]:
        return {path.stem: read_trajectories(path) for path in sorted((self.folder / "trajectories").glob(pattern))}


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> FinishedRun:
    place = tmp_path_factory.mktemp("run")
    cache = place / "models"
    limits = ["--schedule.max_staleness", str(MAX_STALENESS), "--schedule.max_in_flight", str(MAX_IN_FLIGHT)]
    run = LocalRun(place, "--warm_start.cache_folder", str(cache), *limits)
    try:
        run.wait_for("\ntrain 1/", timeout_s=400)
        exit_code = run.wait(200)
        left_behind = run.processes()
    finally:
        run.close()
    assert exit_code == 0, run.output
    (start_folder,) = cache.iterdir()
    overrides = [f"run.folder={run.folder.parent}", f"run.name={run.folder.name}", f"warm_start.cache_folder={cache}"]
    overrides += [f"schedule.max_staleness={MAX_STALENESS}", f"schedule.max_in_flight={MAX_IN_FLIGHT}"]
    return FinishedRun(run.folder, start_folder, overrides, exit_code, run.output, left_behind)


# ---- what a user sees ------------------------------------------------------------------------------------------


def test_ends_well_and_leaves_no_process_behind(finished):
    assert finished.exit_code == 0
    assert "Traceback" not in finished.terminal
    assert "error" not in finished.terminal
    assert finished.left_behind == []


def test_last_line_is_the_result(finished):
    last = finished.terminal.splitlines()[-1]
    number, exponent = r"\d+\.\d+", r"\d(?:\.\d+)?e[-+]\d+"
    found = re.fullmatch(
        rf"RESULT pass_rate_before=({number}) pass_rate_after=({number}) steps=(\d+) seconds=(\d+)"
        rf" logp_diff_lag0_max=({exponent}) lag_max=(\d+)",
        last,
    )
    assert found, last
    before, after, steps, seconds, _, lag_max = map(float, found.groups())
    evaluations = {record["eval/name"]: record["eval/pass_rate"] for record in finished.metrics_of("eval")}
    assert before == pytest.approx(evaluations["before"], abs=5e-4)
    assert after == pytest.approx(evaluations["after"], abs=5e-4)
    assert steps == NUM_STEPS
    assert seconds > 0
    assert lag_max == finished.summary["lag_max"]


# ---- the run folder --------------------------------------------------------------------------------------------


def test_resolved_config_reads_back_equal(finished):
    assert load_config(finished.folder / "config.toml") == load_config(SMALL_RUN, finished.overrides)


def test_metrics_name_every_phase_and_step(finished):
    steps = {phase: [record["step"] for record in finished.metrics_of(phase)] for phase in ("value_warmup", "train")}
    assert steps == {"value_warmup": [1, 2], "train": [3, 4, 5, 6, 7]}
    assert [record["eval/name"] for record in finished.metrics_of("eval")] == ["before", "after"]
    assert len(finished.metrics_of("value_pretrain")) > 1
    assert "value/explained_variance" in finished.metrics_of("value_pretrain")[-1]


def test_metrics_of_a_step_hold_what_the_picture_and_a_reader_need(finished):
    needed = {
        "rollout/reward_mean", "rollout/pass_rate", "rollout/action_tokens_mean", "lag/mean", "lag/max",
        "lag/share_ge1",
        "dis/rejected", "dis/rejected_low", "dis/rejected_high", "dis/mean_ratio", "dis/kl_k3",
        "dis/max_abs_logp_diff", "value/explained_variance", "value/loss", "policy/loss", "policy/grad_norm",
        "policy/entropy", "push/total_s", "push/pause_s", "schedule/wait_s", "time/step_s",
    }  # fmt: skip
    for record in finished.metrics_of("train"):
        assert needed <= record.keys(), needed - record.keys()
        assert all(np.isfinite(record[name]) for name in needed)
        assert record["policy/grad_norm"] > 0
        assert record["value/loss"] > 0


def test_tensorboard_holds_the_same_numbers(finished):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(finished.folder / "tensorboard"))
    events.Reload()
    for name in ("policy/loss", "rollout/reward_mean", "lag/max"):
        shown = {event.step: event.value for event in events.Scalars(name)}
        assert shown == {r["step"]: pytest.approx(r[name], abs=1e-6) for r in finished.metrics_of("train")}


def test_picture_exists(finished):
    from matplotlib.image import imread

    height, width, _ = imread(finished.folder / "report.png").shape
    assert height > 300 and width > 300


def test_trajectories_hold_the_tokens_of_every_step(finished):
    files = finished.trajectories("*.parquet")
    assert {f"train-{step:06d}" for step in range(3, 8)} < files.keys()
    assert {"eval-before-000000", f"eval-after-{NUM_STEPS:06d}"} < files.keys()
    for trajectory in (t for rows in files.values() for t in rows):
        assert trajectory.token_ids.min() >= 0
        assert trajectory.num_action_tokens > 0
        assert len(trajectory.token_ids) == len(trajectory.action_mask) == len(trajectory.logp_sampler)
        assert np.all(trajectory.logp_sampler[trajectory.action_mask] <= 0)
        assert np.all(trajectory.logp_sampler[~trajectory.action_mask] == 0)


def test_some_episodes_have_two_turns_and_some_rewards_differ(finished):
    rows = [t for rows in finished.trajectories("train-*.parquet").values() for t in rows]
    assert {int(t.turn_t.max()) for t in rows} == {0, 1}
    assert {t.reward for t in rows} == {0.0, 1.0}


# ---- the ledger ------------------------------------------------------------------------------------------------


def test_every_issued_prompt_came_out_once(finished):
    counts = finished.summary
    assert counts["issued"] == counts["trained"] + counts["dropped"] + counts["in_flight"]
    # The warm-up's and the policy's steps, and the pretraining's one batch.
    assert counts["trained"] == (2 + NUM_STEPS) * BATCH + 48
    with sqlite3.connect(finished.folder / "ledger.sqlite") as book:
        states = dict(book.execute("SELECT state, count(*) FROM prompts GROUP BY state"))
        (num_ids,) = book.execute("SELECT count(DISTINCT prompt_id) FROM prompts").fetchone()
    assert sum(states.values()) == num_ids == counts["issued"]
    assert states["trained"] == counts["trained"]


def test_the_trained_prompts_are_those_of_the_trajectory_files(finished):
    files = finished.trajectories("train-*.parquet") | finished.trajectories("value_*.parquet")
    written = [t.prompt.prompt_id for rows in files.values() for t in rows]
    with sqlite3.connect(finished.folder / "ledger.sqlite") as book:
        trained = [row[0] for row in book.execute("SELECT prompt_id FROM prompts WHERE state = 'trained'")]
    assert sorted(written) == sorted(trained)
    num_tokens = sum(t.num_action_tokens for rows in files.values() for t in rows)
    assert num_tokens == finished.summary["trained_action_tokens"]
    held_out = {t.prompt.prompt_id for rows in finished.trajectories("eval-*.parquet").values() for t in rows}
    assert len(held_out) == NUM_EVAL_PROMPTS
    assert held_out.isdisjoint(written)


# ---- lag and pushes --------------------------------------------------------------------------------------------


def test_trained_tokens_are_late_but_never_too_late(finished):
    lags = []
    for number, rows in enumerate(finished.trajectories("train-*.parquet").values()):
        lags += [number - t.version_t[t.action_mask] for t in rows]  # step `number` trains version `number`
    lags = np.concatenate(lags)
    assert lags.min() >= 0
    assert lags.max() <= MAX_STALENESS
    assert (lags == 0).any() and (lags >= 1).any()
    assert lags.max() == finished.summary["lag_max"]
    assert (lags >= 1).sum() == finished.summary["trained_action_tokens_lag_ge1"]


def test_each_policy_step_pushed_one_version(finished):
    assert finished.summary["num_pushes"] == NUM_STEPS
    assert finished.summary["policy_version"] == NUM_STEPS
    assert finished.json("result.json")["policy_version"] == NUM_STEPS
    assert [r["schedule/policy_version"] for r in finished.metrics_of("train")] == list(range(NUM_STEPS))


def test_pushes_met_requests_in_flight_and_lost_none(finished):
    summary = finished.summary
    assert summary["requests_in_flight_at_pushes"] > 0
    assert summary["requests_lost_by_pushes"] == 0
    survived = summary["requests_finished_after_pushes"] + summary["requests_still_running"]
    assert survived == summary["requests_in_flight_at_pushes"]
    # How many of them a step took is another matter: they may still wait in the buffer when a short run is over.
    assert summary["trajectories_across_pushes"] > 0, "no trajectory was written across a push"


def test_learner_and_sampler_agree_at_lag_0_and_differ_later(finished):
    result = finished.json("result.json")
    assert result["lag0_tokens"] > 100
    assert result["lag0_tokens_above_1e-4"] <= result["lag0_tokens"] / 10_000
    later = [r["dis/max_abs_logp_diff/lag1"] for r in finished.metrics_of("train") if "dis/max_abs_logp_diff/lag1" in r]
    assert max(later) > 1e-3  # else the pushed weights would be the old ones


def test_frozen_tensors_stayed_as_they_were(finished):
    # Attention, norms and embeddings of four layers; the trainer compares their bytes and fails the run otherwise.
    assert finished.json("result.json")["frozen_tensors_unchanged"] >= 4 * 4


# ---- the exported policy ---------------------------------------------------------------------------------------


def test_transformers_loads_the_export_and_its_weights_are_new(finished):
    import torch
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM, AutoTokenizer

    export = finished.folder / "export"
    before, after = (load_file(folder / "model.safetensors") for folder in (finished.start_folder, export))
    assert {name: t.shape for name, t in after.items()} == {name: t.shape for name, t in before.items()}
    unchanged = [name for name in before if torch.equal(before[name], after[name])]
    assert unchanged == []

    tokenizer = AutoTokenizer.from_pretrained(export)
    messages = [{"role": "user", "content": "1234"}]
    ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    model = AutoModelForCausalLM.from_pretrained(export, dtype=torch.float32)
    with torch.no_grad():
        logits = model(**ids).logits
    assert torch.isfinite(logits).all()
    assert model.config.to_dict() | {"_name_or_path": ""} == {
        **AutoModelForCausalLM.from_pretrained(finished.start_folder).config.to_dict(),
        "_name_or_path": "",
    }


def test_a_fresh_engine_on_the_export_answers_like_the_engine_of_the_last_push(finished):
    check = subprocess.run(
        [sys.executable, "tools/check_export.py", str(finished.folder)],
        cwd=CLONE,
        env=_environment(),
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert check.returncode == 0, check.stdout + check.stderr
    last = check.stdout.splitlines()[-1]
    found = re.fullmatch(r"CHECK export prompts=32 equal=32 max_logp_diff=(\S+)", last)
    assert found, last
    assert float(found[1]) <= 1e-5
    outputs = [continuation["output_ids"] for continuation in finished.json("greedy.json")["continuations"]]
    assert sum(map(len, outputs)) > 200  # else little would have been compared
    assert finished.json("greedy.json")["policy_version"] == NUM_STEPS


def _environment() -> dict[str, str]:
    import os

    return {**os.environ, "PYTHONPATH": str(CLONE)}
