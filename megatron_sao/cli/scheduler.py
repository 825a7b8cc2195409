"""Starts the scheduler of one run: engines, prompts, ledger and sinks wired together.

    python -m megatron_sao.cli.scheduler CONFIG --run-folder runs/local [--model MODEL_FOLDER] [--engines URL[,URL ...]]
                                         [--resume runs/local/checkpoints/step-000040]

A prepared run folder (`cli/prepare.py`) says which model and which checkpoint it is, and engines that are not named
here register there. They may still be starting. The trainer finds the scheduler through `scheduler.json` in the run
folder, which also keeps a second scheduler away. The file `stop` there, or SIGTERM, makes the run save and end before
its end. The process exits 0 only after the trainer said that it finished or has saved, or is not missed because a stop
is wanted; `scheduler_summary.json` says what became of every prompt, however the run ended.
"""

import asyncio
import json
import logging
import os
import signal
import socket
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec

from megatron_sao.checkpoints import SCHEDULER_FOLDER, check_contents, check_sizes, read_manifest
from megatron_sao.cli.arrivals import RunEngines
from megatron_sao.cli.files import ADDRESS_FILE, LEDGER_FILE, SUMMARY_FILE
from megatron_sao.cli.heartbeat import Heart
from megatron_sao.cli.options import Options, parse_options, run_command
from megatron_sao.cli.run_folder import RunStart, announce_ready, announce_scheduler, read_start
from megatron_sao.cli.run_observer import RunObserver
from megatron_sao.cli.stop import ask_to_stop, reason_to_stop
from megatron_sao.config import Config, derived_numbers, describe
from megatron_sao.errors import ConfigError, ProtocolError
from megatron_sao.records import FINISHED, Prompt, StopWanted
from megatron_sao.rollout.agent import EpisodeSettings, run_episode
from megatron_sao.rollout.chat import Chat
from megatron_sao.rollout.engine_pool import EnginePool
from megatron_sao.rollout.environment import Environment, Task, make_environment
from megatron_sao.rollout.greedy import GREEDY_FILE, MAX_PROMPTS, MAX_TOKENS, GreedyRecord, continue_greedily
from megatron_sao.rollout.prompts import PromptSource, read_prompt_file, without_overlong
from megatron_sao.schedule.ledger import Ledger, restore_ledger
from megatron_sao.schedule.loop import Scheduler, ScheduleSettings
from megatron_sao.schedule.snapshot import SavedSchedule, read_snapshot
from megatron_sao.schedule.stop import StopWish
from megatron_sao.transport.channel import SchedulerChannel

log = logging.getLogger(__name__)

STOP_POLL_S = 0.5
# Where SLURM signals every process of a step, this one hears it at once and again from the guard above it.
SAME_SIGNAL_S = 2.0
EVAL_SEED = 0  # held-out prompts are the same for every run.seed, so that runs can be compared

_ABOUT = "Serve one trainer: prompts, rollouts on running engines, freshness, and the moment of each weight push."
_VALUES = {
    "run-folder": "folder of this run; must exist",
    "model": "HF folder whose tokenizer renders the prompts (default: as prepared)",
    "resume": "checkpoint to go on from; the trainer must start from the same (default: as prepared)",
    "engines": "addresses of the engines, separated by commas: http://127.0.0.1:8000 (default: they register)",
    "host": "address to listen on for the trainer (default 127.0.0.1)",
}


