"""The supervised warm start of the demonstration model: a few seconds of right episodes before reinforcement learning.

Owns: `warm_start` (cross-entropy on demonstrations, one process, the Hugging Face model) and
`prepare_demonstration_model` (the folder that a run of a config starts from, made once and kept). Invariants:
- a demonstration is a Trajectory built by the rollout's own code, and only its action tokens are learned: the policy
  never learns to write an observation;
- it stops at a measured skill, not at a step count: the skill rises from 10% to 60% within 20 steps, and which 20 steps
  those are depends on the seed;
- a finished folder is never changed, and appears in one rename; its name is a hash of all that shaped it.
"""

import asyncio
import hashlib
import inspect
import itertools
import json
import os
import shutil
import tempfile
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from megatron_sao.config import Config
from megatron_sao.errors import TrainingError
from megatron_sao.models import tiny
from megatron_sao.records import Trajectory
from megatron_sao.rollout import agent, assemble, chat, demonstration, environment
from megatron_sao.rollout.prompts import PromptSource, read_prompt_file

Progress = Callable[[str, int, int, dict[str, float]], None]  # phase, steps done, steps at most, metrics

LR_WARMUP_STEPS = 20
CLIP_GRAD = 1.0
SKILL_WINDOW_STEPS = 5  # one batch of 64 alone misses the skill by some percent


@dataclass(frozen=True)
class WarmStartReport:
    """What a warm start reached; written into the model folder as warm_start.json."""

    steps: int  # updates made
    loss: float  # nats per action token, mean of the last batch
    episode_probability: float  # see `warm_start`


def warm_start(
    folder_out: Path | str,
    model_folder: Path | str,
    demonstrations: Iterator[Trajectory],
    *,
    steps: int,
    batch: int,
    lr: float,
    stop_at_probability: float = 0.0,
    progress: Progress | None = None,
) -> WarmStartReport:
    """Teach a model the right actions of demonstrations and write it as a new folder.

    loss = - sum over action tokens of log p(token | prefix) / number of action tokens of the batch

    The measure of skill is `episode_probability`: the mean over demonstrations of prod over action tokens of
    p(token | prefix), the chance that the model, sampled at temperature 1, writes exactly the demonstrated episode. It
    is taken on each new batch before it is learned, so it is an unbiased figure for unseen tasks, and where one way
    alone is right it is the pass rate.

    Args:
        folder_out: where the taught model shall stand; must not exist.
        model_folder: a Hugging Face folder; float32 weights.
        demonstrations: endless, or at least steps * batch; every trajectory holds an action token.
        steps: updates at most, >= 0.
        batch: trajectories of one update, >= 1.
        lr: of Adam (0.9, 0.98), constant after a warm-up of 20 steps.
        stop_at_probability: stop before the update at which the mean of the last 5 episode probabilities is at least
            this; 0 = never.
        progress: called after each step.
    Returns: the report.
    Raises: TrainingError if the loss is not finite or the demonstrations run out.
    Effect: creates `folder_out` in one rename, tokenizer included.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32)
    optimizer = torch.optim.Adam(model.parameters(), lr=lr, betas=(0.9, 0.98))
    recent: deque[float] = deque(maxlen=SKILL_WINDOW_STEPS)
    report = WarmStartReport(0, float("nan"), float("nan"))
    for step in range(steps):
        logp, action_mask = _score(model, list(itertools.islice(demonstrations, batch)), step)
        loss = -logp.sum() / action_mask.sum()
        recent.append(logp.detach().sum(1).exp().mean().item())
        report = WarmStartReport(step, loss.item(), sum(recent) / len(recent))
        if not torch.isfinite(loss):
            raise TrainingError(f"the loss of warm start step {step} is {report.loss}; lower warm_start.lr = {lr:g}")
        if stop_at_probability and len(recent) == recent.maxlen and report.episode_probability >= stop_at_probability:
            break
        for group in optimizer.param_groups:
            group["lr"] = lr * min(1.0, (step + 1) / LR_WARMUP_STEPS)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP_GRAD)
        optimizer.step()
        report = WarmStartReport(step + 1, report.loss, report.episode_probability)
        if progress:
            metrics = {"loss": report.loss, "episode_probability": report.episode_probability}
            progress("warm start", step + 1, steps, metrics)
    _save(Path(folder_out), model, AutoTokenizer.from_pretrained(model_folder), report)
    return report


def _score(model, trajectories: Sequence[Trajectory], step: int):
    """Log-probs of the action tokens.

    Returns: (logp, action_mask), both [N, T]: float32 with gradient, 0 off the mask; and bool.
    """
    import torch

    if not trajectories:
        raise TrainingError(
            f"the demonstrations ran out at warm start step {step}; give more, or lower warm_start.steps"
        )
    # Padding stands on the right, where causal attention cannot see it.
    shape = len(trajectories), max(t.num_tokens for t in trajectories)
    token_ids, action_mask = torch.zeros(shape, dtype=torch.int64), torch.zeros(shape, dtype=torch.bool)
    for row, trajectory in enumerate(trajectories):
        token_ids[row, : trajectory.num_tokens] = torch.from_numpy(trajectory.token_ids.copy())
        action_mask[row, : trajectory.num_tokens] = torch.from_numpy(trajectory.action_mask.copy())
    logits = model(input_ids=token_ids, use_cache=False).logits[:, :-1]
    logp = logits.log_softmax(-1).gather(2, token_ids[:, 1:, None]).squeeze(2)
    logp = torch.nn.functional.pad(logp, (1, 0))  # entry t scores token t; the first token has no prefix
    return torch.where(action_mask, logp, 0.0), action_mask


def _save(folder: Path, model, tokenizer, report: WarmStartReport) -> None:
    """Effect: writes model, tokenizer and report into a hidden folder beside `folder` and renames it."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    unfinished = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    try:
        model.save_pretrained(unfinished)
        tokenizer.save_pretrained(unfinished)
        (unfinished / "warm_start.json").write_text(json.dumps(asdict(report)) + "\n")
        unfinished.chmod(0o755)  # mkdtemp makes it private to this user
        try:
            unfinished.rename(folder)
        except OSError:
            if not (folder / "warm_start.json").exists():  # else another run finished the same model meanwhile
                raise
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def demonstrations_of(config: Config, tokenizer) -> Iterator[Trajectory]:
    """Endless demonstrations of a config's training tasks, in an order that depends on run.seed.

    The tasks of the evaluation split never appear. Where the environment makes its tasks, the stream is another one
    than the stream of prompts that reinforcement learning sees.
    """
    task = config.task
    maker = environment.make_environment(task.environment, task.params)
    rows = read_prompt_file(task.prompts_file, task.on_bad_line).tasks if task.prompts_file else None
    own_stream = -1 - config.run.seed  # run.seed itself is >= 0
    source = PromptSource("train", task.environment, maker, seed=own_stream, tasks=rows)
    writer = chat.Chat(tokenizer)

    async def demonstrate(num: int) -> list[Trajectory]:
        return [await demonstration.demonstrate(maker, prompt.task, writer) for prompt in source.take(num)]

    while True:
        yield from asyncio.run(demonstrate(64))


