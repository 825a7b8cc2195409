"""Starts the scheduler of one run: engines, prompts, ledger and sinks wired together.

    python -m megatron_sao.cli.scheduler CONFIG --run-folder runs/local --model MODEL_FOLDER --engines URL[,URL ...]

Engines may still be starting. The trainer finds the scheduler through `scheduler.json` in the run folder. The process
exits 0 only after the trainer said that it finished; `scheduler_summary.json` says what became of every prompt, however
the run ended.
"""

import asyncio
import json
import logging
import os
import signal
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from megatron_sao.cli.files import ADDRESS_FILE, LEDGER_FILE, SUMMARY_FILE
from megatron_sao.cli.options import Options, parse_options, run_command
from megatron_sao.config import Config, derived_numbers, describe
from megatron_sao.errors import ConfigError, EngineError, ProtocolError
from megatron_sao.observe.metrics import MetricsSink
from megatron_sao.observe.progress import Progress
from megatron_sao.observe.report import write_report
from megatron_sao.observe.trajectories import trajectories_path, write_trajectories
from megatron_sao.records import PRETRAIN, TRAIN, WARMUP, EvalResult, Prompt, StepReport, Trajectory
from megatron_sao.rollout.agent import EpisodeSettings, run_episode
from megatron_sao.rollout.chat import Chat
from megatron_sao.rollout.engine_client import EngineClient
from megatron_sao.rollout.engine_pool import EnginePool
from megatron_sao.rollout.environment import Environment, Task, make_environment
from megatron_sao.rollout.greedy import GREEDY_FILE, MAX_PROMPTS, MAX_TOKENS, GreedyRecord, continue_greedily
from megatron_sao.rollout.prompts import PromptSource, read_prompt_file, without_overlong
from megatron_sao.schedule.ledger import Ledger
from megatron_sao.schedule.loop import Scheduler, ScheduleSettings
from megatron_sao.transport.channel import SchedulerChannel

log = logging.getLogger(__name__)

EVAL_SEED = 0  # held-out prompts are the same for every run.seed, so that runs can be compared

_ABOUT = "Serve one trainer: prompts, rollouts on running engines, freshness, and the moment of each weight push."
_VALUES = {
    "run-folder": "folder of this run; must exist",
    "model": "HF folder whose tokenizer renders the prompts",
    "engines": "addresses of the running engines, separated by commas: http://127.0.0.1:8000",
    "host": "address to listen on for the trainer (default 127.0.0.1)",
}
_SHOWN = {"pass": "rollout/pass_rate", "lag": "lag/mean", "wait_s": "schedule/wait_s", "ev": "value/explained_variance"}


