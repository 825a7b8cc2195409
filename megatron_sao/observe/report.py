"""The picture of a run: six small charts from its metrics.jsonl.

Raw values are points, a running mean is the line. A chart whose numbers are absent says so instead of being left out,
so that pictures of different runs lie side by side.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np

matplotlib.use("Agg")  # no display is needed, or looked for

from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from megatron_sao.observe.metrics import METRICS_FILE, read_metrics
from megatron_sao.records import TRAIN, WARMUP

REPORT_FILE = "report.png"

_INK, _MUTED, _GRID = "#22252a", "#767b85", "#e6e8ec"
_COLOURS = ("#2460a7", "#d1702a", "#3a8f5c")


@dataclass(frozen=True)
class _Series:
    """One curve of a chart: the first of `names` that the run has."""

    label: str
    names: tuple[str, ...]


@dataclass(frozen=True)
class _Chart:
    title: str
    axis: str
    series: tuple[_Series, ...]
    limits: tuple[float | None, float | None] = (None, None)
    held_out: str | None = None  # metric of the evaluations, drawn as diamonds
    shows_warmup: bool = False  # value phases belong in it, drawn before update 0


_CHARTS = (
    _Chart(
        "Reward",
        "mean reward",
        (_Series("training prompts", ("rollout/reward_mean",)),),
        held_out="eval/mean_reward",
    ),
    _Chart(
        "Pass rate",
        "share of episodes",
        (_Series("training prompts", ("rollout/pass_rate",)),),
        limits=(0.0, 1.0),
        held_out="eval/pass_rate",
    ),
    _Chart(
        "Lag",
        "pushes behind",
        (_Series("mean of oldest tokens", ("lag/mean",)), _Series("largest", ("lag/max",))),
        limits=(0.0, None),
    ),
    _Chart(
        "Rejected tokens",
        "share of action tokens",
        (
            _Series("ratio too low", ("dis/rejected_low",)),
            _Series("ratio too high", ("dis/rejected_high",)),
        ),
        limits=(0.0, None),
    ),
    _Chart(
        "Explained variance of the value model",
        "explained variance",
        (_Series("training trajectories", ("value/explained_variance",)),),
        limits=(None, 1.0),
        shows_warmup=True,
    ),
    _Chart(
        "Response length",
        "action tokens",
        (_Series("mean", ("rollout/action_tokens_mean",)), _Series("longest", ("rollout/action_tokens_max",))),
        limits=(0.0, None),
    ),
)


def write_report(run_folder: Path | str, *, title: str) -> Path:
    """Draw runs/NAME/report.png from runs/NAME/metrics.jsonl.

    Args:
        run_folder: holds the metrics; gets the picture.
        title: stands above the charts.

    Returns:
        The picture's path.

    Effect: an older picture is replaced.
    """
    run_folder = Path(run_folder)
    records = read_metrics(run_folder / METRICS_FILE)
    figure, axes = plt.subplots(2, 3, figsize=(15, 8), dpi=110, facecolor="white")
    try:
        for ax, chart in zip(axes.flat, _CHARTS, strict=True):
            _draw(ax, chart, records)
        figure.suptitle(title, x=0.055, y=0.975, ha="left", fontsize=15, fontweight="bold", color=_INK)
        legend = "points: each step    line: running mean    diamonds: held-out prompts"
        figure.text(0.055, 0.915, legend, color=_MUTED, fontsize=10)
        figure.subplots_adjust(left=0.055, right=0.985, top=0.845, bottom=0.075, wspace=0.22, hspace=0.38)
        path = run_folder / REPORT_FILE
        temporary = run_folder / f".{REPORT_FILE}.part"
        figure.savefig(temporary, format="png")
        temporary.replace(path)
    finally:
        plt.close(figure)
    return path


def running_mean(values: Sequence[float], window: int) -> np.ndarray:
    """Mean over the `window` entries around each one, shorter at the ends; NaN entries are left out of it.

    Args:
        values: [n], may hold NaN and infinities (both left out).
        window: entries, >= 1.

    Returns:
        float64 [n]; NaN where the window holds no finite value.
    """
    values = np.asarray(values, np.float64)
    if not len(values):
        return values
    is_finite = np.isfinite(values)
    kernel = np.ones(window)
    sums = np.convolve(np.where(is_finite, values, 0.0), kernel, "full")[window // 2 :][: len(values)]
    counts = np.convolve(is_finite.astype(float), kernel, "full")[window // 2 :][: len(values)]
    return np.divide(sums, counts, out=np.full(len(values), np.nan), where=counts > 0)


def _draw(ax: Axes, chart: _Chart, records: list[dict[str, Any]]) -> None:
    _dress(ax, chart)
    num_drawn = 0
    for series, colour in zip(chart.series, _COLOURS):
        steps, values = _points(records, series.names, chart.shows_warmup)
        if not len(steps):
            continue
        num_drawn += 1
        ax.plot(steps, values, ".", color=colour, alpha=0.45, markersize=5, markeredgewidth=0)
        ax.plot(steps, running_mean(values, max(1, len(values) // 12)), color=colour, linewidth=2, label=series.label)
        if chart.shows_warmup and steps[0] < 0:
            ax.axvline(-0.5, color=_MUTED, linewidth=0.8, linestyle=(0, (4, 3)))
            ax.annotate("left of the line: value warm-up", (-0.5, 0.95), xycoords=("data", "axes fraction"),
                        xytext=(5, 0), textcoords="offset points", fontsize=8, color=_MUTED)
    if chart.held_out:
        steps, values = _held_out(records, chart.held_out)
        if len(steps):
            num_drawn += 1
            ax.plot(steps, values, "D", color=_COLOURS[1], markersize=7, markeredgecolor="white",
                    label="held-out prompts", zorder=5, clip_on=False)
            for step, value in zip(steps, values):
                ax.annotate(f"{value:.2f}", (step, value), xytext=(0, 9), textcoords="offset points", ha="center",
                            fontsize=8.5, color=_INK, annotation_clip=False)
    if not num_drawn:
        ax.text(0.5, 0.5, "not reported", transform=ax.transAxes, ha="center", va="center", color=_MUTED)
    elif len(ax.get_legend_handles_labels()[1]) > 1:
        ax.legend(loc="lower right", bbox_to_anchor=(1.0, 1.0), ncols=2, frameon=False, fontsize=9, labelcolor=_INK,
                  handlelength=1.2, columnspacing=1.2, borderaxespad=0.3)
    _limit(ax, chart)


def _dress(ax: Axes, chart: _Chart) -> None:
    ax.set_title(chart.title, loc="left", fontsize=11.5, fontweight="bold", color=_INK, pad=9)
    ax.set_xlabel("policy updates", fontsize=9, color=_MUTED)
    ax.set_ylabel(chart.axis, fontsize=9, color=_MUTED)
    ax.grid(axis="y", color=_GRID, linewidth=0.8)
    ax.set_axisbelow(True)
    ax.xaxis.set_major_locator(MaxNLocator(nbins=8, integer=True))
    ax.tick_params(colors=_MUTED, labelsize=9, length=0)
    for side in ("top", "right", "left"):
        ax.spines[side].set_visible(False)
    ax.spines["bottom"].set_color(_MUTED)


def _limit(ax: Axes, chart: _Chart) -> None:
    low, high = chart.limits
    margin = 0.04 * ((high or ax.get_ylim()[1]) - (low if low is not None else ax.get_ylim()[0]))
    if low is not None:
        ax.set_ylim(bottom=low - margin)
    if high is not None:
        ax.set_ylim(top=high + margin)


def _points(
    records: list[dict[str, Any]], names: tuple[str, ...], with_warmup: bool
) -> tuple[np.ndarray, np.ndarray]:
    """(policy versions, values) of the training phase; the steps of a value warm-up come before it, as -1, -2, ..."""
    name = next((name for name in names if any(name in record for record in records)), None)
    trained = [
        (record.get("schedule/policy_version", record["step"]), record[name])
        for record in records
        if record["phase"] == TRAIN and name in record
    ]
    warmed = [r[name] for r in records if r["phase"] == WARMUP and name in r] if with_warmup else []
    points = [(index - len(warmed), value) for index, value in enumerate(warmed)] + trained
    if not points:
        return np.empty(0), np.empty(0)
    steps, values = zip(*points)
    return np.array(steps, float), np.array(values, float)


def _held_out(records: list[dict[str, Any]], name: str) -> tuple[np.ndarray, np.ndarray]:
    points = [(record["step"], record[name]) for record in records if record["phase"] == "eval" and name in record]
    steps, values = zip(*points) if points else ((), ())
    return np.array(steps, float), np.array(values, float)
