"""The supervised warm start: what it learns, what it measures, what it keeps."""

import itertools
import json
import math

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from megatron_sao.config import load_config
from megatron_sao.errors import TrainingError
from megatron_sao.models.tiny import TinyShape, make_tiny_model, vocabulary
from megatron_sao.records import Prompt, Trajectory
from megatron_sao.rollout.environment import split_of
from megatron_sao.train import warm_start as module
from megatron_sao.train.warm_start import (
    cache_folder,
    content_key,
    demonstrations_of,
    prepare_demonstration_model,
    warm_start,
)

SHAPE = {
    "layers": 1, "hidden": 32, "heads": 2, "kv_heads": 1, "head_dim": 32, "experts": 2, "top_k": 1, "expert_ffn": 16,
}


def config(cache, **changed):
    """A config with a very small model; `changed` holds dotted keys with `__` for the dot."""
    keys = {
        "parallel.tp": 1,
        "warm_start.cache_folder": cache,
        "warm_start.steps": 2,
        "warm_start.batch": 4,
        "warm_start.stop_at_probability": 0.0,
    }
    keys |= {f"warm_start.{name}": size for name, size in SHAPE.items()}
    keys |= {key.replace("__", "."): value for key, value in changed.items()}
    return load_config(None, [f"{key}={value}" for key, value in keys.items()])


def trajectory(token_ids, action_mask):
    """Just enough of a Trajectory for supervised learning."""
    n = len(token_ids)
    return Trajectory(
        prompt=Prompt(prompt_id="d", environment="calculator", domain="agentic", task={}),
        token_ids=np.array(token_ids, dtype=np.int64),
        action_mask=np.array(action_mask, dtype=bool),
        logp_sampler=np.zeros(n, np.float32),
        reward_t=np.zeros(n, np.float32),
        version_t=np.zeros(n, np.int32),
        turn_t=np.zeros(n, np.int32),
        reward=1.0,
        is_cut=False,
        started_s=0.0,
        finished_s=0.0,
    )


@pytest.fixture(scope="module")
def untaught(tmp_path_factory):
    return make_tiny_model(tmp_path_factory.mktemp("untaught") / "model", TinyShape(**SHAPE), seed=1)


def test_only_action_tokens_are_learned_and_padding_has_no_effect(untaught):
    """The loss of [action, observation, padding] is that of the action tokens alone, worked out from the logits."""
    model = AutoModelForCausalLM.from_pretrained(untaught)
    rows = [trajectory([4, 50, 60, 1, 70], [0, 1, 0, 1, 0]), trajectory([4, 51], [0, 1])]
    logp, mask = module._score(model, rows, step=0)
    with torch.no_grad():
        alone = [model(input_ids=torch.tensor([row.token_ids.tolist()])).logits[0].log_softmax(-1) for row in rows]
    expected = torch.zeros(2, 5)
    expected[0, 1], expected[0, 3] = alone[0][0, 50], alone[0][2, 1]
    expected[1, 1] = alone[1][0, 51]
    assert mask.tolist() == [[False, True, False, True, False], [False, True, False, False, False]]
    torch.testing.assert_close(logp, expected, atol=1e-5, rtol=0)


def test_it_learns_the_actions_and_leaves_its_input_folder_alone(untaught, tmp_path):
    before = (untaught / "model.safetensors").read_bytes()
    row = trajectory([4, 50, 1, 5, 60, 61, 1], [0, 0, 0, 0, 1, 1, 1])
    seen = []
    report = warm_start(
        tmp_path / "taught",
        untaught,
        itertools.repeat(row),
        steps=60,
        batch=4,
        lr=1e-2,
        progress=lambda *a: seen.append(a),
    )
    assert report.steps == 60 and report.episode_probability > 0.9 and report.loss < 0.05
    assert [(phase, done, total) for phase, done, total, _ in seen] == [("warm start", k + 1, 60) for k in range(60)]
    assert seen[0][3]["loss"] > 4.0  # a random model: about log 128 = 4.85
    taught = AutoModelForCausalLM.from_pretrained(tmp_path / "taught")
    written = taught.generate(torch.tensor([[4, 50, 1, 5]]), max_new_tokens=5, do_sample=False)[0].tolist()
    assert written == row.token_ids.tolist()
    assert (untaught / "model.safetensors").read_bytes() == before
    assert json.loads((tmp_path / "taught" / "warm_start.json").read_text())["steps"] == 60
    assert [p.name for p in tmp_path.iterdir()] == ["taught"]


