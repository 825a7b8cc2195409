"""What a run shows of itself: numbers, trajectories, the picture, and progress on the terminal."""

import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron_sao.checkpoints import config_hash
from megatron_sao.config import Config, derived_numbers, to_toml
from megatron_sao.observe.metrics import CONFIG_HASH, METRICS_FILE, MetricsSink, read_metrics
from megatron_sao.observe.progress import Progress
from megatron_sao.observe.report import write_report
from megatron_sao.observe.trajectories import remove_trajectories_after, trajectories_path, write_trajectories
from megatron_sao.records import PRETRAIN, TRAIN, WARMUP, EvalResult, StepReport, Trajectory
from megatron_sao.rollout.chat import Chat

log = logging.getLogger(__name__)

_SHOWN = {"pass": "rollout/pass_rate", "lag": "lag/mean", "wait_s": "schedule/wait_s", "ev": "value/explained_variance"}


class RunObserver:
    """Writes metrics, trajectories and the picture into the run folder, and shows progress."""

    def __init__(
        self, config: Config, run_folder: Path, chat: Chat, go_on_from: Mapping[str, Any] | None = None
    ) -> None:
        """Args:
            go_on_from: what `position` gave, for a run that is resumed. Effect: what was written later is cut off.
        """
        self._config = config
        self._config_hash = config_hash(to_toml(config))
        self._run_folder = run_folder
        self._sink = MetricsSink(run_folder, go_on_from["metrics"] if go_on_from else None)
        self._last_files: dict[str, int] = dict(go_on_from["trajectories"]) if go_on_from else {}  # step by phase
        if go_on_from:
            remove_trajectories_after(run_folder, self._last_files)
        self._decode = lambda ids: chat.tokenizer.decode(ids, skip_special_tokens=False)
        self._progress = Progress()
        self._progress.__enter__()
        self._totals = {
            PRETRAIN: 1 + derived_numbers(config)["pretrain_updates"],  # one report before the first update
            WARMUP: config.value.warmup_steps,
            TRAIN: config.run.steps,
        }
        self._num_steps = Counter(record["phase"] for record in read_metrics(run_folder / METRICS_FILE))

    def waited(self, phase: str, num_ready: int, num_needed: int) -> None:
        """Only long waits are worth a bar: pretraining's trajectories and evaluations."""
        if phase == PRETRAIN or phase.startswith("eval"):
            self._progress.update(f"{phase}: episodes", num_ready, num_needed)

    def stepped(self, report: StepReport, metrics: dict[str, float], trajectories: Sequence[Trajectory]) -> None:
        self._sink.log(report.step, report.phase, metrics | {CONFIG_HASH: self._config_hash})
        every = self._config.run.trajectories_every
        if trajectories and every and report.step % every == 0:
            self._write_trajectories(trajectories, report.phase, report.step)
        self._num_steps[report.phase] += 1
        done = self._num_steps[report.phase]
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
        """What a resumed run needs, to go on writing from here."""
        return {"metrics": self._sink.position(), "trajectories": dict(self._last_files)}

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
        self._last_files[phase] = step