def prepare_demonstration_model(config: Config, progress: Progress | None = None) -> Path:
    """The folder of the taught demonstration model of a config; made if it is not in the cache yet.

    Args:
        config: [warm_start], [task] and run.seed decide what it is.
        progress: called after each supervised step; never called when the model comes from the cache.
    Returns: a Hugging Face folder with model, tokenizer and warm_start.json; not to be written to.
    Raises: ConfigError for an impossible shape or task, TrainingError if the loss goes bad.
    Effect: may add a folder to the cache.
    """
    settings = config.warm_start
    shape = tiny.TinyShape(**{field.name: getattr(settings, field.name) for field in fields(tiny.TinyShape)})
    folder = cache_folder(config) / f"tiny-{content_key(config)}"
    if (folder / "warm_start.json").exists():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".untaught.", dir=folder.parent) as scratch:
        untaught = tiny.make_tiny_model(Path(scratch) / "model", shape, config.run.seed)
        warm_start(
            folder,
            untaught,
            demonstrations_of(config, tiny.make_tokenizer()),
            steps=settings.steps,
            batch=settings.batch,
            lr=settings.lr,
            stop_at_probability=settings.stop_at_probability,
            progress=progress,
        )
    return folder


def cache_folder(config: Config) -> Path:
    """Where taught models are kept: warm_start.cache_folder, or `models` in the project's cache folder."""
    if config.warm_start.cache_folder:
        return Path(config.warm_start.cache_folder)
    home = os.environ.get("MEGATRON_SAO_HOME")  # as launch/env.sh
    user_cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return (Path(home) if home else user_cache / "megatron_sao") / "models"


def content_key(config: Config) -> str:
    """Hash of all that shapes the taught model: settings, task, seed, prompt file, library versions and this code."""
    import torch
    import transformers

    task = config.task
    settings = config.warm_start.model_dump(exclude={"cache_folder", "enabled"})
    facts = [settings, task.environment, task.params, config.run.seed, torch.__version__, transformers.__version__]
    digest = hashlib.blake2b(json.dumps(facts, sort_keys=True).encode(), digest_size=8)
    maker = environment.make_environment(task.environment, task.params)
    code = [tiny, agent, assemble, chat, demonstration, environment, inspect.getmodule(warm_start)]
    for module in [*code, inspect.getmodule(type(maker))]:
        digest.update(Path(inspect.getfile(module)).read_bytes())
    if task.prompts_file:
        digest.update(Path(task.prompts_file).read_bytes())
    return digest.hexdigest()