def test_it_stops_at_the_probability_with_the_very_weights_that_were_measured(untaught, tmp_path):
    row = trajectory([4, 50, 1, 5, 60, 61, 1], [0, 0, 0, 0, 1, 1, 1])
    history = []
    report = warm_start(
        tmp_path / "taught",
        untaught,
        itertools.repeat(row),
        steps=200,
        batch=1,
        lr=1e-2,
        stop_at_probability=0.2,
        progress=lambda phase, done, total, metrics: history.append(metrics["episode_probability"]),
    )
    assert 5 <= report.steps < 60 and report.episode_probability >= 0.2
    assert len(history) == report.steps and max(history[4:]) < 0.2
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "taught")
    logp, _ = module._score(model, [row], step=0)
    # The last of the five measures that the mean is made of belongs to the saved weights.
    assert math.isclose(-logp.sum().item() / 3, report.loss, rel_tol=1e-4)


def test_no_steps_keep_the_weights(untaught, tmp_path):
    report = warm_start(tmp_path / "taught", untaught, iter([]), steps=0, batch=4, lr=1e-3)
    assert report.steps == 0
    assert (tmp_path / "taught" / "model.safetensors").read_bytes() == (untaught / "model.safetensors").read_bytes()


def test_a_failure_leaves_nothing_behind(untaught, tmp_path):
    row = trajectory([4, 50, 1, 5, 60], [0, 0, 0, 0, 1])
    with pytest.raises(TrainingError, match="ran out at warm start step 1"):
        warm_start(tmp_path / "taught", untaught, iter([row]), steps=3, batch=1, lr=1e-3)
    with pytest.raises(TrainingError, match="lower warm_start.lr"):
        warm_start(tmp_path / "taught", untaught, itertools.repeat(row), steps=9, batch=1, lr=float("inf"))
    assert list(tmp_path.iterdir()) == []


def test_demonstrations_are_right_two_turn_episodes_of_the_training_split(tmp_path):
    from megatron_sao.models.tiny import make_tokenizer

    digits = {"task__params__min_digits": 2, "task__params__max_digits": 2}
    cfg = config(tmp_path, **digits)
    taken = list(itertools.islice(demonstrations_of(cfg, make_tokenizer()), 100))
    again = list(itertools.islice(demonstrations_of(cfg, make_tokenizer()), 100))
    other = next(demonstrations_of(config(tmp_path, run__seed=2, **digits), make_tokenizer()))
    tokens = vocabulary()
    for t in taken:
        question, answer = t.prompt.task["prompt"], t.prompt.task["answer"]
        text = [tokens[i] for i in t.token_ids]
        assert "".join(text) == (
            f"<|user|>{question}<|end|><|assistant|>[{question[:-1]}]<|end|>"
            f"<|tool|>{answer}<|end|><|assistant|>{answer}<|end|>"
        )
        actions = "".join(token for token, is_action in zip(text, t.action_mask, strict=True) if is_action)
        assert actions == f"[{question[:-1]}]<|end|>{answer}<|end|>"
        assert t.reward == 1.0 and not t.is_cut and split_of(t.prompt.task) == "train"
    assert [t.token_ids.tolist() for t in taken] == [t.token_ids.tolist() for t in again]
    assert other.token_ids.tolist() != taken[0].token_ids.tolist()


def test_the_model_is_made_once_and_named_by_what_shaped_it(tmp_path):
    calls = []
    folder = prepare_demonstration_model(config(tmp_path), progress=lambda *a: calls.append(a))
    assert len(calls) == 2 and folder.parent == tmp_path
    stamp = (folder / "model.safetensors").stat().st_mtime_ns
    assert prepare_demonstration_model(config(tmp_path), progress=lambda *a: calls.append(a)) == folder
    assert len(calls) == 2 and (folder / "model.safetensors").stat().st_mtime_ns == stamp
    assert list(tmp_path.iterdir()) == [folder]  # no scratch folder stays
    changes = [
        {},
        {"run__seed": 2},
        {"task__params__max_digits": 3},
        {"warm_start__steps": 3},
        {"warm_start__lr": 1e-3},
        {"warm_start__stop_at_probability": 0.5},
        {"warm_start__hidden": 64},
    ]
    keys = [content_key(config(tmp_path, **change)) for change in changes]
    assert len(set(keys)) == len(keys) and keys[0] == content_key(config("elsewhere"))


def test_the_cache_lies_where_the_config_or_the_environment_says(monkeypatch, tmp_path):
    assert cache_folder(config(tmp_path)) == tmp_path
    monkeypatch.setenv("MEGATRON_SAO_HOME", str(tmp_path / "home"))
    assert cache_folder(config("")) == tmp_path / "home" / "models"
    monkeypatch.delenv("MEGATRON_SAO_HOME")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_folder(config("")) == tmp_path / "xdg" / "megatron_sao" / "models"