def main(argv: Sequence[str]) -> None:
    """Run the scheduler until the trainer says Goodbye."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s: %(message)s")
    options = parse_options(argv, about=_ABOUT, values=_VALUES)
    config = options.load_config()
    if "dry-run" in options.switches:
        print(describe(config))
        return
    run_folder, start = _start(options)
    if start.resume is None and (run_folder / LEDGER_FILE).exists():
        raise ConfigError(
            f"{run_folder} already holds a run ({LEDGER_FILE}); go on from its checkpoint (--resume), choose another"
            " run.name, or remove the folder"
        )
    if found := [name for name in (ADDRESS_FILE, SUMMARY_FILE) if (run_folder / name).exists()]:
        raise _has_its_scheduler(run_folder, found[0])
    urls = [url for url in options.values.get("engines", "").split(",") if url]
    try:
        asyncio.run(_run(config, run_folder, start, urls, options.values.get("host", "127.0.0.1")))
    except asyncio.CancelledError as error:
        raise ProtocolError("the scheduler was stopped before the run was over") from error


async def _run(config: Config, run_folder: Path, start: RunStart, engine_urls: list[str], host: str) -> None:
    stop = StopWish()
    _heed_sigterm(run_folder, stop)
    looking = asyncio.create_task(_look_for_stop_file(run_folder, stop))
    saved = _read_checkpoint(start.resume) if start.resume else None
    chat = Chat(_load_tokenizer(start.model))
    environment = make_environment(config.task.environment, config.task.params)
    tasks = await _tasks(config, environment, chat)
    prompts, eval_prompts = _prompts(config, environment, tasks)
    if saved:
        prompts.restore(saved.state.prompts)
    engines = RunEngines(config, run_folder, engine_urls)
    episode = EpisodeSettings(
        max_tokens_per_turn=config.sampling.max_tokens_per_turn,
        max_turns=config.sampling.max_turns,
        max_trajectory_tokens=min(config.sampling.max_trajectory_tokens, config.engine.max_model_len),
        temperature=config.sampling.temperature,
        # No seed per request: an asynchronous run is not repeatable token by token, and vLLM 0.32 on a CPU dies of one
        # ("CPU Generator does not use offset") when a prefill is split, as after a push with many requests in flight.
        # The engines are started with run.seed instead.
        seed=None,
        reward_key=config.task.reward_key,
    )
    channel = SchedulerChannel(host, config.schedule.port)
    try:
        _announce(run_folder, channel.address)
        heart = Heart(run_folder)
        try:
            # Before anything else is written. A run that shall stop needs no engines.
            await stop.unless(engines.wait)
        except BaseException:
            heart.close()
            (run_folder / ADDRESS_FILE).unlink(missing_ok=True)
            raise
    except BaseException:
        await channel.close()
        await engines.close()
        raise
    if saved:
        restore_ledger(saved.ledger_path, run_folder / LEDGER_FILE)
    ledger = Ledger(run_folder / LEDGER_FILE)
    observer = RunObserver(config, run_folder, chat, saved.state.observer if saved else None)
    outcome = "stopped from outside"
    try:
        scheduler = Scheduler(
            channel=channel,
            engines=engines.pool,
            prompts=prompts,
            eval_prompts=eval_prompts,
            run_episode=lambda prompt: run_episode(prompt, environment, engines.pool, chat, episode),
            ledger=ledger,
            settings=_settings(config, is_resumed=saved is not None),
            observer=observer,
            stop=stop,
            saved=saved,
        )
        del saved  # its trajectories are the buffer's now, and shall leave memory with it
        announce_ready(run_folder, channel.address)
        try:
            ended = await scheduler.run()
            if ended == FINISHED:
                version = scheduler.policy_version
                recorded = await stop.unless(
                    lambda: _record_greedy_outputs(
                        config, run_folder, engines.pool, version, chat, environment, eval_prompts
                    )
                )
                if isinstance(recorded, StopWanted):
                    log.warning("%s is not written: the run was told to stop before its last push was compared",
                                GREEDY_FILE)
            outcome = ended
        except Exception as error:
            outcome = str(error)
            raise
        finally:
            _write_json(run_folder / SUMMARY_FILE, {"outcome": outcome, **scheduler.summary()})
    finally:
        heart.close()
        looking.cancel()
        observer.close()
        ledger.close()
        await channel.close()
        await engines.close()


def _announce(run_folder: Path, address: str) -> None:
    """Raises: ConfigError for a second scheduler, as of a run that was started twice."""
    try:
        announce_scheduler(run_folder, address)
    except FileExistsError as error:
        raise _has_its_scheduler(run_folder, ADDRESS_FILE) from error


def _has_its_scheduler(run_folder: Path, found: str) -> ConfigError:
    return ConfigError(
        f"{run_folder} has had its scheduler since it was prepared ({found}); to go on from its newest"
        " checkpoint, prepare it again: `python -m megatron_sao.cli.prepare CONFIG --resume`"
    )


async def _record_greedy_outputs(
    config: Config, run_folder: Path, engines: EnginePool, policy_version: int, chat: Chat, environment: Environment,
    prompts: list[Prompt],
) -> None:
    """Effect: leaves what the engines answer under the last push, for `tools/check_export.py` to compare with."""
    starts = [chat.prompt_ids(await environment.start(prompt.task).begin()) for prompt in prompts[:MAX_PROMPTS]]
    max_tokens = min(MAX_TOKENS, config.sampling.max_tokens_per_turn)
    record = GreedyRecord(
        policy_version=policy_version,
        max_tokens=max_tokens,
        stop_token_ids=list(chat.stop_token_ids),
        continuations=await continue_greedily(
            engines, starts, max_tokens=max_tokens, stop_token_ids=chat.stop_token_ids
        ),
    )
    _write_json(run_folder / GREEDY_FILE, msgspec.to_builtins(record))


def _start(options: Options) -> tuple[Path, RunStart]:
    """Run folder, model and checkpoint: what the command line does not say stands in a prepared folder."""
    given = options.values
    if "run-folder" not in given:
        raise ConfigError(f"--run-folder is missing: {_VALUES['run-folder']}")
    run_folder = Path(given["run-folder"])
    if not run_folder.is_dir():
        raise ConfigError(f"{run_folder} is no folder")
    if "model" not in given:
        start = read_start(run_folder)
    elif not Path(given["model"]).is_dir():
        raise ConfigError(f"{given['model']} is no folder")
    else:
        start = RunStart(Path(given["model"]), None)
    return run_folder, replace(start, resume=Path(given["resume"])) if "resume" in given else start


def _read_checkpoint(folder: Path) -> SavedSchedule:
    """The scheduler's part of a checkpoint. Raises: CheckpointError naming what is missing or damaged."""
    manifest = read_manifest(folder)
    check_sizes(folder, manifest)
    check_contents(folder, manifest, [name for name in manifest.files if name.startswith(f"{SCHEDULER_FOLDER}/")])
    saved = read_snapshot(folder / SCHEDULER_FOLDER)
    log.info("going on after step %d at version %d, with %d finished trajectories",
             saved.state.step, saved.state.policy_version, len(saved.trajectories))
    return saved


