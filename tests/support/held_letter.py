"""FirstLetter with files that, while they exist, halt what imports it at a point where a test wants to look at it:

`hold_file`         episodes do not begin, so that the trainer waits for a batch;
`hold_save_file`    the scheduler does not go on after the ledger of a checkpoint; the same name with the suffix
                    ".reached" then says that it is there.
"""

import asyncio
import sys
import time
from pathlib import Path

from megatron_sao.rollout.environment import Message, Task
from megatron_sao.schedule.snapshot import TRAJECTORIES_FILE
from tests.support.first_letter import FirstLetter, FirstLetterEpisode


class HeldLetter(FirstLetter):
    def __init__(self, hold_file: str, hold_save_file: str) -> None:
        self._hold_file = Path(hold_file)
        _hold_before_opening(TRAJECTORIES_FILE, Path(hold_save_file))

    def start(self, task: Task) -> "HeldLetterEpisode":
        return HeldLetterEpisode(task, self._hold_file)


class HeldLetterEpisode(FirstLetterEpisode):
    def __init__(self, task: Task, hold_file: Path) -> None:
        super().__init__(task)
        self._hold_file = hold_file

    async def begin(self) -> list[Message]:
        while self._hold_file.exists():
            await asyncio.sleep(0.05)
        return await super().begin()


def _hold_before_opening(name: str, hold_file: Path) -> None:
    """Effect: in this process, whoever opens a file of this name to write it halts while `hold_file` exists."""

    def audit(event: str, arguments: tuple) -> None:
        if event != "open" or not str(arguments[0]).endswith(f"/{name}") or "w" not in (arguments[1] or ""):
            return
        while hold_file.exists():
            hold_file.with_suffix(".reached").touch()
            time.sleep(0.05)

    sys.addaudithook(audit)
