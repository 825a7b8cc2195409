"""How far a run is: one live bar per phase on a terminal, plain lines anywhere else (a log file, SLURM)."""

import time
from collections.abc import Mapping
from typing import Self

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    Progress as RichProgress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

from megatron_sao.models.new_folder import size_text

LINE_EVERY_S = 10.0  # plain lines: at most this often for the same phase, and always for the last


class Progress:
    """Bars or lines, decided once by what `console` writes to. Use as a context manager."""

    def __init__(self, console: Console | None = None) -> None:
        self._console = console or Console()
        self._bars: RichProgress | None = None
        if self._console.is_terminal:
            self._bars = RichProgress(
                TextColumn("{task.description:<16}"),
                BarColumn(),
                MofNCompleteColumn(),
                TimeElapsedColumn(),
                TextColumn("{task.fields[note]}"),
                console=self._console,
            )
        self._task_ids: dict[str, int] = {}
        self._lines_s: dict[str, float] = {}

    def __enter__(self) -> Self:
        if self._bars:
            self._bars.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._bars:
            self._bars.stop()

    def update(self, phase: str, done: int, total: int, metrics: Mapping[str, float] | None = None) -> None:
        """Say that `done` of `total` of a phase are over. Effect: moves its bar, or prints a line now and then.

        Args:
            phase: what is counted; a new name begins a new bar.
            done, total: counts; `done` may fall back to 0 when a phase begins anew.
            metrics: a few numbers to show beside it.
        """
        note = "  ".join(f"{name} {value:.3g}" for name, value in (metrics or {}).items())
        if self._bars:
            if phase not in self._task_ids:
                self._task_ids[phase] = self._bars.add_task(phase, total=total, note=note)
            self._bars.update(self._task_ids[phase], completed=done, total=total, note=note)
            return
        now_s = time.monotonic()
        if done >= total or metrics or now_s - self._lines_s.get(phase, float("-inf")) >= LINE_EVERY_S:
            self._lines_s[phase] = now_s
            self._console.print(f"{phase} {done}/{total}  {note}".rstrip(), highlight=False, soft_wrap=True)

    def say(self, text: str) -> None:
        """Print one line above the bars."""
        self._console.print(text, highlight=False, markup=False, soft_wrap=True)


class BytesProgress:
    """One bar for work that is counted in bytes, with the time left; lines where there is no terminal.

    Use as a context manager.
    """

    def __init__(self, what: str, console: Console | None = None) -> None:
        self._what, self._console = what, console or Console()
        self._bar: RichProgress | None = None
        if self._console.is_terminal:
            columns = (BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
            self._bar = RichProgress(TextColumn(what), *columns, console=self._console)
            self._task = self._bar.add_task(what, total=None)
        self._begin_s = self._line_s = time.monotonic()

    def __enter__(self) -> Self:
        if self._bar:
            self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar:
            self._bar.stop()

    def update(self, done: int, total: int) -> None:
        """Say that `done` of `total` bytes are over. Effect: moves the bar, or prints a line now and then."""
        if self._bar:
            self._bar.update(self._task, completed=done, total=total)
            return
        now_s = time.monotonic()
        if done and (done >= total or now_s - self._line_s >= LINE_EVERY_S):
            self._line_s = now_s
            left_s = (now_s - self._begin_s) * (total - done) / done
            text = f"{self._what} {size_text(done)} of {size_text(total)}, about {left_s:.0f} s left"
            self._console.print(text, highlight=False, soft_wrap=True)