def _load_tokenizer(model: Path) -> Any:
    from transformers import AutoTokenizer  # takes seconds to import: not before the command line was read

    try:
        return AutoTokenizer.from_pretrained(model)
    except (OSError, ValueError) as error:
        raise ConfigError(f"the tokenizer in {model} cannot be read: {error}") from error


async def _tasks(config: Config, environment: Environment, chat: Chat) -> list[Task] | None:
    """The rows of the prompt file that leave room for an answer; None = the environment makes its tasks."""
    if not config.task.prompts_file:
        return None
    file = read_prompt_file(config.task.prompts_file, config.task.on_bad_line)
    for line, reason in file.skipped.items():
        log.warning("%s line %d skipped: %s", config.task.prompts_file, line, reason)
    limit = min(config.sampling.max_trajectory_tokens, config.engine.max_model_len) - 1
    tasks, num_overlong = await without_overlong(file.tasks, environment, chat, limit)
    log.info("%d prompts, %d bad lines and %d too long ones skipped", len(tasks), len(file.skipped), num_overlong)
    return tasks


def _prompts(config: Config, environment: Environment, tasks: list[Task] | None) -> tuple[PromptSource, list[Prompt]]:
    train = PromptSource(
        "train",
        config.task.environment,
        environment,
        seed=config.run.seed,
        tasks=tasks,
        num_prompts=config.task.num_train_prompts,
        rollouts_per_prompt=config.sampling.rollouts_per_prompt,
    )
    held_out = PromptSource(
        "eval",
        config.task.environment,
        environment,
        seed=EVAL_SEED,
        tasks=tasks,
        num_prompts=config.task.num_eval_prompts,
        shuffle=False,
    )
    return train, held_out.all()


def _settings(config: Config, *, is_resumed: bool) -> ScheduleSettings:
    return ScheduleSettings(
        trainer_start_timeout_s=config.parallel.start_timeout_s + (config.checkpoint.timeout_s if is_resumed else 0.0),
        batch_trajectories=config.schedule.batch_trajectories,
        max_staleness=config.schedule.max_staleness,
        max_in_flight=derived_numbers(config)["max_in_flight"],
        batch_timeout_s=config.schedule.batch_timeout_s,
        push_timeout_s=config.push.timeout_s,
        push_backend=config.push.backend,
        push_attempts=config.push.attempts,
    )


def _heed_sigterm(run_folder: Path, stop: StopWish) -> None:
    """Effect: the first SIGTERM asks the run to stop, a later one cancels this task."""
    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    first_s: float | None = None

    def heed() -> None:
        nonlocal first_s
        if first_s is None:
            first_s = loop.time()
            reason = f"SIGTERM to the scheduler on {socket.gethostname()}"
            stop.ask(reason)
            ask_to_stop(run_folder, reason)
        elif loop.time() > first_s + SAME_SIGNAL_S:
            task.cancel()

    loop.add_signal_handler(signal.SIGTERM, heed)


async def _look_for_stop_file(run_folder: Path, stop: StopWish) -> None:
    while (reason := reason_to_stop(run_folder)) is None:
        await asyncio.sleep(STOP_POLL_S)
    stop.ask(reason)


def _write_json(path: Path, content: dict[str, Any]) -> None:
    """Effect: `path` is whole or absent."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    temporary.replace(path)


if __name__ == "__main__":
    run_command(main)