def main(argv: Sequence[str]) -> None:
    """Run the scheduler until the trainer says Goodbye."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s: %(message)s")
    options = parse_options(argv, about=_ABOUT, values=_VALUES)
    config = options.load_config()
    if "dry-run" in options.switches:
        print(describe(config))
        return
    run_folder, model, engines = _required(options)
    ledger_path = run_folder / LEDGER_FILE
    if ledger_path.exists():
        raise ConfigError(
            f"{run_folder} already holds a run ({LEDGER_FILE}); choose another run.name or remove the folder"
        )
    try:
        asyncio.run(_run(config, run_folder, model, engines, options.values.get("host", "127.0.0.1")))
    except asyncio.CancelledError as error:
        raise ProtocolError("the scheduler was stopped before the run was over") from error


async def _run(config: Config, run_folder: Path, model: Path, engine_urls: list[str], host: str) -> None:
    _turn_termination_into_cancellation()
    chat = Chat(_load_tokenizer(model))
    environment = make_environment(config.task.environment, config.task.params)
    tasks = await _tasks(config, environment, chat)
    prompts, eval_prompts = _prompts(config, environment, tasks)
    engines = _engine_pool(config, engine_urls)
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
        await _wait_for_engines(engines, config.engine.start_timeout_s)  # before anything is written
    except BaseException:
        await channel.close()
        await engines.close()
        raise
    ledger = Ledger(run_folder / LEDGER_FILE)
    observer = RunObserver(config, run_folder, chat)
    outcome = "stopped from outside"
    try:
        scheduler = Scheduler(
            channel=channel,
            engines=engines,
            prompts=prompts,
            eval_prompts=eval_prompts,
            run_episode=lambda prompt: run_episode(prompt, environment, engines, chat, episode),
            ledger=ledger,
            settings=_settings(config),
            observer=observer,
        )
        _write_json(run_folder / ADDRESS_FILE, {"address": channel.address})
        try:
            await scheduler.run()
            version = scheduler.policy_version
            await _record_greedy_outputs(config, run_folder, engines, version, chat, environment, eval_prompts)
            outcome = "finished"
        except Exception as error:
            outcome = str(error)
            raise
        finally:
            _write_json(run_folder / SUMMARY_FILE, {"outcome": outcome, **scheduler.summary()})
    finally:
        observer.close()
        ledger.close()
        await channel.close()
        await engines.close()


def _engine_pool(config: Config, urls: list[str]) -> EnginePool:
    engine, push = config.engine, config.push
    pushes_s = 2 * push.attempts * push.timeout_s  # that a request may have to wait through
    clients = [
        EngineClient(url, request_timeout_s=engine.request_timeout_s + pushes_s, push_timeout_s=push.timeout_s)
        for url in urls
    ]
    return EnginePool(
        clients, wait_timeout_s=engine.start_timeout_s + pushes_s, return_timeout_s=engine.start_timeout_s
    )


async def _wait_for_engines(engines: EnginePool, timeout_s: float) -> None:
    """Return when all engines answer, or after `timeout_s` when some do: the others may join later.

    Raises: EngineError when none answers within `timeout_s`.
    """
    deadline = time.monotonic() + timeout_s
    while True:
        answering = await engines.answering()
        absent = ", ".join(engine.url for engine in engines.engines if engine.url not in answering)
        if not absent:
            return
        if time.monotonic() > deadline:
            break
        await asyncio.sleep(0.2)
    if not answering:
        raise EngineError(f"no answer from the engine at {absent}; its log is in the run folder")
    log.warning("the run begins without the engine at %s", absent)


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


class RunObserver:
    """Writes metrics, trajectories and the picture into the run folder, and shows progress."""

    def __init__(self, config: Config, run_folder: Path, chat: Chat) -> None:
        self._config = config
        self._run_folder = run_folder
        self._sink = MetricsSink(run_folder)
        self._decode = lambda ids: chat.tokenizer.decode(ids, skip_special_tokens=False)
        self._progress = Progress()
        self._progress.__enter__()
        self._totals = {
            PRETRAIN: 1 + derived_numbers(config)["pretrain_updates"],  # one report before the first update
            WARMUP: config.value.warmup_steps,
            TRAIN: config.run.steps,
        }
        self._num_steps: dict[str, int] = {}

    def waited(self, phase: str, num_ready: int, num_needed: int) -> None:
        """Only long waits are worth a bar: pretraining's trajectories and evaluations."""
        if phase == PRETRAIN or phase.startswith("eval"):
            self._progress.update(f"{phase}: episodes", num_ready, num_needed)

    def stepped(self, report: StepReport, metrics: dict[str, float], trajectories: Sequence[Trajectory]) -> None:
        self._sink.log(report.step, report.phase, metrics)
        every = self._config.run.trajectories_every
        if trajectories and every and report.step % every == 0:
            self._write_trajectories(trajectories, report.phase, report.step)
        done = self._num_steps[report.phase] = self._num_steps.get(report.phase, 0) + 1
        shown = {label: metrics[name] for label, name in _SHOWN.items() if name in metrics}
        self._progress.update(report.phase, done, max(self._totals.get(report.phase, done), done), shown)

    def evaluated(self, result: EvalResult, policy_version: int, trajectories: Sequence[Trajectory]) -> None:
        self._sink.log(
            policy_version,
            "eval",
            {
                "eval/name": result.name,
                "eval/pass_rate": result.pass_rate,
                "eval/mean_reward": result.mean_reward,
                "eval/num_episodes": result.num_episodes,
            },
        )
        self._write_trajectories(trajectories, f"eval-{result.name}", policy_version)
        self._progress.say(f"held-out prompts, {result.name}: pass rate {result.pass_rate:.3f} "
                           f"({result.num_episodes} episodes, version {policy_version})")

    def position(self) -> dict[str, Any]:
        return {"metrics": self._sink.position()}

    def close(self) -> None:
        """Effect: files are complete and the picture is drawn; a fault of the picture is only logged."""
        self._progress.__exit__()
        self._sink.close()
        try:
            write_report(self._run_folder, title=f"{self._config.run.name}: {self._config.task.environment}, "
                                                 f"{self._config.algo.arm}, seed {self._config.run.seed}")
        except Exception:
            log.exception("the report of %s could not be drawn", self._run_folder)

    def _write_trajectories(self, trajectories: Sequence[Trajectory], phase: str, step: int) -> None:
        path = trajectories_path(self._run_folder, phase, step)
        write_trajectories(path, trajectories, phase=phase, step=step, decode=self._decode)


def _required(options: Options) -> tuple[Path, Path, list[str]]:
    missing = [f"--{name}" for name in ("run-folder", "model", "engines") if not options.values.get(name)]
    if missing:
        raise ConfigError(f"the scheduler needs {', '.join(missing)}; --help says what they are")
    run_folder, model = Path(options.values["run-folder"]), Path(options.values["model"])
    for path in (run_folder, model):
        if not path.is_dir():
            raise ConfigError(f"{path} is no folder")
    return run_folder, model, [url for url in options.values["engines"].split(",") if url]


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


def _settings(config: Config) -> ScheduleSettings:
    return ScheduleSettings(
        batch_trajectories=config.schedule.batch_trajectories,
        max_staleness=config.schedule.max_staleness,
        max_in_flight=derived_numbers(config)["max_in_flight"],
        batch_timeout_s=config.schedule.batch_timeout_s,
        push_timeout_s=config.push.timeout_s,
        push_backend=config.push.backend,
        push_attempts=config.push.attempts,
    )


def _turn_termination_into_cancellation() -> None:
    task = asyncio.current_task()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)


def _write_json(path: Path, content: dict[str, Any]) -> None:
    """Effect: `path` is whole or absent."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    temporary.replace(path)


if __name__ == "__main__":
    run_command(main)
